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
are listed with every result. And `python -m` has imported from the current folder before any line of refspec runs:
where that folder is a stranger's, only `refspec` and `python -P -m refspec` begin clean.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import RenderableType

from refspec.grader import wire
from refspec.grader.compare import Arrays, Difference, UnlikeError, first_difference, named_arrays, same, unchanged
from refspec.grader.exercise import Exercise, Misconception
from refspec.grader.limits import Limits
from refspec.grader.problems import LARGEST, Case, Pick, Problem, problem_of
from refspec.grader.sandbox import Job, JudgeError, Outcome, Sandbox
from refspec.grader.wire import NO_FUNCTION, REFUSED, MessageError, Plain
from refspec.grader.workspace import WorkspaceError, read_file
from refspec.printable import printable

Verdict = Literal["pass", "fail", "error", "timeout", "not_started"]

DRAWN = 42  # unseen cases of one run
SEPARATING_TRIES, SEPARATING_CASES = 240, 5  # what is drawn; of them, those asked for each thing to be told apart
ENOUGH = 10  # failing cases in which a learner's answer is a misconception's, before that is said to be the thought
SHRINK_SECONDS, SHRINK_RUN_SECONDS, SHRINK_BATCH = 2.0, 0.5, 120
SMALL, SMALL_CASES = 2, 140
LONGEST_KIND, LONGEST_MESSAGE = 80, 400
UNWRITTEN = "raise NotImplementedError"  # what skeletons do


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
    unwritten: bool = False  # the skeleton, or as good as it
    unseen: bool = False  # it failed in a case that was drawn
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
    printed: str = ""


@dataclass(frozen=True)
class _Reply:
    """All that came back from one run."""

    loaded: bool = False
    failed: _Raised | None = None  # why it was not loaded
    answers: tuple[_Answer, ...] = ()  # to the first so many cases


@dataclass(frozen=True)
class _Fault:
    """Why one answer is not right."""

    kind: str  # raised:, changed: or value: and which; form: what stays the same when the case is made smaller
    headline: str
    difference: Difference | None = None
    yours: Arrays | None = None
    right: Arrays | None = None


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
            source = read_file(file)
        except FileNotFoundError:
            return Result(exercise, "not_started", "not started yet")
        except WorkspaceError as error:
            return Result(exercise, "error", printable(str(error)))
        except OSError as error:
            return Result(exercise, "error", printable(f"{file} cannot be read: {error.strerror}"))
        return self.grade_text(exercise, source, str(file))

    def grade_text(self, exercise: Exercise, source: bytes, path: str) -> Result:
        """A file's bytes; `path` is what messages call it."""
        started = time.monotonic()
        seed = secrets.randbelow(2**31) if self.seed is None else self.seed
        run = _Run(self, exercise, source, path, random.Random(f"{seed} {exercise.id}"))
        try:
            result = run.judge()
        except JudgeError:
            raise
        except Exception as error:  # whatever one file brings about, the next one is judged
            result = Result(exercise, "error", _our_fault(error))
            self.sandbox.close()
        return replace(
            result,
            seed=seed,
            printed=printable(result.printed)[: self.limits.printed_kb << 10],
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

    def judge(self) -> Result:
        examples = list(self.problem.examples)
        drawn = draw(self.problem, self.rng, DRAWN)
        cases = [*examples, *(one.case for one in drawn)]
        self.sandbox.start()
        self.exercise.reference()  # loads torch here while the nursery loads it there
        outcome = self._ask(cases, self.limits)
        try:
            reply = read_reply(outcome.reply, len(cases), outcome.printed)
        except MessageError as error:
            headline = f"what came back is not what {self._name} returned ({error}): does the file write to it?"
            return self._result("fail", headline)
        answers = reply.answers
        # Where it was when it was ended, if it was.
        there: dict[str, Any] = {"printed": "".join(outcome.printed[len(answers) + 1 if reply.loaded else 0 :])}
        if reply.loaded and len(answers) < len(cases):
            shown = self.problem.picture(cases[len(answers)])
            there = {**there, **self._where(len(answers), examples), "picture": shown}
        if outcome.ending == "timeout":
            return self._result(
                "timeout", f"timed out after {self.limits.seconds:g} s", **{"where": "while it was loaded", **there}
            )
        if outcome.ending == "processes":
            return self._result(
                "fail", f"it started more than {self.limits.processes} processes, and was ended", **there
            )
        if outcome.ending == "reply":
            return self._result("fail", f"it returned more than {self.limits.reply_mb} MB, and was ended", **there)
        if outcome.ending == "lost":
            return self._result("error", "the process that runs exercises was ended while it ran this one", **there)
        if reply.failed is not None:
            return replace(self._not_loaded(reply.failed), **there)
        for number, (case, answer) in enumerate(zip(cases, answers, strict=False)):
            fault = find_fault(self.exercise, self.problem, case, answer)
            if fault is not None:
                return self._explained(fault, number, examples, drawn, answers)
        if len(answers) < len(cases) or outcome.status != 0:
            return self._result("fail", self._early_end(outcome, len(answers) < len(cases)), **there)
        return self._result(
            "pass",
            f"right, in {len(examples)} examples and {DRAWN} unseen cases",
            cases=len(cases),
            printed="".join(outcome.printed),
        )

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
            outcome = self._ask(cases, limits)
            return read_reply(outcome.reply, len(cases), outcome.printed).answers
        except MessageError:
            return ()

    # --- what went wrong ----------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return self.exercise.function

    def _result(self, verdict: Verdict, headline: str, **more: Any) -> Result:
        return Result(self.exercise, verdict, headline, **more)

    def _where(self, number: int, examples: Sequence[Case]) -> dict[str, Any]:
        if number < len(examples):
            return {"where": f"in example {number + 1} of {len(examples)} (shown below)"}
        return {"where": "in an unseen case", "unseen": True}

    def _not_loaded(self, failed: _Raised) -> Result:
        if failed.kind == REFUSED:
            return self._result("fail", _refusal(self.exercise))
        if failed.kind == NO_FUNCTION:
            return self._result("error", f"the file defines no function {self._name}")
        if failed.kind in ("SyntaxError", "IndentationError", "TabError"):
            where = "" if failed.line is None else f" in line {failed.line}"
            return self._result("error", f"syntax error{where}: {failed.message}")
        if failed.kind == "ModuleNotFoundError" and failed.module is not None:
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
            number = -outcome.status
            named = number in {each.value for each in signal.Signals}  # real-time signals have no name
            how = signal.Signals(number).name if named else f"signal {number}"
        when = f"before {self._name} had returned" if unfinished else "at its end"
        return f"the process ended {when} ({how})"

    def _explained(
        self,
        fault: _Fault,
        number: int,
        examples: Sequence[Case],
        drawn: Sequence[Drawn],
        answers: Sequence[_Answer],
    ) -> Result:
        answer, where = answers[number], self._where(number, examples)
        if number == 0 and self._is_unwritten(answer):
            return self._result("fail", f"{self._name} is not written yet", unwritten=True)
        misconception = None
        if not fault.kind.startswith("changed:"):
            cases = [*examples, *(one.case for one in drawn)]
            misconception = self._diagnose(list(zip(cases, answers, strict=False)))
        shown = number < len(examples)
        if shown:
            case = examples[number]
        else:
            first = drawn[number - len(examples)]
            smallest, fault, answer = self._smaller(first, fault, answer)
            case = smallest.case
            if smallest is not first:
                where["where"] += ", made smaller"
        headline, picture = fault.headline, self.problem.picture(case)
        facts: tuple[str, ...] = ()
        if fault.difference is not None:
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
            picture=picture,
            facts=facts,
            misconception=misconception.id if misconception else None,
            diagnosis=misconception.sentence if misconception else None,
            cases=len(answers),
            printed=answer.printed,
            **where,
        )

    def _is_unwritten(self, answer: _Answer) -> bool:
        """Was it the skeleton's own line that raised?"""
        raised = answer.value
        if not isinstance(raised, _Raised) or raised.kind != "NotImplementedError" or raised.message:
            return False
        lines = self.source.decode("utf-8", "replace").splitlines()
        return raised.line is not None and [line.strip() for line in lines[raised.line - 1 :][:1]] == [UNWRITTEN]

    def _smaller(self, first: Drawn, fault: _Fault, answer: _Answer) -> tuple[Drawn, _Fault, _Answer]:
        """The smallest case with the same kind of fault that is found in a short time; the given one if none is.

        A case is smaller if fewer choices make it, or smaller ones, as in Hypothesis. That is not called here, since it
        tries one case after another, and a hundred cost a child little more than one.
        """
        best = (first, fault, answer)
        deadline = time.monotonic() + SHRINK_SECONDS
        tried = smaller_ones(self.problem, first, *draw(self.problem, self.rng, SMALL_CASES, largest=SMALL))
        while tried and time.monotonic() < deadline:
            batch, tried = tried[:SHRINK_BATCH], tried[SHRINK_BATCH:]
            for one, got in zip(batch, self._answers([one.case for one in batch], SHRINK_RUN_SECONDS), strict=False):
                found = find_fault(self.exercise, self.problem, one.case, got)
                if found is not None and found.kind == fault.kind:
                    best = (one, found, got)
                    tried = smaller_ones(self.problem, one)
                    break
        return best

    def _diagnose(self, pairs: list[tuple[Case, _Answer]]) -> Misconception | None:
        """The one whose outputs are the learner's in all cases.

        In those of the run; and in others, in which it shows and differs from every other misconception: a wrong
        thought of another kind is not to be taken for it by chance.
        """
        bank = [_Recalling(self.problem, load_misconception(m, self._name)) for m in self.exercise.misconceptions]
        right = _Recalling(self.problem, self.exercise.reference())
        given = [(case, _form(self.problem, answer.value)) for case, answer in pairs]
        for misconception, suspect in zip(self.exercise.misconceptions, bank, strict=True):
            if not all(_agree(suspect(case), form) for case, form in given):
                continue
            cases = self._telling_cases(suspect, right, [other for other in bank if other is not suspect])
            forms = [_form(self.problem, answer.value) for answer in self._answers(cases, self.limits.seconds)]
            shows = sum(not _agree(suspect(case), right(case)) for case in cases)
            if shows < ENOUGH or len(forms) < len(cases):
                continue
            if all(_agree(suspect(case), form) for case, form in zip(cases, forms, strict=True)):
                return misconception
        return None

    def _telling_cases(self, suspect: _Recalling, right: _Recalling, others: Sequence[_Recalling]) -> list[Case]:
        """Cases in which the suspect differs from what is right, and from each of the others."""
        drawn = draw_cases(self.problem, self.rng, SEPARATING_TRIES)[::-1]  # the large ones, which tell more, first
        telling: dict[int, Case] = {}
        for other, wanted in [(right, 2 * ENOUGH), *((other, SEPARATING_CASES) for other in others)]:
            differ = (number for number, case in enumerate(drawn) if not _agree(suspect(case), other(case)))
            telling.update((number, drawn[number]) for number in islice(differ, wanted))
        return list(telling.values())


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A case, and the choices that made it."""

    case: Case
    choices: tuple[int, ...]  # its kind, its size, and what the draw picked: each as a distance from the smallest

    def order(self) -> tuple[int, tuple[int, ...]]:
        """The smaller come first."""
        return len(self.choices), self.choices


def draw(problem: Problem, rng: random.Random, count: int, largest: int = LARGEST) -> list[Drawn]:
    """Growing in size, each kind of edge as often as the others."""
    sizes = ((number % problem.kinds, number * largest // count) for number in range(count))
    return [_replay(problem, kind_and_size, rng.randint) for kind_and_size in sizes]


def draw_cases(problem: Problem, rng: random.Random, count: int) -> list[Case]:
    """As draw, without the choices."""
    return [drawn.case for drawn in draw(problem, rng, count)]


def smaller_ones(problem: Problem, drawn: Drawn, *others: Drawn) -> list[Drawn]:
    """Those a step smaller, with some choices left out or one of them lowered, and those of the others that are
    smaller; the smallest first.
    """
    steps = [_replay(problem, choices, lambda first, last: first) for choices in _smaller_choices(drawn.choices)]
    found = {one.choices: one for one in (*steps, *others) if one.order() < drawn.order()}
    return sorted(found.values(), key=Drawn.order)


def _smaller_choices(choices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for at, choice in enumerate(choices):
        yield choices[:at]
        for length in (1, 2, 4, 8):
            yield choices[:at] + choices[at + length :]
        for lower in {0, choice // 2, choice - 1}:
            yield (*choices[:at], lower, *choices[at + 1 :])


def _replay(problem: Problem, choices: Sequence[int], more: Pick) -> Drawn:
    """What these choices draw, each cut to its range; `more` picks where they do not reach."""
    rest, made = iter(choices), []

    def pick(first: int, last: int) -> int:
        choice = next(rest, None)
        picked = more(first, last) if choice is None else min(first + max(choice, 0), last)
        made.append(picked - first)
        return picked

    return Drawn(problem.draw(pick, pick(0, problem.kinds - 1), pick(1, LARGEST)), tuple(made))


# --- answers ----------------------------------------------------------------------------------------------------------


def call(function: Callable[..., Any], case: Case) -> Plain | _Raised:
    """A function of ours, on a copy of the inputs: what it returns, as if it had come from a child."""
    import torch  # late, so that the nursery, which is waited for, can load it at the same time

    inputs = [torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value for value in case.values()]
    try:
        return wire.decode(wire.encode(function(*inputs)))
    except Exception as error:
        return _Raised(type(error).__name__, str(error), None, None)


class _Recalling:
    """A function of ours, which is called once for a case, however often it is asked."""

    def __init__(self, problem: Problem, function: Callable[..., Any]) -> None:
        self.problem, self.function = problem, function
        self.known: dict[int, tuple[Case, Arrays | str]] = {}  # the case too: else another might get its id

    def __call__(self, case: Case) -> Arrays | str:
        if id(case) not in self.known:
            self.known[id(case)] = case, _form(self.problem, call(self.function, case))
        return self.known[id(case)][1]


def load_misconception(misconception: Misconception, name: str) -> Callable[..., Any]:
    """Its function. It is ours, and runs here."""
    namespace: dict[str, Any] = {"__name__": f"misconception_{misconception.id}"}
    exec(compile(misconception.source, str(misconception.file), "exec", dont_inherit=True), namespace)
    return namespace[name]


def read_reply(reply: bytes, cases: int, printed: Sequence[str] = ()) -> _Reply:
    """What child.py wrote for so many cases, or a beginning of it, with what was printed: while it was loaded, and in
    each call. Raises MessageError for other bytes.
    """
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
    said = (*printed[1:], *[""] * cases)
    return _Reply(
        loaded=True, answers=tuple(_read_answer(line, number, said[number]) for number, line in enumerate(lines[1:]))
    )


def _read_answer(line: bytes, number: int, printed: str) -> _Answer:
    data = wire.loads(line)
    if not isinstance(data, dict) or data.get("case") != number or not isinstance(data.get("inputs"), dict):
        raise MessageError("an answer to another case")
    inputs = {str(name): wire.decode(value) for name, value in data["inputs"].items()}
    if data.keys() == {"case", "inputs", "raised"}:
        return _Answer(_read_raised(data["raised"]), inputs, printed)
    if data.keys() == {"case", "inputs", "value"}:
        return _Answer(wire.decode(data["value"]), inputs, printed)
    raise MessageError("an answer in no known form")


def _read_raised(data: Any) -> _Raised:
    if not isinstance(data, dict) or data.keys() != {"kind", "message", "module", "line"}:
        raise MessageError("an exception in no known form")
    kind, message, module, line = data["kind"], data["message"], data["module"], data["line"]
    if not isinstance(kind, str) or not isinstance(message, str) or not isinstance(module, str | None):
        raise MessageError("an exception in no known form")
    if line is not None and type(line) is not int:
        raise MessageError("an exception in no known form")
    module = None if module is None else _one_line(module, LONGEST_KIND)
    return _Raised(_one_line(kind, LONGEST_KIND), _one_line(message, LONGEST_MESSAGE), module, line)


def _one_line(text: str, longest: int) -> str:
    return printable(" ".join(text[:longest].split()))


def find_fault(exercise: Exercise, problem: Problem, case: Case, answer: _Answer) -> _Fault | None:
    """What is wrong with one answer, if anything is. What is right is computed here, after the child has ended."""
    if isinstance(answer.value, _Raised):
        kind = f"raised:{answer.value.kind}"
        headline = f"{exercise.function} raises {answer.value.in_words()}"
        if answer.value.kind == REFUSED:
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
    return _Fault(f"value:{difference.output}", headline, difference, yours, right)


def _refusal(exercise: Exercise) -> str:
    module = exercise.solution_module
    return f"the exercise is to write this function: {module}, which holds it, cannot be imported, nor what imports it"


def _ours(value: Plain | _Raised) -> Plain:
    assert not isinstance(value, _Raised), f"the solution raises {value}"
    return value


def _form(problem: Problem, value: Plain | _Raised) -> Arrays | str:
    """An answer as it is compared with others: its arrays, or what there is instead of them."""
    if isinstance(value, _Raised):
        return f"raised {value.kind}"
    try:
        return named_arrays(problem.outputs, value)
    except UnlikeError as error:
        return str(error)


def _agree(one: Arrays | str, other: Arrays | str) -> bool:
    """Would the one be taken for the other?"""
    return one == other if isinstance(one, str) or isinstance(other, str) else same(one, other)


def _our_fault(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{type(error).__name__} in {Path(last.filename).name}, line {last.lineno}"
    return f"the judge itself failed, which is a fault of refspec ({where}): {_one_line(str(error), LONGEST_MESSAGE)}"


def _shown(array: np.ndarray) -> str:
    text = str(array.tolist())
    return text if len(text) <= 300 else f"{text[:300]} ..."
