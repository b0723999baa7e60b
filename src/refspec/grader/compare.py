"""Is what a learner's function returned what it should be, and where does it first differ?

Whole numbers are compared exactly, of whatever width; fractions within a small tolerance. Whole numbers, fractions and
truth values are not taken for each other: a token id is no float. Lists are as good as arrays. NaN equals nothing but
a NaN that is expected at that very place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from refspec.grader.wire import Other, Plain

RELATIVE, ABSOLUTE = 1e-5, 1e-9
MOST_NUMBERS = 20_000  # in one output; a right one has hundreds
KINDS = {"b": "truth values", "i": "whole numbers", "u": "whole numbers", "f": "fractions"}

Names: TypeAlias = "str | tuple[Names, ...]"  # what a function returns, by name: ("scores", ("tokens", "parents"))
Arrays = Mapping[str, np.ndarray]


class UnlikeError(ValueError):
    """What was returned has another form than it must have. The message is for the learner."""


@dataclass(frozen=True)
class Difference:
    """The first place at which an output is wrong."""

    output: str
    index: tuple[int, ...] | None = None  # None where kind or shape are wrong
    sentence: str | None = None  # what is wrong; None where it is a value like others, only not the right one


def named_arrays(names: Names, value: Plain) -> dict[str, np.ndarray]:
    """What was returned, by name. Raises UnlikeError."""
    if isinstance(names, str):
        return {names: _as_array(names, value)}
    items = _items(value)
    if items is None or len(items) != len(names):
        got = _in_words(value) if items is None else f"{len(items)}"
        raise UnlikeError(f"it must return {len(names)} things, {_listed(names)}; yours returned {got}")
    arrays: dict[str, np.ndarray] = {}
    for inner, item in zip(names, items, strict=True):
        if not isinstance(inner, str) and _items(item) is None:
            raise UnlikeError(f"where {_listed(inner)} must be, yours returned {_in_words(item)}")
        arrays.update(named_arrays(inner, item))
    return arrays


def first_difference(
    expected: Arrays, got: Arrays, order: Sequence[str], shapes: Mapping[str, str]
) -> Difference | None:
    """By kind and shape, of all outputs, before by value; in this order of outputs. shapes: what they are in words."""
    for name in order:
        right, yours = expected[name], got[name]
        if KINDS[right.dtype.kind] != KINDS[yours.dtype.kind] and yours.size:
            sentence = f"{name} must hold {KINDS[right.dtype.kind]}; yours holds {KINDS[yours.dtype.kind]}"
            return Difference(name, None, f"{sentence} ({yours.dtype.name})")
        if right.shape != yours.shape:
            sentence = f"{name} must have the shape {shapes[name]} = {right.shape}; yours has {yours.shape}"
            return Difference(name, None, sentence)
    for name in order:
        right, yours = expected[name], got[name]
        unequal = np.argwhere(~_equal(right, yours))
        if len(unequal):
            index = tuple(int(i) for i in unequal[0])
            return Difference(name, index, _about_nan(f"{name}{list(index)}", right[index], yours[index]))
    return None


def same(one: Arrays, other: Arrays) -> bool:
    """Do two answers agree, in kinds, shapes and values?"""
    return one.keys() == other.keys() and all(
        KINDS[one[name].dtype.kind] == KINDS[other[name].dtype.kind]
        and one[name].shape == other[name].shape
        and bool(_equal(one[name], other[name]).all())
        for name in one
    )


def unchanged(before: np.ndarray, after: Plain) -> bool:
    """Is an input, to the bit, what it was?"""
    return (
        isinstance(after, np.ndarray)
        and (before.dtype, before.shape) == (after.dtype, after.shape)
        and before.tobytes() == after.tobytes()
    )


def _equal(right: np.ndarray, yours: np.ndarray) -> np.ndarray:
    if right.dtype.kind != "f":
        return np.asarray(right == yours)
    return np.isclose(yours, right, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)


def _about_nan(place: str, right: np.generic, yours: np.generic) -> str | None:
    if right.dtype.kind == "f" and np.isnan(yours):
        return f"{place} is NaN"
    if right.dtype.kind == "f" and np.isnan(right):
        return f"{place} must be NaN, and yours is not"
    return None


def _items(value: Plain) -> Sequence[Plain] | None:
    return value if isinstance(value, list) else None


def _as_array(name: str, value: Plain) -> np.ndarray:
    """An array, a number, or lists of them to any depth."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, bool | int | float):
        return np.array(value)
    if not isinstance(value, list):
        raise UnlikeError(f"{name} must be an array of numbers; yours is {_in_words(value)}")
    if len(value) > MOST_NUMBERS:
        raise UnlikeError(f"{name} must be much smaller; yours is a list of {len(value)}")
    if len(kinds := set(map(type, value))) == 1 and kinds <= {bool, int, float}:
        return np.array(value)
    parts = [_as_array(name, item) for item in value]
    if len({part.shape for part in parts}) > 1:
        raise UnlikeError(f"the rows of {name} must have one length; yours differ")
    if len({KINDS[part.dtype.kind] for part in parts}) > 1:
        raise UnlikeError(f"{name} must hold numbers of one kind; yours mixes them")
    return np.stack(parts) if parts else np.zeros(0)


def _in_words(value: Plain) -> str:
    if isinstance(value, Other):
        return f"a value of type {value.name}"
    if isinstance(value, np.ndarray):
        return f"one array of shape {value.shape}"
    return "a list" if isinstance(value, list) else repr(value)


def _listed(names: Names) -> str:
    return names if isinstance(names, str) else f"({', '.join(map(_listed, names))})"
