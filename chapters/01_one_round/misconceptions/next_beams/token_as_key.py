"""You find a chosen child again by its token. Two beams may go on with the same token, and then the first that has it
is found, with another parent and another place in the pool: keep the index, and look the token up by it.
"""

from __future__ import annotations

import torch

from refspec.kernels import stable_topk

Level = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def next_beams(
    i: int,
    topk_p: torch.Tensor,
    topk_index: torch.Tensor,
    hidden_states: torch.Tensor,
    scores: torch.Tensor,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Level]:
    b = len(topk_index) if i == 0 else len(topk_index) // topk
    if i == 0:
        entries = torch.arange(-1, topk).expand(b, -1)
        level = (topk_p.unsqueeze(1), topk_index, entries)
        return topk_index.flatten(), hidden_states.repeat_interleave(topk, dim=0), topk_p, level

    child_scores = scores.unsqueeze(2) * topk_p.view(b, topk, topk)
    child_tokens = topk_index.view(b, topk * topk)
    best, chosen = stable_topk(child_scores.flatten(1), topk)
    chosen = (child_tokens.unsqueeze(1) == child_tokens.gather(1, chosen).unsqueeze(2)).int().argmax(dim=2)
    parent_rows = chosen // topk + torch.arange(b).unsqueeze(1) * topk
    entries = chosen + topk + (i - 1) * topk * topk
    level = (child_scores, child_tokens, entries)
    return child_tokens.gather(1, chosen).flatten(), hidden_states[parent_rows.flatten()], best, level
