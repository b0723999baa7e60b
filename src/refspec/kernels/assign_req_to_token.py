"""Enter slots into the request table.

Bytes moved: 8 in and 8 out for each slot, 24 for each request (its row, start and end).

Source: SGLang: python/sglang/srt/mem_cache/allocation.py:assign_req_to_token_pool @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.launches import check_backend, count_launch


def assign_req_to_token_torch(
    req_to_token: Tensor, req_pool_indices: Tensor, start: Tensor, end: Tensor, slots: Tensor
) -> None:
    """The reference of `assign_req_to_token`."""
    lens = end - start
    rows = req_pool_indices.repeat_interleave(lens)
    before = lens.cumsum(0) - lens
    offset = torch.arange(len(slots), device=slots.device) - before.repeat_interleave(lens)
    req_to_token[rows, start.repeat_interleave(lens) + offset] = slots


def assign_req_to_token(
    req_to_token: Tensor, req_pool_indices: Tensor, start: Tensor, end: Tensor, slots: Tensor, backend: str = "auto"
) -> None:
    """In place: req_to_token[req_pool_indices[r], start[r]:end[r]] = the next end[r]-start[r] of slots.

    req_to_token i64 (rows, max_context); req_pool_indices, start, end i64 (b); slots i64 (sum of end - start).
    """
    check_backend(backend)
    count_launch("assign_req_to_token")
    assign_req_to_token_torch(req_to_token, req_pool_indices, start, end, slots)
