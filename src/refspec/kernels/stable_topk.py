"""The k largest of each row, ties to the lower index.

torch.topk leaves the order of equal values open, and with it which of them is kept. Everything that chooses here
(beams, kept candidates, the draft's tokens) must choose the same on every device, and must never keep a child
without its parent, whose score is at least as high and whose index is lower.

Bytes moved: each row is read once (4·n) and k pairs are written (12·k).
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import check_backend
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


def stable_topk(values: Tensor, k: int, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """values: f32 (..., n), none negative or NaN; 1 <= k <= n.

    Returns (values f32 (..., k), indices i64 (..., k)) by value descending, then index ascending.
    """
    check_backend(backend)
    count_launch("stable_topk")
    return stable_topk_torch(values, k)
