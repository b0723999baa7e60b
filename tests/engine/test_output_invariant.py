"""Greedy speculation says what plain greedy says, token for token, whatever the draft is worth.

Exactly: with scripted models there is no rounding, and in float64 no two logits of these models come near a tie.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from builders import (
    agreeing_now_and_then,
    assert_same_output,
    candidates_of,
    generate_watched,
    llama_config,
    peaked_logits,
    ragged_prompts,
    random_head,
    random_llama,
    random_logits,
    transparent_pair,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

from refspec import Engine, SamplingParams, SpecConfig
from refspec.models.scripted import ScriptedModel

VOCAB = 11

FACTORS: dict[str, list[Any]] = {
    "k": [1, 2, 3, 4, 8],
    "S": [1, 2, 3, 4, 5, 6],
    "N": ["2", "k+1", "middle", "pool+1"],
    "batch": [1, 2, 7],
    "longest": [1, 2, 40, 300],
    "exact": [False, True],
    "algorithm": ["eagle", "eagle-v2"],
}
SAMPLE = pairwise(FACTORS)


def spec_of(row: dict[str, Any]) -> SpecConfig:
    pool = candidates_of(row["k"], row["S"])
    sizes = {"2": 2, "k+1": row["k"] + 1, "middle": (pool + 3) // 2, "pool+1": pool + 1}
    return SpecConfig(row["algorithm"], row["k"], row["S"], sizes[row["N"]], exact_branch_kv=row["exact"])


def name_of(row: dict[str, Any]) -> str:
    return " ".join(f"{factor}={value}" for factor, value in row.items())


def test_every_two_values_meet_in_the_sample() -> None:
    for (a, xs), (b, ys) in itertools.combinations(FACTORS.items(), 2):
        assert {(x, y) for x in xs for y in ys} == {(row[a], row[b]) for row in SAMPLE}


@pytest.mark.parametrize("row", SAMPLE, ids=name_of)
@pytest.mark.parametrize("certainty", ["sure", "unsure"])
def test_scripted_draft_that_is_right_now_and_then(row: dict[str, Any], certainty: str) -> None:
    """Accepted paths of every length, on first children and on later ones."""
    logits = peaked_logits if certainty == "sure" else random_logits
    target = ScriptedModel(logits(VOCAB), VOCAB)
    draft = ScriptedModel(agreeing_now_and_then(logits(VOCAB), logits(VOCAB, salt=5)), VOCAB)
    prompts, params = ragged_prompts(row["batch"], row["longest"], VOCAB), SamplingParams(max_new_tokens=24)
    plain = Engine(target).generate(prompts, params)
    spec, watcher = generate_watched(Engine(target, draft, spec_of(row)), prompts, params)
    assert_same_output(plain, spec)
    assert watcher.rounds


@pytest.mark.parametrize("row", SAMPLE, ids=name_of)
def test_llama_with_a_head_that_knows_it(row: dict[str, Any]) -> None:
    """float64; whole paths are accepted, over real attention."""
    target, head = transparent_pair(vocab_size=VOCAB)
    prompts = [
        [0, *(1 + t % (VOCAB - 1) for t in prompt)] for prompt in ragged_prompts(row["batch"], row["longest"], VOCAB)
    ]
    params = SamplingParams(max_new_tokens=24)
    plain = Engine(target).generate(prompts, params)
    spec, watcher = generate_watched(Engine(target, head, spec_of(row)), prompts, params)
    assert_same_output(plain, spec)
    assert watcher.rounds


@st.composite
def odd_models(draw: st.DrawFn) -> dict[str, Any]:
    groups, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "vocab_size": draw(st.integers(11, 50)),
        "hidden_size": draw(st.sampled_from([6, 24, 25])),
        "intermediate_size": draw(st.sampled_from([1, 20])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": groups * kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([2, 4, 10])),
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": draw(st.sampled_from([24, 64])),
    }


@st.composite
def spec_configs(draw: st.DrawFn) -> SpecConfig:
    k, steps = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    most = min(candidates_of(k, steps) + 1, 40)
    return SpecConfig(
        topk=k, num_steps=steps, num_draft_tokens=draw(st.integers(2, most)), exact_branch_kv=draw(st.booleans())
    )


@settings(max_examples=60)
@given(
    sizes=odd_models(),
    head_layers=st.integers(1, 2),
    spec=spec_configs(),
    prompt_lens=st.lists(st.integers(1, 22), min_size=1, max_size=4),
    budgets=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    seed=st.integers(0, 5),
)
def test_llama_of_any_size_with_a_head_that_knows_nothing(
    sizes: dict[str, Any], head_layers: int, spec: SpecConfig, prompt_lens: list[int], budgets: list[int], seed: int
) -> None:
    """float64, random weights; budgets and the context's end cut blocks wherever they fall."""
    target = random_llama(llama_config(**sizes), seed)
    head = random_head(target, num_hidden_layers=head_layers)
    prompts = [[(7 * i + p * p) % sizes["vocab_size"] for p in range(n)] for i, n in enumerate(prompt_lens)]
    params = [SamplingParams(max_new_tokens=budget) for budget in budgets[: len(prompts)]]
    plain = Engine(target).generate(prompts, params)
    spec_outputs, _ = generate_watched(Engine(target, head, spec), prompts, params)
    assert_same_output(plain, spec_outputs)


def test_the_draft_that_is_right_now_and_then_is_so_in_every_way() -> None:
    """The sample above would prove little if the walk always ended at the same depth, or went by first children."""
    target = ScriptedModel(random_logits(VOCAB), VOCAB)
    draft = ScriptedModel(agreeing_now_and_then(random_logits(VOCAB), random_logits(VOCAB, salt=5)), VOCAB)
    engine = Engine(target, draft, SpecConfig(topk=3, num_steps=3, num_draft_tokens=22, exact_branch_kv=True))
    _, watcher = generate_watched(engine, ragged_prompts(7, 9, VOCAB), SamplingParams(max_new_tokens=60))
    assert {len(request.accepted_rows) for request in watcher.requests} == {1, 2, 3, 4}
    first_child_of_root = 1
    assert {request.accepted_rows[1] for request in watcher.requests if request.accepted_rows[1:]} > {
        first_child_of_root
    }


def test_requests_of_unequal_length_do_not_disturb_each_other() -> None:
    """Short requests are padded to the longest one; what stands in the padding must not reach a result."""
    target, head = transparent_pair()
    prompts = [[0, 3], [0, *range(1, 20)], [0, 5, 6]]
    params = SamplingParams(max_new_tokens=12)
    together = Engine(target, head, SpecConfig()).generate(prompts, params)
    alone = [Engine(target, head, SpecConfig()).generate([prompt], params)[0] for prompt in prompts]
    assert_same_output(alone, together)
    assert [g.accept_lens for g in together] == [g.accept_lens for g in alone]


def test_requests_that_wait_and_join_later_say_the_same() -> None:
    """Room for two of five at a time: the batch shrinks and grows while it runs."""
    target = ScriptedModel(random_logits(VOCAB), VOCAB)
    draft = ScriptedModel(agreeing_now_and_then(random_logits(VOCAB), random_logits(VOCAB, 5)), VOCAB)
    prompts = ragged_prompts(5, 9, VOCAB)
    params = [SamplingParams(max_new_tokens=n) for n in (3, 20, 7, 1, 12)]
    plain = Engine(target).generate(prompts, params)
    spec, watcher = generate_watched(Engine(target, draft, SpecConfig(), max_running=2), prompts, params)
    assert_same_output(plain, spec)
    assert {len(round_.requests) for round_ in watcher.rounds} == {1, 2}


def test_a_second_run_of_the_same_engine_says_the_same() -> None:
    """The first one's leavings in the slots are of no consequence."""
    target, head = transparent_pair()
    engine = Engine(target, head, SpecConfig(topk=2, num_steps=2, num_draft_tokens=5), kv_slots=60)
    prompts, params = [[0, 4, 2], [0, 9]], SamplingParams(max_new_tokens=15)
    first = engine.generate(prompts, params)
    engine.generate([[0, 8, 8, 8, 8, 8, 8]], params)
    second = engine.generate(prompts, params)
    assert [(g.token_ids, g.accept_lens) for g in second] == [(g.token_ids, g.accept_lens) for g in first]
