"""Pages, chunks, the prefix cache and a full pool: what they do to slots, tables, caches, and what the draft is fed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from kv_contents import cached, poison, prefilled, record_logits, worker_of
from serving import VOCAB, Visit, assert_all_back, assert_as_foretold, serve
from torch import Tensor

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


def step_until(engine: Engine, done: Callable[[], bool]) -> None:
    for _ in range(200):
        if done():
            return
        engine.step()
        engine.check()
    raise AssertionError("it does not come to that")


# --- a full pool --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [False, True], ids=["", "cache"])
@pytest.mark.parametrize("page", [1, 2, 4])
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "chain"])
def test_MEM_09_one_request_fills_the_pool(speculative: bool, page: int, cache: bool) -> None:
    """It ends with an error of its own, keeps the tokens that it has, and the next one is served."""
    spec = SpecConfig(topk=1, num_steps=2, num_draft_tokens=3, page_size=page) if speculative else None
    settings: dict[str, Any] = {"kv_slots": 16, "page_size": page, "prefix_cache": cache}
    engine = Engine(TARGET, DRAFT if spec else None, spec, **settings)
    big = engine.add_request(list(range(10)), SamplingParams(max_new_tokens=20))
    small = engine.add_request([3, 1], SamplingParams(max_new_tokens=4))
    step_until(engine, lambda: big.finish_reason is not None)
    assert big.finish_reason == "out_of_slots"
    text = Engine(TARGET).generate([list(range(10))], SamplingParams(max_new_tokens=20))[0].token_ids
    assert 0 < len(big.output_ids) < 20
    assert big.output_ids == text[: len(big.output_ids)]
    assert big.output_ids == engine.result(big).token_ids
    # It ended only when not even the slots of one more round were to be had.
    kv_len = 10 + len(big.output_ids) - 1
    assert kv_len + (3 if spec else 1) > 16 - (page - 1)
    assert (big.row, big.kv_len) == (0, 0)
    held = engine.scheduler.cache.evictable_size if engine.scheduler.cache else 0
    assert engine.allocator.available() + held + small.kv_len - small.cached_len >= 16 - (page - 1)
    step_until(engine, lambda: small.finish_reason is not None)
    assert (small.output_ids, small.finish_reason) == (
        Engine(TARGET).generate([[3, 1]], SamplingParams(max_new_tokens=4))[0].token_ids,
        "length",
    )
    assert_all_back(engine)


def test_MEM_09_a_retracted_request_that_can_never_come_back_ends_too() -> None:
    """Two fill the pool; the younger one goes, and when its turn comes again the pool is too small for it alone."""
    engine = Engine(TARGET, kv_slots=16)
    visits = [Visit(list(range(n)), SamplingParams(max_new_tokens=20)) for n in (7, 6)]
    requests, _ = serve(engine, visits)
    text = [Engine(TARGET).generate([visit.prompt], visit.params)[0].token_ids for visit in visits]
    assert [request.finish_reason for request in requests] == ["out_of_slots"] * 2
    assert [request.output_ids for request in requests] == [text[0][:10], text[1][:11]]
    assert requests[1].retractions == 1


@pytest.mark.parametrize("spec", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("cache", [False, True], ids=["", "cache"])
def test_FIN_07_fifty_requests_with_a_budget_of_one_in_a_tiny_pool(
    spec: SpecConfig | None, chunk: int | None, cache: bool
) -> None:
    """They end at prefill, whichever chunk it ends with, and make room for the next ones. Nothing is ever verified."""
    engine = Engine(
        TARGET, DRAFT if spec else None, spec, kv_slots=14, max_running=4, chunk_size=chunk, prefix_cache=cache
    )
    visits = [Visit([i % 7, *range(1 + i % 5)], SamplingParams(max_new_tokens=1)) for i in range(50)]
    requests, _ = serve(engine, visits)
    assert_as_foretold(SAID, visits, requests)
    assert {request.finish_reason for request in requests} == {"length"}
    assert engine.stats.rounds == engine.stats.forwards["target"] == engine.stats.retractions == 0


# --- the reserve --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("spec", [CHAIN, TREE, SpecConfig(topk=4, num_steps=3, num_draft_tokens=20)], ids=str)
def test_MEM_15_the_reserve_is_what_a_round_takes_and_not_twice_that(spec: SpecConfig, page: int) -> None:
    """Read before each round of two requests. Slots of draft and tree are never taken at one time."""
    spec = SpecConfig(**{**vars(spec), "page_size": page})
    engine = Engine(TARGET, DRAFT, spec)
    worker, allocator = worker_of(engine), engine.allocator
    lowest: list[int] = []
    take = allocator._take

    def taking(pages: int) -> Tensor:
        slots = take(pages)
        lowest.append(allocator.available())
        return slots

    allocator._take = taking  # type: ignore[method-assign]
    requests = [engine.add_request([1, 2, 3, 4, 5, i], SamplingParams(max_new_tokens=20)) for i in range(2)]
    engine.step()
    seen = 0
    while any(request.finish_reason is None for request in requests):
        kv_lens, before = engine.scheduler.running.prefix_lens, allocator.available()
        lowest.clear()
        engine.step()
        assert worker.slots_for_round(kv_lens) == before - min(lowest, default=before)
        if page == 1:
            one = max(spec.topk * spec.num_steps, spec.num_draft_tokens)
            assert worker.slots_for_round(kv_lens) == one * len(kv_lens)
        seen += 1
    assert seen > 4
    assert_all_back(engine)


def test_MEM_15_a_cached_prefix_survives_where_there_is_room() -> None:
    """21 cached tokens, two requests with rounds of 4: in 21 + 2 x (6 + 12 - 1 + 4) slots nothing is evicted."""
    shared, params = list(range(10)) * 2, SamplingParams(max_new_tokens=12)
    room = 21 + 2 * (6 + 12 - 1 + CHAIN.num_draft_tokens)
    for slots, evicted in ((room, False), (room - 12, True)):
        engine = Engine(TARGET, DRAFT, CHAIN, kv_slots=slots, prefix_cache=True)
        engine.generate([[*shared, 3]], SamplingParams(max_new_tokens=1))  # ends at its prefill: no draft row, no cache
        assert engine.scheduler.cache is not None
        assert engine.scheduler.cache.evictable_size == 0
        engine.generate([[*shared, 3]], SamplingParams(max_new_tokens=2))
        assert engine.scheduler.cache.evictable_size == 21
        engine.generate([[7, 7, 7, 7, 7, 7], [8, 8, 8, 8, 8, 8]], params)
        assert (engine.stats.evicted_tokens > 0) == evicted
        before = engine.stats.cached_tokens
        engine.generate([[*shared, 3, 5]], params)
        assert engine.stats.cached_tokens - before == (0 if evicted else 20)
        assert_all_back(engine)


# --- who touches the request table --------------------------------------------------------------------------------


@dataclass
class Access:
    """Of cells [start, end) of a row of the request table, in a step and a phase."""

    step: int
    phase: str
    write: bool
    row: int
    start: int
    end: int


class TableLog:
    """Keeps a log of the kernels and forwards that read or write the table."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.accesses: list[Access] = []
        self.step, self.phase = 0, ""
        original_phase = type(engine.scheduler.worker).phase
        log = self

        def phase(worker: Any, name: str) -> Any:
            log.phase = name
            return original_phase(worker, name)

        patch.setattr(type(engine.scheduler.worker), "phase", phase)
        for module in (refspec.spec.commit, refspec.spec.draft, refspec.workers.base):
            self._watch_writes(module, patch)
        if engine.allocator.page_size > 1:
            self._watch_draft_reads(patch)
        original_forward = ModelRunner.forward

        def forward(runner: ModelRunner, batch: ForwardBatch, *others: Any, **named: Any) -> Any:
            for row, length in zip(batch.rows.tolist(), batch.prefix_lens, strict=True):
                log.add(False, row, 0, length)
            return original_forward(runner, batch, *others, **named)

        patch.setattr(ModelRunner, "forward", forward)

    def add(self, write: bool, row: int, start: int, end: int) -> None:
        if end > start:
            self.accesses.append(Access(self.step, self.phase, write, row, start, end))

    def _watch_writes(self, module: Any, patch: pytest.MonkeyPatch) -> None:
        original = module.assign_req_to_token

        def assign(table: Tensor, rows: Tensor, start: Tensor, end: Tensor, slots: Tensor) -> None:
            for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
                self.add(True, row, first, last)
            original(table, rows, start, end, slots)

        patch.setattr(module, "assign_req_to_token", assign)

    def _watch_draft_reads(self, patch: pytest.MonkeyPatch) -> None:
        """Both kernels of the paged draft read the cells that the draft itself has just entered."""
        original = refspec.spec.draft.assign_draft_cache_locs

        def locs(table: Tensor, rows: Tensor, lens: Tensor, topk: int, steps: int, page: int) -> Tensor:
            spec = SpecConfig(topk=topk, num_steps=steps, num_draft_tokens=2, page_size=page)
            for row, length in zip(rows.tolist(), lens.tolist(), strict=True):
                self.add(False, row, length, spec.draft_end(length))
            return original(table, rows, lens, topk, steps, page)

        patch.setattr(refspec.spec.draft, "assign_draft_cache_locs", locs)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_MEM_16_nobody_reads_what_another_phase_left_behind_the_length(
    spec: SpecConfig, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, a finish, and a new request in the row that became free; cells are followed one by one."""
    spec = SpecConfig(**{**vars(spec), "page_size": page})
    engine = Engine(TARGET, DRAFT, spec, max_running=2)
    log = TableLog(engine, monkeypatch)
    short = engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=3))
    long = engine.add_request([4, 5, 6, 7, 8], SamplingParams(max_new_tokens=30))
    late = engine.add_request([9, 8, 7, 6, 5, 4, 3, 2], SamplingParams(max_new_tokens=12))
    rows: dict[int, dict[str, int]] = {}  # row -> owner -> the last step in which it had it
    owners = {"short": short, "long": long, "late": late}
    while any(request.finish_reason is None for request in owners.values()):
        before = {name: request.row for name, request in owners.items()}
        engine.step()
        for name, request in owners.items():
            if row := request.row or before[name]:
                rows.setdefault(row, {})[name] = log.step
        log.step += 1
    assert {tuple(owners) for owners in rows.values()} == {("short", "late"), ("long",)}

    last_of_short = next(owned["short"] for owned in rows.values() if "short" in owned)
    row_of_late = next(row for row, owned in rows.items() if "late" in owned)
    written_again = [a.step for a in log.accesses if a.row == row_of_late and a.write and a.phase == "prefill"]
    assert len(written_again) == 2
    assert written_again[1] > last_of_short

    committed = dict.fromkeys(rows, 0)  # the cells that hold committed tokens
    tentative: dict[tuple[int, int], str] = {}  # cells behind them -> the step and phase that wrote them last
    reads_behind = 0
    for access in log.accesses:
        mark = f"step {access.step}, {access.phase}"
        row = access.row
        if access.phase == "prefill" and access.write:
            assert access.start == 0
            committed[row] = access.end
            tentative = {cell: who for cell, who in tentative.items() if cell[0] != row}
        elif access.phase == "commit" and access.write:
            assert access.start == committed[row]
            committed[row] = access.end
        elif access.write:
            assert access.start == committed[row]  # nobody overwrites a committed cell
            tentative.update({(row, cell): mark for cell in range(access.start, access.end)})
        else:
            for cell in range(max(access.start, committed[row]), access.end):
                assert tentative[row, cell] == mark
                reads_behind += 1
    assert (reads_behind > 0) == (page > 1 and spec.topk > 1)
    assert 0 not in rows  # the row of the padding


# --- the partial page ---------------------------------------------------------------------------------------------


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
    pool, table = worker_of(engine).draft.pool, engine.table.req_to_token
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
                draft_rows = cached(worker.draft, engine, request)[0, :, 0, 0].tolist()
                assert draft_rows == [[text[p], text[p + 1], p] for p in rows]
                looked_at += 1

    prompts, params = [[3, 1, 4], [2, 7, 1, 8, 2, 8, 1], [5]], SamplingParams(max_new_tokens=24)
    generations = engine.generate(prompts, params, observer)
    assert_same_output(Engine(TARGET).generate(prompts, params), generations)
    assert looked_at > 5
    assert_all_back(engine)


@pytest.mark.parametrize(
    "spec", PAGE_10_CELLS[3::4], ids=lambda s: f"N={s.num_draft_tokens} k={s.topk} page={s.page_size}"
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
                expected, _ = prefilled(worker.draft, request.all_ids[1:], hidden)
                torch.testing.assert_close(cached(worker.draft, engine, request), expected, rtol=1e-9, atol=1e-9)

    prompts, params = [[0, 5, 3], [0, 9, 1, 4, 4, 2]], SamplingParams(max_new_tokens=20)
    assert_same_output(Engine(target).generate(prompts, params), engine.generate(prompts, params, observer))


# --- chunks -------------------------------------------------------------------------------------------------------


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
        draft_rows.append(cached(worker_of(engine).draft, engine, request).clone())
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


# --- the prefix cache ---------------------------------------------------------------------------------------------


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
