"""A function of ours beside SGLang's at a revision, whose text comes from the user's clone and is kept nowhere else."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import refspec
from refspec.history.clone import NO_DATE, Clone, HistoryError, date_of
from refspec.history.counterparts import WHEEL, Counterpart, Kind, Place, counterparts, counterparts_of, operations
from refspec.history.definitions import UnreadError, units_of

SEARCHED = ("python/sglang", "sgl-kernel")


@dataclass(frozen=True)
class Function:
    """A function or class with its text. path: from its repository's root. line: the first, decorators included."""

    path: str
    name: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.name}"


@dataclass(frozen=True)
class Beside:
    """What `compare` shows: SGLang's function of that kind, at a commit, and ours.

    listed: it is where the table has it. others: further ones of that operation at that commit, with their kinds.
    """

    operation: str
    kind: Kind
    commit: str
    ours: Function
    theirs: Function
    listed: bool
    others: tuple[tuple[Kind, Function], ...]


def operation_named(name: str) -> str:
    """The operation of that name, or that a function of ours or of SGLang's of that name belongs to.

    Raises HistoryError if there is none.
    """
    if name in operations():
        return name
    for counterpart in counterparts():
        module, _, function = counterpart.ours.partition(":")
        theirs = {part for place in counterpart.places for part in (place.function, _last(place.function))}
        if name in {function, counterpart.ours, f"refspec.{counterpart.ours}", f"refspec.{module}.{function}"} | theirs:
            return counterpart.operation
    near = difflib.get_close_matches(name, operations(), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise HistoryError(f"no operation {name} ({hint}refspec history compare lists them)")


def compare_at(clone: Clone, operation: str, commit: str, kind: Kind | None = None) -> Beside:
    """Ours and SGLang's at a commit (a hash). kind: None for the one that is nearest to ours.

    Where the table's files do not have it, the tree at that commit is searched for its name. Raises HistoryError if it
    is not there, and says where it is nearest, or which of the table's files this Python cannot read; LacksError if the
    clone lacks contents.
    """
    wanted = [counterpart for counterpart in counterparts_of(operation) if kind in (None, counterpart.kind)]
    if not wanted:
        kinds = ", ".join(counterpart.kind for counterpart in counterparts_of(operation))
        raise HistoryError(f"{operation} has no {kind} counterpart, but {kinds}")
    found, listed = _in_listed_places(clone, commit, wanted), True
    if not found:
        found, listed = list(_elsewhere(clone, commit, wanted)), False
    if not found:
        raise HistoryError(_nearest(clone, operation, commit, wanted))
    counterpart, theirs = found[0]
    return Beside(
        operation,
        counterpart.kind,
        commit,
        our_function(counterpart.ours),
        theirs,
        listed,
        tuple((other.kind, function) for other, function in found[1:]),
    )


def our_function(name: str) -> Function:
    """Ours, from "module:function" within refspec. It is read, not imported, so torch is not either.

    Raises HistoryError if there is none.
    """
    module, _, qualified = name.partition(":")
    path = f"{module.replace('.', '/')}.py"
    folder = Path(refspec.__file__).parent
    function = python_function(f"src/refspec/{path}", (folder / path).read_bytes(), qualified)
    if function is None:
        raise HistoryError(f"refspec.{module} has no {qualified}")
    return function


def python_function(path: str, content: bytes, qualified: str) -> Function | None:
    """The function or class of that qualified name in a source; of several, the first.

    Raises HistoryError if the source cannot be read.
    """
    try:
        units = [unit for top in units_of(path, content) for unit in top.walk()]
    except UnreadError as error:
        raise HistoryError(f"{path}: {error}") from None
    for unit in units:
        if unit.name == qualified and unit.kind in ("function", "class"):
            return Function(path, qualified, unit.first, unit.whole_text)
    return None


# What has braces that are none of the code's: comments, strings, characters. A digit's apostrophe (1'000) is no quote.
_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])*'", re.DOTALL)


def cuda_function(path: str, content: bytes, name: str) -> Function | None:
    """The first definition of that name in a C++ or CUDA source, with its template line, by counting braces."""
    text = content.decode(errors="replace").replace("\r\n", "\n")
    # Blanks in their place, so that offsets and lines stay.
    code = _NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for found in re.finditer(rf"\b{re.escape(name)}\s*\(", code):
        closed = _closing(code, found.end() - 1, "()")
        body = re.compile(r"\s*(?:const\b|noexcept\b|\s)*\{").match(code, closed + 1) if closed else None
        if closed is None or body is None:
            continue
        end = _closing(code, body.end() - 1, "{}")
        if end is None:
            continue
        before = max(code.rfind(mark, 0, found.start()) for mark in ";}{#")
        if before >= 0 and code[before] == "#":
            before = code.index("\n", before)
        start = before + 1 + len(code[before + 1 :]) - len(code[before + 1 :].lstrip())
        line = code.count("\n", 0, start) + 1
        return Function(path, name, line, "\n".join(text.split("\n")[line - 1 : code.count("\n", 0, end) + 1]))
    return None


def _closing(code: str, at: int, pair: str) -> int | None:
    """Where the bracket that opens at `at` closes."""
    depth = 0
    for found in re.compile(f"[{re.escape(pair)}]").finditer(code, at):
        depth += 1 if found[0] == pair[0] else -1
        if depth == 0:
            return found.start()
    return None


def _in_listed_places(clone: Clone, commit: str, wanted: Sequence[Counterpart]) -> list[tuple[Counterpart, Function]]:
    """Raises HistoryError if none is found, but a file that seems to define one cannot be read."""
    found: list[tuple[Counterpart, Function]] = []
    unread: HistoryError | None = None
    paths = list(dict.fromkeys(place.path for counterpart in wanted for place in counterpart.places))
    contents = dict(zip(paths, clone.objects(*(f"{commit}:{path}" for path in paths)), strict=True))
    for counterpart in wanted:
        # A place that was left and come back to stands twice in the table.
        for path, name in dict.fromkeys((place.path, place.function) for place in counterpart.places):
            content = contents[path]
            try:
                function = _function(path, content, name) if content is not None else None
            except HistoryError as error:
                function = None
                if re.search(rf"\b(def|class)\s+{_last(name)}\b".encode(), content or b""):
                    unread = unread or error
            if function:
                found.append((counterpart, function))
    if unread and not found:
        raise unread
    return found


def _elsewhere(clone: Clone, commit: str, wanted: Sequence[Counterpart]) -> Iterator[tuple[Counterpart, Function]]:
    names = {place.function: counterpart for counterpart in wanted for place in counterpart.places}
    patterns = [part for name in names for form in (" {}(", "class {}") for part in ("-e", form.format(_last(name)))]
    said = clone.git("grep", "-l", "-z", "-F", "--no-color", *patterns, commit, "--", *SEARCHED, allowed=(0, 1))
    paths = [line.partition(":")[2] for line in said.decode(errors="surrogateescape").split("\0") if line]
    for path, content in zip(paths, clone.objects(*(f"{commit}:{path}" for path in paths)), strict=True):
        for name, counterpart in names.items():
            if not content or path.endswith(".py") != (counterpart.kind != "cuda"):
                continue
            try:
                function = _function(path, content, name)
            except HistoryError:  # a word in a file that cannot be read is not yet a definition
                continue
            if function:
                yield counterpart, function


def _function(path: str, content: bytes, name: str) -> Function | None:
    """Of any language. Raises HistoryError for Python that cannot be read."""
    if path.endswith((".cu", ".cuh", ".cpp", ".cc", ".h")):
        return cuda_function(path, content, name)
    return python_function(path, content, name) if path.endswith(".py") else None


def _nearest(clone: Clone, operation: str, commit: str, wanted: Sequence[Counterpart]) -> str:
    """Says that it is not there, and which place in the table is nearest in time."""
    day = date_of(clone.git("log", "-1", "--no-walk", "--format=%as", commit).decode().strip())
    start = f"SGLang has no counterpart of {operation} at {commit[:10]} ({day})"
    known = [place for counterpart in wanted for place in counterpart.places if place.since.day]
    if not known:
        place = wanted[0].places[0]
        return f"{start}: it is known from the wheel of {WHEEL} alone, {place.path}:{place.function}"
    if day == NO_DATE:
        return start
    place = min(known, key=lambda place: _days_off(place, day))
    if place.until and place.until.day and place.until.day <= day:
        try_ = f"{place.until.commit}~1"
        when = f"until {place.until}"
    else:
        try_ = place.since.commit
        when = f"since {place.since}"
    return f"{start}: the nearest is {place.path}:{place.function} {when}; try --at {try_}"


def _days_off(place: Place, day: str) -> int:
    asked = date.fromisoformat(day)
    since = date.fromisoformat(place.since.day)
    if asked < since:
        return (since - asked).days
    if place.until and place.until.day:
        return max(0, (asked - date.fromisoformat(place.until.day)).days)
    return 0


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]
