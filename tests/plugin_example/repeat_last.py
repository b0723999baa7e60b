"""An algorithm in a package of its own, to be copied: it guesses that a text goes on as it did before.

If its last two tokens have stood together before, then what followed them there is the guess; if not, then the last
token, again and again. The target checks the guesses, so the output is that of plain decoding, however bad they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from refspec.contracts import Candidates, CommitOutput, ForwardOutput, VerifyInput, VerifyOutput
from refspec.requests.request import RunningBatch
from refspec.spec.masked_tree import tree_from_mask
from refspec.workers.base import Worker
from refspec.workers.eagle_v1 import SpecWorker
from refspec.workers.registry import Algorithm, Setup


class RepeatLast(SpecWorker):
    """Verification and commit are SpecWorker's. What is said here is who guesses, and what."""

    reads_ahead = 0  # no draft model, whose rows could be fed tokens after their own

    def read_prompt(self, batch: RunningBatch, out: ForwardOutput, slots: Tensor) -> RunningBatch:
        """Nothing but the target reads prompts."""
        return batch.keep(batch.going_on())

    def draft(self, batch: RunningBatch) -> None:
        """There is no model to run, and no pool of candidates to choose from."""

    def make_tree(self, batch: RunningBatch, candidates: Candidates | None) -> VerifyInput:
        """A chain for each request: its newest token, then the guesses; each node sees those before it."""
        b, n = len(batch), self.config.num_draft_tokens
        guessed = [guesses(request.all_ids, n - 1) for request in batch.requests]
        below = torch.tensor(guessed, dtype=torch.int64, device=batch.rows.device).view(b, n - 1)
        tokens = torch.cat([batch.bonus_tokens.unsqueeze(1), below], dim=1)
        chain = torch.ones(n, n, dtype=torch.bool, device=batch.rows.device).tril()
        self.stats.drafted_levels += b * (n - 1)
        return tree_from_mask(batch, tokens, chain.repeat(b, 1, 1))

    def extend(self, batch: RunningBatch, verified: VerifyOutput, done: CommitOutput) -> RunningBatch:
        """Nothing is to be learned from a round. Each request's newest token is the next tree's root."""
        return batch.after_round(verified, done)[0]


def guesses(ids: Sequence[int], count: int) -> list[int]:
    """What followed the last two of the ids when they last stood together before, `count` tokens of it."""
    for start in range(len(ids) - 3, -1, -1):
        if ids[start : start + 2] == ids[-2:]:
            followed = ids[start + 2 :]
            return [followed[i % len(followed)] for i in range(count)]
    return [ids[-1]] * count


def build(setup: Setup) -> Worker:
    """Called once, when an engine is made."""
    setup.no_draft()
    return RepeatLast(setup.target_runner(), setup.allocator, setup.stats, setup.config)


ALGORITHM = Algorithm(
    name="repeat-last",
    summary="what followed the last two tokens before",
    build=build,
    defaults={"topk": 1, "num_steps": 4},
    # It guesses chains, has no branches to attend, and no law that its guesses were drawn from or are judged by.
    fixed=("topk", "num_draft_tokens", "exact_branch_kv", "sampler", "threshold_single", "threshold_acc"),
)
