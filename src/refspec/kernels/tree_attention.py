"""Attention of tree nodes, or of draft branches, over the paged cache.

The rows are G sequences of N queries each: for verification a request and its N nodes, for the draft a request and its
k branches (or G = b·k branches of one row), for plain decoding one row each. A sequence's keys are slots in any order
of the pool. All of its rows see its first keys, the committed tokens; about the last ones, the tail, a mask decides row
by row.

Bytes moved: the keys and values of every sequence once for each tile of rows, 2·kv_heads·dim·itemsize for each key,
and its slot, 8 for each KV head. The rows of a tile are all nodes with all heads that share a KV head, up to 64 of them
(16 in float32 and float64), so a tree of 16 with 4 heads to a KV head reads the cache just once. Next to that the
queries and outputs (2·N·heads·dim·itemsize) and the mask (N·T for each KV head) are little. Long contexts of few
sequences are split over programs, so that all of the GPU reads: each part writes and the second kernel reads
(dim + 1)·4 bytes for each row, head and part.

Source: FlashAttention (Dao et al. 2022, algorithm 1), Flash-Decoding (Dao et al. 2023) for the parts;
SGLang: python/sglang/kernels/ops/attention/extend_attention.py and decode_attention.py @0.5.23 play this part there.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from refspec.kernels.backend import choose, interpreting, tl, triton, triton_type
from refspec.kernels.checks import check_bounds, check_number, check_size, check_tensor, device_of, values_are_checked
from refspec.kernels.launches import count_launch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

LEAST_KEYS_OF_A_PART = 256  # with fewer, writing a part and reading it back costs what the split brings
MOST_PARTS = 64
MOST_DIM = 256  # beyond, what a program holds does not fit into registers
# The interpreter has no processors to keep busy. It counts as a small GPU, so that it runs the code that a GPU would.
PROCESSORS_OF_INTERPRETER = 16


def tree_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_mask: Tensor,
    scale: float,
    tail: int | None,
    planned_keys: int,
) -> Tensor:
    """The reference of `tree_attention`: sequence by sequence, at least in float32.

    tail: T, None for "full". planned_keys: of a sequence, for a plan that the reference does not make.
    """
    out = torch.empty(*q.shape, dtype=q.dtype, device=q.device)
    bounds = kv_indptr.tolist()
    n = len(q) // max(1, len(bounds) - 1)
    group = q.shape[1] // k_cache.shape[1]
    exact = torch.promote_types(q.dtype, torch.float32)
    used = 0  # of the mask
    for g, (start, end) in enumerate(itertools.pairwise(bounds)):
        rows, slots = slice(g * n, (g + 1) * n), kv_indices[start:end]
        ruled = len(slots) if tail is None else tail
        seen = torch.ones(n, len(slots), dtype=torch.bool, device=q.device)
        seen[:, len(slots) - ruled :] = tree_mask[used : used + n * ruled].view(n, ruled)
        used += n * ruled

        keys = k_cache[slots].to(exact).repeat_interleave(group, dim=1)
        values = v_cache[slots].to(exact).repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,lhd->hnl", q[rows].to(exact), keys) * scale
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        weights = weights.masked_fill(~seen.any(1)[:, None], 0)  # a row that sees nothing
        values = values.masked_fill(~seen.any(0)[:, None, None], 0)  # a weight of 0 does not silence a NaN
        out[rows] = torch.einsum("hnl,lhd->nhd", weights, values).to(q.dtype)
    return out


@triton.jit(do_not_specialize=["rows", "nodes", "tiles", "parts"])
def _attend_kernel(
    q,
    k_cache,
    v_cache,
    kv_indptr,
    kv_indices,
    tree_mask,
    out,  # (parts, rows, heads, dim): the answer if there is one part
    lse,  # (parts, rows, heads): log of the sum of exponentials; written if there are several parts
    scale,
    rows,
    nodes,
    kv_heads,
    group,
    dim,
    tail,
    tiles,
    parts,
    q_stride,
    k_stride,
    v_stride,
    FULL: tl.constexpr,  # the mask has a column for every key, not for the tail alone
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,  # the type of what is multiplied
    ACC: tl.constexpr,  # and of what is summed
):
    """Program (sequence, KV head, tile; part): a tile of rows over a part of the sequence's keys, block by block."""
    program = tl.program_id(0)
    kv_head = program // tiles % kv_heads
    g = (program // tiles // kv_heads).to(tl.int64)
    m = program % tiles * BLOCK_M + tl.arange(0, BLOCK_M)  # the tile's rows: node after node, of each the group's heads
    d = tl.arange(0, BLOCK_D)
    is_row, is_dim = m < nodes * group, d < dim
    row = g * nodes + m // group
    head = kv_head * group + m % group
    in_tile = is_row[:, None] & is_dim[None, :]
    queries = tl.load(q + row[:, None] * q_stride + head[:, None] * dim + d[None, :], in_tile, other=0.0)

    start = tl.load(kv_indptr + g)
    length = (tl.load(kv_indptr + g + 1) - start).to(tl.int32)
    if FULL:
        first_ruled = 0
        mask_row = nodes * start + (m // group).to(tl.int64) * length
    else:
        first_ruled = length - tail
        mask_row = row * tail
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), parts) * BLOCK_N
    end = tl.minimum((tl.program_id(1) + 1) * share, length)

    highest = tl.full([BLOCK_M], float("-inf"), ACC)
    total = tl.zeros([BLOCK_M], ACC)  # of exp(score - highest)
    acc = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    for first in range(tl.program_id(1) * share, end, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        is_key = column < end
        slot = tl.load(kv_indices + start + column, is_key, other=0)
        in_head = kv_head * dim + d
        keys = tl.load(
            k_cache + slot[None, :] * k_stride + in_head[:, None], is_key[None, :] & is_dim[:, None], other=0.0
        )
        # The default for float32 is TF32, with 10 bits.
        scores = tl.dot(queries.to(DOT), keys.to(DOT), input_precision="ieee", out_dtype=ACC) * scale
        seen = is_row[:, None] & is_key[None, :]
        is_seen = is_key
        if first + BLOCK_N > first_ruled:
            ruled = seen & (column >= first_ruled)[None, :]
            seen = seen & tl.load(tree_mask + mask_row[:, None] + (column - first_ruled)[None, :], ruled, other=1)
            is_seen = tl.max(seen.to(tl.int32), 0) > 0
        scores = tl.where(seen, scores, float("-inf"))

        new_highest = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # nothing seen yet: -inf - -inf is NaN
        weights = tl.exp(scores - base[:, None])
        fade = tl.exp(highest - base)
        # What no row sees may be anything, and a weight of 0 does not silence a NaN.
        values = tl.load(
            v_cache + slot[:, None] * v_stride + in_head[None, :], is_seen[:, None] & is_dim[None, :], other=0.0
        )
        acc = acc * fade[:, None] + tl.dot(weights.to(DOT), values.to(DOT), input_precision="ieee", out_dtype=ACC)
        total = total * fade + tl.sum(weights, 1)
        highest = new_highest

    place = (tl.program_id(1).to(tl.int64) * rows + row) * (kv_heads * group) + head
    total = tl.where(total == 0, 1.0, total)  # of a row that has seen nothing, and then highest is -inf
    tl.store(out + place[:, None] * dim + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), in_tile)
    if PARTS:
        tl.store(lse + place, highest + tl.log(total), is_row)


@triton.jit(do_not_specialize=["row_heads", "parts"])
def _combine_kernel(
    outs,  # f32, or f64 for a float64 answer: (parts, rows, heads, dim)
    lse,  # the same: (parts, rows, heads)
    out,
    row_heads,
    dim,
    parts,
    PARTS_UPPER: tl.constexpr,  # parts, rounded up to a power of two
    BLOCK_D: tl.constexpr,
):
    """One program for each row and head: the parts' outputs, each with its share of the sum of exponentials."""
    row_head = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_UPPER).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    logs = tl.load(lse + part * row_heads + row_head, part < parts, other=float("-inf"))
    highest = tl.max(logs, 0)
    shares = tl.exp(logs - tl.where(highest == float("-inf"), 0.0, highest))  # of a row that sees nothing: all 0
    place = (part * row_heads + row_head)[:, None] * dim + d[None, :]
    parts_out = tl.load(outs + place, (part < parts)[:, None] & (d < dim)[None, :], other=0.0)
    total = tl.sum(shares, 0)
    combined = tl.sum(parts_out * shares[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + row_head * dim + d, combined.to(out.dtype.element_ty), d < dim)


def tree_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_mask: Tensor,
    scale: float,
    tail: int | None,
    planned_keys: int,
) -> Tensor:
    """The kernels' launches: one, or two where contexts are to be long and sequences few."""
    rows, heads, dim = q.shape
    out = torch.empty(*q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    sequences, kv_heads, group = len(kv_indptr) - 1, k_cache.shape[1], heads // k_cache.shape[1]
    nodes = rows // sequences
    acc = torch.float32
    if q.dtype is torch.float64:  # a Python float reaches a kernel as float32, so here the scale must not be one
        q, scale, acc = q * scale, 1.0, torch.float64
    block_d = max(16, triton.next_power_of_2(dim))
    block_m, block_n, warps, stages = _blocks(nodes * group, block_d, q.element_size())
    tiles = triton.cdiv(nodes * group, block_m)
    programs = sequences * kv_heads * tiles
    parts = _parts(programs, planned_keys, q.device)
    outs, lse = out, out  # of one part
    if parts > 1:
        outs = torch.empty(parts, *q.shape, dtype=acc, device=q.device)
        lse = torch.empty(parts, rows, heads, dtype=acc, device=q.device)
    _attend_kernel[(programs, parts)](
        q,
        k_cache,
        v_cache,
        kv_indptr,
        kv_indices,
        tree_mask,
        outs,
        lse,
        scale,
        rows,
        nodes,
        kv_heads,
        group,
        dim,
        tail or 0,
        tiles,
        parts,
        q.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        FULL=tail is None,
        PARTS=parts > 1,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        # The interpreter multiplies the bits of bfloat16 numbers.
        DOT=tl.float32 if q.dtype is torch.bfloat16 and interpreting() else triton_type(q.dtype),
        ACC=triton_type(acc),
        num_warps=warps,
        num_stages=stages,
    )
    if parts > 1:
        _combine_kernel[(rows * heads,)](
            outs,
            lse,
            out,
            rows * heads,
            dim,
            parts,
            PARTS_UPPER=triton.next_power_of_2(parts),
            BLOCK_D=block_d,
            num_warps=4,
        )
    return out


def _blocks(rows: int, block_d: int, itemsize: int) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, num_warps and num_stages for that many rows over the same keys.

    As large as the registers allow: up to dim 256, in steps of 16, nothing spills on sm_80 and sm_90. No tensor core
    multiplies float32 as it is, and the other way takes many registers.
    """
    wide = block_d > 128
    if itemsize >= 4:
        return (16, 16, 8, 1) if wide and itemsize == 8 else (16, 16, 4, 3)
    block_m = max(16, min(32 if wide else 64, triton.next_power_of_2(rows)))
    return block_m, 32 if wide else 64, 4 if block_m == 16 else 8, 3


def _parts(programs: int, keys: int, device: torch.device) -> int:
    """Over how many programs the keys of a sequence are split, given how many it has, in the mean or at most.

    That is known on the host; how long each sequence is stands on the device, and shall stay there. A part that has
    nothing to read of a short one costs its two writes.
    """
    processors = PROCESSORS_OF_INTERPRETER
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(2 * processors // programs, keys // LEAST_KEYS_OF_A_PART, MOST_PARTS))


def _tail_of(q: Tensor, kv_indptr: Tensor, kv_indices: Tensor, tree_mask: Tensor, with_room: bool) -> int | None:
    """T; None where the mask has a column for every key. Raises ValueError for sizes that do not fit.

    with_room: kv_indices is longer than it need be, and says nothing about the mask, which rules a tail.

    A mask whose size fits both readings is no ambiguity: then T is the mean length, and since no length is below T,
    every length is T.
    """
    rows, sequences = len(q), len(kv_indptr) - 1
    if sequences < 0 or (rows % sequences if sequences else rows):
        raise ValueError(f"q has {rows} rows and kv_indptr {sequences + 1} entries: each sequence needs as many rows")
    nodes = rows // sequences if sequences else 0
    if tree_mask.numel() == nodes * len(kv_indices) and not with_room:
        return None
    if not rows or tree_mask.numel() % rows:
        other_form = "" if with_room else f", or {nodes} for each of the {len(kv_indices)} keys"
        raise ValueError(
            f"tree_mask has {tree_mask.numel()} entries, it must have as many for each of the {rows} rows{other_form}"
        )
    return tree_mask.numel() // rows


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_mask: Tensor,
    scale: float,
    backend: str = "auto",
    max_keys: int | None = None,
) -> Tensor:
    """softmax(scale · q · keys) · values, of the keys that each row sees.

    q (G·N, heads, dim), N rows for each of the G sequences; k_cache, v_cache (slots, kv_heads, dim) of q's dtype;
    heads a multiple of kv_heads, head h reads KV head h // (heads // kv_heads); dim 256 at most. float16, bfloat16,
    float32, float64. Along their first dimension the three may be strided: the pool keeps keys and values side by side.
    kv_indptr i64 (G+1), kv_indices i64: sequence g's keys are in the slots kv_indices[kv_indptr[g]:kv_indptr[g+1]].
    tree_mask bool, flat, row after row: G·N·T for some T, then it rules the last T keys of each sequence (which has as
    many) and the earlier ones are seen by all rows ("qlen": T = N; plain decoding: N = T = 1, all true); or
    N·len(kv_indices), a column for each key ("full", as of build_tree).
    max_keys: keys that a sequence can come to have, for a launch that a CUDA graph repeats whatever kv_indptr says by
    then. What is launched depends on it and on shapes alone, kv_indices may be longer than kv_indptr leads to, and
    tree_mask rules a tail. It is a plan, not a bound: longer sequences are answered too. None: kv_indices is as long
    as the sequences are, and their mean length is what is planned for.

    Returns (G·N, heads, dim) in q's dtype, contiguous; zeros where a row sees nothing. A key that no row of its
    sequence sees may hold anything, NaN included; one that some row sees must be finite.
    Raises ValueError for other shapes, types or layouts, and, where values are checked, for slots or bounds that are
    none, or a sequence shorter than T.
    """
    run = choose(backend, device_of("q", q), tree_attention_torch, tree_attention_triton)
    check_tensor("q", q, (None, None, None), DTYPES, rows_may_lie_apart=True)
    check_tensor("k_cache", k_cache, (None, None, q.shape[2]), q.dtype, q.device, rows_may_lie_apart=True)
    check_tensor("v_cache", v_cache, tuple(k_cache.shape), q.dtype, q.device, rows_may_lie_apart=True)
    check_tensor("kv_indptr", kv_indptr, (None,), device=q.device)
    check_tensor("kv_indices", kv_indices, (None,), device=q.device)
    check_tensor("tree_mask", tree_mask, (None,), torch.bool, q.device)
    check_size("q's last size", q.shape[2], at_most=MOST_DIM)
    check_number("scale", scale)
    if k_cache.shape[1] < 1 or q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, they must be a multiple of k_cache's {k_cache.shape[1]}")
    if max_keys is not None:
        check_size("max_keys", max_keys, at_least=0)
    tail = _tail_of(q, kv_indptr, kv_indices, tree_mask, with_room=max_keys is not None)
    if values_are_checked(q.device):
        end = int(kv_indptr[-1])
        if int(kv_indptr[0]) != 0 or not (end == len(kv_indices) or (max_keys is not None and end < len(kv_indices))):
            most = "at most " if max_keys is not None else ""
            raise ValueError(f"kv_indptr is {kv_indptr.tolist()}, it must lead from 0 to {most}{len(kv_indices)}")
        check_bounds("kv_indptr's differences", kv_indptr.diff(), tail or 0, len(kv_indices) + 1)
        check_bounds("kv_indices", kv_indices[:end], 0, len(k_cache))
    count_launch("tree_attention")
    planned_keys = len(kv_indices) // max(1, len(kv_indptr) - 1) if max_keys is None else max_keys
    return run(q, k_cache, v_cache, kv_indptr, kv_indices, tree_mask, scale, tail, planned_keys)
