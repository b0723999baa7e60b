"""A request from its prompt to its last token, and the batch of those that run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from refspec.config import Matcher, SamplingParams
from refspec.contracts import CommitOutput, DraftInput, VerifyInput, VerifyOutput
from refspec.memory.allocator import SlotAllocator
from refspec.memory.prefix_cache import TreeNode
from refspec.memory.to_device import to_device
from refspec.requests.logit_rules import BatchRules
from refspec.requests.output_text import OutputText
from refspec.requests.sampling import BatchSampling


class Mark(NamedTuple):
    """Where a request stands: what of it a step may change."""

    kv_len: int
    reserved_len: int
    tokens: int
    rounds: int
    finish_reason: str | None


@dataclass(eq=False)
class Request:
    """One prompt on its way. Holds a row of the request table and the slots of kv_len tokens while it runs.

    0 <= cached_len <= written_len <= kv_len <= len(all_ids) - 1, once there is an output token; and kv_len <= held_len.
    """

    index: int  # which prompt of the run
    prompt_ids: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]  # the model's end-of-text ids among them, unless they are ignored
    max_total_len: int  # prompt and output together: the model's context
    output_ids: list[int] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)  # tokens per round, bonus included
    finish_reason: str | None = None  # "stop", "length", "dead_end", "out_of_slots" or "abort"
    text: OutputText | None = None  # where somebody must know it as it grows: for stop strings, or a stream
    row: int = 0  # of the request table; 0 = none
    kv_len: int = 0  # committed tokens in the KV cache: when it decodes, all but the newest output token
    written_len: int = 0  # of these, the leading ones of which every model has written its row
    cached_len: int = 0  # of these, the leading ones whose slots are the prefix cache's, and shared
    reserved_len: int = 0  # up to where it has slots, if that is beyond kv_len: reserved for rounds to come
    in_flight_tokens: int = 0  # that rounds may have committed by now whose results the host has not seen, at most
    cache_node: TreeNode | None = None  # where they end in the cache; locked while the request holds it
    seed: int = 0  # of its coins: params.seed, or the one that the engine picked
    arrival: int = 0  # its place in the order of all requests of an engine
    found_tokens: int = 0  # that the prefix cache had for it, over all its admissions
    retractions: int = 0  # times that it lost its slots and had to read its tokens again
    matcher: Matcher | None = None  # of params.grammar; its state is that of the output
    output_counts: Tensor | None = None  # f32 (V) how often each id stands in the output, as far as it was counted:
    counted_tokens: int = 0  # the first so many tokens of it. Only where a penalty, or another rule, asks
    logprobs: list[float] = field(default_factory=list)  # of each output token, where params ask for them
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # ids and values in its place

    @property
    def all_ids(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_ids + self.output_ids

    @property
    def read_ids(self) -> list[int]:
        """What must be in the KV cache before it decodes: the prompt; for one that was retracted, all but its newest
        token, which is still pending.
        """
        return self.prompt_ids + self.output_ids[:-1]

    @property
    def read_len(self) -> int:
        """How many the read_ids are."""
        return len(self.prompt_ids) + max(0, len(self.output_ids) - 1)

    @property
    def unread_len(self) -> int:
        """How many of the read_ids are not in the KV cache."""
        return max(0, self.read_len - self.kv_len)

    @property
    def held_len(self) -> int:
        """It holds the slots of so many positions."""
        return max(self.kv_len, self.reserved_len)

    def forget_slots(self) -> None:
        """It holds no slots any more, nor what can be made again from its output."""
        self.kv_len = self.written_len = self.cached_len = self.reserved_len = self.counted_tokens = 0
        self.cache_node = self.output_counts = None

    def mark(self) -> Mark:
        """Where it stands, for `go_back`."""
        return Mark(self.kv_len, self.reserved_len, len(self.output_ids), len(self.accept_lens), self.finish_reason)

    def go_back(self, mark: Mark) -> None:
        """After a step that failed, and in which it may have got tokens: to the mark, so that it can be ended there."""
        self.kv_len, self.reserved_len, tokens, rounds, reason = mark
        del self.output_ids[tokens:], self.logprobs[tokens:], self.top_logprobs[tokens:], self.accept_lens[rounds:]
        if self.text and reason is None:
            self.text.forget_stop()
        self.finish_reason = reason


def prompt_name(index: int) -> str:
    """What errors call the prompt of a request with this index; a negative one says that it is no run's."""
    return f"prompt {index}" if index >= 0 else "the prompt"


@dataclass
class RunningBatch:
    """The requests of one forward, and what the device needs to know of them. Row r is requests[r]."""

    requests: list[Request]
    req_to_token: Tensor  # i64 (rows, max_context), the request table
    rows: Tensor  # i64 (b) each request's row of it
    seq_lens: Tensor  # i64 (b) committed tokens in the KV cache
    bonus_tokens: Tensor  # i64 (b) each request's newest token: output, but not yet in the KV cache
    extend_lens: list[int]  # tokens that each reads, if this is an EXTEND
    draft_input: DraftInput | None = None  # where the next draft starts; None in plain decoding

    @staticmethod
    def of(requests: Sequence[Request], req_to_token: Tensor, extend_lens: Sequence[int] | None = None) -> RunningBatch:
        """A batch of requests that have something to read: extend_lens tokens each, or all that there is.

        bonus_tokens are 0 until they have read it.
        """
        if extend_lens is None:
            extend_lens = [request.unread_len for request in requests]

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=req_to_token.device)

        rows, seq_lens = column([r.row for r in requests]), column([r.kv_len for r in requests])
        return RunningBatch(list(requests), req_to_token, rows, seq_lens, torch.zeros_like(rows), list(extend_lens))

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def prefix_lens(self) -> list[int]:
        """Committed tokens of each request: exactly, or while rounds are in flight at most."""
        return [request.kv_len + request.in_flight_tokens for request in self.requests]

    @property
    def lens(self) -> Tensor | None:
        """What a ForwardBatch calls so: seq_lens, where they say more than prefix_lens."""
        return self.seq_lens if any(request.in_flight_tokens for request in self.requests) else None

    @property
    def held_lens(self) -> list[int]:
        """Up to which position each request has slots."""
        return [request.held_len for request in self.requests]

    @cached_property
    def sampling(self) -> BatchSampling:
        """How each request wants its tokens chosen."""
        return BatchSampling.of([r.params for r in self.requests], [r.seed for r in self.requests], self.rows.device)

    @cached_property
    def rules(self) -> BatchRules | None:
        """What requests change about the target's logits; None: nobody does."""
        return BatchRules.of(self.requests, self.rows.device)

    def ruled(self, logits: Tensor, tree: VerifyInput | None = None, exact_penalties: bool = True) -> Tensor:
        """The target's logits as the requests' rules leave them: see BatchRules.apply."""
        return self.rules.apply(logits, tree, exact_penalties) if self.rules else logits

    def alloc_up_to(self, ends: list[int], allocator: SlotAllocator) -> Tensor:
        """Slots for each request's positions from where it has none up to ends[r], i64, request after request.

        Raises OutOfSlots, with nothing taken, if they are not free.
        """
        starts, last_slots = self.held_lens, self.rows  # the latter not read where pages hold one token
        if allocator.page_size > 1:
            last = to_device(starts, torch.int64, self.rows.device) - 1
            last_slots = self.req_to_token[self.rows, last.clamp(min=0)]
        return allocator.alloc_extend(starts, ends, last_slots)

    def going_on(self) -> list[int]:
        """Rows of the requests that have not finished."""
        return [r for r, request in enumerate(self.requests) if request.finish_reason is None]

    def after_extend(self) -> tuple[RunningBatch, Tensor]:
        """After an EXTEND: the batch of those that go on, and which of all the rows that were read are theirs, i64."""
        going_on, first = self.going_on(), self.rows[:0]
        rows_of = torch.arange(sum(self.extend_lens), device=first.device).split(self.extend_lens)
        return self.keep(going_on), torch.cat([first, *(rows_of[r] for r in going_on)])

    def after_round(self, verified: VerifyOutput, done: CommitOutput) -> tuple[RunningBatch, Tensor]:
        """After a round: the batch of those that go on, with their bonus tokens; and of each, i64 (b), the last row of
        its tree that was kept, where its bonus was chosen.
        """
        going_on = self.going_on()
        last_rows = torch.tensor([done.kept_rows[r][-1] for r in going_on], dtype=torch.int64, device=self.rows.device)
        batch = self.keep(going_on)
        batch.bonus_tokens = verified.predict[last_rows].long()
        return batch, last_rows

    def keep(self, rows: list[int]) -> RunningBatch:
        """The batch of these rows, in this order: every field cut to them, never to the first so many."""
        if rows == list(range(len(self.requests))):
            return self
        index = to_device(rows, torch.int64, self.rows.device)
        draft = self.draft_input
        probs = draft.draft_probs if draft else None
        selection = draft.selection if draft else None
        return RunningBatch(
            [self.requests[r] for r in rows],
            self.req_to_token,
            self.rows[index],
            self.seq_lens[index],
            self.bonus_tokens[index],
            [self.extend_lens[r] for r in rows],
            draft
            and DraftInput(
                draft.topk_p[index],
                draft.topk_index[index],
                draft.hidden_states[index],
                None if probs is None else probs[index],
                None if selection is None else selection[index],
            ),
        )

    def merge(self, other: RunningBatch) -> RunningBatch:
        """This batch's requests, then the other's. Both come from the same worker."""
        if not self.requests:
            return other
        if not other.requests:
            return self
        mine, theirs = self.draft_input, other.draft_input
        probs = [x.draft_probs for x in (mine, theirs) if x and x.draft_probs is not None]
        selections = [x.selection for x in (mine, theirs) if x and x.selection is not None]
        return RunningBatch(
            self.requests + other.requests,
            self.req_to_token,
            torch.cat([self.rows, other.rows]),
            torch.cat([self.seq_lens, other.seq_lens]),
            torch.cat([self.bonus_tokens, other.bonus_tokens]),
            self.extend_lens + other.extend_lens,
            mine
            and theirs
            and DraftInput(
                torch.cat([mine.topk_p, theirs.topk_p]),
                torch.cat([mine.topk_index, theirs.topk_index]),
                torch.cat([mine.hidden_states, theirs.hidden_states]),
                torch.cat(probs) if probs else None,
                torch.cat(selections) if selections else None,
            ),
        )
