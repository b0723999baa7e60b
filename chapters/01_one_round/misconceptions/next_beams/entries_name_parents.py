"""Your entries name the parents of the new beams. Each entry is the pool index of the new beam itself: it will be
the parent, namely of the next level's children.
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
    parent_rows = chosen // topk + torch.arange(b).unsqueeze(1) * topk
    entries = chosen // topk + (0 if i == 1 else topk + (i - 2) * topk * topk)
    level = (child_scores, child_tokens, entries)
    return child_tokens.gather(1, chosen).flatten(), hidden_states[parent_rows.flatten()], best, level
