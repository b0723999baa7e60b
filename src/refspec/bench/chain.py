"""`refspec bench chain`: what the short cut for k = 1 saves of a round, beside the general path.

Two engines for each number of steps and each batch: one takes the short cut (spec/chain.py), the other has constants
for no batch, and so takes the general path. They draft, accept and commit the same. As in bench/host_overhead.py the
models are stand-ins, whose time is taken off, since forwards are the same on both paths.

A machine's speed drifts, so nothing is compared across time: in each turn all engines take one round, in an order that
is drawn anew. Each part of a round is given by its median over the turns, as there. Operations are counted in one round
more: those of refspec.kernels, each of which is a launch or two on a GPU, and those of torch, the stand-ins' few among
them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refspec.bench.host_overhead import WARM_UP, Cell, EngineOfStandIns, TimedRound, no_garbage_collection
from refspec.config import SpecConfig
from refspec.engine.engine import resolve_device
from refspec.kernels.backend import resolve_backend
from refspec.kernels.launches import launches
from refspec.spec.chain import ChainBuffers

STEPS = (1, 3, 5, 8)
BATCHES = (1, 8)
CONTEXT = 128
TURNS = 40
PATHS = ("general", "fast")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Saving:
    """One number of steps and one batch. By path: "general", "fast"."""

    steps: int
    batch: int
    kernel_calls: dict[str, int]  # of a round
    torch_operations: dict[str, int]  # of a round, in the backend that was measured
    milliseconds: dict[str, float]  # of drafting and making the tree, outside the forwards
    ratio: float  # of these, fast / general
    round_milliseconds: dict[str, float]  # of the whole round, outside the forwards
    round_ratio: float


class OperationCounter(TorchDispatchMode):
    """Inside, counts what torch is asked to do: each call that reaches a device's implementation, views among them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def bench_chain(
    steps: Sequence[int] = STEPS,
    batches: Sequence[int] = BATCHES,
    turns: int = TURNS,
    device: str | None = None,
    backend: str = "auto",
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Measure all numbers of steps and all batches, side by side. Returns the report as plain data.

    Raises ValueError for a device or backend that cannot be used.
    """
    place = resolve_device(device)
    engines = {
        (s, batch, path): engine_of(s, batch, path, turns, place, backend)
        for s, batch, path in product(steps, batches, PATHS)
    }
    timed: dict[tuple[int, int, str], list[TimedRound]] = {key: [] for key in engines}
    order, shuffle = list(engines), random.Random(0).shuffle
    with no_garbage_collection():
        for turn in range(-WARM_UP, turns):
            shuffle(order)
            for key in order:
                round_ = engines[key].timed_round()
                if turn >= 0:
                    timed[key].append(round_)
            progress(turn + WARM_UP + 1, WARM_UP + turns)

    savings = []
    for s, batch in product(steps, batches):
        counts = {path: count_operations(engines[s, batch, path]) for path in PATHS}
        cells = {path: Cell.of(CONTEXT, batch, timed[s, batch, path]) for path in PATHS}
        parts = {path: cell.by_phase["draft"] + cell.by_phase["tree"] for path, cell in cells.items()}
        rounds = {path: cell.milliseconds for path, cell in cells.items()}
        savings.append(
            Saving(
                steps=s,
                batch=batch,
                kernel_calls={path: kernel_calls for path, (kernel_calls, _) in counts.items()},
                torch_operations={path: operations for path, (_, operations) in counts.items()},
                milliseconds=parts,
                ratio=parts["fast"] / parts["general"],
                round_milliseconds=rounds,
                round_ratio=rounds["fast"] / rounds["general"],
            )
        )
    return {
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "backend": resolve_backend(backend, place),
        "torch": torch.__version__,
        "context": CONTEXT,
        "turns": turns,
        "savings": [asdict(saving) for saving in savings],
    }


def engine_of(steps: int, batch: int, path: str, turns: int, device: torch.device, backend: str) -> EngineOfStandIns:
    """An engine whose requests have read their prompts, with room for all turns and the round that is counted."""
    spec = SpecConfig("eagle", topk=1, num_steps=steps, num_draft_tokens=steps + 1)
    engine = EngineOfStandIns(CONTEXT, batch, WARM_UP + turns + 1, spec, 1, device, backend)
    if path == "general":
        engine.scheduler.worker.chain = ChainBuffers(max_batch=0)  # type: ignore[attr-defined]
    engine.begin(CONTEXT, batch)
    return engine


def count_operations(engine: EngineOfStandIns) -> tuple[int, int]:
    """Calls of refspec.kernels and operations of torch in the engine's next round."""
    before = launches.total()
    with OperationCounter() as counter:  # type: ignore[no-untyped-call] # torch's modes are not typed
        engine.step()
    return launches.total() - before, counter.count
