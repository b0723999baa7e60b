"""Every knob of the engine, checked when it is made: a bad value never reaches a kernel."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

    from torch import Tensor

# Built in, and what each is. workers/registry.py says how they are put together, and how others are added.
ALGORITHMS = {
    "eagle": "an EAGLE head over the target's hidden states, rounds as in spec v1",
    "eagle-v2": "the same head, rounds as in spec v2: they overlap",
    "eagle3": "a head on three layers of the target, with a small vocabulary of its own",
    "mtp": "one multi-token-prediction layer, fed its own output",
    "multi-layer": "an MTP layer for each token ahead, all run inside the extend: chains only",
    "frozen-kv": "an assistant that reads the target's keys and values, and writes none",
    "standalone": "a small language model of its own, which reads tokens as they are",
    "ngram": "no draft model: what followed the same tokens before, in any prompt or output",
}
ALGORITHM_GROUP = "refspec.algorithms"
MOST_NODES = 512  # of a tree: one warp holds them in its registers when it walks
SAMPLERS = ("target_only", "rejection", "block")
MATCH_TYPES = ("BFS", "PROB")
# Fields of SpecConfig that mean nothing where guesses are looked up.
OF_A_DRAFT_MODEL = ("topk", "num_steps", "exact_branch_kv", "sampler", "threshold_single", "threshold_acc")


@dataclass(frozen=True)
class SpecConfig:
    """How to speculate. Engine(spec=None) decodes plainly.

    algorithm: who guesses: one of ALGORITHMS, or the name of an installed plug-in (refspec.workers.registry).
    topk (k): branches that the draft follows at each level.
    num_steps (S): levels of the draft tree, so at most S drafts are accepted in a round.
    num_draft_tokens (N): nodes that the target verifies for each request, the root included.
    page_size: slots are owned in pages of so many tokens. It changes where keys and values lie, and how many slots a
        round needs (with topk > 1 each branch takes pages of its own), and no output that the pool has room for.
    exact_branch_kv: in the draft loop, let a branch attend its true ancestors' keys and values. False is
        SGLang's layout, where branch j attends what column j held at earlier steps, its ancestor or not.
        The output is the same either way; with k > 1 the guesses differ.
    sampler: how verification decides for requests that sample; for greedy ones all three decide alike.
        "target_only": one coin for each node of the tree, thrown against the target's law. "rejection", "block": along
        a chain, whose drafts are drawn from the draft's own law, under the same temperature and filters; each draft is
        judged for itself, or the chain as a block. Both need topk = 1 and num_draft_tokens = num_steps + 1.
    threshold_single, threshold_acc: of target_only. Below 1, drafts are accepted more easily, and the output no longer
        has the target's law: any of at least probability threshold_single, and all as if 1 / threshold_acc times as
        likely. What has probability 0 is never accepted.
    adaptive_steps: the numbers of steps, ascending, among which each round's is chosen by what the last rounds accepted
        (refspec.spec.adaptive_steps). num_steps is the last of them, and the one to begin with. For chains alone, whose
        N goes with S: it needs topk = 1 and num_draft_tokens = num_steps + 1. The law of a sampled output stays the
        same, but which output a seed gives depends on the requests that run beside it, and that ran before.
    exact_penalties: count, for the penalties of SamplingParams at a node of the tree, the drafts on the path to it, as
        if they had been decoded one by one. False is SGLang's relaxation: within a block nothing new is counted, and
        the output is another than plain decoding's where a block repeats a token.

    Algorithm ngram has no draft model, and looks guesses up (refspec.spec.ngram_trie). topk, num_steps, exact_branch_kv
    and the thresholds mean nothing there and must be left alone, and the sampler is "target_only": it draws the
    target's token as plain decoding does, with the same coin, and looks for it among the guesses. Its own are named
    as in SGLang, where they begin with speculative_:
    ngram_max_trie_depth: tokens of a match and of what followed it, together.
    ngram_max_bfs_breadth: how many different tokens that followed a match are guessed at most, side by side.
    ngram_match_type: which of them first: "BFS", the latest; "PROB", the most frequent.
    ngram_capacity: pieces of text that are remembered, at about 0.4 KB each; beyond, those not seen for longest go.

    Raises ValueError, naming the field and the numbers, for a combination that cannot work.
    """

    algorithm: str = "eagle"
    topk: int = 4
    num_steps: int = 3
    num_draft_tokens: int = 16
    page_size: int = 1
    exact_branch_kv: bool = False
    sampler: str = "target_only"
    threshold_single: float = 1.0
    threshold_acc: float = 1.0
    adaptive_steps: tuple[int, ...] = ()
    exact_penalties: bool = True
    ngram_max_trie_depth: int = 18
    ngram_max_bfs_breadth: int = 10
    ngram_match_type: str = "BFS"
    ngram_capacity: int = 200_000

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS and self.algorithm not in algorithm_entry_points():
            known = ", ".join((*ALGORITHMS, *algorithm_entry_points()))
            raise ValueError(f"algorithm is {self.algorithm!r}, it must be one of: {known}")
        for name in ("topk", "num_steps"):
            require_int(name, getattr(self, name), at_least=1)
        require_int("num_draft_tokens", self.num_draft_tokens, at_least=2)
        for name, most in (("num_draft_tokens", MOST_NODES), ("num_steps", MOST_NODES - 1)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most}, got {getattr(self, name)}")
        if self.looks_up:
            self._check_ngram()
        else:
            self._check_levels()
        require_int("page_size", self.page_size, at_least=1)
        for name in ("exact_branch_kv", "exact_penalties"):
            require_flag(name, getattr(self, name))
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler is {self.sampler!r}, it must be one of: {', '.join(SAMPLERS)}")
        for name in ("threshold_single", "threshold_acc"):
            require_number(name, getattr(self, name), 0, 1)
        if self.drafts_are_drawn:
            self._check_chain()
        self._check_adaptive_steps()

    def _check_levels(self) -> None:
        if self.num_draft_tokens > self.num_candidates + 1:
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}, but topk={self.topk} and num_steps={self.num_steps} "
                f"give {self.num_candidates} candidates, so at most {self.num_candidates + 1} with the root"
            )
        for name, value in self._changed().items():
            if name.startswith("ngram_"):
                raise ValueError(f"{name} is {value!r}, but the algorithm is {self.algorithm}: it is for ngram")

    def _check_ngram(self) -> None:
        require_int("ngram_max_trie_depth", self.ngram_max_trie_depth, at_least=2)
        require_int("ngram_max_bfs_breadth", self.ngram_max_bfs_breadth, at_least=1)
        require_int("ngram_capacity", self.ngram_capacity, at_least=1)
        if self.ngram_match_type not in MATCH_TYPES:
            raise ValueError(
                f"ngram_match_type is {self.ngram_match_type!r}, it must be one of: {', '.join(MATCH_TYPES)}"
            )
        for name, value in self._changed().items():
            if name in OF_A_DRAFT_MODEL:
                raise ValueError(f"{name} is {value!r}, but algorithm ngram drafts with no model: leave it out")

    def _changed(self) -> dict[str, object]:
        """The fields that are not at their defaults."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def _check_chain(self) -> None:
        if (self.topk, self.num_draft_tokens) != (1, self.num_steps + 1):
            raise ValueError(
                f"sampler is {self.sampler!r}, which judges a chain: it needs topk=1 and num_draft_tokens=num_steps+1, "
                f"got topk={self.topk}, num_steps={self.num_steps}, num_draft_tokens={self.num_draft_tokens}"
            )
        for name in ("threshold_single", "threshold_acc"):
            if getattr(self, name) != 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but sampler is {self.sampler!r}: only target_only has thresholds"
                )

    def _check_adaptive_steps(self) -> None:
        if isinstance(self.adaptive_steps, str) or not isinstance(self.adaptive_steps, Iterable):
            raise ValueError(f"adaptive_steps must be a list of numbers, got {self.adaptive_steps!r}")
        choices = tuple(self.adaptive_steps)
        object.__setattr__(self, "adaptive_steps", choices)
        for steps in choices:
            require_int("a number of adaptive_steps", steps, at_least=1)
        if not choices:
            return
        if len(choices) < 2 or list(choices) != sorted(set(choices)):
            raise ValueError(f"adaptive_steps is {choices}, it must be two or more numbers, ascending")
        most = choices[-1]
        if (self.topk, self.num_steps, self.num_draft_tokens) != (1, most, most + 1):
            raise ValueError(
                f"adaptive_steps is {choices}, which needs topk=1, num_steps={most} and num_draft_tokens={most + 1}, "
                f"got topk={self.topk}, num_steps={self.num_steps}, num_draft_tokens={self.num_draft_tokens}"
            )

    @property
    def step_choices(self) -> tuple[int, ...]:
        """The numbers of steps that rounds may have, ascending."""
        return self.adaptive_steps or (self.num_steps,)

    @property
    def tree_sizes(self) -> tuple[int, ...]:
        """The numbers of nodes that rounds may have, ascending."""
        return tuple(steps + 1 for steps in self.adaptive_steps) or (self.num_draft_tokens,)

    @property
    def drafts_are_drawn(self) -> bool:
        """Does the draft draw its tokens from its law, and hand the law on? Else it takes the likeliest."""
        return self.sampler != "target_only"

    @property
    def looks_up(self) -> bool:
        """Are guesses looked up, so that there is no draft model, and no pool of candidates to choose from?"""
        return self.algorithm == "ngram"

    @property
    def is_chain(self) -> bool:
        """Is no tree more than a chain, so that what is accepted stands in front of the rest?"""
        return self.topk == 1 and not self.looks_up

    @property
    def num_candidates(self) -> int:
        """The draft's pool: k from the first level, k² from each of the others; 0 where there is none."""
        return 0 if self.looks_up else self.topk + (self.num_steps - 1) * self.topk**2

    @property
    def longest_path(self) -> int:
        """Nodes of the longest path that a tree can have, the root included."""
        return self.num_draft_tokens if self.looks_up else self.num_steps + 1

    def draft_end(self, seq_len: int) -> int:
        """Where the draft's slots end in the request table, for a request with seq_len committed tokens.

        k·S behind the committed ones. Where pages hold several tokens, no two branches may share one, so each of the k
        takes whole pages, the first of which begins like the last committed page. None are needed without a draft.
        """
        if self.looks_up:
            return seq_len
        if self.topk == 1 or self.page_size == 1:
            return seq_len + self.topk * self.num_steps
        begun = seq_len % self.page_size
        pages = -(-(begun + self.num_steps) // self.page_size)
        return seq_len - begun + self.topk * pages * self.page_size

    def round_end(self, seq_len: int) -> int:
        """Where the slots of draft and tree end at most, for a request with at most seq_len committed tokens."""
        # Of two lengths the larger one's branches may need fewer pages; over a page's lengths that evens out.
        lens = range(max(0, seq_len - self.page_size + 1), seq_len + 1)
        return max(max(self.draft_end(n), self.tree_end(n)) for n in lens)

    def tree_end(self, seq_len: int) -> int:
        """Where the slots of the tree end."""
        return seq_len + self.num_draft_tokens


class Matcher(Protocol):
    """Where one request's output stands in a grammar: the state of an automaton that tokens move.

    The engine asks for the tokens that may come next, at the output's end and along the drafts after it, and moves the
    matcher to and fro for that. Between two steps of the engine its state is that of the output, and nothing else.
    """

    @property
    def finished(self) -> bool:
        """Is the output complete, so that nothing can follow? Then the request ends, and is asked nothing more."""

    def allow(self, row: Tensor) -> None:
        """row: bool (V) on the CPU, all False. Set to True the ids that may come next."""

    def accept(self, token: int) -> bool:
        """Move on by one token. False for one that may not come next: then nothing has changed."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""


class Grammar(Protocol):
    """What outputs may look like. It has no state of its own: any number of requests can be given the same one."""

    def matcher(self) -> Matcher:
        """A new matcher, at the start of an output."""


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for. Decoding is greedy unless a temperature is given.

    max_new_tokens: budget of output tokens; a stop inside the budget wins over it.
    stop_token_ids: ids that end the output, beside the model's own end-of-text ids. The id itself is kept.
    ignore_eos: generate through the model's end-of-text ids (stop_token_ids and stop still hold).
    stop: texts that end the output; a single text may be given as it is. The token that completes one is kept in
        token_ids, the text is cut before the stop string. The rules are those of refspec.requests.finish.
    include_stop_str_in_output: cut the text behind the stop string instead. Named as in vLLM; SGLang's no_stop_trim
        would promise too much, since there it decides about stop tokens as well, and here ids are never trimmed.
    temperature: divides the logits before the softmax; 0 takes the likeliest token, and then top_k, top_p, min_p and
        seed have no effect.
    top_k: sample among so many of the likeliest tokens; 0: among all.
    top_p: sample among the fewest likeliest tokens that have this probability together.
    min_p: sample among the tokens that are at least this share as likely as the likeliest.
    repetition_penalty: divides the logit of each token that the output holds, where it is positive, and multiplies it
        where it is negative; 1 changes nothing.
    frequency_penalty: taken off the logit of a token once for each time that the output holds it.
    presence_penalty: taken off the logit of each token that the output holds. What "holds", and the order of these
        four, is defined in refspec.requests.logit_rules.
    logit_bias: token id -> what is added to its logit, from -100 to 100.
    grammar: what the output may look like. The request ends with finish_reason "stop" when its output is complete, and
        with "dead_end" where it allows nothing that the model can say. refspec.requests.json_grammar makes one from a
        JSON schema.
    logprobs: give the log-probability of each output token, and of so many of the likeliest ones in its place. They
        are the model's own, before anything that is set here (refspec.requests.logprobs). None: give none.
    seed: what the request's coins are made of. The same seed gives the same output for the same prompt, settings and
        models, whoever else is in the batch (but for rounding, where models compute below float64). None: the engine
        picks one.
    """

    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    grammar: Grammar | None = None
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        require_int("max_new_tokens", self.max_new_tokens, at_least=1)
        if not isinstance(self.stop_token_ids, Iterable):
            raise ValueError(f"stop_token_ids must be a list of ids, got {self.stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            require_int("stop_token_ids", token, at_least=0)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            require_flag(name, getattr(self, name))
        require_number("temperature", self.temperature, 0, math.inf)
        if self.temperature > sys.float_info.max:  # inf, or a whole number that would become it
            raise ValueError("temperature is inf, it must be a finite number")
        require_int("top_k", self.top_k, at_least=0)
        require_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ValueError("top_p is 0, which leaves no token: it must be above 0 (temperature=0 decodes greedily)")
        require_number("min_p", self.min_p, 0, 1)
        # As in SGLang, but for the lower bound of the first: dividing by less could make a logit infinite.
        require_number("repetition_penalty", self.repetition_penalty, 0.01, 2)
        require_number("frequency_penalty", self.frequency_penalty, -2, 2)
        require_number("presence_penalty", self.presence_penalty, -2, 2)
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.grammar is not None and not callable(getattr(self.grammar, "matcher", None)):
            raise ValueError(f"grammar is {self.grammar!r}, it must have a method matcher(), or be None")
        if self.logprobs is not None:
            require_int("logprobs", self.logprobs, at_least=0)
        if self.seed is not None:
            require_int("seed", self.seed, at_least=0)
            if self.seed >= 2**63:
                raise ValueError(f"seed is {self.seed}, it must be below 9223372036854775808")


def algorithm_entry_points() -> dict[str, EntryPoint]:
    """By name, the algorithms that installed packages offer. None of them is imported by this."""
    return {found.name: found for found in algorithm_offers() if found.name not in ALGORITHMS}


def algorithm_offers() -> EntryPoints:
    """What installed packages offer, under whatever names.

    Each engine asks. To look through all packages takes milliseconds, so that is done again only when a folder of
    sys.path has changed, as it does when a package comes or goes.
    """
    return _algorithm_offers(tuple(map(_state_of, sys.path)))


@functools.lru_cache(maxsize=1)
def _algorithm_offers(path: tuple[object, ...]) -> EntryPoints:
    from importlib.metadata import entry_points  # takes longer to load than all else here

    return entry_points(group=ALGORITHM_GROUP)


def _state_of(folder: str) -> tuple[str, int, int, int] | None:
    try:
        state = os.stat(folder or ".")
    except OSError:
        return None
    return folder, state.st_dev, state.st_ino, state.st_mtime_ns


def _logit_bias(given: object) -> dict[int, float]:
    """A copy: who made the params may go on to change the original."""
    if not isinstance(given, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {given!r}")
    for token, bias in given.items():
        require_int("an id of logit_bias", token, at_least=0)
        require_number(f"logit_bias of id {token}", bias, -100, 100)
    return dict(given)


def _stop_strings(given: object) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else None
    if stops is None or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"stop must be a text, or a list of texts, got {given!r}")
    for stop in stops:
        if not stop:
            raise ValueError("a stop string is empty, and would end every output before its first character")
        # Surrogates and the replacement character stand for bytes that are no text.
        if "\ufffd" in stop or stop.encode(errors="replace").decode() != stop:
            raise ValueError(f"the stop string {stop!a} holds characters that are no text: nothing would stop at them")
    return stops


def require_int(name: str, value: object, at_least: int) -> None:
    """Raises ValueError, naming the field, unless value is a whole number of at least `at_least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")


def require_flag(name: str, value: object) -> None:
    """Raises ValueError, naming the field, unless value is a bool: any other text than "" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def require_number(name: str, value: object, at_least: float, at_most: float) -> None:
    """Raises ValueError, naming the field, unless value is a number within these bounds (NaN is none)."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not at_least <= value <= at_most:
        bounds = f"at least {at_least}" if at_most == math.inf else f"from {at_least} to {at_most}"
        raise ValueError(f"{name} must be {bounds}, got {value}")
