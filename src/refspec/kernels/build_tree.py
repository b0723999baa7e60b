"""From the kept candidates to a tree that the target can verify: links, mask and positions.

The kept candidates come as ascending pool indices. Column 0 of each request is the root (the bonus token), column
c >= 1 the candidate top_scores_index[c-1]. Candidate i hangs under node parent_list[i // k], itself a pool index,
or -1 for the root; since pool indices ascend in draft order, a parent always stands in an earlier column.

Bytes moved for each request: N-1 indices and at most k(S-1)+1 parents in (8 each); N positions, 3·N links (8 each)
and the mask out: N·(seq_len + N) bytes in FULL form, N·N in QLEN form. FULL grows with the context, QLEN does not.

Source: SGLang: python/sglang/srt/speculative/eagle_utils.py:build_tree_kernel_efficient @0.5.23;
EAGLE (Li et al. 2024, section 4.1, tree attention).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from refspec.kernels.backend import check_backend
from refspec.kernels.launches import count_launch

MASK_MODES = ("full", "qlen")
Tree = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def build_tree_torch(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    num_draft_tokens: int,
    mask_mode: str = "full",
) -> Tree:
    """The reference of `build_tree`."""
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

    tree_mask = visible.flatten()
    if mask_mode == "full":
        prefix_lens = seq_lens.tolist()
        rows = [F.pad(visible[r], (prefix_lens[r], 0), value=True).flatten() for r in range(b)]
        tree_mask = torch.cat([visible.new_zeros(0), *rows])
    return tree_mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling


def build_tree(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    num_draft_tokens: int,
    mask_mode: str = "full",
    backend: str = "auto",
) -> Tree:
    """parent_list i64 (b, k(S-1)+1), width 0 when S = 1; top_scores_index i64 (b, N-1) ascending, closed under
    parents; seq_lens i64 (b).

    Returns (tree_mask, positions i64 (b*N), retrieve_index i64 (b, N), retrieve_next_token i64 (b, N),
    retrieve_next_sibling i64 (b, N)). tree_mask is bool and flat; "full": for each request N rows of
    seq_len + N columns, the prefix true; "qlen": N rows of N columns. Raises ValueError for another mask_mode.
    """
    check_backend(backend)
    if mask_mode not in MASK_MODES:
        raise ValueError(f"mask_mode is {mask_mode!r}, it must be one of: {', '.join(MASK_MODES)}")
    count_launch("build_tree")
    return build_tree_torch(parent_list, top_scores_index, seq_lens, topk, num_steps, num_draft_tokens, mask_mode)
