"""The workers beside EAGLE's, each with a scripted draft of its own kind, all built from functions of the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from builders import NextLogits
from scripted_assistant import ScriptedAssistant
from serving import VOCAB

from refspec import Engine, SpecConfig
from refspec.models.scripted import ScriptedModel

DraftOf = Callable[[NextLogits, int], Any]

# By algorithm: a draft that holds likely, after any text, what a function of the text says; and the vocabulary's size.
SCRIPTED: dict[str, DraftOf] = {
    "frozen-kv": ScriptedAssistant,
    "multi-layer": lambda guessed, vocab_size: [ScriptedModel(guessed, vocab_size) for _ in range(4)],
    "standalone": ScriptedModel,
}
CHAINS_ONLY = {"multi-layer"}  # k = 1 and N = S + 1
NO_DRAFT_KV = {"frozen-kv", "multi-layer"}  # in a loop, so that exact_branch_kv means nothing
SEES_THE_END = {"multi-layer"}  # but not the whole text: layer i is not shown the first i tokens


def of(algorithm: str, spec: SpecConfig) -> SpecConfig:
    """The nearest config that the algorithm takes."""
    if algorithm in CHAINS_ONLY:
        spec = replace(spec, topk=1, num_draft_tokens=spec.num_steps + 1)
    if algorithm in NO_DRAFT_KV:
        spec = replace(spec, exact_branch_kv=False)
    return replace(spec, algorithm=algorithm)


def says(algorithm: str, next_logits: NextLogits) -> NextLogits:
    """A function of what the algorithm's draft can see."""
    return (lambda context: next_logits(context[-2:])) if algorithm in SEES_THE_END else next_logits


def engine_of(algorithm: str, said: NextLogits, guessed: NextLogits, spec: SpecConfig, **settings: Any) -> Engine:
    return Engine(ScriptedModel(said, VOCAB), SCRIPTED[algorithm](guessed, VOCAB), of(algorithm, spec), **settings)
