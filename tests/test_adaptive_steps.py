"""Steps that follow what was accepted: the rule by itself, then in the engine."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    NextLogits,
    agreeing_now_and_then,
    assert_same_output,
    generate_watched,
    ragged_prompts,
    random_logits,
)
from pairwise import pairwise

from refspec import Engine, SamplingParams, SpecConfig
from refspec.engine.dp import Peers, in_step
from refspec.models.scripted import ScriptedModel
from refspec.spec import adaptive_steps
from refspec.spec.adaptive_steps import INTERVAL, WARM_UP, AdaptiveSteps
from refspec.workers.registry import BUILT_IN


def rule_of(*choices: int) -> AdaptiveSteps:
    most = choices[-1]
    return AdaptiveSteps(SpecConfig(topk=1, num_steps=most, num_draft_tokens=most + 1, adaptive_steps=choices))


def after(rule: AdaptiveSteps, probability: float, rounds: int, seed: int = 0) -> list[int]:
    """The steps of so many rounds in which each draft is accepted with that probability, if those before it were."""
    rng, taken = random.Random(seed), []
    for _ in range(rounds):
        taken.append(steps := rule.config.num_steps)
        accepted = 0
        while accepted < steps and rng.random() < probability:
            accepted += 1
        rule.next_config([accepted])
    return taken


def test_falls_on_hard_text_and_rises_on_easy_one() -> None:
    rule = rule_of(1, 3, 5)
    hard = after(rule, 0.02, 60)
    assert (hard[0], hard[-1]) == (5, 1)
    easy = after(rule, 0.98, 60)
    assert (easy[0], easy[-1]) == (1, 5)
    assert {3} <= set(easy)  # one length after the other: what a longer chain accepts is not known before it is tried
    assert after(rule, 0.02, 60)[-1] == 1


def test_nothing_changes_while_it_warms_up_or_between_two_looks() -> None:
    rule = rule_of(1, 3, 5)
    taken = [rule.next_config([0]).num_steps for _ in range(WARM_UP + 3 * INTERVAL)]
    changes = [i + 1 for i in range(1, len(taken)) if taken[i] != taken[i - 1]]
    assert changes == [WARM_UP + INTERVAL]


FALLS = [(5, 2.25, 3), (5, 2.26, 5), (5, 0.25, 1), (3, 0.25, 1), (3, 0.26, 3), (1, 0.0, 1)]
RISES = [(1, 0.5, 1), (1, 0.51, 3), (3, 2.5, 3), (3, 2.51, 5), (5, 5.0, 5)]


@pytest.mark.parametrize(("steps", "average", "next_steps"), [*FALLS, *RISES])
def test_where_it_falls_and_rises(steps: int, average: float, next_steps: int) -> None:
    rule = rule_of(1, 3, 5)
    rule._set_steps(steps)
    rule.average, rule.rounds = average, WARM_UP + INTERVAL - 1
    config = rule.next_config([average])  # type: ignore[list-item]
    assert (config.topk, config.num_steps, config.num_draft_tokens) == (1, next_steps, next_steps + 1)


def test_a_length_is_not_taken_back_for_the_average_that_chose_it() -> None:
    """Where a chain has just become longer, the same average keeps it so; where shorter, likewise."""
    for average in (x / 100 for x in range(501)):
        for steps in (1, 3, 5):
            rule = rule_of(1, 3, 5)
            rule._set_steps(steps)
            rule.average = average
            rule._set_steps(chosen := rule._best_steps())
            if chosen < steps:
                assert rule._best_steps() <= chosen
            else:
                assert rule._best_steps() >= chosen


def test_rounds_of_which_nothing_is_known_do_not_count() -> None:
    rule = rule_of(1, 5)
    for _ in range(100):
        assert rule.next_config([]).num_steps == 5
    assert (rule.average, rule.rounds) == (4.0, 0)


def test_a_batch_counts_by_its_mean() -> None:
    alone, batch = rule_of(1, 3), rule_of(1, 3)
    for _ in range(20):
        assert alone.next_config([1]).num_steps == batch.next_config([0, 2, 1, 1]).num_steps
    assert alone.average == batch.average


# --- in the engine ------------------------------------------------------------------------------------------------

VOCAB = 11
TARGET, WRONG = random_logits(VOCAB), random_logits(VOCAB, salt=5)
FAIR = agreeing_now_and_then(TARGET, WRONG)
ADAPTIVE = SpecConfig(topk=1, num_steps=5, num_draft_tokens=6, adaptive_steps=(1, 3, 5))


def by_length(easy: NextLogits, hard: NextLogits, hard_from: int, hard_to: int) -> NextLogits:
    """A draft that is good but for a stretch of the text."""
    return lambda context: (hard if hard_from <= len(context) < hard_to else easy)(context)


def engine_of(spec: SpecConfig | None, draft: NextLogits = FAIR, **settings: Any) -> Engine:
    return Engine(ScriptedModel(TARGET, VOCAB), ScriptedModel(draft, VOCAB) if spec else None, spec, **settings)


def test_steps_follow_a_text_that_becomes_hard_and_easy_again() -> None:
    """Easy up to 40 tokens, hard up to 80, then easy: fewer drafts are wasted, and the output is the same."""
    params = SamplingParams(max_new_tokens=150)
    engines = [
        engine_of(spec, by_length(TARGET, WRONG, 40, 80))
        for spec in (ADAPTIVE, SpecConfig(topk=1, num_steps=5, num_draft_tokens=6))
    ]
    (adapted, watcher), (fixed, _) = (generate_watched(engine, [[1, 2]], params) for engine in engines)
    assert_same_output(engine_of(None).generate([[1, 2]], params), adapted)
    assert_same_output(fixed, adapted)
    steps = [len(request.positions) - 1 for request in watcher.requests]
    at = {request.seq_len: taken for request, taken in zip(watcher.requests, steps, strict=True)}
    assert {taken for length, taken in at.items() if length < 40} == {5}
    assert {taken for length, taken in at.items() if 65 <= length < 78} == {1}
    assert {taken for length, taken in at.items() if length >= 140} == {5}
    assert engines[0].stats.rounds_by_steps == Counter(steps)
    assert engines[0].stats.chain_rounds == len(steps)
    assert list(engines[1].stats.rounds_by_steps) == [5]
    assert json.loads(json.dumps(engines[0].stats.as_dict()))["rounds_by_steps"].keys() == {"1", "3", "5"}
    for round_, taken in zip(watcher.rounds, steps, strict=True):
        assert round_.forwards.get("draft", 0) == taken - 1
        assert len(round_.requests[0].candidates) == taken
    assert engines[0].stats.accept_rate > 1.2 * engines[1].stats.accept_rate


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps may change in every round."""
    monkeypatch.setattr(adaptive_steps, "WARM_UP", 0)
    monkeypatch.setattr(adaptive_steps, "INTERVAL", 1)
    monkeypatch.setattr(adaptive_steps, "WEIGHT", 0.5)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "draft": ["good", "bad", "fair"],
            "page_size": [1, 4],
            "kv_slots": [64, 512],
            "max_running": [1, 5],
            "graphs": [False, True],
            "prefix_cache": [False, True],
        }
    ),
    ids=str,
)
def test_output_is_that_of_plain_decoding(case: dict[str, Any]) -> None:
    draft = {"good": TARGET, "bad": WRONG, "fair": FAIR}[case.pop("draft")]
    page_size = case.pop("page_size")
    prompts = ragged_prompts(7, 9, VOCAB)
    params = [SamplingParams(max_new_tokens=n) for n in (25, 3, 30, 12, 1, 20, 16)]
    spec = SpecConfig(topk=1, num_steps=4, num_draft_tokens=5, page_size=page_size, adaptive_steps=(1, 2, 4))
    engine = engine_of(spec, draft, **case)
    generations = engine.generate(prompts, params, lambda round_: engine.check())
    engine.check()
    assert_same_output(engine_of(None).generate(prompts, params), generations)
    assert engine.stats.rounds_by_steps.total() == engine.stats.rounds
    if draft is not TARGET:
        assert len(engine.stats.rounds_by_steps) > 1
    if case["graphs"]:
        assert engine.stats.graph_fallbacks == {}
        assert engine.stats.graph_replays["target"] == engine.stats.rounds
        trees = {shape.rows for shape in engine.scheduler.worker.target.buffers}  # type: ignore[attr-defined]
        assert trees == {steps + 1 for steps in engine.stats.rounds_by_steps}  # a small tree has a small graph


def test_the_next_round_finds_slots_whatever_steps_it_takes() -> None:
    """The scheduler asks before a round is chosen, and for rounds that come later: it is told of the longest."""
    worker = engine_of(ADAPTIVE).scheduler.worker
    assert worker.slots_for_round([10, 20]) == 12
    worker.steps._set_steps(1)  # type: ignore[attr-defined]
    worker.config = worker.steps.config  # type: ignore[attr-defined]
    assert worker.slots_for_round([10, 20]) == 12


LAW = [[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.4, 0.35, 0.25]]
GUESS = [[0.2, 0.6, 0.2], [0.2, 0.3, 0.5], [0.6, 0.1, 0.3]]


def markov(law: list[list[float]]) -> ScriptedModel:
    return ScriptedModel(lambda context: [math.log(p) for p in law[context[-1]]], 3)


class Fickle(AdaptiveSteps):
    """Looks at the past, as it may, and makes another choice after nearly every round."""

    def next_config(self, accepted: Sequence[int]) -> SpecConfig:
        self.rounds += 1 + sum(accepted)
        self._set_steps(self.largest.step_choices[self.rounds % 3])
        return self.config


@pytest.mark.parametrize("sampler", ["target_only", "rejection", "block"])
def test_the_law_of_sampled_output_is_the_same_whatever_is_chosen(sampler: str) -> None:
    """600 outputs of three tokens of a Markov chain over three; a chi-square over the 27 texts."""
    count, spec = 600, SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, sampler=sampler, adaptive_steps=(1, 2, 3))
    engine = Engine(markov(LAW), markov(GUESS), spec, max_running=20)
    engine.scheduler.worker.steps = Fickle(spec)  # type: ignore[attr-defined]
    params = [SamplingParams(max_new_tokens=3, temperature=1.0, seed=seed) for seed in range(count)]
    found = Counter(tuple(g.token_ids) for g in engine.generate([[0, 2]] * count, params))
    assert min(engine.stats.rounds_by_steps[steps] for steps in (1, 2, 3)) > engine.stats.rounds / 5
    chi_square = 0.0
    for text in itertools.product(range(3), repeat=3):
        expected = count * math.prod(LAW[before][token] for before, token in itertools.pairwise((2, *text)))
        assert expected > 5
        chi_square += (found[text] - expected) ** 2 / expected
    assert torch.special.gammaincc(torch.tensor(26 / 2), torch.tensor(chi_square / 2)) > 1e-4


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"adaptive_steps": 3}, r"adaptive_steps must be a list of numbers, got 3"),
        ({"adaptive_steps": "135"}, r"adaptive_steps must be a list of numbers, got '135'"),
        ({"adaptive_steps": (0, 5)}, r"a number of adaptive_steps must be at least 1, got 0"),
        ({"adaptive_steps": (1, 2.5)}, r"a number of adaptive_steps must be a whole number, got 2\.5"),
        ({"adaptive_steps": (5,)}, r"adaptive_steps is \(5,\), it must be two or more numbers, ascending"),
        ({"adaptive_steps": (5, 3)}, r"adaptive_steps is \(5, 3\), it must be two or more numbers, ascending"),
        ({"adaptive_steps": (3, 3, 5)}, r"it must be two or more numbers, ascending"),
        ({"num_steps": 4, "num_draft_tokens": 5}, r"needs topk=1, num_steps=5 and num_draft_tokens=6, got topk=1, num"),
        ({"num_draft_tokens": 5}, r"num_draft_tokens=6, got topk=1, num_steps=5, num_draft_tokens=5"),
        ({"topk": 2}, r"needs topk=1, .* got topk=2"),
    ],
    ids=str,
)
def test_config_refuses(settings: dict[str, Any], complaint: str) -> None:
    good: dict[str, Any] = {"topk": 1, "num_steps": 5, "num_draft_tokens": 6, "adaptive_steps": [1, 3, 5]}
    assert SpecConfig(**good).adaptive_steps == (1, 3, 5)
    with pytest.raises(ValueError, match=complaint) as refusal:
        SpecConfig(**{**good, **settings})
    assert "\n" not in str(refusal.value)


def test_algorithm_must_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "eagle", replace(BUILT_IN["eagle"], adaptive=False))
    with pytest.raises(ValueError, match=r"adaptive_steps is \(1, 3, 5\), but algorithm eagle takes the same number"):
        engine_of(ADAPTIVE)


def test_ranks_in_step_must_take_as_many_steps() -> None:
    peers = Peers(0, 1, lambda tensor: [tensor], lambda tensor: [tensor])
    with (
        pytest.raises(ValueError, match=r"adaptive_steps go by .* leave them out"),
        in_step(engine_of(ADAPTIVE), peers),
    ):
        pass
