"""Where a file of Python defines a function, a class or a name: by indentation, fast, or by the syntax tree, exactly.

`scan` reads thousands of versions of a file within a second, and takes any file, whatever version of Python it is for.
It goes by indentation, closing brackets and the number of triple quotes, so it can be misled by a file that is laid out
like no other. `parse` cannot, and takes a hundred times as long.

A definition reaches from its first decorator to its last line; comments behind that are not part of it. Names are told
as Python's `__qualname__` does, but without `<locals>`: "Worker.verify" is a method, "build.inner" a function in a
function. Names that are assigned or annotated count where they stand in the module or in the body of a class, not
within functions.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

Kind = Literal["class", "function", "name"]


@dataclass(frozen=True)
class Definition:
    """One definition. first, last: its lines, counted from 1, both included. text: those lines, as they are."""

    name: str
    kind: Kind
    first: int
    last: int
    text: bytes


def scan(source: bytes, name: str | None = None) -> list[Definition]:
    """The definitions whose last part is `name` (an identifier), or all of functions and classes; by indentation."""
    found = []
    quotes = _Quotes(source)
    known: dict[int, _Scopes] = {}
    counted, line = 0, 1
    for match in _headers(source, name):
        if (match["assigned"] and _goes_on(source, match.start())) or quotes.odd(0, match.start()):
            continue
        indent, word, own = match["indent"], match["word"], match["own"] or match["assigned"]
        scopes = known[match.start()] = _scopes(source, quotes, known, match.start(), len(indent))
        if scopes is None or (word is None and any(kind != "class" for kind, _ in scopes)):
            continue
        first = _first_decorator(source, match.start(), indent) if word else match.start()
        text = source[first : _end(source, quotes, match.start(), match.end(), len(indent))]
        line += source.count(b"\n", counted, first) - source.count(b"\n", first, counted)  # one of the two is empty
        counted = first
        kind: Kind = "name" if word is None else "class" if word == b"class" else "function"
        whole = ".".join([scope.decode(errors="replace") for _, scope in scopes] + [own.decode(errors="replace")])
        found.append(Definition(whole, kind, line, line + text.count(b"\n"), text))
    return found


def parse(source: bytes, name: str | None = None) -> list[Definition]:
    """The same by the syntax tree, names included. Raises SyntaxError for what this Python cannot read."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except (ValueError, RecursionError) as error:  # a NUL byte; an expression without end
            raise SyntaxError(str(error)) from None
    lines = source.split(b"\n")  # as git counts, and unlike str.splitlines, which breaks at form feeds as well
    return sorted(
        (
            Definition(whole, kind, first, last, b"\n".join(lines[first - 1 : last]).rstrip(b"\r"))
            for whole, kind, first, last in _in_tree(tree, (), names=True)
            if name is None or whole.rpartition(".")[2] == name
        ),
        key=lambda definition: definition.first,
    )


def _in_tree(node: ast.AST, scopes: tuple[str, ...], names: bool) -> Iterator[tuple[str, Kind, int, int]]:
    """names: do those that are assigned count here?"""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            is_class = isinstance(child, ast.ClassDef)
            own = (*scopes, child.name)
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield ".".join(own), "class" if is_class else "function", first, child.end_lineno or child.lineno
            yield from _in_tree(child, own, names and is_class)
        elif isinstance(child, ast.Assign | ast.AnnAssign) and names:
            for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                if isinstance(target, ast.Name):
                    yield ".".join((*scopes, target.id)), "name", child.lineno, child.end_lineno or child.lineno
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _in_tree(child, scopes, names)


# --- by indentation


def _headers(source: bytes, name: str | None) -> Iterator[re.Match[bytes]]:
    """Lines that look like the first of a definition. A search for the word alone is much faster than one for lines."""
    header = _header(name)
    words = [name.encode()] if name else [b"def", b"class"]
    lines = set()
    for word in words:
        at = source.find(word)
        while at >= 0:
            lines.add(source.rfind(b"\n", 0, at) + 1)
            at = source.find(word, at + len(word))
    for line in sorted(lines):
        match = header.match(source, line)
        if match:
            yield match


@cache
def _header(name: str | None) -> re.Pattern[bytes]:
    own = re.escape(name.encode()) if name else rb"\w+"
    pattern = rb"(?P<indent>[ \t]*)(?:(?P<word>(?:async[ \t]+)?def|class)[ \t]+(?P<own>" + own + rb")(?![\w\x80-\xff])"
    if name:
        pattern += rb"|(?:\w+[ \t]*=[ \t]*)*(?P<assigned>" + own + rb")[ \t]*(?::(?!=)|=(?!=))"
    else:
        pattern += rb"|(?P<assigned>(?!))"
    return re.compile(pattern + rb")")


@cache
def _outside(indent: int) -> re.Pattern[bytes]:
    """The start of a line that a block indented by more than `indent` ends at."""
    return re.compile(rb"\n(?=[ \t]{0,%d}[^ \t\r\n#)\]}])" % indent)


def _goes_on(source: bytes, at: int) -> bool:
    """Does the line before this one end within brackets, as arguments of a call do? A quick look, not a proof."""
    return source[max(0, at - 80) : at].rstrip().endswith((b",", b"(", b"[", b"{"))


class _Quotes:
    """Where the triple quotes of a source are. They are looked for once, and only if somebody asks."""

    def __init__(self, source: bytes) -> None:
        self._source = source

    def odd(self, start: int, end: int) -> bool:
        """Is their number odd between the beginnings, or ends, of two lines? From 0 on: is `end` within a text?"""
        return (bisect_right(self._ends, end) - bisect_right(self._ends, start)) % 2 == 1

    @cached_property
    def _ends(self) -> list[int]:
        found = []
        for quote in (b'"""', b"'''"):
            at = self._source.find(quote)
            while at >= 0:
                found.append(at + len(quote))
                at = self._source.find(quote, at + len(quote))
        return sorted(found)


def _end(source: bytes, quotes: _Quotes, start: int, header: int, indent: int) -> int:
    """Where the definition that begins at `start` ends."""
    outside = _outside(indent)
    end = header
    while True:
        match = outside.search(source, end)
        end = match.start() if match else len(source)
        if match is None or not quotes.odd(start, end):
            break
        end += 1
    # Blank lines and comments behind it do not belong to it.
    while True:
        end = start + len(source[start:end].rstrip())
        line = source.rfind(b"\n", start, end) + 1
        last = source[line:end].lstrip()
        if line <= start or last[:1] != b"#" or last.endswith((b'"""', b"'''")):
            return end
        end = line


_Scopes = list[tuple[str, bytes]] | None
_SCOPE = re.compile(rb"(class|(?:async[ \t]+)?def)[ \t]+(\w+)")
_BLOCK = re.compile(rb"(?:if|elif|else|try|except|finally|with|for|while|async|match|case)\b")


def _scopes(source: bytes, quotes: _Quotes, known: dict[int, _Scopes], at: int, indent: int) -> _Scopes:
    """What the line that begins at `at` stands in, from the outside: ("class" or "def", name) each.

    None if it is no statement at all, but within brackets. known: the answers for lines above, by their beginnings; the
    way up ends at the first that is as deep, so that a class of many methods is not walked for each of them.
    """
    scopes: list[tuple[str, bytes]] = []
    closed = False
    while indent and at:
        line = source.rfind(b"\n", 0, at - 1) + 1
        text = source[line : at - 1]
        at = line
        stripped = text.lstrip()
        depth = len(text) - len(stripped)
        stripped = stripped.rstrip()
        if depth == indent and line in known and not closed:
            above = known[line]
            return None if above is None else above + scopes[::-1]
        if not stripped or depth >= indent or stripped[:1] == b"#" or quotes.odd(0, line):
            continue
        if stripped[:1] in b")]}":
            closed = True
            continue
        scope = _SCOPE.match(stripped)
        if not scope and not _BLOCK.match(stripped):
            return None
        if not closed and not stripped.partition(b"#")[0].rstrip().endswith(b":"):
            return None
        if scope:
            scopes.append(("class" if scope[1] == b"class" else "def", scope[2]))
        indent, closed = depth, False
    return scopes[::-1]


def _first_decorator(source: bytes, at: int, indent: bytes) -> int:
    """Where the decorators begin of a definition whose first line begins at `at`; `at` if it has none."""
    first, line, within = at, at, False
    while line:
        end = line - 1
        line = source.rfind(b"\n", 0, end) + 1
        text = source[line:end]
        inner = text[len(indent) :]
        if not text.strip():
            if not within:
                break
        elif not text.startswith(indent):
            break
        elif inner[:1] == b"@":
            first, within = line, False
        elif inner[:1] in b" \t)]}":  # a decorator that takes several lines, seen from behind; else its end is above
            within = True
        elif inner[:1] != b"#":
            break
    return first
