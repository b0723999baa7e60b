"""What must hold for every algorithm: the output is plain decoding's, and a draft that knows the target is right.

EAGLE has files of its own for all of this, and eagle3 and mtp are its worker with other models. Here the other workers
go through one grid, each with drafts of its own kind that are built from the same functions of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    agreeing_now_and_then,
    assert_same_output,
    generate_watched,
    peaked_logits,
    ragged_prompts,
    random_logits,
)
from family import SCRIPTED, engine_of, of, says
from markov import DRAFT, PLAIN_T1, PLAUSIBLE, SEEDS, TARGET, markov, plausibility, sampled
from pairwise import pairwise
from serving import VOCAB, assert_as_foretold, name_of, prepared, retractor, serve, settings_of, spec_of, visits_of

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardMode
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import RunningBatch
from refspec.runtime.runner import ModelRunner
from refspec.workers.registry import find_algorithm

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


@by_row
@each
def test_output_and_accept_lengths_are_those_of_the_request_alone(algorithm: str, row: dict[str, Any]) -> None:
    """Whatever chunks, cached prefixes, retraction and company do; with a draft that is right now and then."""
    said = says(algorithm, random_logits(VOCAB))
    guessed = agreeing_now_and_then(said, says(algorithm, random_logits(VOCAB, salt=5)))
    row = {**row, "algorithm": algorithm}
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
    row = {**row, "algorithm": algorithm}
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


@each
def test_SEQ_08_a_rank_without_requests_comes_to_every_forward(algorithm: str) -> None:
    """By phase and in their order, as a rank with requests does, also in a round in which all of its requests end."""
    said = says(algorithm, peaked_logits(VOCAB))
    engine = engine_of(algorithm, said, said, SpecConfig(topk=2, num_steps=3, num_draft_tokens=6))
    worker, met = engine.scheduler.worker, list[str]()

    def head_of(runner: ModelRunner) -> Callable[[torch.Tensor, str], torch.Tensor]:
        return lambda hidden, phase: (met.append(phase), runner.model.logits(hidden))[1]

    for runner in worker.runners:
        runner.shared_head = head_of(runner)

    def taken(step: Callable[[], Any]) -> list[str]:
        met.clear()
        step()
        return list(met)

    nobody = RunningBatch.of([], engine.table.req_to_token)
    request = engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=7))
    assert taken(engine.step) == taken(lambda: worker.forward(nobody, ForwardMode.EXTEND))
    rounds = [taken(engine.step) for _ in range(2)]
    assert request.finish_reason == "length"
    assert rounds == [taken(lambda: worker.forward(nobody, ForwardMode.IDLE))] * 2


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


@pytest.mark.parametrize("algorithm", ["eagle3", "mtp", "multi-layer", "frozen-kv", "standalone"])
def test_shipped_drafts_say_what_the_target_does_and_are_often_right(algorithm: str) -> None:
    """In float64, to the last token; two prompts in a batch, chunks, and a prefix from the cache."""
    prompts, params = ["def fib(n):", "import os\nimport sys\n"], SamplingParams(max_new_tokens=24)
    engine = Engine("tiny", spec=find_algorithm(algorithm).spec(), dtype="float64", prefix_cache=True, chunk_size=5)
    plain = Engine("tiny", dtype="float64").generate(prompts, params)
    assert_same_output(plain, engine.generate(prompts, params))
    assert_same_output(plain, engine.generate(prompts, params))
    assert engine.stats.cached_tokens > 0
    assert engine.stats.accept_length > 1.5
