"""`refspec history lines`: every change of one function."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refspec.cli.command_line import UsageError
from refspec.cli.history.events import event_json, notes_of, origin, say_begins, say_unseen, word_of
from refspec.cli.history.options import ClonePath, Json, Pager, source_json, source_of
from refspec.cli.history.output import paged, print_json, shown
from refspec.cli.history.patch_view import coloured
from refspec.cli.wording import plural
from refspec.history.catalogue import DIRECTORY
from refspec.history.clone import HistoryError
from refspec.history.sources import Source

if TYPE_CHECKING:
    from rich.console import Console

    from refspec.history.functions import FunctionLines


def lines(
    function: Annotated[
        str,
        typer.Argument(
            metavar="FILE:NAME", help="As eagle_worker_v2.py:EAGLEWorkerV2.verify; FILE may be a whole path."
        ),
    ],
    revision: Annotated[
        str | None, typer.Option("--from", metavar="REV", help="Walk back from here; default: the main line's end.")
    ] = None,
    clone: ClonePath = None,
    pager: Pager = True,
    as_json: Json = False,
) -> None:
    """Every change of one function, class, method or name, the newest first, with its diff.

    It is found anew in each version, and followed from file to file within its folder. Hunks are numbered by lines
    of the file. Needs a clone with contents of files.
    """
    from refspec.history.functions import parts_of, read_lines

    try:
        parts_of(function)
    except HistoryError as error:
        raise UsageError(str(error)) from None
    source = source_of(clone, as_json=as_json)
    asked = source.needed("lines")
    found = read_lines(asked, function, revision)
    if as_json:
        print_json(_document(source, found))
    else:
        with paged(pager) as out:
            _print(out, found)
            out.print(origin(asked), style="dim", soft_wrap=True)
    if found.begins:
        say_begins(asked, found.changes[-1][0].hash)
    if found.unseen:
        say_unseen(asked, [found.changes[-1][0].hash])
    if found.begins or found.unseen:
        raise typer.Exit(1)


def _document(source: Source, found: FunctionLines) -> dict[str, Any]:
    return {
        **source_json(source),
        "place": asdict(found.place),
        "commit": found.commit,
        "ranges": found.ranges,
        "changes": [event_json(event) | {"diff": diff} for event, diff in found.changes],
        "begins": found.begins,
        "unseen": found.unseen,
    }


def _print(out: Console, found: FunctionLines) -> None:
    from rich.segment import Segments
    from rich.text import Text

    where = " and ".join(f"{first}-{last}" for first, last in found.ranges)
    out.print(Text(shown(f"{found.place.name} in {found.place.path}"), "bold"), soft_wrap=True)
    out.print(f"lines {where} at {found.commit[:10]}: {plural(len(found.changes), 'commit')}", soft_wrap=True)
    for event, diff in found.changes:
        out.print()
        head = Text(event.author_date[:10]).append(f"  {event.hash[:10]}", "yellow")
        out.print(head.append(f"  {shown(event.subject)}", "bold"), soft_wrap=True)
        if event.what != "changed":
            notes = [word_of(event, "en"), *notes_of(event, DIRECTORY, False)]
            out.print(Text(": ".join(notes), "cyan"), soft_wrap=True)
        if diff and event.what != "there already":
            out.print(Segments(list(coloured(diff.split("\n")))), crop=False, end="")
    out.print()
