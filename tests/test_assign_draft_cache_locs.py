"""The draft's slots stand in the table branch after branch, each branch on pages of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.kernels import assign_draft_cache_locs
from refspec.kernels.assign_draft_cache_locs import (
    assign_draft_cache_locs_torch,
    assign_draft_cache_locs_triton,
    first_draft_positions,
    pages_per_branch,
)


def positions_by_rule(seq_len: int, topk: int, num_steps: int, page_size: int) -> list[list[int]]:
    """As the design states it, its two cases apart."""
    if page_size == 1 or topk == 1:
        return [[seq_len + j * num_steps + i for i in range(num_steps)] for j in range(topk)]
    tail = seq_len % page_size
    pages = -(-(tail + num_steps) // page_size)
    start = seq_len // page_size * page_size
    return [[start + j * pages * page_size + tail + i for i in range(num_steps)] for j in range(topk)]


def table_of(rows: int, width: int) -> torch.Tensor:
    """Row r, column c: 10000·(r+1) + c."""
    return 10_000 * torch.arange(1, rows + 1).unsqueeze(1) + torch.arange(width)


@both_backends
@settings(max_examples=40)
@given(
    seq_lens=st.lists(st.integers(0, 20), max_size=4),
    topk=st.integers(1, 5),
    num_steps=st.integers(1, 6),
    page_size=st.sampled_from([1, 2, 4, 16]),
    rows=st.permutations([0, 1, 2, 3]),
)
def test_as_the_rule_says(
    backend: str, seq_lens: list[int], topk: int, num_steps: int, page_size: int, rows: list[int]
) -> None:
    rows = rows[: len(seq_lens)]
    table = table_of(4, 200)
    slots = assign_draft_cache_locs(
        table,
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(seq_lens, dtype=torch.int64),
        topk,
        num_steps,
        page_size,
        backend,
    )
    assert slots.dtype == torch.int64
    assert slots.tolist() == [
        10_000 * (row + 1) + position
        for row, seq_len in zip(rows, seq_lens, strict=True)
        for branch in positions_by_rule(seq_len, topk, num_steps, page_size)
        for position in branch
    ]


@both_backends
def test_PAGE_01_two_branches_of_three_steps_behind_ten_tokens(backend: str) -> None:
    """Page 4: 2 tokens in the partial page, 2 pages a branch, 24 table positions in all, 14 of them new."""
    length = torch.tensor([10])
    assert pages_per_branch(length, 3, 4).tolist() == [2]
    extended = 10 // 4 * 4 + 2 * 2 * 4
    assert (extended, extended - 10) == (24, 14)
    table = torch.arange(100, 124).view(1, 24)
    slots = assign_draft_cache_locs(table, torch.tensor([0]), length, 2, 3, 4, backend)
    assert slots.tolist() == [110, 111, 112, 118, 119, 120]


@pytest.mark.parametrize("page_size", [2, 4, 16])
def test_PAGE_01_no_two_branches_share_a_page(page_size: int) -> None:
    for seq_len in range(20):
        for num_steps in range(1, 9):
            first = first_draft_positions(torch.tensor([seq_len]), 3, num_steps, page_size)[0].tolist()
            pages = [{position // page_size for position in range(p, p + num_steps)} for p in first]
            assert len(set.union(*pages)) == sum(map(len, pages))
            assert first[0] == seq_len


@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int) -> None:
    """`size` requests of k branches and S steps; the longest region ends where the table ends."""
    for topk, num_steps, page_size in [(1, size, 1), (5, 3, 4), (2, 129, 16)]:
        rows, lens = torch.arange(size - 1, -1, -1), torch.arange(1, size + 1)
        width = int(first_draft_positions(lens, topk, num_steps, page_size).max()) + num_steps
        table = table_of(size, width)
        expected = assign_draft_cache_locs_torch(table, rows, lens, topk, num_steps, page_size)
        guarded = [among_nonsense(x) for x in (table, rows, lens)]
        with guarded_outputs():
            ours = assign_draft_cache_locs_triton(*guarded, topk, num_steps, page_size)
        assert torch.equal(ours, expected)


@both_backends
def test_SEQ_08_no_requests(backend: str) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    slots = assign_draft_cache_locs(table_of(2, 3), none, none, 4, 3, 4, backend)
    assert (slots.shape, slots.dtype) == ((0,), torch.int64)


GOOD: dict[str, Any] = {
    "req_to_token": table_of(2, 24),
    "req_pool_indices": torch.tensor([1]),
    "seq_lens": torch.tensor([10]),
    "topk": 2,
    "num_steps": 3,
    "page_size": 4,
}


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"req_to_token": table_of(2, 24).int()}, "req_to_token is torch.int32"),
        ({"req_to_token": table_of(2, 24).t()}, "req_to_token has strides"),
        ({"req_to_token": table_of(2, 20)}, "req_to_token has 20 columns, .* seq_lens need 21"),
        ({"req_pool_indices": torch.tensor([2])}, "req_pool_indices has entries from 2 to 2, they must be from 0 to 1"),
        ({"req_pool_indices": torch.tensor([[1]])}, "req_pool_indices has shape"),
        ({"seq_lens": torch.tensor([1, 2])}, "seq_lens has shape"),
        ({"seq_lens": torch.tensor([-1])}, "seq_lens has entries from -1"),
        ({"seq_lens": torch.tensor([25])}, "seq_lens has entries from 25"),
        ({"seq_lens": torch.tensor([10], device="meta")}, "seq_lens is on meta"),
        ({"topk": 0}, "topk is 0, it must be at least 1"),
        ({"num_steps": -1}, "num_steps is -1"),
        ({"page_size": 0}, "page_size is 0"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, wrong: dict[str, Any], message: str) -> None:
    assign_draft_cache_locs(**GOOD, backend=backend)
    with pytest.raises(ValueError, match=message):
        assign_draft_cache_locs(**GOOD | wrong, backend=backend)
