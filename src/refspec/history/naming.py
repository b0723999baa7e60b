"""What people call a commit: a pull request's number, a release's version, or anything that git takes."""

from __future__ import annotations

import re

from refspec.history import catalogue
from refspec.history.clone import Clone, HistoryError, LacksError
from refspec.history.commits import pull_request

_PULL_REQUEST = re.compile(r"#(\d+)|(\d{1,6})")
_VERSION = re.compile(r"\d+\.\d+[\w.]*")


def commit_named(clone: Clone, name: str) -> str:
    """The hash of the commit that `name` means: #27607 or 27607, 0.4.6, or a revision as git takes it.

    A number of up to six digits is a pull request's, a version is its tag's. Raises LacksError if the clone has no such
    commit, HistoryError if `name` cannot be one.
    """
    number = _PULL_REQUEST.fullmatch(name)
    if number:
        return _merged_as(clone, int(number[1] or number[2]))
    if _VERSION.fullmatch(name):
        (found,) = clone.resolve(f"refs/tags/v{name}")
        if found:
            return found
    return clone.commit(name)


def parent_of(clone: Clone, commit: str) -> str:
    """The hash of a commit's first parent; of a commit without one, the hash of the tree without files.

    Raises LacksError if it is the boundary of a shallow clone.
    """
    if commit in clone.boundary:
        raise LacksError(f"this clone lacks the parent of {commit[:10]}{clone.remedy()}")
    (found,) = clone.resolve(f"{commit}^1")
    return found or empty_tree(clone)


def empty_tree(clone: Clone) -> str:
    """The hash that a tree without files has, in the clone's object format."""
    return clone.git("hash-object", "-t", "tree", "--stdin").decode().strip()


def titles(clone: Clone, *commits: str) -> list[str]:
    """Each commit (a hash) as "decb88e0e3 (2026-06-09) its subject", with the author's day; the empty tree as such."""
    real = [commit for commit in commits if commit != empty_tree(clone)]
    said = clone.git("log", "--no-walk=unsorted", "-z", "--format=%H%x00%as%x00%s", *dict.fromkeys(real))
    fields = said.decode(errors="replace").split("\0")
    told = {
        hash_: f"{hash_[:10]} ({day}) {subject}"
        for hash_, day, subject in zip(fields[::3], fields[1::3], fields[2::3], strict=False)
    }
    return [told.get(commit, "the empty tree") for commit in commits]


def _merged_as(clone: Clone, pr: int) -> str:
    known = [commit.hash for commit in catalogue.commits() if commit.pr == pr]
    known += [commit.hash for commit in catalogue.story() if commit.pr == pr]
    if known:
        return clone.commit(known[0])
    said = clone.git("log", "-z", "--format=%H%x00%s", "--fixed-strings", f"--grep=(#{pr})", clone.main.commit)
    fields = said.decode(errors="replace").split("\0")
    merged = [hash_ for hash_, subject in zip(fields[::2], fields[1::2], strict=False) if pull_request(subject) == pr]
    if not merged:
        raise HistoryError(f"no commit on {clone.main.name} ends with (#{pr}){clone.remedy()}")
    return merged[0]
