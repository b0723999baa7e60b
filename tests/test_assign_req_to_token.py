"""Slots enter the request table where they belong, and nothing else of it changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import assert_rim_untouched
from torch import Tensor

from refspec.kernels import assign_req_to_token
from refspec.kernels.assign_req_to_token import assign_req_to_token_triton


def column(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@both_backends
@settings(max_examples=60)
@given(
    spans=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=0, max_size=4),
    rows=st.permutations([1, 2, 3, 4]),
)
def test_as_entered_one_by_one(backend: str, spans: list[tuple[int, int]], rows: list[int]) -> None:
    """Any lengths, 0 among them; rows in any order."""
    table = -torch.arange(50).view(5, 10)
    expected = table.tolist()
    rows = rows[: len(spans)]
    slots = list(range(100, 100 + sum(length for _, length in spans)))
    left = iter(slots)
    for row, (start, length) in zip(rows, spans, strict=True):
        for position in range(start, start + length):
            expected[row][position] = next(left)
    starts, ends = [start for start, _ in spans], [start + length for start, length in spans]
    assign_req_to_token(table, column(rows), column(starts), column(ends), column(slots), backend)
    assert table.tolist() == expected


@both_backends
def test_parts_of_several_blocks(backend: str) -> None:
    """Beside an empty one and a short one, whatever the block's size."""
    lens, rows = [700, 0, 3, 1025], [2, 0, 3, 1]
    table = torch.full((4, 1100), -1)
    slots = torch.arange(100, 100 + sum(lens))
    starts = [5, 9, 1, 75]
    ends = [start + length for start, length in zip(starts, lens, strict=True)]
    assign_req_to_token(table, column(rows), column(starts), column(ends), slots, backend)
    expected = torch.full((4, 1100), -1)
    for row, start, part in zip(rows, starts, slots.split(lens), strict=True):
        expected[row, start : start + len(part)] = part
    assert torch.equal(table, expected)


@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33, 256, 257])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int) -> None:
    """Whole rows, the first of the table and the last, of `size` columns."""
    table = among_nonsense(torch.full((3, size), -1))
    slots = torch.arange(2 * size)
    where = [among_nonsense(x) for x in (column([2, 0]), column([0, 0]), column([size, size]), slots)]
    assign_req_to_token_triton(table, *where)
    assert torch.equal(table, torch.stack([slots[size:], torch.full((size,), -1), slots[:size]]))
    for x in (table, *where):
        assert_rim_untouched(x)


@needs_interpreter
@pytest.mark.parametrize(
    ("ends", "entered"),
    [
        ([4, 4], [[0, 1, 2, 3], [4, -1, -1, -1]]),  # 8 asked for, 5 there
        ([2, 1], [[0, 1, -1, -1], [2, -1, -1, -1]]),  # 3 asked for, 5 there
        ([4, -3], [[0, 1, 2, 3], [-1, -1, -1, -1]]),
    ],
)
def test_lengths_that_disagree_with_slots_take_no_more_than_there_are(
    ends: list[int], entered: list[list[int]]
) -> None:
    """On a GPU lengths are not looked at: then what they ask for too much stays as it was."""
    table, slots = among_nonsense(torch.full((2, 4), -1)), among_nonsense(torch.arange(5))
    assign_req_to_token_triton(table, column([0, 1]), column([0, 0]), column(ends), slots)
    assert table.tolist() == entered
    assert_rim_untouched(table)


@needs_interpreter
def test_TRI_05_lengths_add_up_in_64_bits() -> None:
    """64 parts of 2^27: the slots end in the first, and no place behind 2^31 wraps to one before their end."""
    table, none = among_nonsense(torch.full((64, 10), -1)), torch.zeros(64, dtype=torch.int64)
    assign_req_to_token_triton(table, torch.arange(64), none, none + 2**27, torch.arange(10))
    assert table[0].tolist() == list(range(10))
    assert bool((table[1:] == -1).all())
    assert_rim_untouched(table)


@both_backends
@pytest.mark.parametrize("b", [0, 2])
def test_SEQ_08_nothing_to_enter(backend: str, b: int) -> None:
    none, table = torch.zeros(b, dtype=torch.int64), torch.arange(8).view(2, 4)
    assign_req_to_token(table, none, none, none, column([]), backend)
    assert torch.equal(table, torch.arange(8).view(2, 4))


GOOD: dict[str, Any] = {
    "req_to_token": torch.arange(8).view(2, 4),
    "req_pool_indices": column([1]),
    "start": column([1]),
    "end": column([4]),
    "slots": column([7, 8, 9]),
}


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"req_to_token": torch.zeros(2, 4)}, r"req_to_token is torch\.float32"),
        ({"req_to_token": torch.arange(8)}, r"req_to_token has shape \(8,\)"),
        ({"req_to_token": torch.arange(8).view(4, 2).t()}, "req_to_token has strides"),
        ({"req_to_token": torch.zeros(2, 4, dtype=torch.int64, device="meta")}, "req_to_token is on meta"),
        ({"req_pool_indices": column([-1])}, "req_pool_indices has entries from -1"),
        ({"req_pool_indices": column([2])}, "req_pool_indices has entries from 2 to 2, they must be from 0 to 1"),
        ({"req_pool_indices": column([1]).int()}, r"req_pool_indices is torch\.int32"),
        ({"start": column([1, 2])}, "start has shape"),
        ({"start": column([-1])}, "start has entries from -1"),
        ({"start": column([1]).int()}, r"start is torch\.int32"),
        ({"end": column([4, 4])}, "end has shape"),
        ({"end": column([5])}, "end has entries from 5 to 5"),
        ({"end": column([0])}, "end - start has entries from -1"),
        ({"slots": column([7, 8])}, "slots .*2.*end - start.* 3"),
        ({"slots": column([7, 8, 9, 9])}, "slots .*4.*end - start.* 3"),
        ({"slots": column([7, 8, 9]).int()}, r"slots is torch\.int32"),
        ({"slots": torch.arange(6)[::2]}, "slots has strides"),
    ],
    ids=str,
)
def test_bad_arguments_are_named_and_nothing_is_entered(backend: str, wrong: dict[str, Any], message: str) -> None:
    good = {name: x.clone() for name, x in GOOD.items()}
    before = good["req_to_token"].clone()
    with pytest.raises(ValueError, match=message):
        assign_req_to_token(**good | wrong, backend=backend)
    assert torch.equal(good["req_to_token"], before)
    assign_req_to_token(**good, backend=backend)
    assert good["req_to_token"].tolist() == [[0, 1, 2, 3], [4, 7, 8, 9]]
