"""Who runs next: first come, first served, and nobody is let in who might not get to the end.

A request is admitted when the pool has room for all that it and the running ones can come to need: every token of
their outputs, and the slots of one round for each. So a running request never has to be thrown out again.
"""

from __future__ import annotations

from collections import deque

import torch

from refspec.contracts import ForwardMode
from refspec.memory.allocator import IntegrityError, SlotAllocator
from refspec.memory.req_table import ReqTable
from refspec.requests.request import Request, RunningBatch
from refspec.workers.base import Observer, Worker


class Scheduler:
    """A queue, and the batch that runs. See the module's docstring."""

    def __init__(self, worker: Worker, allocator: SlotAllocator, table: ReqTable, max_running: int) -> None:
        self.worker, self.allocator, self.table, self.max_running = worker, allocator, table, max_running
        self.waiting: deque[Request] = deque()
        self.running = RunningBatch.of([], table.req_to_token)
        self.in_step = False

    def slots_needed(self, request: Request) -> int:
        """The most that a request can hold at one time."""
        return request.max_kv_len + self.worker.slots_per_round

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self, observer: Observer | None = None) -> None:
        """Prefill what can be admitted; where nothing can, one decode step of what runs.

        Requests that finish are released before it returns. If the step raises, the pool is as sound as before it,
        and every request, running or waiting, is aborted. Raises RuntimeError when called from inside a step.
        """
        if self.in_step:
            raise RuntimeError("the engine is in the middle of a step: an observer may look, but not decode")
        self.in_step = True
        try:
            self._step(observer)
        finally:
            self.in_step = False

    def _step(self, observer: Observer | None) -> None:
        # region choose_mode
        admitted = self._admit()
        if admitted:
            batch, mode = RunningBatch.of(admitted, self.table.req_to_token), ForwardMode.EXTEND
        elif self.running.requests:
            batch, mode = self.running, ForwardMode.DECODE
        else:
            return
        # endregion choose_mode
        state, kv_lens = self.allocator.backup_state(), batch.prefix_lens
        try:
            going_on = self.worker.forward(batch, mode, observer)
        except BaseException:
            self.allocator.restore_state(state)
            for request, kv_len in zip(batch.requests, kv_lens, strict=True):
                request.kv_len = kv_len
            for request in [*admitted, *self.running.requests, *self.waiting]:
                self._end(request, "abort")
            self.waiting.clear()
            self.running = RunningBatch.of([], self.table.req_to_token)
            raise
        for request in batch.requests:
            if request.finish_reason:
                self._release(request)
        self.running = self.running.merge(going_on) if admitted else going_on

    def abort(self, request: Request) -> None:
        """End a request that waits or runs, at any time between two steps. One that has finished is left alone.

        Raises RuntimeError for a request that is in the middle of a step.
        """
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running.requests:
            if self.in_step:
                raise RuntimeError("the request is in the middle of a step: end it when the step is over")
            self.running = self.running.keep(
                [r for r, other in enumerate(self.running.requests) if other is not request]
            )
        self._end(request, "abort")

    def check(self) -> None:
        """Every slot is free or holds a committed token of one running request, every row of the request table is
        free or one request's. Raises IntegrityError.
        """
        rows = sorted([*self.table.free_rows, *(request.row for request in self.running.requests)])
        if rows != list(range(1, len(self.table.req_to_token))):
            raise IntegrityError(f"rows of the request table that are free or owned: {rows}, there should be all, once")
        self.allocator.check((f"request {r.index}", self._slots_of(r)) for r in self.running.requests)

    def _admit(self) -> list[Request]:
        reserved = sum(self.slots_needed(request) for request in self.running.requests)
        admitted: list[Request] = []
        while self.waiting and len(self.running) + len(admitted) < self.max_running:
            reserved += self.slots_needed(self.waiting[0])
            if reserved > self.allocator.size:
                break
            request = self.waiting.popleft()
            request.row = self.table.alloc()
            admitted.append(request)
        return admitted

    def _end(self, request: Request, reason: str) -> None:
        if request.finish_reason is None:
            request.finish_reason = reason
        self._release(request)

    def _release(self, request: Request) -> None:
        if request.row:
            self.allocator.free(self._slots_of(request))
            self.table.free(request.row)
            request.row = request.kv_len = 0

    def _slots_of(self, request: Request) -> torch.Tensor:
        return self.table.req_to_token[request.row, : request.kv_len]
