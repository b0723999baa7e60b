"""The plainest forward: new tokens after known ones, each seeing all before it. Prefill, extend and compare use it."""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.contracts import ForwardBatch
from refspec.runtime.runner import RowPadding


def causal_batch(
    input_ids: Tensor,
    slots: Tensor,
    q_lens: list[int],
    req_to_token: Tensor,
    rows: Tensor,
    prefix_lens: list[int],
    hidden_states: Tensor | None = None,
) -> ForwardBatch:
    """q_lens[r] new rows of request r, at the positions from prefix_lens[r] on, kept at `slots`.

    input_ids, slots i64 (n), n = sum of q_lens; rows i64 (b), of the request table; hidden_states (n, H), for a draft.
    """
    return ForwardBatch(
        input_ids=input_ids,
        positions=positions_from(prefix_lens, q_lens, slots.device),
        out_slots=slots,
        q_lens=q_lens,
        req_to_token=req_to_token,
        rows=rows,
        prefix_lens=prefix_lens,
        tail_slots=RowPadding(q_lens, slots.device).pad(slots).view(len(q_lens), max(q_lens, default=0)),  # 0: dummy
        tail_mask=causal_mask(q_lens, slots.device),
        hidden_states=hidden_states,
    )


def positions_from(starts: list[int], lens: list[int], device: torch.device) -> Tensor:
    """i64 (sum of lens): lens[r] positions from starts[r] on, request after request."""
    flat = [p for start, length in zip(starts, lens, strict=True) for p in range(start, start + length)]
    return torch.tensor(flat, dtype=torch.int64, device=device)


def causal_mask(lens: list[int], device: torch.device) -> Tensor:
    """bool (b, longest, longest): each row sees the columns up to its own."""
    longest = max(lens, default=0)
    return torch.ones(longest, longest, dtype=torch.bool, device=device).tril().expand(len(lens), -1, -1)
