"""What the judge knows of each exercise beyond its text: inputs to try, and how to speak of a wrong answer.

One module for each exercise, named as its id, with a PROBLEM. Where random inputs come from is left open: a generator
asks `pick` for whole numbers. A seeded one answers when an exercise is judged, and smaller ones of its answers are
given when the case at which it fails is made smaller.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import RenderableType

from refspec.grader.compare import Arrays, Difference, Names

Case = Mapping[str, "int | np.ndarray"]  # a function's arguments, by name and in its order
Pick = Callable[[int, int], int]  # any whole number from the first to the last


@dataclass(frozen=True)
class Explanation:
    """A wrong answer, in words of what it is about."""

    headline: str
    picture: RenderableType


@dataclass(frozen=True)
class Problem:
    """See the module's docstring."""

    outputs: Names
    shapes: Mapping[str, str]  # of each output, in the symbols of the skeleton
    reading_order: Sequence[str]  # the outputs, those first that explain most
    examples: Sequence[Case]  # fixed, small, and shown to the learner with what is right
    kinds: int  # the edges that a draw can be made to have are numbered
    draw: Callable[[Pick, int, int], Case]  # pick, which kind, how large: 1 to LARGEST
    explain: Callable[[Case, Arrays, Arrays, Difference], Explanation]  # the case, what is right, what was returned
    picture: Callable[[Case], RenderableType]  # the case alone


LARGEST = 4


def problem_of(exercise_id: str) -> Problem:
    """Raises ModuleNotFoundError for an exercise that has none."""
    problem = importlib.import_module(f"{__name__}.{exercise_id}").PROBLEM
    assert isinstance(problem, Problem)
    return problem
