"""Phase 2: of all the candidates, the N - 1 best become the tree that the target will verify.

A path's score is the product of its probabilities, so a child never scores above its parent, and stands later in
the pool: taking the best by (score, then place) keeps every kept node's parent. The target's cost depends on N
alone, so the tree spends it where the draft is surest: deep where it is sure, wide where it is not.

Source: EAGLE-2 (Li et al. 2024, section 4.2, reranking); SGLang: python/sglang/srt/speculative/eagle_utils.py:
organize_draft_results @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.config import SpecConfig
from refspec.contracts import Candidates, VerifyInput
from refspec.kernels import build_tree, stable_topk
from refspec.requests.request import RunningBatch


def make_tree(batch: RunningBatch, candidates: Candidates, config: SpecConfig) -> VerifyInput:
    """Rank, link, mask. Runs no model and takes no slots."""
    parent_list, top_scores_index, draft_tokens = organize_draft_results(
        candidates.score_list, candidates.token_list, candidates.parents_list, config.num_draft_tokens
    )
    tree_mask, positions, index, first_child, next_sibling = build_tree(
        parent_list,
        top_scores_index,
        batch.seq_lens,
        config.topk,
        config.num_steps,
        config.num_draft_tokens,
        mask_mode="qlen",
    )
    draft_token = torch.cat([batch.bonus_tokens.unsqueeze(1), draft_tokens], dim=1).flatten()
    # A chain that was drawn is kept whole, so its laws stay in order.
    laws = candidates.draft_probs
    return VerifyInput(draft_token, positions, tree_mask, top_scores_index, index, first_child, next_sibling, laws)


def organize_draft_results(
    score_list: list[Tensor], token_list: list[Tensor], parents_list: list[Tensor], num_draft_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Join the levels into one pool and keep the best N - 1 of it.

    score_list f32 [(b, 1, k), then (b, k, k) ...], token_list i64 [(b, k), then (b, k²) ...], parents_list i64
    [(b, k + 1), then (b, k) ...]: one entry for each level, as `select_top_k_tokens` gives them.

    Returns parent_list i64 (b, k(S-1) + 1), of width 0 when S = 1 (the last level has no children, so its entries
    are left out); top_scores_index i64 (b, N-1), ascending; and the kept tokens i64 (b, N-1).
    """
    # region keep_the_best
    scores = torch.cat([level.flatten(1) for level in score_list], dim=1)
    tokens = torch.cat(token_list, dim=1)
    _, kept = stable_topk(scores, num_draft_tokens - 1)
    top_scores_index = kept.sort(dim=-1).values
    parent_list = torch.cat([tokens[:, :0], *parents_list[:-1]], dim=1)
    return parent_list, top_scores_index, tokens.gather(1, top_scores_index)
    # endregion keep_the_best
