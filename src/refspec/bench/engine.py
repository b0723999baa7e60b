"""`refspec bench engine`: plain decoding against EAGLE, and against transformers, on the same weights and prompts.

A machine's speed drifts, so nothing is compared across time: for each prompt all contestants run one after the
other, in an order that turns from prompt to prompt, and what is reported is the median of the prompts' ratios.
Prompts whose output loops flatter speculation (a loop is easy to guess), so they are counted and left out.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
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


@dataclass
class Contestant:
    """One way to decode, and what it did. Lists have an entry for each prompt that did not loop."""

    name: str
    config: dict[str, int] | None
    tokens_per_second: list[float] = field(default_factory=list)
    ratio_to_plain: list[float] = field(default_factory=list)
    accept_lengths: list[float] = field(default_factory=list)  # of each prompt: tokens per round, bonus included
    rounds: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by phase
    rounding_differences: int = 0  # outputs that leave the plain one at a near tie
    faults: int = 0  # outputs that leave it elsewhere

    def report(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **(self.config or {}),
            "prompts": len(self.ratio_to_plain),
            "accept_length": statistics.fmean(self.accept_lengths) if self.accept_lengths else None,
            "tokens_per_second": statistics.median(self.tokens_per_second),
            "ratio_to_plain": statistics.median(self.ratio_to_plain),
            "ratio_quartiles": statistics.quantiles(self.ratio_to_plain, n=4) if len(self.ratio_to_plain) > 1 else None,
            "milliseconds_per_round": {
                phase: 1e3 * seconds / self.rounds for phase, seconds in self.seconds.items() if self.rounds
            },
            "rounding_differences": self.rounding_differences,
            "faults": self.faults,
        }


class Runner(Protocol):
    """One way to decode one prompt."""

    def __call__(self, prompt_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[int]]:
        """(token ids, tokens of each round) of a greedy output that runs through the end of text."""


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
    contestants = [Contestant("plain", None)]
    engines: list[Engine | None] = [plain_engine]
    runners: list[Runner] = [_engine_runner(plain_engine)]
    for k, steps, n in shapes:
        spec = SpecConfig(topk=k, num_steps=steps, num_draft_tokens=n, exact_branch_kv=exact_branch_kv)
        engine = Engine(target, draft, spec, dtype=dtype, device=device, backend=backend, graphs=graphs)
        engines.append(engine)
        runners.append(_engine_runner(engine))
        contestants.append(
            Contestant(f"eagle k{k} S{steps} N{n}", {"topk": k, "num_steps": steps, "num_draft_tokens": n})
        )
    if vs_hf:
        engines.append(None)
        runners.append(_transformers_runner(target, plain_engine))
        contestants.append(Contestant("transformers", None))

    encoded = [plain_engine.encode(prompt) for prompt in prompts or load_prompts()]
    for run in runners:
        run(encoded[0], 16)  # warm up
    looping, distinct = 0, []
    for i, prompt_ids in enumerate(encoded):
        before = [(e.stats.rounds, dict(e.stats.seconds)) if e else None for e in engines]
        outputs: dict[int, list[int]] = {}
        rounds: dict[int, list[int]] = {}
        speed: dict[int, float] = {}
        for turn in range(len(runners)):
            c = (i + turn) % len(runners)
            started = time.perf_counter()
            outputs[c], rounds[c] = runners[c](prompt_ids, max_new_tokens)
            _wait_for(plain_engine.device)
            speed[c] = len(outputs[c]) / (time.perf_counter() - started)
        progress(i + 1, len(encoded))
        distinct.append(distinct_4gram_ratio(outputs[0]))
        if distinct[-1] <= LOOP_THRESHOLD:
            looping += 1
            continue
        for c, contestant in enumerate(contestants):
            contestant.tokens_per_second.append(speed[c])
            contestant.ratio_to_plain.append(speed[c] / speed[0])
            ran, was = engines[c], before[c]
            if ran and was:
                contestant.rounds += ran.stats.rounds - was[0]
                for phase, seconds in ran.stats.seconds.items():
                    contestant.seconds[phase] += seconds - was[1].get(phase, 0.0)
            if contestant.config:
                contestant.accept_lengths.append(statistics.fmean(rounds[c]))
            difference = first_difference(plain_engine, prompt_ids, outputs[0], outputs[c])
            if difference:
                contestant.rounding_differences += difference.is_rounding
                contestant.faults += not difference.is_rounding
    if looping == len(encoded):
        raise ValueError("the output of every prompt loops: these weights cannot be measured")
    return {
        "target": target,
        "device": torch.cuda.get_device_name(plain_engine.device) if plain_engine.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": str(plain_engine.dtype).removeprefix("torch."),
        "backend": plain_engine.backend,
        "graphs": list(plain_engine.graphs),
        "torch": torch.__version__,
        "exact_branch_kv": exact_branch_kv,
        "max_new_tokens": max_new_tokens,
        "prompts": len(encoded),
        "looping_prompts": looping,
        "distinct_4gram_ratios": distinct,
        "contestants": [contestant.report() for contestant in contestants],
    }


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
