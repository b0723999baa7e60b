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
from refspec.requests.request import RunningBatch
from refspec.runtime.runner import ModelRunner
from refspec.spec.draft import best_tokens


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
    extend(
        batch,
        next_tokens=verified.predict[index].long(),
        hidden_states=verified.hidden_states[index],
        slots=verified.out_slots[index],
        q_lens=[done.accept_lens[r] for r in going_on],
        draft_runner=draft_runner,
        config=config,
        phase="extend",
    )
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
    device = batch.rows.device
    prefix_lens = [total - new for total, new in zip(batch.prefix_lens, q_lens, strict=True)]
    ends = torch.tensor(q_lens, dtype=torch.int64, device=device).cumsum(0)
    out = draft_runner.forward(
        ForwardBatch(
            input_ids=next_tokens,
            positions=positions_from(prefix_lens, q_lens, device),
            out_slots=slots,
            q_lens=q_lens,
            prefix_slots=batch.req_to_token[batch.rows, : max(prefix_lens, default=0)],
            prefix_lens=prefix_lens,
            tail_slots=pad_rows(slots, q_lens),
            tail_mask=causal_mask(q_lens, device),
            hidden_states=hidden_states,
        ),
        phase=phase,
        logits_rows=ends - 1,
    )
    batch.bonus_tokens = next_tokens[ends - 1]
    batch.draft_input = DraftInput(*best_tokens(out.logits, config.topk), out.hidden_states[ends - 1])


def positions_from(starts: list[int], lens: list[int], device: torch.device) -> Tensor:
    """i64 (sum of lens): lens[r] positions from starts[r] on, request after request."""
    flat = [p for start, length in zip(starts, lens, strict=True) for p in range(start, start + length)]
    return torch.tensor(flat, dtype=torch.int64, device=device)


def pad_rows(values: Tensor, lens: list[int]) -> Tensor:
    """(sum of lens) -> (b, longest), filled up with 0, the dummy slot."""
    padded = values.new_zeros(len(lens), max(lens, default=0))
    for row, part in zip(padded, values.split(lens), strict=True):
        row[: len(part)] = part
    return padded


def causal_mask(lens: list[int], device: torch.device) -> Tensor:
    """bool (b, longest, longest): each row sees the columns up to its own."""
    longest = max(lens, default=0)
    return torch.ones(longest, longest, dtype=torch.bool, device=device).tril().expand(len(lens), -1, -1)
