"""The judge: does a learner's function give the right outputs, and if not, what was the thought behind it?

What a pass proves. The function in the file gave the outputs of the package's own function: for the examples that the
skeleton shows, and for inputs that were drawn after the file was written. It does not prove who wrote the file, nor
that it is right for every input.

How. The inputs go to a child process as plain arrays, and what its function returned comes back as plain arrays
(wire.py). The child and all that it started has ended before the expected values are computed, here, from a private
copy of the inputs. So there is nothing for it to find, and nothing that it can do to the comparison: to leave early,
to patch modules or to write a reply of its own gains it no more than returning the same values would.

What it does not do. It is no wall against an attacker. The child runs as the same user, with that user's files,
network and processes within reach: it could read the package's source from disk, change it, or tamper with the memory
of this process. It refuses to import the module that holds the solution because that is a mistake worth a sentence,
not because nobody could get around it. Whoever grades the files of strangers puts the whole of it into a container.
Processes that a child leaves behind are found as descendants of the nursery; where the child has ended the nursery,
by an environment variable that all of them have, unless they threw it away. Limits that this system does not enforce
are listed with every result.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import RenderableType

from refspec.grader import wire
from refspec.grader.compare import (
    Arrays,
    Difference,
    UnlikeError,
    first_difference,
    named_arrays,
    same,
    unchanged,
)
from refspec.grader.exercise import Exercise, Misconception
from refspec.grader.limits import Limits
from refspec.grader.problems import LARGEST, Case, Problem, problem_of
from refspec.grader.sandbox import Job, Outcome, Sandbox
from refspec.grader.wire import MessageError, Plain

Verdict = Literal["pass", "fail", "error", "timeout", "not_started"]

DRAWN = 42  # unseen cases of one run
SEPARATING_ROUNDS, SEPARATING_CASES, SEPARATING_TRIES = 3, 12, 300
SHRINK_SECONDS, SHRINK_RUN_SECONDS, SHRINK_EXAMPLES = 0.7, 0.5, 150
SMALL, SMALL_CASES = 2, 140
LARGEST_FILE = 1 << 20
UNWRITTEN = "raised:NotImplementedError"  # what skeletons do


@dataclass(frozen=True)
class Result:
    """What a learner is told about one exercise."""

    exercise: Exercise
    verdict: Verdict
    headline: str
    where: str | None = None  # in which case it failed
    picture: RenderableType | None = None
    facts: tuple[str, ...] = ()  # further lines: what was returned, what the example expects
    misconception: str | None = None  # its id
    diagnosis: str | None = None  # its sentence
    printed: str = ""  # by the learner's code
    cases: int = 0
    seed: int | None = None
    seconds: float = 0.0
    digest: str | None = None  # of the bytes that were judged
    not_enforced: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Raised:
    """A call that ended in an exception, or a file that could not be loaded."""

    kind: str
    message: str
    module: str | None
    line: int | None

    def in_words(self) -> str:
        where = f" in line {self.line}" if self.line is not None else ""
        return f"{self.kind}{where}" + (f": {self.message}" if self.message else "")


@dataclass(frozen=True)
class _Answer:
    """What came back for one case."""

    value: Plain | _Raised
    inputs: dict[str, Plain]  # after the call


@dataclass(frozen=True)
class _Reply:
    """All that came back from one run."""

    loaded: bool = False
    failed: _Raised | None = None  # why it was not loaded
    answers: tuple[_Answer, ...] = ()  # to the first so many cases


@dataclass(frozen=True)
class _Fault:
    """Why one answer is not right."""

    kind: str  # raised:..., changed:..., form, value: what stays the same when the case is made smaller
    headline: str
    difference: Difference | None = None
    yours: Arrays | None = None
    right: Arrays | None = None


class _TimeIsUp(BaseException):
    """Not an Exception: Hypothesis would take that for what it looks for."""


class Judge:
    """Grades one file after another, in a nursery that stays warm between them.

    seed: of the unseen cases; None: another one each time.
    """

    def __init__(self, limits: Limits | None = None, seed: int | None = None) -> None:
        self.limits, self.seed = limits or Limits(), seed
        self.sandbox = Sandbox()

    def __enter__(self) -> Judge:
        self.sandbox.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing that was started is left."""
        self.sandbox.close()

    def grade(self, exercise: Exercise, file: Path) -> Result:
        """A file that may or may not be there. Raises JudgeError if the judge cannot work here at all."""
        try:
            if not file.exists():
                return Result(exercise, "not_started", "not started yet")
            if not file.is_file():
                return Result(exercise, "error", f"{file} is no plain file")
            if file.stat().st_size > LARGEST_FILE:
                return Result(exercise, "error", f"{file} is larger than {LARGEST_FILE >> 10} KiB")
            source = file.read_bytes()
        except OSError as error:
            return Result(exercise, "error", f"{file} cannot be read: {error.strerror}")
        return self.grade_text(exercise, source, str(file))

    def grade_text(self, exercise: Exercise, source: bytes, path: str) -> Result:
        """A file's bytes; `path` is what messages call it."""
        started = time.monotonic()
        seed = secrets.randbelow(2**31) if self.seed is None else self.seed
        run = _Run(self, exercise, source, path, random.Random(f"{seed} {exercise.id}"))
        result = run.judge()
        return replace(
            result,
            seed=seed,
            printed=wire.printable(run.printed),
            seconds=time.monotonic() - started,
            digest=hashlib.sha256(source).hexdigest(),
            not_enforced=self.sandbox.not_enforced,
        )


class _Run:
    """One file, judged once."""

    def __init__(self, judge: Judge, exercise: Exercise, source: bytes, path: str, rng: random.Random) -> None:
        self.limits, self.sandbox = judge.limits, judge.sandbox
        self.exercise, self.source, self.path, self.rng = exercise, source, path, rng
        self.problem = problem_of(exercise.id)
        self.printed = ""

    def judge(self) -> Result:
        examples = list(self.problem.examples)
        cases = [*examples, *draw_cases(self.problem, self.rng, DRAWN)]
        self.sandbox.start()
        self.exercise.reference()  # loads torch here while the nursery loads it there
        outcome = self._ask(cases, self.limits)
        self.printed = outcome.printed
        try:
            reply = read_reply(outcome.reply, len(cases))
        except MessageError as error:
            headline = f"what came back is not what {self._name} returned ({error}): does the file write to it?"
            return self._result("fail", headline)
        answers = reply.answers
        if outcome.ending == "timeout":
            doing = "in " + self._where(len(answers), examples) if reply.loaded else "while it was loaded"
            return self._result("timeout", f"timed out after {self.limits.seconds:g} s", where=doing)
        if outcome.ending == "processes":
            return self._result("fail", f"it started more than {self.limits.processes} processes, and was ended")
        if outcome.ending == "reply":
            return self._result("fail", f"it returned more than {self.limits.reply_mb} MB, and was ended")
        if outcome.ending == "lost":
            return self._result("error", "the process that runs exercises was ended while it ran this one")
        if reply.failed is not None:
            return self._not_loaded(reply.failed)
        for number, (case, answer) in enumerate(zip(cases, answers, strict=False)):
            fault = find_fault(self.exercise, self.problem, case, answer)
            if fault is not None:
                return self._explained(fault, case, number, examples, cases, answers)
        if len(answers) < len(cases) or outcome.status != 0:
            return self._result("fail", self._early_end(outcome, len(answers) < len(cases)))
        return self._result("pass", f"right, in {len(examples)} examples and {DRAWN} unseen cases", cases=len(cases))

    # --- running ------------------------------------------------------------------------------------------------

    def _ask(self, cases: Sequence[Case], limits: Limits) -> Outcome:
        job = Job(
            path=self.path,
            source=self.source,
            function=self.exercise.function,
            refuse=(self.exercise.solution_module,),
            cases=[dict(case) for case in cases],
        )
        return self.sandbox.run(job, limits)

    def _answers(self, cases: Sequence[Case], seconds: float) -> Sequence[_Answer]:
        """As far as they come; for questions asked after the verdict."""
        limits = replace(self.limits, seconds=min(seconds, self.limits.seconds))
        try:
            return read_reply(self._ask(cases, limits).reply, len(cases)).answers
        except MessageError:
            return ()

    # --- what went wrong ----------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return self.exercise.function

    def _result(self, verdict: Verdict, headline: str, **more: Any) -> Result:
        return Result(self.exercise, verdict, headline, **more)

    def _where(self, number: int, examples: Sequence[Case]) -> str:
        if number < len(examples):
            return f"example {number + 1} of {len(examples)}"
        return "an unseen case"

    def _not_loaded(self, failed: _Raised) -> Result:
        if failed.kind == "refused":
            return self._result("fail", _refusal(self.exercise))
        if failed.kind == "no function":
            return self._result("error", f"the file defines no function {self._name}")
        if failed.kind in ("SyntaxError", "IndentationError", "TabError"):
            where = "" if failed.line is None else f" in line {failed.line}"
            return self._result("error", f"syntax error{where}: {failed.message}")
        if failed.kind == "ModuleNotFoundError":
            said = f"it imports {failed.module}, which is not installed here"
            return self._result("error", f"{said} (an exercise is one file: those beside it are not seen)")
        if failed.kind == "UnicodeDecodeError":
            return self._result("error", "the file is not UTF-8 text")
        if failed.kind == "SystemExit":
            return self._result("fail", f"the file ends the process while it is loaded ({failed.in_words()})")
        return self._result("error", f"the file cannot be loaded: {failed.in_words()}")

    def _early_end(self, outcome: Outcome, unfinished: bool) -> str:
        assert outcome.status is not None
        how = f"exit status {outcome.status}"
        if outcome.status < 0:
            how = signal.Signals(-outcome.status).name
        when = f"before {self._name} had returned" if unfinished else "at its end"
        return f"the process ended {when} ({how})"

    def _explained(
        self,
        fault: _Fault,
        case: Case,
        number: int,
        examples: Sequence[Case],
        cases: Sequence[Case],
        answers: Sequence[_Answer],
    ) -> Result:
        misconception = None
        if fault.kind in ("form", "value") or fault.kind.startswith("raised:"):
            misconception = self._diagnose(list(zip(cases, answers, strict=False)))
        shown = number < len(examples)
        where = "in " + self._where(number, examples)
        if not shown:
            case, fault = self._smaller(case, fault)
            where += ", made as small as it would go"
        headline = fault.headline
        picture = None if fault.kind == UNWRITTEN else self.problem.picture(case)
        facts: tuple[str, ...] = ()
        if fault.kind == "value":
            assert fault.difference is not None
            assert fault.yours is not None
            assert fault.right is not None
            name = fault.difference.output
            if fault.difference.sentence is None:
                explanation = self.problem.explain(case, fault.right, fault.yours, fault.difference)
                headline, picture = explanation.headline, explanation.picture
            facts = (f"your {name}: {_shown(fault.yours[name])}",)
            if shown:
                facts += (f"expected {name}: {_shown(fault.right[name])}",)
        return self._result(
            "fail",
            headline,
            where=where,
            picture=picture,
            facts=facts,
            misconception=misconception.id if misconception else None,
            diagnosis=misconception.sentence if misconception else None,
            cases=len(answers),
        )

    def _smaller(self, case: Case, fault: _Fault) -> tuple[Case, _Fault]:
        """The smallest case with the same kind of fault that is found in a short time; the same one if none is.

        Many small ones in one child, to begin with; then Hypothesis, with a child for each.
        """
        best = (case, fault)
        deadline = time.monotonic() + SHRINK_SECONDS

        def fails(cases: Sequence[Case]) -> bool:
            nonlocal best
            if time.monotonic() > deadline:
                raise _TimeIsUp
            any_failed = False
            for smaller, answer in zip(cases, self._answers(cases, SHRINK_RUN_SECONDS), strict=False):
                found = find_fault(self.exercise, self.problem, smaller, answer)
                if found is not None and found.kind == fault.kind:
                    any_failed = True
                    if _size(smaller) < _size(best[0]):
                        best = (smaller, found)
            return any_failed

        fails(draw_cases(self.problem, self.rng, SMALL_CASES, largest=SMALL))
        _hypothesis_find(self.problem, lambda smaller: fails([smaller]), self.rng)
        return best

    def _diagnose(self, pairs: list[tuple[Case, _Answer]]) -> Misconception | None:
        """The one whose outputs are the learner's in all cases; where several are, cases are added that part them."""
        suspects = [(m, load_misconception(m, self._name)) for m in self.exercise.misconceptions]
        for _ in range(SEPARATING_ROUNDS):
            suspects = [
                (m, function)
                for m, function in suspects
                if all(_agree(self.problem, call(function, case), answer.value) for case, answer in pairs)
            ]
            if len(suspects) < 2:
                break
            parting = self._parting_cases([function for _, function in suspects])
            pairs = list(zip(parting, self._answers(parting, self.limits.seconds), strict=False))
            if not pairs:
                break
        return suspects[0][0] if suspects else None

    def _parting_cases(self, functions: Sequence[Callable[..., Any]]) -> list[Case]:
        parting: list[Case] = []
        for case in draw_cases(self.problem, self.rng, SEPARATING_TRIES):
            first, *others = (call(function, case) for function in functions)
            if not all(_agree(self.problem, first, other) for other in others):
                parting.append(case)
            if len(parting) == SEPARATING_CASES:
                break
        return parting


# --- cases ------------------------------------------------------------------------------------------------------------


def draw_cases(problem: Problem, rng: random.Random, count: int, largest: int = LARGEST) -> list[Case]:
    """Growing in size, each kind of edge as often as the others."""
    return [problem.draw(rng.randint, number % problem.kinds, 1 + number * largest // count) for number in range(count)]


def _hypothesis_find(problem: Problem, condition: Callable[[Case], bool], rng: random.Random) -> None:
    """Calls the condition with ever smaller cases for which it held."""
    import hypothesis  # only here: a file that passes, or fails in an example, does not wait for it
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: st.DrawFn) -> Case:
        def pick(first: int, last: int) -> int:
            return draw(st.integers(first, last))

        return problem.draw(pick, pick(0, problem.kinds - 1), pick(1, LARGEST))

    settings = hypothesis.settings(
        max_examples=SHRINK_EXAMPLES,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    # What the condition has seen is all there is.
    with suppress(hypothesis.errors.NoSuchExample, hypothesis.errors.Flaky, _TimeIsUp):
        hypothesis.find(drawn(), condition, settings=settings, random=random.Random(rng.random()))


def _size(case: Case) -> int:
    return sum(value.size if isinstance(value, np.ndarray) else value for value in case.values())


# --- answers ----------------------------------------------------------------------------------------------------------


def call(function: Callable[..., Any], case: Case) -> Plain | _Raised:
    """A function of ours, on a copy of the inputs: what it returns, as if it had come from a child."""
    import torch  # late, so that the nursery, which is waited for, can load it at the same time

    inputs = [torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value for value in case.values()]
    try:
        return wire.decode(wire.encode(function(*inputs)))
    except Exception as error:
        return _Raised(type(error).__name__, str(error), None, None)


def load_misconception(misconception: Misconception, name: str) -> Callable[..., Any]:
    """Its function. It is ours, and runs here."""
    namespace: dict[str, Any] = {"__name__": f"misconception_{misconception.id}"}
    exec(compile(misconception.source, str(misconception.file), "exec", dont_inherit=True), namespace)
    return namespace[name]


def read_reply(reply: bytes, cases: int) -> _Reply:
    """What child.py wrote for so many cases, or a beginning of it. Raises MessageError for other bytes."""
    *lines, rest = reply.split(b"\n")  # the rest: a line in which the child was ended
    if len(lines) > cases + 1 or (rest and len(lines) > cases):
        raise MessageError("more than there should be")
    if not lines:
        return _Reply()
    first = wire.loads(lines[0])
    if isinstance(first, dict) and first.keys() == {"failed"} and len(lines) == 1:
        return _Reply(failed=_read_raised(first["failed"]))
    if first != {"loaded": True}:
        raise MessageError("no beginning")
    return _Reply(loaded=True, answers=tuple(_read_answer(line, number) for number, line in enumerate(lines[1:])))


def _read_answer(line: bytes, number: int) -> _Answer:
    data = wire.loads(line)
    if not isinstance(data, dict) or data.get("case") != number or not isinstance(data.get("inputs"), dict):
        raise MessageError("an answer to another case")
    inputs = {str(name): wire.decode(value) for name, value in data["inputs"].items()}
    if data.keys() == {"case", "inputs", "raised"}:
        return _Answer(_read_raised(data["raised"]), inputs)
    if data.keys() == {"case", "inputs", "value"}:
        return _Answer(wire.decode(data["value"]), inputs)
    raise MessageError("an answer in no known form")


def _read_raised(data: Any) -> _Raised:
    if not isinstance(data, dict) or data.keys() != {"kind", "message", "module", "line"}:
        raise MessageError("an exception in no known form")
    kind, message, module, line = data["kind"], data["message"], data["module"], data["line"]
    if not isinstance(kind, str) or not isinstance(message, str) or not isinstance(module, str | None):
        raise MessageError("an exception in no known form")
    if line is not None and type(line) is not int:
        raise MessageError("an exception in no known form")
    return _Raised(_one_line(kind), _one_line(message), None if module is None else _one_line(module), line)


def _one_line(text: str) -> str:
    return wire.printable(" ".join(text.split()))


def find_fault(exercise: Exercise, problem: Problem, case: Case, answer: _Answer) -> _Fault | None:
    """What is wrong with one answer, if anything is. What is right is computed here, after the child has ended."""
    if isinstance(answer.value, _Raised):
        kind = f"raised:{answer.value.kind}"
        headline = f"{exercise.function} raises {answer.value.in_words()}"
        if kind == UNWRITTEN:
            headline = f"{exercise.function} is not written yet"
        if answer.value.kind == "refused":
            headline = _refusal(exercise)
        return _Fault(kind, headline)
    for name, value in case.items():
        if isinstance(value, np.ndarray) and not unchanged(value, answer.inputs.get(name)):
            return _Fault(f"changed:{name}", f"input {name} was changed: whoever calls the function still needs it")
    right = named_arrays(problem.outputs, _ours(call(exercise.reference(), case)))
    try:
        yours = named_arrays(problem.outputs, answer.value)
    except UnlikeError as error:
        return _Fault("form", str(error))
    difference = first_difference(right, yours, problem.reading_order, problem.shapes)
    if difference is None:
        return None
    if difference.index is None:
        return _Fault("form", difference.sentence or "")
    headline = difference.sentence or f"{difference.output}{list(difference.index)} is wrong"
    return _Fault("value", headline, difference, yours, right)


def _refusal(exercise: Exercise) -> str:
    return f"the exercise is to write this function: {exercise.solution_module} cannot be imported in it"


def _ours(value: Plain | _Raised) -> Plain:
    assert not isinstance(value, _Raised), f"the solution raises {value}"
    return value


def _agree(problem: Problem, one: Plain | _Raised, other: Plain | _Raised) -> bool:
    """Would the one be taken for the other?"""
    if isinstance(one, _Raised) or isinstance(other, _Raised):
        return isinstance(one, _Raised) and isinstance(other, _Raised) and one.kind == other.kind
    forms = []
    for value in (one, other):
        try:
            forms.append(named_arrays(problem.outputs, value))
        except UnlikeError as error:
            forms.append({str(error): np.zeros(0)})
    return same(forms[0], forms[1])


def _shown(array: np.ndarray) -> str:
    text = str(array.tolist())
    return text if len(text) <= 300 else f"{text[:300]} ..."
