"""You look for the longest stretch on which draft and target agree, wherever it begins. Only what hangs together
with the root counts: below a token that the target refused, all of its choices are about another text.
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
        longest: list[int] = []
        for start in range(n):
            path = [start]
            while len(path) <= num_steps:
                wanted = target_predict[r, path[-1]]
                child = int(retrieve_next_token[r, path[-1]])
                while child != -1 and candidates[r, child] != wanted:
                    child = int(retrieve_next_sibling[r, child])
                if child == -1:
                    break
                path.append(child)
            if len(path) > len(longest):
                longest = path
        for depth, node in enumerate(longest):
            accept_index[r, depth] = retrieve_index[r, node]
            predict[retrieve_index[r, node]] = target_predict[r, node]
        accept_token_num[r] = len(longest) - 1
    return predict, accept_index, accept_token_num
