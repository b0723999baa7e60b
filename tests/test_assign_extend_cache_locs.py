"""Slots come back out of the request table as they were entered."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.kernels import assign_extend_cache_locs, assign_req_to_token
from refspec.kernels.assign_extend_cache_locs import assign_extend_cache_locs_triton


def column(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@both_backends
@settings(max_examples=40)
@given(
    spans=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=0, max_size=4),
    rows=st.permutations([1, 2, 3, 4]),
)
def test_what_was_entered_is_read(backend: str, spans: list[tuple[int, int]], rows: list[int]) -> None:
    """Any lengths, 0 among them; rows in any order."""
    total = sum(length for _, length in spans)
    where = (
        column(rows[: len(spans)]),
        column([start for start, _ in spans]),
        column([start + length for start, length in spans]),
    )
    table, slots = torch.full((5, 10), -1), torch.arange(100, 100 + total)
    assign_req_to_token(table, *where, slots, backend="torch")
    read = assign_extend_cache_locs(table, *where, total, backend)
    assert read.dtype == torch.int64
    assert read.tolist() == slots.tolist()


@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33, 256, 257, 700])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int) -> None:
    """Whole rows, the first of the table and the last, of `size` columns; 256 are one block."""
    table = torch.arange(3 * size).view(3, size)
    where = column([2, 0]), column([0, 0]), column([size, size])
    guarded = [among_nonsense(x) for x in (table, *where)]
    with guarded_outputs():
        slots = assign_extend_cache_locs_triton(*guarded, 2 * size)
    assert torch.equal(slots, table[[2, 0]].flatten())


@needs_interpreter
def test_more_blocks_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program then takes in several."""
    monkeypatch.setattr(import_module("refspec.kernels.assign_req_to_token"), "MOST_PROGRAMS", 4)
    table = torch.arange(3000).view(2, 1500)
    slots = assign_extend_cache_locs_triton(table, column([1, 0]), column([0, 7]), column([1500, 1290]), 2783)
    assert torch.equal(slots, torch.cat([table[1], table[0, 7:1290]]))


@needs_interpreter
def test_TRI_05_lengths_add_up_in_64_bits() -> None:
    """64 parts of 2^27: the buffer ends in the first, and no place behind 2^31 wraps to one before its end."""
    table, none = torch.arange(64 * 10).view(64, 10), torch.zeros(64, dtype=torch.int64)
    with guarded_outputs():
        slots = assign_extend_cache_locs_triton(table, torch.arange(64), none, none + 2**27, 10)
    assert torch.equal(slots, table[0])


@both_backends
@pytest.mark.parametrize("b", [0, 2])
def test_SEQ_08_nothing_to_read(backend: str, b: int) -> None:
    none = torch.zeros(b, dtype=torch.int64)
    slots = assign_extend_cache_locs(torch.zeros(2, 4).long(), none, none, none, 0, backend)
    assert (slots.shape, slots.dtype) == ((0,), torch.int64)


GOOD: dict[str, Any] = {
    "req_to_token": torch.arange(8).view(2, 4),
    "req_pool_indices": column([1]),
    "start": column([1]),
    "end": column([4]),
    "total": 3,
}


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"req_to_token": torch.zeros(2, 4)}, "req_to_token is torch.float32"),
        ({"req_to_token": torch.arange(8).view(4, 2).t()}, "req_to_token has strides"),
        ({"req_pool_indices": column([-1])}, "req_pool_indices has entries from -1"),
        ({"start": column([1, 2])}, "start has shape"),
        ({"start": column([-1])}, "start has entries from -1"),
        ({"start": column([1]).int()}, "start is torch.int32"),
        ({"end": column([5])}, "end has entries from 5 to 5"),
        ({"end": column([0])}, "end - start has entries from -1"),
        ({"total": 4}, "total is 4, end - start add up to 3"),
        ({"total": -3}, "total is -3"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, wrong: dict[str, Any], message: str) -> None:
    assign_extend_cache_locs(**GOOD, backend=backend)
    with pytest.raises(ValueError, match=message):
        assign_extend_cache_locs(**GOOD | wrong, backend=backend)
