"""Spec v2: rounds that overlap say what v1's rounds say, and nobody looks at, or gives away, what is not yet there.

The grids of test_output_invariant.py and test_serving.py run v2 beside v1, and so does the machine of
test_serving_model.py. Here is what is v2's own: the order of events, what a round in flight may still write, and who
leaves while he is in one.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    agreeing_now_and_then,
    assert_all_free,
    assert_same_output,
    generate_watched,
    hash_of,
    llama_config,
    peaked_logits,
    ragged_prompts,
    random_assistant,
    random_eagle3,
    random_head,
    random_llama,
    random_logits,
    random_mtp,
    text_logits,
    transparent_pair,
)
from kv_contents import prefilled, worker_of
from serving import VOCAB, Visit, serve, step_until
from torch import Tensor
from torch.overrides import TorchFunctionMode

import refspec.workers.base
import refspec.workers.eagle_v2 as eagle_v2
from refspec import Engine, SamplingParams, SpecConfig
from refspec.config import ALGORITHMS
from refspec.contracts import ForwardBatch, ForwardMode, VerifyOutput
from refspec.engine.scheduler import Scheduler
from refspec.memory.allocator import IntegrityError
from refspec.models.llama import LlamaForCausalLM
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import Request, RunningBatch
from refspec.runtime.futures import Futures, ReadTooEarly
from refspec.runtime.runner import ModelRunner
from refspec.workers.base import RoundInFlight
from refspec.workers.eagle_v2 import EagleWorkerV2

SAID = random_logits(VOCAB)
TARGET = ScriptedModel(SAID, VOCAB)
DRAFT = ScriptedModel(agreeing_now_and_then(SAID, random_logits(VOCAB, salt=5)), VOCAB)
CHAIN = SpecConfig("eagle-v2", topk=1, num_steps=3, num_draft_tokens=4)
TREE = SpecConfig("eagle-v2", topk=2, num_steps=3, num_draft_tokens=6, exact_branch_kv=True)
SHAPES = {
    "chain": CHAIN,
    "chain, pages": replace(CHAIN, page_size=4),
    "tree": TREE,
    "tree, pages": replace(TREE, topk=4, num_draft_tokens=9, page_size=4),
}
by_shape = pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
PROMPTS = ragged_prompts(4, 9, VOCAB)

Patch = pytest.MonkeyPatch


def engine_of(spec: SpecConfig | None = CHAIN, **settings: Any) -> Engine:
    return Engine(TARGET, DRAFT if spec else None, spec, **settings)


def v1(spec: SpecConfig) -> SpecConfig:
    return replace(spec, algorithm="eagle")


def v2_worker(engine: Engine) -> EagleWorkerV2:
    worker = engine.scheduler.worker
    assert isinstance(worker, EagleWorkerV2)
    return worker


def budgets(*tokens: int) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=n) for n in tokens]


# --- it says what v1 says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 5])
@by_shape
def test_FIN_09_every_budget_is_used_up_and_no_more(spec: SpecConfig, steps: int) -> None:
    """1 to 12 tokens, all in one batch: the ends fall on every place of a block."""
    nodes = min(spec.num_draft_tokens, spec.topk + (steps - 1) * spec.topk**2 + 1)
    spec = replace(spec, num_steps=steps, num_draft_tokens=max(nodes, 2))
    prompts = [[3, i % 2, 5] for i in range(12)]
    generations, _ = generate_watched(engine_of(spec), prompts, budgets(*range(1, 13)))
    assert [len(g.token_ids) for g in generations] == list(range(1, 13))
    assert_same_output(engine_of(None).generate(prompts, budgets(*range(1, 13))), generations)
    before = engine_of(v1(spec)).generate(prompts, budgets(*range(1, 13)))
    assert [g.accept_lens for g in generations] == [g.accept_lens for g in before]


SAMPLERS = {
    "target_only": TREE,
    "rejection": replace(CHAIN, sampler="rejection"),
    "block": replace(CHAIN, sampler="block", page_size=4),
}


@pytest.mark.parametrize("spec", SAMPLERS.values(), ids=SAMPLERS)
def test_sampled_requests_throw_the_coins_that_they_throw_in_v1(spec: SpecConfig) -> None:
    """Whatever overlaps: a coin hangs on the position alone, and that is known on the device."""
    visits = [
        Visit(prompt, SamplingParams(14 + i, temperature=(0.7, 0, 1.5, 1)[i], top_k=5 * i, seed=i), comes=2 * i)
        for i, prompt in enumerate(PROMPTS)
    ]
    requests, _ = serve(engine_of(spec, chunk_size=4), visits)
    for visit, request in zip(visits, requests, strict=True):
        (alone,) = engine_of(v1(spec)).generate([visit.prompt], visit.params)
        assert (request.output_ids, request.accept_lens) == (alone.token_ids, alone.accept_lens)


RULED = {
    "bias": SamplingParams(9, logit_bias={3: 5.0}),
    "penalties": SamplingParams(9, repetition_penalty=1.5, presence_penalty=0.5),
}


@pytest.mark.parametrize("ruled", RULED.values(), ids=RULED)
def test_those_with_rules_come_and_go_among_those_without(ruled: SamplingParams) -> None:
    """They find a round in flight, and end the overlap until they have gone. One of the others ends in the very round
    that is looked at for their sake."""
    visits = [Visit(PROMPTS[0], SamplingParams(60))]
    visits += [Visit([1, i], SamplingParams(2 + i)) for i in range(8)]  # somebody ends in every round
    visits += [Visit([2, i], ruled, comes=comes) for i, comes in enumerate((4, 20))]
    engine = engine_of(TREE)
    overlapped: list[bool] = []
    requests, _ = serve(engine, visits, lambda step: overlapped.append(engine.scheduler.in_flight is not None))
    for visit, request in zip(visits, requests, strict=True):
        (alone,) = engine_of(v1(TREE)).generate([visit.prompt], visit.params)
        assert (request.output_ids, request.accept_lens) == (alone.token_ids, alone.accept_lens)
    assert [overlaps for overlaps, _ in itertools.groupby(overlapped)][:4] == [False, True, False, True]


def test_a_request_with_rules_that_finds_a_round_in_flight_whose_request_ends() -> None:
    """The batch that goes on is the one behind that round. (It was the one before it: the request that had ended took
    part, in a row and in slots that were no longer its own.)"""
    engine = engine_of(TREE)
    short, long = engine.add_request([1, 2], SamplingParams(2)), engine.add_request([1, 3], SamplingParams(30))
    step_until(engine, lambda: engine.scheduler.in_flight is not None)
    engine.add_request([2, 2], RULED["bias"])
    step_until(engine, lambda: short.finish_reason is not None)
    assert short.row == 0
    step_until(engine, lambda: long.finish_reason is not None)
    assert_all_free(engine)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@by_shape
def test_logprobs_are_those_of_their_own_round(spec: SpecConfig, graphs: bool) -> None:
    """They are asked for after the next round's launch, which may have written over the target's outputs."""
    params = [SamplingParams(12, logprobs=2), SamplingParams(9), SamplingParams(7, logprobs=0)]
    expected = engine_of(v1(spec)).generate(PROMPTS[:3], params)
    found = engine_of(spec, graphs=graphs).generate(PROMPTS[:3], params)
    assert [g.token_ids for g in found] == [g.token_ids for g in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.top_logprobs == theirs.top_logprobs
        assert mine.logprobs is None or mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-12)


@by_shape
def test_graphs_change_nothing(spec: SpecConfig) -> None:
    """A batch that shrinks under its graphs; the extend is replayed too, whatever was accepted."""
    target, head = transparent_pair(vocab_size=VOCAB)
    prompts = [[0, *(1 + t % (VOCAB - 1) for t in prompt)] for prompt in PROMPTS]
    params = budgets(3, 20, 9, 14)
    engine = Engine(target, head, spec, graphs=(1, 2, 4))
    generations, watcher = generate_watched(engine, prompts, params)
    assert_same_output(Engine(target).generate(prompts, params), generations)
    assert engine.stats.graph_fallbacks == {}
    assert engine.stats.graph_replays["extend"] == engine.stats.forwards["extend"] > 0
    if spec.exact_branch_kv or spec.topk == 1:
        assert {len(r.accepted_rows) for r in watcher.requests} == {spec.num_steps + 1}


# --- ends ---------------------------------------------------------------------------------------------------------


def drafts_of(target: LlamaForCausalLM) -> dict[str, Any]:
    """One for each algorithm, over the target; None: it takes no model."""
    head, layers = random_head(target), random_mtp(target)
    return {
        "eagle": head,
        "eagle-v2": head,
        "eagle3": random_eagle3(target),
        "mtp": layers[0],
        "multi-layer": [layers[i] for i in range(3)],
        "frozen-kv": random_assistant(target),
        "standalone": random_llama(seed=9),
        "ngram": None,
    }


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_requests_finish_in_one_verify_27607(algorithm: str) -> None:
    """Nobody is left to go on: no extend, or one whose results nobody wants. The next batch starts as the first did."""
    target = random_llama(llama_config(num_hidden_layers=4))
    draft = drafts_of(target)[algorithm]
    spec = replace(CHAIN, algorithm=algorithm) if draft else SpecConfig(algorithm, num_draft_tokens=4)
    engine = Engine(target, draft, spec)
    together, _ = generate_watched(engine, PROMPTS, budgets(2, 2, 2, 2))
    assert engine.stats.rounds == 1
    assert [len(g.token_ids) for g in together] == [2, 2, 2, 2]
    again, _ = generate_watched(engine, PROMPTS, budgets(12, 12, 12, 12))
    fresh = Engine(target, draft, spec).generate(PROMPTS, budgets(12, 12, 12, 12))
    assert_same_output(fresh, again)
    if algorithm != "ngram":  # which remembers the first batch
        assert [g.accept_lens for g in again] == [g.accept_lens for g in fresh]
    assert_same_output(Engine(target).generate(PROMPTS, budgets(12, 12, 12, 12)), again)


def test_FIN_10_a_stop_inside_a_block_counts_the_same_everywhere() -> None:
    """A block of 5 with the stop at its 2nd token."""
    model = ScriptedModel(text_logits([0, 0, 5, 6, 7, 8, 9, 10, 11, 12], VOCAB), VOCAB)
    spec = replace(CHAIN, num_steps=4, num_draft_tokens=5)
    engine = Engine(model, model, spec)
    blocks = [block.token_ids for block in engine.stream([0, 0], SamplingParams(8, stop_token_ids=(7,)))]
    assert blocks == [[5], [6, 7]]
    stats = engine.stats
    assert (stats.committed_tokens, stats.request_rounds, stats.rounds, stats.accept_length) == (2, 1, 1, 2.0)
    assert stats.dropped_request_rounds == 1
    assert_all_free(engine)


def test_SEQ_16_the_end_of_the_context() -> None:
    """Context 16, prompt 12, 5 steps: drafts run past the end, and a round too late begins behind it."""
    target, draft = ScriptedModel(SAID, VOCAB, 16), ScriptedModel(SAID, VOCAB, 16)
    prompt = [hash_of([p]) % VOCAB for p in range(12)]
    for spec in (replace(CHAIN, num_steps=5, num_draft_tokens=6), replace(TREE, num_steps=5, num_draft_tokens=12)):
        engine = Engine(target, draft, spec)
        (generation,), watcher = generate_watched(engine, [prompt], SamplingParams(100))
        assert_same_output(Engine(target).generate([prompt], SamplingParams(100)), [generation])
        assert (len(generation.token_ids), generation.finish_reason) == (4, "length")
        for tree in watcher.requests:
            used = [tree.positions[row] for row in tree.accepted_rows[: len(tree.committed)]]
            assert max(used) < 15  # the answer at 14 is the token at 15, the last that there is


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("k", [1, 2])
def test_the_last_block_is_in_the_prefix_cache_and_its_rows_are_right(k: int, page: int) -> None:
    """The extend of the round has read it before anybody knew that it is the last. A round too late writes behind."""
    target, head = transparent_pair(vocab_size=VOCAB)
    spec = SpecConfig("eagle-v2", k, 3, 4 * k, page, exact_branch_kv=True)
    engine = Engine(target, head, spec, prefix_cache=True)
    long = engine.add_request([0, 5, 11, 2], SamplingParams(60))
    for prompt, budget in (([0, 7, 2, 4, 1], 15), ([0, 3, 3], 10), ([0, 9, 1, 1, 6, 5], 1)):
        request = engine.add_request(prompt, SamplingParams(budget))
        step_until(engine, lambda request=request: request.row == 0 and bool(request.finish_reason))  # type: ignore[misc]
        ids, cache = request.all_ids, engine.scheduler.cache
        assert cache
        assert long.finish_reason is None
        slots = cache.match_prefix(ids).slots
        written = len(ids) - 1 if budget > 1 else 0  # nobody reads on in the prompt of one that ends with it
        assert len(slots) == written // page * page
        worker = worker_of(engine)
        fresh, hidden = prefilled(worker.target, ids[:-1])
        torch.testing.assert_close(worker.target.pool.buffer[:, slots], fresh[:, : len(slots)])
        fresh, _ = prefilled(worker.draft_runner, ids[1:], hidden)
        torch.testing.assert_close(worker.draft_runner.pool.buffer[:, slots], fresh[:, : len(slots)])


# --- the order of events ------------------------------------------------------------------------------------------


@contextmanager
def diary(engine: Engine, patch: Patch) -> Iterator[list[tuple[str, int]]]:
    """("launch", n) and ("collect", n) of the n-th round, in their order."""
    events: list[tuple[str, int]] = []
    worker, numbers = v2_worker(engine), dict[int, int]()
    launch, collect = worker.launch, worker.collect

    def launched(*arguments: Any) -> tuple[RunningBatch, RoundInFlight]:
        batch, in_flight = launch(*arguments)
        numbers[id(in_flight.results)] = len(numbers)
        events.append(("launch", numbers[id(in_flight.results)]))
        kept.append(in_flight)
        return batch, in_flight

    def collected(in_flight: RoundInFlight) -> None:
        events.append(("collect", numbers[id(in_flight.results)]))
        collect(in_flight)

    kept: list[RoundInFlight] = []  # else another's results may get the same id
    with patch.context() as patched:
        patched.setattr(worker, "launch", launched)
        patched.setattr(worker, "collect", collected)
        yield events


@by_shape
def test_the_next_round_is_launched_before_the_last_is_looked_at(spec: SpecConfig, monkeypatch: Patch) -> None:
    engine = engine_of(spec)
    with diary(engine, monkeypatch) as events:
        generations, _ = generate_watched(engine, PROMPTS, budgets(5, 30, 11, 17))
    rounds = max(n for _, n in events)
    expected = [("launch", 0)]
    for n in range(rounds):
        expected += [("launch", n + 1), ("collect", n)]
    assert events == [*expected, ("collect", rounds)]
    # Each is in one round too many; the last of them is in one whose tokens nobody gets, and which does not count.
    assert engine.stats.dropped_request_rounds == len(generations)
    assert (engine.stats.rounds, engine.stats.target_forwards) == (rounds, rounds + 1)
    assert engine.stats.request_rounds == sum(len(g.accept_lens) for g in generations)


def test_a_pool_without_room_for_two_rounds_is_looked_at_first(monkeypatch: Patch) -> None:
    wrong = ScriptedModel(random_logits(VOCAB, salt=5), VOCAB)  # short steps towards the pool's end
    engine = Engine(TARGET, wrong, CHAIN, kv_slots=CHAIN.round_end(3 + 18))
    with diary(engine, monkeypatch) as events:
        (generation,), _ = generate_watched(engine, [[1, 2, 3]], SamplingParams(20))
    assert len(generation.token_ids) == 20
    neighbours = list(itertools.pairwise(events))
    assert (("launch", 0), ("launch", 1)) in neighbours
    assert any(then == ("launch", n + 1) for (what, n), then in neighbours if what == "collect")  # not n + 2


@by_shape
def test_who_is_aborted_in_a_round_holds_his_slots_until_it_is_over(spec: SpecConfig) -> None:
    engine = engine_of(spec)
    first, second = (engine.add_request(prompt, SamplingParams(40)) for prompt in PROMPTS[:2])
    for _ in range(3):
        engine.step()
    held, said = engine.allocator.available(), list(first.output_ids)
    for _ in range(2):  # a second time changes nothing
        engine.abort(first)
        engine.check()
    assert engine.allocator.available() == held
    assert engine.scheduler.leaving == [first]
    engine.step()
    assert (engine.scheduler.leaving, first.row, first.output_ids) == ([], 0, said)
    engine.abort(second)  # nobody runs any more: the round is looked at at once
    assert_all_free(engine)
    assert engine.stats.dropped_request_rounds == 2


def test_generate_while_others_run_leaves_each_request_once() -> None:
    """It aborts what it has started, which has ended by then but still waits for a round with the others in it."""
    engine = engine_of()
    stream = engine.stream(PROMPTS[0], SamplingParams(40))
    next(stream)
    for budget in (3, 5):
        (generation,) = engine.generate([PROMPTS[1]], SamplingParams(budget))
        engine.check()
        assert len(generation.token_ids) == budget
    assert sum(len(block.token_ids) for block in stream) == 39
    assert_all_free(engine)


# --- faults of the order, put in on purpose -----------------------------------------------------------------------


def test_a_result_that_is_read_before_its_event_is_refused(monkeypatch: Patch) -> None:
    engine = engine_of()
    with monkeypatch.context() as patch:
        patch.setattr(Futures, "wait", lambda self: None)
        with pytest.raises(ReadTooEarly, match="finite was read before"):
            engine.generate(PROMPTS, SamplingParams(9))
    assert_all_free(engine)
    assert_same_output(
        engine_of(None).generate(PROMPTS, SamplingParams(9)), engine.generate(PROMPTS, SamplingParams(9))
    )


@pytest.mark.parametrize("ends", ["finishes", "is aborted"])
def test_slots_that_a_round_in_flight_may_write_are_not_freed(ends: str, monkeypatch: Patch) -> None:
    release = Scheduler._release

    def at_once(self: Scheduler, request: Request) -> None:
        in_flight, request.in_flight_tokens = request.in_flight_tokens, 0
        release(self, request)
        request.in_flight_tokens = in_flight

    monkeypatch.setattr(Scheduler, "_release", at_once)
    engine = engine_of()
    first = engine.add_request(PROMPTS[0], SamplingParams(5 if ends == "finishes" else 40))
    engine.add_request(PROMPTS[1], SamplingParams(40))
    for _ in range(3):
        engine.step()
    if ends == "is aborted":
        engine.abort(first)
    with pytest.raises(IntegrityError, match="gave up its slots, but a round in flight may write them"):
        step_until(engine, lambda: False)


HOST_CODE = tuple(f"refspec/{floor}/" for floor in ("workers", "spec", "requests", "engine"))
READS = {"item", "tolist", "numpy", "cpu", "nonzero", "unique", "masked_select", "equal", "allclose"}
READS |= {f"__{name}__" for name in ("bool", "int", "float", "index", "len", "contains", "iter")} - {
    "__len__",
    "__iter__",
}


class NoHostReads(TorchFunctionMode):
    """Inside, host code that looks at a tensor's values, or sends some to the device in a way that waits, is told.

    Kernels, models and the runtime play the device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        masked = name in ("__getitem__", "__setitem__") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if masked or name in READS or func is torch.tensor:
            frame = sys._getframe(1)
            while frame.f_back and "refspec/" not in frame.f_code.co_filename:
                frame = frame.f_back
            if any(part in frame.f_code.co_filename for part in HOST_CODE):
                raise AssertionError(f"{frame.f_code.co_name} in line {frame.f_lineno}: {name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("read", [int, bool, float, Tensor.tolist, Tensor.item, Tensor.cpu, lambda x: x[x > 0], range])
def test_the_guard_sees_every_way_to_look(read: Callable[[Tensor], Any]) -> None:
    looks = compile("def look(read, tensor): return read(tensor)", "/src/refspec/workers/one.py", "exec")
    names: dict[str, Any] = {}
    exec(looks, names)
    with NoHostReads(), pytest.raises(AssertionError, match="waits for the device"):
        names["look"](read, torch.tensor(3) if read in (int, bool, float, Tensor.item, range) else torch.tensor([3]))


def guarded(engine: Engine, patch: Patch) -> None:
    worker = v2_worker(engine)
    launch = worker.launch

    def launched(*arguments: Any) -> Any:
        with NoHostReads():
            return launch(*arguments)

    patch.setattr(worker, "launch", launched)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("spec", [*SHAPES.values(), replace(CHAIN, sampler="block")], ids=[*SHAPES, "block"])
def test_no_host_code_looks_at_a_tensor_in_a_launch(spec: SpecConfig, temperature: float, monkeypatch: Patch) -> None:
    engine = engine_of(spec)
    guarded(engine, monkeypatch)
    params = [replace(param, temperature=temperature, top_k=4, seed=1) for param in budgets(4, 9, 7, 12)]
    engine.generate(PROMPTS, params)
    assert engine.stats.rounds > 3


def test_a_look_in_a_launch_is_told(monkeypatch: Patch) -> None:
    def judge_and_look(*arguments: Any) -> VerifyOutput:
        verified = judge(*arguments)
        names["look"](verified.accept_token_num)
        return verified

    judge, names = eagle_v2.judge, dict[str, Any]()
    exec(compile("def look(x): return x.tolist()", "/src/refspec/spec/verify.py", "exec"), names)
    monkeypatch.setattr(eagle_v2, "judge", judge_and_look)
    engine = engine_of()
    guarded(engine, monkeypatch)
    with pytest.raises(AssertionError, match="look in line 1: tolist waits for the device"):
        engine.generate(PROMPTS, SamplingParams(9))


# --- slots and rows -----------------------------------------------------------------------------------------------


@by_shape
def test_MEM_16_a_row_of_the_table_is_one_requests_until_its_last_round_is_over(
    spec: SpecConfig, monkeypatch: Patch
) -> None:
    """Two rounds, one finish, one new request, which needs the row. Each cell is written once, by the request that has
    the row, and whatever a round reads is its own requests'."""
    engine = engine_of(spec, max_running=2)
    writer: dict[tuple[int, int], tuple[str, str]] = {}  # by cell: the request that wrote it, and the phase
    owner: dict[int, str] = {}  # of each row, at the latest launch
    phase, log = [""], list[tuple[str, Any]]()
    names: dict[Request, str] = {}
    worker, table = v2_worker(engine), engine.table.req_to_token
    in_phase = type(worker).phase

    def entered(self: Any, name: str) -> Any:
        phase[0] = name
        return in_phase(self, name)

    def assign(original: Any) -> Any:
        def written(req_to_token: Tensor, rows: Tensor, start: Tensor, end: Tensor, slots: Tensor) -> None:
            for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
                for cell in range(first, last):
                    before = writer.get((row, cell), ("", ""))
                    assert before[0] != owner[row], f"cell {cell} was written by {before[1]} and by {phase[0]}"
                    writer[row, cell] = (owner[row], phase[0])
            original(req_to_token, rows, start, end, slots)

        return written

    def read(row: int, cells: range) -> None:
        for cell in cells:
            assert writer[row, cell][0] == owner[row], f"{owner[row]} reads cell {cell} of {writer[row, cell]}"

    def forward(self: ModelRunner, batch: ForwardBatch, *others: Any, **named: Any) -> Any:
        lens = batch.prefix_lens if batch.lens is None else batch.lens.tolist()
        for row, length, tail in zip(batch.rows.tolist(), lens, batch.tail_slots.tolist(), strict=True):
            read(row, range(length))
            mine = {int(table[row, cell]) for (r, cell), (who, _) in writer.items() if (r, who) == (row, owner[row])}
            assert set(tail) <= {0, *mine}, "a round writes into a slot that is not its request's"
        return run(self, batch, *others, **named)

    def moving(step: Callable[..., Any], what: str) -> Callable[..., Any]:
        def moved(batch: Any, *others: Any) -> Any:
            requests = batch.requests
            if what != "collect":
                owner.update({request.row: names[request] for request in requests})
            log.append((what, [(names[request], request.row) for request in requests]))
            return step(batch, *others)

        return moved

    run = ModelRunner.forward
    monkeypatch.setattr(type(worker), "phase", entered)
    monkeypatch.setattr(ModelRunner, "forward", forward)
    for module in (eagle_v2, refspec.workers.base):
        monkeypatch.setattr(module, "assign_req_to_token", assign(module.assign_req_to_token))  # type: ignore[attr-defined]
    for what in ("launch", "collect", "forward"):
        monkeypatch.setattr(worker, what, moving(getattr(worker, what), what))
    for name, prompt, budget in (("short", [1, 2, 3], 4), ("long", [4, 5, 6, 7, 8], 30), ("late", [9, 8, 7, 6], 12)):
        names[engine.add_request(prompt, SamplingParams(budget))] = name
    while any(request.finish_reason is None for request in names):
        engine.step()
    reader = next(i for i, (what, who) in enumerate(log) if what == "forward" and who[0][0] == "late")
    row = log[reader][1][0][1]
    with_short = [i for i, (_, who) in enumerate(log) if ("short", row) in who]
    assert [log[i][0] for i in with_short][-3:] == ["launch", "collect", "collect"]
    assert with_short[-1] < reader
    assert_all_free(engine)


@pytest.mark.parametrize("twice", [False, True], ids=["", "reserved twice"])
def test_MEM_15_no_more_is_reserved_than_one_round_can_write(twice: bool, monkeypatch: Patch) -> None:
    """Behind the bound, 4 slots: then a cached prefix of 20 tokens survives in a pool that has just room for it."""
    if twice:
        monkeypatch.setattr(SpecConfig, "round_end", lambda self, seq_len: seq_len + 8)
    engine = engine_of(kv_slots=20 + 2 * (4 + 7 - 1 + 4 + 4), prefix_cache=True)
    text = [hash_of([p]) % VOCAB for p in range(16)]
    (first,) = engine.generate([text], SamplingParams(5))
    cache, reserved = engine.scheduler.cache, list[int]()
    assert cache
    assert cache.evictable_size == 20
    worker = v2_worker(engine)
    reserve = worker.reserve

    def watched(batch: RunningBatch) -> None:
        bounds = batch.prefix_lens
        reserve(batch)
        reserved.extend(request.held_len - bound for request, bound in zip(batch.requests, bounds, strict=True))

    monkeypatch.setattr(worker, "reserve", watched)
    engine.generate([[1, 2, 3, 4], [1, 3, 2, 4]], SamplingParams(8))
    found = len(cache.match_prefix([*text, *first.token_ids]).slots)
    if twice:
        assert found < 20
    else:
        assert (set(reserved), found, engine.stats.evicted_tokens) == ({4}, 20, 0)


@pytest.mark.parametrize("way", ["finish", "retract", "abort"])
def test_MEM_02_what_was_reserved_comes_back_once(way: str) -> None:
    """Page 4, 6 tokens committed, reserved up to 12, and the pool has no more: 3 pages."""
    spec = SpecConfig("eagle-v2", topk=1, num_steps=5, num_draft_tokens=6, page_size=4)
    engine = engine_of(spec, kv_slots=12)
    request = engine.add_request([1, 2, 3, 4, 5, 6], SamplingParams(2 if way == "finish" else 30))
    engine.step()
    assert (request.kv_len, request.held_len) == (6, 6)
    engine.step()
    assert (request.kv_len, request.held_len, engine.allocator.available()) == (6, 12, 0)
    returned = engine.allocator.returned
    if way == "finish":
        engine.step()
    elif way == "retract":
        engine.scheduler.retract(request)
        assert request in engine.scheduler.waiting
    else:
        engine.abort(request)
    assert engine.allocator.returned == returned + 12
    assert (request.row, request.held_len, engine.allocator.available()) == (0, 0, 12)
    engine.check()


@by_shape
def test_SEQ_03_every_row_of_a_batch_goes_on_from_its_own_length(spec: SpecConfig, monkeypatch: Patch) -> None:
    """Lengths 10 and 7, accepted drafts 3 and 0: the next roots are at 14 and 8."""
    said = peaked_logits(VOCAB)
    wrong = ScriptedModel(lambda ids: said(ids) if ids[0] == 1 else [-x for x in said(ids)], VOCAB)
    target, prompts = ScriptedModel(said, VOCAB), [[1] * 10, [2] * 7]
    roots: list[list[int]] = []
    run = ModelRunner.forward

    def forward(self: ModelRunner, batch: ForwardBatch, phase: str, *others: Any) -> Any:
        if phase == "target":
            roots.append(batch.positions[:: spec.num_draft_tokens].tolist())
        return run(self, batch, phase, *others)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    engine = Engine(target, wrong, spec)
    requests = [engine.add_request(prompt, SamplingParams(20)) for prompt in prompts]
    for _ in range(3):
        engine.step()
    assert roots == [[10, 7], [14, 8]]
    assert [request.accept_lens for request in requests] == [[4], [1]]
    step_until(engine, lambda: all(request.finish_reason for request in requests))
    alone = [Engine(target).generate([prompt], SamplingParams(20))[0].token_ids for prompt in prompts]
    assert [request.output_ids for request in requests] == alone


@by_shape
def test_SEQ_08_zero_rows_through_every_phase(spec: SpecConfig) -> None:
    engine = engine_of(spec)
    worker, table = v2_worker(engine), engine.table.req_to_token
    before = [runner.pool.buffer.clone() for runner in worker.runners]
    batch, in_flight = worker.launch(replace(RunningBatch.of([], table), draft_input=worker.empty_draft_input()))
    worker.collect(in_flight)
    idle = worker.forward(RunningBatch.of([], table), ForwardMode.IDLE)
    for left in (batch, idle):
        assert left.seq_lens.shape == left.bonus_tokens.shape == (0,)
        assert left.draft_input
        assert left.draft_input.topk_index.shape == left.draft_input.topk_p.shape == (0, spec.topk)
        assert left.draft_input.hidden_states.shape == (0, DRAFT.config.hidden_size)
    out = in_flight.verified
    assert (out.predict.shape, out.accept_index.shape) == ((0,), (0, spec.num_steps + 1))
    assert (out.hidden_states.shape, out.logits.shape) == ((0, TARGET.config.hidden_size), (0, VOCAB))
    assert all(torch.equal(runner.pool.buffer, pool) for runner, pool in zip(worker.runners, before, strict=True))
    assert (engine.stats.forwards, engine.stats.rounds) == ({}, 0)
    engine.scheduler.running = idle
    assert_same_output(
        engine_of(None).generate(PROMPTS, SamplingParams(9)), engine.generate(PROMPTS, SamplingParams(9))
    )
