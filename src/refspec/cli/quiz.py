"""`refspec quiz`: predict, then run."""

from __future__ import annotations

import json
import textwrap
from contextlib import nullcontext
from typing import Annotated

import typer
from rich.console import Console

from refspec.chapters import CourseError, find_chapter
from refspec.cli.command_line import UsageError, shows_progress
from refspec.course.quiz import Question, answer, parse_prediction, read_quiz


def quiz(
    chapter: Annotated[str, typer.Argument(help="The chapter's number or name, as in 01.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Ask nothing; print questions and measured answers as JSON.")
    ] = False,
) -> None:
    """Predict what the engine will do, then have it do it.

    Nothing is looked up: each answer is measured on a run that is made when you have said yours.
    """
    try:
        found = find_chapter(chapter)
    except CourseError as error:
        raise UsageError(str(error)) from None
    questions = read_quiz(found)
    if as_json:
        answered = [{**question.model_dump(), "answer": answer(question)} for question in questions]
        typer.echo(json.dumps({"chapter": found.name, "questions": answered}))
        return
    console = Console(highlight=False)
    console.print(found.title, style="bold", markup=False)
    console.print(f"{len(questions)} questions. A number answers, Enter passes, q ends.\n")
    right = asked = 0
    for number, question in enumerate(questions, start=1):
        console.print(f"[bold]{number}.[/] ", end="")
        console.print(question.ask, markup=False)
        console.print(f"   {question.run}\n", style="dim", markup=False)
        try:
            prediction = _ask(console)
        except EOFError:
            console.print()
            break
        asked += 1
        with Console(stderr=True).status("running the engine") if shows_progress(as_json) else nullcontext():
            measured = answer(question)
        right += prediction == measured
        _tell(console, question, measured, passed=prediction is None, was_right=prediction == measured)
    console.print(f"{right} of {asked} foretold.")


def _ask(console: Console) -> object:
    """The prediction, None for none. Raises EOFError when the asking is over."""
    while True:
        said = console.input("   your prediction: ").strip()
        if said.lower() in ("q", "quit"):
            raise EOFError
        if not said:
            return None
        try:
            return parse_prediction(said)
        except ValueError as error:
            console.print(f"   {error}: a number, Enter, or q", markup=False)


def _tell(console: Console, question: Question, measured: int, passed: bool, was_right: bool) -> None:
    verdict = "" if passed else ": foretold" if was_right else ": not what you said"
    style = "" if passed else "green" if was_right else "red"
    console.print(f"   the engine: {measured}{verdict}", style=style)
    console.print(textwrap.indent(textwrap.fill(question.because, console.width - 4), "   "), markup=False)
    console.print()
