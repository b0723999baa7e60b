"""Give every branch of the draft its own copy of the committed tokens in the last, partly filled page.

An attention that reads whole pages reads, for a branch, the full pages of committed tokens and then the branch's own
pages (`assign_draft_cache_locs` shows them). The first of those begins with room for the seq_len % page_size tokens
that the last committed page holds. Branch 0 goes on in that very page; the others are given copies.

Bytes moved: at most page_size - 1 rows a request, once in and k - 1 times out, in each layer; 8·k for each row's slots.

Source: SGLang: python/sglang/srt/speculative/eagle_worker_common.py:duplicate_prefix_tail_to_draft_branches @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.assign_draft_cache_locs import check_draft_region, first_draft_position, first_draft_positions
from refspec.kernels.backend import choose, tl, triton, triton_type
from refspec.kernels.checks import check_bounds, device_of, values_are_checked
from refspec.kernels.launches import count_launch
from refspec.kernels.move_kv_cache import (
    TILE,
    KVPool,
    check_pool,
    layer_table,
    load_layer,
    move_kv_cache_torch,
)


def prefix_tail_slots(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """(targets, sources): i64 (b*k*page_size) each, slot 0 where nothing is to be copied. Their number depends on no
    value, so that nobody waits for the device.
    """
    tail = (seq_lens % page_size).view(-1, 1, 1)
    branch = torch.arange(topk, device=seq_lens.device).view(1, -1, 1)
    place = torch.arange(page_size, device=seq_lens.device)
    copied = (branch > 0) & (place < tail)
    first = first_draft_positions(seq_lens, topk, num_steps, page_size).unsqueeze(2)
    row = req_pool_indices.view(-1, 1, 1)

    def slots(positions: Tensor) -> Tensor:
        return torch.where(copied, req_to_token[row, torch.where(copied, positions, 0)], 0).flatten()

    return slots(first - tail + place), slots(first[:, :1] - tail + place)


def duplicate_prefix_tail_torch(
    pool: KVPool,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    page_size: int,
) -> None:
    """The reference of `duplicate_prefix_tail`."""
    move_kv_cache_torch(pool, *prefix_tail_slots(req_to_token, req_pool_indices, seq_lens, topk, num_steps, page_size))


@triton.jit
def _duplicate_prefix_tail_kernel(
    table,
    req_to_token,
    req_pool_indices,
    seq_lens,
    topk,
    num_steps,
    page_size,
    blocks,
    row_stride,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (r·blocks + t, c, i) reads COLUMNS of the t-th ROWS rows of request r's tail in layer i, and writes
    them once for each branch. No slot is read by one program and written by another.
    """
    r = tl.program_id(0) // blocks
    seq_len = tl.load(seq_lens + r)
    tail = seq_len % page_size
    place = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    copied = place < tail
    base, stride, width, _ = load_layer(table, tl.program_id(2), UNIT, ALIGN)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = copied[:, None] & (column < width)[None, :]
    row = req_to_token + tl.load(req_pool_indices + r) * row_stride
    source = tl.load(row + seq_len - tail + place, copied, other=0)
    value = tl.load(base + source[:, None] * stride + column[None, :], inside)
    for branch in range(1, topk):
        first = first_draft_position(seq_len, branch, num_steps, page_size)
        target = tl.load(row + first - tail + place, copied, other=0)
        tl.store(base + target[:, None] * stride + column[None, :], value, inside)


def duplicate_prefix_tail_triton(
    pool: KVPool,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    page_size: int,
) -> None:
    """The kernel's launch."""
    b = len(seq_lens)
    if not (b and pool.layers):
        return
    table = layer_table(pool)
    if not table.widest:
        return
    rows = min(triton.next_power_of_2(page_size), 16)
    columns = min(triton.next_power_of_2(table.widest), TILE // rows)
    blocks = triton.cdiv(page_size - 1, rows)
    _duplicate_prefix_tail_kernel[(b * blocks, triton.cdiv(table.widest, columns), len(pool.layers))](
        table.rows,
        req_to_token,
        req_pool_indices,
        seq_lens,
        topk,
        num_steps,
        page_size,
        blocks,
        req_to_token.stride(0),
        UNIT=triton_type(table.unit),
        ALIGN=table.align,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )


def duplicate_prefix_tail(
    pool: KVPool,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    page_size: int,
    backend: str = "auto",
) -> None:
    """In place, in every layer: branches 1 to k-1 of each request get copies of the seq_len % page_size newest
    committed rows, at the front of their first page. With pages of one token, or one branch, there is nothing to do.

    req_to_token i64 (rows, max_context); req_pool_indices, seq_lens i64 (b).
    Raises ValueError for other shapes or types, and, where values are checked, for branches that do not fit into the
    table and slots that the pool lacks.
    """
    run = choose(
        backend, device_of("req_to_token", req_to_token), duplicate_prefix_tail_torch, duplicate_prefix_tail_triton
    )
    check_draft_region(req_to_token, req_pool_indices, seq_lens, topk, num_steps, page_size)
    slots = check_pool(pool, req_to_token.device)
    count_launch("duplicate_prefix_tail")
    if topk == 1 or page_size == 1:
        return
    if pool.layers and values_are_checked(req_to_token.device):
        ends = prefix_tail_slots(req_to_token, req_pool_indices, seq_lens, topk, num_steps, page_size)
        check_bounds("req_to_token's slots", torch.cat(ends), 0, slots)
    run(pool, req_to_token, req_pool_indices, seq_lens, topk, num_steps, page_size)
