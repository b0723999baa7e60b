"""A draft that equals its target is right at every level of every round.

Verification repairs whatever the draft does wrong, so no test of outputs can see a fault in it: it only costs accepted
tokens. Here the draft is the target. If it is fed right, no guess of it is ever rejected.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from builders import (
    Watcher,
    candidates_of,
    generate_watched,
    peaked_logits,
    ragged_prompts,
    scripted_engine,
    transparent_pair,
)

from refspec import Engine, Generation, SamplingParams, SpecConfig
from refspec.models.scripted import ScriptedModel

VOCAB = 13
SHAPES = [
    SpecConfig(topk=k, num_steps=steps, num_draft_tokens=n, exact_branch_kv=True)
    for k in (1, 2, 3, 4, 8)
    for steps in range(1, 7)
    for n in sorted({steps + 1, (steps + candidates_of(k, steps) + 2) // 2, min(candidates_of(k, steps) + 1, 90)})
]


def name_of(spec: SpecConfig) -> str:
    return f"k={spec.topk} S={spec.num_steps} N={spec.num_draft_tokens}"


def assert_all_drafts_accepted(generations: list[Generation], watcher: Watcher, spec: SpecConfig) -> None:
    full = spec.num_steps + 1
    assert watcher.rounds
    assert [r.accepted_rows for r in watcher.requests if len(r.accepted_rows) != full] == []
    for generation in generations:
        assert set(generation.accept_lens[:-1]) <= {full}  # the budget may cut the last block


@pytest.mark.parametrize("spec", SHAPES, ids=name_of)
def test_scripted_draft_that_equals_its_target(spec: SpecConfig) -> None:
    engine = scripted_engine(peaked_logits(VOCAB), VOCAB, spec)
    generations, watcher = generate_watched(engine, ragged_prompts(3, 12, VOCAB), SamplingParams(max_new_tokens=20))
    assert_all_drafts_accepted(generations, watcher, spec)


@pytest.mark.parametrize("spec", SHAPES[::2], ids=name_of)
def test_eagle_head_that_equals_its_target(spec: SpecConfig) -> None:
    target, head = transparent_pair()
    prompts = [[0, 5, 11], [0, *range(1, 20)], [0, 7]]
    generations, watcher = generate_watched(Engine(target, head, spec), prompts, SamplingParams(max_new_tokens=20))
    assert_all_drafts_accepted(generations, watcher, spec)


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_one_branch_needs_no_exact_branch_kv(steps: int) -> None:
    """With k = 1 there is but one branch, so both layouts are the same."""
    spec = SpecConfig(topk=1, num_steps=steps, num_draft_tokens=steps + 1)
    engine = scripted_engine(peaked_logits(VOCAB), VOCAB, spec)
    generations, watcher = generate_watched(engine, ragged_prompts(3, 12, VOCAB), SamplingParams(max_new_tokens=20))
    assert_all_drafts_accepted(generations, watcher, spec)


def test_requests_that_wait_and_join_later() -> None:
    spec = SpecConfig(topk=2, num_steps=3, num_draft_tokens=8, exact_branch_kv=True)
    engine = scripted_engine(peaked_logits(VOCAB), VOCAB, spec, max_running=2)
    params = [SamplingParams(max_new_tokens=n) for n in (3, 20, 7, 1, 12)]
    generations, watcher = generate_watched(engine, ragged_prompts(5, 9, VOCAB), params)
    assert_all_drafts_accepted(generations, watcher, spec)


def test_exact_branch_kv_is_what_makes_a_wide_draft_exact() -> None:
    """Where the path changes branches, SGLang's layout lets it read ancestors that are not its own.

    The text is 0 1 2 3 ... In each round its path begins in branch 0 (.52 against .48), falls behind at the next level
    (.52 x .6 against .48 x .99, so it stands in branch 1) and is the best again at the last one.
    """
    spec = SpecConfig(topk=2, num_steps=3, num_draft_tokens=candidates_of(2, 3) + 1)
    prompt = [0, 1, 2]

    def next_logits(context: list[int]) -> list[float]:
        on_path = context == [p % VOCAB for p in range(len(context))]
        level = (len(context) - len(prompt) - 1) % (spec.num_steps + 1)
        best = [0.52, 0.6 if on_path else 0.99, 0.99 if on_path else 0.6, 0.99][level]
        token = (len(context) if on_path else len(context) + 5) % VOCAB
        chances = {token: best, (token + 1) % VOCAB: 1 - best - 1e-6}
        return [math.log(chances.get(t, 1e-9)) for t in range(VOCAB)]

    shortest = {}
    for exact in (False, True):
        engine = scripted_engine(next_logits, VOCAB, replace(spec, exact_branch_kv=exact))
        _, watcher = generate_watched(engine, [prompt], SamplingParams(max_new_tokens=40))
        shortest[exact] = min(len(request.accepted_rows) for request in watcher.requests)
    assert shortest == {False: 3, True: 4}


@pytest.mark.parametrize(
    "spec",
    [
        SpecConfig(topk=1, num_steps=3, num_draft_tokens=4),
        SpecConfig(topk=1, num_steps=5, num_draft_tokens=6),
        SpecConfig(topk=2, num_steps=3, num_draft_tokens=4, exact_branch_kv=True),
        SpecConfig(topk=3, num_steps=4, num_draft_tokens=20, exact_branch_kv=True),
    ],
    ids=name_of,
)
@pytest.mark.parametrize("level", [0, 1, 2])
def test_TREE_13_full_length_again_right_after_a_partial_accept(spec: SpecConfig, level: int) -> None:
    """The draft errs once, at one level of one round. The next round must not suffer from it."""
    prompt, budget = [3, 1, 4], 24
    right = peaked_logits(VOCAB)
    text = list(prompt)
    for _ in range(40):
        logits = right(text)
        text.append(logits.index(max(logits)))
    # The first token is prefill's, so the guess at this level of the first round comes after so many tokens.
    errs_after = tuple(text[: len(prompt) + 1 + level])

    def draft_logits(context: list[int]) -> list[float]:
        logits = list(right(context))
        if tuple(context) == errs_after:
            logits[text[len(context)]] = -1.0  # least likely of all, so no sibling is right either
        return logits

    target = ScriptedModel(right, VOCAB)
    engine = Engine(target, ScriptedModel(draft_logits, VOCAB), spec)
    (generation,), _ = generate_watched(engine, [prompt], SamplingParams(max_new_tokens=budget))
    first, *others, _cut_by_the_budget = generation.accept_lens
    assert first == level + 1
    assert set(others) == {spec.num_steps + 1}
    assert generation.token_ids == text[len(prompt) : len(prompt) + budget]
