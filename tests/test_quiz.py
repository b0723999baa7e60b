"""Questions are read, refused when they make no sense, and answered by a run; the command asks and tells."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from refspec.chapters import Chapter, CourseError, find_chapter
from refspec.cli.main import app
from refspec.course.quiz import MEASURES, Run, answer, observe, parse_prediction, read_quiz

GOOD = """
[[question]]
id = "a"
ask = "?"
measure = "candidates per round"
run = { prompt = "import", topk = 2, num_steps = 3, num_draft_tokens = 5, max_new_tokens = 12 }
because = "So."
"""
runner = CliRunner()


def chapter_with(folder: Path, quiz: str) -> Chapter:
    (folder / "quiz.toml").write_text(quiz, encoding="utf-8")
    return Chapter(folder)


def test_a_question_is_answered_by_a_run(tmp_path: Path) -> None:
    [question] = read_quiz(chapter_with(tmp_path, GOOD))
    assert answer(question) == 2 + 2 * 4


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (GOOD.replace("candidates per", "mood of the"), "a: nothing measures 'mood of the round'"),
        (GOOD + GOOD, "two questions have the same id"),
        (GOOD.replace('because = "So."', ""), "question.0.because: Field required"),
        (GOOD + "answer = 10\n", "question.0.answer: Extra inputs"),
        ("[[question", "quiz.toml: "),
    ],
)
def test_a_bad_quiz_is_refused(tmp_path: Path, wrong: str, complaint: str) -> None:
    with pytest.raises(CourseError, match=complaint):
        read_quiz(chapter_with(tmp_path, wrong))


def test_a_missing_quiz_is_named(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match=r"cannot read .*quiz\.toml"):
        read_quiz(Chapter(tmp_path))


@pytest.mark.parametrize(("said", "meant"), [("12", 12), (" 2.5 ", Fraction(5, 2)), ("1/3", Fraction(1, 3))])
def test_predictions(said: str, meant: Fraction) -> None:
    assert parse_prediction(said) == meant


@pytest.mark.parametrize("said", ["", "many", "1/0", "nan"])
def test_no_predictions(said: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        parse_prediction(said)


@pytest.mark.parametrize(("topk", "num_steps", "num_draft_tokens"), [(4, 3, 16), (1, 5, 6), (2, 1, 3)])
def test_measures_on_other_shapes(topk: int, num_steps: int, num_draft_tokens: int) -> None:
    """What each measure says follows from k, S and N, not from one run of one shape."""
    seen = observe(
        Run(prompt="def f(", topk=topk, num_steps=num_steps, num_draft_tokens=num_draft_tokens, max_new_tokens=24)
    )
    first = seen.rounds[0].requests[0]
    expected = {
        "target forwards per round": 1,
        "draft and extend forwards per round": num_steps,
        "extend forwards of the last round": 0,
        "candidates per round": topk + (num_steps - 1) * topk**2,
        "slots taken by draft per round": topk * num_steps,
        "slots returned by draft per round": topk * num_steps,
        "slots taken by verify per round": num_draft_tokens,
        "slots returned by commit in the first round": num_draft_tokens - len(first.committed),
        "output tokens less the sum of accept_lens": 1,
        "target forwards, prefill included": 1 + len(seen.rounds),
    }
    assert {name: measure(seen) for name, measure in MEASURES.items()} == expected


def test_chapter_1_asks_what_its_run_can_answer() -> None:
    questions = read_quiz(find_chapter("1"))
    assert len(questions) >= 5
    answers = {question.id: answer(question) for question in questions}
    assert answers["forwards-of-a-round"] == 3
    assert answers["candidates"] == 36
    assert answers["plain"] == 32


def test_what_chapter_1_takes_for_granted_in_a_question() -> None:
    """It says that three drafts are accepted in the first round."""
    [question] = [q for q in read_quiz(find_chapter("1")) if q.id == "verify-slots-returned"]
    assert "3 drafts are accepted" in question.ask
    assert len(observe(question.run).rounds[0].requests[0].accepted_rows) == 1 + 3


def test_json_is_one_document_with_the_answers() -> None:
    result = runner.invoke(app, ["quiz", "01", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["chapter"] == "01_one_round"
    assert all(isinstance(question["answer"], int) for question in found["questions"])


def test_predictions_are_judged_and_counted() -> None:
    result = runner.invoke(app, ["quiz", "01"], input="3\nmany\n7\n\nq\n")
    assert result.exit_code == 0
    assert "the engine: 3: foretold" in result.stdout
    assert "'many' is not a number" in result.stdout
    assert "the engine: 1: not what you said" in result.stdout
    assert "1 of 3 foretold." in result.stdout


def test_the_end_of_input_ends_the_asking() -> None:
    result = runner.invoke(app, ["quiz", "01"], input="")
    assert result.exit_code == 0
    assert "0 of 0 foretold." in result.stdout


def test_an_unknown_chapter_is_one_line() -> None:
    result = runner.invoke(app, ["quiz", "99"])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "there is no chapter 99, there are: 01_one_round" in result.stderr
