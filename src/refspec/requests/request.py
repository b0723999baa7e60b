"""A request from its prompt to its last token, and the batch of those that run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from refspec.config import SamplingParams
from refspec.contracts import DraftInput
from refspec.requests.output_text import OutputText
from refspec.requests.sampling import BatchSampling


@dataclass(eq=False)
class Request:
    """One prompt on its way. Holds a row of the request table and kv_len slots while it runs."""

    index: int  # which prompt of the run
    prompt_ids: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]  # the model's end-of-text ids among them, unless they are ignored
    max_total_len: int  # prompt and output together: the model's context
    output_ids: list[int] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)  # tokens per round, bonus included
    finish_reason: str | None = None  # "stop" or "length"
    text: OutputText | None = None  # where somebody must know it as it grows: for stop strings, or a stream
    row: int = 0  # of the request table; 0 = none
    kv_len: int = 0  # committed tokens in the KV cache: all but the newest output token
    seed: int = 0  # of its coins: params.seed, or the one that the engine picked

    @property
    def max_kv_len(self) -> int:
        """Slots it can come to own: all of its tokens but the last."""
        return min(len(self.prompt_ids) + self.params.max_new_tokens, self.max_total_len) - 1


@dataclass
class RunningBatch:
    """The requests of one forward, and what the device needs to know of them. Row r is requests[r]."""

    requests: list[Request]
    req_to_token: Tensor  # i64 (rows, max_context), the request table
    rows: Tensor  # i64 (b) each request's row of it
    seq_lens: Tensor  # i64 (b) committed tokens in the KV cache
    bonus_tokens: Tensor  # i64 (b) each request's newest token: output, but not yet in the KV cache
    draft_input: DraftInput | None = None  # where the next draft starts; None in plain decoding

    @staticmethod
    def of(requests: Sequence[Request], req_to_token: Tensor) -> RunningBatch:
        """A batch of requests that have not been prefilled: bonus_tokens are 0 until they are."""

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=req_to_token.device)

        rows, seq_lens = column([r.row for r in requests]), column([r.kv_len for r in requests])
        return RunningBatch(list(requests), req_to_token, rows, seq_lens, torch.zeros_like(rows))

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def prefix_lens(self) -> list[int]:
        return [request.kv_len for request in self.requests]

    @cached_property
    def sampling(self) -> BatchSampling:
        """How each request wants its tokens chosen."""
        return BatchSampling.of([r.params for r in self.requests], [r.seed for r in self.requests], self.rows.device)

    def going_on(self) -> list[int]:
        """Rows of the requests that have not finished."""
        return [r for r, request in enumerate(self.requests) if request.finish_reason is None]

    def keep(self, rows: list[int]) -> RunningBatch:
        """The batch of these rows, in this order: every field cut to them, never to the first so many."""
        if rows == list(range(len(self.requests))):
            return self
        index = torch.tensor(rows, dtype=torch.int64, device=self.rows.device)
        draft = self.draft_input
        probs = draft.draft_probs if draft else None
        return RunningBatch(
            [self.requests[r] for r in rows],
            self.req_to_token,
            self.rows[index],
            self.seq_lens[index],
            self.bonus_tokens[index],
            draft
            and DraftInput(
                draft.topk_p[index],
                draft.topk_index[index],
                draft.hidden_states[index],
                None if probs is None else probs[index],
            ),
        )

    def merge(self, other: RunningBatch) -> RunningBatch:
        """This batch's requests, then the other's. Both come from the same worker."""
        if not self.requests:
            return other
        mine, theirs = self.draft_input, other.draft_input
        probs = [x.draft_probs for x in (mine, theirs) if x and x.draft_probs is not None]
        return RunningBatch(
            self.requests + other.requests,
            self.req_to_token,
            torch.cat([self.rows, other.rows]),
            torch.cat([self.seq_lens, other.seq_lens]),
            torch.cat([self.bonus_tokens, other.bonus_tokens]),
            mine
            and theirs
            and DraftInput(
                torch.cat([mine.topk_p, theirs.topk_p]),
                torch.cat([mine.topk_index, theirs.topk_index]),
                torch.cat([mine.hidden_states, theirs.hidden_states]),
                torch.cat(probs) if probs else None,
            ),
        )
