"""Where the history is read: which clone, or the catalogue alone."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from refspec import cache
from refspec.history import catalogue
from refspec.history.clone import MAIN_LINES, Clone, HistoryError

OWN_CLONE = "sglang.git"  # what `refspec history clone` makes, in the cache folder
HOW_TO_GET_ONE = "refspec history clone makes one, --clone PATH names one"


@dataclass(frozen=True)
class PassedOver:
    """A repository that was looked at and not taken. broken: it may well be what was meant, but cannot be read."""

    folder: Path
    reason: str
    broken: bool


@dataclass(frozen=True)
class Source:
    """What answers: a clone, or where it is None the catalogue alone.

    why: how it was chosen. passed_over: what was looked at before, and not taken.
    """

    clone: Clone | None
    why: str
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def ignored(self) -> tuple[str, ...]:
        """What is wrong with each of those before it that cannot be read."""
        return tuple(other.reason for other in self.passed_over if other.broken)

    def needed(self, what: str) -> Clone:
        """The clone. Raises HistoryError, which says that `what` needs one, if there is none."""
        if self.clone is None:
            raise HistoryError(f"{what} needs a clone of SGLang, and {self.why} ({HOW_TO_GET_ONE})")
        return self.clone


def find_source(named: Path | None = None, *, why: str = "it was named", catalogue_only: bool = False) -> Source:
    """The clone that `named` names (`why` says how); else the current folder's, refspec's own, or the catalogue.

    Raises GitError if `named` cannot be read. Another is passed over if it cannot, or if it is no clone of SGLang.
    """
    if catalogue_only:
        return Source(None, "the catalogue alone was asked for")
    if named is not None:
        return Source(Clone(named), why)
    passed_over: list[PassedOver] = []
    for folder, why in _candidates():
        if not _may_hold_a_repository(folder):
            continue
        try:
            clone = Clone(folder)
            if is_sglang(clone):
                return Source(clone, why, tuple(passed_over))
        except HistoryError as error:
            passed_over.append(PassedOver(folder, str(error), broken=True))
        else:
            passed_over.append(PassedOver(folder, "it is no clone of SGLang", broken=False))
    return Source(None, "no clone was found", tuple(passed_over))


def own_clone() -> Path:
    """Where `refspec history clone` puts a clone, unless told otherwise. It need not exist.

    Raises NoHomeError where no home folder is known.
    """
    return cache.folder() / OWN_CLONE


def is_sglang(clone: Clone) -> bool:
    """Has it the commit that the folder began with, or, as a shallow one may, SGLang's folder of packages?

    Raises LacksError if a partial clone has neither that commit nor the lists of files to tell by.
    """
    if clone.present(catalogue.commits()[0].hash):
        return True
    tips = [tip for tip in clone.resolve(*MAIN_LINES) if tip]
    return any(clone.check(*(f"{tip}:python/sglang" for tip in tips)))


def _candidates() -> list[tuple[Path, str]]:
    """Where to look, and how that would be told. Without a home there is no clone of refspec's."""
    found = []
    with suppress(FileNotFoundError):  # it was deleted meanwhile
        found.append((Path.cwd(), "the current folder is in it"))
    with suppress(cache.NoHomeError):
        if own_clone().is_dir():
            found.append((own_clone(), "made by refspec history clone"))
    return found


def _may_hold_a_repository(folder: Path) -> bool:
    """Without starting git, which takes longer than all the catalogue's work."""
    return any(
        os.path.exists(place / ".git") or (os.path.exists(place / "HEAD") and os.path.exists(place / "objects"))
        for place in (folder, *folder.parents)
    )
