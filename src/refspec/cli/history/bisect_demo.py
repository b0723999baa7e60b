"""`refspec history bisect-demo`: bisection, shown on a small repository and prepared for SGLang."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refspec.cli.command_line import UsageError
from refspec.cli.diff_colours import styled
from refspec.cli.history.options import Json, Pager, place
from refspec.cli.history.output import paged, print_json, shown, wrapped
from refspec.history import bisect_demo as lessons
from refspec.history import catalogue, demo_repository
from refspec.history.bisect_demo import DemoCommit, Lesson

if TYPE_CHECKING:
    from rich.console import Console

PROSE = 88  # columns at most
LABELS = {"good": "green", "bad": "red", "skip": "yellow"}


def bisect_demo(
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="DIR", parser=place, help="Make the repository there, and leave it there."),
    ] = None,
    where: Annotated[
        int,
        typer.Option(
            "--where",
            metavar="N",
            help=f"Let the commit to be found be the N-th of the {demo_repository.BEHIND}; another N, another search.",
        ),
    ] = demo_repository.USUAL_PLACE,
    as_json: Json = False,
    pager: Pager = True,
) -> None:
    """A lesson: find the commit that changed the number of draft forwards, with git bisect. Needs no clone."""
    if where not in demo_repository.PLACES:
        raise UsageError(
            f"--where takes 1 to {demo_repository.BEHIND}, except {_taken()}, where others have to be: {where}"
        )
    with lessons.place(keep) as folder:
        lesson = lessons.teach(folder, where)
    if as_json:
        print_json(_document(lesson, keep))
        return
    with paged(pager) as out:
        _show(out, lesson, keep)


def _taken() -> str:
    return f"{demo_repository.UNRUNNABLE} and {demo_repository.UNRUNNABLE + 1}"


def _document(lesson: Lesson, keep: Path | None) -> dict[str, Any]:
    return {
        "folder": str(keep) if keep else None,
        "expected_forwards": demo_repository.NUM_STEPS,
        "run_script": lessons.RUN_SCRIPT,
        **asdict(lesson),
        "culprit": asdict(lesson.suspects[0]) if len(lesson.suspects) == 1 else None,
        "sglang": {
            "more": lessons.MORE,
            "fewer": lessons.FEWER,
            "file": lessons.SGLANG_FILE,
            "script": lessons.SGLANG_SCRIPT,
            "commands": list(lessons.SGLANG_COMMANDS),
            "answer": lessons.SGLANG_ANSWER,
        },
    }


def _show(out: Console, lesson: Lesson, keep: Path | None) -> None:
    good, bad, number = lesson.good, lesson.bad, len(lesson.commits)
    _heading(out, "The question")
    _prose(
        out,
        f"A small project drafts {demo_repository.NUM_STEPS} tokens a round. Its extend makes the first guess, a loop "
        f"the others, so {demo_repository.NUM_STEPS} forwards of the draft model are enough. Two of its commits:",
    )
    for end in (good, bad):
        tests = "its tests pass" if end.passes else "its tests fail"
        _line(out, f"  {end.name:5} {_named(end.commit)}")
        _line(out, f"        {shown(end.said)}; {tests}", LABELS[end.answer])
    _prose(
        out,
        "The tests have nothing to complain of: nobody reads what the last forward says, so the tokens are the same. "
        f"Only a count tells the two apart. Which of the {number} commits after v0.1 was it?",
    )

    _heading(out, "What is measured")
    _prose(
        out,
        f"git bisect run starts {lessons.SCRIPT} at each commit that it picks, and reads its exit status: 0 is good, "
        "1 is bad, 125 cannot be tested; 128 and above end the search. The script counts calls, which are the same on "
        "every machine, not seconds. It lies outside the repository, or each checkout would change it. It brings its "
        "own counter and relies on names alone that all these commits have, so files may be renamed.",
    )
    _code(out, lessons.RUN_SCRIPT)

    _heading(out, "The search")
    _line(out, f"  $ git bisect start {bad.name} {good.name}")
    _line(out, f"    {number} commits may be it")
    for step, trial in enumerate(lesson.trials, start=1):
        _line(out, f"{step:3} {_named(trial.commit)}")
        left = f"{trial.left} may be it" if trial.left > 1 else "1 is left"
        _line(out, f"    {shown(trial.said)}: exit {trial.status}, {trial.answer}; {left}", LABELS[trial.answer])
    tried = f"{len(lesson.trials)} of {number} commits were tried."
    if any(trial.answer == "skip" for trial in lesson.trials):
        tried += (
            " One that cannot run says nothing about the draft: taken for bad, it might have sent the search the wrong "
            "way. Skipped, it costs a step. Had it come right before the commit looked for, git could not have told "
            "the two apart, and would have named both."
        )
    _prose(out, tried)

    _heading(out, "The commit")
    for suspect in lesson.suspects:
        _line(out, f"  {_named(suspect)}, {suspect.date}", "bold")
    if lesson.diff:
        _diff(out, lesson.diff)
        _prose(
            out,
            "It looks like tidying, and it passes the tests. But the loop now makes one more forward, which nobody "
            "reads: each round is slower, and the tokens are the same.",
        )
    if keep:
        _prose(out, "All of it once more, by git alone:")
        _code(
            out,
            f"cd {shlex.quote(str(keep / lessons.REPOSITORY))}\ngit bisect start {bad.name} {good.name}\n"
            f"git bisect run python3 ../{lessons.SCRIPT}\ngit bisect reset\n",
        )
    else:
        _prose(out, "With --keep DIR, the repository and the script stay, to be searched once more by git bisect run.")
    _show_sglang(out)


def _show_sglang(out: Console) -> None:
    known = catalogue.commits_by_hash()
    first, answer = known[lessons.MORE], known[lessons.SGLANG_ANSWER]
    _heading(out, "The same on SGLang")
    _prose(
        out,
        f"SGLang's first EAGLE-2 worker ({first.hash[:10]}, {first.author_date[:10]}) made num_steps + 1 draft "
        f"forwards a round, and {lessons.FEWER} makes num_steps. Fewer is no fault; so that nobody has to call it bad, "
        "git takes other words for old and new. To count calls there as above takes a GPU, compiled kernels and, at "
        "each commit, the packages of its day. What can be done anywhere is to read the source: does the loop over "
        "num_steps leave before its last forward? That is less than a count: another way to save a forward would "
        f"escape it. Save this as {lessons.SOURCE_SCRIPT} beside a full clone with tags (--keep DIR puts it into DIR):",
    )
    _code(out, lessons.SGLANG_SCRIPT)
    _prose(
        out,
        "Then, in the clone, which git bisect writes its notes into until the reset. Of the 1,414 commits between the "
        "two, 27 touch the file; five of those are looked at, and none is checked out.",
    )
    _code(out, "".join(f"{command}\n" for command in lessons.SGLANG_COMMANDS))
    _prose(out, "It ends at:")
    _line(out, f"  {answer.hash[:10]} {shown(answer.subject)}, {answer.author_date[:10]}", "bold")


def _named(commit: DemoCommit) -> str:
    return f"{commit.hash[:10]} {shown(commit.subject)}"


def _heading(out: Console, text: str) -> None:
    out.print()
    out.print(text, style="bold underline")


def _prose(out: Console, text: str) -> None:
    _wrapped(out, text, min(out.width, PROSE))


def _line(out: Console, text: str, style: str = "") -> None:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    _wrapped(out, text, out.width, style, indent)


def _wrapped(out: Console, text: str, width: int, style: str = "", indent: str = "") -> None:
    for line in wrapped(text, width, others=indent):
        out.print(line, style=style or None, soft_wrap=True)


def _code(out: Console, text: str) -> None:
    for line in text.splitlines():
        out.print(f"    {line}".rstrip(), style="cyan", soft_wrap=True)


def _diff(out: Console, text: str) -> None:
    for line, style in styled(text.splitlines()):
        out.print(f"    {shown(line)}".rstrip(), style=style, soft_wrap=True)
