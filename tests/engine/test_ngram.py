"""The n-gram drafter: it never changes the output, and what the trie holds is guessed and accepted.

Scripted models, and LLaMA-style ones in float64. The texts repeat themselves, so that guesses are found; the models do
so only now and then, so that some of them are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import (
    assert_same_output,
    generate_watched,
    hash_of,
    llama_config,
    peaked_logits,
    random_llama,
    random_logits,
    text_logits,
)
from pairwise import pairwise

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardMode
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import RunningBatch
from refspec.spec.ngram_trie import NgramTrie
from refspec.workers.ngram import NgramWorker

VOCAB = 11
NGRAM = SpecConfig(algorithm="ngram", num_draft_tokens=8)


def loose_loop(period: int) -> Callable[[list[int]], Sequence[float]]:
    """A model that says what it said `period` tokens ago, but in one of six contexts something else."""
    other = random_logits(VOCAB, salt=3)

    def next_logits(context: list[int]) -> Sequence[float]:
        if len(context) < period or hash_of(context[-2:], 11) % 6 == 0:
            return other(context)
        return [8.0 * (token == context[-period]) + 0.01 * token for token in range(VOCAB)]

    return next_logits


def prompts_of(count: int, longest: int) -> list[list[int]]:
    """All alike at first, so that one request finds what another has said."""
    return [[(p * p) % 7 for p in range(max(1, longest - 3 * i))] + [i % VOCAB] for i in range(count)]


def worker_of(engine: Engine) -> NgramWorker:
    worker = engine.scheduler.worker
    assert isinstance(worker, NgramWorker)
    return worker


# --- the output ---------------------------------------------------------------------------------------------------

SERVING: dict[str, list[Any]] = {
    "page": [1, 4],
    "batch": [1, 3, 6],
    "longest": [1, 9, 30],
    "chunk": [None, 5],
    "cache": [False, True],
    "pool": ["ample", "scarce"],
    "N": [2, 5, 16],
    "match": ["BFS", "PROB"],
    "capacity": [5, 200_000],
}
ROWS = pairwise(SERVING)


def name_of(row: dict[str, Any]) -> str:
    return " ".join(f"{factor}={value}" for factor, value in row.items())


def settings_of(row: dict[str, Any]) -> tuple[SpecConfig, dict[str, Any]]:
    spec = replace(
        NGRAM,
        num_draft_tokens=row["N"],
        page_size=row["page"],
        ngram_match_type=row["match"],
        ngram_capacity=row["capacity"],
    )
    # Scarce: one request and its tree always fit, and several soon do not.
    slots = 4096 if row["pool"] == "ample" else 96
    return spec, {"kv_slots": slots, "chunk_size": row["chunk"], "prefix_cache": row["cache"]}


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_scripted_output_is_plain_decoding_s(row: dict[str, Any]) -> None:
    spec, settings = settings_of(row)
    target = ScriptedModel(loose_loop(5), VOCAB, eos_token_ids=(10,))
    prompts = prompts_of(row["batch"], row["longest"])
    params = [
        SamplingParams(max_new_tokens=40, ignore_eos=i % 2 == 0, temperature=0.8 * (i % 3 == 1), seed=i)
        for i in range(len(prompts))
    ]
    plain = Engine(target).generate(prompts, params)
    engine = Engine(target, None, spec, **settings)
    watched = engine.generate(prompts, params, lambda _: engine.check())
    assert_same_output(plain, watched)
    engine.check()
    assert engine.stats.draft_forwards == engine.stats.extend_forwards == engine.stats.prefill_draft_forwards == 0
    assert len(worker_of(engine).trie) <= row["capacity"]


def test_the_grid_sees_retractions_stops_inside_blocks_and_long_paths() -> None:
    """It would prove little otherwise."""
    seen: dict[str, int] = dict.fromkeys(("retractions", "cached", "cut", "long"), 0)
    for row in ROWS:
        spec, settings = settings_of(row)
        engine = Engine(ScriptedModel(loose_loop(5), VOCAB, eos_token_ids=(10,)), None, spec, **settings)
        generations = engine.generate(prompts_of(row["batch"], row["longest"]), SamplingParams(max_new_tokens=40))
        seen["retractions"] += engine.stats.retractions
        seen["cached"] += engine.stats.cached_tokens
        seen["cut"] += sum(g.finish_reason == "stop" and g.accept_lens[-1:] > [1] for g in generations)
        seen["long"] += sum(length > 5 for g in generations for length in g.accept_lens)
    assert all(seen.values()), seen


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_llama_output_is_plain_decoding_s(page: int, temperature: float) -> None:
    """float64, with real attention over the scattered and the moved rows; greedy and sampled, token for token."""
    target = random_llama(llama_config(vocab_size=VOCAB), seed=4)
    prompts = prompts_of(4, 20)
    params = [SamplingParams(max_new_tokens=50, temperature=temperature, seed=i) for i in range(4)]
    plain = Engine(target).generate(prompts, params)
    for settings in ({}, {"kv_slots": 128, "prefix_cache": True, "chunk_size": 7}):
        engine = Engine(target, None, replace(NGRAM, page_size=page, num_draft_tokens=12), **settings)
        assert_same_output(plain, engine.generate(prompts, params))
        engine.check()
        assert engine.stats.accept_length > 1.1


def test_VER_01_a_draft_of_one_token_is_checked_like_any_other() -> None:
    """6 6 6 6 drafts 6, the target wants 4: none is accepted, and the output is 4."""
    target = ScriptedModel(text_logits([6, 6, 6, 6, 4, 1], VOCAB), VOCAB)
    engine = Engine(target, None, replace(NGRAM, num_draft_tokens=2))
    (generation,), watcher = generate_watched(engine, [[6, 6, 6]], SamplingParams(max_new_tokens=3))
    first = watcher.requests[0]
    assert generation.token_ids == [6, 4, 1]
    assert (first.accepted_rows, first.committed) == ([0], [4])
    assert [candidate.token for candidate in first.candidates] == [6]


def test_rows_that_fill_the_tree_up_are_never_accepted() -> None:
    """Their token is the root's. The target says it again and again: it must come from guesses, or as the bonus."""
    target = ScriptedModel(lambda _: [9.0] + [0.0] * (VOCAB - 1), VOCAB)
    engine = Engine(target, None, replace(NGRAM, num_draft_tokens=16))
    (generation,), watcher = generate_watched(engine, [[3, 0]], SamplingParams(max_new_tokens=9))
    assert generation.token_ids == [0] * 9
    # After 3 0 0: 0 was followed by 0, once. Then by 0 0 0, after which the trie knows no further.
    assert [len(request.candidates) for request in watcher.requests] == [1, 3, 7]
    assert generation.accept_lens == [2, 4, 2]  # the budget cuts the last


# --- what is guessed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("period", [1, 3, 7])
@pytest.mark.parametrize("match", ["BFS", "PROB"])
def test_on_a_text_with_a_period_the_whole_tree_is_accepted(period: int, match: str, page: int) -> None:
    """Each token of the period is another, so there is one way on, and the trie knows it as far as it goes."""
    target = ScriptedModel(lambda context: [9.0 * (t == len(context) % period) for t in range(VOCAB)], VOCAB)
    engine = Engine(target, None, replace(NGRAM, page_size=page, ngram_match_type=match))
    prompts = [[p % period for p in range(length)] for length in (period + 1, 3 * period + 2, period * 5)]
    generations, watcher = generate_watched(engine, prompts, SamplingParams(max_new_tokens=60))
    uncut = [request for request in watcher.requests if not request.finish_reason]
    assert uncut
    for request in uncut:
        assert len(request.accepted_rows) - 1 == len(request.candidates) >= 1
    for generation in generations:
        assert set(generation.accept_lens[3:-1]) == {NGRAM.num_draft_tokens}


def test_a_request_finds_what_another_has_said() -> None:
    """Two runs of one engine: in the second everything has been said before."""
    target = ScriptedModel(peaked_logits(97), 97)
    engine = Engine(target, None, NGRAM)
    params = SamplingParams(max_new_tokens=33)
    (first,) = engine.generate([[1, 2, 3]], params)
    (second,) = engine.generate([[1, 2, 3]], params)
    assert second.token_ids == first.token_ids
    assert second.accept_lens == [8, 8, 8, 8]
    assert len(first.accept_lens) > 20


@pytest.mark.parametrize("chunk", [None, 2])
def test_NGR_03_what_a_round_costs_on_the_host_does_not_grow_with_the_text(
    chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round shows the trie a window and its own block, however long the text is; a prompt is shown once."""
    shown: list[int] = []
    insert = NgramTrie.insert

    def counting(trie: NgramTrie, tokens: Sequence[int], start: int = 0) -> None:
        shown.append(len(tokens) - start)
        assert start <= 17
        insert(trie, tokens, start)

    monkeypatch.setattr(NgramTrie, "insert", counting)
    engine = Engine(ScriptedModel(loose_loop(5), VOCAB), None, NGRAM, chunk_size=chunk)
    (generation,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=200))
    assert shown == [4, *generation.accept_lens]  # every token once


# --- sampling, seeds, idling --------------------------------------------------------------------------------------


def test_a_rank_without_requests_passes_through_an_empty_round() -> None:
    engine = Engine(ScriptedModel(random_logits(VOCAB), VOCAB), None, NGRAM)
    idle = RunningBatch.of([], engine.table.req_to_token)
    assert len(engine.scheduler.worker.forward(idle, ForwardMode.IDLE)) == 0
    assert engine.stats.rounds == 0
    engine.check()


def test_graphs_hold_the_verify_forward() -> None:
    """Its shape is the same in every round, whatever was found."""
    target = random_llama(llama_config(vocab_size=VOCAB), seed=4)
    params = SamplingParams(max_new_tokens=30)
    engine = Engine(target, None, NGRAM, graphs=[1, 4])
    assert_same_output(Engine(target).generate(prompts_of(3, 9), params), engine.generate(prompts_of(3, 9), params))
    assert engine.stats.graph_replays["target"] == engine.stats.target_forwards > 0


def test_all_requests_end_inside_one_verify_and_the_next_are_served() -> None:
    target = ScriptedModel(lambda _: [9.0] + [0.0] * (VOCAB - 1), VOCAB)
    engine = Engine(target, None, NGRAM)
    for _ in range(2):
        generations, _ = generate_watched(engine, [[0] * 9, [0] * 9], SamplingParams(max_new_tokens=4))
        assert [g.accept_lens for g in generations] == [[3], [3]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"topk": 2}, "topk is 2, but algorithm ngram drafts with no model: leave it out"),
        ({"num_steps": 5}, "num_steps is 5, but algorithm ngram"),
        ({"sampler": "rejection"}, "sampler is 'rejection', but algorithm ngram"),
        ({"threshold_acc": 0.5}, "threshold_acc is 0.5, but algorithm ngram"),
        ({"ngram_match_type": "prob"}, "ngram_match_type is 'prob', it must be one of: BFS, PROB"),
        ({"ngram_max_trie_depth": 1}, "ngram_max_trie_depth must be at least 2, got 1"),
        ({"ngram_max_bfs_breadth": 0}, "ngram_max_bfs_breadth must be at least 1, got 0"),
        ({"ngram_capacity": 0}, "ngram_capacity must be at least 1, got 0"),
        (
            {"algorithm": "eagle", "ngram_capacity": 7},
            "ngram_capacity is 7, but the algorithm is eagle: it is for ngram",
        ),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(NGRAM, **changed)


def test_a_draft_model_is_refused() -> None:
    model = ScriptedModel(random_logits(VOCAB), VOCAB)
    with pytest.raises(ValueError, match="a draft model is given, but algorithm ngram needs none: leave it out"):
        Engine(model, model, NGRAM)


def test_a_vocabulary_smaller_than_the_default_topk_is_no_obstacle() -> None:
    engine = Engine(ScriptedModel(random_logits(2), 2), None, NGRAM)
    assert len(engine.generate([[1]], SamplingParams(max_new_tokens=9))[0].token_ids) == 9
