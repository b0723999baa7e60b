"""What the rows of each request may attend to: its committed tokens, then a tail that is not in the table yet.

In the form that paged attention takes: the slots of all requests one after another, and where each request begins.
Verification, extend and plain decoding come with slots of their own for the tail; nothing enters them in the request
table before it is known which of them stay.

Bytes moved: for each slot 8 in and 8 out, for each request 24 (its row, its length, its beginning).

The room for the slots may be more than they take. So a CUDA graph, whose buffers must do for any lengths, launches this
kernel as it is, and the lengths are read when it runs.

Source: SGLang: python/sglang/kernels/ops/attention/kv_indices.py:create_flashinfer_kv_indices_triton @0.5.23, where the
tail stands in the table already and its beginnings are summed up by torch
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.assign_req_to_token import programs_for_each
from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_size, check_tensor, device_of, values_are_checked
from refspec.kernels.launches import count_launch


def paged_kv_indices_torch(
    req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor, tail_slots: Tensor, room: int
) -> tuple[Tensor, Tensor]:
    """The reference of `paged_kv_indices`, request by request."""
    kv_indptr, kv_indices = prefix_lens.new_zeros(len(prefix_lens) + 1), prefix_lens.new_zeros(room)
    end = 0
    for r, (row, length) in enumerate(zip(req_pool_indices.tolist(), prefix_lens.tolist(), strict=True)):
        slots = torch.cat([req_to_token[row, :length], tail_slots[r]])
        begin, end = end, end + len(slots)
        kv_indices[begin:end], kv_indptr[r + 1] = slots, end
    return kv_indptr, kv_indices


@triton.jit(do_not_specialize=["tail", "room", "tail_stride"])
def _paged_kv_indices_kernel(
    req_to_token,
    req_pool_indices,
    prefix_lens,
    tail_slots,
    kv_indptr,
    kv_indices,
    tail,
    room,
    row_stride,
    tail_stride,
    B_UPPER: tl.constexpr,  # b, rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """Program (r, t) writes the blocks t, t + T, t + 2T, ... of request r, of T programs for each request."""
    r = tl.program_id(0).to(tl.int64)
    prefix_len = tl.load(prefix_lens + r)
    others = tl.arange(0, B_UPPER)
    begin = tl.sum(tl.load(prefix_lens + others, others < r, other=0)) + r * tail
    length = prefix_len + tail
    if tl.program_id(1) == 0:
        tl.store(kv_indptr + r + 1, begin + length)
        tl.store(kv_indptr, begin, r == 0)
    length = tl.minimum(length, room - begin)  # whatever the lengths, not beyond the buffer
    row = req_to_token + tl.load(req_pool_indices + r) * row_stride
    for block in range(tl.program_id(1), tl.cdiv(length, BLOCK), tl.num_programs(1)):
        place = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        committed = tl.load(row + place, (place < length) & (place < prefix_len), other=0)
        own = tl.load(tail_slots + r * tail_stride + place - prefix_len, (place < length) & (place >= prefix_len))
        tl.store(kv_indices + begin + place, tl.where(place < prefix_len, committed, own), place < length)


def paged_kv_indices_triton(
    req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor, tail_slots: Tensor, room: int
) -> tuple[Tensor, Tensor]:
    """The kernel's launch."""
    b, block, device = len(prefix_lens), 512, prefix_lens.device
    if not b:
        return prefix_lens.new_zeros(1), prefix_lens.new_empty(room)
    kv_indptr = torch.empty(b + 1, dtype=torch.int64, device=device)
    kv_indices = torch.empty(room, dtype=torch.int64, device=device)
    _paged_kv_indices_kernel[(b, programs_for_each(b, triton.cdiv(room, block)))](
        req_to_token,
        req_pool_indices,
        prefix_lens,
        tail_slots,
        kv_indptr,
        kv_indices,
        tail_slots.shape[1],
        room,
        req_to_token.stride(0),
        tail_slots.stride(0),
        B_UPPER=triton.next_power_of_2(b),
        BLOCK=block,
        num_warps=4,
    )
    return kv_indptr, kv_indices


def paged_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    tail_slots: Tensor,
    room: int,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The slots that each request's rows may read: its prefix_len committed ones, then its tail.

    req_to_token i64 (rows, max_context); req_pool_indices, prefix_lens i64 (b); tail_slots i64 (b, T). The rows of
    req_to_token and of tail_slots may lie apart. room: entries of kv_indices, as many as the slots take, or more.

    Returns (kv_indptr i64 (b+1), kv_indices i64 (room)): request r attends kv_indices[kv_indptr[r] : kv_indptr[r+1]].
    What stands behind kv_indptr[b] is left open.
    Raises ValueError for other shapes or types, and, where values are checked, for a row or a length that the table
    lacks and for too little room.
    """
    run = choose(backend, device_of("req_to_token", req_to_token), paged_kv_indices_torch, paged_kv_indices_triton)
    device = req_to_token.device
    check_tensor("req_to_token", req_to_token, (None, None), rows_may_lie_apart=True)
    check_tensor("req_pool_indices", req_pool_indices, (None,), device=device)
    check_tensor("prefix_lens", prefix_lens, req_pool_indices.shape, device=device)
    check_tensor("tail_slots", tail_slots, (len(prefix_lens), None), device=device, rows_may_lie_apart=True)
    check_size("room", room, at_least=0)
    check_bounds("req_pool_indices", req_pool_indices, 0, req_to_token.shape[0])
    check_bounds("prefix_lens", prefix_lens, 0, req_to_token.shape[1] + 1)
    if values_are_checked(device) and (taken := int(prefix_lens.sum()) + tail_slots.numel()) > room:
        raise ValueError(f"room is {room}, but prefix_lens and tail_slots come to {taken} slots")
    count_launch("paged_kv_indices")
    return run(req_to_token, req_pool_indices, prefix_lens, tail_slots, room)
