"""Every knob of the engine, checked when it is made: a bad value never reaches a kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ALGORITHMS = ("eagle",)


@dataclass(frozen=True)
class SpecConfig:
    """How to speculate. Engine(spec=None) decodes plainly.

    topk (k): branches that the draft follows at each level.
    num_steps (S): levels of the draft tree, so at most S drafts are accepted in a round.
    num_draft_tokens (N): nodes that the target verifies for each request, the root included.
    exact_branch_kv: in the draft loop, let a branch attend its true ancestors' keys and values. False is
        SGLang's layout, where branch j attends what column j held at earlier steps, its ancestor or not.
        The output is the same either way; with k > 1 the guesses differ.

    Raises ValueError, naming the field and the numbers, for a combination that cannot work.
    """

    algorithm: str = "eagle"
    topk: int = 4
    num_steps: int = 3
    num_draft_tokens: int = 16
    page_size: int = 1
    exact_branch_kv: bool = False

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm is {self.algorithm!r}, it must be one of: {', '.join(ALGORITHMS)}")
        for name in ("topk", "num_steps"):
            require_int(name, getattr(self, name), at_least=1)
        require_int("num_draft_tokens", self.num_draft_tokens, at_least=2)
        if self.num_draft_tokens > self.num_candidates + 1:
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}, but topk={self.topk} and num_steps={self.num_steps} "
                f"give {self.num_candidates} candidates, so at most {self.num_candidates + 1} with the root"
            )
        if self.page_size != 1:
            raise ValueError(f"page_size is {self.page_size}, this version keeps tokens in pages of 1")

    @property
    def num_candidates(self) -> int:
        """The draft's pool: k from the first level, k² from each of the others."""
        return self.topk + (self.num_steps - 1) * self.topk**2

    @property
    def slots_per_round(self) -> int:
        """KV slots that one request needs in a round beside its committed ones.

        The draft's k·S are back before the verify's N are taken, so it is the larger of the two.
        """
        return max(self.topk * self.num_steps, self.num_draft_tokens)


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for. Decoding is greedy.

    max_new_tokens: budget of output tokens; a stop inside the budget wins over it.
    stop_token_ids: ids that end the output, beside the model's own end-of-text ids. The id itself is kept.
    ignore_eos: generate through the model's end-of-text ids (stop_token_ids and stop still hold).
    stop: texts that end the output; a single text may be given as it is. The token that completes one is kept in
        token_ids, the text is cut before the stop string. The rules are those of refspec.requests.finish.
    include_stop_str_in_output: cut the text behind the stop string instead. Named as in vLLM; SGLang's no_stop_trim
        would promise too much, since there it decides about stop tokens as well, and here ids are never trimmed.
    """

    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        require_int("max_new_tokens", self.max_new_tokens, at_least=1)
        if not isinstance(self.stop_token_ids, Iterable):
            raise ValueError(f"stop_token_ids must be a list of ids, got {self.stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            require_int("stop_token_ids", token, at_least=0)
        object.__setattr__(self, "stop", _stop_strings(self.stop))


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
