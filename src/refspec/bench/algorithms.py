"""`refspec bench algorithms`: all algorithms that are registered, side by side, on the shipped weights.

The contest is that of `bench/engine.py`: the same prompts, all contestants in turning order on each of them, medians of
the ratios to plain decoding, and prompts left out whose output loops. Each algorithm runs with the config that it has
when nobody asks for another. A token's forwards are counted over the rounds, without the reading of prompts: those of
the target are 1 in plain decoding, and less where rounds bring more; those of a draft are its loop's and its extends'.

An algorithm whose weights are not there, or whose package is broken, is reported as not run, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refspec.bench.engine import Contestant, Progress, circumstances, compete, outcome, shape_of
from refspec.bench.prompts import load_prompts
from refspec.config import ALGORITHMS, algorithm_entry_points
from refspec.engine.engine import Engine
from refspec.workers.registry import find_algorithm


def bench_algorithms(
    names: Sequence[str] | None = None,
    prompts: Sequence[str] | None = None,
    max_new_tokens: int = 128,
    dtype: str | None = None,
    device: str | None = None,
    backend: str = "auto",
    graphs: bool | None = None,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Run the contest of these algorithms; None: of all. Returns its report as plain data.

    Raises ValueError for what the engine refuses of plain decoding.
    """
    settings: dict[str, Any] = {"dtype": dtype, "device": device, "backend": backend, "graphs": graphs}
    plain_engine = Engine(**settings)
    contestants, not_run = [Contestant.of("plain", plain_engine)], []
    for name in names or (*ALGORITHMS, *algorithm_entry_points()):
        try:
            spec = find_algorithm(name).spec()
            engine = Engine(spec=spec, **settings)
        except (ValueError, OSError) as error:
            not_run.append({"name": name, "reason": str(error)})
        else:
            contestants.append(Contestant.of(name, engine, shape_of(spec)))
    distinct = compete(contestants, plain_engine, prompts or load_prompts(), max_new_tokens, progress)
    return {**circumstances(plain_engine), **outcome(contestants, distinct, max_new_tokens), "not_run": not_run}
