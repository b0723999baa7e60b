"""What the draft-extend after a round is fed, when each request has N rows whatever it accepted.

The shape is then the same every round, which a CUDA graph needs and no trip to the host has to find out. The rows
behind the accepted ones are computed and not used: their slots are overwritten before anybody reads them.

Bytes moved for each request: 12 in (its length, its number of accepted) and 8 out; for each of its N rows 4 in and
16 out.

Source: SGLang: python/sglang/kernels/ops/speculative/eagle.py:prepare_draft_extend_inputs, prepare_draft_extend_layout
@0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_size, check_tensor, device_of
from refspec.kernels.launches import count_launch


def padded_extend_inputs_torch(
    seq_lens: Tensor, accept_lens: Tensor, predict: Tensor, num_draft_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of `padded_extend_inputs`."""
    b, device = len(seq_lens), seq_lens.device
    positions = seq_lens.unsqueeze(1) + torch.arange(num_draft_tokens, device=device)
    last_rows = torch.arange(b, device=device) * num_draft_tokens + accept_lens - 1
    return positions.flatten(), predict.long(), last_rows


@triton.jit(do_not_specialize=["b"])
def _padded_extend_inputs_kernel(
    seq_lens,
    accept_lens,
    predict,
    positions,
    input_ids,
    last_rows,
    b,
    n,
    ROWS: tl.constexpr,
    N_UPPER: tl.constexpr,
):
    """Each program does ROWS requests."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, N_UPPER)
    inside = (r < b)[:, None] & (column < n)[None, :]
    row = r[:, None] * n + column[None, :]
    seq_len = tl.load(seq_lens + r, r < b, other=0)
    tl.store(positions + row, seq_len[:, None] + column[None, :], inside)
    tl.store(input_ids + row, tl.load(predict + row, inside, other=0).to(tl.int64), inside)
    tl.store(last_rows + r, r * n + tl.load(accept_lens + r, r < b, other=0) - 1, r < b)


def padded_extend_inputs_triton(
    seq_lens: Tensor, accept_lens: Tensor, predict: Tensor, num_draft_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's launch."""
    b, n = len(seq_lens), num_draft_tokens
    positions, input_ids, last_rows = (
        torch.empty(size, dtype=torch.int64, device=seq_lens.device) for size in (b * n, b * n, b)
    )
    if b:
        n_upper = triton.next_power_of_2(n)
        rows = min(triton.next_power_of_2(b), max(1, 256 // n_upper))
        _padded_extend_inputs_kernel[(triton.cdiv(b, rows),)](
            seq_lens,
            accept_lens,
            predict,
            positions,
            input_ids,
            last_rows,
            b,
            n,
            ROWS=rows,
            N_UPPER=n_upper,
            num_warps=1,
        )
    return positions, input_ids, last_rows


def padded_extend_inputs(
    seq_lens: Tensor, accept_lens: Tensor, predict: Tensor, num_draft_tokens: int, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """seq_lens i64 (b): committed before this round; accept_lens i32 (b), 1 to N; predict i32 (b*N): the target's
    tokens, each request's accepted ones in front (`compact_to_front`), the bonus last of them.

    Returns (positions i64 (b*N): seq_len + column; input_ids i64 (b*N); last_rows i64 (b): the row of each bonus).
    Raises ValueError for other shapes or types, and, where values are checked, for accept_lens out of range.
    """
    run = choose(backend, device_of("seq_lens", seq_lens), padded_extend_inputs_torch, padded_extend_inputs_triton)
    check_size("num_draft_tokens", num_draft_tokens)
    check_tensor("seq_lens", seq_lens, (None,))
    check_tensor("accept_lens", accept_lens, seq_lens.shape, torch.int32, seq_lens.device)
    check_tensor("predict", predict, (len(seq_lens) * num_draft_tokens,), torch.int32, seq_lens.device)
    check_bounds("seq_lens", seq_lens, 0, 2**62)
    check_bounds("accept_lens", accept_lens, 1, num_draft_tokens + 1)
    count_launch("padded_extend_inputs")
    return run(seq_lens, accept_lens, predict, num_draft_tokens)
