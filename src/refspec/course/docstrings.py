"""Lets the reference show what authors wrote as they laid it out. An extension of griffe, which reads the sources.

Docstrings here are Markdown but for one thing. Fields are listed as in

    topk: branches that the draft follows
        at each level
    num_steps: levels

which Markdown would run together. And what a field of a class holds stands in a comment at its right or above it,
where mkdocstrings does not look.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

FIELD = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*(?: \(\w\))?): ")
CONTINUATION = "    "


class Layout(griffe.Extension):
    """Makes Markdown lists of the fields in docstrings, and tables of commented fields."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object when its members have been read."""
        if obj.docstring:
            obj.docstring.value = list_fields(obj.docstring.value)
            if isinstance(obj, griffe.Class) and (table := table_fields(obj)):
                obj.docstring.value += f"\n\n{table}"


def list_fields(docstring: str) -> str:
    """The docstring, with a bullet before each field of a paragraph that consists of two or more."""
    return "\n\n".join(_listed(paragraph) for paragraph in docstring.split("\n\n"))


def _listed(paragraph: str) -> str:
    lines = paragraph.split("\n")
    starts = [line for line in lines if not line.startswith(CONTINUATION)]
    if len(starts) < 2 or lines[0] not in starts or not all(map(FIELD.match, starts)):
        return paragraph
    return "\n".join(line if line.startswith(CONTINUATION) else FIELD.sub(r"- `\1`: ", line, count=1) for line in lines)


def table_fields(of: griffe.Class) -> str:
    """The class's annotated fields with their comments, as a Markdown table; nothing if none has a comment."""
    if isinstance(of.filepath, list):
        return ""  # a package without a file; no class is one
    lines = of.lines_collection[of.filepath]
    rows = []
    for name, member in of.members.items():
        if not name.startswith("_") and isinstance(member, griffe.Attribute) and "property" not in member.labels:
            comment = _comment_at(lines, member.lineno, member.endlineno)
            rows.append((name, str(member.annotation or ""), comment))
    if not any(comment for _, _, comment in rows):
        return ""
    cells = [f"| `{name}` | {_escaped(kind)} | {_escaped(comment)} |" for name, kind, comment in rows]
    return "\n".join(["| field | type | what it holds |", "|---|---|---|", *cells])


def _comment_at(lines: list[str], first: int | None, last: int | None) -> str:
    """The comment at the right of a definition, or the one above it."""
    if first is None or last is None:
        return ""
    if beside := re.search(r"#\s*(.*)$", lines[last - 1]):
        return beside[1]
    above: list[str] = []
    while (line := lines[first - 2 - len(above)].strip()).startswith("#"):
        above.insert(0, line.lstrip("# "))
    return " ".join(above)


def _escaped(text: str) -> str:
    """As Markdown that shows just this text."""
    return re.sub(r"([\\`*_\[\]|<])", r"\\\1", text)
