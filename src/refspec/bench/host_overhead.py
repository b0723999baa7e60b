"""`refspec bench engine --host-overhead`: what a round costs outside the forwards, as contexts and batches grow.

A server's work on the host must not grow with the texts that its requests have, and with the batch no faster than the
batch does. What is timed here is all that a step of the engine does, but for the forwards. The models are stand-ins,
which look their answers up in a table and attend to nothing, and the little time that they take is taken off. What is
left is the engine's own: its Python, and the operations on tensors that it calls outside a forward. On a GPU these are
only queued, so it is the host's time that counts. A round waits for the device a few times, and the stand-ins see to it
that there is little to wait for.

Each combination of a context and a batch has an engine of its own, with a KV pool twice as large as its requests need:
what grows with the slots that are taken or free grows with the context here. The prompts are read in one step; at all
contexts they end alike, so that the same rounds follow. Then, again and again, each engine takes one round, in an order
that is drawn anew every time: a machine whose speed drifts does so for all of them. Each part of a round is given by
its median over these turns, and the round by the sum of its parts: on a busy machine most rounds are interrupted
somewhere, but few of them in the same part.
"""

from __future__ import annotations

import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from refspec.config import SamplingParams, SpecConfig
from refspec.contracts import ForwardBatch, ForwardOutput
from refspec.engine.engine import Engine, resolve_device
from refspec.kernels.backend import resolve_backend
from refspec.memory.kv_pool import KVLayout, TokenToKVPool
from refspec.models.scripted import ScriptedConfig
from refspec.runtime.runner import ModelRunner, ServedModel
from refspec.workers.base import Stats

CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
PAGE_SIZES = (1, 16)
SHAPES = (None, (1, 5, 6), (4, 3, 16))  # plain decoding, and (k, S, N): a chain, a tree
TURNS = 25
WARM_UP = 3  # turns that do not count
MAX_RUNNING = 64
VOCAB_SIZE = 64

# The phase of a round that a forward belongs to, by what the forward is counted as.
PHASES = {"draft": "draft", "target": "verify", "extend": "extend"}
PLAIN_PHASES = {"target": "decode"}
SCHEDULER = "scheduler"  # what a step does outside its phases

Progress = Callable[[int, int], None]
TimedRound = tuple[dict[str, float], float]  # milliseconds of each part outside the forwards, and of the forwards


@dataclass(frozen=True)
class Cell:
    """One context and one batch."""

    context: int  # committed tokens of each request in the first turn
    batch: int
    milliseconds: float  # of a round, outside the forwards: the sum of its parts
    by_phase: dict[str, float]
    forwards: float  # milliseconds of a round inside them, which are taken off

    @staticmethod
    def of(context: int, batch: int, timed: Sequence[TimedRound]) -> Cell:
        by_phase = {phase: median(parts[phase] for parts, _ in timed) for phase in timed[0][0]}
        return Cell(context, batch, sum(by_phase.values()), by_phase, median(inside for _, inside in timed))


@dataclass(frozen=True)
class Series:
    """One way to decode, at all contexts and batches."""

    name: str
    config: dict[str, int] | None  # topk, num_steps, num_draft_tokens; None: plain decoding
    page_size: int
    cells: list[Cell]
    context_ratios: dict[int, float]  # by batch: a round at the longest context / at the shortest
    batch_ratios: dict[int, float]  # by context: a round of the largest batch / of the smallest
    steepest: dict[int, float]  # by context: of any two batches that follow, the most that cost grew / that batch grew


class StandIn:
    """A model that knows two continuations of every id, and holds one to be likelier. It reads no cache.

    The draft takes t to be followed by t + 1, or else by t + 2. For three ids of eight the target does not agree: twice
    it takes the second of these, once neither. So chains and trees are accepted in part, and not alike for all requests
    of a batch.
    """

    def __init__(self, is_draft: bool, max_context: int, device: torch.device) -> None:
        self.config = ScriptedConfig(VOCAB_SIZE, max_context, eos_token_ids=())
        self.kv_layout = KVLayout(num_layers=1, kv_heads=1, head_dim=1, dtype=torch.float32)
        ids = torch.arange(VOCAB_SIZE, device=device)
        steps = torch.ones_like(ids)
        if not is_draft:
            steps[ids % 4 == 3] = 2
            steps[ids % 8 == 5] = 9
        answers = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, device=device)
        answers[ids, (ids + 2) % VOCAB_SIZE] = 3.0
        answers[ids, (ids + steps) % VOCAB_SIZE] = 4.0
        self.states = torch.cat([ids[:, None], answers], dim=1)

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: object, hidden_states: Tensor | None) -> Tensor:
        return self.states[input_ids]

    def logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, 1:]


class TimedRunner(ModelRunner):
    """Runs a StandIn, and counts the seconds by what each forward is counted as."""

    def __init__(self, model: StandIn, slots: int, device: torch.device, stats: Stats, page_size: int) -> None:
        super().__init__(model, slots, device, stats.forwards, page_size=page_size)
        self.stand_in = model
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def forward(self, batch: ForwardBatch, phase: str, logits_rows: Tensor | None = None) -> ForwardOutput:
        """As ModelRunner's, but for the attention: not even its columns are looked up."""
        started = time.perf_counter()
        self.forwards[phase] += 1
        hidden = self.stand_in(batch.input_ids, batch.positions, None, batch.hidden_states)
        out = ForwardOutput(self.stand_in.logits(hidden if logits_rows is None else hidden[logits_rows]), hidden)
        self.seconds[phase] += time.perf_counter() - started
        return out


class EngineOfStandIns(Engine):
    """`batch` requests of `context` tokens, with room for so many rounds, and as much again."""

    def __init__(
        self,
        context: int,
        batch: int,
        rounds: int,
        spec: SpecConfig | None,
        page_size: int,
        device: torch.device,
        backend: str,
    ) -> None:
        self.runners: list[TimedRunner] = []
        self.max_new_tokens = 1 + (rounds + 1) * (spec.num_steps + 1 if spec else 1)
        end = context + self.max_new_tokens
        slots = max(spec.draft_end(end), spec.tree_end(end)) if spec else end
        super().__init__(
            StandIn(is_draft=False, max_context=end + 1, device=device),
            StandIn(is_draft=True, max_context=end + 1, device=device) if spec else None,
            spec,
            device,
            backend=backend,
            kv_slots=2 * batch * (slots // page_size + 1) * page_size,
            max_running=max(MAX_RUNNING, batch),
            page_size=page_size,
        )

    def _runner(
        self, model: ServedModel, rows: Mapping[str, int | Sequence[int]], pool: TokenToKVPool | None = None
    ) -> TimedRunner:
        assert isinstance(model, StandIn)
        slots = self.allocator
        self.runners.append(TimedRunner(model, slots.size, self.device, self.stats, slots.page_size))
        return self.runners[-1]

    def begin(self, context: int, batch: int) -> None:
        """Let the requests read their prompts; from now on every step is a round of all of them."""
        for r in range(batch):
            backwards = random.Random(r).choices(range(VOCAB_SIZE), k=context)
            self.add_request(backwards[::-1], SamplingParams(self.max_new_tokens))
        self.step()
        assert len(self.scheduler.running) == batch, "the pool was made too small"

    def timed_round(self) -> TimedRound:
        """Take one round of the requests that have begun."""
        phases = self.stats.seconds.copy()
        forwards = [runner.seconds.copy() for runner in self.runners]
        started = time.perf_counter()
        self.step()
        took = time.perf_counter() - started
        parts = {name: seconds - phases[name] for name, seconds in self.stats.seconds.items() if name != "prefill"}
        parts[SCHEDULER] = took - sum(parts.values())
        inside = 0.0
        for name, phase in (PHASES if self.spec else PLAIN_PHASES).items():
            for runner, before in zip(self.runners, forwards, strict=True):
                parts[phase] -= runner.seconds[name] - before[name]
                inside += runner.seconds[name] - before[name]
        return {phase: 1e3 * seconds for phase, seconds in parts.items()}, 1e3 * inside


def bench_host_overhead(
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = BATCHES,
    page_sizes: Sequence[int] = PAGE_SIZES,
    shapes: Sequence[tuple[int, int, int] | None] = SHAPES,
    turns: int = TURNS,
    device: str | None = None,
    backend: str = "auto",
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Measure every series, one after the other. contexts and batches ascend. Returns the report as plain data.

    Raises ValueError for a device or backend that cannot be used.
    """
    place = resolve_device(device)
    ways = list(product(shapes, page_sizes))
    series: list[Series] = []

    def tell(turn: int) -> None:
        progress(len(series) * (WARM_UP + turns) + turn, len(ways) * (WARM_UP + turns))

    for shape, page_size in ways:
        spec = SpecConfig("eagle", *shape, page_size=page_size) if shape else None
        series.append(measure_series(contexts, batches, spec, page_size, turns, place, backend, tell))
    return {
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "backend": resolve_backend(backend, place),
        "torch": torch.__version__,
        "turns": turns,
        "series": [asdict(one) for one in series],
    }


def measure_series(
    contexts: Sequence[int],
    batches: Sequence[int],
    spec: SpecConfig | None,
    page_size: int,
    turns: int,
    device: torch.device,
    backend: str,
    progress: Callable[[int], None] = lambda turn: None,
) -> Series:
    """All contexts and batches of one way to decode, side by side."""
    engines: dict[tuple[int, int], EngineOfStandIns] = {}
    for context, batch in product(contexts, batches):
        engines[context, batch] = EngineOfStandIns(context, batch, WARM_UP + turns, spec, page_size, device, backend)
        engines[context, batch].begin(context, batch)
    rounds: dict[tuple[int, int], list[TimedRound]] = {place: [] for place in engines}
    order, shuffle = list(engines), random.Random(0).shuffle
    with no_garbage_collection():
        for turn in range(-WARM_UP, turns):
            shuffle(order)
            for place in order:
                timed = engines[place].timed_round()
                if turn >= 0:
                    rounds[place].append(timed)
            progress(turn + WARM_UP + 1)

    cells = {place: Cell.of(*place, timed) for place, timed in rounds.items()}

    def ratio(place: tuple[int, int], other: tuple[int, int]) -> float:
        return cells[place].milliseconds / cells[other].milliseconds

    return Series(
        name=f"k{spec.topk} S{spec.num_steps} N{spec.num_draft_tokens}" if spec else "plain",
        config={name: getattr(spec, name) for name in ("topk", "num_steps", "num_draft_tokens")} if spec else None,
        page_size=page_size,
        cells=list(cells.values()),
        context_ratios={b: ratio((contexts[-1], b), (contexts[0], b)) for b in batches},
        batch_ratios={c: ratio((c, batches[-1]), (c, batches[0])) for c in contexts},
        steepest={c: max(ratio((c, more), (c, b)) * b / more for b, more in pairwise(batches)) for c in contexts},
    )


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Inside, Python does not look for garbage: what that costs depends on all engines that there are, not on one."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
