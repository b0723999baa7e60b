"""What must hold for every algorithm: the output is plain decoding's, and a draft that knows the target is right.

EAGLE has files of its own for all of this. Here the others go through one grid, each with drafts of its own kind that
are built from the same functions of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    NextLogits,
    agreeing_now_and_then,
    assert_same_output,
    generate_watched,
    hash_of,
    llama_config,
    peaked_logits,
    ragged_prompts,
    random_assistant,
    random_llama,
    random_logits,
    random_mtp,
    transparent_pair,
)
from kv_contents import cached, prefilled
from markov import DRAFT, PLAIN_T1, PLAUSIBLE, SEEDS, TARGET, markov, plausibility, sampled
from pairwise import pairwise
from scripted_assistant import ScriptedAssistant
from serving import (
    VOCAB,
    assert_as_foretold,
    name_of,
    prepared,
    retractor,
    serve,
    settings_of,
    spec_of,
    step_until,
    visits_of,
)

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardBatch, ForwardMode
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import RunningBatch
from refspec.runtime.runner import ModelRunner
from refspec.trace import Round
from refspec.workers.frozen_kv import FrozenKVWorker

DraftOf = Callable[[NextLogits, int], Any]

# By algorithm: a draft that holds likely, after any text, what a function of the text says; and the vocabulary's size.
SCRIPTED: dict[str, DraftOf] = {
    "frozen-kv": ScriptedAssistant,
    "multi-layer": lambda guessed, vocab_size: [ScriptedModel(guessed, vocab_size) for _ in range(4)],
    "standalone": ScriptedModel,
}
CHAINS_ONLY = {"multi-layer"}  # k = 1 and N = S + 1
SEES_THE_END = {"multi-layer"}  # but not the whole text: layer i is not shown the first i tokens
# Draft forwards of a round with S levels: in the loop, and over what the last one brought.
FORWARDS: dict[str, Callable[[int], tuple[int, int]]] = {
    "frozen-kv": lambda steps: (steps, 0),
    "multi-layer": lambda steps: (0, steps),
    "standalone": lambda steps: (steps - 1, 1),
}
FACTORS: dict[str, list[Any]] = {
    "k": [1, 3],
    "S": [1, 2, 4],
    "exact": [False, True],
    "page": [1, 4],
    "chunk": [1, 3, None],
    "cache": [False, True],
    "retraction": ["newest", "everybody"],
    "retracted": ["when slots run out", "anyhow"],
    "pool": ["tight", "roomy"],
    "requests": [3, 5],
    "arrivals": ["together", "apart"],
    "prompts": ["alike", "unlike"],
    "ends": ["budget", "stop", "abort"],
}
each = pytest.mark.parametrize("algorithm", SCRIPTED)
by_row = pytest.mark.parametrize("row", pairwise(FACTORS), ids=name_of)


def of(algorithm: str, spec: SpecConfig) -> SpecConfig:
    """The nearest config that the algorithm takes."""
    if algorithm in CHAINS_ONLY:
        spec = replace(spec, topk=1, num_draft_tokens=spec.num_steps + 1)
    return replace(spec, algorithm=algorithm)


def says(algorithm: str, next_logits: NextLogits) -> NextLogits:
    """A function of what the algorithm's draft can see."""
    return (lambda context: next_logits(context[-2:])) if algorithm in SEES_THE_END else next_logits


def engine_of(algorithm: str, said: NextLogits, guessed: NextLogits, spec: SpecConfig, **settings: Any) -> Engine:
    return Engine(ScriptedModel(said, VOCAB), SCRIPTED[algorithm](guessed, VOCAB), of(algorithm, spec), **settings)


@by_row
@each
def test_output_and_accept_lengths_are_those_of_the_request_alone(algorithm: str, row: dict[str, Any]) -> None:
    """Whatever chunks, cached prefixes, retraction and company do; with a draft that is right now and then."""
    said = says(algorithm, random_logits(VOCAB))
    guessed = agreeing_now_and_then(said, says(algorithm, random_logits(VOCAB, salt=5)))
    spec, visits = of(algorithm, spec_of(row)), visits_of(row)
    engine = prepared(engine_of(algorithm, said, guessed, spec, **settings_of(row, spec, visits)), row)
    requests, watcher = serve(engine, visits, retractor(engine, row))
    assert_as_foretold(said, visits, requests)
    assert watcher.rounds

    alone = prepared(engine_of(algorithm, said, guessed, replace(spec, page_size=1)), row)
    for visit, request in zip(visits, requests, strict=True):
        (generation,) = alone.generate([visit.prompt], visit.params)
        assert request.accept_lens == generation.accept_lens[: len(request.accept_lens)]


@by_row
@each
def test_a_draft_that_knows_the_target_is_always_right(algorithm: str, row: dict[str, Any]) -> None:
    said, spec, visits = says(algorithm, peaked_logits(VOCAB)), of(algorithm, spec_of(row, exact=True)), visits_of(row)
    engine = prepared(engine_of(algorithm, said, said, spec, **settings_of(row, spec, visits)), row)
    requests, watcher = serve(engine, visits, retractor(engine, row))
    assert_as_foretold(said, visits, requests)
    assert [r.accepted_rows for r in watcher.requests if len(r.accepted_rows) != spec.num_steps + 1] == []
    for request in requests:
        assert set(request.accept_lens[:-1]) <= {spec.num_steps + 1}  # its end may cut the last block


@pytest.mark.parametrize("steps", [1, 3])
@each
def test_forwards_of_a_round(algorithm: str, steps: int) -> None:
    said = says(algorithm, random_logits(VOCAB))
    spec = SpecConfig(topk=1, num_steps=steps, num_draft_tokens=steps + 1)
    _, watcher = generate_watched(
        engine_of(algorithm, said, said, spec), [[1, 2, 3]], SamplingParams(max_new_tokens=20)
    )
    loop, extend = FORWARDS[algorithm](steps)
    for round_ in watcher.rounds[1:-1]:  # the first one and the last one may lack something
        assert round_.forwards == {n: c for n, c in (("target", 1), ("draft", loop), ("extend", extend)) if c}


@pytest.mark.parametrize("graphs", [False, True])
@each
def test_all_finish_inside_one_verify_and_others_come(algorithm: str, graphs: bool) -> None:
    """What is left is fit for a rank without requests, and for the next ones."""
    said = says(algorithm, peaked_logits(VOCAB))
    spec = of(algorithm, SpecConfig(topk=2, num_steps=3, num_draft_tokens=8, exact_branch_kv=True))
    engine = engine_of(algorithm, said, said, spec, graphs=graphs)
    prompts, params = ragged_prompts(3, 9, VOCAB), SamplingParams(max_new_tokens=7)  # 1 + 4, and 2 of 4
    generations, watcher = generate_watched(engine, prompts, params)
    assert [[r.finish_reason for r in round_.requests] for round_ in watcher.rounds] == [[None] * 3, ["length"] * 3]
    assert [g.accept_lens for g in generations] == [[4, 2]] * 3
    worker, forwards = engine.scheduler.worker, engine.stats.forwards.copy()
    idle = worker.forward(RunningBatch.of([], engine.table.req_to_token), ForwardMode.IDLE)
    assert len(idle) == 0
    assert engine.stats.forwards == forwards
    engine.check()
    engine.scheduler.running = idle
    again, _ = generate_watched(engine, prompts, params)
    assert [(g.token_ids, g.accept_lens) for g in again] == [(g.token_ids, g.accept_lens) for g in generations]
    assert bool(engine.stats.graph_replays) == graphs


@pytest.mark.parametrize("sampler", ["target_only", "block"])
@each
def test_sampled_output_has_the_law_of_the_target(algorithm: str, sampler: str) -> None:
    spec = of(algorithm, SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, sampler=sampler))
    target, draft = ScriptedModel(markov(TARGET), 4), SCRIPTED[algorithm](markov(DRAFT), 4)
    engine = Engine(target, draft, spec, max_running=SEEDS // 3, kv_slots=6 * SEEDS)
    assert plausibility(sampled(engine, PLAIN_T1, SEEDS // 3), PLAIN_T1) > PLAUSIBLE
    assert 1.05 < engine.stats.accept_length < 3  # drafts were accepted, and others were not


@pytest.mark.parametrize("sampler", ["rejection", "block"])
@each
def test_VER_22_drawn_drafts_of_the_targets_own_law_are_never_rejected(algorithm: str, sampler: str) -> None:
    said = says(algorithm, random_logits(VOCAB))
    spec = of(algorithm, SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, sampler=sampler))
    engine = engine_of(algorithm, said, said, spec, max_running=3)
    params = [SamplingParams(max_new_tokens=n, temperature=1.0, seed=n) for n in (21, 6, 30, 15)]
    _, watcher = generate_watched(engine, ragged_prompts(4, 9, VOCAB), params)
    assert [r.accepted_rows for r in watcher.requests if len(r.accepted_rows) != 4] == []


# --- standalone ---------------------------------------------------------------------------------------------------

CELLS = [
    SpecConfig("standalone", k, steps, n, page_size=page, exact_branch_kv=True)
    for k, steps, n in [(1, 1, 2), (1, 4, 5), (2, 3, 8), (4, 2, 9), (3, 5, 30)]
    for page in (1, 2, 4)
]


@pytest.mark.parametrize("spec", CELLS, ids=lambda s: f"k={s.topk} S={s.num_steps} page={s.page_size}")
def test_a_standalone_draft_that_is_the_target(spec: SpecConfig) -> None:
    """In float64, over real attention: chunks, a shared prefix and a retraction, and no guess is ever wrong."""
    model, _ = transparent_pair(vocab_size=VOCAB)  # its choices are sure ones
    prompts = [[0, 5, 11, 3, 2, 9, 8], [0, 5, 11, 3, 2, *range(1, 14)], [0, 7, 11]]
    params = SamplingParams(max_new_tokens=18)
    engine = Engine(model, model, spec, prefix_cache=True, chunk_size=6)
    first, *others = [engine.add_request(prompt, params) for prompt in prompts]
    rounds: list[Round] = []
    for step in range(60):
        engine.step(rounds.append)
        engine.check()
        if step == 3:
            assert first in engine.scheduler.running.requests
            engine.scheduler.retract(first)
    assert engine.stats.cached_tokens > 0
    seen = [r for round_ in rounds for r in round_.requests]
    assert {len(r.accepted_rows) for r in seen} == {spec.num_steps + 1}
    plain = Engine(model).generate(prompts, params)
    assert [request.output_ids for request in (first, *others)] == [g.token_ids for g in plain]


@pytest.mark.parametrize("spec", CELLS[3::4], ids=lambda s: f"k={s.topk} S={s.num_steps} page={s.page_size}")
def test_what_a_standalone_draft_has_in_its_cache(spec: SpecConfig) -> None:
    """Token p in token p's slot, at position p; all but the newest block of each request."""
    said = random_logits(VOCAB)
    engine = engine_of("standalone", said, agreeing_now_and_then(said, random_logits(VOCAB, salt=5)), spec)
    draft = engine.scheduler.worker.runners[1]

    def observer(round_: Round) -> None:
        for request in engine.scheduler.running.requests:
            assert request.written_len == request.kv_len - request.accept_lens[-1]
            rows = cached(draft, engine, request)[0, : request.written_len, 0, 0].tolist()
            assert rows == [[-1, request.all_ids[p], p] for p in range(request.written_len)]

    engine.generate(ragged_prompts(3, 9, VOCAB), SamplingParams(max_new_tokens=20), observer)


def test_SEQ_05_a_standalone_draft_of_other_sizes_and_another_dtype() -> None:
    """Target hidden 8 in bf16, draft hidden 4 in fp32; a fresh request joins one that decodes."""
    target = random_llama(llama_config(hidden_size=8), dtype=torch.bfloat16)
    draft = random_llama(llama_config(hidden_size=4, num_attention_heads=1, num_key_value_heads=1), 1, torch.float32)
    spec = SpecConfig("standalone", topk=2, num_steps=3, num_draft_tokens=6, exact_branch_kv=True)
    engine = Engine(target, draft, spec)
    first = engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=30))
    engine.step()
    engine.step()
    second = engine.add_request([4, 5, 6, 7], SamplingParams(max_new_tokens=30))
    engine.step()
    assert engine.scheduler.running.requests == [first, second]
    assert engine.scheduler.running.draft_input is None  # nothing of the target's goes to the draft
    engine.step()
    target_runner, runner = engine.scheduler.worker.runners
    assert (target_runner.pool.buffer.dtype, runner.pool.buffer.dtype) == (torch.bfloat16, torch.float32)
    for request in (first, second):
        expected, hidden = prefilled(runner, request.all_ids[: request.written_len])
        assert (hidden.shape[1], hidden.dtype) == (4, torch.float32)
        torch.testing.assert_close(cached(runner, engine, request)[:, : request.written_len], expected)


def test_what_standalone_refuses() -> None:
    target, head = transparent_pair()
    spec = SpecConfig("standalone", topk=1, num_steps=2, num_draft_tokens=3)
    with pytest.raises(ValueError, match="algorithm standalone takes a whole language model"):
        Engine(target, head, spec)
    with pytest.raises(ValueError, match="the draft's vocab_size is 7, the target's 23: they must be equal"):
        Engine(target, random_llama(llama_config(vocab_size=7)), spec)
    with pytest.raises(ValueError, match="algorithm standalone needs a draft model"):
        Engine(target, None, spec)


def test_standalone_on_the_shipped_weights() -> None:
    prompts, params = ["def fib(n):", "import os\n"], SamplingParams(max_new_tokens=24)
    spec = SpecConfig("standalone", topk=2, num_steps=3, num_draft_tokens=8)
    engine = Engine("tiny", spec=spec, dtype="float64")
    assert_same_output(Engine("tiny", dtype="float64").generate(prompts, params), engine.generate(prompts, params))
    assert engine.stats.accept_length > 1.3


# --- multi-layer --------------------------------------------------------------------------------------------------


def chain_of(steps: int, page_size: int = 1) -> SpecConfig:
    return SpecConfig("multi-layer", 1, steps, steps + 1, page_size=page_size)


@pytest.mark.parametrize(("steps", "page", "chunk"), [(1, 1, None), (2, 4, 3), (4, 1, 2), (4, 4, None), (3, 1, 1)])
@pytest.mark.parametrize("models", ["scripted", "float64"])
def test_every_layers_rows_are_those_of_the_known_text(models: str, steps: int, page: int, chunk: int | None) -> None:
    """Layer i's rows of a text of n cached tokens are right up to row n - i, whatever was guessed on the way.

    After chunks, rounds that reject, a prefix from the cache that others read too, and a retraction.
    """
    if models == "scripted":
        said = says("multi-layer", random_logits(VOCAB))
        guessed = agreeing_now_and_then(said, says("multi-layer", random_logits(VOCAB, salt=5)), one_in=2)
        target, layers = ScriptedModel(said, VOCAB), SCRIPTED["multi-layer"](guessed, VOCAB)
    else:
        target = random_llama(llama_config(vocab_size=VOCAB))
        layers = random_mtp(target, count=4)
    engine = Engine(target, layers, chain_of(steps, page), prefix_cache=True, chunk_size=chunk)
    target_runner, *runners = engine.scheduler.worker.runners
    assert len(runners) == steps
    seen: set[tuple[int, int]] = set()  # retractions, nodes of the accepted path

    def observer(round_: Round) -> None:
        engine.check()
        for request in engine.scheduler.running.requests:
            if request.finish_reason:
                continue
            text, n = request.all_ids, request.kv_len
            assert len(text) == n + 1
            hidden = prefilled(target_runner, text[:n])[1]
            for i, runner in enumerate(runners[:n]):
                expected, hidden = prefilled(runner, text[i + 1 :], hidden[: n - i])
                torch.testing.assert_close(cached(runner, engine, request)[:, : n - i], expected, rtol=1e-9, atol=1e-9)
            seen.add((request.retractions, len(round_.requests[0].accepted_rows)))

    shared = [hash_of([p]) % VOCAB for p in range(12)]
    prompts = [[*shared, 1, 2, 3], [*shared, 4, 5], [*shared[:7], 6, 6, 6], [7, 8]]
    requests = [engine.add_request(prompt, SamplingParams(max_new_tokens=25)) for prompt in prompts[:2]]
    step_until(engine, lambda: len(requests[0].output_ids) > 8)
    requests += [engine.add_request(prompt, SamplingParams(max_new_tokens=25)) for prompt in prompts[2:]]
    engine.scheduler.retract(requests[0])
    for _ in range(80):
        engine.step(observer)
    assert all(request.finish_reason == "length" for request in requests)
    plain = Engine(target).generate(prompts, SamplingParams(max_new_tokens=25))
    assert [request.output_ids for request in requests] == [g.token_ids for g in plain]
    assert engine.stats.cached_tokens > 7
    assert {retractions for retractions, _ in seen} == {0, 1}
    assert len({accepted for _, accepted in seen}) > 1 or models == "float64"


@pytest.mark.parametrize("level", [0, 1, 2])
def test_TREE_13_one_wrong_guess_costs_one_round(level: int) -> None:
    """Rows that were fed the wrong guess, and those that were fed what came of it, are written anew."""
    right = says("multi-layer", peaked_logits(VOCAB))
    text = [3, 1, 4]
    while len(text) < 40:
        text.append(max(range(VOCAB), key=right(text).__getitem__))
    errs_after = text[3 + level - 1 : 3 + level + 1]  # of the first round's guess at this level

    class ErrsOnce(ScriptedModel):
        def __init__(self) -> None:
            super().__init__(self.says, VOCAB)
            self.has_erred = False

        def says(self, context: list[int]) -> list[float]:
            logits = list(right(context))
            if context[-2:] == errs_after and not self.has_erred:
                self.has_erred = True
                logits[logits.index(max(logits))] = -1.0
            return logits

    layers = [ErrsOnce() if i == level else ScriptedModel(right, VOCAB) for i in range(3)]
    engine = Engine(ScriptedModel(right, VOCAB), layers, chain_of(3))
    (generation,), _ = generate_watched(engine, [text[:3]], SamplingParams(max_new_tokens=30))
    assert generation.token_ids == text[3:33]
    first, *others, _cut = generation.accept_lens
    assert (first, set(others)) == (level + 1, {4})


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_MEM_14_a_cached_prefix_is_one_whose_rows_agree_in_every_layer(steps: int) -> None:
    """Of 10 shared tokens the last S have rows, in some layer, that were fed what only the first request says."""
    said = says("multi-layer", random_logits(VOCAB))
    guessed = agreeing_now_and_then(said, says("multi-layer", random_logits(VOCAB, salt=5)))
    shared = list(range(10))
    prompts, params = [[*shared, 11, 12, 13, 14], [*shared, 15, 16, 17]], SamplingParams(max_new_tokens=20)
    cold = [engine_of("multi-layer", said, guessed, chain_of(steps)).generate([p], params)[0] for p in prompts]
    engine = engine_of("multi-layer", said, guessed, chain_of(steps), prefix_cache=True)
    warm = [engine.generate([prompt], params)[0] for prompt in prompts]
    assert warm == cold
    assert engine.stats.cached_tokens == 10 - steps
    once_more = [engine.generate([prompt], params)[0] for prompt in prompts]
    assert once_more == cold
    assert engine.stats.cached_tokens == 10 - steps + sum(len(prompt) - steps for prompt in prompts)


@pytest.mark.parametrize("steps", [2, 4])
def test_what_a_finished_request_leaves_in_the_cache(steps: int) -> None:
    """Its newest rows were fed guesses that nobody has corrected: who goes on with its text does not find them."""
    said = says("multi-layer", random_logits(VOCAB))
    guessed = agreeing_now_and_then(said, says("multi-layer", random_logits(VOCAB, salt=5)), one_in=2)
    engine = engine_of("multi-layer", said, guessed, chain_of(steps), prefix_cache=True)
    for length in range(2, 16):
        prompt = [hash_of([p, length]) % VOCAB for p in range(3)]
        (first,) = engine.generate([prompt], SamplingParams(max_new_tokens=length))
        longer, params = [*prompt, *first.token_ids, 3, 1], SamplingParams(max_new_tokens=10)
        cold = engine_of("multi-layer", said, guessed, chain_of(steps)).generate([longer], params)
        assert engine.generate([longer], params) == cold
    assert engine.stats.cached_tokens > 50


def test_what_multi_layer_refuses() -> None:
    target = random_llama()
    layers = random_mtp(target)
    for spec, complaint in (
        (replace(chain_of(2), topk=2), "topk is 2, but with algorithm multi-layer it must be 1"),
        (
            replace(chain_of(3), num_draft_tokens=3),
            "num_draft_tokens is 3, but with algorithm multi-layer it must be 4",
        ),
        (chain_of(4), "num_steps is 4, but the draft has 3 layers"),
    ):
        with pytest.raises(ValueError, match=complaint):
            Engine(target, layers, spec)
    with pytest.raises(ValueError, match="num_steps is 2, but the draft has 1 layers"):
        Engine(target, layers[0], chain_of(2))
    with pytest.raises(ValueError, match="the draft is no MTP layer: algorithm multi-layer takes one, or several"):
        Engine(target, target, chain_of(1))
    with pytest.raises(ValueError, match="this draft was made for another target"):
        Engine(random_llama(seed=3), layers, chain_of(1))
    with pytest.raises(ValueError, match="the draft has several layers: algorithm eagle takes a single model"):
        Engine(target, layers, SpecConfig())
    with pytest.raises(ValueError, match="draft is 5, it must be"):
        Engine(target, [5], chain_of(1))


# --- frozen-kv ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "steps", "n"), [(1, 1, 2), (1, 4, 5), (3, 3, 9)])
def test_SEQ_14_the_first_root_is_the_token_of_the_prefill(k: int, steps: int, n: int) -> None:
    """Cold start, one request, three tokens in all; and the first guess stands on the target's hidden state."""
    said = peaked_logits(VOCAB)
    engine = engine_of("frozen-kv", said, said, SpecConfig(topk=k, num_steps=steps, num_draft_tokens=n))
    (generation,), watcher = generate_watched(engine, [[4, 2]], SamplingParams(max_new_tokens=3))
    text = [4, 2]
    while len(text) < 5:
        text.append(max(range(VOCAB), key=said(text).__getitem__))
    assert generation.token_ids == text[2:]
    first = watcher.rounds[0].requests[0]
    assert (first.bonus_token, first.seq_len) == (text[2], 2)
    assert len(first.accepted_rows) == steps + 1


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("graphs", [False, True])
def test_SEQ_15_drafting_writes_nothing_and_stays_where_it_is(
    k: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Length 9, five steps: all at position 8 over nine tokens, both pools and the free slots as before."""
    target = random_llama()
    spec = SpecConfig("frozen-kv", k, num_steps=5, num_draft_tokens=6)
    engine = Engine(target, random_assistant(target), spec, graphs=graphs)
    request = engine.add_request(list(range(9)), SamplingParams(max_new_tokens=20))
    engine.step()
    assert request.kv_len == 9
    worker = engine.scheduler.worker
    assert isinstance(worker, FrozenKVWorker)
    assert worker.draft_runner.pool is worker.target.pool
    steps: list[ForwardBatch] = []
    original = ModelRunner.forward

    def forward(runner: ModelRunner, batch: ForwardBatch, phase: str, *others: Any) -> Any:
        steps.append(batch)
        return original(runner, batch, phase, *others)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    before, free = worker.target.pool.buffer.clone(), engine.allocator.free_slots.clone()
    candidates = worker.draft(engine.scheduler.running)
    assert torch.equal(worker.target.pool.buffer, before)
    assert torch.equal(engine.allocator.free_slots, free)
    assert [batch.positions.tolist() for batch in steps] == [[8], *[[8] * k] * 4]
    assert [(batch.prefix_lens, batch.tail_slots.numel()) for batch in steps] == [([9], 0)] * 5
    assert steps[0].input_ids.tolist() == request.output_ids
    assert len(candidates.token_list) == 5


@pytest.mark.parametrize(("k", "page"), [(1, 1), (2, 4), (4, 1)])
def test_an_assistant_over_real_attention(k: int, page: int) -> None:
    """float64, weights at random: the output is plain greedy's. Accept lengths do not depend on chunks and prefixes."""
    target = random_llama(llama_config(vocab_size=5))
    assistant = random_assistant(target)
    spec = SpecConfig("frozen-kv", k, num_steps=3, num_draft_tokens=4 if k == 1 else 8, page_size=page)
    prompts = [[1, 2, 3, 4, 0, 1, 2], [1, 2, 3, 4, 0, 1, 3, 3], [4], [1, 2, 3, 4]]
    params = SamplingParams(max_new_tokens=20)
    alone = [Engine(target, assistant, spec).generate([prompt], params)[0] for prompt in prompts]
    assert_same_output(Engine(target).generate(prompts, params), alone)
    assert max(max(generation.accept_lens) for generation in alone) > 1
    engine = Engine(target, assistant, spec, prefix_cache=True, chunk_size=3)
    assert engine.generate(prompts, params) == alone
    assert engine.generate(prompts, params) == alone
    assert engine.stats.cached_tokens > 0


def test_what_frozen_kv_refuses() -> None:
    target, head = transparent_pair()
    spec = SpecConfig("frozen-kv", topk=1, num_steps=2, num_draft_tokens=3)
    with pytest.raises(ValueError, match="the draft is no frozen-KV assistant: algorithm frozen-kv takes one"):
        Engine(target, head, spec)
    other = random_llama(seed=7)
    with pytest.raises(ValueError, match="this draft was made for another target"):
        Engine(random_llama(), random_assistant(other), spec)
