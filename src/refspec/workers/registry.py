"""Which algorithms there are, and how each is put together. Nothing above this file knows them by name.

An algorithm is a name and a function that makes a worker from a `Setup`. The built-in ones stand at the end of this
file. A package of yours adds one without touching this one: it has an `Algorithm` somewhere, and an entry point of the
group "refspec.algorithms" that names it, in its pyproject.toml:

    [project.entry-points."refspec.algorithms"]
    my-drafter = "my_package.drafter:ALGORITHM"

Once that package is installed, SpecConfig(algorithm="my-drafter") works, and so does --algorithm my-drafter. The
entry point's name must be the Algorithm's own. A name that is built in cannot be taken.

Source: SGLang: python/sglang/srt/speculative/spec_registry.py @0.5.23
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from refspec.config import ALGORITHMS, SpecConfig, algorithm_entry_points
from refspec.memory.allocator import SlotAllocator
from refspec.models.checkpoint import find_checkpoint, load_eagle
from refspec.models.eagle import EagleHead
from refspec.models.llama import LlamaForCausalLM
from refspec.runtime.runner import ModelRunner, ServedModel
from refspec.workers.base import Stats, Worker
from refspec.workers.eagle_v1 import EagleWorkerV1
from refspec.workers.eagle_v2 import EagleWorkerV2
from refspec.workers.ngram import NgramWorker

Draft = TypeVar("Draft", bound=ServedModel)


@dataclass(frozen=True)
class Setup:
    """What the engine has ready when it makes a worker.

    target: the target model. shipped_draft: the name of the draft that belongs to it, where both are shipped.
    draft: as the engine's user gave it: a shipped name, a folder, a model object; None: nothing was given.
    make_runner: (model, rows) -> a runner of it over a KV pool of its own. rows: by phase, how many rows each request
        has at most, in forwards that a graph may hold.
    """

    config: SpecConfig
    target: ServedModel
    shipped_draft: str | None
    draft: str | Path | ServedModel | None
    allocator: SlotAllocator
    stats: Stats
    dtype: torch.dtype
    device: torch.device
    make_runner: Callable[[ServedModel, dict[str, int]], ModelRunner]

    def target_runner(self, model: ServedModel | None = None) -> ModelRunner:
        """A runner of the target (or of a model that stands in for it), which verifies N rows of each request."""
        return self.make_runner(model or self.target, {"target": self.config.num_draft_tokens})

    def no_draft(self) -> None:
        """Raises ValueError if a draft was given to an algorithm that takes none."""
        if self.draft is not None:
            raise ValueError(f"a draft model is given, but algorithm {self.config.algorithm} needs none: leave it out")

    def draft_folder(self) -> Path | None:
        """The folder that the draft's weights are to be loaded from; None where it was given as a model object.

        Raises ValueError where none is given or known.
        """
        if self.draft is None:
            if not self.shipped_draft:
                raise ValueError(
                    f"algorithm {self.config.algorithm} needs a draft model: name one (--draft, or draft=... in "
                    "Python); only for tiny it is known which"
                )
            return find_checkpoint(self.shipped_draft)
        return find_checkpoint(self.draft) if isinstance(self.draft, str | Path) else None

    def llama_target(self) -> LlamaForCausalLM:
        """The target, for a draft that shares its embedding. Raises ValueError where it is another kind of model."""
        if not isinstance(self.target, LlamaForCausalLM):
            raise ValueError("an EAGLE head shares its target's embedding: the target must be a LLaMA-style model")
        return self.target

    def check_sizes(self, draft: ServedModel) -> None:
        """Raises ValueError for a draft object whose vocabulary, hidden states or dtype are not the target's."""
        target = self.target
        for name, theirs, ours in (
            ("vocab_size", draft.config.vocab_size, target.config.vocab_size),
            ("hidden_size", draft.config.hidden_size, target.config.hidden_size),
            ("dtype", draft.kv_layout.dtype, target.kv_layout.dtype),
        ):
            if theirs != ours:
                raise ValueError(f"the draft's {name} is {theirs}, the target's {ours}: they must be equal")


@dataclass(frozen=True)
class Algorithm:
    """A way to guess, and to have the guesses checked.

    name: that of SpecConfig.algorithm. summary: one line. build: makes the worker; raises ValueError, with one line
    that says what is wrong, for a config or models that it cannot work with. shipped_draft: the shipped draft that it
    takes with the shipped target; None: it takes no draft.
    """

    name: str
    summary: str
    build: Callable[[Setup], Worker]
    shipped_draft: str | None = None


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name, built in or from an installed package. Raises ValueError where there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = algorithm_entry_points().get(name)
    if found is None:
        raise ValueError(
            f"algorithm is {name!r}, it must be one of: {', '.join((*BUILT_IN, *algorithm_entry_points()))}"
        )
    try:
        algorithm = found.load()
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"algorithm {name!r} comes from {found.value}, which cannot be loaded ({type(error).__name__}: {reason})"
        ) from error
    if not isinstance(algorithm, Algorithm) or algorithm.name != name:
        raise ValueError(f"algorithm {name!r} comes from {found.value}, which is no Algorithm of that name")
    return algorithm


def require_finite(model: ServedModel, role: str) -> None:
    """Raises ValueError for a model object whose weights are no numbers."""
    if isinstance(model, nn.Module):
        for name, parameter in model.named_parameters():
            if not torch.isfinite(parameter).all():
                raise ValueError(f"the {role}'s weights hold NaN or infinite values, first in {name}")


# --- the built-in ones ----------------------------------------------------------------------------------------------


def eagle_draft(setup: Setup) -> ServedModel:
    """The EAGLE head that was asked for. Raises ValueError for one that is not of this target."""
    folder = setup.draft_folder()
    if folder:
        return load_eagle(folder, setup.llama_target(), setup.dtype, setup.device)
    draft = setup.draft
    assert draft is not None
    assert not isinstance(draft, str | Path)
    setup.check_sizes(draft)
    if isinstance(draft, EagleHead) and draft.shared[0] is not getattr(setup.target, "embed_tokens", None):
        raise ValueError("this EAGLE head was made for another target: a head shares its own target's embedding")
    if isinstance(draft, LlamaForCausalLM):
        raise ValueError("the draft is a whole language model: algorithm eagle takes an EAGLE head")
    require_finite(draft, "draft")
    return draft


def _eagle(setup: Setup) -> Worker:
    config = setup.config
    draft = setup.make_runner(eagle_draft(setup), {"draft": config.topk, "extend": config.num_steps + 1})
    return EagleWorkerV1(setup.target_runner(), draft, setup.allocator, setup.stats, config)


def _eagle_v2(setup: Setup) -> Worker:
    config = setup.config
    draft = setup.make_runner(eagle_draft(setup), {"draft": config.topk, "extend": config.num_draft_tokens})
    return EagleWorkerV2(setup.target_runner(), draft, setup.allocator, setup.stats, config)


def _ngram(setup: Setup) -> Worker:
    setup.no_draft()
    return NgramWorker(setup.target_runner(), setup.allocator, setup.stats, setup.config)


BUILT_IN = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("eagle", "an EAGLE head over the target's hidden states, rounds as in spec v1", _eagle, "tiny-eagle"),
        Algorithm("eagle-v2", "the same head, rounds as in spec v2: they overlap", _eagle_v2, "tiny-eagle"),
        Algorithm("ngram", "no draft model: what followed the same tokens before, in any prompt or output", _ngram),
    )
}
assert tuple(BUILT_IN) == ALGORITHMS
