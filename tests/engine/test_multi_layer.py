"""Layers that each guess one token: rows that were fed guesses are written anew, in every layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import (
    agreeing_now_and_then,
    generate_watched,
    hash_of,
    llama_config,
    peaked_logits,
    random_llama,
    random_logits,
    random_mtp,
)
from family import SCRIPTED, engine_of, says
from kv_contents import cached, prefilled
from serving import VOCAB, step_until

from refspec import Engine, SamplingParams, SpecConfig
from refspec.models.scripted import ScriptedModel
from refspec.trace import Round


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
