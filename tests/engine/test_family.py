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
    llama_config,
    peaked_logits,
    ragged_prompts,
    random_llama,
    random_logits,
    transparent_pair,
)
from kv_contents import cached, prefilled
from markov import DRAFT, PLAIN_T1, PLAUSIBLE, SEEDS, TARGET, markov, plausibility, sampled
from pairwise import pairwise
from serving import (
    VOCAB,
    assert_as_foretold,
    name_of,
    prepared,
    retractor,
    serve,
    settings_of,
    spec_of,
    visits_of,
)

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardMode
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import RunningBatch
from refspec.trace import Round

DraftOf = Callable[[NextLogits, int], Any]

# By algorithm: a draft that holds likely, after any text, what a function of the text says; and the vocabulary's size.
SCRIPTED: dict[str, DraftOf] = {
    "standalone": ScriptedModel,
}
CHAINS_ONLY: set[str] = set()  # k = 1 and N = S + 1
# Draft forwards of a round with S levels: in the loop, and over what the last one brought.
FORWARDS: dict[str, Callable[[int], tuple[int, int]]] = {
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


def engine_of(algorithm: str, said: NextLogits, guessed: NextLogits, spec: SpecConfig, **settings: Any) -> Engine:
    return Engine(ScriptedModel(said, VOCAB), SCRIPTED[algorithm](guessed, VOCAB), of(algorithm, spec), **settings)


@by_row
@each
def test_output_and_accept_lengths_are_those_of_the_request_alone(algorithm: str, row: dict[str, Any]) -> None:
    """Whatever chunks, cached prefixes, retraction and company do; with a draft that is right now and then."""
    said = random_logits(VOCAB)
    guessed = agreeing_now_and_then(said, random_logits(VOCAB, salt=5))
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
    said, spec, visits = peaked_logits(VOCAB), of(algorithm, spec_of(row, exact=True)), visits_of(row)
    engine = prepared(engine_of(algorithm, said, said, spec, **settings_of(row, spec, visits)), row)
    requests, watcher = serve(engine, visits, retractor(engine, row))
    assert_as_foretold(said, visits, requests)
    assert [r.accepted_rows for r in watcher.requests if len(r.accepted_rows) != spec.num_steps + 1] == []
    for request in requests:
        assert set(request.accept_lens[:-1]) <= {spec.num_steps + 1}  # its end may cut the last block


@pytest.mark.parametrize("steps", [1, 3])
@each
def test_forwards_of_a_round(algorithm: str, steps: int) -> None:
    said = random_logits(VOCAB)
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
    said = peaked_logits(VOCAB)
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
    said = random_logits(VOCAB)
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
