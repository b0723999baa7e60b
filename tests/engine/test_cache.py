"""What the slots of committed tokens hold after every round: what a fresh prefill of the text would have put there.

Rejected drafts leave no trace in it, draft rows of an earlier loop neither, and nobody reads a slot that no one wrote.
"""

from __future__ import annotations

import pytest
import torch
from builders import (
    agreeing_now_and_then,
    assert_same_output,
    generate_watched,
    ragged_prompts,
    random_logits,
    scripted_engine,
    transparent_pair,
)
from kv_contents import cached, poison, prefilled, record_logits, worker_of

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardBatch
from refspec.models.scripted import ScriptedModel
from refspec.runtime.runner import ModelRunner
from refspec.trace import Round

VOCAB = 11
SHAPES = [
    SpecConfig(topk=1, num_steps=3, num_draft_tokens=4),
    SpecConfig(topk=3, num_steps=3, num_draft_tokens=9),
    SpecConfig(topk=3, num_steps=3, num_draft_tokens=22, exact_branch_kv=True),
]
by_shape = pytest.mark.parametrize("spec", SHAPES, ids=lambda s: f"k={s.topk} N={s.num_draft_tokens}")


@by_shape
def test_scripted_records_after_every_round(spec: SpecConfig) -> None:
    """Position p: the target has (nothing, token p), the draft (token p, token p + 1)."""
    target = ScriptedModel(random_logits(VOCAB), VOCAB)
    draft = ScriptedModel(agreeing_now_and_then(random_logits(VOCAB), random_logits(VOCAB, salt=5)), VOCAB)
    engine = Engine(target, draft, spec)
    worker, looked_at = worker_of(engine), 0

    def observer(round_: Round) -> None:
        nonlocal looked_at
        for request in engine.scheduler.running.requests:
            text = request.prompt_ids + request.output_ids
            rows = range(request.kv_len)
            assert len(text) == request.kv_len + 1
            assert cached(worker.target, engine, request)[0, :, 0, 0].tolist() == [[-1, text[p], p] for p in rows]
            if request.finish_reason is None:  # a finished one is not extended any more
                assert cached(worker.draft_runner, engine, request)[0, :, 0, 0].tolist() == [
                    [text[p], text[p + 1], p] for p in rows
                ]
                looked_at += 1

    engine.generate(ragged_prompts(3, 9, VOCAB), SamplingParams(max_new_tokens=25), observer)
    assert looked_at > 10


@by_shape
def test_SEQ_02_keys_and_values_as_if_nothing_had_ever_been_rejected(spec: SpecConfig) -> None:
    """Of a LLaMA and its head, in float64. So the logits are those of a run that never drafted, too."""
    target, head = transparent_pair()
    with torch.no_grad():  # a head that is often wrong
        head.fc.weight += 0.3 * torch.randn_like(head.fc.weight)
    engine = Engine(target, head, spec)
    worker, rejected = worker_of(engine), 0

    def observer(round_: Round) -> None:
        nonlocal rejected
        rejected += sum(len(r.accepted_rows) <= spec.num_steps for r in round_.requests)
        for request in engine.scheduler.running.requests:
            text = request.prompt_ids + request.output_ids
            expected, hidden = prefilled(worker.target, text[:-1])
            torch.testing.assert_close(cached(worker.target, engine, request), expected, rtol=1e-9, atol=1e-9)
            if request.finish_reason is None:
                expected, _ = prefilled(worker.draft_runner, text[1:], hidden)
                torch.testing.assert_close(cached(worker.draft_runner, engine, request), expected, rtol=1e-9, atol=1e-9)

    engine.generate([[0, 5, 3], [0, 9, 1, 4, 4, 2]], SamplingParams(max_new_tokens=25), observer)
    assert rejected > 3


def test_SEQ_01_the_draft_reads_the_prompt_shifted_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt a b c d e f: the draft is fed b c d e f and the first output, each beside the hidden state before it."""
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8]]
    engine = scripted_engine(random_logits(VOCAB), VOCAB, SHAPES[0])
    fed: list[ForwardBatch] = []
    original = ModelRunner.forward

    def forward(self, batch, phase, logits_rows=None):  # type: ignore[no-untyped-def]
        if phase == "prefill_draft":
            fed.append(batch)
        return original(self, batch, phase, logits_rows)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    first_tokens = [g.token_ids[0] for g in engine.generate(prompts, SamplingParams(max_new_tokens=3))]
    (batch,) = fed
    assert batch.input_ids.tolist() == [2, 3, 4, 5, 6, first_tokens[0], 8, first_tokens[1]]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert batch.hidden_states is not None
    assert batch.hidden_states[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]  # a scripted hidden state names its token


def test_SEQ_01_the_shift_goes_on_behind_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every extend starts where the last one ended: no token is skipped, none is read twice."""
    engine = scripted_engine(random_logits(VOCAB), VOCAB, SHAPES[1])
    fed: list[tuple[int, int, int]] = []
    original = ModelRunner.forward

    def forward(self, batch, phase, logits_rows=None):  # type: ignore[no-untyped-def]
        if phase in ("prefill_draft", "extend"):
            before = batch.hidden_states[:, 0].long()
            fed.extend(zip(batch.positions.tolist(), before.tolist(), batch.input_ids.tolist(), strict=True))
        return original(self, batch, phase, logits_rows)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    prompt = [1, 2, 3, 4, 5, 6]
    (generation,) = engine.generate([prompt], SamplingParams(max_new_tokens=30))
    text = prompt + generation.token_ids
    assert len(fed) > len(prompt) + 10
    assert fed == [(p, text[p], text[p + 1]) for p in range(len(fed))]


# --- slots that nobody wrote --------------------------------------------------------------------------------------


@by_shape
def test_MEM_14_slots_that_nobody_wrote_are_not_read(spec: SpecConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Request A, then B which begins alike, in pools full of NaN: B says and accepts what it would in a cold run."""
    target, head = transparent_pair()
    a, b, params = [0, 1, 2, 3, 4, 5, 9], [0, 1, 2, 3, 4, 5, 7, 8], SamplingParams(max_new_tokens=20)
    cold = Engine(target, head, spec).generate([b], params)
    engine = Engine(target, head, spec)
    poison(engine)
    finite = record_logits(monkeypatch)
    engine.generate([a], params)
    after_a, _ = generate_watched(engine, [b], params)
    assert all(finite)
    assert_same_output(cold, after_a)
    assert after_a[0].accept_lens == cold[0].accept_lens


@by_shape
def test_MEM_14_what_an_overflow_left_behind_reaches_nobody(spec: SpecConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short request's rows are as wide as the longest one's. The surplus columns are stale entries of the request
    table: whatever their slots hold, it must not count. A weight of 0 does not do, since 0 times NaN is NaN.
    """
    target, head = transparent_pair()
    prompts, params = [[0, 3], [0, *range(1, 15)]], SamplingParams(max_new_tokens=20)
    clean = Engine(target, head, spec).generate(prompts, params)
    engine = Engine(target, head, spec, max_running=2)
    engine.generate([[0, *range(1, 20)], [0, *range(3, 20)]], params)
    poison(engine)  # as if these two had overflowed
    finite = record_logits(monkeypatch)
    generations, _ = generate_watched(engine, prompts, params)
    assert all(finite)
    assert_same_output(clean, generations)
    assert [g.accept_lens for g in generations] == [g.accept_lens for g in clean]
