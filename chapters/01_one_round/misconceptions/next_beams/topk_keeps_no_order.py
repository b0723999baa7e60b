"""Of equal path scores you take whichever torch.topk puts first, and it promises nothing about them. The order is by
score and then by place in the pool, so that every device chooses alike: stable_topk keeps it, and so does a stable
sort.
"""

from __future__ import annotations

import torch

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
    best, chosen = torch.topk(child_scores.flatten(1), topk)
    parent_rows = chosen // topk + torch.arange(b).unsqueeze(1) * topk
    entries = chosen + topk + (i - 1) * topk * topk
    level = (child_scores, child_tokens, entries)
    return child_tokens.gather(1, chosen).flatten(), hidden_states[parent_rows.flatten()], best, level
