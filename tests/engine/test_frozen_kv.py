"""An assistant over the target's cache: where it starts, and that it leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import (
    assert_same_output,
    generate_watched,
    llama_config,
    peaked_logits,
    random_assistant,
    random_llama,
    transparent_pair,
)
from family import engine_of
from serving import VOCAB

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardBatch
from refspec.runtime.runner import ModelRunner
from refspec.workers.frozen_kv import FrozenKVWorker


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
    params = SamplingParams(max_new_tokens=14)
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
