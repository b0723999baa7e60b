"""Where SGLang has what refspec's functions are modelled on, and from when until when: facts, no text of SGLang's.

They were read off SGLang's main line, as far as the catalogue reaches, and off the wheel of WHEEL. A row of
facts/counterparts.tsv is a file that a function has been in. `refspec history compare` shows both, side by side.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Literal, cast

from refspec.history.catalogue import CatalogueError

Kind = Literal["python", "triton", "cuda"]
WHEEL = "0.5.23"
COLUMNS = "operation kind ours path function since since_day until until_day"


@dataclass(frozen=True)
class Point:
    """A commit on the main line, by its first ten digits, and its author's day; or WHEEL, which is later, and ""."""

    commit: str
    day: str

    def __str__(self) -> str:
        return f"{self.commit} ({self.day})" if self.day else f"release {self.commit}"


@dataclass(frozen=True)
class Place:
    """A function of SGLang's, in one file.

    path: from the root of SGLang's repository. function: qualified. since: what brought it. until: what took it away;
    None where WHEEL has it.
    """

    path: str
    function: str
    since: Point
    until: Point | None


@dataclass(frozen=True)
class Counterpart:
    """One function of ours, and SGLang's through time, those that are nearest to ours first.

    operation: the name that `compare` takes. kind: of SGLang's function. ours: module within refspec, and function.
    """

    operation: str
    kind: Kind
    ours: str
    places: tuple[Place, ...]


@cache
def counterparts() -> tuple[Counterpart, ...]:
    """All of them: kernels, then phases of a round. Raises CatalogueError if the table is damaged."""
    text = (Path(__file__).parent / "facts" / "counterparts.tsv").read_text(encoding="utf-8")
    lines = csv.reader(text.splitlines(), delimiter="\t")
    if next(lines, None) != COLUMNS.split():
        raise CatalogueError(f"the catalogue's counterparts.tsv has other columns than {COLUMNS}")
    rows = list(lines)
    for number, row in enumerate(rows, start=2):
        if len(row) != len(COLUMNS.split()) or row[1] not in ("python", "triton", "cuda") or ":" not in row[2]:
            raise CatalogueError(f"line {number} of the catalogue's counterparts.tsv is damaged")
    return tuple(
        Counterpart(operation, cast(Kind, kind), ours, tuple(_place(*row[3:]) for row in group))
        for (operation, kind, ours), group in groupby(rows, key=lambda row: row[:3])
    )


def operations() -> list[str]:
    """The names that `compare` takes."""
    return list(dict.fromkeys(counterpart.operation for counterpart in counterparts()))


def counterparts_of(operation: str) -> list[Counterpart]:
    """The counterparts of an operation, those nearest to ours first; none if there is no such operation."""
    return [counterpart for counterpart in counterparts() if counterpart.operation == operation]


def _place(path: str, function: str, since: str, since_day: str, until: str, until_day: str) -> Place:
    end = Point(until, until_day) if until else None
    whole = path if path.startswith("sgl-kernel/") else f"python/sglang/{path}"
    return Place(whole, function, Point(since, since_day), end)
