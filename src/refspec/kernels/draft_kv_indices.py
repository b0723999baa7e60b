"""What each branch of the draft attends to: its request's committed tokens, then its own draft tokens so far.

In the form that paged attention takes: the slots of all branches one after another, and where each branch begins.

Bytes moved, for a request of L tokens: each of its k branches gets 8·(L + step + 1) bytes. Its tokens' slots are read
by k programs, but from memory once (8·L): k branches are read together, and the caches hold them meanwhile.

Source: SGLang: python/sglang/kernels/ops/speculative/cache_locs.py:generate_draft_decode_kv_indices @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.assign_draft_cache_locs import (
    check_draft_region,
    first_draft_position,
    first_draft_positions,
)
from refspec.kernels.assign_req_to_token import programs_for_each
from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_size, check_sum, device_of
from refspec.kernels.launches import count_launch


def draft_kv_indices_torch(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    step: int,
    num_steps: int,
    page_size: int,
    seq_lens_sum: int,
) -> tuple[Tensor, Tensor]:
    """The reference of `draft_kv_indices`."""
    total = topk * (seq_lens_sum + len(seq_lens) * (step + 1))
    lens = (seq_lens + step + 1).repeat_interleave(topk)
    kv_indptr = torch.cat([lens.new_zeros(1), lens.cumsum(0)])
    branch = torch.repeat_interleave(lens, output_size=total)  # of each index, counted over the batch
    request = branch // topk
    place = torch.arange(total, device=lens.device) - kv_indptr[branch]
    own = place - seq_lens[request]  # from 0 on: a draft token
    first = first_draft_positions(seq_lens, topk, num_steps, page_size).flatten()
    positions = torch.where(own < 0, place, first[branch] + own)
    return kv_indptr, req_to_token[req_pool_indices[request], positions]


@triton.jit(do_not_specialize=["step", "total"])
def _draft_kv_indices_kernel(
    req_to_token,
    req_pool_indices,
    seq_lens,
    kv_indptr,
    kv_indices,
    topk,
    step,
    num_steps,
    page_size,
    total,
    row_stride,
    B_UPPER: tl.constexpr,  # b, rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """Program (z, t) writes the blocks t, t + T, t + 2T, ... of branch z, of T programs for each branch."""
    z = tl.program_id(0)
    r = z // topk
    branch = z % topk
    seq_len = tl.load(seq_lens + r)
    others = tl.arange(0, B_UPPER)
    before = tl.sum(tl.load(seq_lens + others, others < r, other=0))
    begin = before * topk + branch * seq_len + z.to(tl.int64) * (step + 1)
    length = seq_len + step + 1
    if tl.program_id(1) == 0:
        tl.store(kv_indptr + z + 1, begin + length)
        tl.store(kv_indptr, begin, z == 0)
    length = tl.minimum(length, total - begin)  # whatever the lengths, not beyond the buffer
    row = req_to_token + tl.load(req_pool_indices + r) * row_stride
    behind = first_draft_position(seq_len, branch, num_steps, page_size) - seq_len
    for block in range(tl.program_id(1), tl.cdiv(length, BLOCK), tl.num_programs(1)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        slot = tl.load(row + tl.where(place < seq_len, place, place + behind), place < length)
        tl.store(kv_indices + begin + place, slot, place < length)


def draft_kv_indices_triton(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    step: int,
    num_steps: int,
    page_size: int,
    seq_lens_sum: int,
) -> tuple[Tensor, Tensor]:
    """The kernel's launch."""
    b, block, device = len(seq_lens), 512, seq_lens.device
    if not b:
        return seq_lens.new_zeros(1), seq_lens.new_empty(0)
    total = topk * (seq_lens_sum + b * (step + 1))
    kv_indptr = torch.empty(b * topk + 1, dtype=torch.int64, device=device)
    kv_indices = torch.empty(total, dtype=torch.int64, device=device)
    programs = programs_for_each(b * topk, triton.cdiv(seq_lens_sum + step + 1, block))
    _draft_kv_indices_kernel[(b * topk, programs)](
        req_to_token,
        req_pool_indices,
        seq_lens,
        kv_indptr,
        kv_indices,
        topk,
        step,
        num_steps,
        page_size,
        total,
        req_to_token.stride(0),
        B_UPPER=triton.next_power_of_2(b),
        BLOCK=block,
        num_warps=4,
    )
    return kv_indptr, kv_indices


def draft_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    step: int,
    num_steps: int | None = None,
    page_size: int = 1,
    seq_lens_sum: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The slots that draft forward `step` (from 0) reads: for each branch the seq_len committed ones, then those of its
    own first step + 1 draft tokens, from where `assign_draft_cache_locs` reads them.

    req_to_token i64 (rows, max_context); req_pool_indices, seq_lens i64 (b). num_steps says how far apart the
    branches lie, so it may be left out for topk 1 alone. seq_lens_sum: the sum of seq_lens; where it is left out,
    the host asks the device for it, and waits.

    Returns (kv_indptr i64 (b*k+1), kv_indices i64): branch j of request r attends
    kv_indices[kv_indptr[r·k + j] : kv_indptr[r·k + j + 1]].
    Raises ValueError for other shapes or types, a step beyond num_steps, and, where values are checked, for a place
    that the table lacks and for another sum.
    """
    run = choose(backend, device_of("req_to_token", req_to_token), draft_kv_indices_torch, draft_kv_indices_triton)
    check_size("step", step, at_least=0)
    if num_steps is None:
        if topk != 1:
            raise ValueError(f"num_steps is missing: for topk {topk} it says how far apart the branches lie")
        num_steps = step + 1
    check_draft_region(req_to_token, req_pool_indices, seq_lens, topk, num_steps, page_size)
    check_size("step", step, at_least=0, at_most=num_steps - 1)
    if seq_lens_sum is None:
        seq_lens_sum = int(seq_lens.sum())
    else:
        check_size("seq_lens_sum", seq_lens_sum, at_least=0)
        check_sum("seq_lens_sum", seq_lens_sum, "seq_lens", seq_lens)
    count_launch("draft_kv_indices")
    return run(req_to_token, req_pool_indices, seq_lens, topk, step, num_steps, page_size, seq_lens_sum)
