"""Frozen-KV MTP: an assistant without keys and values of its own, which reads the target's.

`models/frozen_kv.py` says what such an assistant is. It is served over the target's pool, and writes nothing there. So
there is little to take care of: no slots for drafts, no prefill, no extend, nothing that a rejected guess could leave
behind, and no row that the prefix cache would have to tell apart.

What a round begins with are the bonus token and the target's hidden state at the newest cached token, which the target
has given as it verified (or read the prompt). A first draft forward, the *seed*, makes the first level of guesses of
these; S - 1 more, each over k branches, are fed the token and the hidden state that came out for it. All are at the
position of the newest cached token, seq_len - 1, and all attend the seq_len tokens in the cache, and no draft: what a
branch knows of its drafts is in its hidden state. So there is nothing to choose about `exact_branch_kv` either.

A round costs one target forward and S draft forwards.

Source: SGLang: python/sglang/srt/speculative/frozen_kv_mtp_worker_v2.py:FrozenKVMTPDraftWorker (draft_forward is the
seed and the loop) and frozen_kv_mtp_utils.py:set_frozen_kv_positions @0.5.23. There the seed is run k times over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.contracts import (
    Candidates,
    CommitOutput,
    DraftInput,
    ForwardBatch,
    ForwardOutput,
    VerifyOutput,
)
from refspec.requests.request import RunningBatch
from refspec.spec.draft import TreeInfo, candidates_of, propose, select_top_k_tokens
from refspec.workers.eagle_v1 import DraftModelWorker


class FrozenKVWorker(DraftModelWorker):
    """A target, and an assistant over the target's pool. See the module's docstring."""

    reads_ahead = 0

    def read_prompt(self, batch: RunningBatch, out: ForwardOutput, slots: Tensor) -> RunningBatch:
        """The assistant reads nothing: what the target has cached is all there is."""
        batch, index = batch.after_extend()
        ends = torch.tensor(batch.extend_lens, dtype=torch.int64, device=slots.device).cumsum(0)
        batch.draft_input = seed_of(out.hidden_states[index[ends - 1]])
        return batch

    def draft(self, batch: RunningBatch) -> Candidates:
        """The seed and S - 1 forwards. Takes no slots, and writes to none."""
        start, k, steps = batch.draft_input, self.config.topk, self.config.num_steps
        assert start is not None
        out = self._step(batch, batch.bonus_tokens, start.hidden_states)
        topk_p, topk_index, law = propose(batch, out.logits, 0, self.config, self.draft_runner)
        laws, scores, levels = [law], topk_p, list[TreeInfo]()
        for i in range(steps):
            ids, hidden, scores, level = select_top_k_tokens(i, topk_p, topk_index, out.hidden_states, scores, k)
            levels.append(level)
            if i == steps - 1:
                break
            out = self._step(batch, ids, hidden)
            topk_p, topk_index, law = propose(batch, out.logits, i + 1, self.config, self.draft_runner)
            laws.append(law)
        no_slots = topk_index[:0].new_zeros(len(batch), k, 0)
        return candidates_of(levels, laws, no_slots)

    def extend(self, batch: RunningBatch, verified: VerifyOutput, done: CommitOutput) -> RunningBatch:
        """Nothing runs: the target's hidden state at the newest cached token is there."""
        batch, last_rows = batch.after_round(verified, done)
        batch.draft_input = seed_of(verified.hidden_states[last_rows])
        return batch

    def empty_draft_input(self) -> DraftInput:
        target = self.target.model
        shape = 0, target.config.hidden_size
        return seed_of(torch.zeros(shape, dtype=target.kv_layout.dtype, device=self.target.device))

    def _step(self, batch: RunningBatch, input_ids: Tensor, hidden_states: Tensor) -> ForwardOutput:
        """A draft forward of one row for each request, or of k: input_ids i64 (b·rows), hidden_states (b·rows, H)."""
        b = len(batch)
        rows = len(input_ids) // b if b else 1
        return self.draft_runner.forward(
            ForwardBatch(
                input_ids=input_ids,
                positions=(batch.seq_lens - 1).repeat_interleave(rows),
                out_slots=torch.zeros_like(input_ids),
                q_lens=[rows] * b,
                req_to_token=batch.req_to_token,
                rows=batch.rows,
                prefix_lens=batch.prefix_lens,
                tail_slots=batch.rows.new_zeros(b, 0),
                tail_mask=None,
                hidden_states=hidden_states,
            ),
            phase="draft",
        )


def seed_of(hidden_states: Tensor) -> DraftInput:
    """What the next round's seed is fed beside the bonus, (b, H). There are no guesses yet."""
    none = hidden_states.new_zeros(len(hidden_states), 0)
    return DraftInput(none.float(), none.long(), hidden_states)
