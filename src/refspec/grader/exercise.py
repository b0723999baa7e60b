"""What an exercise is made of: files in its chapter, and the package's own function, which is its solution.

    exercises/<id>.toml            title, task, function, solution, hints
    exercises/<id>.py              the skeleton that a learner starts from
    misconceptions/<id>/<name>.py  whole wrong solutions; the docstring is what a tutor would say

The solution is never typed a second time: its body is read from the package, so that it cannot drift.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refspec.chapters import Chapter, CourseError, find_chapters

HINTS = ("the idea", "what must hold", "in pseudo-code", "the difference")  # the last is computed


@dataclass(frozen=True)
class Misconception:
    """A wrong solution that somebody would really write."""

    id: str
    sentence: str  # what a tutor would say to them
    source: str
    file: Path


@dataclass(frozen=True)
class Exercise:
    """One function to write."""

    chapter: Chapter
    id: str
    title: str
    task: str  # Markdown
    function: str  # its name in the learner's file
    solution: str  # module:function, in this package
    hints: tuple[str, ...]  # three; solution_diff makes the fourth
    skeleton: str

    @property
    def solution_module(self) -> str:
        return self.solution.partition(":")[0]

    @property
    def misconceptions(self) -> list[Misconception]:
        """The bank, by name. Raises CourseError for one that says nothing to the learner."""
        found = []
        for file in sorted((self.chapter.folder / "misconceptions" / self.id).glob("*.py")):
            source = file.read_text(encoding="utf-8")
            sentence = ast.get_docstring(ast.parse(source, filename=str(file)))
            if not sentence:
                raise CourseError(f"{file} has no docstring: it is what the learner is told")
            found.append(Misconception(file.stem, " ".join(sentence.split()), source, file))
        return found

    def reference(self) -> Callable[..., Any]:
        """The package's own function. Imports its module, and torch with it."""
        module, _, name = self.solution.partition(":")
        return getattr(importlib.import_module(module), name)

    def solution_text(self) -> str:
        """The skeleton with the body of the package's function in place of its own."""
        package_lines, _, package_body, package_end = _function_lines(
            textwrap.dedent(inspect.getsource(self.reference())), self.reference().__name__
        )
        lines, _, body, end = _function_lines(self.skeleton, self.function)
        return "".join([*lines[:body], *package_lines[package_body:package_end], *lines[end:]])

    def solution_diff(self, text: str) -> str:
        """From a learner's text to the solution, as a unified diff; empty where they are the same."""
        before, after = text.splitlines(keepends=True), self.solution_text().splitlines(keepends=True)
        if before and not before[-1].endswith("\n"):
            before[-1] += "\n"
        return "".join(difflib.unified_diff(before, after, f"{self.id}.py", "solution"))


def load_exercises(chapter: Chapter) -> list[Exercise]:
    """Those of one chapter, by id. Raises CourseError, naming the file, for one that is not whole."""
    return [_load(chapter, file) for file in sorted((chapter.folder / "exercises").glob("*.toml"))]


def all_exercises(folder: Path | None = None) -> list[Exercise]:
    """Those of all chapters, in the order of the course; folder: another one than the repository's chapters/."""
    return [exercise for chapter in find_chapters(folder) for exercise in load_exercises(chapter)]


def find_exercise(name: str, folder: Path | None = None) -> Exercise:
    """By its id or a beginning of it that no other has. Raises CourseError, naming those that there are."""
    exercises = all_exercises(folder)
    found = [exercise for exercise in exercises if exercise.id == name]
    found = found or [exercise for exercise in exercises if name and exercise.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise CourseError(f"{name} may be any of: {', '.join(exercise.id for exercise in found)}")
    raise CourseError(f"there is no exercise {name}, there are: {', '.join(exercise.id for exercise in exercises)}")


def select_exercises(name: str | None, folder: Path | None = None) -> list[Exercise]:
    """All, those of a chapter (1, 01 or its name), or one. Raises CourseError as find_exercise does."""
    exercises = all_exercises(folder)
    if name is None:
        return exercises
    number = f"{int(name):02}" if name.isascii() and name.isdigit() else name
    of_chapter = [exercise for exercise in exercises if number in (exercise.chapter.number, exercise.chapter.name)]
    return of_chapter or [find_exercise(name, folder)]


def _load(chapter: Chapter, file: Path) -> Exercise:
    try:
        with file.open("rb") as stream:
            data = tomllib.load(stream)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CourseError(f"{file}: {error}") from None
    texts, hints = ("title", "task", "function", "solution"), data.get("hints")
    if set(data) != {*texts, "hints"} or not all(isinstance(data[key], str) and data[key].strip() for key in texts):
        raise CourseError(f"{file} must hold the texts {', '.join(texts)}, and hints")
    if not isinstance(hints, list) or len(hints) != len(HINTS) - 1 or not all(isinstance(hint, str) for hint in hints):
        raise CourseError(f"{file} must hold {len(HINTS) - 1} hints: {', '.join(HINTS[:-1])}")
    skeleton_file = file.with_suffix(".py")
    if not skeleton_file.is_file():
        raise CourseError(f"{file} has no skeleton beside it: {skeleton_file.name}")
    return Exercise(
        chapter=chapter,
        id=file.stem,
        title=data["title"].strip(),
        task=data["task"].strip(),
        function=data["function"],
        solution=data["solution"],
        hints=tuple(hint.strip() for hint in hints),
        skeleton=skeleton_file.read_text(encoding="utf-8"),
    )


def _function_lines(source: str, name: str) -> tuple[list[str], int, int, int]:
    """The lines, and of one function in them: where it begins, where its body does (after the docstring), its end."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            assert node.end_lineno is not None
            before_body = node.body[0].lineno - 1
            if ast.get_docstring(node) is not None:
                assert node.body[0].end_lineno is not None
                before_body = node.body[0].end_lineno
            return source.splitlines(keepends=True), node.lineno - 1, before_body, node.end_lineno
    raise CourseError(f"no function {name} where one is expected")
