"""Where a learner's files are: a folder of their own, with a folder for each chapter.

    workspace/.refspec/passed/<id>   the digest of the text that last passed
    workspace/01_one_round/<id>.py

Nothing that a learner has written is ever overwritten.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from refspec.chapters import REPOSITORY, SOURCES
from refspec.grader.exercise import Exercise

NAME = "workspace"
MARKER = ".refspec"
LARGEST_FILE = 1 << 20  # of a learner's

State = Literal["not_started", "unchanged", "changed", "passed"]


class WorkspaceError(ValueError):
    """A folder that cannot be a workspace, or something in it that cannot be a learner's file."""


@dataclass(frozen=True)
class Workspace:
    """A folder that need not exist yet."""

    folder: Path

    def file(self, exercise: Exercise) -> Path:
        """Where the learner writes."""
        return self.folder / exercise.chapter.name / f"{exercise.id}.py"

    def state(self, exercise: Exercise) -> State:
        """As the file is now: passed means that this very text did."""
        try:
            text = read_file(self.file(exercise))
        except OSError:
            return "not_started"
        except WorkspaceError:
            return "changed"
        with suppress(OSError):
            if self._passed(exercise).read_text(encoding="ascii") == hashlib.sha256(text).hexdigest():
                return "passed"
        return "unchanged" if text == exercise.skeleton.encode() else "changed"

    def start(self, exercise: Exercise) -> bool:
        """Put the skeleton where there is no file. Returns whether it did."""
        file = self.file(exercise)
        file.parent.mkdir(parents=True, exist_ok=True)
        (self.folder / MARKER).mkdir(exist_ok=True)
        return not os.path.lexists(file) and make_file(file, exercise.skeleton.encode())

    def reset(self, exercise: Exercise) -> Path | None:
        """The skeleton again. Returns where the learner's text is kept; None if there was none to keep.

        Raises WorkspaceError for what is no plain file.
        """
        file = self.file(exercise)
        if self.start(exercise):
            return None
        text = read_file(file)
        if text == exercise.skeleton.encode():
            return None
        for number in count(1):
            backup = file.with_name(f"{file.name}.{number}")
            if make_file(backup, text):
                break
        replace_file(file, exercise.skeleton.encode())
        return backup

    def record_pass(self, exercise: Exercise, digest: str) -> None:
        """Remember that the text with this digest has passed."""
        file = self._passed(exercise)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, digest.encode())

    def _passed(self, exercise: Exercise) -> Path:
        return self.folder / MARKER / "passed" / exercise.id


def find_workspace(given: Path | None, here: Path | None = None) -> Workspace:
    """The folder that was given; else the nearest marked one, seen from `here` upward; else ./workspace, to be made.

    Raises WorkspaceError for one inside the package or its chapters.
    """
    here = here or Path.cwd()
    found = given
    for folder in (here, *here.parents):
        for candidate in (folder, folder / NAME):
            if found is None and (candidate / MARKER).is_dir():
                found = candidate
    folder = (found or here / NAME).absolute()
    for ours in (SOURCES, REPOSITORY / "chapters"):
        if Path(os.path.realpath(folder)).is_relative_to(ours):
            raise WorkspaceError(f"{folder} is inside {ours}: take another folder, with --workspace")
    if os.path.lexists(folder) and not folder.is_dir():
        raise WorkspaceError(f"{folder} is not a folder: take another one, with --workspace")
    return Workspace(folder)


def submitted_file(folder: Path, exercise: Exercise) -> Path:
    """Where a submission has an exercise: in the folder itself, or in one that is named as the chapter."""
    flat = folder / f"{exercise.id}.py"
    return flat if flat.exists() else folder / exercise.chapter.name / flat.name


def read_file(file: Path) -> bytes:
    """What a learner wrote. Raises OSError, and WorkspaceError for what is no plain file, or too large a one."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # else a pipe would wait for who writes to it
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise WorkspaceError(f"{file} is no plain file")
    with open(handle, "rb") as stream:
        data = stream.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise WorkspaceError(f"{file} is larger than {LARGEST_FILE >> 10} KiB")
    return data


def make_file(file: Path, data: bytes) -> bool:
    """All of it or nothing, and only where nothing is yet. Returns whether it was made."""
    with _beside(file, data) as beside:
        try:
            os.link(beside, file)
        except OSError:  # there is one, or this file system has no links
            if os.path.lexists(file):
                return False
            os.replace(beside, file)
    return True


def replace_file(file: Path, data: bytes) -> None:
    """All of it or nothing, whoever reads or writes it at the same time. A link stays one."""
    file = Path(os.path.realpath(file))
    with _beside(file, data) as beside:
        os.replace(beside, file)


@contextmanager
def _beside(file: Path, data: bytes) -> Iterator[str]:
    """A file in the same folder, with the mode that `file` has or would have; gone afterwards."""
    handle, beside = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with open(handle, "wb") as stream:
            stream.write(data)
        os.chmod(beside, file.stat().st_mode & 0o777 if file.exists() else 0o666 & ~_umask())
        yield beside
    finally:
        with suppress(OSError):
            os.unlink(beside)


def _umask() -> int:
    """Asking is setting: there is no other way."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
