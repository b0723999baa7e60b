"""`refspec bench engine`: plain decoding against EAGLE, and against transformers, on the same weights and prompts.

A machine's speed drifts, so nothing is compared across time: for each prompt all contestants run one after the
other, in an order that turns from prompt to prompt, and what is reported is the median of the prompts' ratios.
Prompts whose output loops flatter speculation (a loop is easy to guess), so they are counted and left out.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from refspec.bench.prompts import load_prompts
from refspec.config import SamplingParams, SpecConfig
from refspec.engine.compare import first_difference
from refspec.engine.engine import Engine
from refspec.models.checkpoint import find_checkpoint

# (k, S, N): a chain, a small tree, a large one
SHAPES = ((1, 5, 6), (4, 3, 16), (8, 5, 32))
LOOP_THRESHOLD = 0.6

Progress = Callable[[int, int], None]


class Runner(Protocol):
    """One way to decode one prompt."""

    def __call__(self, prompt_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[int]]:
        """(token ids, tokens of each round) of a greedy output that runs through the end of text."""


@dataclass
class Contestant:
    """One way to decode, and what it did. Lists have an entry for each prompt that did not loop.

    engine: whose counters say what a run cost; None: there are none. config: how it speculates; None: not at all.
    """

    name: str
    run: Runner
    engine: Engine | None = None
    config: dict[str, int] | None = None
    tokens_per_second: list[float] = field(default_factory=list)
    ratio_to_plain: list[float] = field(default_factory=list)
    accept_lengths: list[float] = field(default_factory=list)  # of each prompt: tokens per round, bonus included
    rounds: int = 0
    round_tokens: int = 0  # that rounds brought: all but each prompt's first
    forwards: Counter[str] = field(default_factory=Counter)  # as in Stats
    seconds: Counter[str] = field(default_factory=Counter)  # by phase
    rounding_differences: int = 0  # outputs that leave the plain one at a near tie
    faults: int = 0  # outputs that leave it elsewhere

    @classmethod
    def of(cls, name: str, engine: Engine, config: dict[str, int] | None = None) -> Contestant:
        return cls(name, _engine_runner(engine), engine, config)

    def count(self, before: Costs, after: Costs) -> None:
        """Add what one prompt has cost."""
        self.rounds += after.rounds - before.rounds
        self.round_tokens += after.tokens - before.tokens
        self.forwards.update(after.forwards - before.forwards)
        self.seconds.update(after.seconds - before.seconds)

    def report(self) -> dict[str, Any]:
        draft_forwards = self.forwards["draft"] + self.forwards["extend"]
        return {
            "name": self.name,
            **(self.config or {}),
            "prompts": len(self.ratio_to_plain),
            "accept_length": statistics.fmean(self.accept_lengths) if self.accept_lengths else None,
            "target_forwards_per_token": self.forwards["target"] / self.round_tokens if self.round_tokens else None,
            "draft_forwards_per_token": draft_forwards / self.round_tokens if self.round_tokens else None,
            "tokens_per_second": statistics.median(self.tokens_per_second),
            "ratio_to_plain": statistics.median(self.ratio_to_plain),
            "ratio_quartiles": statistics.quantiles(self.ratio_to_plain, n=4) if len(self.ratio_to_plain) > 3 else None,
            "milliseconds_per_round": {
                phase: 1e3 * seconds / self.rounds for phase, seconds in self.seconds.items() if self.rounds
            },
            "rounding_differences": self.rounding_differences,
            "faults": self.faults,
        }


@dataclass(frozen=True)
class Costs:
    """An engine's counters at one time."""

    rounds: int = 0
    tokens: int = 0
    forwards: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(engine: Engine | None) -> Costs:
        if engine is None:
            return Costs()
        stats = engine.stats
        return Costs(stats.rounds, stats.committed_tokens, stats.forwards.copy(), Counter(stats.seconds))


def distinct_4gram_ratio(token_ids: Sequence[int]) -> float:
    """Distinct runs of four tokens, as a share of all; near 0 for text that repeats itself."""
    grams = [tuple(token_ids[i : i + 4]) for i in range(len(token_ids) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def bench_engine(
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    prompts: Sequence[str] | None = None,
    max_new_tokens: int = 128,
    target: str = "tiny",
    draft: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    backend: str = "auto",
    graphs: bool | None = None,
    exact_branch_kv: bool = False,
    vs_hf: bool = False,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Run the contest. Returns its report as plain data.

    Raises ValueError for what the engine refuses, and if vs_hf is asked for where transformers is not installed.
    """
    plain_engine = Engine(target, dtype=dtype, device=device, backend=backend, graphs=graphs)
    contestants = [Contestant.of("plain", plain_engine)]
    for k, steps, n in shapes:
        spec = SpecConfig(topk=k, num_steps=steps, num_draft_tokens=n, exact_branch_kv=exact_branch_kv)
        engine = Engine(target, draft, spec, dtype=dtype, device=device, backend=backend, graphs=graphs)
        contestants.append(Contestant.of(f"eagle k{k} S{steps} N{n}", engine, shape_of(spec)))
    if vs_hf:
        contestants.append(Contestant("transformers", _transformers_runner(target, plain_engine)))
    distinct = compete(contestants, plain_engine, prompts or load_prompts(), max_new_tokens, progress)
    return {
        "target": target,
        **circumstances(plain_engine),
        "exact_branch_kv": exact_branch_kv,
        **outcome(contestants, distinct, max_new_tokens),
    }


def compete(
    contestants: Sequence[Contestant],
    plain_engine: Engine,
    prompts: Sequence[str],
    max_new_tokens: int,
    progress: Progress,
) -> list[float]:
    """Have all of them run all prompts; the first one decodes plainly, by plain_engine, which the others are held to.

    Returns each prompt's `distinct_4gram_ratio`. Raises ValueError if the output of every prompt loops.
    """
    encoded = [plain_engine.encode(prompt) for prompt in prompts]
    for contestant in contestants:
        contestant.run(encoded[0][:1], 16)  # warm up, on what nobody is asked later: some remember what they have read
    distinct: list[float] = []
    for i, prompt_ids in enumerate(encoded):
        before = [Costs.of(contestant.engine) for contestant in contestants]
        outputs: dict[int, list[int]] = {}
        rounds: dict[int, list[int]] = {}
        speed: dict[int, float] = {}
        for turn in range(len(contestants)):
            c = (i + turn) % len(contestants)
            started = time.perf_counter()
            outputs[c], rounds[c] = contestants[c].run(prompt_ids, max_new_tokens)
            _wait_for(plain_engine.device)
            speed[c] = len(outputs[c]) / (time.perf_counter() - started)
        progress(i + 1, len(encoded))
        distinct.append(distinct_4gram_ratio(outputs[0]))
        if distinct[-1] <= LOOP_THRESHOLD:
            continue
        for c, contestant in enumerate(contestants):
            contestant.tokens_per_second.append(speed[c])
            contestant.ratio_to_plain.append(speed[c] / speed[0])
            contestant.count(before[c], Costs.of(contestant.engine))
            if contestant.config:
                contestant.accept_lengths.append(statistics.fmean(rounds[c]))
            difference = first_difference(plain_engine, prompt_ids, outputs[0], outputs[c])
            if difference:
                contestant.rounding_differences += difference.is_rounding
                contestant.faults += not difference.is_rounding
    if _looping(distinct) == len(encoded):
        raise ValueError("the output of every prompt loops: these weights cannot be measured")
    return distinct


def circumstances(engine: Engine) -> dict[str, Any]:
    """Where a measurement is taken."""
    return {
        "device": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "backend": engine.backend,
        "graphs": list(engine.graphs),
        "torch": torch.__version__,
    }


def outcome(contestants: Sequence[Contestant], distinct: Sequence[float], max_new_tokens: int) -> dict[str, Any]:
    """What a contest came to. distinct: what `compete` returned."""
    return {
        "max_new_tokens": max_new_tokens,
        "prompts": len(distinct),
        "looping_prompts": _looping(distinct),
        "distinct_4gram_ratios": list(distinct),
        "contestants": [contestant.report() for contestant in contestants],
    }


def shape_of(spec: SpecConfig) -> dict[str, int]:
    """k, S and N; where guesses are not chosen from a pool, N alone."""
    shape = {"topk": spec.topk, "num_steps": spec.num_steps} if spec.num_candidates else {}
    return {**shape, "num_draft_tokens": spec.num_draft_tokens}


def _looping(distinct: Sequence[float]) -> int:
    return sum(ratio <= LOOP_THRESHOLD for ratio in distinct)


def _engine_runner(engine: Engine) -> Runner:
    def run(prompt_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[int]]:
        (out,) = engine.generate([prompt_ids], SamplingParams(max_new_tokens, ignore_eos=True))
        return out.token_ids, out.accept_lens

    return run


def _transformers_runner(target: str, engine: Engine) -> Runner:
    """transformers' own greedy `generate`, in the engine's dtype and on its device."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ValueError("transformers is not installed: pip install -r requirements-extras.lock") from None
    model: Any = AutoModelForCausalLM.from_pretrained(find_checkpoint(target), dtype=engine.dtype)
    model.to(engine.device).eval()

    def run(prompt_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[int]]:
        ids = torch.tensor([prompt_ids], device=engine.device)
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, len(prompt_ids) :].tolist(), []

    return run


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
