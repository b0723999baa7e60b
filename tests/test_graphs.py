"""A replay gives what the forward gives; what a bucket has beyond its batch reads and writes nothing of anybody's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backends import needs_interpreter
from builders import peaked_logits, random_head, random_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.contracts import ForwardBatch, ForwardOutput
from refspec.kernels.backend import use_backend
from refspec.kernels.launches import launches
from refspec.models.scripted import ScriptedModel
from refspec.runtime import graphs
from refspec.runtime.graphs import CaptureFailed, GraphRunner, Shape, StaticBuffers, capture_sizes
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner

CPU = torch.device("cpu")
VOCAB, WIDTH, SLOTS = 23, 12, 200
ROWS = {"target": 3, "extend": 3, "draft": 2}
TABLE = torch.cat([torch.zeros(1, WIDTH).long(), torch.arange(1, 8 * WIDTH + 1).view(8, WIDTH)])  # 8 requests'
TARGET = random_llama()
HEAD = random_head(TARGET)
SCRIPTED = ScriptedModel(peaked_logits(VOCAB), VOCAB)


def runners(model: Any, sizes: tuple[int, ...] = (1, 2, 4)) -> tuple[ModelRunner, GraphRunner]:
    """An eager one and one with graphs, whose pools hold the same."""
    eager = ModelRunner(model, SLOTS, CPU, Counter())
    graphed = GraphRunner(model, SLOTS, CPU, Counter(), None, 1, TABLE, sizes, ROWS, Counter(), Counter())
    torch.manual_seed(5)
    eager.pool.buffer.normal_()
    graphed.pool.buffer.copy_(eager.pool.buffer)
    return eager, graphed


def ragged(
    q_lens: list[int], prefix_lens: list[int], rows: list[int], first_slot: int = 100, fed: bool = False
) -> ForwardBatch:
    """New rows of requests that have committed tokens; their slots are from first_slot on."""
    n = sum(q_lens)
    torch.manual_seed(n + first_slot)
    return causal_batch(
        torch.randint(VOCAB, (n,)),
        torch.arange(first_slot, first_slot + n),
        q_lens,
        TABLE,
        torch.tensor(rows),
        prefix_lens,
        torch.randn(n, 24, dtype=torch.float64) if fed else None,
    )


def last_rows(q_lens: list[int]) -> torch.Tensor:
    return torch.tensor(q_lens).cumsum(0) - 1


def assert_same(eager: ModelRunner, graphed: GraphRunner, outs: tuple[ForwardOutput, ForwardOutput]) -> None:
    """The outputs, and all of both pools but what slot 0 holds."""
    for name in ("logits", "hidden_states"):
        one, other = getattr(outs[0], name), getattr(outs[1], name)
        assert one.shape == other.shape
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(graphed.pool.buffer[:, 1:], eager.pool.buffer[:, 1:], rtol=1e-12, atol=1e-12)
    assert graphed.pool.buffer.isfinite().all()


batches = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, WIDTH), st.integers(1, 8)), min_size=1, max_size=4
)  # of each request its rows, its committed tokens and its row of the table


@settings(max_examples=40)
@given(drawn=st.lists(batches, min_size=1, max_size=4), fed=st.booleans(), last=st.booleans())
def test_a_replay_gives_what_the_forward_gives(drawn: list[list[tuple[int, int, int]]], fed: bool, last: bool) -> None:
    """Batch after batch, over the same buffers: ragged, larger, smaller."""
    eager, graphed = runners(HEAD if fed else TARGET)
    for i, requests in enumerate(drawn):
        q_lens, prefix_lens, rows = (list(column) for column in zip(*requests, strict=True))
        batch = ragged(q_lens, prefix_lens, rows, 100 + 12 * i, fed)
        chosen = last_rows(q_lens) if last else None
        assert_same(eager, graphed, (eager.forward(batch, "extend", chosen), graphed.forward(batch, "extend", chosen)))
    assert graphed.replays == {"extend": len(drawn)}
    assert not graphed.fallbacks


@needs_interpreter
@pytest.mark.parametrize("masked", [False, True])
def test_on_the_kernels_too(masked: bool) -> None:
    """Lengths are read from a buffer there, and the buffers of slots have room for the longest context."""
    eager, graphed = runners(TARGET, sizes=(2,))
    eager_rows = 3 if masked else 1
    graphed.rows["target"] = [eager_rows]
    with use_backend("triton"):
        for prefix_lens, rows in (([5, 2], [3, 1]), ([WIDTH], [7])):
            q_lens = [eager_rows] * len(rows)
            batch = ragged(q_lens, prefix_lens, rows)
            if not masked:
                batch.tail_mask = None
            assert_same(eager, graphed, (eager.forward(batch, "target"), graphed.forward(batch, "target")))
    assert graphed.replays == {"target": 2}


# --- padding ----------------------------------------------------------------------------------------------------------


def test_SEQ_10_what_padding_reads_and_writes_is_nobodys() -> None:
    """A graph for four; four requests, then one: rows 0, slots 0, no committed tokens, and a mask that shows something.

    The three that have ended keep their keys and values, and the fourth hears nothing of it.
    """
    eager, graphed = runners(TARGET, sizes=(4,))
    four = ragged([3, 2, 3, 1], [4, 7, 2, 9], [5, 2, 8, 1])
    chosen = last_rows(four.q_lens)
    assert_same(eager, graphed, (eager.forward(four, "extend", chosen), graphed.forward(four, "extend", chosen)))
    one = ragged([2], [6], [2], first_slot=150)
    before = graphed.pool.buffer.clone()
    outs = eager.forward(one, "extend", last_rows([2])), graphed.forward(one, "extend", last_rows([2]))
    assert_same(eager, graphed, outs)
    changed = (graphed.pool.buffer != before).flatten(2).any(2).any(0).nonzero().flatten().tolist()
    assert set(changed) <= {0, 150, 151}
    (buffers,) = graphed.buffers.values()
    for name in ("input_ids", "positions", "out_slots", "rows", "prefix_lens", "tail_slots", "logits_rows"):
        assert getattr(buffers, name)[0].any(), name
        assert not getattr(buffers, name)[1:].any(), name
    assert buffers.tail_mask[1:].all()
    assert buffers.tail_mask[0].tolist() == [[True, False, False], [True, True, False], [True] * 3]
    assert buffers.out_slots[0].tolist() == [150, 151, 0]  # the request's own padding


@pytest.mark.parametrize("model", [TARGET, SCRIPTED], ids=["llama", "scripted"])
def test_SEQ_12_a_batch_beyond_all_buckets_runs_eagerly_with_all_of_its_rows(model: Any) -> None:
    _, graphed = runners(model)
    batch = ragged([1] * 6, [3, 1, 4, 1, 5, 9], [1, 2, 3, 4, 5, 6])
    out = graphed.forward(batch, "target")
    assert (graphed.replays, graphed.fallbacks) == ({}, {"target": 1})
    assert out.logits.shape == (6, VOCAB)
    for r in range(6):
        alone, _ = runners(model)
        only = ragged([1], batch.prefix_lens[r : r + 1], [r + 1], 100 + r)
        only.input_ids = batch.input_ids[r : r + 1]
        torch.testing.assert_close(out.logits[r], alone.forward(only, "target").logits[0])


@pytest.mark.parametrize(("batch_size", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, None)])
def test_the_smallest_bucket_that_holds_the_batch(batch_size: int, size: int | None) -> None:
    _, graphed = runners(TARGET, sizes=(4, 1, 2))
    graphed.forward(ragged([1] * batch_size, [2] * batch_size, list(range(1, batch_size + 1))), "target")
    assert [captured for _, captured in graphed.graphs] == ([] if size is None else [size])


def test_a_batch_of_the_buffers_is_views() -> None:
    """A copy would be read once, when the graph is recorded, and stay as it was."""
    shape = Shape("extend", 3, 5, True, (8, torch.float32), True)
    buffers = StaticBuffers(shape, 4, TABLE)
    batch = buffers.batch(2)
    for name in ("input_ids", "positions", "out_slots", "rows", "tail_slots", "tail_mask", "hidden_states"):
        view, whole = getattr(batch, name), getattr(buffers, name)
        assert view.data_ptr() == whole.data_ptr()
        assert view.numel() == whole.numel() // 2
    assert batch.req_to_token is TABLE


def test_a_replay_reads_the_buffers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the batch holds when the replay begins does not matter any more."""
    eager, graphed = runners(HEAD)
    original = StaticBuffers.fill

    def fill_and_spoil(self: StaticBuffers, batch: ForwardBatch, *rest: Any) -> None:
        original(self, batch, *rest)
        for tensor in (batch.input_ids, batch.positions, batch.out_slots, batch.rows, batch.tail_slots):
            tensor.fill_(1)
        batch.hidden_states.fill_(torch.nan)  # type: ignore[union-attr]
        batch.prefix_lens[:] = [0] * len(batch.prefix_lens)

    monkeypatch.setattr(StaticBuffers, "fill", fill_and_spoil)
    for rows in ([1, 2], [3, 4]):
        expected = eager.forward(ragged([2, 3], [4, 5], rows, fed=True), "extend")
        assert_same(eager, graphed, (expected, graphed.forward(ragged([2, 3], [4, 5], rows, fed=True), "extend")))


def test_outputs_are_good_until_the_next_replay() -> None:
    _, graphed = runners(TARGET)
    small, large = ragged([3], [2], [1]), ragged([3, 3], [2, 5], [1, 2])
    first = graphed.forward(small, "target")
    kept = first.logits.clone()
    graphed.forward(large, "prefill")  # eager: leaves it alone
    assert torch.equal(first.logits, kept)
    second = graphed.forward(large, "target")  # another graph, which works in the same memory
    assert first.logits.isnan().all()
    assert first.hidden_states.isnan().all()
    assert second.logits.isfinite().all()


# --- what is not replayed ---------------------------------------------------------------------------------------------


def without_mask(batch: ForwardBatch) -> ForwardBatch:
    batch.tail_mask = None
    return batch


@pytest.mark.parametrize(
    ("batch", "logits_rows"),
    [
        (ragged([4], [2], [1]), None),
        (without_mask(ragged([2], [2], [1])), None),
        (ragged([3, 3], [2, 1], [1, 2]), torch.tensor([5])),
    ],
    ids=["more rows than the phase has", "padding, but no mask", "logits of some rows"],
)
def test_what_fits_no_shape_runs_eagerly(batch: ForwardBatch, logits_rows: torch.Tensor | None) -> None:
    eager, graphed = runners(TARGET)
    outs = [runner.forward(batch, "target", logits_rows) for runner in (eager, graphed)]
    assert_same(eager, graphed, (outs[0], outs[1]))
    assert (graphed.replays, graphed.fallbacks) == ({}, {"target": 1})


def test_another_request_table_runs_eagerly() -> None:
    eager, graphed = runners(TARGET)
    batch = ragged([3], [2], [1])
    batch.req_to_token = TABLE.flip(0)
    assert_same(eager, graphed, (eager.forward(batch, "target"), graphed.forward(batch, "target")))
    assert graphed.fallbacks == {"target": 1}


def test_prefill_runs_eagerly_and_idle_not_at_all() -> None:
    _, graphed = runners(TARGET)
    graphed.forward(ragged([3], [2], [1]), "prefill_target")
    none = torch.zeros(0, dtype=torch.int64)
    out = graphed.forward(ForwardBatch(none, none, none, [], TABLE, none, [], none.view(0, 3), None), "target")
    assert out.logits.shape == (0, VOCAB)
    assert not graphed.replays
    assert not graphed.fallbacks
    assert graphed.forwards == {"prefill_target": 1}


def test_a_shared_head_runs_eagerly() -> None:
    _, graphed = runners(TARGET)
    graphed.shared_head = lambda hidden_states, phase: TARGET.logits(hidden_states)
    graphed.forward(ragged([3], [2], [1]), "target")
    assert graphed.fallbacks == {"target": 1}


def test_hidden_states_of_another_type_have_buffers_of_their_own() -> None:
    """A target's may come in another type than the draft's own; a buffer of one type would round the other."""
    eager, graphed = runners(HEAD)
    for dtype in (torch.float32, torch.float64):
        batch = ragged([3], [2], [1], fed=True)
        assert batch.hidden_states is not None
        batch.hidden_states = batch.hidden_states.to(dtype)
        assert_same(eager, graphed, (eager.forward(batch, "extend"), graphed.forward(batch, "extend")))
    assert len(graphed.buffers) == 2


@pytest.mark.parametrize(
    ("asked", "by_default", "max_running", "sizes"),
    [
        (None, False, 32, ()),
        (None, True, 32, (1, 2, 4, 8, 16, 32)),
        (False, True, 32, ()),
        (True, False, 1, (1,)),
        (True, False, 6, (1, 2, 4, 6)),
        (True, False, 8, (1, 2, 4, 8)),
        (True, False, 100, (1, 2, 4, 8, 16, 32)),
        ([4, 1, 4], False, 2, (1, 4)),
    ],
)
def test_sizes(asked: Any, by_default: bool, max_running: int, sizes: tuple[int, ...]) -> None:
    assert capture_sizes(asked, by_default, max_running) == sizes


@pytest.mark.parametrize("asked", [(), [0], [-1, 2], [1.5], [True], "12", 4])
def test_sizes_that_are_none(asked: Any) -> None:
    with pytest.raises(ValueError, match=r"graphs is .*, it must be True, False, None or batch sizes of at least 1"):
        capture_sizes(asked, True, 8)


# --- recording, as far as it can be tried without a GPU ---------------------------------------------------------------


class Stream:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def wait_stream(self, other: Stream) -> None:
        self.log.append("wait")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch.cuda as far as CudaGraph asks it: a log of what happened. Nothing is recorded, a replay does nothing."""
    log: list[str] = []
    graph = SimpleNamespace(replay=lambda: log.append("replay"))

    @contextmanager
    def record(recorded: Any, pool: Any, stream: Any) -> Iterator[None]:
        assert recorded is graph
        assert pool == "pool"
        log.append("record")
        try:
            yield
        finally:
            if log[-1] == "fails":
                raise RuntimeError("operation failed due to a previous error during capture\nmore of it")
            log.append("recorded")

    stand_ins = {
        "Stream": lambda device: Stream(log),
        "current_stream": lambda: Stream(log),
        "graph_pool_handle": lambda: "pool",
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "set_stream": lambda stream: log.append("stream is back"),
        "CUDAGraph": lambda: graph,
        "graph": record,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return log


def test_warm_up_comes_before_recording_and_only_replays_count_as_launches(cuda: list[str]) -> None:
    out = ForwardOutput(torch.zeros(1), torch.zeros(1))

    def body() -> ForwardOutput:
        cuda.append("body")
        launches["tree_attention"] += 2
        return out

    before = launches.copy()
    recorded = graphs.CudaGraph(body, graphs.CudaWorkspace.on(torch.device("cuda")))
    assert cuda == ["wait", "body", "body", "record", "body", "recorded", "wait", "stream is back"]
    assert launches == before
    for _ in range(3):
        assert recorded.replay() is out
    assert cuda[-3:] == ["replay"] * 3
    assert launches - before == {"tree_attention": 6}


def test_a_forward_that_cannot_be_recorded_is_one_clear_line(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, graphed = runners(TARGET)
    graphed.cuda = graphs.CudaWorkspace.on(torch.device("cuda"))
    original = ModelRunner.run_eagerly

    def run_eagerly(*arguments: Any) -> ForwardOutput:
        if cuda[-1] == "record":
            cuda.append("fails")
            raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")
        return original(*arguments)

    monkeypatch.setattr(ModelRunner, "run_eagerly", run_eagerly)
    monkeypatch.setattr(graphs, "resolve_backend", lambda *_: "triton")
    with pytest.raises(CaptureFailed) as error:
        graphed.forward(ragged([3, 3, 3], [2, 1, 4], [1, 2, 3]), "target")
    assert str(error.value) == (
        "the target forward of a batch of 4 could not be captured as a CUDA graph "
        "(operation not permitted when stream is capturing): graphs=False does without"
    )
    assert cuda[-1] == "stream is back"
    assert not graphed.graphs


def test_a_gpu_without_kernels_has_no_graphs(cuda: list[str]) -> None:
    """torch's attention gathers as many columns as the longest prefix has: no launch that could be repeated."""
    _, graphed = runners(TARGET)
    graphed.cuda = graphs.CudaWorkspace.on(torch.device("cuda"))
    graphed.forward(ragged([3], [2], [1]), "target")
    assert graphed.fallbacks == {"target": 1}
    assert cuda == []
