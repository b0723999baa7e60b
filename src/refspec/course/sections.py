"""Named pieces of the sources, for lessons to quote.

A piece stands between two comments of their own, which editors fold:

    # region backup
    state = allocator.backup_state()
    # endregion backup

Pieces may lie inside one another; what a lesson shows is without the comments and without common indentation.
Names are unique over all sources, so a lesson need not know where a piece lives, and moving it breaks nothing.
"""

from __future__ import annotations

import io
import re
import textwrap
import tokenize
from dataclasses import dataclass
from pathlib import Path

from refspec.chapters import SOURCES, CourseError

COMMENT = re.compile(r"# (region|endregion) (\S+)")


@dataclass(frozen=True)
class Section:
    """One piece of one file."""

    name: str
    file: Path
    first_line: int  # of its code, from 1; blank lines around it do not count
    last_line: int
    code: str


def find_sections(folder: Path = SOURCES) -> dict[str, Section]:
    """All sections below the folder, by name.

    Raises CourseError, with file and line, for a marker without its partner, an empty section, or a name that
    comes twice.
    """
    found: dict[str, Section] = {}
    for file in sorted(folder.rglob("*.py")):
        for section in sections_of(file):
            if section.name in found:
                first = found[section.name]
                raise CourseError(
                    f"section {section.name} is there twice: {first.file}:{first.first_line} and "
                    f"{section.file}:{section.first_line}"
                )
            found[section.name] = section
    return found


def sections_of(file: Path) -> list[Section]:
    """The sections of one file, in the order in which they end. Raises CourseError as `find_sections` does."""
    source = file.read_text(encoding="utf-8")
    lines, markers = source.splitlines(), _markers(file, source)
    opened: dict[str, int] = {}
    sections = []
    for number, (kind, name) in markers.items():
        where = f"{file}:{number}"
        if kind == "region":
            if name in opened:
                raise CourseError(f"{where}: section {name} begins again before it has ended")
            opened[name] = number + 1
        elif name not in opened:
            raise CourseError(f"{where}: section {name} ends here, but has not begun")
        else:
            first = opened.pop(name)
            inside = [i for i in range(first, number) if i not in markers]
            filled = [i for i in inside if lines[i - 1].strip()]
            if not filled:
                raise CourseError(f"{where}: section {name} is empty")
            code = textwrap.dedent("\n".join(lines[i - 1] for i in inside)).strip("\n")
            sections.append(Section(name, file, filled[0], filled[-1], code))
    if opened:
        name, first = next(iter(opened.items()))
        raise CourseError(f"{file}:{first - 1}: section {name} begins here, but does not end")
    return sections


def _markers(file: Path, source: str) -> dict[int, tuple[str, str]]:
    """What the markers say, by line number. Only comments count: the same words in a string are no marker."""
    if "# region" not in source and "# endregion" not in source:
        return {}
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError) as error:
        raise CourseError(f"{file} is no Python: {error.args[0]}") from None
    found = {}
    for token in tokens:
        marker = COMMENT.fullmatch(token.string.rstrip()) if token.type == tokenize.COMMENT else None
        if marker:
            line = token.start[0]
            if token.line.strip() != token.string.strip():
                raise CourseError(f"{file}:{line}: a marker must have its line to itself")
            found[line] = (marker[1], marker[2])
    return found
