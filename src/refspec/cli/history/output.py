"""How commands of `refspec history` print: through a pager where it is long, in colour where that is wanted.

At a terminal, what is too wide is cut or wrapped to it. Into a file or a pipe nothing is, unless COLUMNS says so.
Texts that git handed out go through `shown`: titles may hold whatever their authors typed, escapes included.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from refspec.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

UNBOUNDED = 10_000  # columns, more than any line here takes


def shown(text: str) -> str:
    """A text of others, on one line, that does nothing to a terminal."""
    return printable(" ".join(text.split("\n"))).replace("\t", " ")


def cut(text: str, columns: int, ascii_only: bool = False) -> str:
    """The text, or as much of its beginning as fits, with an ellipsis behind."""
    if len(text) * (1 if text.isascii() else 2) <= columns:  # no character takes more than two
        return text
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= columns:
        return text
    end = "..." if ascii_only else "…"
    return set_cell_size(text, columns - len(end)).rstrip() + end


def ascii_only() -> bool:
    """Does stdout take nothing but ASCII? rich's `options.ascii_only`, where there is no console."""
    return not (sys.stdout.encoding or "").lower().startswith("utf")


def bar(cells: int, ascii_only: bool) -> str:
    """A bar of that length."""
    return ("#" if ascii_only else "█") * cells


def print_json(document: Any) -> None:
    """One JSON document on stdout. Characters beyond ASCII, control characters too, become escapes."""
    print(json.dumps(document, indent=2))


def plain() -> bool:
    """Is it text alone that is wanted, of any width: into a file or a pipe, where nobody asks for more?

    Then it can be printed without rich, whose import takes as long as many a command.
    """
    return not (sys.stdout.isatty() or _columns() or {"FORCE_COLOR", "TTY_COMPATIBLE"} & set(os.environ))


def _columns() -> int | None:
    """The width that COLUMNS asks for; None if it is not there, or no width."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) or None if columns.isascii() and columns.isdigit() else None


def console(**settings: Any) -> Console:
    """A console on stdout that takes texts as they are: no markup, no guessed colours, no emoji."""
    from rich.console import Console

    settings = {"highlight": False, "markup": False, "emoji": False} | settings
    # rich takes any COLUMNS that consists of digits, 0 and superscripts among them.
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS" or _columns()}
    made = Console(**settings, _environ=environment)
    if not made.is_terminal and "width" not in settings and not _columns():
        made.width = UNBOUNDED
    return made


def wrapped(text: str, width: int, first: str = "", others: str = "", *, break_words: bool = False) -> list[str]:
    """The lines of a text in so many columns, `first` in front of the first one and `others` in front of the others.

    Where the width is UNBOUNDED it is one line; an empty text has none. A word that is longer than a line stands out,
    unless `break_words`.
    """
    if width >= UNBOUNDED:
        return [f"{first}{text}"] if text else []
    return textwrap.wrap(
        text,
        max(width, len(others) + 10),
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=break_words,
        break_on_hyphens=False,
    )


def print_indented(out: Console, columns: int, line: str, style: str = "") -> None:
    """A line of others, indented, and so are the lines that it takes if it is too wide."""
    from rich.padding import Padding
    from rich.text import Text

    out.print(Padding(Text(printable(line), style=style), (0, 0, 0, columns), expand=False))


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Names, and beside each its text, broken where the terminal ends; below it if there is little room beside it."""
    out = console()
    kept = [(shown(name), shown(text)) for name, text in rows]
    indent = max((len(name) for name, _ in kept), default=0) + 2
    if out.width - indent < 24:
        indent = 4
    for name, text in kept:
        lines = wrapped(text, out.width - indent, break_words=True)
        if not lines or len(name) + 2 > indent:
            lines = ["", *lines]
        for number, line in enumerate(lines):
            out.print(f"{'' if number else name:{indent}}{line}".rstrip(), soft_wrap=True)


@contextmanager
def paged(pager: bool = True) -> Iterator[Console]:
    """A console whose output goes to stdout, or to a pager if it is more than the terminal shows at once.

    Nothing is printed if the block raises. $PAGER is the pager, else less; an empty one, or cat, is none.
    """
    real = console()
    if not (pager and real.is_terminal and _pager()):
        yield real
        return
    kept = io.StringIO()
    yield console(
        file=kept, force_terminal=True, width=real.width, color_system=real.color_system, no_color=real.no_color
    )
    text = kept.getvalue()
    if text.count("\n") < real.height and real.is_terminal:
        sys.stdout.write(text)
    else:
        _page(text)


def _pager() -> str:
    command = os.environ.get("PAGER", "less").strip()
    return "" if command == "cat" else command


def _page(text: str) -> None:
    """Hands the text to the pager. It gets the settings that git gives it: colours pass, short texts leave at once."""
    environment = {"LESS": "FRX", "LV": "-c"} | dict(os.environ)
    ours = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pager's while it runs
    try:
        process = subprocess.Popen(_pager(), shell=True, stdin=subprocess.PIPE, env=environment)
        process.communicate(text.encode(sys.stdout.encoding or "utf-8", errors="backslashreplace"))
    finally:
        signal.signal(signal.SIGINT, ours)
    if process.returncode in (126, 127):  # the shell found no such program, or could not run it
        sys.stdout.write(text)
