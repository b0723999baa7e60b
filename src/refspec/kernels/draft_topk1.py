"""The chain's draft step: each row's best token, and the bookkeeping of the step with it.

With k = 1 there is nothing to score and nothing to sort. One pass over the logits finds the best token, without a
softmax, and the same launch that settles it moves the positions on and enters the token into the block to verify. The
probability is given as 1: a chain has no rival to compare with.

NaN loses against every number, -inf included; equal logits go to the lowest token; a row of NaN alone gives token 0.
(SGLang reads NaN as -1e30, which beats numbers below that; elsewhere both are the same.)

Bytes moved for each row: 2·V or 4·V of logits, 12 out and 24 for positions and block. A row is split into tiles, for
one program alone cannot keep the memory busy; each leaves 8 bytes to the second launch.

Source: SGLang: python/sglang/kernels/ops/speculative/topk1.py:draft_topk1_postprocess @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_size, check_tensor, device_of
from refspec.kernels.launches import count_launch


def draft_topk1_torch(
    logits: Tensor, positions: Tensor, draft_tokens: Tensor | None, column: int
) -> tuple[Tensor, Tensor]:
    """The reference of `draft_topk1`."""
    best = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(1, keepdim=True)
    is_best = logits == best  # NaN equals nothing; without any number no token is, and argmax gives 0
    index = is_best.view(torch.int8).argmax(1, keepdim=True)  # torch documents the first of equal maxima
    positions += 1
    if draft_tokens is not None:
        draft_tokens[:, column] = index.squeeze(1)
    return torch.ones_like(index, dtype=torch.float32), index


@triton.jit
def _best_of_tile_kernel(logits, best, best_index, row_stride, vocab, BLOCK: tl.constexpr):
    """Program (r, t) finds the best of the t-th tile of row r, and where it first stands: 2^31-1 if all is NaN."""
    r, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + r * row_stride + token, token < vocab, other=float("nan")).to(tl.float32)
    most = tl.max(tl.where(x == x, x, -float("inf")), 0)
    out = r * tl.num_programs(1) + tile
    tl.store(best + out, most)
    tl.store(best_index + out, tl.min(tl.where(x == most, token, 2147483647), 0))


@triton.jit(do_not_specialize=["column"])
def _settle_kernel(
    best,
    best_index,
    positions,
    draft_tokens,
    topk_p,
    topk_index,
    tiles,
    row_stride,
    column,
    HAS_BLOCK: tl.constexpr,
    T_UPPER: tl.constexpr,  # tiles, rounded up to a power of two
):
    """Program r finds the best of row r's tiles and does the bookkeeping."""
    r = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, T_UPPER)
    x = tl.load(best + r * tiles + tile, tile < tiles, other=-float("inf"))
    index = tl.load(best_index + r * tiles + tile, tile < tiles, other=2147483647)
    first = tl.min(tl.where(x == tl.max(x, 0), index, 2147483647), 0)
    first = tl.where(first == 2147483647, 0, first).to(tl.int64)
    tl.store(topk_index + r, first)
    tl.store(topk_p + r, 1.0)
    tl.store(positions + r, tl.load(positions + r) + 1)
    if HAS_BLOCK:
        tl.store(draft_tokens + r * row_stride + column, first)


def draft_topk1_triton(
    logits: Tensor, positions: Tensor, draft_tokens: Tensor | None, column: int
) -> tuple[Tensor, Tensor]:
    """The kernels' launches: the best of each tile, then of each row."""
    (b, vocab), device = logits.shape, logits.device
    topk_p = torch.empty(b, 1, device=device)
    topk_index = torch.empty(b, 1, dtype=torch.int64, device=device)
    if not b:
        return topk_p, topk_index
    block = 2048
    tiles = triton.cdiv(vocab, block)
    best = torch.empty(b, tiles, device=device)
    best_index = torch.empty(b, tiles, dtype=torch.int32, device=device)
    _best_of_tile_kernel[(b, tiles)](logits, best, best_index, logits.stride(0), vocab, BLOCK=block, num_warps=4)
    _settle_kernel[(b,)](
        best,
        best_index,
        positions,
        draft_tokens,
        topk_p,
        topk_index,
        tiles,
        draft_tokens.stride(0) if draft_tokens is not None else 0,
        column,
        HAS_BLOCK=draft_tokens is not None,
        T_UPPER=triton.next_power_of_2(tiles),
        num_warps=1,
    )
    return topk_p, topk_index


def draft_topk1(
    logits: Tensor, positions: Tensor, draft_tokens: Tensor | None, column: int, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """logits f16, bf16 or f32 (b, V); positions i64 (b); draft_tokens i64 (b, S) or None. The rows of logits and of
    draft_tokens are contiguous, but may lie further apart: a padded head's logits are such a view.

    Returns (topk_p f32 (b, 1), all 1; topk_index i64 (b, 1): each row's best token). In place: positions += 1 and
    draft_tokens[:, column] = the best tokens. Raises ValueError for other shapes, types or layouts, and for a column
    that draft_tokens lacks.
    """
    run, device = choose(backend, device_of("logits", logits), draft_topk1_torch, draft_topk1_triton), logits.device
    floats = (torch.float16, torch.bfloat16, torch.float32)
    check_tensor("logits", logits, (None, None), floats, rows_may_lie_apart=True)
    b, vocab = logits.shape
    check_size("the vocabulary of logits", vocab)
    check_tensor("positions", positions, (b,), device=device)
    if draft_tokens is not None:
        check_tensor("draft_tokens", draft_tokens, (b, None), device=device, rows_may_lie_apart=True)
        check_size("column", column, at_least=0, at_most=draft_tokens.shape[1] - 1)
    count_launch("draft_topk1")
    return run(logits, positions, draft_tokens, column)
