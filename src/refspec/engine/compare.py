"""Are two outputs the same, and if not, may they differ?

Greedy speculation gives plain greedy's tokens: in float64, and with scripted models, exactly. In float32 and below,
products of one row and of many rows are rounded differently, so logits that all but tie can change places. A first
difference is allowed only there: where the plain run's two best logits lie within the gap limit. What follows a
first difference is another text, and says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from refspec.engine.engine import Engine
from refspec.kernels.backend import use_backend
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner

# Two logits this far apart may still change places: a few times the largest difference seen between one-row and
# many-row products of the shipped target (4e-5 in float32; the half types keep 8 and 11 bits of logits about 16).
GAP_LIMITS = {torch.float64: 0.0, torch.float32: 2e-4, torch.bfloat16: 0.5, torch.float16: 0.06}


@dataclass(frozen=True)
class Difference:
    """The first token at which a speculative output leaves the plain one."""

    index: int  # in the output
    gap: float  # between the plain run's two best logits there
    gap_limit: float  # of the engine's dtype
    plain_token: int | None  # None: the plain output had ended
    spec_token: int | None  # None: the speculative output had ended

    @property
    def is_rounding(self) -> bool:
        return self.gap <= self.gap_limit and self.plain_token is not None and self.spec_token is not None


def first_difference(
    engine: Engine, prompt_ids: Sequence[int], plain_ids: Sequence[int], spec_ids: Sequence[int]
) -> Difference | None:
    """Where spec_ids leave plain_ids, and how near the plain choice was to a tie there. None: they are the same.

    engine: one whose target gave plain_ids; its counters stay as they are.
    """
    if list(plain_ids) == list(spec_ids):
        return None
    index = 0
    while index < min(len(plain_ids), len(spec_ids)) and plain_ids[index] == spec_ids[index]:
        index += 1
    best = _next_logits(engine, [*prompt_ids, *plain_ids[:index]]).topk(2).values
    return Difference(
        index=index,
        gap=float(best[0] - best[1]),
        gap_limit=GAP_LIMITS.get(engine.dtype, 0.0),
        plain_token=plain_ids[index] if index < len(plain_ids) else None,
        spec_token=spec_ids[index] if index < len(spec_ids) else None,
    )


def _next_logits(engine: Engine, ids: list[int]) -> torch.Tensor:
    """What the target says after ids: (V), by one forward over all of them in a pool of its own."""
    device = engine.device
    runner = ModelRunner(engine.target_model, len(ids), device, Counter(), engine.vocab_size)
    slots = torch.arange(1, len(ids) + 1, device=device)
    input_ids = torch.tensor(ids, device=device)
    batch = causal_batch(
        input_ids, slots, [len(ids)], slots[None], torch.zeros(1, dtype=torch.int64, device=device), [0]
    )
    with use_backend(engine.backend):
        out = runner.forward(batch, "compare", slots[-1:] - 1)
    return out.logits[0]
