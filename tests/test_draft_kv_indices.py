"""A branch attends the committed tokens and its own draft tokens so far, and nothing else."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.kernels import assign_draft_cache_locs, draft_kv_indices
from refspec.kernels.draft_kv_indices import draft_kv_indices_torch, draft_kv_indices_triton


@both_backends
@settings(max_examples=30)
@given(
    seq_lens=st.lists(st.integers(0, 20), max_size=3),
    topk=st.integers(1, 4),
    num_steps=st.integers(1, 5),
    step=st.integers(0, 4),
    page_size=st.sampled_from([1, 2, 4, 16]),
    rows=st.permutations([0, 1, 2]),
)
def test_committed_slots_and_then_the_branchs_own(
    backend: str, seq_lens: list[int], topk: int, num_steps: int, step: int, page_size: int, rows: list[int]
) -> None:
    step %= num_steps
    rows = rows[: len(seq_lens)]
    table = torch.arange(1000, 1600).view(3, 200)
    where = table, torch.tensor(rows, dtype=torch.int64), torch.tensor(seq_lens, dtype=torch.int64)
    kv_indptr, kv_indices = draft_kv_indices(*where, topk, step, num_steps, page_size, backend=backend)
    own = assign_draft_cache_locs(*where, topk, num_steps, page_size, backend="torch").view(-1, topk, num_steps)
    expected = [
        table[row, :seq_len].tolist() + own[r, j, : step + 1].tolist()
        for r, (row, seq_len) in enumerate(zip(rows, seq_lens, strict=True))
        for j in range(topk)
    ]
    assert kv_indptr.dtype == kv_indices.dtype == torch.int64
    assert kv_indptr.tolist() == [sum(map(len, expected[:z])) for z in range(len(expected) + 1)]
    assert kv_indices.tolist() == [slot for branch in expected for slot in branch]


@both_backends
def test_PAGE_01_what_two_branches_of_three_steps_attend(backend: str) -> None:
    """Page 4, length 10: branch 1's steps stand at 18, 19, 20; whoever reads without num_steps would read 13."""
    arguments = torch.arange(24).view(1, 24), torch.tensor([0]), torch.tensor([10])
    kv_indptr, kv_indices = draft_kv_indices(*arguments, 2, 2, 3, 4, backend=backend)
    assert kv_indptr.tolist() == [0, 13, 26]
    assert kv_indices.tolist() == [*range(10), 10, 11, 12, *range(10), 18, 19, 20]


@both_backends
def test_one_branch_needs_no_num_steps_and_several_do(backend: str) -> None:
    arguments = torch.arange(24).view(1, 24), torch.tensor([0]), torch.tensor([10])
    ours = draft_kv_indices(*arguments, 1, 2, page_size=4, backend=backend)
    theirs = draft_kv_indices(*arguments, 1, 2, 5, page_size=4, backend=backend)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    with pytest.raises(ValueError, match="num_steps is missing: for topk 2"):
        draft_kv_indices(*arguments, 2, 2, page_size=4, backend=backend)


@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33, 511, 512, 1100])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of up to `size` tokens; 512 slots are one block, and programs take in several of them."""
    monkeypatch.setattr(import_module("refspec.kernels.assign_req_to_token"), "MOST_PROGRAMS", 8)
    topk, step, num_steps, page_size = 2, 1, 3, 4
    lens = torch.tensor([size, 0, size // 2])
    table, rows = torch.arange(3 * (size + 20)).view(3, -1), torch.tensor([2, 0, 1])
    rest = topk, step, num_steps, page_size, int(lens.sum())
    expected = draft_kv_indices_torch(table, rows, lens, *rest)
    guarded = [among_nonsense(x) for x in (table, rows, lens)]
    with guarded_outputs():
        ours = draft_kv_indices_triton(*guarded, *rest)
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


@needs_interpreter
def test_TRI_05_lengths_add_up_in_64_bits() -> None:
    """64 lengths of 2^27 in a buffer for 64 slots: where each begins is still right, and nothing else is written."""
    lens = torch.full((64,), 2**27)
    table, rows = torch.arange(64 * 64).view(64, 64), torch.arange(64)
    with guarded_outputs():
        kv_indptr, kv_indices = draft_kv_indices_triton(table, rows, lens, 1, 0, 1, 1, seq_lens_sum=0)
    assert kv_indptr.tolist() == [z * (2**27 + 1) for z in range(65)]
    assert kv_indptr[-1] - 64 == 8589934592
    assert torch.equal(kv_indices, table[0])


@both_backends
def test_SEQ_08_no_requests(backend: str) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    kv_indptr, kv_indices = draft_kv_indices(torch.zeros(2, 4).long(), none, none, 4, 1, 3, backend=backend)
    assert (kv_indptr.tolist(), kv_indptr.dtype) == ([0], torch.int64)
    assert (kv_indices.shape, kv_indices.dtype) == ((0,), torch.int64)


GOOD: dict[str, Any] = {
    "req_to_token": torch.arange(48).view(2, 24),
    "req_pool_indices": torch.tensor([1]),
    "seq_lens": torch.tensor([10]),
    "topk": 2,
    "step": 2,
    "num_steps": 3,
    "page_size": 4,
    "seq_lens_sum": 10,
}


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"req_to_token": torch.zeros(2, 24)}, "req_to_token is torch.float32"),
        ({"req_to_token": torch.arange(40).view(2, 20)}, "req_to_token has 20 columns"),
        ({"req_pool_indices": torch.tensor([2])}, "req_pool_indices has entries from 2"),
        ({"seq_lens": torch.tensor([-1])}, "seq_lens has entries from -1"),
        ({"seq_lens": torch.tensor([10]).int()}, "seq_lens is torch.int32"),
        ({"topk": 0}, "topk is 0"),
        ({"step": -1}, "step is -1"),
        ({"step": 3}, "step is 3, it must be at least 0 and at most 2"),
        ({"seq_lens_sum": 9}, "seq_lens_sum is 9, seq_lens add up to 10"),
        ({"seq_lens_sum": -1}, "seq_lens_sum is -1"),
        ({"page_size": -4}, "page_size is -4"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, wrong: dict[str, Any], message: str) -> None:
    draft_kv_indices(**GOOD, backend=backend)
    with pytest.raises(ValueError, match=message):
        draft_kv_indices(**GOOD | wrong, backend=backend)
