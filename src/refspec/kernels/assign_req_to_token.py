"""Enter slots into the request table.

Bytes moved: 8 in and 8 out for each slot, 24 for each request (its row, start and end).

How long each request's part is stands on the device. The host knows the total alone, and no part is longer than that;
but a program for every block that each part might have would be b times too many. So the programs of one request are
limited in number, and take its blocks in turn.

Source: SGLang: python/sglang/srt/mem_cache/allocation.py:assign_req_to_token_pool @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_tensor, device_of, values_are_checked
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


# Programs of one launch, about, where what stands on the device decides how many have work to do: a few waves on the
# largest GPUs.
MOST_PROGRAMS = 4096


def programs_for_each(rows: int, blocks: int) -> int:
    """T: how many programs each of `rows` rows gets, if none has more than so many blocks. At least 1."""
    return max(1, min(blocks, MOST_PROGRAMS // rows))


@triton.jit
def part_of_request(req_to_token, req_pool_indices, start, end, total, row_stride, r, B_UPPER: tl.constexpr):
    """Where request r's part begins among all `total` slots, its length, and where it begins in the table.

    Whatever start and end say, it does not reach beyond total. B_UPPER: b, rounded up to a power of two.
    """
    first = tl.load(start + r)
    others = tl.arange(0, B_UPPER)
    earlier = others < r
    before = tl.sum(tl.load(end + others, earlier, other=0) - tl.load(start + others, earlier, other=0))
    length = tl.minimum(tl.load(end + r) - first, total - before)
    return before, length, req_to_token + tl.load(req_pool_indices + r) * row_stride + first


@triton.jit(do_not_specialize=["total"])
def _assign_req_to_token_kernel(
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
    """Program (r, t) enters the blocks t, t + T, t + 2T, ... of request r's slots, of T programs for each request."""
    before, length, row = part_of_request(
        req_to_token, req_pool_indices, start, end, total, row_stride, tl.program_id(0), B_UPPER
    )
    for block in range(tl.program_id(1), tl.cdiv(length, BLOCK), tl.num_programs(1)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(row + place, tl.load(slots + before + place, place < length), place < length)


def assign_req_to_token_triton(
    req_to_token: Tensor, req_pool_indices: Tensor, start: Tensor, end: Tensor, slots: Tensor
) -> None:
    """The kernel's launch."""
    b, total, block = len(start), len(slots), 256
    if not (total and b):
        return
    _assign_req_to_token_kernel[(b, programs_for_each(b, triton.cdiv(total, block)))](
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


def assign_req_to_token(
    req_to_token: Tensor, req_pool_indices: Tensor, start: Tensor, end: Tensor, slots: Tensor, backend: str = "auto"
) -> None:
    """In place: req_to_token[req_pool_indices[r], start[r]:end[r]] = the next end[r]-start[r] of slots.

    req_to_token i64 (rows, max_context); req_pool_indices, start, end i64 (b); slots i64 (sum of end - start).
    Raises ValueError for other shapes or types, and, where values are checked, for a place that the table lacks.
    """
    run = choose(backend, device_of("slots", slots), assign_req_to_token_torch, assign_req_to_token_triton)
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
        if (total := int(lens.sum())) != len(slots):
            raise ValueError(f"slots has {len(slots)} entries, end - start ask for {total}")
    count_launch("assign_req_to_token")
    run(req_to_token, req_pool_indices, start, end, slots)
