"""Which KV rows compaction moves: each accepted node's from where its column put it to where its depth belongs.

The i-th accepted node of a request, the root being the 0-th, goes to the i-th slot of the request's block. The slots
are read from the block, not from the request table: by the time the device comes to it, a scheduler that is a round
ahead may have given a finished request's row to another. How many nodes were accepted only the device knows, so there
is room for D moves of each request; those that are none move slot 0, the dummy, onto itself.

Bytes moved: 4 in and 16 out for each place of accept_index, 16 for each accepted node.

Source: SGLang: python/sglang/srt/speculative/spec_utils.py:move_accept_tokens_to_target_kvcache, with
kernels/ops/speculative/eagle.py:fill_accept_out_cache_loc and cache_locs.py:fill_front_out_cache_loc_func @0.5.23. The
moves of all requests stand one after the other there; here each request's begin at r·D, and nobody counts others'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_tensor, device_of
from refspec.kernels.compact_to_front import check_paths
from refspec.kernels.launches import count_launch


def compaction_moves_torch(accept_index: Tensor, out_slots: Tensor) -> tuple[Tensor, Tensor]:
    """The reference of `compaction_moves`."""
    b, d = accept_index.shape
    accepted = accept_index >= 0
    front = out_slots.view(b, -1)[:, :d] if b else out_slots.view(0, d)
    dst = torch.where(accepted, front, 0)
    src = torch.zeros_like(dst)
    src[accepted] = out_slots[accept_index[accepted]]
    return dst.flatten(), src.flatten()


@triton.jit(do_not_specialize=["places"])
def _compaction_moves_kernel(accept_index, out_slots, dst, src, places, n, d, BLOCK: tl.constexpr):
    """Program t does the t-th BLOCK places of accept_index."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < places
    r = place // d
    row = tl.load(accept_index + place, inside, other=-1)
    accepted = row >= 0
    tl.store(dst + place, tl.load(out_slots + r * n + place - r * d, accepted, other=0), inside)
    tl.store(src + place, tl.load(out_slots + row, accepted, other=0), inside)


def compaction_moves_triton(accept_index: Tensor, out_slots: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's launch."""
    b, d = accept_index.shape
    dst, src = (torch.empty(b * d, dtype=torch.int64, device=out_slots.device) for _ in range(2))
    if b * d:
        block = 256
        _compaction_moves_kernel[(triton.cdiv(b * d, block),)](
            accept_index, out_slots, dst, src, b * d, len(out_slots) // b, d, BLOCK=block, num_warps=4
        )
    return dst, src


def compaction_moves(accept_index: Tensor, out_slots: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """accept_index i32 (b, D), D <= N: global rows of each request's path, root first, -1 padded; out_slots i64 (b*N):
    the slots of the round's nodes, column after column.

    Returns (dst i64 (b*D), src i64 (b*D)), as `move_kv_cache` takes them: entry r·D + i moves the i-th accepted node of
    request r; 0, 0 where there is none. predict and hidden states follow by `compact_to_front`.
    Raises ValueError for other shapes or types, and, where values are checked, for a row outside its request's block
    and for a row behind padding.
    """
    run = choose(backend, device_of("out_slots", out_slots), compaction_moves_torch, compaction_moves_triton)
    check_tensor("out_slots", out_slots, (None,))
    check_tensor("accept_index", accept_index, (None, None), torch.int32, out_slots.device)
    check_paths(accept_index, "out_slots", len(out_slots))
    count_launch("compaction_moves")
    return run(accept_index, out_slots)
