"""`refspec exercises`, `start`, `grade`, `hint` and `reset`: the learner's side of the course."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from refspec.chapters import CourseError
from refspec.cli.command_line import UsageError, shows_progress
from refspec.cli.diff_colours import styled
from refspec.cli.whole_file import whole_file
from refspec.cli.wording import plural
from refspec.grader.exercise import HINTS, Exercise, all_exercises, find_exercise, select_exercises
from refspec.grader.limits import Limits
from refspec.grader.workspace import Workspace, WorkspaceError, find_workspace, read_file, submitted_file
from refspec.printable import printable

if TYPE_CHECKING:
    from refspec.grader.judge import Judge, Result

STATES = {
    "not_started": "not started",
    "unchanged": "as it was given",
    "changed": "begun",
    "passed": "passed",
}
# mark, its plain form, style, words
VERDICTS = {
    "pass": ("✓", "+", "bold green", "passed"),
    "fail": ("✗", "x", "bold red", "failed"),
    "error": ("✗", "x", "bold red", "cannot run"),
    "timeout": ("✗", "x", "bold red", "ran out of time"),
    "not_started": ("·", "-", "dim", "not started"),
}
LOOK_EVERY_SECONDS = 0.2
MOST_PRINTED_LINES = 12
TIME_LIMITS = 0.1, 3600.0  # seconds

WorkspaceOption = Annotated[
    Path | None,
    typer.Option(
        "--workspace",
        metavar="DIR",
        envvar="REFSPEC_WORKSPACE",
        help="Where your files are.",
        show_default="the nearest folder workspace/ that refspec start has made",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")]


def exercises(workspace: WorkspaceOption = None, as_json: JsonOption = False) -> None:
    """List the exercises, and how far you are."""
    place, known = find_workspace(workspace), all_exercises()
    if as_json:
        rows = [_as_row(place, exercise) for exercise in known]
        typer.echo(json.dumps({"workspace": str(place.folder), "exercises": rows}))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("exercise", "chapter", "", "state"):
        table.add_column(heading)
    for exercise in known:
        state = place.state(exercise)
        style = {"passed": "green", "not_started": "dim"}.get(state, "")
        table.add_row(exercise.id, exercise.chapter.name, exercise.title, Text(STATES[state], style=style))
    console = Console(highlight=False)
    console.print(table)
    unstarted = [exercise for exercise in known if place.state(exercise) == "not_started"]
    if unstarted:
        console.print(f"\nTo begin: refspec start {unstarted[0].chapter.number}")


def start(
    chapter: Annotated[str, typer.Argument(help="A chapter, as in 01, or one exercise.")],
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put a chapter's exercises into your workspace. What you have there already stays as it is."""
    place = find_workspace(workspace)
    with _as_usage():
        chosen = select_exercises(chapter)
    made = {exercise.id: place.start(exercise) for exercise in chosen}
    if as_json:
        rows = [{**_as_row(place, exercise), "made": made[exercise.id]} for exercise in chosen]
        typer.echo(json.dumps({"workspace": str(place.folder), "exercises": rows}))
        return
    for exercise in chosen:
        note = exercise.title if made[exercise.id] else "there already, and left as it is"
        typer.echo(f"{_near(place.file(exercise))}\n    {note}")
    typer.echo(f"\nOpen one of them in your editor. To check it: refspec grade {chosen[0].id}")


def grade(
    name: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="An exercise, or a chapter.", show_default="all of them")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Grade again whenever a file changes.")] = False,
    submission: Annotated[
        str | None, typer.Option(metavar="DIR", help="Grade the files in this folder, and write nothing there.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML, too.")] = None,
    gradescope: Annotated[Path | None, typer.Option(metavar="FILE", help="Write Gradescope's JSON, too.")] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Draw the unseen cases of an earlier run again.")
    ] = None,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="For each exercise.")] = Limits.seconds,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge your files: by a few examples, which you are shown, and by cases that you have not seen.

    Exit status 0 if all that was graded passed, 1 if not, or if there was nothing to grade. An exercise that you name,
    or any of a submission, must be there to pass.

    Files run as you, with your files and network within reach: read those of strangers first, or grade in a container.
    A pass says that the outputs were right for the cases tried, not who wrote the file or that it is right for all.
    """
    if watch and (as_json or junit or gradescope or submission):
        raise UsageError("--watch shows your workspace on a terminal: leave --json and the other options out")
    if not TIME_LIMITS[0] <= time_limit <= TIME_LIMITS[1]:
        raise UsageError(f"--time-limit is {time_limit:g}: it must be {TIME_LIMITS[0]:g} to {TIME_LIMITS[1]:g} seconds")
    folder = None if submission is None else Path(submission)
    if folder is not None and not (submission and folder.is_dir()):
        raise UsageError(f"--submission {submission or '(empty)'} is not a folder")
    with _as_usage():
        chosen = select_exercises(name)
    place = find_workspace(workspace) if folder is None else None
    files = {
        exercise.id: place.file(exercise) if place else submitted_file(folder or Path(), exercise)
        for exercise in chosen
    }
    limits, console = Limits(seconds=time_limit), Console(highlight=False)
    if seed is None and not watch:
        seed = secrets.randbelow(2**31)
    from refspec.grader.judge import Judge

    with ExitStack() as stack:
        save_junit, save_gradescope = (
            file and stack.enter_context(whole_file(file, "the report")) for file in (junit, gradescope)
        )
        judge = stack.enter_context(Judge(limits, seed))
        if watch:
            assert place is not None
            _watch(judge, place, chosen, console)
        errors = Console(stderr=True, highlight=False)
        with errors.status("grading") if shows_progress(as_json) else nullcontext():
            results = [_graded(judge, place, exercise, files[exercise.id]) for exercise in chosen]
        from refspec.grader import report

        if save_junit:
            save_junit(lambda path: path.write_bytes(report.as_junit(results)))
        if save_gradescope:
            save_gradescope(lambda path: path.write_text(json.dumps(report.as_gradescope(results), indent=2)))
    if as_json:
        typer.echo(json.dumps(report.as_json(results, limits)))
    else:
        _show(console, results, folder)
    expected = [
        result for result in results if submission is not None or name is not None or result.verdict != "not_started"
    ]
    raise typer.Exit(0 if expected and all(result.verdict == "pass" for result in expected) else 1)


def hint(
    exercise_id: Annotated[str, typer.Argument(metavar="ID", help="The exercise.")],
    number: Annotated[
        int,
        typer.Argument(
            metavar="[N]", min=1, max=len(HINTS), help="; ".join(f"{i}: {h}" for i, h in enumerate(HINTS, 1))
        ),
    ] = 1,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say a little more about an exercise; the last hint is the difference between your file and the solution."""
    with _as_usage():
        exercise = find_exercise(exercise_id)
    is_diff, passed = number == len(HINTS), False
    if is_diff:
        place, yours = find_workspace(workspace), exercise.skeleton
        with suppress(FileNotFoundError):
            yours = read_file(place.file(exercise)).decode("utf-8", "replace")
        passed = place.state(exercise) == "passed"
        text = exercise.solution_diff(yours) or "none: your file is the solution\n"
    else:
        text = exercise.hints[number - 1] + "\n"
    if as_json:
        document = {"id": exercise.id, "number": number, "of": len(HINTS), "kind": HINTS[number - 1], "text": text}
        typer.echo(json.dumps({**document, "passed": passed}))
        return
    console = Console(highlight=False)
    console.print(f"{exercise.title}, hint {number} of {len(HINTS)}: {HINTS[number - 1]}\n", style="bold", markup=False)
    if passed:
        console.print("Your file passes as it is. This is how the package's own function differs from it:\n")
    lines = text.splitlines()
    for line, style in styled(lines) if is_diff else ((line, "") for line in lines):
        console.print(Text(line, style=style), soft_wrap=True)
    if not is_diff:
        console.print(f"\nMore: refspec hint {exercise.id} {number + 1}", style="dim")


def reset(
    exercise_id: Annotated[str, typer.Argument(metavar="ID", help="The exercise.")],
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Begin an exercise anew. Your file is kept, under a number."""
    with _as_usage():
        exercise = find_exercise(exercise_id)
    place = find_workspace(workspace)
    kept = place.reset(exercise)
    if as_json:
        typer.echo(json.dumps({**_as_row(place, exercise), "kept": None if kept is None else str(kept)}))
        return
    typer.echo(f"{_near(place.file(exercise))} is the skeleton" + (" again" if kept else ""))
    if kept:
        typer.echo(f"What you had written is in {_near(kept)}")


@contextmanager
def _as_usage() -> Iterator[None]:
    """An exercise that does not exist is a mistake in the command: its status must not be read as a failed grade."""
    try:
        yield
    except CourseError as error:
        raise UsageError(str(error)) from None


def _as_row(place: Workspace, exercise: Exercise) -> dict[str, Any]:
    return {
        "id": exercise.id,
        "chapter": exercise.chapter.name,
        "title": exercise.title,
        "function": exercise.function,
        "file": str(place.file(exercise)),
        "state": place.state(exercise),
    }


def _near(file: Path) -> str:
    """A path as one would type it."""
    return printable(str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file))


def _graded(judge: Judge, place: Workspace | None, exercise: Exercise, file: Path) -> Result:
    result = judge.grade(exercise, file)
    if place and result.verdict == "pass" and result.digest:
        try:
            place.record_pass(exercise, result.digest)
        except OSError as error:  # it has passed all the same
            where = printable(str(error.filename or place.folder))
            typer.echo(f"refspec: that {exercise.id} passed cannot be noted: {where}: {error.strerror}", err=True)
    return result


def _watch(judge: Judge, place: Workspace, chosen: Sequence[Exercise], console: Console) -> None:
    """Until Ctrl-C."""
    seen: dict[str, bytes | None] = {}
    results: dict[str, Result] = {}
    while True:
        now = {exercise.id: _content(place.file(exercise)) for exercise in chosen}
        changed = [exercise for exercise in chosen if exercise.id not in seen or now[exercise.id] != seen[exercise.id]]
        for exercise in changed:
            results[exercise.id] = _graded(judge, place, exercise, place.file(exercise))
        if changed:
            console.clear()
            _show(console, [results[exercise.id] for exercise in chosen], say_limits=not seen)
            console.print("watching; Ctrl-C ends it", style="dim")
        seen = now
        time.sleep(LOOK_EVERY_SECONDS)


def _content(file: Path) -> bytes | None:
    try:
        return read_file(file)
    except (OSError, WorkspaceError):
        return None


def _show(console: Console, results: Sequence[Result], submission: Path | None = None, say_limits: bool = True) -> None:
    for result in results:
        _show_result(console, result)
    passed = sum(result.verdict == "pass" for result in results)
    graded = [result for result in results if result.verdict != "not_started"]
    chapter = results[0].exercise.chapter.number
    if not graded and submission is not None:
        names = " or ".join(f"{result.exercise.id}.py" for result in results)
        console.print(f"Nothing to grade: no {names} in {printable(str(submission))}", markup=False)
        return
    if not graded:
        console.print(f"Nothing to grade yet. To begin: refspec start {chapter}")
        return
    console.print(f"{passed} of {plural(len(results), 'exercise')} passed", style="bold")
    if passed == len(results) and submission is None:
        console.print(f"Next: refspec quiz {chapter}")
    seeds = sorted({result.seed for result in graded if result.unseen and result.seed is not None})
    if seeds:
        console.print(f"the unseen cases were drawn from seed {', '.join(map(str, seeds))} (--seed)", style="dim")
    not_enforced = next((result.not_enforced for result in graded if result.not_enforced), ())
    if not_enforced and say_limits:
        console.print(f"not limited on this system: {', '.join(not_enforced)}", style="dim")


def _show_result(console: Console, result: Result) -> None:
    """One headline, the picture, the thought behind it, the next step."""
    mark, plain_mark, style, words = VERDICTS[result.verdict]
    exercise = result.exercise
    head = Text.assemble(
        (plain_mark if console.options.ascii_only else mark, style), f" {exercise.id} ", (words, style)
    )
    if result.verdict in ("pass", "not_started"):
        head.append(f"  {result.headline}" if result.verdict == "pass" else "", style="dim")
        console.print(head)
    else:
        console.print(head.append(f" {result.where}" if result.where else ""))
        console.print()
        console.print(Padding(Text(result.headline, style="bold"), (0, 0, 1, 2)))
        if result.picture is not None:
            console.print(Padding(result.picture, (0, 0, 1, 2)))
        for fact in result.facts:
            console.print(Padding(Text(fact), (0, 0, 0, 2)))
        if result.facts:
            console.print()
        if result.diagnosis:
            console.print(Padding(Text(result.diagnosis), (0, 0, 1, 2)))
    _show_printed(console, result.printed)
    if result.verdict not in ("pass", "not_started"):
        read = "read the chapter (refspec site serve), then write it; " if result.unwritten else ""
        console.print(Padding(Text(f"Next: {read}refspec hint {exercise.id}"), (0, 0, 1, 2)))


def _show_printed(console: Console, printed: str) -> None:
    lines = printed.splitlines()
    if not lines:
        return
    console.print(Padding(Text("your code printed:", style="dim"), (0, 0, 0, 2)))
    for line in lines[:MOST_PRINTED_LINES]:
        console.print(Padding(Text(line), (0, 0, 0, 4)))
    if len(lines) > MOST_PRINTED_LINES:
        console.print(Padding(Text(f"and {plural(len(lines) - MOST_PRINTED_LINES, 'more line')}"), (0, 0, 0, 4)))
    console.print()
