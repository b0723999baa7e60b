"""Evict whole pages only: what shares a page with the last kept token stays.

After verification, row i of a request stands at position seq_len + i. With its first `kept` rows kept, the request
owns the positions up to seq_len + kept, and the page that holds the last of them is not free, nor is any row in it.

That counts rows: it holds where the kept ones are the first, as on a chain, or after compaction. Kept rows that lie
scattered say nothing about how far the kept pages reach.

Bytes moved: 8 for each request, and N in and N out for its rows.

Source: SGLang: python/sglang/srt/speculative/eagle_utils.py:align_evict_mask_to_page_size @v0.4.6
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_size, check_tensor, device_of, values_are_checked
from refspec.kernels.launches import count_launch


def align_evict_mask_to_page_size_torch(seq_lens: Tensor, evict_mask: Tensor, page_size: int) -> None:
    """The reference of `align_evict_mask_to_page_size`."""
    n = evict_mask.shape[1]
    kept_until = seq_lens + n - evict_mask.sum(dim=1)
    free_from = (kept_until + page_size - 1) // page_size * page_size
    positions = seq_lens.unsqueeze(1) + torch.arange(n, device=seq_lens.device)
    evict_mask &= positions >= free_from.unsqueeze(1)


@triton.jit(do_not_specialize=["b"])
def _align_evict_mask_to_page_size_kernel(
    seq_lens, evict_mask, b, n, page_size, ROWS: tl.constexpr, N_UPPER: tl.constexpr
):
    """Each program aligns ROWS requests."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, N_UPPER)
    inside = (r < b)[:, None] & (column < n)[None, :]
    entry = evict_mask + r[:, None] * n + column[None, :]
    evicted = tl.load(entry, inside, other=0).to(tl.int64)
    seq_len = tl.load(seq_lens + r, r < b, other=0)
    kept_until = seq_len + n - tl.sum(evicted, axis=1)
    free_from = (kept_until + page_size - 1) // page_size * page_size
    stays = seq_len[:, None] + column[None, :] < free_from[:, None]
    tl.store(entry, tl.zeros_like(evicted).to(tl.uint8), inside & stays)


def align_evict_mask_to_page_size_triton(seq_lens: Tensor, evict_mask: Tensor, page_size: int) -> None:
    """The kernel's launch."""
    b, n = evict_mask.shape
    if not (b and n):
        return
    n_upper = triton.next_power_of_2(n)
    rows = min(triton.next_power_of_2(b), max(1, 256 // n_upper))
    _align_evict_mask_to_page_size_kernel[(triton.cdiv(b, rows),)](
        seq_lens,
        evict_mask.view(torch.uint8),
        b,
        n,
        page_size,
        ROWS=rows,
        N_UPPER=n_upper,
        num_warps=max(1, min(8, n_upper // 256)),
    )


def align_evict_mask_to_page_size(seq_lens: Tensor, evict_mask: Tensor, page_size: int, backend: str = "auto") -> None:
    """In place: rows of evict_mask that share a page with a committed or kept token become False.

    seq_lens i64 (b): committed before this round; evict_mask bool (b, N): True for rows to free. Kept rows come before
    evicted ones. Afterwards every evicted row lies in a page of evicted rows alone, or of rows behind the N.
    Raises ValueError for other shapes or types, and, where values are checked, for a row kept behind an evicted one.
    """
    run = choose(
        backend,
        device_of("seq_lens", seq_lens),
        align_evict_mask_to_page_size_torch,
        align_evict_mask_to_page_size_triton,
    )
    check_size("page_size", page_size)
    check_tensor("seq_lens", seq_lens, (None,))
    check_tensor("evict_mask", evict_mask, (len(seq_lens), None), torch.bool, seq_lens.device)
    check_bounds("seq_lens", seq_lens, 0, 2**62)
    if values_are_checked(seq_lens.device) and bool((evict_mask[:, :-1] & ~evict_mask[:, 1:]).any()):
        raise ValueError("evict_mask keeps a row behind an evicted one, kept rows must be the first")
    count_launch("align_evict_mask_to_page_size")
    run(seq_lens, evict_mask, page_size)
