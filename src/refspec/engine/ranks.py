"""Data-parallel ranks as processes of this machine: started, watched, and ended, whatever becomes of them.

Every rank tells this process, before and after each collective, where it is. If none has moved for too long, they hang:
all are ended, and what they told last says who waits where, and for whom.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from refspec.config import SamplingParams
from refspec.contracts import ForwardMode
from refspec.engine.compare import Difference, first_difference
from refspec.engine.dp import LostPeers, Place, Step, connected, device_of, generate_in_step
from refspec.engine.engine import Engine, Generation, Prompt

# When a rank fails, others lose it, and may say so first. For so long the one that failed can still come forward.
CULPRIT_SECONDS = 1.0


class RankFailed(ValueError):
    """A rank raised, or its process ended; the others were ended, too. The rank's own traceback is in the notes."""


@dataclass(frozen=True)
class RankReport:
    """What one rank did."""

    generations: list[Generation]
    differences: dict[int, Difference]  # by prompt: where the output is not that of the engine alone
    steps: list[Step]  # of all ranks: each has the same list
    collectives: int

    def count(self, rank: int, mode: ForwardMode, idle: bool) -> int:
        """Steps of that mode which the rank took with requests of its own, or without."""
        return sum(step.mode is mode and (step.batch_sizes[rank] == 0) is idle for step in self.steps)


@dataclass
class Hang:
    """Where each rank was when none moved any more."""

    seconds: float
    places: list[Place | None]  # None: at no collective yet
    waiting: list[bool]  # False: it came out of that place, and has not come to its next one
    skipped: list[list[Place]]  # by rank: where it stayed away

    def explain(self) -> list[str]:
        """Who waits where and for whom, a line for each rank; then which of them stayed away from where one waits."""
        lines = [f"No rank has moved for {self.seconds:g} s."]
        for rank, place in enumerate(self.places):
            if place is None:
                lines.append(f"Rank {rank} has come to no collective yet.")
            elif not self.waiting[rank]:
                lines.append(f"Rank {rank} is busy: it was last at its collective {place.collective}, {_name(place)}.")
            else:
                absent = [r for r in range(len(self.places)) if not self._is_at(r, place)]
                whom = f" for {_ranks(absent)}" if absent else ", and all are there"
                lines.append(f"Rank {rank} waits at its collective {place.collective}, {_name(place)},{whom}.")
        for rank, skipped in enumerate(self.skipped):
            for place in skipped:
                waiting = [r for r in range(len(self.places)) if self._is_at(r, place)]
                if waiting:
                    lines.append(
                        f"Rank {rank} had no rows in {_forward(place)}, and stayed away from the collective that "
                        f"{_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} at."
                    )
        return lines

    def _is_at(self, rank: int, place: Place) -> bool:
        theirs = self.places[rank]
        return theirs is not None and self.waiting[rank] and theirs.meets(place)


def run_ranks(
    make_engine: Callable[..., Engine],
    prompts: Sequence[Sequence[Prompt]],
    params: Sequence[Sequence[SamplingParams]],
    timeout: float,
    skip_idle: bool = False,
) -> list[RankReport] | Hang:
    """Serve prompts[r], by params[r], on rank r: a process with an engine of its own. Then each does it alone.

    make_engine: called in every rank with device=...; it must be picklable, as functools.partial(Engine, ...) is.
    timeout: seconds without any rank's moving that count as a hang.
    skip_idle: bring the fault back, see `Peers`.

    Returns the reports by rank, or how they hang. Raises RankFailed as soon as a rank has raised or died. However it
    ends, no rank is left; the process that they were forked from stays, for the next run, as long as this one.
    """
    with tempfile.TemporaryDirectory(prefix="refspec-ranks-") as folder:
        jobs = [
            _Job(rank, make_engine, list(theirs), list(params[rank]), Path(folder), len(prompts), timeout, skip_idle)
            for rank, theirs in enumerate(prompts)
        ]
        with _processes(jobs) as (processes, pipes):
            return _Watch(processes, pipes, timeout).until_the_end()


# --- in a rank's process --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    rank: int
    make_engine: Callable[..., Engine]
    prompts: list[Prompt]
    params: list[SamplingParams]
    folder: Path
    size: int
    timeout: float
    skip_idle: bool


@dataclass(frozen=True)
class _Failure:
    lost_others: bool  # it failed since another rank was gone
    rank: int
    what: str
    traceback: str = ""


def _be_a_rank(job: _Job, pipe: Connection) -> None:
    """Tells through the pipe: what `Report` says of a place, "serving", "served", then "done" or "failed"."""
    try:
        try:
            pipe.send(("done", _serve(job, pipe)))
        except Exception as error:
            what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            pipe.send(("failed", _Failure(isinstance(error, LostPeers), job.rank, what, traceback.format_exc())))
    except BrokenPipeError:
        pass  # nobody is there to be told


def _serve(job: _Job, pipe: Connection) -> RankReport:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.size))
    engine = job.make_engine(device=str(device_of(job.rank, job.size)))
    steps: list[Step] = []

    def report(event: str, place: Place) -> None:
        pipe.send((event, place))

    # The watching process ends a hang. If it is gone, this rank must not wait for ever.
    last_resort = job.timeout + 5
    with connected(job.rank, job.size, job.folder, last_resort, report, job.skip_idle) as peers:
        pipe.send(("serving", None))
        generations = generate_in_step(engine, peers, job.prompts, job.params, steps.append)
        pipe.send(("served", None))
    alone = engine.generate(job.prompts, job.params)
    differences = {}
    for i, (prompt, without, among) in enumerate(zip(job.prompts, alone, generations, strict=True)):
        found = first_difference(engine, engine.encode(prompt), without.token_ids, among.token_ids)
        if found:
            differences[i] = found
    engine.check()
    return RankReport(generations, differences, steps, peers.collectives)


# --- in the process that watches ------------------------------------------------------------------------------------


@contextmanager
def _processes(jobs: list[_Job]) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    """A process and a pipe from it for each job. Afterwards none of them is left."""
    # Forked from a process that has loaded torch, and has never run it: its threads would not survive.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for job in jobs:
            ours, theirs = context.Pipe(duplex=False)
            pipes.append(ours)
            process = context.Process(target=_be_a_rank, args=(job, theirs), name=f"rank {job.rank}", daemon=True)
            processes.append(process)
            with _signals_wait():
                process.start()
            theirs.close()  # so that the pipe ends with the process
        yield processes, pipes
    finally:
        started = [each for each in processes if each.pid is not None]
        for each in started:
            each.kill()
        for each in started:
            each.join()
        for pipe in pipes:
            pipe.close()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """For a process to be started inside: it never hears of Ctrl-C. This one does, and of other signals, afterwards.

    In the middle of a start, an exception would leave a process behind of which nobody knows.
    """
    resource_tracker.ensure_running()  # else the first start starts it, and that lets SIGINT through again
    came: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other hears of signals
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(each)):
                before[each] = signal.signal(each, lambda number, frame: came.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what is started inherits it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


class _Watch:
    """Reads what the ranks tell, until all are done, one fails, or none moves."""

    def __init__(self, processes: list[BaseProcess], pipes: list[Connection], timeout: float) -> None:
        self.processes, self.pipes, self.timeout = processes, pipes, timeout
        size = len(pipes)
        self.places: list[Place | None] = [None] * size
        self.waiting = [False] * size
        self.skipped: list[list[Place]] = [[] for _ in range(size)]
        self.reports: dict[int, RankReport] = {}
        self.serving: set[int] = set()
        self.served: set[int] = set()
        self.failures: list[_Failure] = []
        self.moved = time.monotonic()

    def until_the_end(self) -> list[RankReport] | Hang:
        open_pipes = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        while len(self.reports) < len(self.pipes):
            ready = connection.wait(list(open_pipes), self._seconds_left())
            if not ready:
                if self.failures:
                    self._raise_failure()
                return Hang(self.timeout, self.places, self.waiting, self.skipped)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_pipes[pipe]
                try:
                    self._hear(rank, *pipe.recv())
                except EOFError:
                    del open_pipes[pipe]
                    self._hear_no_more(rank)
            if self.failures and not (open_pipes and all(failure.lost_others for failure in self.failures)):
                self._raise_failure()
        return [self.reports[rank] for rank in range(len(self.pipes))]

    def _seconds_left(self) -> float | None:
        """Until the silence counts as a hang; None while the ranks start, or compute without one another."""
        if self.failures:
            return CULPRIT_SECONDS
        if len(self.serving) < len(self.pipes) or len(self.served) == len(self.pipes):
            return None
        return max(0.0, self.moved + self.timeout - time.monotonic())

    def _hear(self, rank: int, event: str, content: Any) -> None:
        self.moved = time.monotonic()
        if event in ("waits", "goes on"):
            self.places[rank], self.waiting[rank] = content, event == "waits"
        elif event == "skips":
            self.skipped[rank].append(content)
        elif event == "serving":
            self.serving.add(rank)
        elif event == "served":
            self.served.add(rank)
        elif event == "done":
            self.reports[rank] = content
        else:
            self.failures.append(content)

    def _hear_no_more(self, rank: int) -> None:
        if rank in self.reports or any(failure.rank == rank for failure in self.failures):
            return
        process = self.processes[rank]
        process.join()
        code = process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"status {code}"
        self.failures.append(_Failure(False, rank, f"its process has ended with {how}"))

    def _raise_failure(self) -> None:
        """Of the failures, the one for which the other ranks were lost, if it has come forward."""
        failure = min(self.failures, key=lambda failure: failure.lost_others)
        error = RankFailed(f"rank {failure.rank} has failed, and with it the run: {failure.what}")
        if failure.traceback:
            error.add_note(failure.traceback)
        raise error


# --- words ----------------------------------------------------------------------------------------------------------


def _name(place: Place) -> str:
    if place.forward == 0:
        return f"the agreement on step {place.step}"
    return f"the {place.what} of {_forward(place)}"


def _forward(place: Place) -> str:
    return f"the {place.phase} forward of step {place.step}"


def _ranks(ranks: Sequence[int]) -> str:
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
