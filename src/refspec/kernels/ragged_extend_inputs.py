"""What the draft-extend after a round is fed, when each request has as many rows as it accepted tokens.

Bytes moved: 8 out for each accepted token; for each request 12 in (its length, its number of accepted), its last
accepted token in and 16 out (last_rows, bonus_tokens). The other tokens are fed as they are, and not read here.

Source: SGLang: python/sglang/srt/speculative/eagle_utils.py:create_extend_spec_info @v0.4.6
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_tensor, device_of, values_are_checked
from refspec.kernels.launches import count_launch


def ragged_extend_inputs_torch(
    seq_lens: Tensor, accept_lens: Tensor, accept_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of `ragged_extend_inputs`."""
    total = len(accept_tokens)
    ends = accept_lens.cumsum(0)  # i64
    request = torch.repeat_interleave(accept_lens, output_size=total)  # of each row
    positions = torch.arange(total, device=ends.device) + (seq_lens - ends)[request]
    last_rows = ends - 1
    return positions, last_rows, accept_tokens[last_rows].long()


@triton.jit(do_not_specialize=["total"])
def _ragged_extend_inputs_kernel(
    seq_lens,
    accept_lens,
    accept_tokens,
    positions,
    last_rows,
    bonus_tokens,
    total,
    B_UPPER: tl.constexpr,  # b, rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """Program r does request r, in one block unless it accepted very many."""
    r = tl.program_id(0)
    others = tl.arange(0, B_UPPER)
    before = tl.sum(tl.load(accept_lens + others, others < r, other=0).to(tl.int64))
    accepted = tl.load(accept_lens + r).to(tl.int64)
    last = before + accepted - 1
    tl.store(last_rows + r, last)
    inside = (last >= 0) & (last < total)  # whatever the lengths, not beyond the buffers
    tl.store(bonus_tokens + r, tl.load(accept_tokens + last, inside, other=0).to(tl.int64))
    start = tl.load(seq_lens + r) - accepted
    for first in range(0, tl.minimum(accepted, total - before), BLOCK):
        row = first + tl.arange(0, BLOCK)
        tl.store(positions + before + row, start + row, (row < accepted) & (before + row < total))


def ragged_extend_inputs_triton(
    seq_lens: Tensor, accept_lens: Tensor, accept_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's launch."""
    b, total = len(seq_lens), len(accept_tokens)
    positions, last_rows, bonus_tokens = (
        torch.empty(size, dtype=torch.int64, device=seq_lens.device) for size in (total, b, b)
    )
    if b:
        b_upper = triton.next_power_of_2(b)
        _ragged_extend_inputs_kernel[(b,)](
            seq_lens,
            accept_lens,
            accept_tokens,
            positions,
            last_rows,
            bonus_tokens,
            total,
            B_UPPER=b_upper,
            BLOCK=64,
            num_warps=max(1, min(8, b_upper // 256)),
        )
    return positions, last_rows, bonus_tokens


def ragged_extend_inputs(
    seq_lens: Tensor, accept_lens: Tensor, accept_tokens: Tensor, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """seq_lens i64 (b): committed, this round's tokens included; accept_lens i32 (b), at least 1 each; accept_tokens
    i32 or i64 (sum of accept_lens): the accepted tokens, request after request, each bonus last.

    Returns (positions i64 (sum): the newest accept_lens[r] of request r, up to seq_lens[r] - 1; last_rows i64 (b):
    the row of each bonus; bonus_tokens i64 (b)).
    Raises ValueError for other shapes or types, and, where values are checked, for lengths that do not fit.
    """
    run = choose(backend, device_of("seq_lens", seq_lens), ragged_extend_inputs_torch, ragged_extend_inputs_triton)
    check_tensor("seq_lens", seq_lens, (None,))
    check_tensor("accept_lens", accept_lens, seq_lens.shape, torch.int32, seq_lens.device)
    check_tensor("accept_tokens", accept_tokens, (None,), (torch.int32, torch.int64), seq_lens.device)
    check_bounds("accept_lens", accept_lens, 1, 2**31)
    if values_are_checked(seq_lens.device):
        check_bounds("seq_lens - accept_lens", seq_lens - accept_lens, 0, 2**62)
        if (total := int(accept_lens.sum())) != len(accept_tokens):
            raise ValueError(f"accept_tokens has {len(accept_tokens)} entries, accept_lens ask for {total}")
    count_launch("ragged_extend_inputs")
    return run(seq_lens, accept_lens, accept_tokens)
