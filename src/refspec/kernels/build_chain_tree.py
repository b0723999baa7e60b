"""The tree of a chain: with one candidate a level, all N = S+1 of them kept, nothing has to be looked up.

Column c's parent is column c-1. It is `build_tree` for k = 1 and N = S+1, and only then: a chain from which fewer
nodes are kept is one too, but of that many nodes.

Bytes moved for each request: seq_len in (8); N positions and 3·N links out (8 each), and the mask: N·(seq_len + N)
bytes in FULL form, N·N in QLEN form, N words packed.

Source: SGLang: python/sglang/kernels/ops/speculative/eagle.py:build_chain_tree @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.build_tree import Tree
from refspec.kernels.checks import check_bounds, check_size, check_sum, check_tensor, device_of
from refspec.kernels.launches import count_launch
from refspec.kernels.tree_mask import check_mask_mode, flat_mask, new_mask, store_mask, tile_of


def build_chain_tree_torch(
    seq_lens: Tensor, num_draft_tokens: int, mask_mode: str = "full", seq_lens_sum: int | None = None
) -> Tree:
    """The reference of `build_chain_tree`. It reads the lengths themselves, and does not need their sum."""
    b, n, device = len(seq_lens), num_draft_tokens, seq_lens.device
    columns = torch.arange(n, device=device)
    positions = (seq_lens[:, None] + columns).flatten()
    retrieve_index = torch.arange(b * n, device=device).view(b, n)
    retrieve_next_token = torch.where(columns + 1 < n, columns + 1, -1).repeat(b, 1)
    retrieve_next_sibling = torch.full_like(retrieve_index, -1)
    visible = (columns[None, :] <= columns[:, None]).repeat(b, 1, 1)
    tree_mask = flat_mask(visible, seq_lens, mask_mode)
    return tree_mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling


@triton.jit
def _build_chain_tree_kernel(
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    n,
    MODE: tl.constexpr,
    B_UPPER: tl.constexpr,
    ROWS: tl.constexpr,
    N_UPPER: tl.constexpr,
):
    """Program (r, t) has the t-th ROWS nodes of request r."""
    r = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, N_UPPER)
    place = r * n + row
    tl.store(positions + place, tl.load(seq_lens + r) + row, row < n)
    tl.store(retrieve_index + place, place, row < n)
    tl.store(retrieve_next_token + place, tl.where(row + 1 < n, row + 1, -1), row < n)
    tl.store(retrieve_next_sibling + place, -1, row < n)
    visible = (column[None, :] <= row[:, None]) & (column < n)[None, :]
    store_mask(tree_mask, visible, seq_lens, r, row, column, n, MODE, B_UPPER)


def build_chain_tree_triton(
    seq_lens: Tensor, num_draft_tokens: int, mask_mode: str = "full", seq_lens_sum: int | None = None
) -> Tree:
    """The kernel's launch. A "full" mask is filled first; see `refspec.kernels.tree_mask`."""
    b, n, device = len(seq_lens), num_draft_tokens, seq_lens.device
    tree_mask = new_mask(seq_lens, n, mask_mode, seq_lens_sum)
    positions = torch.empty(b * n, dtype=torch.int64, device=device)
    index, child, sibling = torch.empty(3, b, n, dtype=torch.int64, device=device)
    if b:
        tile = tile_of(n)
        _build_chain_tree_kernel[(b, triton.cdiv(n, tile["ROWS"]))](
            seq_lens,
            tree_mask,
            positions,
            index,
            child,
            sibling,
            n,
            MODE=mask_mode,
            B_UPPER=triton.next_power_of_2(b),
            **tile,
        )
    if mask_mode == "packed":
        tree_mask = tree_mask.view(torch.uint8)
    return tree_mask, positions, index, child, sibling


def build_chain_tree(
    seq_lens: Tensor,
    num_draft_tokens: int,
    mask_mode: str = "full",
    seq_lens_sum: int | None = None,
    backend: str = "auto",
) -> Tree:
    """seq_lens i64 (b). seq_lens_sum: the sum of seq_lens; where it is left out, the host asks the device for it if
    mask_mode is "full", and waits.

    Returns what `build_tree` returns, with its forms of the mask: (tree_mask, positions i64 (b*N), retrieve_index,
    retrieve_next_token, retrieve_next_sibling, each i64 (b, N)). Raises ValueError for another mask_mode, more than
    32 packed columns, and other shapes or types; and, where values are checked, for another sum.
    """
    run = choose(backend, device_of("seq_lens", seq_lens), build_chain_tree_torch, build_chain_tree_triton)
    check_size("num_draft_tokens", num_draft_tokens)
    check_mask_mode(mask_mode, num_draft_tokens)
    check_tensor("seq_lens", seq_lens, (None,))
    check_bounds("seq_lens", seq_lens, 0, 2**31)
    if seq_lens_sum is not None:
        check_size("seq_lens_sum", seq_lens_sum, at_least=0)
        check_sum("seq_lens_sum", seq_lens_sum, "seq_lens", seq_lens)
    count_launch("build_chain_tree")
    return run(seq_lens, num_draft_tokens, mask_mode, seq_lens_sum)
