"""The colours of a diff."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

STYLES = {"+": "green", "-": "red", "@": "cyan"}


def styled(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each line of diffs with its style, as git has it; "" for none.

    The lines in front of a file's first hunk are its head. A deleted line that begins with two dashes is none of them.
    """
    in_head = False
    for number, line in enumerate(lines):
        begins = line.startswith("diff --git ") or (number == 0 and line.startswith("--- "))
        in_head = not line.startswith("@@ ") and (in_head or begins)
        yield line, "bold" if in_head else STYLES.get(line[:1], "")
