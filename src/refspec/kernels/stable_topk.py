"""The k largest of each row, ties to the lower index.

torch.topk leaves the order of equal values open, and with it which of them is kept. Everything that chooses here
(beams, kept candidates, the draft's tokens) must choose the same on every device, and must never keep a child
without its parent, whose score is at least as high and whose index is lower.

No sorting is needed to know an entry's place: it is the number of entries that come before it, and each entry can
count them for itself. That takes n² comparisons, which for the candidates of a draft (n <= 264) is nothing. A row as
long as a vocabulary is cut into tiles first, and of each tile only the k largest, taken off one by one, are placed.

Bytes moved: each row is read (4·n; a short one by each of its ceil(n / 32) programs, from the cache) and k pairs are
written (12·k). A long row's tiles leave 8·k bytes each in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_size, device_of, values_are_checked
from refspec.kernels.launches import count_launch


def stable_topk_torch(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The reference of `stable_topk`."""
    if k == 1:
        top = values.max(dim=-1, keepdim=True)  # torch documents the first of equal maxima
        return top.values, top.indices
    # The bits of a float >= 0 order like the float. Beneath them goes the index, counted backwards: no two keys tie.
    n = values.shape[-1]
    backwards = torch.arange(n - 1, -1, -1, device=values.device)
    keys = (values.view(torch.int32).to(torch.int64) << 32) | backwards
    indices = n - 1 - (torch.topk(keys, k, dim=-1).values & 0xFFFFFFFF)
    return values.gather(-1, indices), indices


SHORT = 512  # rows of so many entries are placed at once
TILE = 2048  # entries of a longer row for one program
NOTHING = tl.constexpr(-(2**31))  # where a row or tile has no entry: comes after all


@triton.jit
def _best_of_tile_kernel(bits, best, best_index, n, k, tiles, BLOCK: tl.constexpr):
    """Program (r, t) takes the k largest off the t-th tile of row r, one by one, into best (rows, tiles·k)."""
    r, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(bits + r * n + index, index < n, other=NOTHING)
    out = (r * tiles + tile) * k
    for place in range(k):
        most = tl.max(x, 0)
        first = tl.min(tl.where(x == most, index, 2147483647), 0)
        tl.store(best + out + place, most)
        tl.store(best_index + out + place, first)
        x = tl.where(index == first, NOTHING, x)


@triton.jit
def _place_kernel(
    bits, index, top_bits, top_index, n, k, HAS_INDEX: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr
):
    """Program (r, t) finds the places of OWN entries of row r, and writes those that are among the first k.

    index (rows, n): what to write for an entry; without it, where the entry stands. Entries that tie keep their order.
    """
    r = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * OWN + tl.arange(0, OWN)
    x = tl.load(bits + r * n + own, own < n, other=NOTHING)
    place = tl.zeros([OWN], tl.int32)
    for start in range(0, n, OTHERS):
        other = start + tl.arange(0, OTHERS)
        y = tl.load(bits + r * n + other, other < n, other=NOTHING)
        before = (y[None, :] > x[:, None]) | ((y[None, :] == x[:, None]) & (other[None, :] < own[:, None]))
        place += tl.sum(before.to(tl.int32), 1)
    chosen = (own < n) & (place < k)
    which = own
    if HAS_INDEX:
        which = tl.load(index + r * n + own, chosen, other=0)
    tl.store(top_bits + r * k + place, x, chosen)
    tl.store(top_index + r * k + place, which.to(tl.int64), chosen)


def stable_topk_triton(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The kernels' launches: one for short rows; for long ones another before it, which makes them short."""
    n, device = values.shape[-1], values.device
    top = torch.empty(*values.shape[:-1], k, device=device)
    top_index = torch.empty(*values.shape[:-1], k, dtype=torch.int64, device=device)
    rows = top.numel() // k
    if not rows:
        return top, top_index
    # Bits order like the floats >= 0 that they stand for, and totally: whatever they are, each place is written once.
    bits, index = values.contiguous().view(torch.int32), None
    own = 32
    if n > SHORT:
        tiles, taken = triton.cdiv(n, TILE), min(k, TILE)
        best = torch.empty(2, rows, tiles * taken, dtype=torch.int32, device=device)
        _best_of_tile_kernel[(rows, tiles)](bits, best[0], best[1], n, taken, tiles, BLOCK=TILE, num_warps=4)
        (bits, index), n = best, tiles * taken
    _place_kernel[(rows, triton.cdiv(n, own))](
        bits,
        index,
        top.view(torch.int32),
        top_index,
        n,
        k,
        HAS_INDEX=index is not None,
        OWN=own,
        OTHERS=128,
        num_warps=4,
    )
    return top, top_index


def stable_topk(values: Tensor, k: int, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """values: f32 (..., n), none negative (-0.0 counts) or NaN; 1 <= k <= n.

    Returns (values f32 (..., k), indices i64 (..., k)) by value descending, then index ascending. The kernel is made
    for rows of some hundred entries and any k, and for rows of any length and a k of some ten. Raises ValueError for
    another type or k, and, where values are checked, for such an entry.
    """
    run = choose(backend, device_of("values", values), stable_topk_torch, stable_topk_triton)
    if values.dtype is not torch.float32 or not values.dim():
        raise ValueError(f"values is {values.dtype} of shape {tuple(values.shape)}, it must be torch.float32 (..., n)")
    check_size("k", k, at_most=values.shape[-1])
    if values_are_checked(values.device) and bool((values.signbit() | values.isnan()).any()):
        raise ValueError("values has entries that are negative (-0.0 counts) or NaN")
    count_launch("stable_topk")
    return run(values, k)
