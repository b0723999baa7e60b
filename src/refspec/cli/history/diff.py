"""`refspec history diff`: what changed between two commits."""

from __future__ import annotations

from typing import Annotated

import typer

from refspec.cli.history.options import ClonePath, Json, Pager, repository_path, source_json, source_of
from refspec.cli.history.output import paged, print_json, shown
from refspec.cli.history.patch_view import file_json, print_files, print_patches
from refspec.cli.wording import plural
from refspec.history.catalogue import DIRECTORY
from refspec.history.clone import HistoryError
from refspec.history.patches import compare
from refspec.history.revisions import find

Commit = Annotated[
    str, typer.Argument(help="A revision as git takes it, a release as 0.4.6, or a pull request as 26997 or #26997.")
]


def diff(
    a: Commit,
    b: Commit,
    paths: Annotated[
        list[str] | None,
        typer.Option(
            "--path",
            help="A file or folder, by its whole path or below the folder, which is the default; '.' is all. May be "
            "repeated.",
        ),
    ] = None,
    stat: Annotated[bool, typer.Option("--stat", help="Files and lines, without the diff.")] = False,
    clone: ClonePath = None,
    pager: Pager = True,
    as_json: Json = False,
) -> None:
    """What changed in the folder from A to B: its files, and the diff. Needs a clone."""
    given = [repository_path(path) for path in paths or [DIRECTORY]]
    source = source_of(clone, as_json=as_json)
    asked = source.needed("a diff")
    old, new = find(source, a), find(source, b)
    for named in (old, new):
        asked.commit(named.hash)  # the catalogue may know one that the clone lacks
    below = [f"{DIRECTORY}/{path}" for path in given if path != DIRECTORY]
    found = compare(asked, old.hash, new.hash, [] if "." in given else [*given, *below])
    ends = [f"{end}:{path}" for end in (old.hash, new.hash) for path in (*given, *below)]
    if not found.files and "." not in given and not any(asked.check(*ends)):
        raise HistoryError(f"neither revision has {shown(' or '.join(given))}")
    added, deleted = found.lines() if found.whole else (None, None)
    if as_json:
        files = [file_json(file) for file in found.files]
        if stat:
            for file in files:
                del file["patch"]
        print_json(
            {
                **source_json(source),
                "from": {"word": old.word, "reading": old.reading, "hash": old.hash, "note": old.note},
                "to": {"word": new.word, "reading": new.reading, "hash": new.hash, "note": new.note},
                "paths": given,
                "lines_added": added,
                "lines_deleted": deleted,
                "files": files,
            }
        )
    else:
        with paged(pager) as out:
            for named in (old, new):
                if named.note:
                    out.print(shown(named.note), style="bold", soft_wrap=True)
            lines = f", +{added} -{deleted}" if found.whole else ""
            what = f"{shown(old.word)} ({old.hash[:10]}) to {shown(new.word)} ({new.hash[:10]})"
            out.print(
                f"{what}, {', '.join(map(shown, given))}: {plural(len(found.files), 'file')}{lines}", soft_wrap=True
            )
            print_files(out, found.files, DIRECTORY if given == [DIRECTORY] else "")
            if found.files and found.whole and not stat:
                out.print()
                print_patches(out, found.files)
    if not found.whole:
        lacks = "this clone lacks contents of these files, so lines and the diff are not known"
        typer.echo(f"refspec: {shown(lacks + asked.remedy_for_contents())}", err=True)
        raise typer.Exit(1)
