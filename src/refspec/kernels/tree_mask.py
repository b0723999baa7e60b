"""Who may attend to whom in b trees of N nodes: the forms in which that is handed on. All of them are flat.

| mask_mode | dtype | each request's part                                                                        |
|-----------|-------|--------------------------------------------------------------------------------------------|
| "full"    | bool  | N rows of seq_len + N columns: the committed tokens, which all nodes see, then the nodes   |
| "qlen"    | bool  | N rows of N columns: the nodes alone                                                       |
| "packed"  | uint8 | N rows of one little-endian word of 1, 2 or 4 bytes (N <= 8, 16, 32); bit c is column c    |

"full" grows with the context: 64 requests of 64 nodes after a million tokens each take 4 GB, and places in it pass
2^31. Its size is also the only thing here that must be known on the host: where the caller does not say what seq_lens
add up to, the host asks the device for it, and waits. The references wait in any case.

Source: SGLang: python/sglang/kernels/ops/speculative/spec_tree.py:TreeMaskMode @0.5.23, and the words of
python/sglang/kernels/jit/include/sgl_kernel/speculative/eagle.cuh:build_tree_efficient_partial_packed @0.5.23
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from refspec.kernels.backend import tl, triton

__all__ = ["MASK_MODES", "check_mask_mode", "flat_mask", "full_row_start", "new_mask", "store_mask", "tile_of"]

MASK_MODES = ("full", "qlen", "packed")
MOST_PACKED = 32


def check_mask_mode(mask_mode: str, num_draft_tokens: int) -> None:
    """Raises ValueError for a form that does not exist, or that cannot hold so many columns."""
    if mask_mode not in MASK_MODES:
        raise ValueError(f"mask_mode is {mask_mode!r}, it must be one of: {', '.join(MASK_MODES)}")
    if mask_mode == "packed" and num_draft_tokens > MOST_PACKED:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}, a packed row has {MOST_PACKED} bits at most")


def word_of(num_draft_tokens: int) -> torch.dtype:
    """The smallest word with a bit for each column."""
    return torch.uint8 if num_draft_tokens <= 8 else torch.uint16 if num_draft_tokens <= 16 else torch.uint32


def flat_mask(visible: Tensor, seq_lens: Tensor, mask_mode: str) -> Tensor:
    """visible bool (b, N, N), seq_lens i64 (b) -> the mask in that form. The reference of `store_mask`."""
    if mask_mode == "full":
        prefix_lens = seq_lens.tolist()
        rows = [F.pad(tree, (prefix, 0), value=True) for tree, prefix in zip(visible, prefix_lens, strict=True)]
        return torch.cat([visible.new_zeros(0), *(row.flatten() for row in rows)])
    if mask_mode == "packed":
        n = visible.shape[-1]
        words = (visible.long() << torch.arange(n, device=visible.device)).sum(-1)
        in_bytes = words.view(torch.uint8).unflatten(-1, (n, 8))  # little-endian, as the machine is
        return in_bytes[..., : word_of(n).itemsize].flatten()
    return visible.flatten()


def new_mask(seq_lens: Tensor, num_draft_tokens: int, mask_mode: str, seq_lens_sum: int | None) -> Tensor:
    """A mask for `store_mask` to complete: flat, "packed" as words. In a "full" one the prefix is there already.

    seq_lens_sum: the sum of seq_lens; None: the host asks the device for it, and waits.
    One fill writes all of a "full" mask, 16 bytes at a time, and the trees' own columns are written over it: rows
    begin at any byte, so a kernel that went by rows would write the prefix byte by byte.
    """
    b, n, device = len(seq_lens), num_draft_tokens, seq_lens.device
    if mask_mode == "full":
        if seq_lens_sum is None:
            seq_lens_sum = int(seq_lens.sum())
        return torch.ones(n * (seq_lens_sum + b * n), dtype=torch.bool, device=device)
    if mask_mode == "packed":
        return torch.empty(b * n, dtype=word_of(n), device=device)
    return torch.empty(b * n * n, dtype=torch.bool, device=device)


def tile_of(num_draft_tokens: int) -> dict[str, int]:
    """How a kernel cuts N rows of N columns: ROWS and N_UPPER, powers of two, and num_warps.

    Up to 32 nodes one tile is the whole tree. A tile of up to 1024 cells gives each thread 8 of them at most.
    """
    n_upper = triton.next_power_of_2(num_draft_tokens)
    rows = min(n_upper, max(1, 1024 // n_upper))
    return {"ROWS": rows, "N_UPPER": n_upper, "num_warps": max(1, min(4, rows * n_upper // 256))}


@triton.jit
def full_row_start(seq_lens, r, row, n, B_UPPER: tl.constexpr):
    """Where, in a "full" mask, node 0's column of these rows of request r stands; i64."""
    others = tl.arange(0, B_UPPER)
    before = tl.sum(tl.load(seq_lens + others, others < r, other=0))
    prefix = tl.load(seq_lens + r)
    return (before + r * n) * n + row * (prefix + n) + prefix


@triton.jit
def store_mask(tree_mask, visible, seq_lens, r, row, column, n, MODE: tl.constexpr, B_UPPER: tl.constexpr):
    """Store these rows of request r (an i64). visible i1 (rows, columns) is false in columns from n on.

    B_UPPER: b, rounded up to a power of two.
    """
    if MODE == "packed":
        word = tl.sum(tl.where(visible, tl.full(visible.shape, 1, tl.int64) << column[None, :], 0), 1)
        tl.store(tree_mask + r * n + row, word.to(tree_mask.dtype.element_ty), row < n)
    else:
        if MODE == "full":
            start = full_row_start(seq_lens, r, row, n, B_UPPER)
        else:
            start = (r * n + row) * n
        inside = (row < n)[:, None] & (column < n)[None, :]
        tl.store(tree_mask + start[:, None] + column[None, :], visible, inside)
