"""Small repositories that stand for SGLang's: their commits answer to the hashes and releases that checks ask for."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path

from small_history import START, Step, make_branches

from refspec.history import catalogue
from refspec.history.clone import Clone, MainLine


class Image(Clone):
    """A clone in which names of SGLang's commits, and what is a step before them, mean commits of its own.

    stands_for: a hash of SGLang's, or as much of it as checks name, or a release ("v0.4.6") -> a revision of its own.
    branch: its main line.
    """

    def __init__(self, folder: Path, stands_for: Mapping[str, str], branch: str = "main") -> None:
        super().__init__(folder)
        self._stand(stands_for, branch)

    def standing(self, stands_for: Mapping[str, str], branch: str) -> Image:
        """The same clone, with other meanings, and without asking git again what it is."""
        other = copy.copy(self)
        other.__dict__.pop("main", None)
        other._stand(stands_for, branch)
        return other

    def _stand(self, stands_for: Mapping[str, str], branch: str) -> None:
        self.stands_for = stands_for
        self._branch = branch
        releases = {f"v{release.version}": release.commit for release in catalogue.releases()}
        self._own = {releases.get(name, name): own for name, own in stands_for.items()}

    @cached_property
    def main(self) -> MainLine:
        return MainLine(self._branch, self.commit(f"refs/heads/{self._branch}"))

    def resolve(self, *names: str) -> list[str | None]:
        return super().resolve(*map(self._translated, names))

    def _translated(self, name: str) -> str:
        base, steps = re.fullmatch(r"(?:commit-g)?(.*?)((?:[\^~]\d*)*)", name).groups()
        for theirs, own in self._own.items():
            if base.startswith(theirs) or theirs.startswith(base):
                return own + steps
        return name


def make_image(folder: Path, history: Mapping[str, Step], object_format: str = "sha1") -> Image:
    """A repository with a commit for each step, the oldest first, that answers to the name before it."""
    return make_images(folder, {"main": history}, object_format)["main"]


def make_images(
    folder: Path, histories: Mapping[str, Mapping[str, Step]], object_format: str = "sha1"
) -> dict[str, Image]:
    """The same for many at once: each history is a branch of one repository, and has an image of its own."""
    branches = {branch: list(history.values()) for branch, history in histories.items()}
    make_branches(folder, branches, object_format=object_format)
    clone = Image(folder, {})
    return {
        branch: clone.standing({name: f"refs/heads/{branch}~{n}" for n, name in enumerate(reversed(history))}, branch)
        for branch, history in histories.items()
    }


def seconds(when: str) -> int:
    """For Step.seconds: the moment, "2026-07-30T17:55+08:00"."""
    return int(datetime.fromisoformat(when).timestamp()) - START
