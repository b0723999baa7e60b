"""Runs that the course shows, recorded when a page is made."""

from __future__ import annotations

import functools
from dataclasses import asdict

from refspec.config import SamplingParams, SpecConfig
from refspec.trace import Round, Trace


@functools.cache
def record_run(prompt: str, spec: SpecConfig, params: SamplingParams) -> Trace:
    """A trace of the shipped target with its EAGLE head, on the CPU: the same wherever the page is made."""
    from refspec.engine.engine import Engine  # torch takes seconds to load, and not every lesson shows a run
    from refspec.engine.record import make_trace

    engine = Engine("tiny", spec=spec, device="cpu")
    rounds: list[Round] = []
    generations = engine.generate([prompt], params, rounds.append)
    return make_trace(engine, {**asdict(spec), **asdict(params)}, [prompt], generations, rounds)
