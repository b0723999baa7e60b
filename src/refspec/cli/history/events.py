"""How the events of a life, a definition's or a file's, are printed: a line for each, and notes below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from refspec.cli.history.output import shown
from refspec.history.clone import Clone

if TYPE_CHECKING:
    from rich.console import Console

NARROW = 72  # columns; below, a title has a line of its own


@dataclass(frozen=True)
class Row:
    """One event. word: what happened. notes: lines to print below it."""

    date: str
    hash: str
    word: str
    lines_added: int | None
    lines_deleted: int | None
    subject: str
    notes: Sequence[str] = ()


def print_events(out: Console, rows: Sequence[Row]) -> None:
    """At a terminal, titles are cut where its width ends; notes are not."""
    from rich.cells import cell_len
    from rich.text import Text

    width = max((cell_len(row.word) for row in rows), default=0)
    plus = [f"+{row.lines_added}" if row.lines_added else "" for row in rows]
    minus = [f"-{row.lines_deleted}" if row.lines_deleted else "" for row in rows]
    plus_width, minus_width = max(map(len, plus), default=0), max(map(len, minus), default=0)
    columns, ascii_only = out.width, out.options.ascii_only  # asked once: each time, rich measures the terminal anew
    narrow = columns < NARROW
    before_title = "\n  " if narrow else "  "
    room = columns - (2 if narrow else 26 + width + (plus_width + minus_width + 3 if plus_width or minus_width else 0))
    indent = " " * (4 if narrow else 24)
    text = Text()
    for row, added, deleted in zip(rows, plus, minus, strict=True):
        text.append(f"{row.date}  ").append(row.hash[:10], "yellow").append("  ")
        text.append(row.word, "" if row.word in _QUIET else "bold")
        if plus_width or minus_width:
            text.append(" " * (width - cell_len(row.word)))
            text.append(f"  {added:>{plus_width}}", "green")
            text.append(f" {deleted:>{minus_width}}" if deleted or not narrow else "", "red")
        else:
            text.append("" if narrow else " " * (width - cell_len(row.word)))
        text.append(f"{before_title}{_cut(shown(row.subject), room, ascii_only)}\n")
        for note in row.notes:
            fits = len(indent) + cell_len(note) <= columns
            text.append(f"{indent}{note if fits else note.replace(' -> ', f'{_BREAK}{indent}-> ')}\n", "cyan")
    out.print(text, soft_wrap=True, end="")


_QUIET = ("changed", "改动")
_BREAK = "\n"


def _cut(text: str, columns: int, ascii_only: bool) -> str:
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= columns:
        return text
    end = "..." if ascii_only else "…"
    return set_cell_size(text, columns - len(end)).rstrip() + end


def inside(path: str, folder: str) -> str:
    """A path as it is shown: without the folder, if it is in it."""
    return shown(path.removeprefix(f"{folder}/"))


def say_begins(clone: Clone, commit: str) -> None:
    """Says on stderr that the clone's history begins at a commit."""
    remedy = clone.remedy().replace("it is shallow: ", "")
    typer.echo(f"refspec: the clone is shallow: what came before {commit[:10]} is not in it{remedy}", err=True)


def say_unseen(clone: Clone, commits: Sequence[str]) -> None:
    """Says on stderr that what these commits changed beyond the folder could not be looked at."""
    which = ", ".join(commit[:10] for commit in commits[:3]) + (", ..." if len(commits) > 3 else "")
    typer.echo(
        f"refspec: this clone lacks contents of files beyond the folder, so whether anything came from there or went "
        f"there in {which} is not known{clone.remedy_for_contents()}",
        err=True,
    )


def origin(clone: Clone) -> str:
    """Who says so: the last line of what is printed off a clone."""
    return shown(f"{clone.main.name} up to {clone.main.commit[:10]}, from the clone {clone.folder}")
