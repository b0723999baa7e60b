"""The sample of combinations leaves no pair out: the tests that rely on it say "every" and mean it."""

from __future__ import annotations

from itertools import combinations

import pytest
from pairwise import pairs_of, pairwise

FACTORS = [
    {"a": [1, 2]},
    {"a": [1, 2], "b": ["x", "y", "z"]},
    {"k": [1, 2, 3, 4, 8], "S": [1, 2, 3, 4, 5, 6], "N": ["2", "k+1"], "batch": [1, 2, 7], "exact": [False, True]},
]


@pytest.mark.parametrize("factors", FACTORS[1:], ids=str)
def test_every_two_values_meet(factors: dict[str, list[object]]) -> None:
    met = set().union(*(pairs_of(list(row.items())) for row in pairwise(factors)))
    for (a, xs), (b, ys) in combinations(factors.items(), 2):
        assert {frozenset([(a, x), (b, y)]) for x in xs for y in ys} <= met


def test_every_row_chooses_one_value_for_each_factor() -> None:
    factors = FACTORS[2]
    for row in pairwise(factors):
        assert list(row) == list(factors)
        assert all(row[name] in values for name, values in factors.items())


def test_sample_is_small_and_the_same_each_time() -> None:
    rows = pairwise(FACTORS[2])
    assert rows == pairwise(FACTORS[2])
    assert len(rows) < 45  # of 360 combinations; 30 is the least possible
