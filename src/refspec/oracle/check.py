"""Parity: every opinion on an operation against every other, case by case.

Cases follow from a seed and a label alone: first the edge cases that the operation names, then `small-0`, `small-1`,
..., then `medium-0`, ... and, for a thorough check, `large-0`, .... So one case can be looked at again without the
others. Every opinion gets a copy of the same inputs.

Whole numbers, truth values and all outputs without a stated tolerance must be equal. A case that depends on rounding
(the operation says which do) may differ in its values, which is counted apart. What could not run is reported as that,
with the reason.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import queue
import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from threading import Lock
from types import TracebackType

import torch
from torch import Tensor

from refspec.oracle import operations
from refspec.oracle.operation import LARGE, MEDIUM, SMALL, Inputs, Operation, Outputs
from refspec.oracle.opinions import OPINIONS, why_not_for, why_not_here
from refspec.oracle.process import Child, OpinionError, packed

CASES = 100  # small ones, unless told otherwise
MEDIUM_CASES = 2
THOROUGH = 2000  # from so many small cases on, there are large ones too
LARGE_CASES = 20
SIZES = {"small": SMALL, "medium": MEDIUM, "large": LARGE}

Progress = Callable[[], object]  # called after each case
_drawing = Lock()  # torch's own generator is the process's


@dataclass(frozen=True)
class Difference:
    """The first place where two opinions on a case differ."""

    case: str
    opinions: tuple[str, str]
    output: str
    place: tuple[int, ...] | None  # None where dtype, shape or the outputs' names differ
    values: tuple[str, str]
    reproduce: str  # a command

    @property
    def sentence(self) -> str:
        """The difference in words."""
        where = f" at {self.place}" if self.place is not None else ""
        return (
            f"case {self.case}: {self.opinions[0]} and {self.opinions[1]} differ in {self.output}{where}: "
            f"{self.values[0]} against {self.values[1]}"
        )


@dataclass(frozen=True)
class Failure:
    """An opinion that was asked about a case, and gave no answer."""

    case: str
    opinion: str
    why: str
    reproduce: str

    @property
    def sentence(self) -> str:
        """The failure in words."""
        return f"case {self.case}: {self.opinion} failed: {self.why}"


@dataclass
class Count:
    """In how many cases an opinion answered, failed, or was not asked since its code does not claim to handle them."""

    answered: int = 0
    failed: int = 0
    not_asked: int = 0


@dataclass
class OperationReport:
    """What came of one operation. borderline_cases: those that depend on rounding, whether or not they differ."""

    operation: str
    sglang_source: str
    seed: int
    cases: int = 0
    opinions: dict[str, Count] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)  # opinion to reason
    borderline_cases: int = 0
    differences: list[Difference] = field(default_factory=list)
    borderline_differences: list[Difference] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Did at least two opinions run, without a failure, and agree?"""
        return not self.differences and not self.failures and len(self.opinions) > 1

    @property
    def differing_cases(self) -> int:
        """In how many cases any two opinions differ, borderline cases left out."""
        return len({difference.case for difference in self.differences})

    @property
    def differing_borderline_cases(self) -> int:
        """In how many borderline cases any two opinions differ."""
        return len({difference.case for difference in self.borderline_differences})


# --- cases ------------------------------------------------------------------------------------------------------------


class UnknownName(ValueError):
    """There is no operation, or no case, of that name; the message lists those that there are."""


def operation_names() -> list[str]:
    """The operations that are described, which are the files of `oracle/operations`."""
    return sorted(module.name for module in pkgutil.iter_modules(operations.__path__))


def module_of(name: str) -> str:
    """The module that describes an operation. Raises UnknownName for one that is not there."""
    if name not in operation_names():
        raise UnknownName(f"there is no operation {name!r}; those that can be checked: {', '.join(operation_names())}")
    return f"{operations.__name__}.{name}"


class Cases:
    """The cases of the operation that `module` calls OPERATION."""

    def __init__(self, module: str, seed: int) -> None:
        self.module, self.seed = module, seed
        self.operation: Operation = importlib.import_module(module).OPERATION
        with _drawing, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._edges = dict(self.operation.edges())

    def labels(self, cases: int = CASES) -> list[str]:
        """The edges, `cases` small ones, a few larger ones, and for a thorough check some large ones."""
        large = LARGE_CASES if cases >= THOROUGH else 0
        counts = {"small": cases, "medium": MEDIUM_CASES, "large": large}
        return [*self._edges, *(f"{size}-{i}" for size, count in counts.items() for i in range(count))]

    def inputs(self, label: str) -> Inputs:
        """The case of that label: always the same for the same seed. Raises UnknownName for a label that is none."""
        if label in self._edges:
            return self._edges[label]
        size, _, index = label.partition("-")
        if size not in SIZES or not index.isdecimal():
            known = ", ".join([*map(repr, self._edges), *(f"'{size}-0'" for size in SIZES)])
            raise UnknownName(f"{self.operation.name} has no case {label!r}; it has {known}, and so on")
        rng = random.Random(f"{self.operation.name} {self.seed} {label}")
        with _drawing, torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.getrandbits(63))
            return self.operation.draw(rng, SIZES[size])

    def reproduce(self, label: str) -> str:
        """The command that looks at this case alone."""
        return f"refspec oracle check {self.operation.name} --seed {self.seed} --case {shlex.quote(label)}"


# --- asking -----------------------------------------------------------------------------------------------------------


class Jury:
    """A process for each opinion that this machine can run, several times over: cases are shared among the teams.

    To be used in a `with` statement, which ends the processes. not_here: why the other opinions cannot run.
    sgl_kernel_functions: what the installed package sgl_kernel exports; nothing where it cannot run.
    """

    def __init__(
        self, folders: Mapping[str, Path], jobs: int | None = None, damaged: Mapping[str, str] | None = None
    ) -> None:
        """folders: SGLang's wheels that are ready, as `wheel.folders()`. jobs: how many cases at a time; None: one for
        each core, and at most two. damaged: what is wrong with other wheels, for the report.
        """
        self.folders = dict(folders)
        self.damaged = dict(damaged or {})
        self.jobs = jobs or min(2, os.cpu_count() or 1)
        reasons = {name: why_not_here(opinion) for name, opinion in OPINIONS.items()}
        self.not_here = {name: reason for name, reason in reasons.items() if reason}
        able = [opinion for name, opinion in OPINIONS.items() if name not in self.not_here]
        self.sgl_kernel_functions: set[str] = set()
        self.teams = [{opinion.name: Child(opinion, self.folders) for opinion in able} for _ in range(self.jobs)]

    def __enter__(self) -> Jury:
        """The first team is started, so that an opinion that does not even load is known before it is asked."""
        first = self.teams[0]
        try:
            for child in first.values():
                child.launch()
            for name, child in first.items():
                try:
                    child.await_ready()
                except OpinionError as error:
                    self.not_here[name] = str(error)
                self.sgl_kernel_functions |= set(child.exports)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for team in self.teams:
            for child in team.values():
                child.close()

    def stop(self) -> None:
        """Kill all processes at once; whoever waits for an answer gets none."""
        for team in self.teams:
            for child in team.values():
                child.stop()


@dataclass
class _Verdict:
    """What the opinions on one case came to."""

    label: str
    borderline: bool = False
    answers: dict[str, Outputs] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    not_asked: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)


def check(cases: Cases, labels: Sequence[str], jury: Jury, progress: Progress = lambda: None) -> OperationReport:
    """Compare the jury's opinions in the cases of these labels. Every difference and failure is in the report.

    Raises UnknownName for a label that names no case.
    """
    operation = cases.operation
    not_run = dict(jury.not_here)
    for name, opinion in OPINIONS.items():
        if name in not_run:
            continue
        if why := why_not_for(opinion, operation, jury.folders, jury.sgl_kernel_functions, jury.damaged):
            not_run[name] = why
    able = [name for name in OPINIONS if name not in not_run]
    report = OperationReport(operation.name, operation.sglang_source, cases.seed, not_run=not_run)
    report.opinions = {name: Count() for name in able}
    teams: queue.SimpleQueue[dict[str, Child]] = queue.SimpleQueue()
    for team in jury.teams:
        teams.put(team)

    def judge(label: str) -> _Verdict:
        team = teams.get()
        try:
            return _judge(cases, label, {name: team[name] for name in able})
        finally:
            teams.put(team)

    with ThreadPoolExecutor(jury.jobs) as threads:
        pending = [threads.submit(judge, label) for label in labels]
        try:
            for verdict in pending:
                _enter(report, verdict.result(), cases)
                progress()
        except BaseException:
            jury.stop()
            threads.shutdown(cancel_futures=True)
            raise
    return report


def _judge(cases: Cases, label: str, team: Mapping[str, Child]) -> _Verdict:
    """Ask the team's opinions about one case, one after the other, and compare what they say."""
    operation, inputs = cases.operation, cases.inputs(label)
    verdict = _Verdict(label, borderline=operation.borderline(inputs))
    takes = {"sglang": operation.sglang_takes(inputs), "sgl_kernel": operation.sgl_kernel_takes(inputs)}
    message = packed(inputs)
    for name, child in team.items():
        if not takes.get(OPINIONS[name].code, True):
            verdict.not_asked.append(name)
            continue
        try:
            verdict.answers[name] = child.ask(cases.module, message)
        except OpinionError as error:
            verdict.failures[name] = str(error)
    for one, other in combinations(verdict.answers, 2):
        found = first_difference(operation, (one, other), (verdict.answers[one], verdict.answers[other]))
        if found is not None:
            output, place, values = found
            verdict.differences.append(Difference(label, (one, other), output, place, values, cases.reproduce(label)))
    return verdict


def _enter(report: OperationReport, verdict: _Verdict, cases: Cases) -> None:
    report.cases += 1
    report.borderline_cases += verdict.borderline
    for name, count in report.opinions.items():
        count.answered += name in verdict.answers
        count.failed += name in verdict.failures
        count.not_asked += name in verdict.not_asked
    for name, why in verdict.failures.items():
        report.failures.append(Failure(verdict.label, name, why, cases.reproduce(verdict.label)))
    for difference in verdict.differences:
        # Rounding may change a value. It changes no dtype and no shape.
        excused = verdict.borderline and difference.place is not None
        (report.borderline_differences if excused else report.differences).append(difference)


# --- comparing --------------------------------------------------------------------------------------------------------


def first_difference(
    operation: Operation, opinions: tuple[str, str], answers: tuple[Outputs, Outputs]
) -> tuple[str, tuple[int, ...] | None, tuple[str, str]] | None:
    """The output, the place in it, and the two values there; None if the two agree.

    SGLang may answer with fewer outputs than ours have: those that both name are compared. NaN equals NaN.
    """
    one, other = answers
    ours_alone = all(OPINIONS[name].code in ("torch", "triton") for name in opinions)
    fewer, more = sorted((one.keys(), other.keys()), key=len)
    if not fewer <= more or not fewer or (ours_alone and fewer != more):
        return "names of the outputs", None, (", ".join(one) or "none", ", ".join(other) or "none")
    for output in one:
        if output not in other:
            continue
        a, b = one[output], other[output]
        if a.dtype != b.dtype or a.shape != b.shape:
            return output, None, (f"{a.dtype} {tuple(a.shape)}", f"{b.dtype} {tuple(b.shape)}")
        differ = ~_agree(a, b, operation.tolerances.get(output))
        if differ.any():
            place = tuple(int(index) for index in differ.nonzero()[0])
            return output, place, (str(a[place].item()), str(b[place].item()))
    return None


def _agree(a: Tensor, b: Tensor, tolerance: tuple[float, float] | None) -> Tensor:
    """Where two tensors of one dtype and shape agree."""
    if tolerance is not None:
        relative, absolute = tolerance
        return torch.isclose(a.double(), b.double(), rtol=relative, atol=absolute, equal_nan=True)
    return (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
