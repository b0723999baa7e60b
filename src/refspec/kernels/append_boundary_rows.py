"""Keep the newest rows of each request that a multi-layer draft will have to read again.

Layer i of such a draft is fed the tokens i + 1 places ahead of its positions (see `rotate_input_ids`). At the newest i
positions those tokens were guesses when it read them, and if verification has chosen others, its keys and values there
are wrong. So the next extend begins F = S - 1 rows before the boundary between what was read and what is new
(`widened_extend_inputs`), and for these it needs what it was fed: of each position the token behind it, and the
target's hidden state at it. The newest F such pairs of each request are kept in its row of a pool, the newest last.

Bytes moved for each request: F·(H + 8) in and out, each number of H as large as its type; 40 for where they are.

Source: SGLang: python/sglang/kernels/ops/speculative/multi_layer_eagle.py:stash_append_boundary_state_triton @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_tensor, device_of, values_are_checked
from refspec.kernels.compact_to_front import BITS
from refspec.kernels.launches import count_launch

TILE = 2048  # numbers that one program holds


def append_boundary_rows_torch(
    tokens: Tensor,
    hidden_states: Tensor,
    ends: Tensor,
    lens: Tensor,
    rows: Tensor,
    kept_tokens: Tensor,
    kept_hidden: Tensor,
    kept_lens: Tensor,
) -> None:
    """The reference of `append_boundary_rows`."""
    front = kept_tokens.shape[1]
    new = lens.clamp(max=front)
    place = torch.arange(front, device=rows.device) + new.unsqueeze(1)  # among the old ones and the new ones behind
    r, column = (place >= front).nonzero(as_tuple=True)
    for x, kept in ((tokens, kept_tokens), (hidden_states, kept_hidden)):
        kept[rows] = kept[rows.unsqueeze(1), place.clamp(max=front - 1)]
        kept[rows[r], column] = x[ends[r] - front + column].to(kept.dtype)
    kept_lens[rows] = (kept_lens[rows] + new).clamp(max=front)


@triton.jit
def _append_boundary_rows_kernel(
    tokens,
    hidden_states,
    ends,
    lens,
    rows,
    kept_tokens,
    kept_hidden,
    kept_lens,
    front,
    hidden_size,
    F_UPPER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (r, t) does the t-th COLUMNS of request r's hidden states; the first one its tokens too. It holds all of
    its part before it writes any of it.
    """
    r, part = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, F_UPPER)
    new = tl.minimum(tl.load(lens + r), front)
    is_new = (column < front) & (column + new >= front)
    is_old = column + new < front
    row = tl.load(rows + r)
    source, place = tl.load(ends + r) - front + column, row * front + column
    h = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = (h < hidden_size)[None, :]
    from_new = tl.load(hidden_states + source[:, None] * hidden_size + h[None, :], is_new[:, None] & inside)
    from_old = tl.load(kept_hidden + (place + new)[:, None] * hidden_size + h[None, :], is_old[:, None] & inside)
    new_token = tl.load(tokens + source, is_new & (part == 0)).to(tl.int64)
    old_token = tl.load(kept_tokens + place + new, is_old & (part == 0))
    tl.debug_barrier()
    values = tl.where(is_new[:, None], from_new, from_old)
    tl.store(kept_hidden + place[:, None] * hidden_size + h[None, :], values, (column < front)[:, None] & inside)
    if part == 0:
        tl.store(kept_tokens + place, tl.where(is_new, new_token, old_token), column < front)
        tl.store(kept_lens + row, tl.minimum(tl.load(kept_lens + row) + new, front))


def append_boundary_rows_triton(
    tokens: Tensor,
    hidden_states: Tensor,
    ends: Tensor,
    lens: Tensor,
    rows: Tensor,
    kept_tokens: Tensor,
    kept_hidden: Tensor,
    kept_lens: Tensor,
) -> None:
    """The kernel's launch."""
    b, (_, front, hidden_size) = len(rows), kept_hidden.shape
    if b and front:
        f_upper = triton.next_power_of_2(front)
        columns = min(triton.next_power_of_2(hidden_size), max(1, TILE // f_upper))
        bits = BITS[kept_hidden.element_size()]
        _append_boundary_rows_kernel[(b, triton.cdiv(hidden_size, columns))](
            tokens,
            hidden_states.view(bits),
            ends,
            lens,
            rows,
            kept_tokens,
            kept_hidden.view(bits),
            kept_lens,
            front,
            hidden_size,
            F_UPPER=f_upper,
            COLUMNS=columns,
            num_warps=4,
        )


def append_boundary_rows(
    tokens: Tensor,
    hidden_states: Tensor,
    ends: Tensor,
    lens: Tensor,
    rows: Tensor,
    kept_tokens: Tensor,
    kept_hidden: Tensor,
    kept_lens: Tensor,
    backend: str = "auto",
) -> None:
    """In place: of request r, the newest min(lens[r], F) of its lens[r] rows before row ends[r] enter the end of row
    rows[r] of the pool. What was there moves towards the front, the oldest is lost. kept_lens says how many count.

    tokens i32 or i64 (n), hidden_states (n, H): the rows that were committed, request after request, with or without
    others between them; ends, lens, rows i64 (b), no row of the pool twice. The pool: kept_tokens i64 (R, F);
    kept_hidden (R, F, H), of hidden_states' type; kept_lens i64 (R), from 0 to F. A request that begins sets its
    kept_lens to 0 first.
    Raises ValueError for other shapes or types, and, where values are checked, for rows that are not there.
    """
    run = choose(backend, device_of("tokens", tokens), append_boundary_rows_torch, append_boundary_rows_triton)
    device = tokens.device
    check_tensor("tokens", tokens, (None,), (torch.int32, torch.int64))
    check_tensor("hidden_states", hidden_states, (len(tokens), None), hidden_states.dtype, device)
    check_tensor("ends", ends, (None,), device=device)
    check_tensor("lens", lens, ends.shape, device=device)
    check_tensor("rows", rows, ends.shape, device=device)
    check_pool_of_rows(kept_tokens, kept_hidden, kept_lens, hidden_states)
    check_bounds("rows", rows, 0, len(kept_lens))
    check_bounds("lens", lens, 0, len(tokens) + 1)
    check_bounds("ends", ends, 0, len(tokens) + 1)
    if values_are_checked(device):
        check_bounds("ends - lens", ends - lens, 0, len(tokens) + 1)
        if len(rows.unique()) < len(rows):
            raise ValueError(f"rows names rows more than once: {rows.tolist()}")
    count_launch("append_boundary_rows")
    run(tokens, hidden_states, ends, lens, rows, kept_tokens, kept_hidden, kept_lens)


def check_pool_of_rows(kept_tokens: Tensor, kept_hidden: Tensor, kept_lens: Tensor, hidden_states: Tensor) -> None:
    """Raises TypeError or ValueError if this is no such pool for such hidden states."""
    check_tensor("kept_tokens", kept_tokens, (None, None), device=hidden_states.device)
    shape = (*kept_tokens.shape, hidden_states.shape[1])
    check_tensor("kept_hidden", kept_hidden, shape, hidden_states.dtype, hidden_states.device)
    check_tensor("kept_lens", kept_lens, kept_tokens.shape[:1], device=hidden_states.device)
    check_bounds("kept_lens", kept_lens, 0, kept_tokens.shape[1] + 1)
