"""A function of SGLang's, followed through its source: which calls it makes, in which order. Nothing of it is run.

The statements are gone through as they would be run, with what is known of the values: a loop over a known range is
gone through that often, a condition that is known decides, and a method of the same class, or a function of the same
file, is entered. Where a condition is not known, the way that goes on is taken before one that returns or raises; of
two that do the same, the one with more calls. What both ways leave alike stays known.

A value is known by the words that stand for it: {"self.topk": 4, "batch.forward_mode.is_decode()": True}. It is
forgotten when something that is not known is assigned to it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from refspec.history.claims.evidence import Defined
from refspec.history.clone import HistoryError

UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda _: "?"})()
MOST_ROUNDS = 64  # of a loop; SGLang's settings are below that


@dataclass(frozen=True)
class Call:
    """A call. name: as written, "self.target_worker.forward". arguments, keywords: what is known, or UNKNOWN."""

    name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    node: ast.Call


@dataclass(frozen=True)
class Walk:
    """What a function does, as far as its source tells.

    calls: in their order, those of entered functions behind the call that entered them. repeated: those in loops of
    which it is not known how often they are gone through; here, once. values: what is known when it ends. returned: the
    expression that it returns. raised: the exception that it ends with; "" for none.
    """

    calls: tuple[Call, ...]
    repeated: tuple[Call, ...]
    values: Mapping[str, Any]
    returned: ast.expr | None
    raised: str

    def named(self, *ends: str) -> list[Call]:
        """The calls whose names end so, whole words: "forward" is not the end of "my_forward"."""
        return [call for call in self.calls if any(f".{call.name}".endswith(f".{end}") for end in ends)]

    def at(self, *ends: str) -> list[int]:
        """The places of these calls among all."""
        wanted = {id(call) for call in self.named(*ends)}
        return [place for place, call in enumerate(self.calls) if id(call) in wanted]


def walk(definitions: Mapping[str, Defined], name: str, known: Mapping[str, Any]) -> Walk:
    """Follows the function of that name ("Class.method"). Raises HistoryError if there is none."""
    if name not in definitions:
        raise HistoryError(f"{name} is to be followed, and is not defined")
    walker = _Walker(definitions, name.rpartition(".")[0], dict(known), (name,))
    returned, raised = None, ""
    try:
        left = walker.run(_function(definitions[name]).body)
        returned = left.value if left else None
    except _Raised as ended:
        raised = str(ended)
    return Walk(tuple(walker.calls), tuple(walker.repeated), walker.values, returned, raised)


@lru_cache(maxsize=65_536)
def written(node: ast.AST) -> str:
    """An expression as its source has it, give or take blanks and brackets."""
    return ast.unparse(node)


def value_of(expression: ast.expr, known: Mapping[str, Any]) -> Any:
    """What an expression comes to, or UNKNOWN."""
    return _Walker({}, "", dict(known), ()).value(expression)


@dataclass(frozen=True)
class _Left:
    """How statements are left before their end. how: "return", "break" or "continue"."""

    how: str
    value: ast.expr | None = None


class _Raised(Exception):
    """What is followed raises the exception of this name."""


@dataclass
class _Walker:
    definitions: Mapping[str, Defined]
    own_class: str
    values: dict[str, Any]
    entered: tuple[str, ...]
    calls: list[Call] = field(default_factory=list)
    repeated: list[Call] = field(default_factory=list)

    def run(self, statements: Sequence[ast.stmt]) -> _Left | None:
        for statement in statements:
            left = self.step(statement)
            if left:
                return left
        return None

    def step(self, statement: ast.stmt) -> _Left | None:
        match statement:
            case ast.If():
                self.note(statement.test)
                return self.choose(self.value(statement.test), statement.body, statement.orelse)
            case ast.For() | ast.AsyncFor():
                return self.loop(statement)
            case ast.While():
                self.note(statement.test)
                return _outside_the_loop(self.run_repeated(statement.body))
            case ast.With() | ast.AsyncWith():
                for item in statement.items:
                    self.note(item.context_expr)
                    if item.optional_vars:
                        self.assign(item.optional_vars, None)
                return self.run(statement.body)
            case ast.Try():
                try:
                    left = self.run(statement.body) or self.run(statement.orelse)
                except _Raised:
                    if not statement.handlers:
                        raise
                    left = self.run(statement.handlers[0].body)
                return self.run(statement.finalbody) or left
            case ast.Return():
                self.note(statement.value)
                return _Left("return", statement.value)
            case ast.Raise():
                raise _Raised(_exception(statement.exc))
            case ast.Break():
                return _Left("break")
            case ast.Continue():
                return _Left("continue")
            case ast.Assign():
                self.note(statement.value)
                for target in statement.targets:
                    self.assign(target, statement.value)
            case ast.AnnAssign():
                self.note(statement.value)
                self.assign(statement.target, statement.value)
            case ast.AugAssign():
                self.note(statement.value)
                self.assign(statement.target, ast.BinOp(statement.target, statement.op, statement.value))
            case ast.Expr() | ast.Assert():
                self.note(statement)
        return None

    def choose(self, known: Any, body: Sequence[ast.stmt], otherwise: Sequence[ast.stmt]) -> _Left | None:
        if known is not UNKNOWN:
            return self.run(body if known else otherwise)
        ways: list[tuple[_Walker, _Left | _Raised | None]] = []
        for statements in (body, otherwise):
            fork = _Walker(self.definitions, self.own_class, dict(self.values), self.entered)
            try:
                ways.append((fork, fork.run(statements)))
            except _Raised as raised:
                ways.append((fork, raised))
        (taken, left), (other, other_left) = sorted(ways, key=lambda way: (_rank(way[1]), -len(way[0].calls)))
        self.calls += taken.calls
        self.repeated += taken.repeated
        if isinstance(left, _Raised):
            raise left
        if not other_left:
            shared = other.values
            taken.values = {key: value for key, value in taken.values.items() if _same(shared.get(key, UNKNOWN), value)}
        self.values = taken.values
        return left

    def loop(self, statement: ast.For | ast.AsyncFor) -> _Left | None:
        self.note(statement.iter)
        rounds = self.rounds(statement.iter)
        for number in rounds if rounds is not None else (UNKNOWN,):
            self.assign(statement.target, None)
            if number is not UNKNOWN and isinstance(statement.target, ast.Name):
                self.values[statement.target.id] = number
            left = self.run_repeated(statement.body) if rounds is None else self.run(statement.body)
            if left and left.how != "continue":
                return _outside_the_loop(left)
        return self.run(statement.orelse)

    def run_repeated(self, statements: Sequence[ast.stmt]) -> _Left | None:
        first = len(self.calls)
        try:
            return self.run(statements)
        finally:
            self.repeated += self.calls[first:]

    def rounds(self, of: ast.expr) -> range | None:
        if not (isinstance(of, ast.Call) and written(of.func) == "range"):
            return None
        bounds = [self.value(argument) for argument in of.args]
        if not all(isinstance(bound, int) for bound in bounds):
            return None
        return range(*bounds)[:MOST_ROUNDS]

    def note(self, node: ast.AST | None) -> None:
        """Notes the calls in an expression, in the order in which they are made, and enters those that it can."""
        for call in _calls_in(node) if node else ():
            keywords = {keyword.arg: self.value(keyword.value) for keyword in call.keywords if keyword.arg}
            name = written(call.func)
            self.calls.append(Call(name, tuple(map(self.value, call.args)), keywords, call))
            self.enter(name, call)

    def enter(self, name: str, call: ast.Call) -> None:
        own = name.startswith("self.")
        inner = f"{self.own_class}.{name.removeprefix('self.')}" if own else name
        if inner not in self.definitions or inner in self.entered:
            return
        if isinstance(self.definitions[inner].node, ast.ClassDef):
            return
        function = _function(self.definitions[inner])
        entered = _Walker(
            self.definitions,
            self.own_class if own else "",
            self.handed_over(function, call, own),
            (*self.entered, inner),
            self.calls,
            self.repeated,
        )
        entered.run(function.body)
        if own:
            outside = {key: value for key, value in self.values.items() if not key.startswith("self.")}
            self.values = outside | {key: value for key, value in entered.values.items() if key.startswith("self.")}

    def handed_over(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call, own: bool
    ) -> dict[str, Any]:
        """What is known inside: of self, and of the parameters by what they are given."""
        known = {key: value for key, value in self.values.items() if own and key.startswith("self.")}
        parameters = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
        given = dict(zip(parameters[1:] if own else parameters, call.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        for parameter, expression in given.items():
            value = self.value(expression)
            if value is not UNKNOWN:
                known[parameter] = value
            outer = f"{written(expression)}."
            inside = {key: value for key, value in self.values.items() if key.startswith(outer)}
            known |= {f"{parameter}.{key.removeprefix(outer)}": value for key, value in inside.items()}
        return known

    def assign(self, target: ast.expr, to: ast.expr | None) -> None:
        """Forgets what was known of the target; knows it anew if it knows the expression."""
        if isinstance(target, ast.Tuple | ast.List):
            parts = to.elts if isinstance(to, ast.Tuple) and len(to.elts) == len(target.elts) else [None] * 99
            for one, value in zip(target.elts, parts, strict=False):
                self.assign(one, value)
            return
        value = self.value(to)
        name = written(target)
        for key in [key for key in self.values if key == name or key.startswith((f"{name}.", f"{name}["))]:
            del self.values[key]
        if value is not UNKNOWN:
            self.values[name] = value

    def value(self, node: ast.expr | None) -> Any:
        """What an expression comes to, or UNKNOWN."""
        match node:
            case None:
                return UNKNOWN
            case ast.Constant():
                return node.value
            case ast.Tuple() | ast.List() | ast.Set():
                parts = tuple(map(self.value, node.elts))
                return UNKNOWN if any(part is UNKNOWN for part in parts) else parts
            case ast.UnaryOp():
                return _applied(_UNARY.get(type(node.op)), self.value(node.operand))
            case ast.BinOp():
                return _applied(_BINARY.get(type(node.op)), self.value(node.left), self.value(node.right))
            case ast.Compare() if len(node.ops) == 1:
                comparison = _COMPARISONS.get(type(node.ops[0]))
                return _applied(comparison, self.value(node.left), self.value(node.comparators[0]))
            case ast.BoolOp():
                return self.either(node)
            case ast.IfExp():
                test = self.value(node.test)
                return UNKNOWN if test is UNKNOWN else self.value(node.body if test else node.orelse)
        return self.values.get(written(node), UNKNOWN)

    def either(self, node: ast.BoolOp) -> Any:
        decides = isinstance(node.op, ast.Or)  # the first that is so, whatever the others are
        values = [self.value(part) for part in node.values]
        for value in values:
            if value is not UNKNOWN and bool(value) is decides:
                return value
        return UNKNOWN if any(value is UNKNOWN for value in values) else values[-1]


@lru_cache(maxsize=16_384)
def _calls_in(node: ast.AST) -> tuple[ast.Call, ...]:
    """The calls in an expression, the inner ones first. What a lambda calls is not called yet."""
    if isinstance(node, ast.Lambda):
        return ()
    inner = tuple(call for child in ast.iter_child_nodes(node) for call in _calls_in(child))
    return (*inner, node) if isinstance(node, ast.Call) else inner


def _rank(left: _Left | _Raised | None) -> int:
    """Which of two ways is taken: the lower."""
    return 0 if left is None else 1 if isinstance(left, _Left) else 2


def _outside_the_loop(left: _Left | None) -> _Left | None:
    return left if left and left.how == "return" else None


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def _function(definition: Defined) -> ast.FunctionDef | ast.AsyncFunctionDef:
    if isinstance(definition.node, ast.ClassDef):
        raise HistoryError(f"{definition.name} is to be followed, and is a class")
    return definition.node


def _exception(raised: ast.expr | None) -> str:
    return written(raised.func if isinstance(raised, ast.Call) else raised) if raised else "an exception"


def _applied(operation: Callable[..., Any] | None, *values: Any) -> Any:
    if operation is None or any(value is UNKNOWN for value in values):
        return UNKNOWN
    try:
        return operation(*values)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        return UNKNOWN


_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
