"""One round of speculation that nobody waits for.

In v1 the host looks at what a round accepted, frees the rest, and launches what comes next; meanwhile the device does
nothing. Here the host launches round r + 1 while the device is at round r, and looks at the results of r afterwards.
So a round must be launched without knowing what the last one accepted:

- **Lengths, tokens and hidden states stay on the device.** What round r leaves in the batch, round r + 1 reads, in the
  order of launches. The host knows of each length how large it is at most.
- **Slots are reserved ahead**, behind that bound, and stay the request's: none are given back in a round, nor taken for
  the tree anew. Draft, tree and extend use the same positions, one after the other. What a round has left over, the
  next one need not reserve.
- **Shapes are the same whatever was accepted.** The extend runs all N rows of each request, those behind the accepted
  ones for nothing. And since a token's slot is now its position's, the accepted path has to *move*: to the front of its
  N rows, keys and values, `predict` and hidden states. On a chain it stands there already.
- **Who ends is known one round late.** That request's part of the round in flight is dropped, and its slots stay its
  own until the round is over.

    host     launch r     look at r-1     launch r+1     look at r      launch r+2  ...
    device   | round r-1 | round r                | round r+1                | round r+2

Results come to the host as `Futures`, which it must wait for. Requests whose next token depends on what the host makes
of the last one (a grammar, penalties) cannot go ahead: see `can_overlap`.

Source: SGLang: python/sglang/srt/speculative/eagle_worker_v2.py:EAGLEWorkerV2.forward_batch_generation,
eagle_worker_common.py and managers/scheduler.py:Scheduler.event_loop_overlap @0.5.23
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refspec.contracts import Candidates, CommitOutput, ForwardMode, VerifyInput, VerifyOutput
from refspec.kernels import (
    assign_extend_cache_locs,
    assign_req_to_token,
)
from refspec.memory.to_device import to_device
from refspec.requests.finish import append_tokens
from refspec.requests.logprobs import append_logprobs
from refspec.requests.request import Request, RunningBatch
from refspec.runtime.futures import Futures
from refspec.runtime.runner import require_finite_logits
from refspec.spec.commit import bring_paths_to_front
from refspec.spec.draft import reserved_branches
from refspec.spec.extend import extend_all_rows
from refspec.spec.verify import judge
from refspec.workers.base import Observer, RoundInFlight
from refspec.workers.eagle_v1 import EagleWorkerV1
from refspec.workers.recorder import RoundRecorder


@dataclass
class LaunchedRound(RoundInFlight):
    """What `collect` needs of a round, beside its results."""

    candidates: Candidates
    tree: VerifyInput
    verified: VerifyOutput
    observer: Observer | None
    recorder: RoundRecorder | None


class EagleWorkerV2(EagleWorkerV1):
    """Target and EAGLE-style draft, as v1's; rounds that overlap."""

    def slots_for_round(self, kv_lens: Sequence[int], held_lens: Sequence[int] | None = None) -> int:
        """What has to be reserved so that no request runs out of slots in its next round, however long it is by now."""
        held_lens = held_lens or kv_lens
        return self.allocator.slots_to_extend(held_lens, self._round_ends(kv_lens, held_lens))

    def written_len(self, request: Request) -> int:
        """The extend has read every block, also the last one of a request that has ended; but nobody reads on in the
        prompt of one that ended with it.
        """
        return request.kv_len if request.accept_lens or not request.finish_reason else request.written_len

    def can_overlap(self, batch: RunningBatch) -> bool:
        """Not if somebody's grammar or penalties ask what the last round brought."""
        return batch.rules is None

    def forward(self, batch: RunningBatch, mode: ForwardMode, observer: Observer | None = None) -> RunningBatch:
        """A round that is waited for; prompts are read as in v1."""
        if mode is ForwardMode.EXTEND:
            return self._prefill(batch)
        if mode is ForwardMode.IDLE:
            batch.draft_input = self.empty_draft_input()
        batch, in_flight = self.launch(batch, observer)
        self.collect(in_flight)
        return batch.keep(batch.going_on())

    def launch(self, batch: RunningBatch, observer: Observer | None = None) -> tuple[RunningBatch, LaunchedRound]:
        """The device's half of a round. Afterwards the batch's lengths, bonus tokens and draft_input are what the
        device will have computed; nothing waits for it.
        """
        recorder = RoundRecorder(self.stats, self.config) if observer else None
        self.observed = observer is not None
        with self.phase("reserve"):
            self.reserve(batch)
        with self.phase("draft"):
            candidates = self.draft(batch)
        with self.phase("tree"):
            tree = self.make_tree(batch, candidates)
        with self.phase("verify"):
            verified = judge(batch, tree, self.tree_slots(batch), self.target, self.config)
            if any(request.params.logprobs is not None for request in batch.requests):
                verified.logits = verified.logits.clone()  # the next replay of a graph may write over them
        with self.phase("compact"):
            accept_lens = verified.accept_token_num + 1
            bring_paths_to_front(verified, self.target, self.config)
            results = {"predict": verified.predict, "accept_lens": accept_lens, "paths": verified.accept_index}
            futures = Futures({**results, "finite": verified.finite})
        with self.phase("extend"):
            extend_all_rows(batch, verified, accept_lens, self.draft_runner, self.config)
        for request in batch.requests:
            request.in_flight_tokens += self.config.longest_path
        if recorder:
            recorder.stop()
        rows = [request.row for request in batch.requests]
        return batch, LaunchedRound(batch.requests, rows, futures, candidates, tree, verified, observer, recorder)

    def collect(self, in_flight: RoundInFlight) -> None:
        """The host's half: wait for the results, and append the accepted tokens of each request that has not ended.

        Where a request asks for log-probabilities, this waits for the round launched since, too.
        """
        assert isinstance(in_flight, LaunchedRound)
        requests, results, n = in_flight.requests, in_flight.results, self.config.num_draft_tokens
        with self.phase("commit"):
            results.wait()
            require_finite_logits(results["finite"])
            predict, accept_lens = results["predict"].tolist(), results["accept_lens"].tolist()
            paths, kept_rows = results["paths"].tolist(), list[list[int]]()
            alive = [request if request.finish_reason is None else None for request in requests]
            for r, (request, path) in enumerate(zip(requests, paths, strict=True)):
                request.in_flight_tokens -= self.config.longest_path
                kept = append_tokens(request, predict[r * n : r * n + accept_lens[r]]) if alive[r] else 0
                request.kv_len += kept
                request.accept_lens += [kept] * (alive[r] is not None)
                kept_rows.append(path[:kept])
            # Where somebody asks for them, this waits for the device, and so for the round that was launched since.
            append_logprobs(requests, in_flight.verified.logits, kept_rows)
        self._count(in_flight, alive, kept_rows)

    def _count(self, in_flight: LaunchedRound, alive: list[Request | None], kept_rows: list[list[int]]) -> None:
        kept_lens = [len(rows) for request, rows in zip(alive, kept_rows, strict=True) if request]
        self.stats.dropped_request_rounds += len(alive) - len(kept_lens)
        if not kept_lens:
            return
        self.stats.count_round(kept_lens, self.config.num_steps, self.config.num_candidates)
        if in_flight.observer and in_flight.recorder:
            n, slots = self.config.num_draft_tokens, in_flight.verified.out_slots
            front = [list(range(r * n, r * n + len(rows))) for r, rows in enumerate(kept_rows)]
            done = CommitOutput([len(rows) for rows in front], front, slots[:0])
            record = in_flight.recorder.record(alive, in_flight.candidates, in_flight.tree, in_flight.verified, done)
            in_flight.observer(record)

    # --- the phases that are not v1's -------------------------------------------------------------------------------

    def reserve(self, batch: RunningBatch) -> None:
        """See to it that each request has slots for the round, wherever it begins, and enter them in the table.

        Raises OutOfSlots, with nothing taken, if they are not free.
        """
        starts, device = batch.held_lens, batch.rows.device
        ends = self._round_ends(batch.prefix_lens, starts)
        slots = batch.alloc_up_to(ends, self.allocator)
        start, end = to_device([starts, ends], torch.int64, device).unbind()
        assign_req_to_token(batch.req_to_token, batch.rows, start, end, slots)
        for request, reserved in zip(batch.requests, ends, strict=True):
            request.reserved_len = reserved

    def draft(self, batch: RunningBatch) -> Candidates:
        """As v1's, over slots that are the request's already."""
        assert batch.draft_input is not None
        branches = reserved_branches(batch, self.draft_runner, self.config)
        loop = self.loop_of(batch)
        return loop(batch, batch.draft_input, branches, batch.seq_lens, self.draft_runner, self.config)

    def tree_slots(self, batch: RunningBatch) -> Tensor:
        """i64 (b·N): those of the first N positions behind what is committed."""
        n = self.config.num_draft_tokens
        return assign_extend_cache_locs(
            batch.req_to_token, batch.rows, batch.seq_lens, batch.seq_lens + n, len(batch) * n
        )

    def _round_ends(self, kv_lens: Sequence[int], held_lens: Sequence[int]) -> list[int]:
        """Up to where each request must have slots before a round; it never gives any back."""
        return [max(held, self.config.round_end(kv_len)) for kv_len, held in zip(kv_lens, held_lens, strict=True)]
