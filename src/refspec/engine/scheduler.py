"""Who runs next, and on whose slots.

Requests come and go at any step. A step is one of two things: an EXTEND, in which prompts are read, or a DECODE, one
round of all requests that have read theirs. The rules:

1. A request that waits is admitted, in the order of arrival, as soon as there is room for what it has to read and for
   one round of all, itself included. None reserves room for its whole output: most end earlier than they may.
2. At most chunk_size tokens are read in one step. A prompt that is longer is read over several, and a round of the
   others comes between two of them, so that nobody waits for a long prompt from its first token to its last.
3. With a prefix cache, a prompt is read from where the longest cached prefix ends; whatever a request leaves behind
   goes into the cache, and is evicted from there, the least recently used first, when slots are needed.
4. If there is no room for the next round even so, requests are *retracted*: their slots are taken back, and they wait
   again, in the order of their arrival, with the tokens they have. When one is readmitted it reads these like a prompt,
   all but the newest, and goes on. The last one that decodes stays; a prompt that is half read goes in its place, so
   that there is a round. If nobody is left to retract, the request that fills the pool alone ends, "out_of_slots".

5. Where the worker can, a round is launched before the results of the last one are looked at. Until they are, a
   request's length is known by an upper bound only, and room is counted by that. Who turns out to have ended is in one
   round more, whose tokens are dropped, and keeps its slots until that round is over. If there is no room for the next
   round, the last one's results are looked at first.

That this comes to an end: a round follows every retraction, and every admission too (rule 1), and brings each of its
requests a token at least. Tokens are never lost.

Source: SGLang: python/sglang/srt/managers/scheduler.py:Scheduler.get_next_batch_to_run, schedule_policy.py:PrefillAdder
and schedule_batch.py:ScheduleBatch.retract_decode @v0.5.5. There a running request counts with a share of the output it
may still bring (new_token_ratio: estimated anew at a retraction, and a little less with every round without one); what
a retracted one has written is not kept for it; and a chunk follows a chunk, without a round between them, unless chunks
and rounds are mixed in one forward. Retracted is the request with the least output, of equals the one with the longer
prompt; with speculation the last in the batch, since that could only be cut from behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import torch

from refspec.contracts import ForwardMode
from refspec.memory.allocator import IntegrityError, SlotAllocator
from refspec.memory.prefix_cache import PrefixCache
from refspec.memory.req_table import ReqTable
from refspec.requests.request import Request, RunningBatch
from refspec.workers.base import Observer, RoundInFlight, Worker

# Who is retracted: of those that hold slots, the one with the largest key.
RetractionPolicy = Callable[[Request], tuple[int, ...]]
RETRACTION_POLICIES: dict[str, RetractionPolicy] = {
    "newest": lambda request: (request.arrival,),
    "largest": lambda request: (request.kv_len - request.cached_len, request.arrival),  # gives most slots at once
    "least_output": lambda request: (-len(request.output_ids), len(request.prompt_ids), request.arrival),
}


class Scheduler:
    """The queue, the batch that runs, and the prompt that is being read in chunks. See the module's docstring.

    cache: finished prefixes; None: every request reads its whole prompt. chunk_size: tokens read in one step; None: any
    number. retraction_policy: which of those that hold slots goes first when they run out.
    """

    def __init__(
        self,
        worker: Worker,
        allocator: SlotAllocator,
        table: ReqTable,
        max_running: int,
        cache: PrefixCache | None = None,
        chunk_size: int | None = None,
        retraction_policy: RetractionPolicy = RETRACTION_POLICIES["newest"],
    ) -> None:
        self.worker, self.allocator, self.table, self.max_running = worker, allocator, table, max_running
        self.cache, self.chunk_size, self.retraction_policy = cache, chunk_size, retraction_policy
        self.waiting: list[Request] = []  # by arrival
        self.running = RunningBatch.of([], table.req_to_token)
        self.chunked: Request | None = None  # has read a part of its prompt
        self.round_is_due = False  # before the next chunk
        self.in_flight: RoundInFlight | None = None  # was launched, and nobody has looked at its results
        self.leaving: list[Request] = []  # have ended, but their slots may still be written by the round in flight
        self.refused: Request | None = None  # found no room; is not asked again before something is released
        self.in_step = False
        self.arrivals = count()

    # --- use ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue."""
        request.arrival = next(self.arrivals)
        self.waiting.append(request)

    def step(self, observer: Observer | None = None) -> None:
        """Read what can be admitted; where nothing can, one round of what runs.

        Requests that finish are released before it returns. If the step raises, the pool is as sound as before it,
        and every request, running or waiting, is aborted. Raises RuntimeError when called from inside a step.
        """
        if self.in_step:
            raise RuntimeError("the engine is in the middle of a step: an observer may look, but not decode")
        try:
            self.in_step = True
            self._step(observer)
        except BaseException:
            # Most have been ended where it happened; but a Ctrl-C may come between any two lines.
            self._give_up({*self._holders(), *self.waiting})
            raise
        finally:
            self.in_step = False

    def abort(self, request: Request) -> None:
        """End a request that waits or runs, at any time between two steps. One that has finished is left alone.

        Its slots are free at once, or, where a round that may write them is in flight, when that is over. Raises
        RuntimeError for a request that is in the middle of a step.
        """
        if request.finish_reason is None and request.row and self.in_step:
            raise RuntimeError("the request is in the middle of a step: end it when the step is over")
        self._withdraw(request)
        self._end(request, "abort")
        if not self.in_step:
            self._look_if_nobody_runs()

    def slots_to_start(self, prompt_len: int) -> int:
        """The fewest slots with which a request can begin: those of its prompt, and of one round behind it."""
        prompt = self.allocator.slots_to_extend([0], [prompt_len])
        return prompt + self.worker.slots_for_round([prompt_len])

    def check(self) -> None:
        """Every slot is free, or one request's, for a committed token or rounds to come, or the prefix cache's; every
        row of the request table is free or one request's; the cache is sound, and locked by those who read it; nobody
        waits for a round that is not in flight. Raises IntegrityError.
        """
        holders = self._holders()
        rows = sorted([*self.table.free_rows, *(request.row for request in holders)])
        if rows != list(range(1, len(self.table.req_to_token))):
            raise IntegrityError(f"rows of the request table that are free or owned: {rows}, there should be all, once")
        owners = [(f"request {r.index}", self._held_slots_of(r)[r.cached_len :]) for r in holders]
        if self.cache:
            owners.append(("the prefix cache", self.cache.held_slots()))
            self.cache.check(r.cache_node for r in holders if r.cache_node is not None)
            for request in holders:
                self._check_shared(request)
        self.allocator.check(owners)
        in_flight = self.in_flight.requests if self.in_flight else []
        for request in holders:
            if request.in_flight_tokens and request not in in_flight:
                raise IntegrityError(f"request {request.index} waits for a round that is not in flight")

    # --- one step -----------------------------------------------------------------------------------------------

    def _step(self, observer: Observer | None) -> None:
        # region choose_mode
        mode, overlaps = ForwardMode.EXTEND, False
        batch = self._batch_to_extend()
        if not batch:
            overlaps = self._can_overlap()
            self._make_room_for_a_round()
            batch, mode = self.running, ForwardMode.DECODE
        if not batch:
            return
        # endregion choose_mode
        if overlaps:
            self._round_ahead(observer)
        else:
            with self._undone_if_it_fails(batch.requests):
                going_on = self.worker.forward(batch, mode, observer)
            self._take_note(batch.requests)
            if mode is ForwardMode.EXTEND:
                self._sort_readers(going_on)
            else:
                self.running = going_on
        self.round_is_due = mode is ForwardMode.EXTEND and self.chunked is not None
        self._look_if_nobody_runs()

    def _round_ahead(self, observer: Observer | None) -> None:
        """Launch the next round of all that run; then look at the results of the last one, which it reads as well."""
        before = self.in_flight
        with self._undone_if_it_fails(self.running.requests):
            self.running, self.in_flight = self.worker.launch(self.running, observer)
        if before:
            self._look_at(before)

    def _look_at(self, in_flight: RoundInFlight) -> None:
        """Wait for a round, and let its requests have their tokens; who ends with them, leaves."""
        for request, row in zip(in_flight.requests, in_flight.rows, strict=True):
            if request.row != row:
                raise IntegrityError(f"request {request.index} gave up its slots, but a round in flight may write them")
        with self._undone_if_it_fails(in_flight.requests):
            self.worker.collect(in_flight)
        self._take_note(in_flight.requests)
        self.running = self.running.keep(self.running.going_on())

    def _look_at_last(self) -> None:
        if self.in_flight:
            in_flight, self.in_flight = self.in_flight, None
            self._look_at(in_flight)

    def _look_if_nobody_runs(self) -> None:
        """Nothing will be launched any more that the round in flight could overlap with."""
        if not self.running:
            self._look_at_last()

    def _can_overlap(self) -> bool:
        """Can a round be launched now? One whose requests the host has to follow token by token waits for the last."""
        if self.worker.can_overlap(self.running):
            return True
        self._look_at_last()
        return False

    @contextmanager
    def _undone_if_it_fails(self, requests: Sequence[Request]) -> Iterator[None]:
        """If what is inside raises, its slots and its requests' tokens are as before, and everybody is aborted."""
        state, marks = self.allocator.backup_state(), [request.mark() for request in requests]
        try:
            yield
        except BaseException:
            self.allocator.restore_state(state)
            for request, mark in zip(requests, marks, strict=True):
                request.go_back(mark)
            self._give_up({*requests, *self._holders(), *self.waiting})
            raise

    def _take_note(self, requests: Sequence[Request]) -> None:
        """After a step of these: what is written now, and who has ended."""
        for request in requests:
            if request.row:
                request.written_len = self.worker.written_len(request)
                if request.finish_reason:
                    self._release(request)

    def _batch_to_extend(self) -> RunningBatch | None:
        """Who reads in this step, and how much: first the prompt that is begun, then whom there is room to admit."""
        if self.round_is_due and self.running:
            return None
        left = self.chunk_size or sys.maxsize
        requests: list[Request] = []
        lens: list[int] = []
        if self.chunked:
            lens.append(min(left, self.chunked.unread_len))
            if not self._make_available(self._slots_to_read(self.chunked, lens[0])):
                return None
            requests.append(self.chunked)
            left -= lens[0]
        claimed = self._slots_to_admit(requests) if self.waiting else 0
        while self.waiting and left and len(self.running) + len(self.leaving) + len(requests) < self.max_running:
            request = self.waiting[0]
            if request is self.refused or not (claimed := self._admit(request, requests, claimed)):
                break
            del self.waiting[0]
            requests.append(request)
            lens.append(min(left, request.unread_len))
            left -= lens[-1]
        return RunningBatch.of(requests, self.table.req_to_token, lens) if requests else None

    def _admit(self, request: Request, admitted: list[Request], claimed: int) -> int:
        """Give a request a row and its cached prefix, if there is room beside those `admitted` in this step already.

        claimed: slots that these, and a round of all, need at most. Returns the same with the request among them; 0 if
        there is no room. If nobody is there whose end would make room, the request itself ends, "out_of_slots".
        """
        slots, node = self.table.req_to_token[0, :0], None
        if self.cache:
            # A target alone needs its answer after the last token. Where rows depend on tokens after their own, these
            # are part of the cache's keys, and the last token, which has none after it, is never found.
            ids = request.read_ids
            slots, node = self.cache.match_prefix(ids if self.worker.reads_ahead else ids[:-1])
            self.cache.inc_lock_ref(node)
        request.kv_len = request.written_len = request.cached_len = len(slots)
        request.cache_node = node
        # A round of several takes no more than theirs together; only where that is too much, all are counted anew.
        claimed += self._slots_to_read(request, request.unread_len)
        claimed += self.worker.slots_for_round([request.kv_len + request.unread_len])
        if claimed > self.allocator.available():
            claimed = self._slots_to_admit([*admitted, request])
        if self._make_available(claimed):
            request.row = self.table.alloc()
            self.table.req_to_token[request.row, : len(slots)] = slots
            request.found_tokens += len(slots)
            self.worker.stats.cached_tokens += len(slots)
            return claimed
        if self.cache and node:
            self.cache.dec_lock_ref(node)
        request.forget_slots()
        if admitted or self._holders():
            self.refused = request
        else:
            self.waiting.remove(request)
            self._end(request, "out_of_slots")
        return 0

    def _sort_readers(self, going_on: RunningBatch) -> None:
        """After an EXTEND: who has read all of it runs from now on; who has not is `chunked`."""
        done = [r for r, request in enumerate(going_on.requests) if not request.unread_len]
        unread = [request for request in going_on.requests if request.unread_len]
        self.chunked = unread[0] if unread else None
        for r in done:
            self._publish(going_on.requests[r])
        self.running = self.running.merge(going_on.keep(done))

    # --- room ---------------------------------------------------------------------------------------------------

    def _make_room_for_a_round(self) -> None:
        """Evict and retract until the next round of all that still run finds its slots."""
        while not self._make_available(self.worker.slots_for_round(self.running.prefix_lens, self.running.held_lens)):
            holders = self._holders()
            if self.in_flight:
                self._look_at_last()  # some may have ended, and the others' lengths are known then
            elif len(holders) == 1:
                self._withdraw(holders[0])
                self._end(holders[0], "out_of_slots")
            elif self.chunked and len(self.running) == 1:  # a round follows every retraction: somebody must be left
                self.retract(self.chunked)
            else:
                self.retract(max(holders, key=self.retraction_policy))

    def retract(self, request: Request) -> None:
        """Take a request's slots back and let it wait again. What it has written stays in the prefix cache, for now.

        A round in flight is looked at before, and the request may end with it: then it is not retracted.
        """
        self._look_at_last()
        if request.finish_reason:
            return
        self._withdraw(request)
        self._release(request)
        request.retractions += 1
        self.worker.stats.retractions += 1
        self.waiting.append(request)
        self.waiting.sort(key=lambda other: other.arrival)

    def _make_available(self, slots: int) -> bool:
        """See to it that so many slots are free, by eviction if need be; False, with nothing evicted, if it cannot."""
        missing = slots - self.allocator.available()
        if missing > 0 and self.cache and self.cache.evictable_size >= missing:
            self.worker.stats.evicted_tokens += self.cache.evict(missing)
        return slots <= self.allocator.available()

    def _slots_to_read(self, request: Request, length: int) -> int:
        return self.allocator.slots_to_extend([request.kv_len], [request.kv_len + length])

    def _slots_to_admit(self, readers: list[Request]) -> int:
        """Room for all that these have to read, and for a round of everybody after that."""
        unread = sum(self._slots_to_read(request, request.unread_len) for request in readers)
        lens_then = [request.kv_len + request.unread_len for request in readers]
        return unread + self.worker.slots_for_round(
            [*self.running.prefix_lens, *lens_then], [*self.running.held_lens, *lens_then]
        )

    # --- leaving ------------------------------------------------------------------------------------------------

    def _holders(self) -> list[Request]:
        """Requests with slots, between two steps."""
        return [*self.running.requests, *([self.chunked] if self.chunked else []), *self.leaving]

    def _withdraw(self, request: Request) -> None:
        """Take a request out of wherever it stands, its slots still with it."""
        if request is self.refused:
            self.refused = None
        if request in self.waiting:
            self.waiting.remove(request)
        elif request is self.chunked:
            self.chunked = None
        elif request in self.running.requests:
            self.running = self.running.keep(
                [r for r, other in enumerate(self.running.requests) if other is not request]
            )

    def _end(self, request: Request, reason: str) -> None:
        if request.finish_reason is None:
            request.finish_reason = reason
        self._release(request)

    def _give_up(self, requests: set[Request]) -> None:
        """After a failure: nobody goes on, and nothing that they wrote is trusted."""
        self.waiting.clear()
        self.running, self.chunked, self.in_flight = RunningBatch.of([], self.table.req_to_token), None, None
        for request in requests:
            request.written_len, request.in_flight_tokens = request.cached_len, 0
            self._end(request, "abort")

    def _release(self, request: Request) -> None:
        """Give a request's row and slots back; what it has written goes to the prefix cache.

        Its tokens, by the three lengths that it keeps, and who has their slots afterwards:

            0 ......... cached_len ......... written_len ......... held_len
              the cache's         now the cache's       free again

        While a round is in flight that may write them, the request keeps them, and is `leaving`.
        """
        if not request.row:
            return
        if request.in_flight_tokens:
            if request not in self.leaving:
                self.leaving.append(request)
            return
        if request in self.leaving:
            self.leaving.remove(request)
        self.refused = None
        slots, end = self._held_slots_of(request), request.cached_len
        if self.cache:
            assert request.cache_node is not None
            had, end = self._insert(request, slots)
            self.allocator.free(slots[request.cached_len : had])  # others have inserted the same meanwhile
            self.cache.dec_lock_ref(request.cache_node)
        self.allocator.free(slots[end:])
        self.table.free(request.row)
        request.row = 0
        request.forget_slots()

    def _publish(self, request: Request) -> None:
        """Let others share what a request has read while it goes on: from now on these slots are the cache's."""
        if not self.cache:
            return
        assert request.cache_node is not None
        self.refused = None  # it may find this now
        slots = self._slots_of(request)
        had, end = self._insert(request, slots)
        if end > request.cached_len:
            match = self.cache.match_prefix(self._cache_ids(request))
            self.cache.inc_lock_ref(match.node)
            self.cache.dec_lock_ref(request.cache_node)
            self.allocator.free(slots[request.cached_len : had])
            self.table.req_to_token[request.row, :end] = match.slots
            request.cached_len, request.cache_node = end, match.node

    def _insert(self, request: Request, slots: torch.Tensor) -> tuple[int, int]:
        """(how many leading slots the cache had, how many it has now). Only rows that all models have written count."""
        assert self.cache is not None
        ids = self._cache_ids(request)
        return self.cache.insert(ids, slots), self.cache.cacheable_len(len(ids))

    def _cache_ids(self, request: Request) -> list[int]:
        """The written tokens, and those after them that are part of their keys."""
        return request.all_ids[: request.written_len + self.worker.reads_ahead]

    def _slots_of(self, request: Request) -> torch.Tensor:
        return self.table.req_to_token[request.row, : request.kv_len]

    def _held_slots_of(self, request: Request) -> torch.Tensor:
        """Those behind its committed tokens among them, which were reserved for rounds to come."""
        return self.table.req_to_token[request.row, : request.held_len]

    def _check_shared(self, request: Request) -> None:
        """The leading entries of a request's row are the slots of the prefix that it locks. Raises IntegrityError."""
        assert self.cache is not None
        shared = self._slots_of(request)[: request.cached_len].tolist()
        if request.cache_node is None or self.cache.slots_above(request.cache_node).tolist() != shared:
            raise IntegrityError(f"request {request.index} reads {shared}, which are not the prefix that it has locked")
