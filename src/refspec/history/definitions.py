"""Python sources as definitions with their syntax trees. Sources are parsed, never run or imported.

A definition is a function, a method, a class, an assignment or another statement of a module; those within `if`, `try`
and the like are definitions too, and what they stand under belongs to them. Imports are left out.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import textwrap
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Literal

Kind = Literal["function", "class", "assignment", "statement"]

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_LINE_END = re.compile(r"\r\n|\r|\n")  # Python's; str.splitlines knows others as well


@dataclass(frozen=True)
class Definition:
    """A definition in one revision.

    name: qualified, as "Worker.draft"; of other statements than assignments, how they begin. lines: the first (that of
    a decorator, if it has any) and the last. source: its own lines; what is defined in it is left out, and with that
    blank lines.
    """

    kind: Kind
    path: str
    name: str
    lines: tuple[int, int]
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.lines[0]} {self.name}"


class UnreadError(ValueError):
    """No syntax tree can be made of a source. The message says why."""


# What a definition stands under: a compound statement or a part of one, and the field that holds the block.
_Guard = tuple[ast.AST, str]
_BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")


class Unit:
    """A definition with its tree.

    first, last: lines. text: of the file, line by line. guards: what it stands under, within its parent. inner: what is
    defined in it.
    """

    def __init__(
        self, node: ast.stmt, path: str, text: Sequence[str], parent: Unit | None, guards: Sequence[_Guard]
    ) -> None:
        self.node = node
        self.path = path
        self.text = text
        self.parent = parent
        self.kind, self.last_name = _kind_and_name(node)
        self.name: str = f"{parent.name}.{self.last_name}" if parent else self.last_name
        self.container: str = parent.name if parent else ""
        self.first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        self.last = node.end_lineno or node.lineno
        self.guards = tuple(filter(None, (_header(*guard) for guard in guards)))
        inner = _definitions(node.body, ()) if isinstance(node, _DEFINITIONS) else ()
        self.inner = [Unit(definition, path, text, self, under) for definition, under in inner]

    def walk(self) -> Iterator[Unit]:
        """It, and all that is defined in it."""
        yield self
        for unit in self.inner:
            yield from unit.walk()

    @cached_property
    def definition(self) -> Definition:
        hidden = {line for unit in self.inner for line in range(unit.first, unit.last + 1)}
        lines = [self.text[line - 1] for line in range(self.first, self.last + 1) if line not in hidden]
        if self.inner:
            lines = [line for line in lines if line.strip()]  # blank ones are those around what was left out
        return Definition(self.kind, self.path, self.name, (self.first, self.last), "\n".join(lines))

    @cached_property
    def source(self) -> str:
        return textwrap.dedent(self.definition.source)

    @cached_property
    def whole_text(self) -> str:
        return "\n".join(self.text[self.first - 1 : self.last])

    @cached_property
    def tree(self) -> Tree:
        return Tree(self)

    @cached_property
    def whole(self) -> bytes:
        """Fingerprint of all of it, but for its own name."""
        return self._fingerprint(self.tree.bits)

    @cached_property
    def own(self) -> bytes:
        """Fingerprint of what is its own, but for its own name."""
        return self._fingerprint(self.tree.own_bits) if self.inner else self.whole

    def _fingerprint(self, bits: Iterable[str]) -> bytes:
        name = self.last_name
        text = "\0".join((self.kind, *self.guards, "", *("\1" if bit == name else bit for bit in bits)))
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Tree:
    """A unit's syntax tree as a sequence of bits, without positions, docstrings and imports.

    bits: all of them; own_bits: without those of inner definitions, whose place is marked in a function. statements:
    the own bits, cut where a statement begins. docstrings, imports: the unit's own.
    """

    def __init__(self, unit: Unit) -> None:
        self.bits: list[str] = []
        self.docstrings: list[str] = []
        self.imports: list[str] = []
        self._marks_inner = unit.kind == "function"
        self._starts: list[int] = []
        self._spans: list[tuple[int, int, str]] = []  # of inner definitions, with their names
        self._inner = {unit.node: unit for unit in unit.inner}
        self._write(unit.node)

    @cached_property
    def own_bits(self) -> list[str]:
        return [bit for statement in self.statements for bit in statement]

    @cached_property
    def statements(self) -> list[tuple[str, ...]]:
        found, at, starts = [], 0, iter([*self._starts, len(self.bits)])
        cut = next(starts)
        for start, end, name in [*self._spans, (len(self.bits), len(self.bits), "")]:
            while cut <= start and at < len(self.bits):
                if at < cut:
                    found.append(tuple(self.bits[at:cut]))
                    at = cut
                if cut == len(self.bits):
                    break
                cut = next(starts)
            if at < start:
                found.append(tuple(self.bits[at:start]))
            if self._marks_inner and name:
                found.append(("definition of", name))
            at = end
        return found

    @cached_property
    def weight(self) -> int:
        """How many bits say something."""
        return sum(bit not in "[]-" for bit in self.bits)

    @cached_property
    def own_weight(self) -> int:
        return sum(bit not in "[]-" for bit in self.own_bits) if self._spans else self.weight

    def _write(self, root: ast.AST) -> None:
        """Not by recursion: a sum of a thousand terms is a thousand levels deep."""
        bits = self.bits
        todo: list[ast.AST | str] = [root]
        while todo:
            node = todo.pop()
            if isinstance(node, str):
                bits.append(node)
                continue
            if isinstance(node, ast.stmt) and node is not root:
                if self._is_set_apart(node):
                    continue
                self._starts.append(len(bits))
            bits.append(type(node).__name__)
            if isinstance(node, ast.Constant):
                value = node.value
                bits.append(f"int:{value:#x}" if type(value) is int else repr(value) + ":")
                continue
            parts: list[ast.AST | str] = []
            for name in node._fields:
                value = getattr(node, name, None)
                if name in ("ctx", "type_comment"):
                    continue
                if isinstance(value, list) and value:
                    parts += ["[", *(item if isinstance(item, ast.AST) else str(item) for item in value), "]"]
                elif isinstance(value, ast.AST):
                    parts.append(value)
                else:
                    parts.append("-" if value is None or value == [] else str(value))
            todo += reversed(parts)

    def _is_set_apart(self, node: ast.stmt) -> bool:
        """Docstrings and imports are kept elsewhere; what an inner definition says is known already."""
        if _is_bare_string(node):
            self.docstrings.append(inspect.cleandoc(node.value.value))  # type: ignore[attr-defined]
        elif isinstance(node, _IMPORTS):
            self.imports.append(ast.unparse(node))
        elif node in self._inner:
            unit, at = self._inner[node], len(self.bits)
            self.bits += unit.tree.bits
            self._spans.append((at, len(self.bits), unit.last_name))
        else:
            return False
        return True


def units_of(path: str, content: bytes) -> list[Unit]:
    """The outermost definitions of a module. Raises UnreadError if it is not of the Python that runs this."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of others' escapes such as "\d"
            tree = ast.parse(text)
        lines = _LINE_END.split(text)
        return [
            Unit(node, path, lines, None, guards)
            for node, guards in _definitions(tree.body, (), _IMPORTS)
            if not isinstance(node, ast.Pass) and not _is_bare_string(node)
        ]
    except UnicodeDecodeError as error:
        raise UnreadError(f"byte {error.start} is no {error.encoding}") from None
    except SyntaxError as error:
        version = ".".join(map(str, sys.version_info[:2]))
        where = f"line {error.lineno}: {error.msg} (it may be of a newer Python than {version})"
        raise UnreadError(where if error.lineno else error.msg) from None
    except (LookupError, ValueError) as error:
        raise UnreadError(str(error)) from None
    except (RecursionError, MemoryError):
        raise UnreadError("nested too deeply") from None


def _definitions(
    body: Sequence[ast.AST], guards: tuple[_Guard, ...], left_out: tuple[type, ...] | None = None
) -> Iterator[tuple[ast.stmt, tuple[_Guard, ...]]]:
    """Functions and classes of a block, and of blocks in it that are no scope of their own, with what they stand under.

    left_out: given, other simple statements count as well, but for these.
    """
    for node in body:
        blocks = [] if isinstance(node, _DEFINITIONS) else [name for name in _BLOCKS if hasattr(node, name)]
        for name in blocks:
            yield from _definitions(getattr(node, name), (*guards, (node, name)), left_out)
        if isinstance(node, ast.stmt) and (
            isinstance(node, _DEFINITIONS) or (left_out and not blocks and not isinstance(node, left_out))
        ):
            yield node, guards


def _header(node: ast.AST, block: str) -> str:
    """The line that a block stands under, however it was formatted; "" if a line further in says as much."""
    match node, block:
        case _, "handlers" | "cases":
            return ""
        case ast.If(), "body":
            return f"if {ast.unparse(node.test)}"
        case ast.If(), _:
            return f"else of if {ast.unparse(node.test)}"
        case ast.ExceptHandler(), _:
            return f"except {ast.unparse(node.type)}" if node.type else "except"
        case ast.With() | ast.AsyncWith(), _:
            return f"with {', '.join(map(ast.unparse, node.items))}"
        case ast.While(), _:
            return f"while {ast.unparse(node.test)}: {block}"
        case ast.For() | ast.AsyncFor(), _:
            return f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}: {block}"
        case ast.match_case(), _:
            return ast.unparse(node).split("\n")[0]
        case _:
            return f"try: {block}"


def _is_bare_string(node: ast.AST) -> bool:
    """A docstring, or another string that stands alone and does nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _kind_and_name(node: ast.stmt) -> tuple[Kind, str]:
    if isinstance(node, ast.ClassDef):
        return "class", node.name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "function", node.name
    if isinstance(node, ast.Assign):
        return "assignment", ", ".join(ast.unparse(target) for target in node.targets)
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        return "assignment", ast.unparse(node.target)
    return "statement", ast.unparse(node).split("\n")[0][:60]
