"""Predict, then run: questions about an engine run, answered by that run.

quiz.toml holds a question, the run that it is about, and which of the run's quantities is asked for. No answer is
written down anywhere: it is measured when somebody asks.

    [[question]]
    id = "candidates"
    ask = "How many candidates does a round score?"
    measure = "candidates of a request per round"
    run = {prompts = ["def fib(n):"], topk = 4, num_steps = 3, num_draft_tokens = 16, max_new_tokens = 32}
    because = "k from the first level, k² from each of the others."
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from fractions import Fraction

from pydantic import BaseModel, ConfigDict, ValidationError

from refspec.chapters import Chapter, CourseError
from refspec.config import SamplingParams, SpecConfig
from refspec.course.runs import Observed, run_shipped
from refspec.trace import Round

LONGEST_PREDICTION = 20  # characters


class Run(BaseModel):
    """A run of the shipped models, all prompts in one batch; topk = 0 decodes plainly."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: tuple[str, ...]
    topk: int
    num_steps: int = 0
    num_draft_tokens: int = 0
    max_new_tokens: int

    def __str__(self) -> str:
        shape = f"k={self.topk} S={self.num_steps} N={self.num_draft_tokens}" if self.topk else "no speculation"
        prompts = " and ".join(f"`{prompt}`" for prompt in self.prompts)
        return f"{prompts}, {shape}, {self.max_new_tokens} new token{'s' if self.max_new_tokens > 1 else ''}"


class Question(BaseModel):
    """One question of a chapter."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    ask: str
    measure: str  # a key of MEASURES
    run: Run
    because: str


class _Quiz(BaseModel):
    model_config = ConfigDict(extra="forbid")

    question: list[Question]


MEASURES: dict[str, Callable[[Observed], int]] = {
    "rounds": lambda seen: seen.stats.rounds,
    "target forwards per round": lambda seen: _same(r.forwards["target"] for r in _uncut(seen)),
    "draft and extend forwards per round": lambda seen: _same(
        r.forwards.get("draft", 0) + r.forwards["extend"] for r in _uncut(seen)
    ),
    "candidates of a request per round": lambda seen: _same(
        len(request.candidates) for r in seen.rounds for request in r.requests
    ),
    "slots taken by draft in the first round": lambda seen: seen.rounds[0].slots_taken["draft"],
    "slots taken by verify in the first round": lambda seen: seen.rounds[0].slots_taken["verify"],
    "slots returned by commit in the first round": lambda seen: seen.rounds[0].slots_returned.get("commit", 0),
    "first accept_lens": lambda seen: _same(done.accept_lens[0] for done in seen.generations),
    "target forwards, prefill included": lambda seen: seen.stats.target_forwards + seen.stats.prefill_target_forwards,
}


def read_quiz(chapter: Chapter) -> list[Question]:
    """The chapter's questions. Raises CourseError, naming the file and what is wrong with it."""
    file = chapter.quiz
    try:
        questions = _Quiz.model_validate(tomllib.loads(file.read_text(encoding="utf-8"))).question
    except (OSError, UnicodeDecodeError) as error:
        raise CourseError(f"cannot read {file}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise CourseError(f"{file}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise CourseError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for question in questions:
        if question.measure not in MEASURES:
            raise CourseError(f"{file}: {question.id}: nothing measures {question.measure!r}")
    if len({question.id for question in questions}) < len(questions):
        raise CourseError(f"{file}: two questions have the same id")
    return questions


def answer(question: Question) -> int:
    """Run the engine and measure."""
    return MEASURES[question.measure](observe(question.run))


def observe(run: Run) -> Observed:
    """One run of the shipped target, with its EAGLE head unless topk is 0."""
    spec = None
    if run.topk:
        spec = SpecConfig(topk=run.topk, num_steps=run.num_steps, num_draft_tokens=run.num_draft_tokens)
    return run_shipped(run.prompts, spec, SamplingParams(max_new_tokens=run.max_new_tokens))


def parse_prediction(text: str) -> Fraction:
    """A whole number, a decimal or a fraction. Raises ValueError for anything else."""
    try:
        if len(text) > LONGEST_PREDICTION or "e" in text.lower():  # 1e999999999 would be a number of a billion digits
            raise ValueError
        return Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{text.strip()[:LONGEST_PREDICTION]!r} is not a number") from None


def _uncut(seen: Observed) -> list[Round]:
    """All rounds but the last, which the budget may have cut, and which needs no extend."""
    return seen.rounds[:-1]


def _same(values: Iterable[int]) -> int:
    """The value that all of them have: a question about every round must not have two answers."""
    found = set(values)
    if len(found) != 1:
        raise CourseError(f"the rounds do not agree: {sorted(found)}")
    return found.pop()
