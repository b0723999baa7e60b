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
    """At a terminal, what does not fit its width is cut."""
    from rich.cells import cell_len
    from rich.text import Text

    width = max((cell_len(row.word) for row in rows), default=0)
    plus = ["" if not row.lines_added else f"+{row.lines_added}" for row in rows]
    minus = ["" if not row.lines_deleted else f"-{row.lines_deleted}" for row in rows]
    plus_width, minus_width = max(map(len, plus), default=0), max(map(len, minus), default=0)
    narrow = out.width < NARROW
    text = Text()
    for row, added, deleted in zip(rows, plus, minus, strict=True):
        strong = "" if row.word in _QUIET else "bold"
        text.append(f"{row.date}  ").append(row.hash[:10], "yellow").append("  ")
        text.append(row.word, strong)
        if plus_width or minus_width:
            text.append(" " * (width - cell_len(row.word) + 2))
            text.append(f"{added:>{plus_width}}", "green")
            if deleted or not narrow:
                text.append(f" {deleted:>{minus_width}}", "red")
        text.append("\n  " if narrow else "  ").append(f"{shown(row.subject)}\n")
        for note in row.notes:
            text.append(f"{' ' * (4 if narrow else 24)}{note}\n", "cyan")
    out.print(text, no_wrap=True, overflow="ellipsis", end="")


_QUIET = ("changed", "改动")


def inside(path: str, folder: str) -> str:
    """A path as it is shown: without the folder, if it is in it."""
    return shown(path.removeprefix(f"{folder}/"))


def say_begins(clone: Clone, commit: str) -> None:
    """Says on stderr that the clone's history begins at a commit."""
    remedy = clone.remedy().replace("it is shallow: ", "")
    typer.echo(f"refspec: the clone is shallow: what came before {commit[:10]} is not in it{remedy}", err=True)


def origin(clone: Clone) -> str:
    """Who says so: the last line of what is printed off a clone."""
    return shown(f"{clone.main.name} up to {clone.main.commit[:10]}, from the clone {clone.folder}")
