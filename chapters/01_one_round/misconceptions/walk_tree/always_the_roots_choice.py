"""You compare every child with what the target wants after the root. Each node has its own choice, about the text that
ends there: below an accepted node it is that node's choice which counts.
"""

from __future__ import annotations

import torch


def walk_tree(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    num_steps: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, n = candidates.shape
    predict = torch.zeros(b * n, dtype=torch.int32)
    accept_index = torch.full((b, num_steps + 1), -1, dtype=torch.int32)
    accept_token_num = torch.zeros(b, dtype=torch.int32)
    for r in range(b):
        node = 0
        accept_index[r, 0] = retrieve_index[r, 0]
        for depth in range(1, num_steps + 1):
            wanted = target_predict[r, 0]
            child = int(retrieve_next_token[r, node])
            while child != -1 and candidates[r, child] != wanted:
                child = int(retrieve_next_sibling[r, child])
            if child == -1:
                break
            predict[retrieve_index[r, node]] = wanted
            accept_index[r, depth] = retrieve_index[r, child]
            accept_token_num[r] = depth
            node = child
        predict[retrieve_index[r, node]] = target_predict[r, node]
    return predict, accept_index, accept_token_num
