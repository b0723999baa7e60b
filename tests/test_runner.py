"""Attention over the pool against attention row by row; and what a runner counts, pads and leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from builders import llama_config, random_head, random_llama, random_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import softmax_attention

from refspec.contracts import ForwardBatch
from refspec.memory.kv_pool import KVLayout, MHATokenToKVPool
from refspec.models.scripted import ScriptedModel
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner, PagedAttention, PoolAttention
from refspec.spec.draft import best_tokens

CPU = torch.device("cpu")
ROW = torch.tensor([0])  # of a request table with one row


def batch_of(
    q_lens: Sequence[int],
    prefix_lens: Sequence[int],
    prefix_slots: torch.Tensor,
    tail_slots: torch.Tensor,
    tail_mask: torch.Tensor | None,
    out_slots: torch.Tensor,
) -> ForwardBatch:
    rows = torch.zeros(sum(q_lens), dtype=torch.int64)
    table_rows = torch.arange(len(q_lens))
    return ForwardBatch(
        rows, rows, out_slots, list(q_lens), prefix_slots, table_rows, list(prefix_lens), tail_slots, tail_mask
    )


both_ways = pytest.mark.parametrize("attention", [PoolAttention, PagedAttention])


@both_ways
@settings(max_examples=60)
@given(
    q_lens=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    prefix_lens=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    surplus=st.integers(0, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.sampled_from([1, 2, 5]),
    layer=st.integers(0, 1),
    with_mask=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_as_row_by_row(
    attention: type[PoolAttention] | type[PagedAttention],
    q_lens: list[int],
    prefix_lens: list[int],
    surplus: int,
    kv_heads: int,
    group: int,
    dim: int,
    layer: int,
    with_mask: bool,
    seed: int,
) -> None:
    """Ragged rows and prefixes, grouped heads, any mask that shows a row itself, or none; stale columns are ignored."""
    torch.manual_seed(seed)
    b, longest = len(q_lens), max(q_lens)
    if not with_mask:  # everybody sees everything: no row may be padding
        q_lens = [longest] * b
    prefix_lens, n = prefix_lens[:b], sum(q_lens)
    width = max(prefix_lens) + surplus
    pool = MHATokenToKVPool(KVLayout(2, kv_heads, dim, torch.float64), 60, CPU)
    pool.buffer.normal_()
    slots = (torch.randperm(60) + 1)[: b * (width + longest)].view(b, -1)
    prefix_slots, tail_slots = slots.split([width, longest], dim=1)
    out_slots = torch.cat([tail_slots[r, :length] for r, length in enumerate(q_lens)])
    mask = torch.rand(b, longest, longest) < 0.5
    mask |= torch.eye(longest, dtype=torch.bool)
    for r, length in enumerate(q_lens):
        tail_slots[r, length:] = 0
        mask[r, :, length:] = False
        mask[r, length:, 0] = True  # a padded row
    if not with_mask:
        mask[:] = True
    stored = pool.buffer.clone()

    q = torch.randn(n, kv_heads * group, dim, dtype=torch.float64)
    k, v = torch.randn(2, n, kv_heads, dim, dtype=torch.float64)
    batch = batch_of(q_lens, prefix_lens, prefix_slots, tail_slots, mask if with_mask else None, out_slots)
    out = attention(batch, pool)(layer, q, k, v)

    start = 0
    for r, length in enumerate(q_lens):
        rows, prefix = slice(start, start + length), prefix_slots[r, : prefix_lens[r]]
        keys = torch.cat([stored[layer, prefix, 0], k[rows]])
        values = torch.cat([stored[layer, prefix, 1], v[rows]])
        seen = torch.cat([torch.ones(length, len(prefix), dtype=torch.bool), mask[r, :length, :length]], dim=1)
        torch.testing.assert_close(out[rows], softmax_attention(q[rows], keys, values, seen), rtol=1e-9, atol=1e-9)
        start += length
    assert torch.equal(pool.buffer[layer, out_slots, 0], k)
    assert torch.equal(pool.buffer[layer, out_slots, 1], v)


@both_ways
def test_SEQ_02_rejected_rows_leave_the_attended_length(
    attention: type[PoolAttention] | type[PagedAttention],
) -> None:
    """Scores 1 and 0, values 1 and 0, then two rejected rows of zeros: 0.7311, not 0.4754 as with phantoms."""
    pool = MHATokenToKVPool(KVLayout(1, 1, 1, torch.float64), 8, CPU)
    one, zero = torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.float64)
    pool.write(0, torch.tensor([1]), zero, zero)
    # Columns 1 and 2 of the prefix are the rejected rows': still in the table, but beyond the committed length.
    batch = batch_of([1], [1], torch.tensor([[1, 2, 3]]), torch.tensor([[4]]), None, torch.tensor([4]))
    out = attention(batch, pool)(0, one, one, one)
    assert out.item() == pytest.approx(0.731058578)


@both_ways
def test_SEQ_02_what_a_rejected_row_holds_does_not_matter(
    attention: type[PoolAttention] | type[PagedAttention],
) -> None:
    for left_behind in (-1e9, 0.0, 1e9):
        pool = MHATokenToKVPool(KVLayout(1, 1, 1, torch.float64), 8, CPU)
        pool.buffer[:, 2:4] = left_behind
        batch = batch_of([1], [1], torch.tensor([[1, 2, 3]]), torch.tensor([[4]]), None, torch.tensor([4]))
        one = torch.ones(1, 1, 1, dtype=torch.float64)
        assert attention(batch, pool)(0, one, one, one).item() == pytest.approx(0.731058578)


@both_ways
@pytest.mark.parametrize("rows", [1, 2])
def test_a_mask_that_stands_for_all_requests_is_one(
    attention: type[PoolAttention] | type[PagedAttention], rows: int
) -> None:
    """That of a causal batch is one mask, expanded; with a row for each request it looks flat already."""
    pool = MHATokenToKVPool(KVLayout(1, 1, 1, torch.float64), 8, CPU)
    slots = torch.arange(2 * rows) + 1
    batch = causal_batch(slots, slots, [rows, rows], slots.view(2, rows), torch.tensor([0, 1]), [0, 0])
    values = torch.arange(2 * rows, dtype=torch.float64).view(-1, 1, 1)
    out = attention(batch, pool)(0, torch.zeros_like(values), values, values)
    expected = values.view(2, rows).cumsum(1) / torch.arange(1, rows + 1)
    torch.testing.assert_close(out.view(2, rows), expected)


def test_look_up_gives_each_row_what_it_sees() -> None:
    pool = MHATokenToKVPool(KVLayout(1, 1, 2, torch.float64), 9, CPU)
    pool.write(0, torch.tensor([7, 8]), *[torch.tensor([[[70.0, 0]], [[80.0, 0]]]).double()] * 2)
    mask = torch.tensor([[[1, 0], [1, 1]], [[1, 0], [1, 0]]], dtype=torch.bool)
    batch = batch_of(
        [2, 1], [1, 2], torch.tensor([[8, 5], [7, 8]]), torch.tensor([[1, 2], [3, 0]]), mask, torch.tensor([1, 2, 3])
    )
    records = torch.tensor([[10.0, 1], [20.0, 1], [30.0, 1]], dtype=torch.float64)
    seen = [[record[0] for record in rows.tolist()] for rows in PoolAttention(batch, pool).look_up(records)]
    assert seen == [[80, 10], [80, 10, 20], [70, 80, 30]]


def test_look_up_without_a_mask_gives_everything() -> None:
    pool = MHATokenToKVPool(KVLayout(1, 1, 1, torch.float64), 9, CPU)
    batch = batch_of([2], [0], torch.zeros(1, 0).long(), torch.tensor([[1, 2]]), None, torch.tensor([1, 2]))
    seen = PoolAttention(batch, pool).look_up(torch.tensor([[5.0], [6.0]], dtype=torch.float64))
    assert [rows.flatten().tolist() for rows in seen] == [[5, 6], [5, 6]]


# --- the runner ---------------------------------------------------------------------------------------------------


def one_row(token: int = 1) -> ForwardBatch:
    slots = torch.tensor([1])
    return ForwardBatch(torch.tensor([token]), torch.tensor([0]), slots, [1], slots[None], ROW, [0], slots[None], None)


def test_forwards_are_counted_by_phase() -> None:
    forwards: Counter[str] = Counter()
    runner = ModelRunner(random_llama(), 4, CPU, forwards)
    for phase in ("verify", "verify", "draft"):
        runner.forward(one_row(), phase)
    assert forwards == {"verify": 2, "draft": 1}


def test_logits_of_the_rows_asked_for_and_hidden_states_of_all() -> None:
    runner = ModelRunner(random_llama(), 4, CPU, Counter())
    slots = torch.tensor([1, 2, 3])
    batch = ForwardBatch(
        slots, slots - 1, slots, [3], slots[None], ROW, [0], slots[None], torch.ones(1, 3, 3, dtype=torch.bool).tril()
    )
    everything = runner.forward(batch, "test")
    some = runner.forward(batch, "test", logits_rows=torch.tensor([2, 0]))
    assert some.hidden_states.shape == (3, 24)
    torch.testing.assert_close(some.logits, everything.logits[[2, 0]])


@pytest.mark.parametrize("model", ["llama", "head", "scripted"])
def test_zero_rows_run_no_model(model: str) -> None:
    target = random_llama()
    models = {"llama": target, "head": random_head(target), "scripted": ScriptedModel(random_logits(23), 23)}
    forwards: Counter[str] = Counter()
    runner = ModelRunner(models[model], 4, CPU, forwards)  # type: ignore[arg-type]
    none = torch.zeros(0, dtype=torch.int64)
    empty = none.view(0, 0)
    out = runner.forward(ForwardBatch(none, none, none, [], empty, none, [], empty, None), "idle")
    assert out.logits.shape == (0, 23)
    assert out.hidden_states.shape == (0, models[model].config.hidden_size)
    assert out.logits.dtype == out.hidden_states.dtype == torch.float64
    assert forwards == {}


def test_TREE_11_padding_of_the_vocabulary_is_never_proposed() -> None:
    """Real logits -3 -1 -2 -5 -4, padded to 8 with zeros: the best is 1, the best two are 1 and 2."""
    model = ScriptedModel(lambda context: [-3, -1, -2, -5, -4, 0, 0, 0], 8)
    out = ModelRunner(model, 4, CPU, Counter(), vocab_size=5).forward(one_row(), "test")
    assert out.logits.shape == (1, 5)
    assert out.logits.argmax(-1).tolist() == [1]
    assert best_tokens(out.logits, 2)[1].tolist() == [[1, 2]]
    probabilities, _ = best_tokens(out.logits, 5)
    assert probabilities.sum().item() == pytest.approx(1)  # the padding has no share


def test_pool_has_the_models_layout() -> None:
    model = random_llama(llama_config(num_hidden_layers=3), dtype=torch.float32)
    pool = ModelRunner(model, 7, CPU, Counter()).pool
    assert pool.buffer.shape == (3, 8, 2, 2, 6)
    assert pool.buffer.dtype == torch.float32
