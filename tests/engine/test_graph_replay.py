"""With graphs the engine says what it says without, token for token, and accepts as many drafts.

On a CPU, where a replay is the forward itself over the static buffers: what is wrong with buffers, padding, buckets or
slices shows here. Each such fault is put in on purpose, and must show.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import needs_interpreter
from builders import (
    agreeing_now_and_then,
    assert_all_free,
    assert_same_output,
    generate_watched,
    llama_config,
    peaked_logits,
    ragged_prompts,
    random_head,
    random_llama,
    random_logits,
    saved_head,
    saved_target,
    transparent_pair,
)
from pairwise import pairwise
from typer.testing import CliRunner

from refspec import Engine, Generation, SamplingParams, SpecConfig
from refspec.bench import engine as bench
from refspec.cli.main import app
from refspec.contracts import ForwardBatch, ForwardOutput
from refspec.engine.dp import Peers, generate_in_step
from refspec.models.scripted import ScriptedModel
from refspec.runtime import graphs
from refspec.runtime.graphs import GraphRunner, StaticBuffers
from refspec.runtime.runner import RowPadding
from refspec.trace import Round

VOCAB = 23
SIZES = (1, 2, 4)
SPECS = {
    "plain": None,
    "one step": SpecConfig(topk=1, num_steps=1, num_draft_tokens=2),
    "chain": SpecConfig(topk=1, num_steps=4, num_draft_tokens=5),
    "tree": SpecConfig(topk=4, num_steps=3, num_draft_tokens=16),
    "exact tree": SpecConfig(topk=4, num_steps=3, num_draft_tokens=16, exact_branch_kv=True),
}
Models = tuple[Any, Any]


def scripted() -> Models:
    """A draft that is right now and then: accepted paths of every length."""
    target = ScriptedModel(peaked_logits(VOCAB), VOCAB)
    return target, ScriptedModel(agreeing_now_and_then(peaked_logits(VOCAB), random_logits(VOCAB, salt=5)), VOCAB)


def scripted_unsure() -> Models:
    """The same, with trees of ever another form."""
    target = ScriptedModel(random_logits(VOCAB), VOCAB)
    return target, ScriptedModel(agreeing_now_and_then(random_logits(VOCAB), random_logits(VOCAB, salt=5)), VOCAB)


def scripted_alike() -> Models:
    model = ScriptedModel(peaked_logits(VOCAB), VOCAB)
    return model, model


def llama() -> Models:
    target = random_llama()
    return target, random_head(target)


def prompts_for(models: Callable[[], Models], count: int) -> list[list[int]]:
    prompts = ragged_prompts(count, 9, VOCAB)
    return [[0, *(1 + token % (VOCAB - 1) for token in prompt)] for prompt in prompts]  # as transparent_pair wants them


def engine_of(models: Models, spec: SpecConfig | None, **settings: Any) -> Engine:
    return Engine(models[0], models[1] if spec else None, spec, **settings)


def budgets(count: int) -> list[SamplingParams]:
    """Requests that end at different times."""
    return [SamplingParams(max_new_tokens=3 + 7 * i % 12) for i in range(count)]


def assert_counted(engine: Engine) -> None:
    """Each forward but those over prompts was replayed, or ran eagerly, and says so."""
    decoding = {phase: count for phase, count in engine.stats.forwards.items() if not phase.startswith("prefill")}
    assert engine.stats.graph_replays + engine.stats.graph_fallbacks == decoding


@pytest.mark.parametrize("batch", [1, 3, 6])
@pytest.mark.parametrize("shape", SPECS)
@pytest.mark.parametrize("models", [scripted, scripted_alike, llama, transparent_pair])
def test_output_and_draft_quality(models: Callable[[], Models], shape: str, batch: int) -> None:
    """Captured for 1, 2 and 4: the others are padded, or run eagerly. Requests leave one after the other, so that six
    of them are also five, and all the others."""
    pair, prompts, params = models(), prompts_for(models, batch), budgets(batch)
    without, _ = generate_watched(engine_of(pair, SPECS[shape]), prompts, params)
    engine = engine_of(pair, SPECS[shape], graphs=SIZES)
    replayed, _ = generate_watched(engine, prompts, params)
    assert_same_output(without, replayed)
    assert_same_output(Engine(pair[0]).generate(prompts, params), replayed)
    assert [g.accept_lens for g in replayed] == [g.accept_lens for g in without]
    assert engine.stats.graph_replays["target"] > 0
    assert (engine.stats.graph_fallbacks["target"] > 0) == (batch > SIZES[-1])
    assert_counted(engine)


@pytest.mark.parametrize("sizes", [SIZES, (3,), (8,)])
@pytest.mark.parametrize("shape", SPECS)
@pytest.mark.parametrize("models", [scripted, transparent_pair])
def test_requests_that_arrive_and_leave(models: Callable[[], Models], shape: str, sizes: tuple[int, ...]) -> None:
    """Nine prompts, five at a time: slots and rows of those that left are others' at once."""
    pair, prompts, params = models(), prompts_for(models, 9), budgets(9)
    without = engine_of(pair, SPECS[shape], max_running=5).generate(prompts, params)
    engine = engine_of(pair, SPECS[shape], max_running=5, graphs=sizes)
    with watched(engine) as complaints:
        replayed, _ = generate_watched(engine, prompts, params)
    assert_same_output(without, replayed)
    assert [g.accept_lens for g in replayed] == [g.accept_lens for g in without]
    assert complaints == set()
    assert_counted(engine)


@pytest.mark.parametrize(
    ("shape", "page_size", "models"),
    [
        tuple(row.values())
        for row in pairwise(
            {"shape": ["plain", "chain", "exact tree"], "page": [1, 4, 16], "models": [scripted, scripted_alike]}
        )
    ],
)
def test_pages_chunks_shared_prefixes_and_retraction(shape: str, page_size: int, models: Callable[[], Models]) -> None:
    """A pool that is too small for five: who is thrown out and comes back has other slots and another place."""
    pair, prompts, params = models(), prompts_for(models, 9), budgets(9)
    prompts = [[0, 7, 7, 7, 3, 1, *prompt] for prompt in prompts]
    expected = engine_of(pair, SPECS[shape]).generate(prompts, params)
    spec = SPECS[shape] and replace(SPECS[shape], page_size=page_size)
    slots = {1: 56, 4: 56, 16: 128}[page_size] if shape == "exact tree" else 32  # about what one of them may need
    settings = {"max_running": 5, "page_size": page_size, "chunk_size": 5, "prefix_cache": True}
    engine = engine_of(pair, spec, graphs=(2, 4), kv_slots=slots, **settings)
    with watched(engine) as complaints:
        replayed = engine.generate(prompts, params)
    engine.check()
    assert_same_output(expected, replayed)
    # The rest of a request's last page was taken in an earlier step.
    assert complaints <= ({"a write to a slot that was not taken"} if page_size > 1 else set())
    assert engine.stats.retractions > 0
    assert_counted(engine)
    if models is scripted_alike and spec:
        accepted = [g.accept_lens[:-1] for g in replayed]
        assert all(length == spec.num_steps + 1 for lens in accepted for length in lens)


@pytest.mark.parametrize("sampler", ["target_only", "rejection", "block"])
def test_sampled_output_is_the_same_with_graphs(sampler: str) -> None:
    spec = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, sampler=sampler)
    prompts, params = prompts_for(llama, 6), [SamplingParams(9, temperature=t, seed=3) for t in (0, 1, 0.5, 2, 1, 0)]
    outputs = [
        engine_of(llama(), spec, graphs=sizes, max_running=4).generate(prompts, params) for sizes in (False, SIZES)
    ]
    assert_same_output(*outputs)


@needs_interpreter
@pytest.mark.parametrize("shape", ["plain", "chain", "exact tree"])
def test_on_triton(shape: str) -> None:
    """The way that a GPU takes: lengths on the device, buffers with room for a whole context, a fixed split."""
    target, head = transparent_pair()
    prompts, params = [[0, 3, 4, 5], [0, 9], [0, 2, 2]], [SamplingParams(max_new_tokens=n) for n in (2, 5, 3)]
    without = engine_of((target, head), SPECS[shape], backend="torch").generate(prompts, params)
    engine = engine_of((target, head), SPECS[shape], backend="triton", graphs=(1, 4))
    with watched(engine) as complaints:
        replayed, _ = generate_watched(engine, prompts, params)
    assert_same_output(without, replayed)
    assert [g.accept_lens for g in replayed] == [g.accept_lens for g in without]
    assert complaints == set()
    assert engine.stats.launches["paged_kv_indices"] == sum(engine.stats.forwards.values())


@needs_interpreter
def test_scripted_models_on_triton() -> None:
    prompts, params = prompts_for(scripted, 3), [SamplingParams(max_new_tokens=n) for n in (3, 5, 2)]
    outputs = [
        engine_of(scripted(), SPECS["chain"], backend="triton", graphs=sizes).generate(prompts, params)
        for sizes in (False, SIZES)
    ]
    assert_same_output(*outputs)


# --- the cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SPECS)
@pytest.mark.parametrize("models", [scripted_alike, transparent_pair])
def test_SEQ_10_four_requests_then_one(models: Callable[[], Models], shape: str) -> None:
    """Captured for four. After the three have ended, nothing but what the fourth asks for is written."""
    pair, prompts = models(), prompts_for(models, 4)
    params = [SamplingParams(max_new_tokens=n) for n in (4, 4, 20, 4)]
    engine = engine_of(pair, SPECS[shape], graphs=(4,))
    with watched(engine) as complaints:
        replayed = engine.generate(prompts, params)
    assert complaints == set()
    assert engine.stats.graph_fallbacks == {}
    assert_same_output(engine_of(pair, SPECS[shape]).generate(prompts[2:3], params[2:3]), replayed[2:3])


@pytest.mark.parametrize("k", [0, 1, 2, 4])
def test_SEQ_12_six_requests_where_four_were_captured(k: int) -> None:
    """k = 0: plainly. Not four of them, and not four and padding: all six, as alone."""
    spec = SpecConfig(topk=k, num_steps=3, num_draft_tokens=4) if k else None
    prompts, params = prompts_for(scripted, 6), [SamplingParams(max_new_tokens=14)] * 6
    engine = engine_of(scripted(), spec, graphs=(4,))
    together = engine.generate(prompts, params)
    assert engine.stats.graph_fallbacks["target"] > 0
    assert len(together) == 6
    for prompt, one in zip(prompts, together, strict=True):
        assert_same_output(engine_of(scripted(), spec).generate([prompt], params[:1]), [one])


# --- faults -----------------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch
BUFFERS = (
    "input_ids",
    "positions",
    "out_slots",
    "rows",
    "prefix_lens",
    "tail_slots",
    "tail_mask",
    "hidden_states",
    "logits_rows",
)


def around_fill(patch: Patch, names: tuple[str, ...], spoil: Callable[[torch.Tensor, torch.Tensor, int, int], None]):  # type: ignore[no-untyped-def]
    """After each filling, spoil(buffer, what it held before, batch size, bucket) for the buffers of these names."""
    original = StaticBuffers.fill

    def fill(
        self: StaticBuffers, batch: ForwardBatch, padding: RowPadding, logits_rows: torch.Tensor | None, size: int
    ) -> None:
        buffers = [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]
        before = {name: buffer.clone() for name, buffer in buffers}
        original(self, batch, padding, logits_rows, size)
        for name, buffer in buffers:
            if hasattr(self, "filled"):
                spoil(buffer, before[name], len(batch.q_lens), size)
        self.filled = True  # type: ignore[attr-defined]

    patch.setattr(StaticBuffers, "fill", fill)


def padding_of_the_last_batch(patch: Patch, name: str) -> None:
    """SGLang's fault: what stands behind the batch is what stood there."""

    def spoil(buffer: torch.Tensor, before: torch.Tensor, batch_size: int, size: int) -> None:
        buffer[batch_size:size] = before[batch_size:size]

    around_fill(patch, (name,), spoil)


def padding_of_the_last_batch_in_all(patch: Patch) -> None:
    def spoil(buffer: torch.Tensor, before: torch.Tensor, batch_size: int, size: int) -> None:
        buffer[batch_size:size] = before[batch_size:size]

    around_fill(patch, BUFFERS, spoil)


def a_buffer_that_is_filled_once(patch: Patch, name: str) -> None:
    def spoil(buffer: torch.Tensor, before: torch.Tensor, batch_size: int, size: int) -> None:
        buffer.copy_(before)

    around_fill(patch, (name,), spoil)


def padding_that_sees_nothing(patch: Patch) -> None:
    def spoil(buffer: torch.Tensor, before: torch.Tensor, batch_size: int, size: int) -> None:
        buffer[batch_size:size] = False

    around_fill(patch, ("tail_mask",), spoil)


def a_graph_that_keeps_its_first_batch(patch: Patch) -> None:
    """Recorded over copies of the buffers instead of the buffers."""
    original, kept = StaticBuffers.batch, {}

    def batch(self: StaticBuffers, size: int) -> ForwardBatch:
        if (self, size) not in kept:
            kept[self, size] = original(self, size)
            for name in ("input_ids", "positions", "out_slots", "tail_slots"):
                setattr(kept[self, size], name, getattr(kept[self, size], name).clone())
        return kept[self, size]

    patch.setattr(StaticBuffers, "batch", batch)


def a_bucket_that_is_too_small(patch: Patch) -> None:
    """For a batch above the largest one: its first rows alone."""
    patch.setattr(GraphRunner, "_size_for", lambda self, batch_size: self.sizes[-1])


def change_outputs(patch: Patch, change: Callable[..., ForwardOutput]) -> None:
    patch.setattr(graphs, "_without_padding", partial(change, graphs._without_padding))


def the_last_rows_of_the_outputs(patch: Patch) -> None:
    def change(original: Any, out: ForwardOutput, padding: RowPadding, logits_rows: Any) -> ForwardOutput:
        own = original(out, padding, logits_rows)
        return ForwardOutput(out.logits[-len(own.logits) :], own.hidden_states)

    change_outputs(patch, change)


def hidden_states_with_padding_among_them(patch: Patch) -> None:
    def change(original: Any, out: ForwardOutput, padding: RowPadding, logits_rows: Any) -> ForwardOutput:
        own = original(out, padding, logits_rows)
        return ForwardOutput(own.logits, out.hidden_states[: len(own.hidden_states)])

    change_outputs(patch, change)


def logits_rows_that_count_no_padding(patch: Patch) -> None:
    original = StaticBuffers.fill

    def fill(self: StaticBuffers, batch: Any, padding: RowPadding, logits_rows: Any, size: int) -> None:
        original(self, batch, padding, logits_rows, size)
        if logits_rows is not None:
            self.logits_rows[: len(logits_rows)] = logits_rows

    patch.setattr(StaticBuffers, "fill", fill)


FAULTS: dict[str, Callable[[Patch], None]] = {
    **{f"old padding in {name}": partial(padding_of_the_last_batch, name=name) for name in BUFFERS[2:6]},
    **{f"{name} filled once": partial(a_buffer_that_is_filled_once, name=name) for name in BUFFERS},
    **{
        fault.__name__: fault
        for fault in (
            padding_of_the_last_batch_in_all,
            a_graph_that_keeps_its_first_batch,
            a_bucket_that_is_too_small,
            the_last_rows_of_the_outputs,
            hidden_states_with_padding_among_them,
            logits_rows_that_count_no_padding,
        )
    },
}


@contextmanager
def watched(engine: Engine) -> Iterator[set[str]]:
    """What padding must not do: name a row or a slot of somebody's, write there, or put a NaN into slot 0."""
    complaints: set[str] = set()
    worker = engine.scheduler.worker
    runners = [worker.target, *([worker.draft_runner] if hasattr(worker, "draft") else [])]
    taken: list[int] = []
    original_alloc, original_fill, original_step = engine.allocator.alloc, StaticBuffers.fill, engine.scheduler.step

    def alloc(count: int) -> torch.Tensor:
        slots = original_alloc(count)
        taken.extend(slots.tolist())
        return slots

    def fill(self: StaticBuffers, batch: ForwardBatch, padding: RowPadding, logits_rows: Any, size: int) -> None:
        original_fill(self, batch, padding, logits_rows, size)
        for name in ("out_slots", "rows", "prefix_lens", "tail_slots"):
            if getattr(self, name)[len(batch.q_lens) : size].any():
                complaints.add(f"padding in {name}")

    def step(observer: Any = None) -> None:
        taken.clear()
        before = [runner.pool.buffer.clone() for runner in runners]
        original_step(observer)
        for runner, was in zip(runners, before, strict=True):
            same = (runner.pool.buffer == was).flatten(2).all(2).all(0)
            if not set((~same).nonzero().flatten().tolist()) <= {0, *taken}:
                complaints.add("a write to a slot that was not taken")
            if not runner.pool.buffer[:, 0].isfinite().all():
                complaints.add("NaN in slot 0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.allocator, "alloc", alloc)
        patch.setattr(StaticBuffers, "fill", fill)
        patch.setattr(engine.scheduler, "step", step)
        yield complaints


@functools.cache
def without_graphs(models: Callable[[], Models], shape: str) -> tuple[list[Generation], list[Round]]:
    """No fault touches this, so it is done once."""
    rounds: list[Round] = []
    engine = engine_of(models(), SPECS[shape], max_running=5)
    return engine.generate(prompts_for(models, 9), budgets(9), rounds.append), rounds


def what_shows(models: Callable[[], Models], shape: str) -> set[str]:
    """What the tests above would complain of."""
    without, rounds_without = without_graphs(models, shape)
    engine, rounds = engine_of(models(), SPECS[shape], max_running=5, graphs=(4,)), list[Round]()
    with watched(engine) as complaints:
        try:
            replayed = engine.generate(prompts_for(models, 9), budgets(9), rounds.append)
        except (ValueError, RuntimeError, IndexError) as error:
            return {*complaints, type(error).__name__}
    if [g.token_ids for g in replayed] != [g.token_ids for g in without]:
        complaints.add("output")
    if [g.accept_lens for g in replayed] != [g.accept_lens for g in without]:
        complaints.add("draft quality")
    drafts = [
        [[c.token for c in tree.candidates] for round_ in of for tree in round_.requests]
        for of in (rounds_without, rounds)
    ]
    if drafts[0] != drafts[1]:
        complaints.add("drafts")
    return complaints


@pytest.mark.parametrize("models", [scripted, scripted_unsure, llama, transparent_pair])
def test_nothing_shows_without_a_fault(models: Callable[[], Models]) -> None:
    assert what_shows(models, "exact tree") == set()


@pytest.mark.parametrize("models", [scripted_unsure, llama])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_shows(fault: str, models: Callable[[], Models], monkeypatch: Patch) -> None:
    FAULTS[fault](monkeypatch)
    assert what_shows(models, "exact tree")


def test_padding_that_sees_nothing_shows(monkeypatch: Patch) -> None:
    """To a scripted model. torch's attention on a CPU and the kernel answer with zeros; others would with NaN."""
    padding_that_sees_nothing(monkeypatch)
    assert what_shows(scripted_unsure, "exact tree")


# --- the engine's settings, and the command line's --------------------------------------------------------------------


def test_graphs_are_off_on_a_cpu_unless_asked_for() -> None:
    model = scripted()[0]
    assert Engine(model).graphs == Engine(model, graphs=False).graphs == ()
    assert Engine(model, graphs=True, max_running=6).graphs == (1, 2, 4, 6)
    assert Engine(model, graphs=[4, 2]).graphs == (2, 4)
    assert not isinstance(Engine(model).scheduler.worker.target, GraphRunner)
    with pytest.raises(ValueError, match=r"graphs is \[0\], it must be"):
        Engine(model, graphs=[0])


def test_ranks_in_step_run_eagerly() -> None:
    """Their output head is asked in the middle of a forward, and answers through the host."""
    pair, prompts, params = scripted(), prompts_for(scripted, 3), budgets(3)
    expected = engine_of(pair, SPECS["tree"]).generate(prompts, params)
    engine = engine_of(pair, SPECS["tree"], graphs=SIZES)
    alone = Peers(0, 1, lambda mine: [mine], lambda mine: [mine])
    assert_same_output(expected, generate_in_step(engine, alone, prompts, params))
    assert not engine.stats.graph_replays
    assert_counted(engine)


def test_streams_take_turns() -> None:
    """A stream that ends early leaves a smaller batch behind."""
    pair, prompts = scripted(), prompts_for(scripted, 3)
    params = SamplingParams(max_new_tokens=15)
    expected = engine_of(pair, SPECS["tree"]).generate(prompts, params)
    engine = engine_of(pair, SPECS["tree"], graphs=(4,))
    streams = [engine.stream(prompt, params) for prompt in prompts]
    tokens: list[list[int]] = [[], [], []]
    next_of = [next(stream) for stream in streams]
    for told, block in zip(tokens, next_of, strict=True):
        told += block.token_ids
    streams[1].close()
    for told, stream in zip(tokens[::2], streams[::2], strict=True):
        for block in stream:
            told += block.token_ids
    assert [tokens[0], tokens[2]] == [expected[0].token_ids, expected[2].token_ids]
    assert_all_free(engine)


def test_generate_says_whether_graphs_were_replayed(tmp_path: Path) -> None:
    target = random_llama(llama_config(vocab_size=256, num_hidden_layers=1), dtype=torch.float32)
    models = [saved_target(tmp_path / "target", target), saved_head(tmp_path / "eagle", random_head(target))]
    args = ["generate", "x", "--target", str(models[0]), "--draft", str(models[1]), "--max-new-tokens", "6", "--json"]
    documents = []
    for option in ("--no-graphs", "--graphs"):
        done = CliRunner().invoke(app, [*args, "--device", "cpu", option])
        assert done.exit_code == 0, done.output
        documents.append(json.loads(done.stdout))
    assert [document["config"]["graphs"] for document in documents] == [[], [1, 2, 4, 8, 16, 32]]
    assert documents[0]["stats"]["graph_replays"] == {}
    replays = documents[1]["stats"]["graph_replays"]
    assert replays["target"] == documents[1]["stats"]["target_forwards"] > 0
    assert documents[0]["generations"] == documents[1]["generations"]


@pytest.mark.parametrize(("options", "graphs_asked"), [([], None), (["--graphs"], True), (["--no-graphs"], False)])
def test_the_option_of_bench_arrives(options: list[str], graphs_asked: bool | None, monkeypatch: Patch) -> None:
    asked_for: list[object] = []

    def refuse(*_: object, graphs: object, **__: object) -> None:
        asked_for.append(graphs)
        raise ValueError("far enough")

    monkeypatch.setattr(bench, "Engine", refuse)
    done = CliRunner().invoke(app, ["bench", "engine", "--prompts", "1", *options])
    assert (done.exit_code, asked_for) == (1, [graphs_asked])
