"""Read slots from the request table: the reverse of `assign_req_to_token`.

Bytes moved: 8 in and 8 out for each slot, 24 for each request (its row, start and end).

Source: SGLang: python/sglang/kernels/ops/speculative/cache_locs.py:assign_extend_cache_locs @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.assign_req_to_token import part_of_request, programs_for_each
from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_size, check_sum, check_tensor, device_of, values_are_checked
from refspec.kernels.launches import count_launch


def assign_extend_cache_locs_torch(
    req_to_token: Tensor, req_pool_indices: Tensor, start: Tensor, end: Tensor, total: int
) -> Tensor:
    """The reference of `assign_extend_cache_locs`."""
    lens = end - start
    request = torch.repeat_interleave(lens, output_size=total)  # of each slot
    place = torch.arange(total, device=lens.device) - (lens.cumsum(0) - lens)[request]
    return req_to_token[req_pool_indices[request], start[request] + place]


@triton.jit(do_not_specialize=["total"])
def _assign_extend_cache_locs_kernel(
    req_to_token,
    req_pool_indices,
    start,
    end,
    slots,
    total,
    row_stride,
    B_UPPER: tl.constexpr,  # b, rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """Program (r, t) reads the blocks t, t + T, t + 2T, ... of request r's slots, of T programs for each request."""
    before, length, row = part_of_request(
        req_to_token, req_pool_indices, start, end, total, row_stride, tl.program_id(0), B_UPPER
    )
    for block in range(tl.program_id(1), tl.cdiv(length, BLOCK), tl.num_programs(1)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(slots + before + place, tl.load(row + place, place < length), place < length)


def assign_extend_cache_locs_triton(
    req_to_token: Tensor, req_pool_indices: Tensor, start: Tensor, end: Tensor, total: int
) -> Tensor:
    """The kernel's launch."""
    b, block = len(start), 256
    slots = torch.empty(total, dtype=torch.int64, device=start.device)
    if total and b:
        _assign_extend_cache_locs_kernel[(b, programs_for_each(b, triton.cdiv(total, block)))](
            req_to_token,
            req_pool_indices,
            start,
            end,
            slots,
            total,
            req_to_token.stride(0),
            B_UPPER=triton.next_power_of_2(b),
            BLOCK=block,
            num_warps=4,
        )
    return slots


def assign_extend_cache_locs(
    req_to_token: Tensor, req_pool_indices: Tensor, start: Tensor, end: Tensor, total: int, backend: str = "auto"
) -> Tensor:
    """The slots at req_to_token[req_pool_indices[r], start[r]:end[r]], request after request.

    req_to_token i64 (rows, max_context); req_pool_indices, start, end i64 (b); total: the sum of end - start, which
    the caller knows, so that nobody has to wait for the device to say it. Returns i64 (total).
    Raises ValueError for other shapes or types, and, where values are checked, for a place that the table lacks and
    for another total.
    """
    run = choose(
        backend,
        device_of("req_to_token", req_to_token),
        assign_extend_cache_locs_torch,
        assign_extend_cache_locs_triton,
    )
    check_size("total", total, at_least=0)
    check_tensor("req_to_token", req_to_token, (None, None))
    check_tensor("req_pool_indices", req_pool_indices, (None,), device=req_to_token.device)
    check_tensor("start", start, req_pool_indices.shape, device=req_to_token.device)
    check_tensor("end", end, req_pool_indices.shape, device=req_to_token.device)
    rows, width = req_to_token.shape
    check_bounds("req_pool_indices", req_pool_indices, 0, rows)
    check_bounds("start", start, 0, width + 1)
    check_bounds("end", end, 0, width + 1)
    if values_are_checked(start.device):
        lens = end - start
        check_bounds("end - start", lens, 0, width + 1)
        check_sum("total", total, "end - start", lens)
    count_launch("assign_extend_cache_locs")
    return run(req_to_token, req_pool_indices, start, end, total)
