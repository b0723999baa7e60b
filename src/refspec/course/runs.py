"""Runs that the course shows and asks about: made when somebody wants to see them, and written down nowhere."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from refspec.config import SamplingParams, SpecConfig
from refspec.trace import Round, Trace

if TYPE_CHECKING:
    from refspec.engine.engine import Engine, Generation
    from refspec.workers.base import Stats


@dataclass(frozen=True)
class Observed:
    """A run, and what it left behind."""

    engine: Engine
    rounds: list[Round]  # none when decoding plainly
    generations: list[Generation]

    @property
    def stats(self) -> Stats:
        return self.engine.stats


@functools.cache
def run_shipped(prompts: tuple[str, ...], spec: SpecConfig | None, params: SamplingParams) -> Observed:
    """All prompts in one batch, on the shipped target with its EAGLE head; spec None decodes plainly.

    On the CPU, so that it is the same run wherever it is made.
    """
    from refspec.engine.engine import Engine  # torch takes seconds to load, and much of the course needs no run

    engine = Engine("tiny", spec=spec, device="cpu")
    rounds: list[Round] = []
    generations = engine.generate(prompts, params, rounds.append if spec else None)
    return Observed(engine, rounds, generations)


def record_run(prompt: str, spec: SpecConfig, params: SamplingParams) -> Trace:
    """Such a run of a single prompt, as a trace."""
    from refspec.engine.record import make_trace

    seen = run_shipped((prompt,), spec, params)
    return make_trace(seen.engine, {**asdict(spec), **asdict(params)}, [prompt], seen.generations, seen.rounds)
