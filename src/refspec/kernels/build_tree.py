"""From the kept candidates to a tree that the target can verify: links, mask and positions.

The kept candidates come as ascending pool indices. Column 0 of each request is the root (the bonus token), column
c >= 1 the candidate top_scores_index[c-1]. Candidate i hangs under node parent_list[i // k], itself a pool index,
or -1 for the root; since pool indices ascend in draft order, a parent always stands in an earlier column.

Bytes moved for each request: N-1 indices and at most N-1 of the k(S-1)+1 parents in (8 each), seq_len (8); N
positions and 3·N links out (8 each), and the mask: N·(seq_len + N) bytes in FULL form, N·N in QLEN form, N words
packed. FULL grows with the context, the others do not.

Source: SGLang: python/sglang/srt/speculative/eagle_utils.py:build_tree_kernel_efficient @0.5.23;
EAGLE (Li et al. 2024, section 4.1, tree attention).
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_size, check_sum, check_tensor, device_of, values_are_checked
from refspec.kernels.launches import count_launch
from refspec.kernels.tree_mask import check_mask_mode, flat_mask, new_mask, store_mask, tile_of

# tree_mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling
Tree = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def build_tree_torch(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    num_draft_tokens: int,
    mask_mode: str = "full",
    seq_lens_sum: int | None = None,
) -> Tree:
    """The reference of `build_tree`. It reads the lengths themselves, and does not need their sum."""
    b, n, device = len(seq_lens), num_draft_tokens, top_scores_index.device

    # parent (b, N): the column of each column's parent; the root is its own.
    if parent_list.shape[1]:
        parent_pool_index = parent_list.gather(1, top_scores_index // topk)
    else:  # one step: every candidate hangs under the root
        parent_pool_index = torch.full_like(top_scores_index, -1)
    # In an ascending list, right-bisection of the entry itself gives its place + 1: its column. -1 gives 0, the root.
    parent = F.pad(torch.searchsorted(top_scores_index, parent_pool_index, right=True), (1, 0))

    # Walk all columns up to the root at once, and mark whom they pass.
    visible = torch.eye(n, dtype=torch.bool, device=device).repeat(b, 1, 1)
    ancestor = parent
    for _ in range(num_steps):
        visible.scatter_(2, ancestor[:, :, None], True)
        ancestor = parent.gather(1, ancestor)
    positions = (seq_lens[:, None] + visible.sum(-1) - 1).flatten()

    # Links: first child and next sibling are the lowest later column with the right parent.
    columns = torch.arange(n, device=device)
    later = columns[None, :] > columns[:, None]
    no_column = n  # larger than any: the minimum finds a real one first
    child = (parent[:, None, :] == columns[:, None]) & later
    sibling = (parent[:, None, :] == parent[:, :, None]) & later
    first = torch.where(torch.stack([child, sibling]), columns, no_column).amin(-1)
    first[1, :, 0] = no_column  # the root, its own parent, is no sibling of its children
    retrieve_next_token, retrieve_next_sibling = first.masked_fill(first == no_column, -1)
    retrieve_index = torch.arange(b * n, device=device).unflatten(0, (b, n))

    tree_mask = flat_mask(visible, seq_lens, mask_mode)
    return tree_mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling


@triton.jit
def _build_tree_kernel(
    parent_list,
    top_scores_index,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    num_steps,
    n,
    entries,  # of a request's row in parent_list
    MODE: tl.constexpr,
    B_UPPER: tl.constexpr,
    ROWS: tl.constexpr,
    N_UPPER: tl.constexpr,
):
    """Program (r, t) has the t-th ROWS nodes of request r, and holds each of them against all N columns.

    Nodes go by their pool index, so a parent need not be looked for: where a column bears its number, there it is.
    """
    r = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, N_UPPER)
    kept = top_scores_index + r * (n - 1) - 1  # column c's entry is c places on; the root has none
    parents = parent_list + r * entries

    inner = (column > 0) & (column < n)
    name = tl.load(kept + column, inner, other=-1)
    parent = tl.load(parents + name // topk, inner & (entries > 0), other=-1)
    name = tl.where(column < n, name, -2)  # past n nobody is the root, whose name is -1
    my_name = tl.load(kept + row, (row > 0) & (row < n), other=-1)
    my_parent = tl.load(parents + my_name // topk, (my_name >= 0) & (entries > 0), other=-1)

    later = column[None, :] > row[:, None]  # a column past n is taken for a child of the root, and loses to n below
    child = later & (parent[None, :] == my_name[:, None])
    sibling = later & (parent[None, :] == my_parent[:, None]) & (row > 0)[:, None]
    first_child = tl.min(tl.where(child, column[None, :], n), 1)
    next_sibling = tl.min(tl.where(sibling, column[None, :], n), 1)

    visible = column[None, :] == row[:, None]
    depth = tl.zeros_like(my_name)
    ancestor = my_name
    for _ in range(num_steps):
        depth += (ancestor >= 0).to(tl.int64)
        ancestor = tl.load(parents + ancestor // topk, (ancestor >= 0) & (entries > 0), other=-1)
        visible = visible | (name[None, :] == ancestor[:, None])

    place = r * n + row
    tl.store(positions + place, tl.load(seq_lens + r) + depth, row < n)
    tl.store(retrieve_index + place, place, row < n)
    tl.store(retrieve_next_token + place, tl.where(first_child < n, first_child, -1), row < n)
    tl.store(retrieve_next_sibling + place, tl.where(next_sibling < n, next_sibling, -1), row < n)
    store_mask(tree_mask, visible, seq_lens, r, row, column, n, MODE, B_UPPER)


def build_tree_triton(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    num_draft_tokens: int,
    mask_mode: str = "full",
    seq_lens_sum: int | None = None,
) -> Tree:
    """The kernel's launch. A "full" mask is filled first; see `refspec.kernels.tree_mask`."""
    b, n, device = len(seq_lens), num_draft_tokens, seq_lens.device
    tree_mask = new_mask(seq_lens, n, mask_mode, seq_lens_sum)
    positions = torch.empty(b * n, dtype=torch.int64, device=device)
    index, child, sibling = torch.empty(3, b, n, dtype=torch.int64, device=device)
    if b:
        tile = tile_of(n)
        _build_tree_kernel[(b, triton.cdiv(n, tile["ROWS"]))](
            parent_list,
            top_scores_index,
            seq_lens,
            tree_mask,
            positions,
            index,
            child,
            sibling,
            topk,
            num_steps,
            n,
            parent_list.shape[1],
            MODE=mask_mode,
            B_UPPER=triton.next_power_of_2(b),
            **tile,
        )
    if mask_mode == "packed":
        tree_mask = tree_mask.view(torch.uint8)
    return tree_mask, positions, index, child, sibling


def build_tree(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    num_draft_tokens: int,
    mask_mode: str = "full",
    seq_lens_sum: int | None = None,
    backend: str = "auto",
) -> Tree:
    """parent_list i64 (b, k(S-1)+1), width 0 when S = 1; top_scores_index i64 (b, N-1) ascending, closed under
    parents; seq_lens i64 (b). seq_lens_sum: the sum of seq_lens; where it is left out, the host asks the device for it
    if mask_mode is "full", and waits.

    Returns (tree_mask, positions i64 (b*N), retrieve_index i64 (b, N), retrieve_next_token i64 (b, N),
    retrieve_next_sibling i64 (b, N)). tree_mask is flat: "full" and "qlen" are bool, N·(seq_len + N) and N·N for each
    request; "packed" is uint8, N little-endian words of 1, 2 or 4 bytes each (N <= 8, 16, 32), bit c for column c.

    Raises ValueError for another mask_mode, more than 32 packed columns, more nodes than there are candidates and
    a root, and other shapes or types; and, where values are checked, for what is no tree and for another sum.
    """
    run = choose(backend, device_of("seq_lens", seq_lens), build_tree_torch, build_tree_triton)
    check_size("topk", topk)
    check_size("num_steps", num_steps)
    pool = topk + (num_steps - 1) * topk**2
    check_size("num_draft_tokens", num_draft_tokens, at_most=pool + 1)
    check_mask_mode(mask_mode, num_draft_tokens)
    check_tensor("seq_lens", seq_lens, (None,))
    b, device = len(seq_lens), seq_lens.device
    check_tensor("parent_list", parent_list, (b, topk * (num_steps - 1) + 1 if num_steps > 1 else 0), device=device)
    check_tensor("top_scores_index", top_scores_index, (b, num_draft_tokens - 1), device=device)
    check_bounds("seq_lens", seq_lens, 0, 2**31)
    if seq_lens_sum is not None:
        check_size("seq_lens_sum", seq_lens_sum, at_least=0)
        check_sum("seq_lens_sum", seq_lens_sum, "seq_lens", seq_lens)
    check_bounds("parent_list", parent_list, -1, pool)
    check_bounds("top_scores_index", top_scores_index, 0, pool)
    if values_are_checked(device):
        _check_tree(parent_list, top_scores_index, topk)
    count_launch("build_tree")
    return run(parent_list, top_scores_index, seq_lens, topk, num_steps, num_draft_tokens, mask_mode, seq_lens_sum)


def _check_tree(parent_list: Tensor, top_scores_index: Tensor, topk: int) -> None:
    """The kept candidates ascend, and each one's parent is kept and stands one level above. Raises ValueError.

    On the host: for the few nodes of a tree that takes less time than to start operations on tensors.
    """
    for parents, kept in zip(parent_list.tolist(), top_scores_index.tolist(), strict=True):
        if any(one >= next_one for one, next_one in pairwise(kept)):
            raise ValueError("top_scores_index does not ascend in every row")
        if not parents:  # one step: every candidate hangs under the root
            continue
        nodes = {-1, *kept}
        for candidate in kept:
            parent = parents[candidate // topk]
            if parent not in nodes:
                raise ValueError("top_scores_index keeps a candidate whose parent, by parent_list, it does not keep")
            if _level(parent, topk) != _level(candidate, topk) - 1:
                raise ValueError("parent_list hangs a candidate under one that is not of the level above it")


def _level(pool_index: int, topk: int) -> int:
    """-1 for the root; k candidates at level 0, k² at each after it."""
    if pool_index < topk:
        return min(pool_index, 0)
    return 1 + (pool_index - topk) // topk**2
