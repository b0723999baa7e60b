"""Phases 1 and 2 where k = 1: what is the same in every round is made once.

With one branch there is nothing to choose. All S candidates are kept (N = S + 1), and each hangs under the one before
it: the parents are -1, 0, 1 ..., the kept candidates 0, 1, 2 ..., and links and mask are the same in every round. The
general path finds that out each time anew, by ranking lists of one, sorting what is sorted and gathering everything
from where it stands. Here it is made once, for the largest batch, and a round takes the front of it.

| of a round                | the general path                                     | here                           |
|---------------------------|------------------------------------------------------|--------------------------------|
| draft forwards            | S - 1                                                | S - 1                          |
| after each of them        | softmax, best child; scores, best branch, its parent | likeliest token                |
| tree                      | best N - 1, sorted; parents, mask, positions, links  | tokens joined, positions added |
| calls of refspec.kernels  | 2·(S - 1) + 2                                        | S - 1                          |

The tree that the target is given is the same, to the last element. Two things differ on the way:

- No probabilities are computed. Scores are there to rank by, and nothing is ranked; but a trace shows them, so they
  are made where somebody watches (`scored`).
- The likeliest token is looked for among the logits. Where the best two are so close that their probabilities are one
  number in float32, the general path takes the lower id, and this the one of the larger logit.

It is right only where N = S + 1. With fewer nodes the tree is a chain too, but not of all candidates. That is left to
the general path, which is right for everything, and so is a batch for which too little was made.

Source: SGLang: python/sglang/srt/speculative/base_spec_worker.py:_rebuild_topk1_chain_buffers, and what takes it,
eagle_worker_v2.py:draft_forward and multi_layer_eagle_worker_v2.py:draft_forward @0.5.23 (PR #26424, PR #32887)
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.config import SpecConfig
from refspec.contracts import Candidates, DraftInput, ForwardBatch, VerifyInput
from refspec.kernels import build_chain_tree, draft_topk1
from refspec.requests.request import RunningBatch
from refspec.runtime.runner import ModelRunner
from refspec.spec.draft import Branches, propose


class ChainBuffers:
    """What all chains of some length have in common, for max_batch requests; a smaller batch takes the front.

    max_batch: None: as many as the request table has rows for, so that every batch fits. Rounds hand the constants out
    as they are: nobody writes to them.
    """

    def __init__(self, max_batch: int | None = None) -> None:
        self.max_batch, self.num_steps = max_batch, 0

    def fits(self, batch: RunningBatch, config: SpecConfig) -> bool:
        """Is the round of this batch one for the short cut? Then the constants are there: made at the first such round,
        and again when steps have changed.
        """
        most = len(batch.req_to_token) - 1 if self.max_batch is None else self.max_batch  # nobody has row 0
        if config.topk > 1 or config.num_draft_tokens != config.num_steps + 1 or len(batch) > most:
            return False
        if config.num_steps != self.num_steps:
            self._build(config.num_steps, most, batch.rows.device)
        return True

    def _build(self, num_steps: int, max_batch: int, device: torch.device) -> None:
        self.num_steps = num_steps
        kept = torch.arange(num_steps, device=device).repeat(max_batch, 1)
        self.top_scores_index = kept  # i64 (max_batch, S)
        self.parents = torch.cat([kept[:, :1] - 1, kept], dim=1)  # i64 (max_batch, S + 1): -1 0 1 ... S - 1
        no_tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.tree_mask, depths, *self.links = build_chain_tree(no_tokens, num_steps + 1, mask_mode="qlen")
        self.depths = depths.view(max_batch, num_steps + 1)  # what positions are where nothing is committed

    def draft_loop(
        self,
        batch: RunningBatch,
        start: DraftInput,
        branches: Branches,
        positions: Tensor,
        draft_runner: ModelRunner,
        config: SpecConfig,
        recurrent: bool = True,
        scored: bool = True,
    ) -> Candidates:
        """As `refspec.spec.draft.draft_loop`, for a round that fits. Not scored: score_list is empty."""
        steps, slots, hidden_states = config.num_steps, branches.slots.squeeze(1), start.hidden_states
        tokens, laws, scores = [start.topk_index], [start.draft_probs], [start.topk_p]
        positions = positions.clone()  # each step moves them on, in place
        for i in range(steps - 1):
            out = draft_runner.forward(
                ForwardBatch(
                    input_ids=tokens[i].squeeze(1),
                    positions=positions,
                    out_slots=slots[:, i],
                    q_lens=[1] * len(batch),
                    req_to_token=batch.req_to_token,
                    rows=batch.rows,
                    prefix_lens=branches.prefix_lens,
                    tail_slots=slots[:, : i + 1],
                    tail_mask=None,
                    hidden_states=hidden_states if recurrent else None,
                    lens=branches.lens,
                    selection=start.selection,
                ),
                phase="draft",
            )
            hidden_states = out.hidden_states
            if config.drafts_are_drawn:
                topk_p, token, law = propose(batch, out.logits, i + 1, config, draft_runner)
                positions += 1
            else:
                logits = out.logits.float() if out.logits.dtype is torch.float64 else out.logits
                (topk_p, token), law = draft_topk1(logits, positions, draft_tokens=None, column=0), None
                if scored:
                    topk_p = torch.softmax(logits.float(), dim=-1).gather(1, token)
                if draft_runner.draft_to_target is not None:
                    token = draft_runner.draft_to_target[token]
            tokens.append(token)
            laws.append(law)
            if scored:
                scores.append(scores[-1] * topk_p)
        drawn_from = [law for law in laws if law is not None]
        draft_probs = torch.stack(drawn_from, dim=1) if drawn_from else None
        return self.candidates(tokens, scores if scored else [], branches.slots, draft_probs)

    def candidates(
        self, tokens: list[Tensor], scores: list[Tensor], slots: Tensor, draft_probs: Tensor | None
    ) -> Candidates:
        """A chain as what a draft loop hands over. tokens i64, scores f32: (b, 1) for each level."""
        return Candidates(
            score_list=[score.unsqueeze(1) for score in scores],
            token_list=tokens,
            parents_list=list(self.parents[: len(slots)].split([2] + [1] * (self.num_steps - 1), dim=1)),
            slots=slots,
            draft_probs=draft_probs,
        )

    def make_tree(self, batch: RunningBatch, candidates: Candidates) -> VerifyInput:
        """As `refspec.spec.tree.make_tree`, of the candidates of a round that fits."""
        b, n = len(batch), self.num_steps + 1
        retrieve_index, first_child, next_sibling = (link[:b] for link in self.links)
        return VerifyInput(
            draft_token=torch.cat([batch.bonus_tokens.unsqueeze(1), *candidates.token_list], dim=1).flatten(),
            positions=(batch.seq_lens.unsqueeze(1) + self.depths[:b]).flatten(),
            tree_mask=self.tree_mask[: b * n * n],
            top_scores_index=self.top_scores_index[:b],
            retrieve_index=retrieve_index,
            retrieve_next_token=first_child,
            retrieve_next_sibling=next_sibling,
            draft_probs=candidates.draft_probs,
        )
