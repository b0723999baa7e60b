"""The draft's slots, read from the request table. And where in the table they stand.

Behind a request's committed tokens, each of its k branches has room for S tokens. Only whole pages can be owned, so
where a page holds several tokens no two branches may share one, and each branch begins with a page of its own that
stands for the last, partly filled page of the committed tokens (page 4, length 10, k 2, S 3; c: a committed token):

    position   8  9 10 11 12 13 14 15 | 16 17 18 19 20 21 22 23
    branch     0: its first page, 2nd |  1: its first page, 2nd
    holds      c  c  0  1  2          |  .  .  0  1  2             numbers: the draft's steps

The two dots are room for copies of tokens 8 and 9, see `duplicate_prefix_tail`. With pages of one token nothing is
partly filled, and branch follows branch; with one branch there is nothing to keep apart. Both are this same formula.

Bytes moved: 8 in and 8 out for each slot, 16 for each request (its row and its length).

Source: SGLang: python/sglang/kernels/ops/speculative/cache_locs.py:assign_draft_cache_locs_contiguous @0.5.23, and for
pages python/sglang/srt/speculative/eagle_worker_common.py:prepare_for_draft @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_size, check_tensor, device_of, values_are_checked
from refspec.kernels.launches import count_launch


def pages_per_branch(seq_lens: Tensor, num_steps: int, page_size: int) -> Tensor:
    """i64 (b): pages that one branch takes, that of its copy of the partly filled page included."""
    return (seq_lens % page_size + num_steps + page_size - 1) // page_size


def first_draft_positions(seq_lens: Tensor, topk: int, num_steps: int, page_size: int) -> Tensor:
    """i64 (b, k): the table position of each branch's first step; the others follow it."""
    branch = torch.arange(topk, device=seq_lens.device)
    width = pages_per_branch(seq_lens, num_steps, page_size) * page_size
    return seq_lens.unsqueeze(1) + branch * width.unsqueeze(1)


@triton.jit
def first_draft_position(seq_len, branch, num_steps, page_size):
    """The same for one branch, in a kernel."""
    pages = (seq_len % page_size + num_steps + page_size - 1) // page_size
    return seq_len + branch * pages * page_size


def check_draft_region(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, page_size: int
) -> None:
    """Raises ValueError, naming the argument, if these do not describe draft slots within the table.

    req_to_token i64 (rows, max_context); req_pool_indices, seq_lens i64 (b). That the branches fit into their rows
    is a question of values.
    """
    check_size("topk", topk)
    check_size("num_steps", num_steps)
    check_size("page_size", page_size)
    check_tensor("req_to_token", req_to_token, (None, None))
    check_tensor("req_pool_indices", req_pool_indices, (None,), device=req_to_token.device)
    check_tensor("seq_lens", seq_lens, req_pool_indices.shape, device=req_to_token.device)
    rows, width = req_to_token.shape
    check_bounds("req_pool_indices", req_pool_indices, 0, rows)
    check_bounds("seq_lens", seq_lens, 0, width + 1)
    if len(seq_lens) and values_are_checked(seq_lens.device):
        needed = int(first_draft_positions(seq_lens, topk, num_steps, page_size).max()) + num_steps
        if needed > width:
            raise ValueError(f"req_to_token has {width} columns, the draft's slots behind seq_lens need {needed}")


def assign_draft_cache_locs_torch(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, page_size: int = 1
) -> Tensor:
    """The reference of `assign_draft_cache_locs`."""
    first = first_draft_positions(seq_lens, topk, num_steps, page_size)
    positions = first.unsqueeze(2) + torch.arange(num_steps, device=seq_lens.device)
    return req_to_token[req_pool_indices.view(-1, 1, 1), positions].flatten()


@triton.jit
def _assign_draft_cache_locs_kernel(
    req_to_token,
    req_pool_indices,
    seq_lens,
    slots,
    topk,
    num_steps,
    page_size,
    row_stride,
    BLOCK: tl.constexpr,
):
    """Program (r, t) reads the t-th block of request r's k·S slots; most requests have but one."""
    r = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < topk * num_steps
    first = first_draft_position(tl.load(seq_lens + r), column // num_steps, num_steps, page_size)
    row = req_to_token + tl.load(req_pool_indices + r) * row_stride
    slot = tl.load(row + first + column % num_steps, inside)
    tl.store(slots + r * topk * num_steps + column, slot, inside)


def assign_draft_cache_locs_triton(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, page_size: int = 1
) -> Tensor:
    """The kernel's launch."""
    b, each = len(seq_lens), topk * num_steps
    slots = torch.empty(b * each, dtype=torch.int64, device=seq_lens.device)
    if b:
        block = min(triton.next_power_of_2(each), 128)
        _assign_draft_cache_locs_kernel[(b, triton.cdiv(each, block))](
            req_to_token,
            req_pool_indices,
            seq_lens,
            slots,
            topk,
            num_steps,
            page_size,
            req_to_token.stride(0),
            BLOCK=block,
            num_warps=1,
        )
    return slots


def assign_draft_cache_locs(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    page_size: int = 1,
    backend: str = "auto",
) -> Tensor:
    """The slots of the draft's b·k·S tokens.

    req_to_token i64 (rows, max_context); req_pool_indices, seq_lens i64 (b). Returns i64 (b*k*S), branch-major: entry
    (r·k + j)·S + i is for step i of branch j. Raises ValueError for other shapes or types, and, where values are
    checked, for a row that the table lacks or branches that do not fit into it.
    """
    run = choose(
        backend, device_of("req_to_token", req_to_token), assign_draft_cache_locs_torch, assign_draft_cache_locs_triton
    )
    check_draft_region(req_to_token, req_pool_indices, seq_lens, topk, num_steps, page_size)
    count_launch("assign_draft_cache_locs")
    return run(req_to_token, req_pool_indices, seq_lens, topk, num_steps, page_size)
