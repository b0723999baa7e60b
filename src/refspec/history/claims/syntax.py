"""What checks share: calls, keywords and values in the syntax tree of a definition."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from refspec.history.claims.evidence import Defined, NotThereError


def calls(node: ast.AST) -> Iterator[ast.Call]:
    """All calls in a piece of code."""
    return (one for one in ast.walk(node) if isinstance(one, ast.Call))


def name_of(call: ast.Call) -> str:
    """What is called, as it is written."""
    return ast.unparse(call.func)


def called(found: Defined) -> list[str]:
    """What a definition calls, as it is written."""
    return [name_of(call) for call in calls(found.node)]


def keyword(found: Defined, name: str) -> str:
    """What the first call in it that has such a keyword gives for it; "" if none has."""
    values = (one.value for call in calls(found.node) for one in call.keywords if one.arg == name)
    return next(map(ast.unparse, values), "")


def raises(node: ast.AST, error: str) -> bool:
    """Does a piece of code raise this error?"""
    return any(isinstance(one, ast.Raise) and one.exc and error in ast.unparse(one.exc) for one in ast.walk(node))


def whole_number(node: ast.expr, names: dict[str, int]) -> int:
    """The value of an expression of whole numbers, if it is one; nothing of the clone's is run."""
    match node:
        case ast.Constant(value=int(found)):
            return found
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -whole_number(operand, names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return whole_number(left, names) + whole_number(right, names)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return whole_number(left, names) - whole_number(right, names)
        case ast.IfExp(test=ast.Compare(left=left, ops=[ast.Gt()], comparators=[right]), body=body, orelse=other):
            return whole_number(body if whole_number(left, names) > whole_number(right, names) else other, names)
    raise NotThereError(f"{ast.unparse(node)} is no sum of whole numbers")
