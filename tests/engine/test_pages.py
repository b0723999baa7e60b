"""Pages of several tokens: a branch's copies of the begun one, and any number of draft tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import (
    agreeing_now_and_then,
    assert_same_output,
    candidates_of,
    random_logits,
    transparent_pair,
)
from kv_contents import cached, prefilled, worker_of
from serving import VOCAB, assert_all_back

import refspec.spec.commit
import refspec.spec.draft
import refspec.workers.base
from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardBatch
from refspec.memory.kv_pool import MHATokenToKVPool
from refspec.models.scripted import ScriptedModel
from refspec.runtime.runner import ModelRunner
from refspec.trace import Round

SAID = random_logits(VOCAB)
TARGET = ScriptedModel(SAID, VOCAB)
DRAFT = ScriptedModel(agreeing_now_and_then(SAID, random_logits(VOCAB, salt=5)), VOCAB)
CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
TREE = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, exact_branch_kv=True)


def test_PAGE_01_each_branch_has_its_copies_and_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page 4, length 10, two branches, three steps: positions 8 and 9 are copied to each branch, and read from there.

    To tell who is read, the copies and the original are marked with numbers of their own, and then repaired.
    """
    spec = SpecConfig(topk=2, num_steps=3, num_draft_tokens=7, page_size=4, exact_branch_kv=True)
    engine = Engine(TARGET, TARGET, spec)
    engine.add_request(list(range(10)), SamplingParams(max_new_tokens=5))
    engine.step()
    (request,) = engine.scheduler.running.requests
    assert request.kv_len == 10
    pool, table = worker_of(engine).draft_runner.pool, engine.table.req_to_token
    own = table[request.row, 8:10].tolist()
    expected = pool.buffer[:, own].clone()
    available = engine.allocator.available()
    reads: list[list[list[int]]] = []
    original = ModelRunner.forward

    def forward(runner: ModelRunner, batch: ForwardBatch, phase: str, *others: Any) -> Any:
        if phase == "draft":
            assert available - engine.allocator.available() == 12  # of 14 new slots, 2 are the begun page's
            assert batch.prefix_lens == [8]
            assert batch.tail_mask is not None
            seen = [batch.tail_slots[0][row].tolist() for row in batch.tail_mask[0]]
            reads.append(seen)
            pages = [{slot // 4 for slot in slots} for slots in seen]
            assert pages[0] != pages[1]
            for slots in seen:
                assert torch.equal(pool.buffer[:, slots[:2]], expected)
        return original(runner, batch, phase, *others)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    rounds: list[Round] = []
    engine.step(rounds.append)
    first, second = reads[0]
    assert len(reads) == spec.num_steps - 1
    assert first[:2] == own or second[:2] == own  # one branch goes on in the page itself
    assert first[:2] != second[:2]
    # Each branch: 2 copies, then 3 slots, in two pages of its own.
    for copies, branch in zip((first[:2], second[:2]), rounds[0].requests[0].draft_slots, strict=True):
        laid_out = [*copies, *branch]
        assert [slot % 4 for slot in laid_out] == [0, 1, 2, 3, 0]
        assert len({slot // 4 for slot in laid_out}) == 2


@pytest.mark.parametrize("branch", [0, 1])
def test_PAGE_01_a_branch_whose_copy_is_spoilt_says_something_else(
    branch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is read; and by no other branch."""
    spec = SpecConfig(topk=2, num_steps=2, num_draft_tokens=5, page_size=4, exact_branch_kv=True)

    def tokens_below(spoilt: bool) -> list[list[int]]:
        engine = Engine(TARGET, TARGET, spec)
        engine.add_request(list(range(10)), SamplingParams(max_new_tokens=5))
        engine.step()
        original = refspec.spec.draft.duplicate_prefix_tail

        def duplicate(pool: MHATokenToKVPool, *others: Any) -> None:
            original(pool, *others)
            if spoilt:
                row = engine.scheduler.running.requests[0].row
                pool.buffer[:, engine.table.req_to_token[row, 8 + 4 * branch]] = 5.0

        with monkeypatch.context() as patch:
            patch.setattr(refspec.spec.draft, "duplicate_prefix_tail", duplicate)
            rounds: list[Round] = []
            engine.step(rounds.append)
        tokens = [candidate.token for candidate in rounds[0].requests[0].candidates]
        return [tokens[2:4], tokens[4:6]]

    clean, other = tokens_below(False), tokens_below(True)
    assert clean[branch] != other[branch]
    assert clean[1 - branch] == other[1 - branch]


PAGE_10_CELLS = [
    SpecConfig(topk=k, num_steps=steps, num_draft_tokens=n, page_size=page, exact_branch_kv=exact)
    for n in range(2, 10)
    for k in (1, 2)
    for page in (1, 4)
    for exact in ((False, True) if k == 2 else (True,))
    for steps in [n - 1 if k == 1 else max(s for s in range(1, 5) if s == 1 or candidates_of(2, s - 1) < n)]
]
# Deeper trees than N - 1 drafts can be accepted of: a path then has places for more nodes than there are.
PAGE_10_CELLS += [
    SpecConfig(topk=2, num_steps=5, num_draft_tokens=n, page_size=4, exact_branch_kv=True) for n in (2, 3, 5)
]


@pytest.mark.parametrize(
    "spec",
    PAGE_10_CELLS,
    ids=lambda s: f"N={s.num_draft_tokens} k={s.topk} page={s.page_size} exact={s.exact_branch_kv}",
)
def test_PAGE_10_any_number_of_draft_tokens(spec: SpecConfig) -> None:
    """The output is plain greedy's, and what the caches hold for committed tokens is what a fresh prefill would."""
    engine = Engine(TARGET, DRAFT, spec)
    worker, looked_at = worker_of(engine), 0

    def observer(round_: Round) -> None:
        nonlocal looked_at
        engine.check()
        for request in engine.scheduler.running.requests:
            text, rows = request.all_ids, range(request.kv_len)
            assert cached(worker.target, engine, request)[0, :, 0, 0].tolist() == [[-1, text[p], p] for p in rows]
            slots = engine.table.req_to_token[request.row, : request.kv_len]
            assert (slots % spec.page_size).tolist() == [p % spec.page_size for p in rows]
            if request.finish_reason is None:
                draft_rows = cached(worker.draft_runner, engine, request)[0, :, 0, 0].tolist()
                assert draft_rows == [[text[p], text[p + 1], p] for p in rows]
                looked_at += 1

    prompts, params = [[3, 1, 4], [2, 7, 1, 8, 2, 8, 1], [5]], SamplingParams(max_new_tokens=16)
    generations = engine.generate(prompts, params, observer)
    assert_same_output(Engine(TARGET).generate(prompts, params), generations)
    assert looked_at > 5
    assert_all_back(engine)


@pytest.mark.parametrize(
    "spec", PAGE_10_CELLS[3::6], ids=lambda s: f"N={s.num_draft_tokens} k={s.topk} page={s.page_size}"
)
def test_PAGE_10_over_real_attention(spec: SpecConfig) -> None:
    """In float64, with a head that is often wrong."""
    target, head = transparent_pair()
    with torch.no_grad():
        head.fc.weight += 0.3 * torch.randn_like(head.fc.weight)
    engine = Engine(target, head, spec)
    worker = worker_of(engine)

    def observer(round_: Round) -> None:
        for request in engine.scheduler.running.requests:
            expected, hidden = prefilled(worker.target, request.all_ids[:-1])
            torch.testing.assert_close(cached(worker.target, engine, request), expected, rtol=1e-9, atol=1e-9)
            if request.finish_reason is None:
                expected, _ = prefilled(worker.draft_runner, request.all_ids[1:], hidden)
                torch.testing.assert_close(cached(worker.draft_runner, engine, request), expected, rtol=1e-9, atol=1e-9)

    prompts, params = [[0, 5, 3], [0, 9, 1, 4, 4, 2]], SamplingParams(max_new_tokens=16)
    assert_same_output(Engine(target).generate(prompts, params), engine.generate(prompts, params, observer))
