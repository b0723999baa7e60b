"""A forward's rows attend their request's committed tokens and its tail, and nothing else."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.kernels import paged_kv_indices
from refspec.kernels.paged_kv_indices import paged_kv_indices_torch, paged_kv_indices_triton


@both_backends
@settings(max_examples=30)
@given(
    prefix_lens=st.lists(st.integers(0, 20), max_size=3),
    tail=st.integers(0, 5),
    spare=st.integers(0, 3),
    rows=st.permutations([0, 1, 2]),
)
def test_committed_slots_and_then_the_tail(
    backend: str, prefix_lens: list[int], tail: int, spare: int, rows: list[int]
) -> None:
    b = len(prefix_lens)
    table, tails = torch.arange(1000, 1060).view(3, 20), torch.arange(b * tail).view(b, tail)
    expected = [
        table[row, :length].tolist() + own
        for row, length, own in zip(rows[:b], prefix_lens, tails.tolist(), strict=True)
    ]
    where = torch.tensor(rows[:b], dtype=torch.int64), torch.tensor(prefix_lens, dtype=torch.int64)
    room = sum(map(len, expected)) + spare
    kv_indptr, kv_indices = paged_kv_indices(table, *where, tails, room, backend=backend)
    assert kv_indptr.dtype == kv_indices.dtype == torch.int64
    assert len(kv_indices) == room
    assert kv_indptr.tolist() == [sum(map(len, expected[:r])) for r in range(b + 1)]
    assert kv_indices[: room - spare].tolist() == [slot for slots in expected for slot in slots]


@both_backends
def test_rows_may_lie_apart(backend: str) -> None:
    """As the draft's tails do, which are the first columns of a wider table."""
    table, tails = torch.arange(40).view(2, 20)[:, :10], torch.arange(100, 112).view(2, 6)[:, :2]
    kv_indptr, kv_indices = paged_kv_indices(
        table, torch.tensor([1, 0]), torch.tensor([1, 2]), tails, 7, backend=backend
    )
    assert kv_indptr.tolist() == [0, 3, 7]
    assert kv_indices.tolist() == [20, 100, 101, 0, 1, 106, 107]


@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33, 511, 512, 1100])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of up to `size` tokens; 512 slots are one block, and programs take in several of them."""
    monkeypatch.setattr(import_module("refspec.kernels.assign_req_to_token"), "MOST_PROGRAMS", 8)
    lens = torch.tensor([size, 0, size // 2])
    table, rows, tails = torch.arange(3 * size).view(3, -1), torch.tensor([2, 0, 1]), torch.arange(9).view(3, 3)
    room = int(lens.sum()) + 9
    expected = paged_kv_indices_torch(table, rows, lens, tails, room)
    guarded = [among_nonsense(x) for x in (table, rows, lens, tails)]
    with guarded_outputs():
        ours = paged_kv_indices_triton(*guarded, room)
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


@needs_interpreter
def test_TRI_05_lengths_add_up_in_64_bits() -> None:
    """64 lengths of 2^27 in a buffer for 64 slots: where each begins is still right, and nothing else is written."""
    lens, tails = torch.full((64,), 2**27), torch.zeros(64, 1, dtype=torch.int64)
    table, rows = torch.arange(64 * 64).view(64, 64), torch.arange(64)
    with guarded_outputs():
        kv_indptr, kv_indices = paged_kv_indices_triton(table, rows, lens, tails, 64)
    assert kv_indptr.tolist() == [z * (2**27 + 1) for z in range(65)]
    assert torch.equal(kv_indices, table[0])


@both_backends
def test_SEQ_08_no_requests(backend: str) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    kv_indptr, kv_indices = paged_kv_indices(torch.zeros(2, 4).long(), none, none, none.view(0, 3), 5, backend=backend)
    assert (kv_indptr.tolist(), kv_indptr.dtype) == ([0], torch.int64)
    assert (kv_indices.shape, kv_indices.dtype) == ((5,), torch.int64)


GOOD: dict[str, Any] = {
    "req_to_token": torch.arange(48).view(2, 24),
    "req_pool_indices": torch.tensor([1]),
    "prefix_lens": torch.tensor([10]),
    "tail_slots": torch.tensor([[3, 4]]),
    "room": 12,
}


@both_backends
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"req_to_token": torch.arange(48)}, "req_to_token has shape"),
        ({"req_pool_indices": torch.tensor([2])}, "req_pool_indices has entries from 2 to 2, they must be from 0 to 1"),
        ({"prefix_lens": torch.tensor([25])}, "prefix_lens has entries from 25 to 25, they must be from 0 to 24"),
        ({"prefix_lens": torch.tensor([1, 2])}, r"prefix_lens has shape \(2,\), it must be \(1\)"),
        ({"prefix_lens": torch.tensor([10]).int()}, r"prefix_lens is torch\.int32"),
        ({"tail_slots": torch.tensor([3, 4])}, "tail_slots has shape"),
        ({"tail_slots": torch.zeros(2, 2).long()}, r"tail_slots has shape \(2, 2\), it must be \(1, any\)"),
        ({"room": 11}, "room is 11, but prefix_lens and tail_slots come to 12 slots"),
        ({"room": -1}, "room is -1"),
    ],
)
def test_what_is_refused(backend: str, changed: dict[str, Any], message: str) -> None:
    paged_kv_indices(**GOOD, backend=backend)
    with pytest.raises(ValueError, match=message):
        paged_kv_indices(**GOOD | changed, backend=backend)
