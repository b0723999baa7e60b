"""`refspec history follow`: the life of a file."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from refspec.cli.history.events import Row, below, origin, print_events, say_begins
from refspec.cli.history.options import CatalogueOnly, ClonePath, Json, Pager, source_json, source_of
from refspec.cli.history.output import paged, print_json, shown
from refspec.cli.wording import plural
from refspec.history.catalogue import DIRECTORY, reach

if TYPE_CHECKING:
    from rich.console import Console

    from refspec.history.file_life import FileEvent, FileLife


def follow(
    file: Annotated[str, typer.Argument(metavar="FILE", help="In the folder, as eagle_info.py, or a whole path.")],
    clone: ClonePath = None,
    catalogue_only: CatalogueOnly = False,
    pager: Pager = True,
    as_json: Json = False,
) -> None:
    """The life of a file through all its names: born, changed, renamed, split, deleted.

    A split is told where a good part of the lines that a commit took from the file appears in another, or the other way
    round. Needs a clone for splits and numbers of lines; the rest is known without one.
    """
    from refspec.history.file_life import follow as read_life

    source = source_of(clone, catalogue_only, as_json)
    life = read_life(source.clone, os.fsencode(file).decode(errors="replace"))
    if as_json:
        print_json(source_json(source) | asdict(life))
    else:
        with paged(pager) as out:
            _print(out, life, everywhere=source.clone is not None)
            if source.clone:
                out.print(origin(source.clone), style="dim", soft_wrap=True)
            else:
                said = f"main up to {reach().date}, from the embedded catalogue ({source.why}): splits need a clone"
                out.print(said, style="dim", soft_wrap=True)
    if source.clone and not life.contents:
        typer.echo(
            "refspec: this clone lacks contents of files, so splits, numbers of lines and renames with changes may be "
            f"missing{source.clone.remedy_for_contents()}",
            err=True,
        )
    if source.clone and life.begins:
        say_begins(source.clone, life.events[0].hash)
    if source.clone and (life.begins or not life.contents):
        raise typer.Exit(1)


def _print(out: Console, life: FileLife, everywhere: bool) -> None:
    """everywhere: is what happened beyond the folder known too?"""
    from rich.text import Text

    out.print(Text(below(life.paths[-1], DIRECTORY), "bold"), soft_wrap=True)
    for path in life.paths[-2::-1]:
        out.print(f"before: {below(path, DIRECTORY)}", soft_wrap=True)
    first, last = life.events[0], life.events[-1]
    end = "still there" if life.alive else f"deleted {last.author_date[:10]}"
    if not everywhere and not life.paths[-1].startswith(f"{DIRECTORY}/"):
        end = f"left the folder {last.author_date[:10]} (what became of it there, a clone knows)"
    out.print(f"{first.what} {first.author_date[:10]}, {plural(len(life.events), 'commit')}, {end}", soft_wrap=True)
    for names in life.others:
        became = f", which became {', then '.join(below(name, DIRECTORY) for name in names[1:])}" if names[1:] else ""
        out.print(f"another file had that name too: {shown(below(names[0], DIRECTORY))}{became}", soft_wrap=True)
    out.print()
    print_events(out, [_row(event) for event in life.events])
    out.print()


def _row(event: FileEvent) -> Row:
    notes = []
    if event.old_path is not None:
        notes.append(f"{below(event.old_path, DIRECTORY)} -> {below(event.path, DIRECTORY)}")
    notes += [f"split: {flow.lines} lines went to {below(flow.path, DIRECTORY)}" for flow in event.went_to]
    notes += [f"split: {flow.lines} lines came from {below(flow.path, DIRECTORY)}" for flow in event.came_from]
    return Row(
        event.author_date[:10],
        event.hash,
        event.what,
        event.lines_added,
        event.lines_deleted,
        event.subject,
        notes,
    )
