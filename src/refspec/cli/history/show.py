"""`refspec history show`: one commit."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refspec.cli.history.commit_view import pr_link
from refspec.cli.history.options import CatalogueOnly, ClonePath, Json, Pager, source_json, source_of
from refspec.cli.history.output import paged, print_json, shown, wrapped
from refspec.cli.history.patch_view import file_json, print_files, print_patches
from refspec.cli.wording import plural
from refspec.history.catalogue import DIRECTORY
from refspec.history.revisions import Named, find
from refspec.history.show import Details, details
from refspec.history.sources import Source

if TYPE_CHECKING:
    from rich.console import Console

KINDS = {
    "root": "the first of its line: compared with nothing",
    "merge": "a merge: compared with the first of its parents",
    "boundary": "its parents are not in this clone",
}


def show(
    commit: Annotated[
        str,
        typer.Argument(
            metavar="REV|PR",
            help="A revision as git takes it, a release as 0.4.6, or a pull request as 26997 or #26997.",
        ),
    ],
    stat: Annotated[bool, typer.Option("--stat", help="Files and lines, without the diff.")] = False,
    no_diff: Annotated[
        bool, typer.Option("--no-diff", help="Files without lines or diff; needs no contents of files.")
    ] = False,
    all_files: Annotated[bool, typer.Option("--all-files", help="Files outside the folder too.")] = False,
    clone: ClonePath = None,
    catalogue_only: CatalogueOnly = False,
    pager: Pager = True,
    as_json: Json = False,
) -> None:
    """One commit: its message, its files, its diff, the releases that held it first, and what it teaches."""
    source = source_of(clone, catalogue_only, as_json)
    named = find(source, commit)
    found = details(source, named, contents=not no_diff, all_files=all_files)
    if as_json:
        print_json(_document(source, named, found, patches=not (stat or no_diff)))
    else:
        with paged(pager) as out:
            _print(out, named, found, patches=not (stat or no_diff))
    for lack in found.lacks:
        typer.echo(f"refspec: {shown(lack)}", err=True)
    if found.lacks:
        raise typer.Exit(1)


def _document(source: Source, named: Named, found: Details, patches: bool) -> dict[str, Any]:
    files = found.comparison.files if found.comparison else None
    document = (
        source_json(source)
        | asdict(found)
        | {
            "word": named.word,
            "reading": named.reading,
            "note": named.note,
            "url": pr_link(found.pr) if found.pr else None,
            "files": None if files is None else [file_json(file) for file in files],
            "files_elsewhere": found.comparison.elsewhere if found.comparison else None,
        }
    )
    del document["comparison"]
    if not patches:
        for file in document["files"] or ():
            del file["patch"]
    return document


def _print(out: Console, named: Named, found: Details, patches: bool) -> None:
    from rich.style import Style
    from rich.text import Text

    def line(label: str, *parts: str | tuple[str, Style]) -> None:
        out.print(Text(f"{label:11}").append_text(Text.assemble(*parts)), soft_wrap=True)

    def prose(label: str, text: str) -> None:
        for n, part in enumerate(wrapped(text, max(out.width - 11, 20))):
            line("" if n else label, part)

    if named.note:
        out.print(shown(named.note), style="bold")
    line("commit", (found.hash, Style(color="yellow")))
    if found.pr:
        line("PR", (pr_link(found.pr), Style(color="blue", link=pr_link(found.pr))))
    line("author", _time(found.author_date), f"  {shown(found.author)}" if found.author else "")
    if found.committer_date:
        line("committed", _time(found.committer_date))
    if found.kind in KINDS:
        prose("kind", KINDS[found.kind])
    prose("release", _releases(found))
    if found.story:
        prose(f"story {found.story.label}", f"{found.story.why} (refspec history story {found.story.label})")
    out.print()
    out.print(Text(f"    {shown(found.subject)}", "bold"), soft_wrap=True)
    for text in ("", *(found.body or "").strip("\n").split("\n")) if found.body else ():
        out.print(f"    {shown(text)}".rstrip(), soft_wrap=True)
    out.print()
    _print_files(out, found)
    if patches and found.comparison and found.comparison.whole and found.comparison.files:
        out.print()
        print_patches(out, found.comparison.files)
    if found.kind == "unknown" and not found.lacks:
        out.print("\nFrom the catalogue; a clone has the message and the diff too.", style="dim")


def _print_files(out: Console, found: Details) -> None:
    lines = "" if found.lines_added is None else f", +{found.lines_added} -{found.lines_deleted}"
    if found.comparison is None:
        if found.kind == "unknown":
            out.print("Which files it changed is not in the catalogue.", soft_wrap=True)
        return
    files = found.comparison.files
    where = f" in {DIRECTORY}" if found.comparison.elsewhere is not None or found.kind == "unknown" else ""
    out.print(f"{plural(len(files), 'file')}{where}{lines}", soft_wrap=True)
    print_files(out, files, DIRECTORY if where else "")
    if found.comparison.elsewhere:
        out.print(f"{plural(found.comparison.elsewhere, 'file')} elsewhere (--all-files)", style="dim", soft_wrap=True)


def _time(date: str) -> str:
    """ISO 8601, easier to read."""
    return f"{date[:10]} {date[11:19]} {date[19:]}".rstrip()


def _releases(found: Details) -> str:
    releases = found.releases
    if not releases.first:
        return releases.unknown
    return f"{shown(releases.first)} was the first with it" + (
        f", {shown(releases.final)} the first that is no candidate" if releases.final else ""
    )
