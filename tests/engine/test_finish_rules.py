"""Requests end where they should, though a round brings several tokens at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders import (
    assert_all_free,
    assert_same_output,
    generate_watched,
    peaked_logits,
    ragged_prompts,
    random_logits,
    scripted_engine,
    text_logits,
    transparent_pair,
)

from refspec import Engine, SamplingParams, SpecConfig
from refspec.models.scripted import ScriptedModel

VOCAB = 11
CHAIN = [SpecConfig(topk=1, num_steps=steps, num_draft_tokens=steps + 1) for steps in (1, 3, 5)]
WIDE = SpecConfig(topk=2, num_steps=4, num_draft_tokens=10, exact_branch_kv=True)
HOW = [None, *CHAIN, WIDE]
how = pytest.mark.parametrize("spec", HOW, ids=lambda s: f"k{s.topk}S{s.num_steps}" if s else "plain")


def engine_for(text: Sequence[int], spec: SpecConfig | None, prompt_len: int = 2, **settings: object) -> Engine:
    """An engine that says just this text after a prompt of that many ids; every draft is right."""
    return scripted_engine(text_logits([0] * prompt_len + list(text), VOCAB), VOCAB, spec, **settings)


@how
@pytest.mark.parametrize("budget", [1, 2, 3, 6, 7, 8])
@pytest.mark.parametrize("by", ["model", "request"])
def test_FIN_01_stop_wins_over_the_budget_inside_a_block(spec: SpecConfig | None, budget: int, by: str) -> None:
    """4 9 S 6 6 2 8: with room for S the reason is the stop, and nothing behind S is kept anywhere."""
    text, stop = [4, 9, 10, 6, 6, 2, 8], 10
    ends = {"eos_token_ids": [stop]} if by == "model" else {}
    engine = engine_for(text, spec, **ends)
    params = SamplingParams(max_new_tokens=budget, stop_token_ids=() if by == "model" else (stop,))
    (generation,), _ = generate_watched(engine, [[0, 0]], params)
    assert generation.token_ids == text[: min(budget, 3)]
    assert generation.finish_reason == ("stop" if budget >= 3 else "length")
    assert 1 + sum(generation.accept_lens) == len(generation.token_ids)


@how
@pytest.mark.parametrize("at", range(9))
def test_FIN_05_eos_inside_a_block(spec: SpecConfig | None, at: int) -> None:
    """Whatever token plain greedy says at an index, made the end of text, ends the output where it first occurs."""
    prompt = [3, 1]
    free_run = scripted_engine(random_logits(VOCAB), VOCAB, None).generate([prompt], SamplingParams(max_new_tokens=12))
    text = free_run[0].token_ids
    eos = text[at]
    engine = scripted_engine(random_logits(VOCAB), VOCAB, spec, eos_token_ids=[eos])
    (generation,), _ = generate_watched(engine, [prompt], SamplingParams(max_new_tokens=12))
    assert generation.token_ids == text[: text.index(eos) + 1]
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize("at", range(9))
def test_FIN_05_eos_inside_a_block_of_a_llama(at: int) -> None:
    prompt, params = [0, 7, 8, 9], SamplingParams(max_new_tokens=12)
    target, head = transparent_pair()
    text = Engine(target).generate([prompt], params)[0].token_ids
    eos = text[at]
    target.config = replace(target.config, eos_token_ids=(eos,))
    for spec in CHAIN:
        (generation,), _ = generate_watched(Engine(target, head, spec), [prompt], params)
        assert generation.token_ids == text[: text.index(eos) + 1]
        assert generation.finish_reason == "stop"


@how
@pytest.mark.parametrize("max_running", [1, 4])
def test_FIN_07_fifty_requests_with_a_budget_of_one(spec: SpecConfig | None, max_running: int) -> None:
    """They end at prefill, and make room for the next ones."""
    prompts, params = ragged_prompts(50, 5, VOCAB), SamplingParams(max_new_tokens=1)
    engine = scripted_engine(random_logits(VOCAB), VOCAB, spec, max_running=max_running)
    generations = engine.generate(prompts, params)
    logits = random_logits(VOCAB)
    assert [g.token_ids for g in generations] == [
        [max(range(VOCAB), key=lambda token: logits(prompt)[token])] for prompt in prompts
    ]
    assert {g.finish_reason for g in generations} == {"length"}
    assert engine.stats.rounds == engine.stats.forwards["target"] == 0
    assert_all_free(engine)


@how
@pytest.mark.parametrize("batch", [1, 3])
def test_FIN_09_as_many_tokens_as_the_budget(spec: SpecConfig | None, batch: int) -> None:
    engine = scripted_engine(peaked_logits(VOCAB), VOCAB, spec)
    for budget in range(1, 13):
        before = engine.stats.committed_tokens
        generations, _ = generate_watched(
            engine, ragged_prompts(batch, 4, VOCAB), SamplingParams(max_new_tokens=budget)
        )
        assert [len(g.token_ids) for g in generations] == [budget] * batch
        assert [1 + sum(g.accept_lens) for g in generations] == [budget] * batch
        assert engine.stats.committed_tokens - before == (budget - 1) * batch


@pytest.mark.parametrize("stop_at", range(5))
@pytest.mark.parametrize("spec", [CHAIN[2], WIDE], ids=["chain", "tree"])
def test_FIN_10_every_count_speaks_of_what_was_emitted(spec: SpecConfig, stop_at: int) -> None:
    """A block of five (or more) with a stop inside it: output, stream, accept lengths and statistics agree."""
    block = [4, 9, 3, 6, 2]
    text = [1, *block[:stop_at], 10, *block[stop_at:]]  # 1 is prefill's
    engine = engine_for(text, spec, eos_token_ids=[10])
    blocks = list(engine.stream([0, 0], SamplingParams(max_new_tokens=40)))
    emitted = stop_at + 1
    assert [token for b in blocks for token in b.token_ids] == text[: 1 + emitted]
    assert sum(len(b.token_ids) for b in blocks[1:]) == emitted
    assert engine.stats.committed_tokens == emitted
    assert engine.stats.accept_length * engine.stats.request_rounds == emitted
    assert engine.stats.as_dict()["committed_tokens"] == emitted

    (generation,), watcher = generate_watched(engine, [[0, 0]], SamplingParams(max_new_tokens=40))
    assert sum(generation.accept_lens) == len(generation.token_ids) - 1 == emitted
    assert sum(len(request.committed) for request in watcher.requests) == emitted
    assert sum(len(request.kept_slots) for request in watcher.requests) == emitted


@how
def test_FIN_12_end_of_text_of_the_model(spec: SpecConfig | None) -> None:
    """5 6 E 7 7 7 with a budget of six: the model's own end of text ends it, unless it is to be ignored."""
    text = [5, 6, 10, 7, 7, 7]
    engine = engine_for(text, spec, eos_token_ids=[10])
    (stops,), _ = generate_watched(engine, [[0, 0]], SamplingParams(max_new_tokens=6))
    assert (stops.token_ids, stops.finish_reason) == ([5, 6, 10], "stop")
    (runs_on,), _ = generate_watched(engine, [[0, 0]], SamplingParams(max_new_tokens=6, ignore_eos=True))
    assert (runs_on.token_ids, runs_on.finish_reason) == (text, "length")


@how
def test_FIN_12_any_of_several_ends_of_text(spec: SpecConfig | None) -> None:
    engine = engine_for([5, 8, 10, 9], spec, eos_token_ids=[9, 10])
    (generation,), _ = generate_watched(engine, [[0, 0]], SamplingParams(max_new_tokens=6))
    assert generation.token_ids == [5, 8, 10]


@how
def test_ignoring_the_end_of_text_leaves_stop_tokens_in_force(spec: SpecConfig | None) -> None:
    engine = engine_for([5, 10, 6, 7], spec, eos_token_ids=[10])
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, stop_token_ids=(6,))
    (generation,), _ = generate_watched(engine, [[0, 0]], params)
    assert (generation.token_ids, generation.finish_reason) == ([5, 10, 6], "stop")


@how
def test_requests_of_a_batch_end_each_by_its_own_rule(spec: SpecConfig | None) -> None:
    """One by a stop, one by its budget, one by the context, at different times."""
    prompts = ragged_prompts(3, 10, VOCAB)
    logits = random_logits(VOCAB)
    unhindered = scripted_engine(logits, VOCAB, None).generate(prompts, SamplingParams(max_new_tokens=30))
    stop = unhindered[1].token_ids[4]
    params = [
        SamplingParams(max_new_tokens=100),
        SamplingParams(stop_token_ids=(stop,)),
        SamplingParams(max_new_tokens=6),
    ]
    engine = scripted_engine(logits, VOCAB, spec, max_context=32)
    generations, _ = generate_watched(engine, prompts, params)
    first_stop = unhindered[1].token_ids.index(stop)
    expected = [22, min(first_stop + 1, 32 - len(prompts[1])), 6]
    assert [g.token_ids for g in generations] == [
        whole.token_ids[:length] for whole, length in zip(unhindered, expected, strict=True)
    ]
    assert [g.finish_reason for g in generations] == ["length", "stop", "length"]


# --- the end of the context ---------------------------------------------------------------------------------------


@how
@pytest.mark.parametrize("prompt_len", [1, 11, 12, 15])
def test_SEQ_16_the_context_ends_the_output(spec: SpecConfig | None, prompt_len: int) -> None:
    """Context 16, prompt 12: four new tokens, reason length; no result comes from position 16 or beyond."""
    prompt = [(5 * p) % VOCAB for p in range(prompt_len)]
    plain = scripted_engine(peaked_logits(VOCAB), VOCAB, None).generate([prompt], SamplingParams(max_new_tokens=100))
    engine = scripted_engine(peaked_logits(VOCAB), VOCAB, spec, max_context=16)
    (generation,), watcher = generate_watched(engine, [prompt], SamplingParams(max_new_tokens=100))
    assert generation.token_ids == plain[0].token_ids[: 16 - prompt_len]
    assert generation.finish_reason == "length"
    for request in watcher.requests:
        read = [request.positions[row] for row in request.accepted_rows[: len(request.committed)]]
        assert max(read) < 16


@pytest.mark.parametrize("steps", range(1, 7))
@pytest.mark.parametrize("prompt_len", range(9, 16))
def test_SEQ_16_the_context_ends_a_batch_of_llamas(steps: int, prompt_len: int) -> None:
    """Wherever in a block the end falls, and with a neighbour that is further from it."""
    target, head = transparent_pair()
    target.config = replace(target.config, max_position_embeddings=16)
    prompts = [[0, *range(1, prompt_len)], [0, 5]]
    params = SamplingParams(max_new_tokens=100)
    plain = Engine(target).generate(prompts, params)
    spec = SpecConfig(topk=1, num_steps=steps, num_draft_tokens=steps + 1)
    generations, _ = generate_watched(Engine(target, head, spec), prompts, params)
    assert_same_output(plain, generations)
    assert [len(g.token_ids) for g in generations] == [16 - prompt_len, 14]


def test_SEQ_16_prompt_that_leaves_no_room_is_refused() -> None:
    model = ScriptedModel(random_logits(VOCAB), VOCAB, max_context=16)
    with pytest.raises(ValueError, match=r"16 tokens.*context is 16"):
        Engine(model).generate([[1] * 16])
