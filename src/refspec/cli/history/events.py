"""How the events of a life, a definition's or a file's, are printed: a line for each, and notes below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import typer

from refspec.cli.history.output import cut, shown
from refspec.history.clone import Clone

if TYPE_CHECKING:
    from rich.console import Console

    from refspec.history.symbols import Event

NARROW = 72  # columns; below, a title has a line of its own
# In Chinese, as in scripts/spec-symbol.sh.
WORDS = {
    "born": "出生",
    "there already": "已有定义",
    "back": "恢复",
    "came": "移入",
    "left": "移出",
    "changed": "改动",
    "moved": "移动",
    "renamed from": "改名",
    "renamed to": "改名",
    "died": "消亡",
    "class": "类",
    "function": "函数",
    "name": "变量",
}
_QUIET = ("changed", "改动")  # what happens most
_BREAK = "\n"


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
        text.append(f"{before_title}{cut(shown(row.subject), room, ascii_only)}\n")
        for note in row.notes:
            fits = len(indent) + cell_len(note) <= columns
            text.append(f"{indent}{note if fits else note.replace(' -> ', f'{_BREAK}{indent}-> ')}\n", "cyan")
    out.print(text, soft_wrap=True, end="")


def below(path: str, folder: str) -> str:
    """A path as it is shown: without the folder, if it is in it."""
    return shown(path.removeprefix(f"{folder}/"))


def word_of(event: Event, spoken: Literal["en", "zh"]) -> str:
    """What happened, as it is shown."""
    if spoken == "zh":
        return WORDS[event.what]
    return "renamed" if event.what.startswith("renamed") else event.what


def notes_of(event: Event, folder: str, chinese: bool) -> list[str]:
    """Where from, where to."""
    if event.other is None:
        return []
    other, here = below(event.other.path, folder), below(event.place.path, folder)
    if event.other.name != event.place.name:
        other, here = f"{other}:{shown(event.other.name)}", f"{here}:{shown(event.place.name)}"
    if event.what == "born":
        return [f"与 {other} 几乎相同" if chinese else f"much like the one in {other}"]
    leaves = event.what in ("renamed to", "left")
    return [f"{here} -> {other}" if leaves else f"{other} -> {here}"]


def event_json(event: Event) -> dict[str, Any]:
    """What is known of an event, for --json, but for the definition's text."""
    return {
        "hash": event.hash,
        "author_date": event.author_date,
        "committer_date": event.committer_date,
        "pr": event.pr,
        "subject": event.subject,
        "what": event.what,
        "place": asdict(event.place),
        "other": asdict(event.other) if event.other else None,
        "lines_added": event.lines_added,
        "lines_deleted": event.lines_deleted,
    }


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
