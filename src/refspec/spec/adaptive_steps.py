"""How many steps the next round drafts, where that follows what the last rounds accepted.

A draft behind the first wrong one is lost, and has cost a draft forward and a row of the target's. On text that the
draft finds easy a long chain is nearly all accepted, and a longer one would bring more; on hard text it is nearly all
lost. So the length follows: up where almost all of it was accepted, down where a shorter chain would have held what
was. Chains only (k = 1): for each length all shapes are known, and N = S + 1 goes with S.

What was accepted is noisy. It is averaged, the newest round with weight WEIGHT and all older ones with the rest, so
that what lies n rounds back counts for (1 - WEIGHT)^n of it; nothing changes in the first WARM_UP rounds, then only
every INTERVAL rounds; and a chain that has just become longer is not taken back for the average that made it so: to
fall from b to a, of two lengths that follow, takes an average of a - 0.75 or less, to rise from a to b more than
a - 0.5. One average serves the batch, since all its requests have trees of one size.

**The output keeps its law.** A round of any length commits tokens as the target would have said them, one after the
other: given what is committed before, their law is the target's. So it is whatever the length, as long as the length is
chosen before the round and from nothing but the past: committed tokens, and how many came at a time. To look at the
round's own drafts, or at the coins that judge them, and then to choose, would be to choose among outcomes. A greedy
output is the same, whatever is chosen. A sampled one is not: a request's coins depend on where its rounds begin, and
that now depends on the other requests, and on what ran before.

Source: SGLang: python/sglang/srt/speculative/adaptive_spec_params.py:AdaptiveStepSlot @0.5.23, whose constants these
are. There each range of batch sizes has an average and lengths of its own, and length 0 drafts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from refspec.config import SpecConfig

WEIGHT = 0.2
WARM_UP = 10
INTERVAL = 5


class AdaptiveSteps:
    """Chooses each round's steps among config.step_choices; where there is one choice, that. Begins with the most.

    largest: the config as it was given, which everything else is sized by.
    """

    def __init__(self, config: SpecConfig) -> None:
        self.largest = self.config = config
        self.average = config.num_steps - 1.0  # of the drafts accepted in a round: neither too few nor too many here
        self.rounds = 0

    def next_config(self, accepted: Sequence[int]) -> SpecConfig:
        """Take note of a round, in which that many drafts of each request were accepted. Returns the next one's config.

        Requests that have ended are better left out: a stop may have cut what was accepted. Where none goes on, the
        round does not count.
        """
        if accepted and self.largest.adaptive_steps:
            self.average += WEIGHT * (fmean(accepted) - self.average)
            self.rounds += 1
            if self.rounds > WARM_UP and (self.rounds - WARM_UP) % INTERVAL == 0:
                self._set_steps(self._best_steps())
        return self.config

    def _best_steps(self) -> int:
        choices, now = self.largest.step_choices, self.config.num_steps
        enough = [steps for steps in choices if steps < now and self.average <= steps - 0.75]
        longer = [steps for steps in choices if steps > now and self.average > now - 0.5]
        return min(enough or longer, default=now)

    def _set_steps(self, steps: int) -> None:
        if steps != self.config.num_steps:
            self.config = replace(self.largest, num_steps=steps, num_draft_tokens=steps + 1, adaptive_steps=())
