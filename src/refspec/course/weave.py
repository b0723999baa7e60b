"""From a lesson to a page: prose stays, and each directive becomes what the code says now.

A directive is a line of its own:

    {{ code NAME }}         a section of the sources (see sections.py)
    {{ figure NAME }}       a drawing of figures.py, as SVG in the page
    {{ replay KEY=VALUE }}  a recorded run, to be stepped through: prompt, topk, num_steps, num_draft_tokens,
                            max_new_tokens, and the round to show first
    {{ example NAME }}      a table of the example that is worked out by hand (example.py)
    {{ quiz }}              the chapter's questions, without answers
    {{ exercise ID }}       what is to be done, and the commands
    {{ commits }}           commits.toml as a table

Nothing is pasted into a lesson, so nothing in it can go stale: a section that is missing fails the build, and so
does one that no lesson includes.
"""

from __future__ import annotations

import html
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from refspec.chapters import REPOSITORY, SOURCES, Chapter, CourseError, find_chapters
from refspec.config import SamplingParams, SpecConfig
from refspec.course.example import TABLES
from refspec.course.figures import FIGURES
from refspec.course.quiz import Run, read_quiz
from refspec.course.runs import record_run
from refspec.course.sections import Section, find_sections
from refspec.grader.exercise import Exercise, load_exercises

DIRECTIVE = re.compile(r"\{\{(.*)\}\}")
REPLAY_KEYS = ("prompt", "topk", "num_steps", "num_draft_tokens", "max_new_tokens", "round")
SGLANG = "https://github.com/sgl-project/sglang"


@dataclass(frozen=True)
class Woven:
    """A page, and which sections it took in."""

    markdown: str
    sections: frozenset[str]


class Commit(BaseModel):
    """A commit of SGLang that belongs to a chapter. Facts, and what it changed in our words."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hash: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
    date: Annotated[str, Field(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]  # the author's day
    pr: int
    title: str
    changed: str


class _Commits(BaseModel):
    model_config = ConfigDict(extra="forbid")

    commit: list[Commit]


def weave_course() -> dict[str, Woven]:
    """All chapters, by name. Raises CourseError as `weave_chapter` does, and for a section that none includes."""
    sections = find_sections()
    woven = {chapter.name: weave_chapter(chapter, sections) for chapter in find_chapters()}
    unused = set(sections) - {name for page in woven.values() for name in page.sections}
    if unused:
        section = sections[min(unused)]
        raise CourseError(f"{section.file}:{section.first_line}: section {section.name} is in no lesson")
    return woven


def weave_chapter(chapter: Chapter, sections: dict[str, Section] | None = None) -> Woven:
    """One chapter. Raises CourseError, with file and line, for a directive that cannot be followed."""
    return _Weaver(chapter, find_sections() if sections is None else sections).weave()


class _Weaver:
    def __init__(self, chapter: Chapter, sections: dict[str, Section]) -> None:
        self.chapter, self.sections = chapter, sections
        self.exercises: dict[str, Exercise] = {exercise.id: exercise for exercise in load_exercises(chapter)}
        self.used: set[str] = set()
        self.directives: dict[str, Callable[[list[str]], str]] = {
            "code": self._code,
            "figure": self._figure,
            "replay": self._replay,
            "example": self._example,
            "quiz": self._quiz,
            "exercise": self._exercise,
            "commits": self._commits,
        }

    def weave(self) -> Woven:
        try:
            lines = self.chapter.lesson.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise CourseError(f"cannot read {self.chapter.lesson}: {error}") from None
        assert self.chapter.title  # raises CourseError for a lesson without a heading
        woven = [self._line(number, line) for number, line in enumerate(lines, start=1)]
        return Woven("\n".join(woven) + "\n", frozenset(self.used))

    def _line(self, number: int, line: str) -> str:
        if "{{" not in line:
            return line
        where = f"{self.chapter.lesson}:{number}"
        try:
            directive = DIRECTIVE.fullmatch(line)
            if directive is None:
                raise CourseError(f"a directive must be closed, and have its line to itself: {line.strip()}")
            name, *arguments = shlex.split(directive[1]) or [""]
            if name not in self.directives:
                raise CourseError(f"there is no directive {name!r}, there are: {', '.join(self.directives)}")
            return self.directives[name](arguments)
        except ValueError as error:
            raise CourseError(f"{where}: {error}") from None

    def _code(self, arguments: list[str]) -> str:
        name = _only(arguments)
        section = self.sections.get(name)
        if section is None:
            raise CourseError(f"there is no section {name} in {SOURCES}")
        self.used.add(name)
        file = section.file.relative_to(REPOSITORY).as_posix()
        title = f"{file}, lines {section.first_line} to {section.last_line}"
        return f'```python title="{title}"\n{section.code}\n```'

    def _figure(self, arguments: list[str]) -> str:
        name = _only(arguments)
        if name not in FIGURES:
            raise CourseError(f"there is no figure {name}, there are: {', '.join(FIGURES)}")
        return FIGURES[name]()

    def _replay(self, arguments: list[str]) -> str:
        given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
        if sorted(given) != sorted(REPLAY_KEYS) or len(given) < len(arguments):
            raise CourseError(f"replay takes just these: {' '.join(f'{key}=...' for key in REPLAY_KEYS)}")
        prompt, first_round = given["prompt"], int(given["round"])
        k, s, n = (int(given[key]) for key in ("topk", "num_steps", "num_draft_tokens"))
        spec = SpecConfig(topk=k, num_steps=s, num_draft_tokens=n)
        trace = record_run(prompt, spec, SamplingParams(max_new_tokens=int(given["max_new_tokens"])))
        if not 0 <= first_round < len(trace.rounds):
            raise CourseError(f"the run has no round {first_round}, its last is {len(trace.rounds) - 1}")
        data = trace.model_dump_json().replace("</", "<\\/")  # or a token </script> would end the element
        return (
            f'<div class="refspec-replay" data-round="{first_round}" data-request="0">'
            f'<script type="application/json">{data}</script>'
            f"<noscript>The replay needs JavaScript. In a terminal: <code>refspec generate "
            f"{html.escape(shlex.quote(prompt))} --watch</code></noscript></div>"
        )

    def _example(self, arguments: list[str]) -> str:
        name = _only(arguments)
        if name not in TABLES:
            raise CourseError(f"there is no table {name}, there are: {', '.join(TABLES)}")
        return TABLES[name]()

    def _quiz(self, arguments: list[str]) -> str:
        _none(arguments)
        questions = read_quiz(self.chapter)
        by_run: dict[Run, list[int]] = {}
        for number, question in enumerate(questions, start=1):
            by_run.setdefault(question.run, []).append(number)
        runs = [f"- {_numbers(numbers)}: {run}" for run, numbers in by_run.items()]
        asked = [f"{number}. {question.ask}" for number, question in enumerate(questions, start=1)]
        command = f"```bash\nrefspec quiz {self.chapter.number}\n```"
        return "\n".join([*asked, "", "The runs that they are about:", "", *runs, "", command])

    def _exercise(self, arguments: list[str]) -> str:
        name = _only(arguments)
        if name not in self.exercises:
            raise CourseError(f"there is no exercise {name}, there are: {', '.join(self.exercises)}")
        exercise = self.exercises[name]
        task = exercise.task.strip().splitlines()
        commands = [f"refspec start {self.chapter.number}", f"refspec grade {name}", f"refspec hint {name}"]
        block = [*task, "", "```bash", *commands, "```"]
        return "\n".join([f'!!! exercise "{exercise.title}"', *(f"    {line}".rstrip() for line in block)])

    def _commits(self, arguments: list[str]) -> str:
        _none(arguments)
        rows = ["| day | commit | what it changed |", "|---|---|---|"]
        for commit in read_commits(self.chapter):
            link = f"[`{commit.hash[:10]}`]({SGLANG}/commit/{commit.hash})"
            pr = f"[#{commit.pr}]({SGLANG}/pull/{commit.pr})"
            title = commit.title.replace("|", "\\|")
            rows.append(f"| <time>{commit.date}</time> | {link} {title} ({pr}) | {commit.changed} |")
        return "\n".join(rows)


def read_commits(chapter: Chapter) -> list[Commit]:
    """The chapter's commits.toml. Raises CourseError, naming the file and what is wrong with it."""
    file = chapter.folder / "commits.toml"
    try:
        return _Commits.model_validate(tomllib.loads(file.read_text(encoding="utf-8"))).commit
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CourseError(f"cannot read {file}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise CourseError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _only(arguments: list[str]) -> str:
    if len(arguments) != 1:
        raise CourseError(f"one name must follow, not {len(arguments)}")
    return arguments[0]


def _none(arguments: list[str]) -> None:
    if arguments:
        raise CourseError(f"nothing may follow, but there is: {' '.join(arguments)}")


def _numbers(numbers: list[int]) -> str:
    """As in: questions 1, 2 and 5."""
    *most, last = map(str, numbers)
    return f"questions {', '.join(most)} and {last}" if most else f"question {last}"
