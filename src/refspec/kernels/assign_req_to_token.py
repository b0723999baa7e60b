"""Enter slots into the request table.

Bytes moved: 8 in and 8 out for each slot, 24 for each request (its row, start and end).

Source: SGLang: python/sglang/srt/mem_cache/allocation.py:assign_req_to_token_pool @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_tensor, values_are_checked
from refspec.kernels.launches import count_launch


def assign_req_to_token_torch(
    req_to_token: Tensor, req_pool_indices: Tensor, start: Tensor, end: Tensor, slots: Tensor
) -> None:
    """The reference of `assign_req_to_token`."""
    lens = end - start
    rows = req_pool_indices.repeat_interleave(lens)
    before = lens.cumsum(0) - lens
    offset = torch.arange(len(slots), device=slots.device) - before.repeat_interleave(lens)
    req_to_token[rows, start.repeat_interleave(lens) + offset] = slots


@triton.jit
def _assign_req_to_token_kernel(
    req_to_token,
    req_pool_indices,
    start,
    end,
    slots,
    row_stride,
    B_UPPER: tl.constexpr,  # b, rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """Program (r, t) enters the t-th block of request r's slots; most requests have but one."""
    r = tl.program_id(0)
    first = tl.load(start + r)
    length = tl.load(end + r) - first
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # in the request's part of slots
    if tl.program_id(1) * BLOCK >= length:
        return
    others = tl.arange(0, B_UPPER)
    earlier = others < r
    before = tl.sum(tl.load(end + others, earlier, other=0) - tl.load(start + others, earlier, other=0))
    row = req_to_token + tl.load(req_pool_indices + r) * row_stride
    tl.store(row + first + place, tl.load(slots + before + place, place < length), place < length)


def assign_req_to_token_triton(
    req_to_token: Tensor, req_pool_indices: Tensor, start: Tensor, end: Tensor, slots: Tensor
) -> None:
    """The kernel's launch."""
    if not len(slots):
        return
    b, block = len(start), 256
    # How long each part is stands on the device. No part is longer than the whole, so this many blocks will do.
    _assign_req_to_token_kernel[(b, triton.cdiv(len(slots), block))](
        req_to_token,
        req_pool_indices,
        start,
        end,
        slots,
        req_to_token.stride(0),
        B_UPPER=triton.next_power_of_2(b),
        BLOCK=block,
        num_warps=4,
    )


def assign_req_to_token(
    req_to_token: Tensor, req_pool_indices: Tensor, start: Tensor, end: Tensor, slots: Tensor, backend: str = "auto"
) -> None:
    """In place: req_to_token[req_pool_indices[r], start[r]:end[r]] = the next end[r]-start[r] of slots.

    req_to_token i64 (rows, max_context); req_pool_indices, start, end i64 (b); slots i64 (sum of end - start).
    Raises ValueError for other shapes or types, and, where values are checked, for a place that the table lacks.
    """
    run = choose(backend, slots.device, assign_req_to_token_torch, assign_req_to_token_triton)
    check_tensor("req_to_token", req_to_token, (None, None), device=slots.device)
    check_tensor("req_pool_indices", req_pool_indices, (None,), device=slots.device)
    check_tensor("start", start, req_pool_indices.shape, device=slots.device)
    check_tensor("end", end, req_pool_indices.shape, device=slots.device)
    check_tensor("slots", slots, (None,))
    check_bounds("req_pool_indices", req_pool_indices, 0, req_to_token.shape[0])
    check_bounds("start", start, 0, req_to_token.shape[1] + 1)
    check_bounds("end", end, 0, req_to_token.shape[1] + 1)
    if values_are_checked(slots.device):
        lens = end - start
        check_bounds("end - start", lens, 0, req_to_token.shape[1] + 1)
        if int(lens.sum()) != len(slots):
            raise ValueError(f"slots has {len(slots)} entries, end - start ask for {int(lens.sum())}")
    count_launch("assign_req_to_token")
    run(req_to_token, req_pool_indices, start, end, slots)
