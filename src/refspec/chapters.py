"""Where the course is: a folder for each chapter, and the notebooks, beside the code that they are made from.

They are not part of the package: they are read and edited in a clone of the repository, and `pip install -e` of that
clone finds them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent


class CourseError(ValueError):
    """A chapter, an exercise or a lesson that is missing or contradicts itself."""


@dataclass(frozen=True)
class Chapter:
    """One folder of chapters/: lesson.md, quiz.toml, exercises/, misconceptions/."""

    folder: Path

    @property
    def name(self) -> str:
        """As in 01_one_round."""
        return self.folder.name

    @property
    def number(self) -> str:
        """As in 01."""
        return self.name.partition("_")[0]

    @property
    def lesson(self) -> Path:
        return self.folder / "lesson.md"

    @property
    def quiz(self) -> Path:
        return self.folder / "quiz.toml"

    @property
    def title(self) -> str:
        """The lesson's first heading. Raises CourseError if it has none."""
        for line in self.lesson.read_text(encoding="utf-8").splitlines():
            if line.startswith("# "):
                return line[2:].strip()
        raise CourseError(f"{self.lesson} has no heading")


def find_chapters(folder: Path | None = None) -> list[Chapter]:
    """All chapters in their order; folder: another one than the repository's chapters/.

    Raises CourseError, saying what to do, where there are none.
    """
    folder = folder or REPOSITORY / "chapters"
    names = sorted(folder.glob("[0-9][0-9]_*/lesson.md")) if folder.is_dir() else []
    if not names:
        raise CourseError(
            f"no chapters in {folder}: the course comes with a clone of the repository; "
            "install refspec from one (scripts/start.sh does)"
        )
    return [Chapter(lesson.parent) for lesson in names]


def find_chapter(name: str, folder: Path | None = None) -> Chapter:
    """By its number (1 or 01) or its name. Raises CourseError, naming those that there are."""
    chapters = find_chapters(folder)
    number = f"{int(name):02}" if re.fullmatch(r"[0-9]{1,2}", name) else name
    for chapter in chapters:
        if number in (chapter.number, chapter.name):
            return chapter
    raise CourseError(f"there is no chapter {name}, there are: {', '.join(chapter.name for chapter in chapters)}")


def find_notebooks(folder: Path | None = None) -> list[Path]:
    """All notebooks in their order, if there are any; folder: another one than the repository's notebooks/."""
    return sorted((folder or REPOSITORY / "notebooks").glob("[0-9][0-9]_*.py"))
