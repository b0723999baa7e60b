"""Decoding without speculation: one target forward, one token. The baseline, and the oracle of every test."""

from __future__ import annotations

from collections.abc import Sequence

from refspec.contracts import ForwardBatch, ForwardMode
from refspec.kernels import assign_req_to_token
from refspec.requests.finish import append_tokens
from refspec.requests.logprobs import append_logprobs
from refspec.requests.request import RunningBatch
from refspec.runtime.runner import greedy_choice
from refspec.workers.base import Observer, Worker


class PlainWorker(Worker):
    """The target alone. A round is one decode step."""

    reads_ahead = 0

    def slots_for_round(self, kv_lens: Sequence[int], held_lens: Sequence[int] | None = None) -> int:
        return self.allocator.slots_to_extend(kv_lens, [kv_len + 1 for kv_len in kv_lens])

    def forward(self, batch: RunningBatch, mode: ForwardMode, observer: Observer | None = None) -> RunningBatch:
        if mode is ForwardMode.EXTEND:
            with self.phase("prefill"):
                self.prefill_target(batch)
        else:
            with self.phase("decode"):
                self._decode(batch)
        return batch.keep(batch.going_on())

    def _decode(self, batch: RunningBatch) -> None:
        # region plain_step
        b = len(batch)
        slots = batch.alloc_up_to([kv_len + 1 for kv_len in batch.prefix_lens], self.allocator)
        out = self.target.forward(
            ForwardBatch(
                input_ids=batch.bonus_tokens,
                positions=batch.seq_lens,
                out_slots=slots,
                q_lens=[1] * b,
                req_to_token=batch.req_to_token,
                rows=batch.rows,
                prefix_lens=batch.prefix_lens,
                tail_slots=slots.view(b, 1),
                tail_mask=None,
            ),
            phase="target",
        )
        assign_req_to_token(batch.req_to_token, batch.rows, batch.seq_lens, batch.seq_lens + 1, slots)
        batch.seq_lens = batch.seq_lens + 1
        logits = batch.ruled(out.logits)
        batch.bonus_tokens = batch.sampling.next_tokens(logits, greedy_choice(logits), batch.seq_lens)
        # endregion plain_step
        for request, token in zip(batch.requests, batch.bonus_tokens.tolist(), strict=True):
            request.kv_len += 1
            request.accept_lens.append(append_tokens(request, [token]))
        accept_lens = [request.accept_lens[-1] for request in batch.requests]
        append_logprobs(batch.requests, out.logits, [[row] * kept for row, kept in enumerate(accept_lens)])
        if b:
            self.stats.count_round(accept_lens, num_steps=0, num_candidates=0)
