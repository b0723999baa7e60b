"""Would the tests of serving see a fault? Each fault here is put in on purpose, in what pages, chunks, the prefix cache
and retraction brought, and must show: in the output, in the number of accepted drafts, or in what check() says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from serving import VOCAB, Visit, serve
from serving_faults import PAIRS, TREE, accept_lens_alone, what_shows
from torch import Tensor

import refspec.engine.scheduler as scheduling
import refspec.spec.commit
import refspec.spec.draft
import refspec.spec.extend
import refspec.workers.base
import refspec.workers.eagle_v1
from refspec import Engine, SamplingParams, SpecConfig
from refspec.engine.scheduler import Scheduler
from refspec.memory.allocator import SlotAllocator
from refspec.memory.prefix_cache import PrefixCache
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import Request, RunningBatch
from refspec.requests.sampling import BatchSampling
from refspec.workers.base import Worker

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


def sampled_output_changes() -> bool:
    """Does it matter to a sampled request that it is retracted?"""
    flat = ScriptedModel(lambda context: [float((7 * t + sum(context)) % 5) for t in range(VOCAB)], VOCAB)
    spec = SpecConfig(topk=2, num_steps=2, num_draft_tokens=5)
    came = [Visit([1, 2, i], SamplingParams(max_new_tokens=20, temperature=1.5, seed=i)) for i in range(3)]
    cold = [Engine(flat, flat, spec).generate([visit.prompt], visit.params)[0].token_ids for visit in came]
    engine = Engine(flat, flat, spec)

    def between(step: int) -> None:
        if step in (2, 4, 6) and engine.scheduler.running.requests:
            engine.scheduler.retract(engine.scheduler.running.requests[0])

    requests, _ = serve(engine, came, between)
    assert engine.stats.retractions == 3
    return [request.output_ids for request in requests] != cold


def test_nothing_shows_without_a_fault() -> None:
    assert what_shows() == set()
    assert not sampled_output_changes()


# --- pages --------------------------------------------------------------------------------------------------------


def partial_page_is_not_copied(patch: Patch) -> None:
    patch.setattr(refspec.spec.draft, "duplicate_prefix_tail", lambda *arguments: None)


def branches_read_the_copies_of_branch_0(patch: Patch) -> None:
    """Not their own, which are as good until branch 0 has more of its own in that page; so 0's slots too."""
    original = refspec.spec.draft.split_into_pages

    def split(*arguments: Any) -> Any:
        branches = original(*arguments)
        mask, copies = branches.sees_copy.clone(), branches.copies.clone()
        mask[:, 1:] = mask[:, :1]
        width = copies.shape[1] // TREE.topk
        copies[:, :width] = branches.slots[:, 1, :1]  # what stands there is not the prefix
        return branches._replace(copies=copies, sees_copy=mask)

    patch.setattr(refspec.spec.draft, "split_into_pages", split)


def shared_prefix_runs_into_the_partial_page(patch: Patch) -> None:
    """Its tokens are seen twice, there and among the copies."""
    original = refspec.spec.draft.split_into_pages

    def split(batch: RunningBatch, lens: list[int], *others: Any) -> Any:
        return original(batch, lens, *others)._replace(prefix_lens=lens)

    patch.setattr(refspec.spec.draft, "split_into_pages", split)


def compaction_moves_no_keys_and_values(patch: Patch) -> None:
    patch.setattr(refspec.spec.commit, "move_kv_cache", lambda *arguments: None)


def compaction_writes_before_it_has_read(patch: Patch) -> None:
    """Slot by slot, the last first: a target that is a later source too is overwritten."""
    original = refspec.spec.commit.move_kv_cache

    def move(pool: Any, dst: Tensor, src: Tensor) -> None:
        for i in reversed(range(len(dst))):
            original(pool, dst[i : i + 1], src[i : i + 1])

    patch.setattr(refspec.spec.commit, "move_kv_cache", move)


def compaction_forgets(name: str) -> Mutation:
    def mutate(patch: Patch) -> None:
        original = refspec.spec.commit.compact

        def compact(verified: Any, *others: Any) -> Any:
            kept = getattr(verified, name)
            front = original(verified, *others)
            setattr(verified, name, kept)
            return front

        patch.setattr(refspec.spec.commit, "compact", compact)

    mutate.__name__ = f"compaction_forgets_{name}"
    return mutate


def no_compaction(patch: Patch) -> None:
    patch.setattr(refspec.spec.commit, "compact", lambda verified, kept_rows, *others: kept_rows)


def pages_of_kept_tokens_are_freed(patch: Patch) -> None:
    patch.setattr(refspec.spec.commit, "align_evict_mask_to_page_size", lambda *arguments: None)


def new_tokens_never_fill_a_begun_page(patch: Patch) -> None:
    original = SlotAllocator.alloc_extend

    def alloc(self: SlotAllocator, prefix_lens: Any, seq_lens: Any, last_slots: Tensor) -> Tensor:
        whole = [-(-n // self.page_size) * self.page_size for n in prefix_lens]
        ends = [w + end - n for w, end, n in zip(whole, seq_lens, prefix_lens, strict=True)]
        return original(self, whole, ends, last_slots)

    patch.setattr(SlotAllocator, "alloc_extend", alloc)


# --- chunks -------------------------------------------------------------------------------------------------------


def last_row_of_a_chunk_is_fed_the_targets_answer(patch: Patch) -> None:
    """Not the prompt's next token."""
    original = refspec.workers.eagle_v1.extend_after_prefill

    def extend(batch: RunningBatch, *others: Any) -> RunningBatch:
        with pytest.MonkeyPatch.context() as inner:
            whole = Request.all_ids.fget  # type: ignore[attr-defined]

            def all_ids(request: Request) -> list[int]:
                ids = list(whole(request))
                if request.unread_len:
                    ids[request.kv_len] = (ids[request.kv_len] + 1) % VOCAB
                return ids

            inner.setattr(Request, "all_ids", property(all_ids))
            return original(batch, *others)

    patch.setattr(refspec.workers.eagle_v1, "extend_after_prefill", extend)


def a_chunk_is_read_from_the_start_again(patch: Patch) -> None:
    original = Worker.prefill_target

    def prefill(self: Worker, batch: RunningBatch) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                Request, "read_ids", property(lambda r: [*r.prompt_ids[: r.kv_len], *(r.prompt_ids + r.output_ids)])
            )
            return original(self, batch)

    patch.setattr(Worker, "prefill_target", prefill)


def a_prompt_begun_gets_a_token(patch: Patch) -> None:
    """Who has read a chunk counts as one who has read it all."""
    original = Scheduler._sort_readers

    def sort(self: Scheduler, going_on: RunningBatch) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Request, "unread_len", 0)
            original(self, going_on)

    patch.setattr(Scheduler, "_sort_readers", sort)


# --- prefix cache -------------------------------------------------------------------------------------------------


def rows_that_nobody_wrote_are_cached(patch: Patch) -> None:
    """The last block of a finished request, of which the draft has no rows."""
    original = Scheduler._release

    def release(self: Scheduler, request: Request) -> None:
        request.written_len = request.kv_len
        original(self, request)

    patch.setattr(Scheduler, "_release", release)


def keys_are_single_tokens(patch: Patch) -> None:
    original = PrefixCache.__init__

    def init(self: PrefixCache, allocator: SlotAllocator, reads_ahead: int) -> None:
        original(self, allocator, reads_ahead=0)

    patch.setattr(PrefixCache, "__init__", init)


def lock_is_dropped_before_the_insert(patch: Patch) -> None:
    """And eviction takes its chance in between."""
    original = Scheduler._insert

    def insert(self: Scheduler, request: Request, slots: Tensor) -> tuple[int, int]:
        assert self.cache is not None
        assert request.cache_node is not None
        self.cache.dec_lock_ref(request.cache_node)
        self.cache.evict(self.cache.evictable_size)
        answer = original(self, request, slots)
        request.cache_node = self.cache.match_prefix(self._cache_ids(request)[: request.cached_len + 1]).node
        self.cache.inc_lock_ref(request.cache_node)
        return answer

    patch.setattr(Scheduler, "_insert", insert)


def a_match_is_not_locked(patch: Patch) -> None:
    patch.setattr(PrefixCache, "inc_lock_ref", lambda self, node: None)
    patch.setattr(PrefixCache, "dec_lock_ref", lambda self, node: None)


def locks_are_kept(patch: Patch) -> None:
    patch.setattr(PrefixCache, "dec_lock_ref", lambda self, node: None)


def cached_slots_are_freed_with_the_request(patch: Patch) -> None:
    original = Scheduler._insert

    def insert(self: Scheduler, request: Request, slots: Tensor) -> tuple[int, int]:
        had, _ = original(self, request, slots)
        return had, had

    patch.setattr(Scheduler, "_insert", insert)


def slots_that_others_had_inserted_are_lost(patch: Patch) -> None:
    original = Scheduler._insert

    def insert(self: Scheduler, request: Request, slots: Tensor) -> tuple[int, int]:
        _, end = original(self, request, slots)
        return request.cached_len, end

    patch.setattr(Scheduler, "_insert", insert)


def the_table_keeps_a_requests_own_slots_when_the_caches_are_used(patch: Patch) -> None:
    original = Scheduler._publish

    def publish(self: Scheduler, request: Request) -> None:
        own = self.table.req_to_token[request.row].clone()
        original(self, request)
        self.table.req_to_token[request.row] = own

    patch.setattr(Scheduler, "_publish", publish)


def eviction_comes_after_the_snapshot(patch: Patch) -> None:
    """In the middle of a round, between the draft's backup and its restore."""
    original = refspec.workers.eagle_v1.draft

    def draft(batch: RunningBatch, runner: Any, allocator: SlotAllocator, *others: Any) -> Any:
        cache = caches.get(allocator)
        restore = allocator.restore_state

        def late(state: Any) -> None:
            if cache:
                cache.evict(4)
            restore(state)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(allocator, "restore_state", late)
            return original(batch, runner, allocator, *others)

    caches: dict[SlotAllocator, PrefixCache] = {}
    init = PrefixCache.__init__

    def remember(self: PrefixCache, allocator: SlotAllocator, reads_ahead: int) -> None:
        init(self, allocator, reads_ahead)
        caches[allocator] = self

    patch.setattr(PrefixCache, "__init__", remember)
    patch.setattr(refspec.workers.eagle_v1, "draft", draft)


def the_matched_prefix_is_not_entered_in_the_table(patch: Patch) -> None:
    original = Scheduler._admit

    def admit(self: Scheduler, request: Request, *others: Any) -> int:
        done = original(self, request, *others)
        if done:
            self.table.req_to_token[request.row, : request.cached_len] = 0
        return done

    patch.setattr(Scheduler, "_admit", admit)


# --- retraction, abort --------------------------------------------------------------------------------------------


def the_pending_token_is_chosen_anew(patch: Patch) -> None:
    """The target's answer to the re-read text, which for a sampled request is another draw, replaces it."""
    original = Worker.prefill_target

    def prefill(self: Worker, batch: RunningBatch) -> Any:
        retracted = [request for request in batch.requests if request.output_ids]
        answer = original(self, batch)
        for request in retracted:
            if not request.unread_len:
                request.output_ids[-1] = (request.output_ids[-1] + 1) % VOCAB
        newest = [request.output_ids[-1] if request.output_ids else 0 for request in batch.requests]
        batch.bonus_tokens = torch.tensor(newest)
        return answer

    patch.setattr(Worker, "prefill_target", prefill)


def the_pending_token_is_drawn_again(patch: Patch) -> None:
    """With the coin of a first token."""
    original, next_tokens = Worker.prefill_target, BatchSampling.next_tokens

    def prefill(self: Worker, batch: RunningBatch) -> Any:
        drawn: list[int] = []

        def draw(*arguments: Any) -> Tensor:
            tokens = next_tokens(*arguments)
            drawn.extend(tokens.tolist())
            return tokens

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BatchSampling, "next_tokens", draw)
            answer = original(self, batch)
        for request, token in zip(batch.requests, drawn, strict=True):
            if not request.unread_len:
                request.output_ids[-1] = token
        batch.bonus_tokens = torch.tensor([(request.output_ids or [0])[-1] for request in batch.requests])
        return answer

    patch.setattr(Worker, "prefill_target", prefill)


def the_newest_token_is_read_too(patch: Patch) -> None:
    patch.setattr(Request, "read_ids", property(lambda request: request.prompt_ids + request.output_ids))
    patch.setattr(
        Request,
        "unread_len",
        property(lambda request: max(0, len(request.prompt_ids + request.output_ids) - request.kv_len)),
    )


def only_the_prompt_is_read_again(patch: Patch) -> None:
    patch.setattr(Request, "unread_len", property(lambda request: max(0, len(request.prompt_ids) - request.kv_len)))


def a_retracted_request_keeps_its_length(patch: Patch) -> None:
    original = Scheduler.retract

    def retract(self: Scheduler, request: Request) -> None:
        kv_len = request.kv_len
        original(self, request)
        request.kv_len = kv_len

    patch.setattr(Scheduler, "retract", retract)
    patch.setattr(
        scheduling.Scheduler, "_admit", _admit_without_reset(scheduling.Scheduler._admit)
    )  # which would repair it


def _admit_without_reset(original: Any) -> Any:
    def admit(self: Scheduler, request: Request, *others: Any) -> int:
        kv_len = request.kv_len
        done: int = original(self, request, *others)
        if done and request.retractions:
            request.kv_len = max(kv_len, request.kv_len)
        return done

    return admit


def a_retracted_request_stays_in_the_batch(patch: Patch) -> None:
    original = Scheduler._withdraw

    def withdraw(self: Scheduler, request: Request) -> None:
        running = self.running
        original(self, request)
        if request in running.requests:
            self.running = running

    patch.setattr(Scheduler, "_withdraw", withdraw)


def the_batch_is_cut_to_the_first_rows(patch: Patch) -> None:
    """The requests that stay are right, what the device knows of them is the first rows'."""
    original = RunningBatch.keep

    def keep(self: RunningBatch, rows: list[int]) -> RunningBatch:
        kept = original(self, rows)
        if kept is self or not self.draft_input:
            return kept
        kept.bonus_tokens = self.bonus_tokens[: len(rows)]
        return kept

    patch.setattr(RunningBatch, "keep", keep)


def an_aborted_request_keeps_its_slots(patch: Patch) -> None:
    original = Scheduler._end

    def end(self: Scheduler, request: Request, reason: str) -> None:
        if reason == "abort" and request.finish_reason is None:
            request.finish_reason = reason
            return
        original(self, request, reason)

    patch.setattr(Scheduler, "_end", end)


def rounds_are_given_no_room(patch: Patch) -> None:
    patch.setattr(Scheduler, "_make_room_for_a_round", lambda self: None)


FAULTS: list[Mutation] = [
    partial_page_is_not_copied,
    branches_read_the_copies_of_branch_0,
    shared_prefix_runs_into_the_partial_page,
    compaction_moves_no_keys_and_values,
    compaction_writes_before_it_has_read,
    compaction_forgets("predict"),
    compaction_forgets("hidden_states"),
    no_compaction,
    pages_of_kept_tokens_are_freed,
    new_tokens_never_fill_a_begun_page,
    last_row_of_a_chunk_is_fed_the_targets_answer,
    a_chunk_is_read_from_the_start_again,
    a_prompt_begun_gets_a_token,
    rows_that_nobody_wrote_are_cached,
    keys_are_single_tokens,
    lock_is_dropped_before_the_insert,
    a_match_is_not_locked,
    locks_are_kept,
    cached_slots_are_freed_with_the_request,
    slots_that_others_had_inserted_are_lost,
    the_table_keeps_a_requests_own_slots_when_the_caches_are_used,
    eviction_comes_after_the_snapshot,
    the_matched_prefix_is_not_entered_in_the_table,
    the_pending_token_is_chosen_anew,
    the_newest_token_is_read_too,
    only_the_prompt_is_read_again,
    a_retracted_request_keeps_its_length,
    a_retracted_request_stays_in_the_batch,
    the_batch_is_cut_to_the_first_rows,
    an_aborted_request_keeps_its_slots,
    rounds_are_given_no_room,
]
# Four are so bad that nothing runs. Of all others a result must be wrong: an exception does not count.
CRASHES: dict[Mutation, tuple[type[Exception], str]] = {
    no_compaction: (ValueError, "evict_mask keeps a row behind an evicted one"),
    keys_are_single_tokens: (ValueError, "7 slots for a key of 8 tokens"),
    the_newest_token_is_read_too: (RuntimeError, "equal size"),
    only_the_prompt_is_read_again: (IndexError, "out of range"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_shows(fault: Mutation, monkeypatch: Patch) -> None:
    for name in PAIRS:
        accept_lens_alone(name)  # before the fault
    fault(monkeypatch)
    if fault in CRASHES:
        error, words = CRASHES[fault]
        with pytest.raises(error, match=words):
            what_shows()
    else:
        assert what_shows() - {"nothing happened"}


def test_a_second_draw_of_the_pending_token_shows(monkeypatch: Patch) -> None:
    """A greedy request's would be the same."""
    the_pending_token_is_drawn_again(monkeypatch)
    assert what_shows() == set()
    assert sampled_output_changes()
