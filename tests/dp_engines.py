"""Engines for ranks that are processes of their own: what makes them has to be found there by its name."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from builders import agreeing_now_and_then, random_logits

from refspec import Engine, SpecConfig
from refspec.models.scripted import ScriptedModel

VOCAB = 11
FATAL = 9  # a prompt that begins with it ends badly, a few tokens later


def scripted(device: str, spec: SpecConfig | None, fault: str = "", **settings: object) -> Engine:
    """A draft that is right now and then. fault: what becomes of a rank with a FATAL prompt, "raise" or "kill"."""
    says = random_logits(VOCAB)

    def next_logits(context: list[int]) -> Sequence[float]:
        if fault and context[0] == FATAL and len(context) > 6:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the script has a hole\nright here")
        return says(context)

    target = ScriptedModel(next_logits, VOCAB)
    draft = ScriptedModel(agreeing_now_and_then(says, random_logits(VOCAB, salt=5)), VOCAB)
    return Engine(target, draft if spec else None, spec, device, **settings)  # type: ignore[arg-type]
