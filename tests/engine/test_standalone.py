"""A small language model as the draft: what it reads when, and where its rows lie."""

from __future__ import annotations

import pytest
import torch
from builders import (
    agreeing_now_and_then,
    llama_config,
    ragged_prompts,
    random_llama,
    random_logits,
    transparent_pair,
)
from family import engine_of
from kv_contents import cached, prefilled
from serving import VOCAB

from refspec import Engine, SamplingParams, SpecConfig
from refspec.trace import Round

CELLS = [
    SpecConfig("standalone", k, steps, n, page_size=page, exact_branch_kv=True)
    for k, steps, n in [(1, 1, 2), (1, 4, 5), (2, 3, 8), (4, 2, 9), (3, 5, 30)]
    for page in (1, 4)
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


@pytest.mark.parametrize("spec", CELLS[1::3], ids=lambda s: f"k={s.topk} S={s.num_steps} page={s.page_size}")
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
