"""The walk: how far down the tree did the draft say what the target says?

From the root, among the children of the last accepted node, look for the one whose token is the target's choice
at that node; accept it and go on. Where none fits, the target's own choice is the bonus token. So a round commits
accept_token_num drafts and one bonus.

Bytes moved for each request: at most 5·N integers in (8 each), N + D + 1 out (4 each); the walk is a chain of
dependent reads, and latency, not bandwidth, is its cost.

Source: SGLang: python/sglang/kernels/ops/speculative/spec_tree.py:verify_tree_greedy_func @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import check_backend
from refspec.kernels.launches import count_launch


def verify_tree_greedy_torch(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    num_steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of `verify_tree_greedy`."""
    b, n = candidates.shape
    # One trip to the host each; the walk itself is a chain of tiny decisions.
    tokens, index, choice = candidates.tolist(), retrieve_index.tolist(), target_predict.tolist()
    first_child, next_sibling = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    predict = [0] * (b * n)
    accept_index = [[-1] * (num_steps + 1) for _ in range(b)]
    accept_token_num = [0] * b
    for r in range(b):
        node = 0
        accept_index[r][0] = index[r][0]
        for depth in range(1, num_steps + 1):
            wanted = choice[r][node]
            child = first_child[r][node]
            while child != -1 and tokens[r][child] != wanted:
                child = next_sibling[r][child]
            if child == -1:
                break
            predict[index[r][node]] = wanted
            accept_index[r][depth] = index[r][child]
            accept_token_num[r] = depth
            node = child
        predict[index[r][node]] = choice[r][node]  # the bonus
    i32, device = torch.int32, candidates.device
    return (
        torch.tensor(predict, dtype=i32, device=device),
        torch.tensor(accept_index, dtype=i32, device=device).view(b, num_steps + 1),
        torch.tensor(accept_token_num, dtype=i32, device=device),
    )


def verify_tree_greedy(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    num_steps: int,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """candidates i64 (b, N), column 0 the root; links as `build_tree` gives them; target_predict i64 (b, N): the
    target's greedy choice after each node.

    Returns (predict i32 (b*N): the choice at each accepted node, 0 elsewhere; accept_index i32 (b, num_steps+1):
    global rows of the accepted path, root first, -1 padded; accept_token_num i32 (b): bonus excluded).
    """
    check_backend(backend)
    count_launch("verify_tree_greedy")
    return verify_tree_greedy_torch(
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict, num_steps
    )
