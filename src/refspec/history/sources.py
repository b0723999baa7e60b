"""Where the history is read: which clone, or the catalogue alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from refspec import cache
from refspec.history import catalogue
from refspec.history.clone import Clone, GitError, HistoryError

OWN_CLONE = "sglang.git"  # what `refspec history clone` makes, in the cache folder
HOW_TO_GET_ONE = "refspec history clone makes one, --clone PATH names one"


@dataclass(frozen=True)
class Source:
    """What answers: a clone, or where it is None the catalogue alone.

    why: how it was chosen. ignored: what was looked at before, and why it was not taken.
    """

    clone: Clone | None
    why: str
    ignored: tuple[str, ...] = ()

    def needed(self, what: str) -> Clone:
        """The clone. Raises HistoryError, which says that `what` needs one, if there is none."""
        if self.clone is None:
            raise HistoryError(f"{what} needs a clone of SGLang, and {self.why} ({HOW_TO_GET_ONE})")
        return self.clone


def find_source(named: Path | None = None, *, catalogue_only: bool = False) -> Source:
    """The clone that `named` names; else the one around the current folder; else refspec's own; else the catalogue.

    Raises GitError if `named` cannot be read. Another is passed over if it cannot, or if it is no clone of SGLang.
    """
    if catalogue_only:
        return Source(None, "the catalogue alone was asked for")
    if named is not None:
        return Source(Clone(named), "named with --clone or REFSPEC_SGLANG")
    ignored: list[str] = []
    for folder, why in ((Path.cwd(), "the current folder is in it"), (own_clone(), "made by refspec history clone")):
        if not _may_hold_a_repository(folder):
            continue
        try:
            clone = Clone(folder)
            if is_sglang(clone):
                return Source(clone, why, tuple(ignored))
        except GitError as error:
            ignored.append(str(error))
    return Source(None, "none was found", tuple(ignored))


def own_clone() -> Path:
    """Where `refspec history clone` puts a clone, unless told otherwise. It need not exist."""
    return cache.folder() / OWN_CLONE


def is_sglang(clone: Clone) -> bool:
    """Has it the commit that the folder began with, or, as a shallow one may, SGLang's folder of packages?"""
    first = catalogue.commits()[0].hash
    names = [first, *(f"{name}:python/sglang" for name in ("refs/remotes/origin/main", "refs/heads/main", "HEAD"))]
    return any(clone.check(*names))


def _may_hold_a_repository(folder: Path) -> bool:
    """Without starting git, which takes longer than all the catalogue's work."""
    return any(
        (place / ".git").exists() or ((place / "HEAD").exists() and (place / "objects").exists())
        for place in (folder, *folder.parents)
    )
