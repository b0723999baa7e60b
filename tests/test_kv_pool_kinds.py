"""Every kind of pool keeps what it is given, and moves all of it; windows and sparse choices see what they should."""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations
from typing import Any

import pytest
import torch
from backends import both_backends
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_models import mla
from reference import softmax_attention

from refspec.contracts import ForwardBatch
from refspec.kernels import duplicate_prefix_tail
from refspec.kernels.backend import use_backend
from refspec.memory.kv_pool import (
    DSALayout,
    DSATokenToKVPool,
    KVLayout,
    MLALayout,
    PoolLayout,
    SWAKVPool,
    SWALayout,
    TokenToKVPool,
)
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner, PagedAttention, PoolAttention

CPU, F64 = torch.device("cpu"), torch.float64
LAYOUTS: dict[str, PoolLayout] = {
    "MHA": KVLayout(3, 2, 4, F64),
    "MLA": MLALayout(3, 6, 2, F64),
    "DSA": DSALayout(3, 6, 2, 5, F64),
    "SWA": SWALayout((2, None, 4), 2, 3, F64),
    "SWA, no sliding layer": SWALayout((None, None, None), 2, 3, F64),
    "SWA, no full layer": SWALayout((2, 3, 4), 2, 3, F64),
}
PARTS = {"MHA": 3, "MLA": 3, "DSA": 6, "SWA": 4, "SWA, no sliding layer": 4, "SWA, no full layer": 4}
every_kind = pytest.mark.parametrize("kind", LAYOUTS)


def numbered(kind: str, size: int, page_size: int = 1) -> tuple[TokenToKVPool, list[torch.Tensor]]:
    """A pool in which no two numbers of a layer are equal, and copies of its layers."""
    pool = LAYOUTS[kind].make_pool(size, CPU, page_size)
    for layer in pool.layers:
        layer.copy_(torch.arange(layer.numel()).view_as(layer))
    return pool, [layer.clone() for layer in pool.layers]


@every_kind
def test_whatever_a_pool_holds_is_among_its_layers_with_a_row_for_every_slot(kind: str) -> None:
    pool = LAYOUTS[kind].make_pool(8, CPU, page_size=4)
    assert len(pool.layers) == PARTS[kind]
    assert [len(layer) for layer in pool.layers] == [12] * PARTS[kind]
    held = [
        x
        for owner in (pool, getattr(pool, "full", None), getattr(pool, "sliding", None))
        if owner
        for x in vars(owner).values()
        if isinstance(x, torch.Tensor)
    ]
    storages = {x.untyped_storage().data_ptr() for x in held if x.numel()}
    assert storages == {layer.untyped_storage().data_ptr() for layer in pool.layers}


@every_kind
def test_what_is_written_is_read_back_layer_by_layer(kind: str) -> None:
    """To the slots named, and to no other slot or layer; by a gather and in place."""
    pool, before = numbered(kind, 9)
    slots = torch.tensor([7, 2, 5])
    for layer_id in range(3):
        k, v = (x.transpose(1, 2)[0].clone().normal_() for x in pool.read(layer_id, slots[None]))
        if kind in ("MLA", "DSA"):
            v = k[..., :6]
        pool.write(layer_id, slots, k, v)
        keys, values = pool.read(layer_id, torch.tensor([[5, 7], [2, 2]]))
        assert torch.equal(keys.transpose(1, 2), torch.stack([k[[2, 0]], k[[1, 1]]]))
        assert torch.equal(values.transpose(1, 2), torch.stack([v[[2, 0]], v[[1, 1]]]))
        in_place = pool.in_place(layer_id)
        assert in_place[0].shape == in_place[1].shape
        assert torch.equal(in_place[0][slots], k)
        assert torch.equal(in_place[1][slots][..., : v.shape[-1]], v)
    others = [slot for slot in range(10) if slot not in slots.tolist()]
    for layer, old in zip(pool.layers, before, strict=True):
        assert torch.equal(layer[others], old[others])


def test_index_keys_stand_beside_the_rows() -> None:
    pool = LAYOUTS["DSA"].make_pool(8, CPU)
    assert isinstance(pool, DSATokenToKVPool)
    keys = torch.randn(2, 5, dtype=F64)
    pool.write_index(1, torch.tensor([3, 8]), keys)
    assert torch.equal(pool.read_index(1, torch.tensor([[8, 3, 3]])), keys[[1, 0, 0]][None])
    assert [bool(layer.any()) for layer in pool.layers] == [False] * 4 + [True, False]


@every_kind
@both_backends
@pytest.mark.parametrize("pairs", [*permutations([(21, 22), (22, 25)])], ids=str)
def test_PAGE_05_every_kind_of_pool_moves_as_if_all_were_read_first(
    kind: str, backend: str, pairs: tuple[tuple[int, int], ...]
) -> None:
    """Slots 20..27, kept nodes 0, 2, 5: 22 -> 21 and 25 -> 22, in either order, in every layer."""
    pool, before = numbered(kind, 30)
    with use_backend(backend):
        pool.move(torch.tensor([dst for dst, _ in pairs]), torch.tensor([src for _, src in pairs]))
    others = [slot for slot in range(31) if slot not in (21, 22)]
    for layer, old in zip(pool.layers, before, strict=True):
        assert torch.equal(layer[[20, 21, 22]], old[[20, 22, 25]])
        assert torch.equal(layer[others], old[others])


@every_kind
@both_backends
def test_PAGE_07_no_kind_of_pool_moves_what_it_does_not_have(kind: str, backend: str) -> None:
    pool, before = numbered(kind, 6)
    for dst, src, message in ((7, 1, "dst has entries from 7 to 7"), (1, -1, "src has entries from -1")):
        with use_backend(backend), pytest.raises(ValueError, match=message):
            pool.move(torch.tensor([dst]), torch.tensor([src]))
    for layer, old in zip(pool.layers, before, strict=True):
        assert torch.equal(layer, old)


@every_kind
@both_backends
def test_PAGE_01_every_kind_of_pool_gives_each_branch_the_begun_page(kind: str, backend: str) -> None:
    """Page 4, length 6, two branches, three steps: positions 4 and 5 again at the front of the second one's pages."""
    pool, before = numbered(kind, 24, page_size=4)
    table = torch.zeros(2, 24, dtype=torch.int64)
    slots = random.Random(0).sample(range(4, 28), 24)
    table[1] = torch.tensor(slots)
    duplicate_prefix_tail(pool, table, torch.tensor([1]), torch.tensor([6]), 2, 3, 4, backend)
    copies, originals = slots[12:14], slots[4:6]
    others = [slot for slot in range(1, 28) if slot not in copies]
    for layer, old in zip(pool.layers, before, strict=True):
        assert torch.equal(layer[copies], old[originals])
        assert torch.equal(layer[others], old[others])


# --- who is seen --------------------------------------------------------------------------------------------------


def scattered(b: int, prefix: int, rows: int, size: int, seed: int) -> tuple[ForwardBatch, torch.Tensor]:
    """b requests of `rows` rows behind `prefix` committed tokens, at slots and tail positions that follow no order; a
    row sees itself and some others of the tail. Returns the mask of all columns, too: bool (b, rows, prefix + rows).
    """
    torch.manual_seed(seed)
    slots = (torch.randperm(size) + 1)[: b * (prefix + rows)].view(b, -1)
    table, tail = slots.split([prefix, rows], dim=1)
    mask = (torch.rand(b, rows, rows) < 0.5) | torch.eye(rows, dtype=torch.bool)
    ids = torch.zeros(b * rows, dtype=torch.int64)
    positions = prefix + torch.randint(0, 4, (b * rows,))
    batch = ForwardBatch(
        ids, positions, tail.flatten(), [rows] * b, table.contiguous(), torch.arange(b), [prefix] * b, tail, mask
    )
    return batch, torch.cat([torch.ones(b, rows, prefix, dtype=torch.bool), mask], dim=2)


@settings(max_examples=30)
@given(
    b=st.integers(1, 3),
    prefix=st.integers(0, 7),
    rows=st.integers(1, 5),
    window=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_a_window_is_a_matter_of_positions(b: int, prefix: int, rows: int, window: int, seed: int) -> None:
    """Whatever the order of the columns. Two windows and a full layer in one pool, and none disturbs another."""
    pool = SWALayout((window, None, 2), 2, 4, F64).make_pool(60, CPU)
    assert isinstance(pool, SWAKVPool)
    batch, mask = scattered(b, prefix, rows, 60, seed)
    for layer in pool.layers[:3]:
        layer.normal_()
    pool.positions.fill_(-1000)  # stale
    if prefix:
        pool.write_positions(batch.req_to_token.flatten(), torch.arange(prefix).repeat(b))
    attend = PoolAttention(batch, pool)
    row_positions = batch.positions.view(b, rows)
    positions = torch.cat([torch.arange(prefix).expand(b, -1), row_positions], dim=1)
    for layer_id, within in ((0, window), (1, 10**6), (2, 2), (0, window)):
        q, k, v = torch.randn(3, b * rows, 2, 4, dtype=F64)
        out = attend(layer_id, q, k, v).view(b, rows, 2, 4)
        assert torch.equal(attend.read_only(layer_id, q).view(b, rows, 2, 4), out)
        keys, values = pool.read(layer_id, torch.cat([batch.req_to_token, batch.tail_slots], dim=1))
        for r in range(b):
            seen = mask[r] & (positions[r] > row_positions[r][:, None] - within)
            expected = softmax_attention(
                q.view(b, rows, 2, 4)[r], keys[r].transpose(0, 1), values[r].transpose(0, 1), seen
            )
            torch.testing.assert_close(out[r], expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=30)
@given(
    b=st.integers(1, 3),
    prefix=st.integers(0, 7),
    rows=st.integers(1, 5),
    topk=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_a_row_attends_the_columns_that_the_indexer_holds_best(
    b: int, prefix: int, rows: int, topk: int, seed: int
) -> None:
    """Scored number by number, of those that the row sees; of equal scores, and weights of 0 make many, the first."""
    pool = DSALayout(1, 4, 2, 3, F64).make_pool(60, CPU)
    batch, mask = scattered(b, prefix, rows, 60, seed)
    for layer in pool.layers:
        layer.normal_()
    attend = PoolAttention(batch, pool)
    index_q, index_k, weights = (
        torch.randn(b * rows, 2, 3).double(),
        torch.randn(b * rows, 3).double(),
        torch.randn(b * rows, 2).double(),
    )
    weights[torch.rand(b * rows) < 0.3] = 0
    selected = attend.select(0, index_q, index_k, weights, topk, keep=True)
    columns = torch.cat([batch.req_to_token, batch.tail_slots], dim=1)
    assert isinstance(pool, DSATokenToKVPool)
    keys = pool.read_index(0, columns)
    assert torch.equal(keys[:, prefix:], index_k.view(b, rows, 3))
    slots = []
    for r in range(b):
        for row in range(rows):
            n = r * rows + row
            scores = [
                sum(float(weights[n, h]) * max(0.0, float(index_q[n, h] @ key)) for h in range(2)) for key in keys[r]
            ]
            best = sorted((c for c in range(prefix + rows) if mask[r, row, c]), key=lambda c: -scores[c])[:topk]
            assert selected[r, row].nonzero().flatten().tolist() == sorted(best)
            slots.append(sorted([*columns[r, best].tolist(), *[0] * (topk - len(best))]))
    assert attend.selection is not None
    assert attend.selection[:, 0].sort(dim=-1).values.tolist() == slots

    q, latent = torch.randn(b * rows, 2, 6, dtype=F64), torch.randn(b * rows, 1, 6, dtype=F64)
    out = attend(0, q, latent, latent[..., :4], scale=0.3, selected=selected).view(b, rows, 2, 4)
    cached, values = pool.read(0, columns)
    for r in range(b):
        for row in range(rows):
            chosen = selected[r, row]
            shares = torch.softmax(q.view(b, rows, 2, 6)[r, row] @ cached[r, 0, chosen].T * 0.3, dim=-1)
            torch.testing.assert_close(out[r, row], shares @ values[r, 0, chosen], rtol=1e-9, atol=1e-9)


# --- the kernel's way ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_latent_rows_are_read_in_place_as_they_are_gathered(rows: int) -> None:
    """The kernel is given the row as key and as value, and what it says beyond the latent is cut off."""
    layout = MLALayout(2, 6, 2, F64)
    batch, _ = scattered(2, 5, rows, 60, seed=1)
    answers = []
    for attention in (PoolAttention, PagedAttention):
        torch.manual_seed(2)
        pool = layout.make_pool(60, CPU)
        for layer in pool.layers:
            layer.normal_()
        q, row = torch.randn(2 * rows, 3, 8, dtype=F64), torch.randn(2 * rows, 1, 8, dtype=F64)
        with use_backend("triton" if attention is PagedAttention else "torch"):
            answers.append(attention(batch, pool)(1, q, row, row[..., :6], scale=0.4))
    assert answers[0].shape == (2 * rows, 3, 6)
    torch.testing.assert_close(*answers, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("layout", "paged"),
    [
        (LAYOUTS["MHA"], True),
        (MLALayout(1, 192, 64, F64), True),
        (MLALayout(1, 512, 64, F64), False),
        (LAYOUTS["DSA"], False),
        (LAYOUTS["SWA"], False),
        (LAYOUTS["SWA, no sliding layer"], True),
    ],
    ids=str,
)
def test_the_kernel_is_given_what_it_can_read_and_nothing_else(
    layout: PoolLayout, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is gathered, whatever the backend."""
    asked: list[type] = []

    class Asking:
        """A model that keeps what it was given for attention."""

        config = mla().config
        kv_layout = layout

        def __call__(self, ids: torch.Tensor, positions: torch.Tensor, attend: Any, hidden: Any) -> torch.Tensor:
            asked.append(type(attend))
            return torch.zeros(len(ids), 24, dtype=F64)

        def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states[:, :17]

    runner = ModelRunner(Asking(), 8, CPU, Counter())  # type: ignore[arg-type]
    one = torch.tensor([1])
    with use_backend("triton"):
        runner.forward(causal_batch(one, one, [1], one[None], torch.tensor([0]), [0]), "test")
    assert asked == [PagedAttention if paged else PoolAttention]
