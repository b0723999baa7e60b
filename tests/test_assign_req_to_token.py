"""Slots enter the request table where they belong, and nothing else of it changes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from refspec.kernels import assign_req_to_token


@given(
    spans=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=0, max_size=4),
    rows=st.permutations([1, 2, 3, 4]),
)
def test_as_entered_one_by_one(spans: list[tuple[int, int]], rows: list[int]) -> None:
    """Any lengths, 0 among them; rows in any order."""
    table = -torch.arange(50).view(5, 10)
    expected = table.tolist()
    rows = rows[: len(spans)]
    slots = list(range(100, 100 + sum(length for _, length in spans)))
    left = iter(slots)
    for row, (start, length) in zip(rows, spans, strict=True):
        for position in range(start, start + length):
            expected[row][position] = next(left)

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    starts, ends = [start for start, _ in spans], [start + length for start, length in spans]
    assign_req_to_token(table, column(rows), column(starts), column(ends), column(slots))
    assert table.tolist() == expected
