"""Turns what the phases handed over into the trace of a round. Only runs when somebody observes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refspec.config import SpecConfig
from refspec.contracts import Candidates, CommitOutput, VerifyInput, VerifyOutput
from refspec.requests.request import Request
from refspec.trace import Candidate, Round, TreeRequest
from refspec.workers.base import Stats


class RoundRecorder:
    """Made at the round's start, asked at its end."""

    def __init__(self, stats: Stats, config: SpecConfig) -> None:
        self.stats, self.config = stats, config
        self.forwards_before, self.launches_before = stats.forwards.copy(), stats.launches.copy()
        self.taken_before, self.returned_before = stats.slots_taken.copy(), stats.slots_returned.copy()

    def stop(self) -> None:
        """The round is over: what is counted from now on belongs to others."""
        self.slots_taken = dict(self.stats.slots_taken - self.taken_before)
        self.slots_returned = dict(self.stats.slots_returned - self.returned_before)
        self.forwards = dict(self.stats.forwards - self.forwards_before)
        self.launches = dict(self.stats.launches - self.launches_before)

    def record(
        self,
        requests: Sequence[Request | None],
        candidates: Candidates | None,
        tree: VerifyInput,
        verified: VerifyOutput,
        done: CommitOutput,
    ) -> Round:
        """After `stop`, and after the requests got their tokens. None stands for a request that got none."""
        return Round(
            number=self.stats.rounds - 1,
            requests=[
                self._request(r, request, candidates, tree, verified, done)
                for r, request in enumerate(requests)
                if request
            ],
            slots_taken=self.slots_taken,
            slots_returned=self.slots_returned,
            forwards=self.forwards,
            launches=self.launches,
        )

    def _request(
        self,
        r: int,
        request: Request,
        candidates: Candidates | None,
        tree: VerifyInput,
        verified: VerifyOutput,
        done: CommitOutput,
    ) -> TreeRequest:
        n = self.config.num_draft_tokens
        mask = tree.tree_mask.view(-1, n, n)[r].tolist()
        # Ancestors stand in earlier columns, the parent in the last of them.
        parents = [max((c for c in range(row) if mask[row][c]), default=-1) for row in range(n)]
        if not candidates:
            parents = [-1, *(parent for parent in parents if parent >= 0)]  # the others, at the end, hang nowhere
        rows = slice(r * n, r * n + len(parents))
        tokens = tree.draft_token[rows].tolist()
        accept_len = done.accept_lens[r]
        slots = verified.out_slots.tolist()
        return TreeRequest(
            request=request.index,
            seq_len=request.kv_len - accept_len,
            bonus_token=tokens[0],
            candidates=_pool(candidates, r, self.config.topk) if candidates else _guesses(tokens, parents),
            kept=tree.top_scores_index[r].tolist() if candidates else list(range(len(tokens) - 1)),
            parents=parents,
            positions=tree.positions[rows].tolist(),
            tree_mask=["".join(str(int(seen)) for seen in row[: len(parents)]) for row in mask[: len(parents)]],
            target_predict=verified.target_predict[rows].tolist(),
            accepted_rows=[row - r * n for row in verified.accept_index[r].tolist() if row != -1],
            committed=request.output_ids[len(request.output_ids) - accept_len :],
            finish_reason=request.finish_reason,
            draft_slots=candidates.slots[r].tolist() if candidates else [],
            verify_slots=slots[r * n : (r + 1) * n],
            kept_slots=[slots[row] for row in done.kept_rows[r]],
        )


def _pool(candidates: Candidates, r: int, k: int) -> list[Candidate]:
    """All that was drafted for request r."""
    tokens = torch.cat(candidates.token_list, dim=1)[r].tolist()
    scores = torch.cat([level.flatten(1) for level in candidates.score_list], dim=1)[r].tolist()
    nodes = torch.cat(candidates.parents_list, dim=1)[r].tolist()  # entry g: who the candidates g·k... hang under
    return [
        Candidate(token=token, parent=nodes[i // k], score=score)
        for i, (token, score) in enumerate(zip(tokens, scores, strict=True))
    ]


def _guesses(tokens: list[int], parents: list[int]) -> list[Candidate]:
    """The rows of a tree that was not chosen from a pool, but for the root: a row's pool index is one less."""
    below_root = zip(tokens[1:], parents[1:], strict=True)
    return [Candidate(token=token, parent=parent - 1, score=None) for token, parent in below_root]
