"""Every branch's first page begins with the committed tokens of the last partly filled page, and nothing else moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import assert_rim_untouched, copy_of, pool_of

from refspec.kernels import assign_draft_cache_locs, duplicate_prefix_tail
from refspec.kernels.duplicate_prefix_tail import duplicate_prefix_tail_triton
from refspec.oracle.pool import Pool


def column(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def expected_layers(
    before: Pool, table: torch.Tensor, rows: list[int], seq_lens: list[int], topk: int, num_steps: int, page_size: int
) -> list[torch.Tensor]:
    """Slot by slot: what stands `offset` positions before a branch's first step is a copy of the committed token as
    far before the end.
    """
    layers = copy_of(before).layers
    own = assign_draft_cache_locs(table, column(rows), column(seq_lens), topk, num_steps, page_size, "torch")
    first = own.view(-1, topk, num_steps)[:, :, 0].tolist()
    for r, (row, seq_len) in enumerate(zip(rows, seq_lens, strict=True)):
        places = table[row].tolist()
        for branch in range(1, topk if page_size > 1 else 1):
            start = places.index(first[r][branch])
            for offset in range(1, seq_len % page_size + 1):
                for layer, old in zip(layers, before.layers, strict=True):
                    layer[places[start - offset]] = old[places[seq_len - offset]]
    return layers


@both_backends
@settings(max_examples=30)
@given(
    seq_lens=st.lists(st.integers(0, 40), max_size=3),
    topk=st.integers(1, 4),
    num_steps=st.integers(1, 5),
    page_size=st.sampled_from([1, 2, 4, 16, 32]),
    widths=st.lists(st.sampled_from([0, 1, 3, 8]), max_size=2),
    rows=st.permutations([0, 1, 2]),
)
def test_copies_stand_before_each_branchs_first_step(
    backend: str,
    seq_lens: list[int],
    topk: int,
    num_steps: int,
    page_size: int,
    widths: list[int],
    rows: list[int],
) -> None:
    rows = rows[: len(seq_lens)]
    table = 1 + torch.randperm(3 * 320).view(3, 320)
    pool = pool_of(3 * 320 + 1, *widths)
    expected = expected_layers(pool, table, rows, seq_lens, topk, num_steps, page_size)
    duplicate_prefix_tail(pool, table, column(rows), column(seq_lens), topk, num_steps, page_size, backend)
    for ours, theirs in zip(pool.layers, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert_rim_untouched(ours)


@both_backends
def test_PAGE_01_each_branch_starts_with_copies_of_positions_8_and_9(backend: str) -> None:
    """Page 4, length 10, two branches of three steps. The table maps position p to slot p + 4."""
    table, pool = torch.arange(4, 28).view(1, 24), pool_of(28, 3, 5)
    before = copy_of(pool)
    duplicate_prefix_tail(pool, table, column([0]), column([10]), 2, 3, 4, backend)
    for layer, old in zip(pool.layers, before.layers, strict=True):
        changed = [slot for slot in range(28) if not torch.equal(layer[slot], old[slot])]
        assert changed == [16 + 4, 17 + 4]
        assert torch.equal(layer[20:22], old[12:14])
    slots = assign_draft_cache_locs(table, column([0]), column([10]), 2, 3, 4, backend)
    assert slots[3:].tolist() == [22, 23, 24]  # right behind the copies


@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int) -> None:
    """Rows of `size` numbers; the table ends with the last branch's last step, the tail is all of a page but one."""
    width = 8 + 7 + 8 + 1  # two branches of one page each
    table = among_nonsense(torch.randperm(width).view(1, width))
    pool = pool_of(width, size, 4 * size)
    expected = expected_layers(pool, table, [0], [15], 2, 1, 8)
    duplicate_prefix_tail_triton(pool, table, among_nonsense(column([0])), among_nonsense(column([15])), 2, 1, 8)
    for ours, theirs in zip(pool.layers, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert_rim_untouched(ours)


@both_backends
def test_a_row_wider_than_one_program_holds(backend: str) -> None:
    table, pool = torch.arange(24).view(1, 24), pool_of(24, 5000)
    before = copy_of(pool)
    duplicate_prefix_tail(pool, table, column([0]), column([10]), 2, 3, 4, backend)
    assert torch.equal(pool.layers[0][16:18], before.layers[0][8:10])


@both_backends
@pytest.mark.parametrize(
    ("seq_lens", "topk", "page_size", "widths"),
    [([], 2, 4, [3]), ([0], 2, 4, [3]), ([8], 2, 4, [3]), ([7], 1, 4, [3]), ([7], 3, 1, [3]), ([7], 2, 4, [])],
)
def test_SEQ_08_nothing_to_copy(
    backend: str, seq_lens: list[int], topk: int, page_size: int, widths: list[int]
) -> None:
    """No requests, nothing committed, full pages, one branch, pages of one token, a pool without layers."""
    table, pool = torch.arange(60).view(1, 60), pool_of(60, *widths)
    before = copy_of(pool)
    rows = column([0] * len(seq_lens))
    duplicate_prefix_tail(pool, table, rows, column(seq_lens), topk, 3, page_size, backend)
    assert all(torch.equal(ours, old) for ours, old in zip(pool.layers, before.layers, strict=True))


GOOD: dict[str, Any] = {
    "req_to_token": torch.arange(24).view(1, 24),
    "req_pool_indices": column([0]),
    "seq_lens": column([10]),
    "topk": 2,
    "num_steps": 3,
    "page_size": 4,
}


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"req_to_token": torch.arange(20).view(1, 20)}, "req_to_token has 20 columns"),
        ({"req_to_token": torch.arange(10, 34).view(1, 24)}, "req_to_token's slots has entries from 0 to 27"),
        ({"req_pool_indices": column([1])}, "req_pool_indices has entries from 1"),
        ({"seq_lens": column([-1])}, "seq_lens has entries from -1"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"page_size": 0}, "page_size is 0"),
        ({"pool": Pool([torch.zeros(2, 24).t()])}, r"pool.layers\[0\] has strides"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, wrong: dict[str, Any], message: str) -> None:
    pool = {"pool": pool_of(24, 2)}
    duplicate_prefix_tail(**pool | GOOD, backend=backend)
    with pytest.raises(ValueError, match=message):
        duplicate_prefix_tail(**pool | GOOD | wrong, backend=backend)
