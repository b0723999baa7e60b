"""Each accepted node's slot, and the one in front of the block that it belongs in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.kernels import compaction_moves, move_kv_cache
from refspec.kernels.compaction_moves import compaction_moves_torch, compaction_moves_triton
from refspec.memory.kv_pool import KVLayout, MHATokenToKVPool


def i32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@both_backends
@settings(max_examples=40)
@given(requests=st.lists(st.tuples(st.permutations(range(6)), st.integers(0, 4)), max_size=4), d=st.integers(4, 6))
def test_as_found_node_by_node(backend: str, requests: list[tuple[list[int], int]], d: int) -> None:
    slots = torch.randperm(100)[: 6 * len(requests)] + 1
    paths = [[6 * r + column for column in columns[:length]] for r, (columns, length) in enumerate(requests)]
    accept_index = i32([path + [-1] * (d - len(path)) for path in paths]).view(len(paths), d)
    dst, src = compaction_moves(accept_index, slots, backend)
    expected = [
        (int(slots[6 * r + i]), int(slots[path[i]])) if i < len(path) else (0, 0)
        for r, path in enumerate(paths)
        for i in range(d)
    ]
    assert list(zip(dst.tolist(), src.tolist(), strict=True)) == expected


@both_backends
def test_PAGE_05_moves_that_overlap(backend: str) -> None:
    """Slots 20 to 27, of which nodes 0, 2 and 5 are kept: 22 moves to 21, and 25 to 22. Padding moves the dummy."""
    pool = MHATokenToKVPool(KVLayout(3, 2, 4, torch.float32), 29, torch.device("cpu"))
    for layer in pool.layers:
        layer.copy_(torch.arange(30.0).view(30, *[1] * (layer.dim() - 1)).expand_as(layer))
    moves = compaction_moves(i32([[0, 2, 5, -1, -1]]), torch.arange(20, 28), backend)
    move_kv_cache(pool, *moves, backend)
    for layer in pool.layers:
        assert (layer.flatten(1) == layer.flatten(1)[:, :1]).all()
        assert layer.flatten(1)[:, 0].tolist() == [*range(21), 22, 25, *range(23, 30)]


@pytest.mark.parametrize("b", [1, 5, 85, 86, 200])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(b: int) -> None:
    """Three places a request: 255 of a block of 256, then one more than it."""
    rows = 4 * torch.arange(b, dtype=torch.int32)
    inputs = torch.stack([rows, rows + 3, torch.full_like(rows, -1)], 1), torch.randperm(4 * b) + 1
    with guarded_outputs():
        ours = compaction_moves_triton(*map(among_nonsense, inputs))
    for one, other in zip(ours, compaction_moves_torch(*inputs), strict=True):
        assert torch.equal(one, other)


GOOD: dict[str, Any] = {"accept_index": i32([[0, 2], [3, -1]]), "out_slots": torch.arange(1, 7)}


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"accept_index": torch.tensor([[0, 2], [3, -1]])}, "accept_index is torch.int64"),
        ({"accept_index": i32([[0, 3], [3, -1]])}, "accept_index names rows outside of its request's 3"),
        ({"accept_index": i32([[0, 2], [-1, 3]])}, "accept_index has a row behind padding"),
        ({"out_slots": torch.arange(5)}, "out_slots has 5 rows"),
        ({"out_slots": torch.arange(2)}, "out_slots has 2 rows"),
        ({"out_slots": torch.arange(6).int()}, "out_slots is torch.int32"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, wrong: dict[str, Any], message: str) -> None:
    compaction_moves(**GOOD, backend=backend)
    with pytest.raises(ValueError, match=message):
        compaction_moves(**GOOD | wrong, backend=backend)
