"""Few combinations in which nevertheless every two values meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Choice = tuple[str, Any]  # a factor and one of its values


def pairs_of(choices: Sequence[Choice]) -> set[frozenset[Choice]]:
    return {frozenset(pair) for pair in combinations(choices, 2)}


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows, one value for each factor, so that every two values of two factors occur together in at least one row.

    Greedy and without chance: a row starts from the first pair that has not occurred, and takes for each further
    factor the value that brings the most new pairs (of several, the one used least so far, then the first).
    """
    names = list(factors)
    missing = [
        ((a, x), (b, y)) for a, b in combinations(names, 2) for x in factors[a] for y in factors[b]
    ]  # in a fixed order
    used: dict[Choice, int] = {}
    rows = []
    while missing:
        open_pairs = {frozenset(pair) for pair in missing}
        chosen: dict[str, Any] = dict(missing[0])
        for name in names:
            if name not in chosen:
                chosen[name] = max(
                    factors[name],
                    key=lambda value: (
                        sum(frozenset([(name, value), other]) in open_pairs for other in chosen.items()),
                        -used.get((name, value), 0),
                    ),
                )
        row = {name: chosen[name] for name in names}
        for choice in row.items():
            used[choice] = used.get(choice, 0) + 1
        now = pairs_of(list(row.items()))
        missing = [pair for pair in missing if frozenset(pair) not in now]
        rows.append(row)
    return rows
