"""A small language model of its own as the draft.

It needs nothing of the target but the vocabulary: no hidden states, no embedding, no head. So it reads tokens as they
are. Its row of token p is at position p, in token p's slot, and foresees token p + 1; an EAGLE draft's rows are one
token ahead. What that changes:

- **The bonus has no slot yet.** The draft must read it before it can guess what follows, but its slot is taken only
  when the target verifies. So its row goes to the first of the slots that the draft reserves, at position seq_len,
  where the request table shows it to the rows of the loop. For them the text is one token longer, and the loop is
  EAGLE's behind it.
- **There is no extend after the round.** A draft phase begins with a forward over the committed tokens that the draft
  has not read yet, then the bonus. It counts as the extend, since it does the same work: S draft forwards a round, one
  extend and S - 1 in the loop. What is left unread at the end of a round is its block, `Request.written_len` says from
  where on.
- **A row depends on no token after it.** So the prefix cache's keys are plain ids.

With a draft that equals its target all S guesses are right in every round.

Source: SGLang: python/sglang/srt/speculative/standalone_worker_v2.py:StandaloneWorkerV2 @0.5.23. It is EAGLE's worker
with another model, and keeps EAGLE's rows: the draft is never shown token 0, and sees token p at position p - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from refspec.contracts import Candidates, CommitOutput, DraftInput, ForwardOutput, VerifyOutput
from refspec.kernels import assign_draft_cache_locs, assign_req_to_token
from refspec.requests.request import Request, RunningBatch
from refspec.runtime.rows import causal_batch, positions_from
from refspec.spec.draft import Branches, propose, split_into_pages
from refspec.workers.eagle_v1 import DraftModelWorker


class StandaloneWorker(DraftModelWorker):
    """Two language models over one set of slots. See the module's docstring."""

    reads_ahead = 0

    def slots_for_round(self, kv_lens: Sequence[int], held_lens: Sequence[int] | None = None) -> int:
        """The larger number of the two, as EAGLE's; the draft's are those of a text that is one token longer."""
        drafts = self.allocator.slots_to_extend(kv_lens, [self.config.draft_end(kv_len + 1) for kv_len in kv_lens])
        return max(drafts, super().slots_for_round(kv_lens))

    def written_len(self, request: Request) -> int:
        """What the draft has read, it says itself."""
        return request.written_len

    def read_prompt(self, batch: RunningBatch, out: ForwardOutput, slots: Tensor) -> RunningBatch:
        batch = batch.keep(batch.going_on())
        self._read(batch, batch.prefix_lens, "prefill_draft")
        return batch

    def draft(self, batch: RunningBatch) -> Candidates:
        """S draft forwards: the unread tokens and the bonus, then the loop. Afterwards the allocator is as it was."""
        config, state = self.config, self.allocator.backup_state()
        lens, seq_lens = [kv_len + 1 for kv_len in batch.prefix_lens], batch.seq_lens + 1  # with the bonus
        ends = [config.draft_end(length) for length in lens]
        slots = batch.alloc_up_to(ends, self.allocator)
        end = torch.tensor(ends, dtype=torch.int64, device=slots.device)
        assign_req_to_token(batch.req_to_token, batch.rows, batch.seq_lens, end, slots)
        out = self._read(batch, lens, "extend")
        topk_p, topk_index, law = propose(batch, out.logits, 0, config, self.draft_runner)
        start = DraftInput(topk_p, topk_index, out.hidden_states, law)
        branches = self._branches(batch, lens, seq_lens)
        loop = self.loop_of(batch)
        candidates = loop(batch, start, branches, seq_lens, self.draft_runner, config, recurrent=False)
        self.allocator.restore_state(state)
        return candidates

    def extend(self, batch: RunningBatch, verified: VerifyOutput, done: CommitOutput) -> RunningBatch:
        """Nothing runs: the next draft phase reads what was committed."""
        return batch.after_round(verified, done)[0]

    def _read(self, batch: RunningBatch, ends: list[int], phase: str) -> ForwardOutput:
        """One draft forward over the first ends[r] tokens of each request, but for those that it has read already.

        Their slots stand in the request table. Returns logits and hidden states of each request's last row.
        """
        starts = [request.written_len for request in batch.requests]
        q_lens = [end - start for start, end in zip(starts, ends, strict=True)]
        unread = zip(batch.requests, starts, ends, strict=True)
        ids = [token for request, start, end in unread for token in request.all_ids[start:end]]
        rows, device = [r for r, length in enumerate(q_lens) for _ in range(length)], batch.rows.device
        input_ids, request_of = torch.tensor([ids, rows], dtype=torch.int64, device=device)
        slots = batch.req_to_token[batch.rows[request_of], positions_from(starts, q_lens, device)]
        last_rows = torch.tensor(q_lens, dtype=torch.int64, device=device).cumsum(0) - 1
        read = causal_batch(input_ids, slots, q_lens, batch.req_to_token, batch.rows, starts)
        out = self.draft_runner.forward(read, phase, last_rows)
        for request in batch.requests:
            request.written_len = request.kv_len  # the bonus is not committed yet: its row goes back
        return ForwardOutput(out.logits, out.hidden_states[last_rows])

    def _branches(self, batch: RunningBatch, lens: list[int], seq_lens: Tensor) -> Branches:
        """The loop's slots behind lens[r] tokens of each request (seq_lens: the same on the device), from the table."""
        k, steps, page = self.config.topk, self.config.num_steps, self.config.page_size
        if k > 1 and page > 1:
            return split_into_pages(batch, lens, seq_lens, self.draft_runner, self.config)
        slots = assign_draft_cache_locs(batch.req_to_token, batch.rows, seq_lens, k, steps).view(-1, k, steps)
        return Branches(slots, lens, slots[:, 0, :0], slots[:, :, :0].bool())
