"""Back from a mask to the links: for drafts that come with a mask and no parents, as those found by n-grams do.

Of a node's ancestors, its parent stands last. Of those who have the node as an ancestor, the first is its child:
between a node and its grandchild stands the child.

Bytes moved for each request: less than half of the mask's N·N bytes in, the cells left of the diagonal, once; 3·N
links out (8 each).

Source: SGLang: python/sglang/kernels/ops/speculative/reconstruct_tree.py:reconstruct_indices_from_tree_mask_func
@0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_size, check_tensor, device_of
from refspec.kernels.launches import count_launch
from refspec.kernels.tree_mask import tile_of

Links = tuple[Tensor, Tensor, Tensor]


def links_from_mask_torch(qlen_mask: Tensor) -> Links:
    """The reference of `links_from_mask`."""
    b, n, _ = qlen_mask.shape
    column = torch.arange(n, device=qlen_mask.device)
    row = column[:, None]
    is_ancestor = qlen_mask.tril(-1)  # [request, node, ancestor]
    parent = torch.where(is_ancestor, column, -1).amax(2)
    child = torch.where(is_ancestor, row, n).amin(1)
    are_siblings = (parent[:, :, None] == parent[:, None, :]) & (parent >= 0)[:, None, :] & (row > column)
    sibling = torch.where(are_siblings, row, n).amin(1)
    retrieve_index = torch.arange(b * n, device=qlen_mask.device).view(b, n)
    return retrieve_index, child.masked_fill(child == n, -1), sibling.masked_fill(sibling == n, -1)


@triton.jit
def _links_from_mask_kernel(
    qlen_mask,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    n,
    ROWS: tl.constexpr,
    N_UPPER: tl.constexpr,
):
    """Program r reads request r's mask, ROWS rows at a time (up to 32 nodes: all at once).

    What a row says concerns its own parent, and the links of earlier nodes alone. So when it is read, the parents of
    all who could be its elder siblings are known.
    """
    r = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, N_UPPER)
    parent = tl.full([N_UPPER], -1, tl.int32)
    child = tl.zeros([N_UPPER], tl.int32) + n  # n: none yet, and larger than any
    sibling = tl.zeros([N_UPPER], tl.int32) + n
    for first in range(0, n, ROWS):
        row = first + tl.arange(0, ROWS)
        earlier = (node[None, :] < row[:, None]) & (row < n)[:, None]
        cells = qlen_mask + (r * n + row)[:, None] * n + node[None, :]
        is_ancestor = earlier & (tl.load(cells, earlier, other=0) != 0)
        row_parent = tl.max(tl.where(is_ancestor, node[None, :], -1), 1)
        own = row[:, None] == node[None, :]
        parent = tl.maximum(parent, tl.max(tl.where(own, row_parent[:, None], -1), 0))
        is_sibling = earlier & (row_parent >= 0)[:, None] & (row_parent[:, None] == parent[None, :])
        child = tl.minimum(child, tl.min(tl.where(is_ancestor, row[:, None], n), 0))
        sibling = tl.minimum(sibling, tl.min(tl.where(is_sibling, row[:, None], n), 0))
    place = r * n + node
    tl.store(retrieve_index + place, place, node < n)
    tl.store(retrieve_next_token + place, tl.where(child < n, child, -1), node < n)
    tl.store(retrieve_next_sibling + place, tl.where(sibling < n, sibling, -1), node < n)


def links_from_mask_triton(qlen_mask: Tensor) -> Links:
    """The kernel's launch."""
    b, n, _ = qlen_mask.shape
    index, child, sibling = torch.empty(3, b, n, dtype=torch.int64, device=qlen_mask.device)
    if b:
        _links_from_mask_kernel[(b,)](qlen_mask, index, child, sibling, n, **tile_of(n))
    return index, child, sibling


def links_from_mask(qlen_mask: Tensor, backend: str = "auto") -> Links:
    """qlen_mask bool (b, N, N), N >= 1: row c true at c's ancestors, who stand in earlier columns. From the diagonal
    on it is not looked at.

    Returns (retrieve_index, retrieve_next_token, retrieve_next_sibling), each i64 (b, N), as `build_tree` does. A
    node without ancestors, as the root is, has no siblings. Raises ValueError for other shapes or types.
    """
    run = choose(backend, device_of("qlen_mask", qlen_mask), links_from_mask_torch, links_from_mask_triton)
    check_tensor("qlen_mask", qlen_mask, (None, None, None), dtype=torch.bool)
    check_size("qlen_mask's last size", qlen_mask.shape[2])
    check_tensor("qlen_mask", qlen_mask, (None, qlen_mask.shape[2], None), dtype=torch.bool)
    count_launch("links_from_mask")
    return run(qlen_mask)
