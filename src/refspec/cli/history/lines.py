"""`refspec history lines`: every change of one function."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from refspec.cli.command_line import UsageError
from refspec.cli.history.events import origin
from refspec.cli.history.options import ClonePath, Json, Pager, source_of
from refspec.cli.history.output import paged, print_json, shown
from refspec.history.clone import HistoryError
from refspec.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from refspec.history.function_lines import FunctionLines


def lines(
    function: Annotated[
        str,
        typer.Argument(metavar="FILE:NAME", help="As eagle_info.py:EagleVerifyInput.verify; FILE may be a whole path."),
    ],
    revision: Annotated[
        str | None, typer.Option("--from", metavar="REV", help="Walk back from here; default: the main line's end.")
    ] = None,
    clone: ClonePath = None,
    pager: Pager = True,
    as_json: Json = False,
) -> None:
    """Every change of one function, class, method or name, the newest first, with its diff.

    The walk stops where the lines came to the file. Needs a clone with contents of files.
    """
    from refspec.history.function_lines import parts_of, read_lines

    try:
        parts_of(function)
    except HistoryError as error:
        raise UsageError(str(error)) from None
    source = source_of(clone, as_json=as_json)
    asked = source.needed("the changes of a function")
    found = read_lines(asked, function, revision)
    if as_json:
        print_json(asdict(found))
    else:
        with paged(pager) as out:
            _print(out, found)
            out.print(origin(asked), style="dim", soft_wrap=True)
    if found.changes and found.changes[-1].boundary:
        typer.echo(
            f"refspec: the clone is shallow: what came before {found.changes[-1].hash[:10]} is not in it"
            f"{asked.remedy().replace('it is shallow: ', '')}",
            err=True,
        )
        raise typer.Exit(1)


def _print(out: Console, found: FunctionLines) -> None:
    from rich.segment import Segment, Segments
    from rich.style import Style
    from rich.text import Text

    where = " and ".join(f"{first}-{last}" for first, last in found.ranges)
    number = f"{len(found.changes)} commit{'' if len(found.changes) == 1 else 's'}"
    out.print(Text(shown(f"{found.name} in {found.path}"), "bold"), soft_wrap=True)
    out.print(f"lines {where} at {found.commit[:10]}: {number}", soft_wrap=True)
    styles = {"+": Style(color="green"), "-": Style(color="red"), "@": Style(color="cyan")}
    path = found.path
    for change in found.changes:
        out.print()
        head = Text(change.author_date[:10]).append(f"  {change.hash[:10]}", "yellow")
        out.print(head.append(f"  {shown(change.subject)}", "bold"), soft_wrap=True)
        if change.path and change.path != path:
            path = change.path
            out.print(f"in {shown(path)}", style="cyan", soft_wrap=True)
        if change.boundary:
            out.print("the clone's history begins here", soft_wrap=True)
            continue
        segments = [Segment(f"{printable(line)}\n", styles.get(line[:1])) for line in change.diff.split("\n")]
        out.print(Segments(segments), crop=False, end="")
    out.print()
