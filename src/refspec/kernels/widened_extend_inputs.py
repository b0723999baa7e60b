"""What a multi-layer draft's extend is fed: the round's N rows of each request, and before them the F that were kept.

Row j of a request stands at position seq_len - F + j. The first F read again what an earlier extend read on guesses
(`append_boundary_rows` says why); the others are those of `padded_extend_inputs`. Where fewer than F rows were kept,
those in front are empty: token 0, a hidden state of zeros, position 0, slot 0, where nobody looks.

Bytes moved: for each of the W = F + N rows of a request its hidden state in and out, 8 (or 4) in and 24 out, and 8 for
its slot; 24 for each request.

Source: SGLang: python/sglang/kernels/ops/speculative/multi_layer_eagle.py:fill_widened_draft_extend_inputs_triton,
compute_widened_draft_extend_locs_positions_triton @0.5.23, which find slots and positions before the target's forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.append_boundary_rows import check_pool_of_rows
from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_size, check_tensor, device_of
from refspec.kernels.compact_to_front import BITS
from refspec.kernels.launches import count_launch


def widened_extend_inputs_torch(
    seq_lens: Tensor,
    predict: Tensor,
    hidden_states: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kept_tokens: Tensor,
    kept_hidden: Tensor,
    kept_lens: Tensor,
    num_draft_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference of `widened_extend_inputs`."""
    b, front = len(seq_lens), kept_tokens.shape[1]
    rows = req_pool_indices.unsqueeze(1)
    column = torch.arange(front + num_draft_tokens, device=seq_lens.device)
    is_there = column >= front - torch.minimum(kept_lens[rows], seq_lens.unsqueeze(1))
    positions = torch.where(is_there, seq_lens.unsqueeze(1) - front + column, 0)
    slots = torch.where(is_there, req_to_token[rows, positions], 0)
    new_hidden = hidden_states.view(b, num_draft_tokens, hidden_states.shape[1])
    input_ids = torch.cat([kept_tokens[req_pool_indices], predict.view(b, num_draft_tokens)], 1)
    hidden = torch.cat([kept_hidden[req_pool_indices], new_hidden], 1)
    input_ids = torch.where(is_there, input_ids, 0)
    hidden = torch.where(is_there.unsqueeze(2), hidden, 0)
    return input_ids.flatten(), hidden.flatten(0, 1), positions.flatten(), slots.flatten()


@triton.jit(do_not_specialize=["total"])
def _widened_extend_inputs_kernel(
    seq_lens,
    predict,
    hidden_states,
    req_to_token,
    req_pool_indices,
    kept_tokens,
    kept_hidden,
    kept_lens,
    input_ids,
    hidden,
    positions,
    slots,
    total,
    front,
    n,
    hidden_size,
    row_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (t, c) writes the c-th COLUMNS of the t-th ROWS hidden states; the first of a row the rest of it."""
    part = tl.program_id(1)
    out = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = out < total
    r = out // (front + n)
    j = out - r * (front + n)
    seq_len = tl.load(seq_lens + r, inside, other=0)
    row = tl.load(req_pool_indices + r, inside, other=0)
    kept_len = tl.load(kept_lens + row, inside, other=0)
    is_there = inside & (j >= front - tl.minimum(kept_len, seq_len))
    old, new = is_there & (j < front), is_there & (j >= front)
    kept_row, new_row = row * front + j, r * n + j - front
    h = part * COLUMNS + tl.arange(0, COLUMNS)
    columns = (h < hidden_size)[None, :]
    value = tl.load(kept_hidden + kept_row[:, None] * hidden_size + h[None, :], old[:, None] & columns, other=0)
    value += tl.load(hidden_states + new_row[:, None] * hidden_size + h[None, :], new[:, None] & columns, other=0)
    tl.store(hidden + out[:, None] * hidden_size + h[None, :], value, inside[:, None] & columns)
    if part == 0:
        position = tl.where(is_there, seq_len - front + j, 0)
        tl.store(positions + out, position, inside)
        tl.store(slots + out, tl.load(req_to_token + row * row_stride + position, is_there, other=0), inside)
        token = tl.load(kept_tokens + kept_row, old, other=0) + tl.load(predict + new_row, new, other=0).to(tl.int64)
        tl.store(input_ids + out, token, inside)


def widened_extend_inputs_triton(
    seq_lens: Tensor,
    predict: Tensor,
    hidden_states: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kept_tokens: Tensor,
    kept_hidden: Tensor,
    kept_lens: Tensor,
    num_draft_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel's launch."""
    (_, front, hidden_size), device = kept_hidden.shape, seq_lens.device
    total = len(seq_lens) * (front + num_draft_tokens)
    input_ids, positions, slots = (torch.empty(total, dtype=torch.int64, device=device) for _ in range(3))
    hidden = torch.empty(total, hidden_size, dtype=hidden_states.dtype, device=device)
    if total:
        columns = min(triton.next_power_of_2(hidden_size), 1024)
        at_once = min(triton.next_power_of_2(total), 2048 // columns)
        # One of the two loads gives zeros where the other gives a hidden state: of integers, the sum is that state.
        bits = BITS[hidden.element_size()]
        _widened_extend_inputs_kernel[(triton.cdiv(total, at_once), triton.cdiv(hidden_size, columns))](
            seq_lens,
            predict,
            hidden_states.view(bits),
            req_to_token,
            req_pool_indices,
            kept_tokens,
            kept_hidden.view(bits),
            kept_lens,
            input_ids,
            hidden.view(bits),
            positions,
            slots,
            total,
            front,
            num_draft_tokens,
            hidden_size,
            req_to_token.stride(0),
            ROWS=at_once,
            COLUMNS=columns,
            num_warps=4,
        )
    return input_ids, hidden, positions, slots


def widened_extend_inputs(
    seq_lens: Tensor,
    predict: Tensor,
    hidden_states: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kept_tokens: Tensor,
    kept_hidden: Tensor,
    kept_lens: Tensor,
    num_draft_tokens: int,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """seq_lens i64 (b): committed before this round; predict i32 or i64 (b*N), hidden_states (b*N, H): the target's,
    each request's accepted rows in front. req_to_token i64 (R, max_context) holds the slots of both, and of the round's
    N tokens; req_pool_indices i64 (b) its rows and the pool's. kept_tokens i64 (R, F), kept_hidden (R, F, H), kept_lens
    i64 (R): the pool that `append_boundary_rows` keeps, as it was before this round.

    Returns, W = F + N: (input_ids i64 (b*W); hidden_states (b*W, H); positions i64 (b*W); slots i64 (b*W)).
    Raises ValueError for other shapes or types, and, where values are checked, for a place that the table lacks.
    """
    run = choose(backend, device_of("seq_lens", seq_lens), widened_extend_inputs_torch, widened_extend_inputs_triton)
    device, total = seq_lens.device, len(seq_lens) * num_draft_tokens
    check_size("num_draft_tokens", num_draft_tokens)
    check_tensor("seq_lens", seq_lens, (None,))
    check_tensor("predict", predict, (total,), (torch.int32, torch.int64), device)
    check_tensor("hidden_states", hidden_states, (total, None), hidden_states.dtype, device)
    check_tensor("req_to_token", req_to_token, (None, None), device=device)
    check_tensor("req_pool_indices", req_pool_indices, seq_lens.shape, device=device)
    check_pool_of_rows(kept_tokens, kept_hidden, kept_lens, hidden_states)
    rows, width = req_to_token.shape
    check_bounds("req_pool_indices", req_pool_indices, 0, min(rows, len(kept_lens)))
    check_bounds("seq_lens", seq_lens, 0, width - num_draft_tokens + 1)
    count_launch("widened_extend_inputs")
    return run(
        seq_lens,
        predict,
        hidden_states,
        req_to_token,
        req_pool_indices,
        kept_tokens,
        kept_hidden,
        kept_lens,
        num_draft_tokens,
    )
