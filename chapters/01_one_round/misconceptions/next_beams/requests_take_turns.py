"""At level 0 you repeat the whole batch of hidden states, so that requests take turns. Rows go request after request:
each one's state stands k times in a row, as repeat_interleave puts it.
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
        return topk_index.flatten(), hidden_states.repeat(topk, 1), topk_p, level

    child_scores = scores.unsqueeze(2) * topk_p.view(b, topk, topk)
    child_tokens = topk_index.view(b, topk * topk)
    best, chosen = stable_topk(child_scores.flatten(1), topk)
    parent_rows = chosen // topk + torch.arange(b).unsqueeze(1) * topk
    entries = chosen + topk + (i - 1) * topk * topk
    level = (child_scores, child_tokens, entries)
    return child_tokens.gather(1, chosen).flatten(), hidden_states[parent_rows.flatten()], best, level
