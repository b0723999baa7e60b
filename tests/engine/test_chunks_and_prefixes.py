"""What the draft is fed when a prompt is read in chunks, anew, or from the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import (
    agreeing_now_and_then,
    assert_same_output,
    random_logits,
    transparent_pair,
)
from kv_contents import cached, poison, record_logits, worker_of
from serving import VOCAB, assert_all_back, step_until

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardBatch
from refspec.models.scripted import ScriptedModel
from refspec.runtime.runner import ModelRunner

SAID = random_logits(VOCAB)
TARGET = ScriptedModel(SAID, VOCAB)
DRAFT = ScriptedModel(agreeing_now_and_then(SAID, random_logits(VOCAB, salt=5)), VOCAB)
CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
TREE = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, exact_branch_kv=True)


def rows_fed(patch: pytest.MonkeyPatch) -> list[list[tuple[int, int, int]]]:
    """Of each prefill of the draft: (position, the token that the hidden state stands for, the token) of its rows."""
    fed: list[list[tuple[int, int, int]]] = []
    original = ModelRunner.forward

    def forward(runner: ModelRunner, batch: ForwardBatch, phase: str, *others: Any) -> Any:
        if phase == "prefill_draft":
            assert batch.hidden_states is not None
            before = batch.hidden_states[:, 0].long()  # a scripted hidden state names its token
            fed.append(list(zip(batch.positions.tolist(), before.tolist(), batch.input_ids.tolist(), strict=True)))
        return original(runner, batch, phase, *others)

    patch.setattr(ModelRunner, "forward", forward)
    return fed


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5])
def test_SEQ_01_the_shift_across_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt a b c d e f in chunks of 4: the draft is fed b c d e, then f and the first output."""
    prompt, params = [1, 2, 3, 4, 5, 6], SamplingParams(max_new_tokens=3)
    fed = rows_fed(monkeypatch)
    engines = [Engine(TARGET, DRAFT, CHAIN, chunk_size=size) for size in (None, chunk)]
    draft_rows = []
    for engine in engines:
        request = engine.add_request(prompt, params)
        step_until(engine, lambda request=request: bool(request.output_ids))  # type: ignore[misc]
        draft_rows.append(cached(worker_of(engine).draft_runner, engine, request).clone())
    text = [*prompt, *request.output_ids]
    whole, *chunks = fed
    assert whole == [(p, text[p], text[p + 1]) for p in range(6)]
    assert [row for part in chunks for row in part] == whole
    assert [len(part) for part in chunks] == [len(range(6)[i : i + chunk]) for i in range(0, 6, chunk)]
    assert torch.equal(*draft_rows)
    assert draft_rows[0].shape[1] == 6
    first, second = (engine.scheduler.running.draft_input for engine in engines)
    assert first is not None
    assert second is not None
    for name in ("topk_p", "topk_index", "hidden_states"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    if chunk == 4:
        assert [token for _, _, token in chunks[0]] == [2, 3, 4, 5]
        assert [token for _, _, token in chunks[1]] == [6, request.output_ids[0]]


def test_SEQ_01_a_retracted_request_reads_its_output_shifted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and output like one prompt; the last row is fed the pending token, which is not chosen again."""
    engine = Engine(TARGET, DRAFT, CHAIN, chunk_size=4)
    request = engine.add_request([1, 2, 3, 4, 5, 6], SamplingParams(max_new_tokens=30))
    step_until(engine, lambda: len(request.output_ids) > 6)
    before, text = list(request.output_ids), request.all_ids
    engine.scheduler.retract(request)
    fed = rows_fed(monkeypatch)
    step_until(engine, lambda: request.unread_len == 0)
    assert request.output_ids == before
    assert [row for part in fed for row in part] == [(p, text[p], text[p + 1]) for p in range(len(text) - 1)]
    assert engine.scheduler.running.bonus_tokens.tolist() == [before[-1]]


def test_a_round_of_the_others_comes_between_two_chunks() -> None:
    engine = Engine(TARGET, DRAFT, CHAIN, chunk_size=3)
    first = engine.add_request([1, 2], SamplingParams(max_new_tokens=60))
    engine.step()
    engine.add_request(list(range(9)), SamplingParams(max_new_tokens=5))
    progress = []
    for _ in range(6):
        engine.step()
        chunked = engine.scheduler.chunked
        progress.append((chunked.kv_len if chunked else 9, len(first.output_ids)))
    lens, outputs = [kv_len for kv_len, _ in progress], [tokens for _, tokens in progress]
    assert lens == [3, 3, 6, 6, 9, 9]
    assert outputs[0] < outputs[1] == outputs[2] < outputs[3] == outputs[4] < outputs[5]


@pytest.mark.parametrize(
    "settings", [{}, {"chunk_size": 3}, {"page_size": 2}, {"page_size": 4, "chunk_size": 1}], ids=str
)
@pytest.mark.parametrize("meanwhile", [False, True], ids=["after A", "while A decodes"])
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_MEM_14_a_shared_prefix_in_pools_that_nobody_wrote(
    spec: SpecConfig, settings: dict[str, int], meanwhile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both pools are full of NaN at the start. B shares 6 tokens with A, and is as in a cold run."""
    target, head = transparent_pair()
    a, b, params = [0, 1, 2, 3, 4, 5, 9], [0, 1, 2, 3, 4, 5, 7, 8], SamplingParams(max_new_tokens=20)
    cold = Engine(target, head, spec).generate([b], params)
    page = settings.get("page_size", 1)
    spec = SpecConfig(**{**vars(spec), "page_size": page})
    engine = Engine(target, head, spec, prefix_cache=True, **settings)  # type: ignore[arg-type]
    poison(engine)
    finite = record_logits(monkeypatch)
    first = engine.add_request(a, params)
    step_until(engine, lambda: first.finish_reason is not None or (meanwhile and len(first.output_ids) > 2))
    assert (first.finish_reason is None) == meanwhile
    warm = engine.generate([b], params, lambda round_: engine.check())
    assert engine.stats.cached_tokens == 5 // page * page  # of the 6, the last one's draft row was fed another token
    assert all(finite)
    assert_same_output(cold, warm)
    assert warm[0].accept_lens == cold[0].accept_lens
    step_until(engine, lambda: first.finish_reason is not None)
    assert_all_back(engine)


def test_what_a_request_has_read_is_shared_while_it_goes_on() -> None:
    """And what it said after that, once it has ended; but not the last block, of which the draft has no rows."""
    engine = Engine(TARGET, DRAFT, CHAIN, prefix_cache=True)
    cache = engine.scheduler.cache
    assert cache is not None
    first = engine.add_request([1, 2, 3, 4], SamplingParams(max_new_tokens=20))
    engine.step()
    assert (first.cached_len, cache.protected_size) == (4, 4)
    second = engine.add_request([1, 2, 3, 4, first.output_ids[0], 9], SamplingParams(max_new_tokens=2))
    engine.step()
    assert second.cached_len >= 4
    assert engine.stats.cached_tokens == 4
    step_until(engine, lambda: first.finish_reason is not None and second.finish_reason is not None)
    engine.generate([[*first.prompt_ids, *first.output_ids]], SamplingParams(max_new_tokens=1))
    last_block = first.accept_lens[-1]
    assert engine.stats.cached_tokens - 4 == 4 + 20 - 1 - last_block
    assert_all_back(engine)
