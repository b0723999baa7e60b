"""Which algorithms there are, and how each is put together. Nothing above this file knows them by name.

An algorithm is a name and a function that makes a worker from a `Setup`. The built-in ones stand at the end of this
file. A package of yours adds one without touching this one: it has an `Algorithm` somewhere, and an entry point of the
group "refspec.algorithms" that names it, in its pyproject.toml:

    [project.entry-points."refspec.algorithms"]
    my-drafter = "my_package.drafter:ALGORITHM"

Once that package is installed, SpecConfig(algorithm="my-drafter") works, and so does --algorithm my-drafter. The
entry point's name must be the Algorithm's own. A name that is built in cannot be taken: the built-in one stays, and
Engine.notes says so. tests/plugin_example is such a package.

Source: SGLang: python/sglang/srt/speculative/spec_registry.py @0.5.23
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from refspec.config import (
    ALGORITHMS,
    OF_A_DRAFT_MODEL,
    SpecConfig,
    algorithm_entry_points,
    algorithm_offers,
)
from refspec.memory.allocator import SlotAllocator
from refspec.memory.kv_pool import TokenToKVPool
from refspec.models.checkpoint import find_checkpoint, load_eagle, load_eagle3, load_frozen_kv, load_mtp, load_target
from refspec.models.eagle import EagleHead
from refspec.models.eagle3 import Eagle3Head, FusedTarget
from refspec.models.frozen_kv import FrozenKVAssistant
from refspec.models.llama import LlamaForCausalLM
from refspec.models.mtp import MTPLayer, MTPLayers
from refspec.runtime.runner import ModelRunner, ServedModel
from refspec.workers.base import Stats, Worker
from refspec.workers.eagle_v1 import EagleWorkerV1
from refspec.workers.eagle_v2 import EagleWorkerV2
from refspec.workers.frozen_kv import FrozenKVWorker
from refspec.workers.multi_layer import MultiLayerWorker
from refspec.workers.ngram import NgramWorker
from refspec.workers.standalone import StandaloneWorker

Draft = TypeVar("Draft", bound=ServedModel)
# What a draft can be given as: a shipped name, a folder, a model object, or the layers of a multi-layer draft.
GivenDraft = str | Path | ServedModel | Sequence[ServedModel] | MTPLayers


class MakeRunner(Protocol):
    """See Setup."""

    def __call__(
        self, model: ServedModel, rows: Mapping[str, int | Sequence[int]], pool: TokenToKVPool | None = None
    ) -> ModelRunner: ...


@dataclass(frozen=True)
class Setup:
    """What the engine has ready when it makes a worker.

    target: the target model. shipped_draft: the name of the draft that belongs to it, where both are shipped.
    draft: as the engine's user gave it; None: nothing was given.
    make_runner: (model, rows, pool) -> a runner of it over the pool; None: over one of its own. rows: by phase, how
        many rows each request has at most, in forwards that a graph may hold.
    note: for Engine.notes: a line that says what of the config is done otherwise than it says, and why.
    """

    config: SpecConfig
    target: ServedModel
    shipped_draft: str | None
    draft: GivenDraft | None
    allocator: SlotAllocator
    stats: Stats
    dtype: torch.dtype
    device: torch.device
    make_runner: MakeRunner
    note: Callable[[str], None]

    def target_runner(self, model: ServedModel | None = None) -> ModelRunner:
        """A runner of the target (or of a model that stands in for it), which verifies N rows of each request."""
        return self.make_runner(model or self.target, {"target": self.config.tree_sizes})

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

    def draft_object(self) -> ServedModel:
        """The draft, where it was given as a model object.

        Raises ValueError if its weights are no numbers, and for several layers.
        """
        assert self.draft is not None
        assert not isinstance(self.draft, str | Path)
        if isinstance(self.draft, Sequence | MTPLayers):
            raise ValueError(f"the draft has several layers: algorithm {self.config.algorithm} takes a single model")
        require_finite(self.draft, "draft")
        return self.draft

    def llama_target(self) -> LlamaForCausalLM:
        """The target, for a draft that shares its embedding. Raises ValueError where it is another kind of model."""
        if not isinstance(self.target, LlamaForCausalLM):
            raise ValueError(
                f"the draft of algorithm {self.config.algorithm} shares its target's embedding: the target must be a "
                "LLaMA-style model"
            )
        return self.target

    def check_shared(self, draft: EagleHead | Eagle3Head | MTPLayer | FrozenKVAssistant) -> None:
        """Raises ValueError for a draft that shares another target's embedding."""
        if draft.shared[0] is not getattr(self.target, "embed_tokens", None):
            raise ValueError("this draft was made for another target: it shares its own target's embedding")

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
    takes with the shipped target; None: it takes no draft. adaptive: its steps may change from round to round.
    defaults: fields of SpecConfig that should have other values than its own, where nobody asks for any.
    fixed: fields that nobody may choose, since it does not look at them or can work with one value only: that of
        defaults, or else SpecConfig's own. Of num_draft_tokens it is num_steps + 1.
    """

    name: str
    summary: str
    build: Callable[[Setup], Worker]
    shipped_draft: str | None = None
    adaptive: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()

    def spec(self, **given: Any) -> SpecConfig:
        """The config of this algorithm in which these fields are given, and the others as suits it.

        num_draft_tokens, if it is not given, goes with topk and num_steps: num_steps + 1 along a chain; in a tree its
        default, or, where there are fewer candidates, all of them. adaptive_steps make it a chain of the most steps.
        Raises ValueError as SpecConfig does, and for a field that has no meaning here.
        """
        for name in given:
            owner = name.partition("_")[0]
            no_choice = name in self.fixed or (owner in ALGORITHMS and owner != self.name)
            if no_choice or (name == "adaptive_steps" and not self.adaptive):
                raise ValueError(f"{name} is given, but algorithm {self.name} leaves no choice there: leave it out")
        settings = {"algorithm": self.name, **self.defaults, **given}
        if given.get("adaptive_steps"):
            settings = {"topk": 1, "num_steps": given["adaptive_steps"][-1], **settings}
        if "num_draft_tokens" not in given:
            shape = {name: settings[name] for name in ("algorithm", "topk", "num_steps") if name in settings}
            least = SpecConfig(**shape, num_draft_tokens=2)
            most = settings.get("num_draft_tokens", SpecConfig.num_draft_tokens)
            if least.num_candidates:
                most = least.num_steps + 1 if least.topk == 1 else min(most, least.num_candidates + 1)
            settings["num_draft_tokens"] = most
        return SpecConfig(**settings)

    def check(self, config: SpecConfig) -> None:
        """Raises ValueError for a config in which a fixed field has another value, with one that would fit."""
        if config.adaptive_steps and not self.adaptive:
            raise ValueError(
                f"adaptive_steps is {config.adaptive_steps}, but algorithm {self.name} takes the same number of steps "
                "in every round: leave it out"
            )
        fitting = self.spec()
        for name in self.fixed:
            value, wanted = getattr(config, name), getattr(fitting, name)
            if name == "num_draft_tokens":
                wanted = config.num_steps + 1
            if value != wanted:
                shape = ", ".join(
                    f"{each}={getattr(fitting, each)}" for each in ("topk", "num_steps", "num_draft_tokens")
                )
                raise ValueError(
                    f"{name} is {value!r}, but with algorithm {self.name} it must be {wanted!r} "
                    f"(one that fits: SpecConfig(algorithm={self.name!r}, {shape}))"
                )


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name, built in or from an installed package. Raises ValueError where there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = _offers(name)
    if not found:
        raise ValueError(
            f"algorithm is {name!r}, it must be one of: {', '.join((*BUILT_IN, *algorithm_entry_points()))}"
        )
    if len(found) > 1:
        packages = " and ".join(map(_package_of, found))
        raise ValueError(f"algorithm {name!r} is offered by {packages}: remove all but one of these packages")
    origin = f"algorithm {name!r} comes from {found[0].value} of the package {_package_of(found[0])}"
    try:
        algorithm = found[0].load()
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{origin}, which cannot be loaded ({type(error).__name__}: {reason})") from error
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"{origin}, which is no Algorithm of refspec.workers.registry but {algorithm!r}")
    if algorithm.name != name:
        raise ValueError(f"{origin}, which is an Algorithm of another name, {algorithm.name!r}")
    unknown = {*algorithm.defaults, *algorithm.fixed} - {each.name for each in fields(SpecConfig)}
    if unknown:
        raise ValueError(f"{origin}, which speaks of {min(unknown)!r}, but SpecConfig has no such field")
    return algorithm


def clash_with(name: str) -> str | None:
    """A line about installed packages that offer an algorithm of a built-in one's name; None: nobody does."""
    offers = _offers(name) if name in BUILT_IN else []
    if not offers:
        return None
    packages = " and ".join(map(_package_of, offers))
    return f"algorithm {name!r} is the built-in one: what {packages} offers under that name is not used"


def _offers(name: str) -> list[EntryPoint]:
    return list(algorithm_offers().select(name=name))


def _package_of(found: EntryPoint) -> str:
    return found.dist.name if found.dist else found.module


def layers_of(draft: ServedModel | Sequence[ServedModel] | MTPLayers) -> list[ServedModel]:
    """The layers of a draft that has several; else the draft itself."""
    if isinstance(draft, Sequence | MTPLayers):
        return [draft[i] for i in range(len(draft))]
    return [draft]


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
    draft = setup.draft_object()
    setup.check_sizes(draft)
    if isinstance(draft, EagleHead):
        setup.check_shared(draft)
    if isinstance(draft, LlamaForCausalLM):
        raise ValueError("the draft is a whole language model: algorithm eagle takes an EAGLE head")
    return draft


def _note_what_has_no_effect(setup: Setup) -> None:
    config = setup.config
    if config.topk > 1:
        return
    if config.exact_branch_kv:
        setup.note("exact_branch_kv changes nothing with topk=1: the only branch attends its own past anyway")
    checked, drafted = config.num_draft_tokens - 1, config.num_steps
    if checked < drafted:
        setup.note(
            f"num_draft_tokens is {checked + 1}, so that no more than {checked} of a chain's {drafted} tokens can be "
            f"accepted, and rounds do without the short cut of chains: {drafted + 1} is for all of them"
        )


def _round_v1(setup: Setup, target: ModelRunner, draft: ServedModel) -> Worker:
    """EAGLE's round with a draft of its shape: EAGLE-3 and MTP differ from EAGLE in their models alone."""
    config = setup.config
    _note_what_has_no_effect(setup)
    extend_rows = [steps + 1 for steps in config.step_choices]
    runner = setup.make_runner(draft, {"draft": config.topk, "extend": extend_rows})
    return EagleWorkerV1(target, runner, setup.allocator, setup.stats, config)


def _eagle(setup: Setup) -> Worker:
    draft = eagle_draft(setup)
    return _round_v1(setup, setup.target_runner(), draft)


def _eagle3(setup: Setup) -> Worker:
    target, folder = setup.llama_target(), setup.draft_folder()
    draft = load_eagle3(folder, target, setup.dtype, setup.device) if folder else setup.draft_object()
    if not isinstance(draft, Eagle3Head):
        raise ValueError("the draft is no EAGLE-3 head: algorithm eagle3 takes one")
    setup.check_shared(draft)
    return _round_v1(setup, setup.target_runner(FusedTarget(target, draft.config.feature_layers)), draft)


def mtp_layers(setup: Setup) -> list[ServedModel]:
    """The layers that were asked for, all of them. Raises ValueError for what is no MTP layer of this target."""
    folder, given = setup.draft_folder(), setup.draft
    if folder:
        given = load_mtp(folder, setup.llama_target(), setup.dtype, setup.device)
    assert given is not None
    assert not isinstance(given, str | Path)
    layers = layers_of(given)
    for layer in layers:
        if isinstance(layer, MTPLayer):
            setup.check_shared(layer)
        elif isinstance(layer, nn.Module):
            raise ValueError(f"the draft is no MTP layer: algorithm {setup.config.algorithm} takes one, or several")
        setup.check_sizes(layer)
        require_finite(layer, "draft")
    return layers


def _mtp(setup: Setup) -> Worker:
    return _round_v1(setup, setup.target_runner(), mtp_layers(setup)[0])


def _eagle_v2(setup: Setup) -> Worker:
    config = setup.config
    _note_what_has_no_effect(setup)
    draft = setup.make_runner(eagle_draft(setup), {"draft": config.topk, "extend": config.num_draft_tokens})
    return EagleWorkerV2(setup.target_runner(), draft, setup.allocator, setup.stats, config)


def _multi_layer(setup: Setup) -> Worker:
    steps, layers = setup.config.num_steps, mtp_layers(setup)
    if len(layers) < steps:
        raise ValueError(
            f"num_steps is {steps}, but the draft has {len(layers)} layers, and each guesses one token: lower num_steps"
        )
    rows = {"extend": 2 * steps}  # S - 1 of the front, and S + 1 new ones
    runners = [setup.make_runner(layer, rows) for layer in layers[:steps]]
    return MultiLayerWorker(setup.target_runner(), runners, setup.allocator, setup.stats, setup.config)


def _frozen_kv(setup: Setup) -> Worker:
    folder, k = setup.draft_folder(), setup.config.topk
    _note_what_has_no_effect(setup)
    draft: ServedModel = (
        load_frozen_kv(folder, setup.llama_target(), setup.dtype, setup.device) if folder else setup.draft_object()
    )
    if isinstance(draft, FrozenKVAssistant):
        setup.check_shared(draft)
    elif isinstance(draft, nn.Module):
        raise ValueError("the draft is no frozen-KV assistant: algorithm frozen-kv takes one")
    setup.check_sizes(draft)
    target = setup.target_runner()
    assistant = setup.make_runner(draft, {"draft": [1, k]}, target.pool)
    return FrozenKVWorker(target, assistant, setup.allocator, setup.stats, setup.config)


def standalone_draft(setup: Setup) -> ServedModel:
    """The small language model that was asked for. Raises ValueError for one that does not speak the target's tokens.

    Its hidden size and its dtype are its own.
    """
    folder = setup.draft_folder()
    if folder:
        draft: ServedModel = load_target(folder, setup.dtype, setup.device)
    else:
        draft = setup.draft_object()
    if isinstance(draft, nn.Module) and not hasattr(draft, "embed_tokens"):
        raise ValueError("the draft has no embedding of its own: algorithm standalone takes a whole language model")
    ours, theirs = setup.target.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ValueError(f"the draft's vocab_size is {theirs}, the target's {ours}: they must be equal")
    return draft


def _standalone(setup: Setup) -> Worker:
    config = setup.config
    _note_what_has_no_effect(setup)
    draft = setup.make_runner(standalone_draft(setup), {"draft": config.topk, "extend": config.num_steps + 2})
    return StandaloneWorker(setup.target_runner(), draft, setup.allocator, setup.stats, config)


def _ngram(setup: Setup) -> Worker:
    setup.no_draft()
    return NgramWorker(setup.target_runner(), setup.allocator, setup.stats, setup.config)


def _built_in(name: str, build: Callable[[Setup], Worker], shipped_draft: str | None = None, **rest: Any) -> Algorithm:
    return Algorithm(name, ALGORITHMS[name], build, shipped_draft, **rest)


BUILT_IN = {
    algorithm.name: algorithm
    for algorithm in (
        _built_in("eagle", _eagle, "tiny-eagle", adaptive=True),
        _built_in("eagle-v2", _eagle_v2, "tiny-eagle"),
        _built_in("eagle3", _eagle3, "tiny-eagle3", adaptive=True),
        _built_in("mtp", _mtp, "tiny-mtp", adaptive=True),
        _built_in(
            "multi-layer",
            _multi_layer,
            "tiny-mtp",
            defaults={"topk": 1},
            fixed=("topk", "num_draft_tokens", "exact_branch_kv"),
        ),
        _built_in("frozen-kv", _frozen_kv, "tiny-frozen-kv", fixed=("exact_branch_kv",)),
        _built_in("standalone", _standalone, "tiny-standalone"),
        _built_in("ngram", _ngram, fixed=OF_A_DRAFT_MODEL),
    )
}
assert tuple(BUILT_IN) == tuple(ALGORITHMS)
