"""Phase 5: the draft reads what was committed, on the target's hidden states, and makes its first guesses anew.

The draft's row for a token is fed that token beside the target's hidden state of the token before. So the rows are
one token ahead: at the slot and position of committed token p stands the row of token p + 1, and the last row, at
the newest cached token, is fed the bonus. Its answer is the next round's first level.

A prompt is read in the same way after the target's prefill; only where the rows come from differs.

Source: SGLang: python/sglang/srt/speculative/eagle_worker.py:EAGLEWorker.forward_draft_extend_after_decode @v0.4.6
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.config import SpecConfig
from refspec.contracts import CommitOutput, DraftInput, ForwardBatch, VerifyOutput
from refspec.kernels import padded_extend_inputs
from refspec.requests.request import RunningBatch
from refspec.runtime.rows import causal_batch, causal_mask
from refspec.runtime.runner import ModelRunner
from refspec.spec.draft import propose


def extend_after_prefill(
    batch: RunningBatch, hidden_states: Tensor, slots: Tensor, draft_runner: ModelRunner, config: SpecConfig
) -> RunningBatch:
    """One draft forward over what the requests that go on have read, on the target's hidden states of it.

    hidden_states (n, H), slots i64 (n): of all tokens that the batch has read. Returns the batch of those requests.
    """
    batch, index = batch.after_extend()
    # The last row is fed the first output token, or, where more of the prompt is to come, its next token.
    read = zip(batch.requests, batch.extend_lens, strict=True)
    one_ahead = [request.all_ids[request.kv_len - n + 1 : request.kv_len + 1] for request, n in read]
    next_tokens = torch.tensor([token for ids in one_ahead for token in ids], dtype=torch.int64, device=slots.device)
    hidden_states, slots, q_lens = hidden_states[index], slots[index], batch.extend_lens
    extend(batch, next_tokens, hidden_states, slots, q_lens, draft_runner, config, phase="prefill_draft")
    return batch


def extend_after_verify(
    batch: RunningBatch, verified: VerifyOutput, done: CommitOutput, draft_runner: ModelRunner, config: SpecConfig
) -> RunningBatch:
    """One draft forward over the committed rows of the requests that go on; none when all have finished.

    Returns the batch of those requests, ready for the next draft.
    """
    going_on = batch.going_on()
    rows = [row for r in going_on for row in done.kept_rows[r]]
    index = torch.tensor(rows, dtype=torch.int64, device=batch.rows.device)
    batch = batch.keep(going_on)
    next_tokens, q_lens = verified.predict[index].long(), [done.accept_lens[r] for r in going_on]
    hidden_states, slots = verified.hidden_states[index], verified.out_slots[index]
    extend(batch, next_tokens, hidden_states, slots, q_lens, draft_runner, config, phase="extend")
    return batch


def extend(
    batch: RunningBatch,
    next_tokens: Tensor,
    hidden_states: Tensor,
    slots: Tensor,
    q_lens: list[int],
    draft_runner: ModelRunner,
    config: SpecConfig,
    phase: str,
) -> None:
    """Run the draft over the newest q_lens[r] cached tokens of each request; set bonus_tokens and draft_input.

    next_tokens i64 (n), hidden_states (n, H), slots i64 (n): for each of those tokens, in order, the token after
    it, the target's hidden state at it, and its slot. The batch's lengths count them already.
    """
    # region extend_rows
    prefix_lens = [total - new for total, new in zip(batch.prefix_lens, q_lens, strict=True)]
    last_rows = torch.tensor(q_lens, dtype=torch.int64, device=slots.device).cumsum(0) - 1
    rows = causal_batch(next_tokens, slots, q_lens, batch.req_to_token, batch.rows, prefix_lens, hidden_states)
    out = draft_runner.forward(rows, phase, last_rows)
    batch.bonus_tokens = next_tokens[last_rows]
    topk_p, topk_index, law = propose(batch, out.logits, 0, config, draft_runner)
    batch.draft_input = DraftInput(topk_p, topk_index, out.hidden_states[last_rows], law, out.selection)
    # endregion extend_rows


def extend_all_rows(
    batch: RunningBatch, verified: VerifyOutput, accept_lens: Tensor, draft_runner: ModelRunner, config: SpecConfig
) -> None:
    """The extend in which each request has N rows, whatever it accepted: spec v2's.

    The rows behind the accepted ones are run for nothing; what the draft says behind the last accepted one begins the
    next round. accept_lens i32 (b), on the device; the accepted rows stand in front. Afterwards the batch stands behind
    the round: seq_lens, bonus_tokens and draft_input are what the device will find. Nothing waits for it.

    Source: SGLang: python/sglang/srt/speculative/eagle_worker_v2.py:EagleDraftWorker._draft_extend_for_decode @0.5.23
    """
    b, n = len(batch), config.num_draft_tokens
    positions, next_tokens, last_rows = padded_extend_inputs(batch.seq_lens, accept_lens, verified.predict, n)
    rows = ForwardBatch(
        input_ids=next_tokens,
        positions=positions,
        out_slots=verified.out_slots,
        q_lens=[n] * b,
        req_to_token=batch.req_to_token,
        rows=batch.rows,
        prefix_lens=batch.prefix_lens,
        tail_slots=verified.out_slots.view(b, n),
        tail_mask=causal_mask([n] * b, positions.device),
        hidden_states=verified.hidden_states,
        lens=batch.lens,
    )
    out = draft_runner.forward(rows, "extend", last_rows)
    batch.seq_lens = batch.seq_lens + accept_lens
    batch.bonus_tokens = next_tokens[last_rows]
    topk_p, topk_index, law = propose(batch, out.logits, 0, config, draft_runner)
    batch.draft_input = DraftInput(topk_p, topk_index, out.hidden_states[last_rows], law, out.selection)
