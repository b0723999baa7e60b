"""What every worker has in common: it moves a batch forward in one of three modes.

A worker holds the models' runners and the memory, and owns the order of the phases. The engine above it decides
who runs, and when; it does not know how many tokens a worker's step will bring.

| mode   | what happens                                                                     |
|--------|----------------------------------------------------------------------------------|
| EXTEND | requests read their prompts, or a part; who has read it all gets its first token |
| DECODE | running requests: each gets its next token, or a block of them                    |
| IDLE   | no requests here: the same phases with zero rows, for the sake of other ranks     |

Who implements what. The round is `SpecWorker`'s (eagle_v1.py): draft, tree, verify, commit, extend. Verify and commit
are the same for all but eagle-v2, whose round is in two halves, `launch` and `collect`, of which the second does what a
commit does on the host. Of the others each has its own, and what is left out is inherited:

| worker           | algorithm          | read_prompt    | draft                | make_tree       | extend            |
|------------------|--------------------|----------------|----------------------|-----------------|-------------------|
| PlainWorker      | none               | no round: one forward of the target brings one token                        |
| EagleWorkerV1    | eagle, eagle3, mtp | draft reads it | S - 1 forwards       | pool, or chain  | 1 forward, ragged |
| EagleWorkerV2    | eagle-v2           |                | on reserved slots    |                 | 1 forward, N rows |
| MultiLayerWorker | multi-layer        | S layers do    | is there already     | chain           | S forwards        |
| FrozenKVWorker   | frozen-kv          | nobody does    | S forwards, no KV    |                 | none              |
| StandaloneWorker | standalone         | draft reads it | 1 ragged, S - 1 more |                 | none              |
| NgramWorker      | ngram              | into the trie  | none                 | out of the trie | into the trie     |

| worker                      | slots_for_round                                | reads_ahead | can_overlap          |
|-----------------------------|------------------------------------------------|-------------|----------------------|
| PlainWorker                 | 1                                              | 0           | no                   |
| EagleWorkerV1               | k·S, given back; then N                        | 1           | no                   |
| EagleWorkerV2               | the larger of both, reserved, as far as it is not yet | 1    | where nobody has rules |
| MultiLayerWorker            | N                                              | S           | no                   |
| FrozenKVWorker, NgramWorker | N                                              | 0           | no                   |
| StandaloneWorker            | k·S and the bonus's, given back; then N        | 0           | no                   |

Source: SGLang: python/sglang/srt/speculative/base_spec_worker.py:BaseSpecWorker @v0.5.5
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from refspec.contracts import ForwardMode, ForwardOutput
from refspec.kernels import assign_req_to_token, launches
from refspec.memory.allocator import SlotAllocator
from refspec.requests.finish import append_tokens
from refspec.requests.logprobs import append_logprobs
from refspec.requests.request import Request, RunningBatch
from refspec.runtime.futures import Futures
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner, greedy_choice
from refspec.trace import Round

Observer = Callable[[Round], None]


@dataclass
class Stats:
    """Counted as it happens, over the life of an engine. A round is one decode step of one batch."""

    rounds: int = 0
    request_rounds: int = 0  # rounds, each counted once for every request in it
    committed_tokens: int = 0  # by rounds, bonus included; prefill's first tokens are not in it
    drafted_levels: int = 0  # num_steps for each request round; of guesses that were looked up, the longest path
    candidates: int = 0  # that the draft came up with
    retractions: int = 0  # requests that lost their slots to others, each time that one did
    cached_tokens: int = 0  # that were found in the prefix cache at admissions, and not read; SGLang's name for it
    evicted_tokens: int = 0  # that the prefix cache gave up
    dropped_request_rounds: int = 0  # launched for requests whose end, in the round before, nobody knew of yet
    chain_rounds: int = 0  # launched by the short cut of spec/chain.py
    rounds_by_steps: Counter[int] = field(default_factory=Counter)  # 0 steps: plain decoding
    forwards: Counter[str] = field(default_factory=Counter)  # target, draft, extend, prefill_target, prefill_draft
    graph_replays: Counter[str] = field(default_factory=Counter)  # forwards that a graph was replayed for, by phase
    graph_fallbacks: Counter[str] = field(default_factory=Counter)  # those that ran as if there were none
    launches: Counter[str] = field(default_factory=Counter)  # by operation of refspec.kernels
    slots_taken: Counter[str] = field(default_factory=Counter)  # by phase
    slots_returned: Counter[str] = field(default_factory=Counter)  # by phase
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # host time by phase

    @property
    def target_forwards(self) -> int:
        """Verify forwards, or plain decode's; prefill's are counted apart."""
        return self.forwards["target"]

    @property
    def draft_forwards(self) -> int:
        """Those of the draft loop."""
        return self.forwards["draft"]

    @property
    def extend_forwards(self) -> int:
        """The draft's over what a round committed."""
        return self.forwards["extend"]

    @property
    def prefill_target_forwards(self) -> int:
        """The target's over prompts."""
        return self.forwards["prefill_target"]

    @property
    def prefill_draft_forwards(self) -> int:
        """The draft's over prompts."""
        return self.forwards["prefill_draft"]

    @property
    def accept_length(self) -> float:
        """Tokens for each round of a request, the bonus counted; 0 before the first round."""
        return self.committed_tokens / self.request_rounds if self.request_rounds else 0.0

    @property
    def accept_rate(self) -> float:
        """Accepted drafts for each level that was drafted; 0 when nothing was."""
        accepted = self.committed_tokens - self.request_rounds
        return accepted / self.drafted_levels if self.drafted_levels else 0.0

    def count_round(self, accept_lens: list[int], num_steps: int, num_candidates: int) -> None:
        self.rounds += 1
        self.request_rounds += len(accept_lens)
        self.committed_tokens += sum(accept_lens)
        self.drafted_levels += num_steps * len(accept_lens)
        self.rounds_by_steps[num_steps] += 1
        self.candidates += num_candidates * len(accept_lens)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, as `--json` prints them."""
        names = ("target", "draft", "extend", "prefill_target", "prefill_draft")
        return {
            "rounds": self.rounds,
            **{f"{name}_forwards": self.forwards[name] for name in names},
            "request_rounds": self.request_rounds,
            "committed_tokens": self.committed_tokens,
            "candidates": self.candidates,
            "retractions": self.retractions,
            "cached_tokens": self.cached_tokens,
            "evicted_tokens": self.evicted_tokens,
            "dropped_request_rounds": self.dropped_request_rounds,
            "accept_length": self.accept_length,
            "accept_rate": self.accept_rate,
            "chain_rounds": self.chain_rounds,
            "rounds_by_steps": dict(self.rounds_by_steps),
            "graph_replays": dict(self.graph_replays),
            "graph_fallbacks": dict(self.graph_fallbacks),
            "launches": dict(self.launches),
            "slots_taken": dict(self.slots_taken),
            "slots_returned": dict(self.slots_returned),
            "seconds": dict(self.seconds),
        }


@dataclass
class RoundInFlight:
    """A round that was launched, and whose results the host has not seen. Until it has, its slots must stay taken."""

    requests: list[Request]
    rows: list[int]  # of the request table: what each request held at the launch, and holds until the round is over
    results: Futures


class Worker(ABC):
    """Owns the order of the phases. See the module's docstring."""

    def __init__(self, target: ModelRunner, allocator: SlotAllocator, stats: Stats) -> None:
        self.target, self.allocator, self.stats = target, allocator, stats

    @property
    def runners(self) -> list[ModelRunner]:
        """All that it runs."""
        return [self.target]

    reads_ahead: int
    """How many tokens after its own does a row of its cache depend on? 1 where it is fed the next one, as an EAGLE
    draft's is. Only those can share a row who agree on them too; and where there are some, a finished request's newest
    rows are not written."""

    @abstractmethod
    def slots_for_round(self, kv_lens: Sequence[int], held_lens: Sequence[int] | None = None) -> int:
        """The most free slots that a round takes at one time, if its requests have kv_lens committed tokens, at most.

        held_lens: up to which position each has slots; None: up to its kv_len. Never more than the sum of what each
        request's round takes alone.
        """

    def written_len(self, request: Request) -> int:
        """After a step: of how many of the request's committed tokens, from the first, every model has a row."""
        if request.finish_reason and self.reads_ahead:
            return request.written_len  # nobody has read the newest block
        return request.kv_len

    @abstractmethod
    def forward(self, batch: RunningBatch, mode: ForwardMode, observer: Observer | None = None) -> RunningBatch:
        """Move the batch one step. Returns the requests that go on, in their order.

        The others have a finish_reason; their rows and slots are the caller's to release. If it raises, the
        caller restores allocator and requests.
        """

    def can_overlap(self, batch: RunningBatch) -> bool:
        """Can the next round of this batch be launched while the host has not seen the results of the last?

        Then the scheduler calls `launch` and `collect` for a DECODE, the next one's launch before the last one's
        collect.
        """
        return False

    def launch(self, batch: RunningBatch, observer: Observer | None = None) -> tuple[RunningBatch, RoundInFlight]:
        """Tell the device to do a round, and wait for nothing. Returns the batch, all requests still in it, as it will
        be afterwards: its lengths and tokens are on the device, and in_flight_tokens count what they may have grown by.
        Asked only where `can_overlap` is true.
        """
        raise NotImplementedError

    def collect(self, in_flight: RoundInFlight) -> None:
        """Wait for the round, and give the requests their tokens; those that have finished meanwhile get none.

        in_flight: what `launch` returned; no worker that cannot overlap is ever asked.
        """
        raise NotImplementedError

    def prefill_target(self, batch: RunningBatch) -> tuple[ForwardOutput, torch.Tensor]:
        """Read extend_lens tokens of each request: take their slots, enter them in the request table, run the target.

        A request that has read its whole prompt gets its first output token. One that was retracted has a newest token
        already, and keeps it: if that was drawn, a second draw would bend the law. Returns the forward's output and the
        slots, i64 (n).
        """
        device, lens = batch.rows.device, batch.extend_lens
        ends = [start + length for start, length in zip(batch.prefix_lens, lens, strict=True)]
        slots = batch.alloc_up_to(ends, self.allocator)
        ids = [request.read_ids[request.kv_len : end] for request, end in zip(batch.requests, ends, strict=True)]
        flat_ids = torch.tensor([token for part in ids for token in part], dtype=torch.int64, device=device)
        new_lens = torch.tensor(ends, dtype=torch.int64, device=device)
        assign_req_to_token(batch.req_to_token, batch.rows, batch.seq_lens, new_lens, slots)
        last_rows = torch.tensor(lens, dtype=torch.int64, device=device).cumsum(0) - 1
        out = self.target.forward(
            causal_batch(flat_ids, slots, lens, batch.req_to_token, batch.rows, batch.prefix_lens),
            "prefill_target",
            last_rows,
        )
        batch.seq_lens = new_lens
        logits = batch.ruled(out.logits)
        chosen = batch.sampling.next_tokens(logits, greedy_choice(logits), batch.seq_lens)
        chosen_at: list[list[int]] = [[] for _ in ends]
        for row, (request, end, token) in enumerate(zip(batch.requests, ends, chosen.tolist(), strict=True)):
            request.kv_len = end
            if not (request.unread_len or request.output_ids):
                chosen_at[row] = [row] * append_tokens(request, [token])
        append_logprobs(batch.requests, out.logits, chosen_at)
        newest = [request.output_ids[-1] if request.output_ids else 0 for request in batch.requests]
        batch.bonus_tokens = torch.tensor(newest, dtype=torch.int64, device=device)
        return out, slots

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside is counted under the phase's name: slots taken and returned, launches, host time."""
        taken, returned, started = self.allocator.taken, self.allocator.returned, time.perf_counter()
        launched = launches.copy()
        try:
            yield
        finally:
            self.stats.seconds[name] += time.perf_counter() - started
            self.stats.slots_taken[name] += self.allocator.taken - taken
            self.stats.slots_returned[name] += self.allocator.returned - returned
            self.stats.launches.update(launches - launched)
