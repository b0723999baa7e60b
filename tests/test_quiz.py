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
measure = "candidates of a request per round"
run = { prompts = ["import"], topk = 2, num_steps = 3, num_draft_tokens = 5, max_new_tokens = 12 }
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
        (GOOD.replace("candidates of a", "mood of a"), "a: nothing measures 'mood of a request per round'"),
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


@pytest.mark.parametrize("said", ["", "many", "1/0", "nan", "1e999999999", "9" * 1000])
def test_no_predictions(said: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        parse_prediction(said)


@pytest.mark.parametrize(("topk", "num_steps", "num_draft_tokens"), [(4, 3, 16), (1, 5, 6), (2, 1, 3)])
@pytest.mark.parametrize("prompts", [("def f(",), ("def f(", "import os, sys")])
def test_measures_on_other_shapes(prompts: tuple[str, ...], topk: int, num_steps: int, num_draft_tokens: int) -> None:
    """What each measure says follows from b, k, S and N, not from one run of one shape."""
    shape = {"topk": topk, "num_steps": num_steps, "num_draft_tokens": num_draft_tokens}
    seen = observe(Run(prompts=prompts, max_new_tokens=24, **shape))
    new = [len(request.committed) for request in seen.rounds[0].requests]
    expected = {
        "rounds": len(seen.rounds),
        "target forwards per round": 1,
        "draft and extend forwards per round": num_steps,
        "candidates of a request per round": topk + (num_steps - 1) * topk**2,
        "slots taken by draft in the first round": len(prompts) * topk * num_steps,
        "slots taken by verify in the first round": len(prompts) * num_draft_tokens,
        "slots returned by commit in the first round": len(prompts) * num_draft_tokens - sum(new),
        "target forwards, prefill included": 1 + len(seen.rounds),
    }
    if len(set(new)) == 1:
        expected["first accept_lens"] = new[0]
    measured = {name: measure(seen) for name, measure in MEASURES.items() if name in expected}
    assert measured == expected
    assert set(MEASURES) - set(expected) <= {"first accept_lens"}


def test_chapter_1_asks_what_its_runs_can_answer() -> None:
    answers = {question.id: answer(question) for question in read_quiz(find_chapter("1"))}
    assert answers == {
        "chain-forwards": 5,
        "chain-candidates": 5,
        "wide-slots": 16,
        "two-target-forwards": 1,
        "two-verify-slots": 32,
        "cut-accept-lens": 3,
        "cut-slots": 13,
        "one-token": 0,
        "plain": 32,
    }


def test_what_chapter_1_takes_for_granted_in_a_question() -> None:
    """It says that the target accepts three drafts, more than the budget has room for."""
    [question] = [q for q in read_quiz(find_chapter("1")) if q.id == "cut-accept-lens"]
    assert "accepts 3 drafts" in question.ask
    assert len(observe(question.run).rounds[0].requests[0].accepted_rows) == 1 + 3


def test_json_is_one_document_with_the_answers() -> None:
    result = runner.invoke(app, ["quiz", "01", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["chapter"] == "01_one_round"
    assert all(isinstance(question["answer"], int) for question in found["questions"])


def test_predictions_are_judged_and_counted() -> None:
    result = runner.invoke(app, ["quiz", "01"], input="5\nmany\n7\n\nq\n")
    assert result.exit_code == 0
    assert "the engine: 5: foretold" in result.stdout
    assert "'many' is not a number" in result.stdout
    assert "the engine: 5: not what you said" in result.stdout
    assert "1 of 3 foretold." in result.stdout


def test_the_end_of_input_ends_the_asking() -> None:
    result = runner.invoke(app, ["quiz", "01"], input="")
    assert result.exit_code == 0
    assert "0 of 0 foretold." in result.stdout


def test_an_unknown_chapter_is_one_line() -> None:
    result = runner.invoke(app, ["quiz", "99"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "there is no chapter 99, there are: 01_one_round" in result.stderr
