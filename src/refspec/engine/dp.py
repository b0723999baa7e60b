"""Data-parallel ranks that stay in step, those without requests among them.

Each rank serves requests of its own, with an engine and a KV pool of its own. What binds them together is a layer that
none of them can compute alone. In SGLang's DP attention that is the experts and the output head; here it is the output
head: each rank answers for its share of the vocabulary, for the rows of all ranks. So the ranks meet in every forward,
and where one does not come, the others wait. Two rules bring all of them to every meeting:

1. Before a step they agree on its mode: EXTEND where any rank has prompts to read, else DECODE where any has requests
   that run; else there is no step to take. All go through that mode's phases, and who has nothing for it has zero
   rows. A rank with running requests pauses while another one prefills: the modes differ in their number of forwards.
2. Within a step, whether to join may depend on nothing but what all ranks know. "I have no rows" is not such a thing:
   the requests of one rank may all finish in a round from which another's go on, and then only one has an extend.

| step   | forwards with EAGLE                         | plainly           |
|--------|---------------------------------------------|-------------------|
| EXTEND | 2: prefill_target, prefill_draft            | 1: prefill_target |
| DECODE | S + 1: the draft's S - 1, target, extend    | 1: target         |

A forward costs three collectives: the counts of rows, the rows, the logits. It is the first alone where the counts say
that no rank has rows. The agreement is one more for each step.

Source: SGLang: python/sglang/srt/managers/scheduler_components/dp_attn.py:prepare_mlp_sync_batch_raw (the agreement),
managers/scheduler.py:get_next_batch_to_run (speculation never mixes prefill and decode) and
layers/logits_processor.py:_gather_dp_attn_hidden_states, _scatter_dp_attn_logits (the head) @0.5.23
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from refspec.config import SamplingParams
from refspec.contracts import ForwardMode
from refspec.engine.engine import Engine, Generation, Prompt
from refspec.kernels.backend import use_backend
from refspec.memory.req_table import ReqTable
from refspec.requests.request import Request, RunningBatch
from refspec.runtime.runner import ModelRunner, ServedModel
from refspec.workers.base import Observer, RoundInFlight, Worker

# What one rank wants decides for all if it stands further right.
PRIORITY = (ForwardMode.IDLE, ForwardMode.DECODE, ForwardMode.EXTEND)
ALL_RANKS_START_SECONDS = 120.0

# A collective: one tensor from every rank, all of one shape and dtype, by rank. Returns when all have given theirs.
Gather = Callable[[Tensor], list[Tensor]]


class LostPeers(ValueError):
    """A collective ended without all ranks having come to it."""


@dataclass(frozen=True)
class Step:
    """What the ranks have agreed on. batch_sizes[r]: requests of rank r that take part; 0: it goes through idle."""

    mode: ForwardMode
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """A collective as one rank counts them. Ranks meet where step, forward and what are the same."""

    collective: int  # of this rank, from 1
    step: int  # from 1
    forward: int  # of the step, from 1; 0: the agreement
    phase: str  # what the forward is made for, or "agreement"
    what: str  # what is gathered: "modes", "counts", "rows", "logits"

    def meets(self, other: Place) -> bool:
        """Is it one collective that two ranks are at?"""
        return (self.step, self.forward, self.what) == (other.step, other.forward, other.what)


# What happens at a place: "waits" before the collective, "goes on" after it, "skips" instead of it.
Report = Callable[[str, Place], None]


class Peers:
    """The line from one rank to all.

    agreement, layers: the collectives for what schedulers and what layers tell each other. Two lines, so that a
        message of one kind is never taken for one of the other.
    report: told before and after every collective.
    skip_idle: the fault that this module is about: stay away from a forward's collectives when there are no own rows.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        agreement: Gather,
        layers: Gather,
        report: Report = lambda event, place: None,
        skip_idle: bool = False,
    ) -> None:
        self.rank, self.size, self.agreement, self.layers = rank, size, agreement, layers
        self.report, self.skip_idle = report, skip_idle
        self.collectives = self.step = self.forward = 0

    def agree(self, mode: ForwardMode, batch_size: int) -> Step:
        """The mode of the next step, if this rank would like `mode` for `batch_size` requests of its own."""
        self.step, self.forward = self.step + 1, 0
        wish = torch.tensor([PRIORITY.index(mode), batch_size])
        wishes = [theirs.tolist() for theirs in self.gather(self.agreement, wish, "agreement", "modes")]
        highest = max(priority for priority, _ in wishes)
        return Step(PRIORITY[highest], tuple(size if priority == highest else 0 for priority, size in wishes))

    def gather(self, line: Gather, mine: Tensor, phase: str, what: str) -> list[Tensor]:
        """Every rank's tensor, by rank."""
        self.collectives += 1
        place = self.place(phase, what)
        self.report("waits", place)
        theirs = line(mine)
        self.report("goes on", place)
        return theirs

    def place(self, phase: str, what: str) -> Place:
        """Where this rank is now, if that is what it gathers there."""
        return Place(self.collectives, self.step, self.forward, phase, what)


class SharedHead:
    """The output head of a model, spread over the ranks by vocabulary: it takes the place of `model.logits`.

    A real engine keeps a share of the head's weights on each rank. Here they are all everywhere, and the share is cut
    from the product: what the ranks have to tell each other is the same.
    """

    def __init__(self, model: ServedModel, peers: Peers) -> None:
        self.model, self.peers = model, peers
        self.vocab_size = model.config.vocab_size
        self.width = -(-self.vocab_size // peers.size)  # the last share may be narrower

    def __call__(self, hidden_states: Tensor, phase: str) -> Tensor:
        """Hidden states (n, H) of this rank's rows -> their logits (n, V). n may be 0: the others' may not."""
        peers, own = self.peers, len(hidden_states)
        peers.forward += 1
        if peers.skip_idle and own == 0:
            peers.report("skips", peers.place(phase, "counts"))
            return self.model.logits(hidden_states)
        count = torch.tensor([own], device=hidden_states.device)
        counts = [int(theirs) for theirs in peers.gather(peers.layers, count, phase, "counts")]
        if max(counts) == 0:  # all ranks know it, so all leave here
            return self.model.logits(hidden_states)
        padded = F.pad(hidden_states, (0, 0, 0, max(counts) - own))
        rows_by_rank = peers.gather(peers.layers, padded, phase, "rows")
        rows = torch.cat([theirs[:count] for theirs, count in zip(rows_by_rank, counts, strict=True)])
        first = peers.rank * self.width
        share = self.model.logits(rows)[:, first : first + self.width]
        share = F.pad(share, (0, self.width - share.shape[1]))
        logits = torch.cat(peers.gather(peers.layers, share, phase, "logits"), dim=1)[:, : self.vocab_size]
        before = sum(counts[: peers.rank])
        return logits[before : before + own]


class JointWorker(Worker):
    """A worker that moves only when all ranks do. The scheduler above it need not know."""

    def __init__(self, worker: Worker, table: ReqTable, peers: Peers, on_step: Callable[[Step], None]) -> None:
        super().__init__(worker.target, worker.allocator, worker.stats)
        self.worker, self.table, self.peers, self.on_step = worker, table, peers, on_step
        self.reads_ahead = worker.reads_ahead

    @property
    def runners(self) -> list[ModelRunner]:
        return self.worker.runners

    def slots_for_round(self, kv_lens: Sequence[int], held_lens: Sequence[int] | None = None) -> int:
        return self.worker.slots_for_round(kv_lens, held_lens)

    def written_len(self, request: Request) -> int:
        return self.worker.written_len(request)

    def collect(self, in_flight: RoundInFlight) -> None:
        """Of a round that was launched before the ranks went in step. In step, none is launched ahead."""
        self.worker.collect(in_flight)

    def forward(self, batch: RunningBatch, mode: ForwardMode, observer: Observer | None = None) -> RunningBatch:
        """As the worker's own, after any steps of another mode that the other ranks have to take first."""
        while (step := self._agree(mode, len(batch))).mode is not mode:
            self._pass_through(step.mode)
        return self.worker.forward(batch, mode, observer)

    def join_others(self) -> bool:
        """One step of a rank that has no requests. False if none has any: then there was none to take."""
        step = self._agree(ForwardMode.IDLE, 0)
        if step.mode is ForwardMode.IDLE:
            return False
        self._pass_through(step.mode)
        return True

    def _pass_through(self, mode: ForwardMode) -> None:
        """The phases of that mode, with zero rows."""
        empty = RunningBatch.of([], self.table.req_to_token)
        self.worker.forward(empty, ForwardMode.IDLE if mode is ForwardMode.DECODE else mode)

    def _agree(self, mode: ForwardMode, batch_size: int) -> Step:
        step = self.peers.agree(mode, batch_size)
        if step.mode is not ForwardMode.IDLE:
            self.on_step(step)
        return step


@contextmanager
def in_step(engine: Engine, peers: Peers, on_step: Callable[[Step], None] = lambda step: None) -> Iterator[JointWorker]:
    """Inside, the engine takes no step without its peers, and they none without it. on_step: told of each.

    So whoever holds an engine has to keep stepping, with `join_others` when there is nothing of its own to do. Raises
    ValueError for adaptive_steps.
    """
    if engine.spec and engine.spec.adaptive_steps:
        raise ValueError(
            "adaptive_steps go by what one rank's requests accept, and ranks in step must all take as many steps: "
            "leave them out"
        )
    worker = engine.scheduler.worker
    engine.scheduler.worker = joint = JointWorker(worker, engine.table, peers, on_step)
    for runner in worker.runners:
        runner.shared_head = SharedHead(runner.model, peers)
    try:
        with use_backend(engine.backend):  # as in the engine's own steps
            yield joint
    finally:
        engine.scheduler.worker = worker
        for runner in worker.runners:
            runner.shared_head = None


def generate_in_step(
    engine: Engine,
    peers: Peers,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> list[Generation]:
    """As engine.generate, on every rank at the same time, with prompts of its own or with none.

    Returns when no rank has anything left to do. Raises as engine.generate does, and LostPeers if a rank does not come.
    """
    with in_step(engine, peers, on_step) as joint:
        generations = engine.generate(prompts, params)
        while joint.join_others():
            pass
    return generations


# --- torch.distributed ----------------------------------------------------------------------------------------------


def device_of(rank: int, size: int) -> torch.device:
    """A GPU for each rank where there are enough; else all run on the CPU."""
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    return torch.device("cuda", rank) if gpus >= size else torch.device("cpu")


@contextmanager
def connected(
    rank: int,
    size: int,
    folder: Path,
    timeout: float,
    report: Report = lambda event, place: None,
    skip_idle: bool = False,
) -> Iterator[Peers]:
    """Connect this process, as one of `size` ranks, to the others; they find each other through a file in `folder`.

    NCCL for the layers where each rank has a GPU, gloo elsewhere and for the agreement. A collective raises LostPeers
    when a rank is gone, or has not come within `timeout` seconds; with NCCL, torch ends the process instead.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise ValueError("this build of torch has no torch.distributed with gloo: install one that has")
    device = device_of(rank, size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _stay_on_this_machine()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "rendezvous"), size),  # type: ignore[attr-defined] # torch's stubs lack it
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=ALL_RANKS_START_SECONDS),
        )
    except RuntimeError as error:
        message = f"not all ranks were there within {ALL_RANKS_START_SECONDS:g} s"
        raise LostPeers(f"{message} ({str(error).splitlines()[0]})") from error
    try:
        patience = timedelta(seconds=timeout)
        agreement = dist.new_group(backend="gloo", timeout=patience)
        layers = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=patience)
        peers = Peers(rank, size, _gather_over(agreement), _gather_over(layers), report, skip_idle)
        peers.layers(torch.zeros(1, device=device))  # NCCL connects at its first collective, which takes its time
        yield peers
    finally:
        dist.destroy_process_group()


def _gather_over(group: dist.ProcessGroup) -> Gather:
    size = group.size()

    def gather(mine: Tensor) -> list[Tensor]:
        theirs = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(size)]
        try:
            dist.all_gather(theirs, mine.contiguous(), group=group)
        except RuntimeError as error:
            raise LostPeers(f"a collective has failed, since not all ranks came to it ({error})") from error
        return theirs

    return gather


def _stay_on_this_machine() -> None:
    """All ranks are here: gloo need not ask what this machine's name stands for."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
