"""Which commit is meant: a revision as git takes it, a release's version, or the number of a pull request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from refspec.history import catalogue
from refspec.history.catalogue import REPOSITORY
from refspec.history.clone import Clone, HistoryError, LacksError, date_of, short
from refspec.history.commits import pull_request
from refspec.history.patches import EMPTY_TREE
from refspec.history.sources import Source

# The version of a release: its parts, then the number of a candidate, then that of a release after it.
VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?(?:\.post(\d+))?", re.ASCII)
_NUMBER = re.compile(r"(#?)(\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class Named:
    """The commit that a word means.

    hash: of the commit. here: is it in the clone? Else the catalogue alone knows of it. reading: how the word was read:
    "PR" as a pull request, "release" as a version, "revision" as git reads it. note: what else it could have meant, or
    "".
    """

    word: str
    hash: str
    here: bool
    reading: Literal["PR", "release", "revision"]
    note: str = ""


def find(source: Source, word: str) -> Named:
    """The commit that `word` means.

    "#26997" is a pull request; so is a number of four to six digits if the catalogue or a title of the main line knows
    it as one, even if a hash begins with the same digits. "0.4.6" and "v0.4.6" are releases. All else is a revision.
    Raises LacksError if neither the clone nor the catalogue has such a commit, and HistoryError without a clone if the
    catalogue has none.
    """
    if not word:
        raise HistoryError("not a revision: ''")
    if number := _NUMBER.fullmatch(word):
        found = _pull_request(source, word, int(number[2]), sure=bool(number[1]))
        if found:
            return found
    if VERSION.fullmatch(word):
        found = _release(source, word, word.removeprefix("v"))
        if found:
            return found
    known = _in_catalogue(word)
    if source.clone is None:
        if len(known) > 1:
            raise HistoryError(f"{word} begins several hashes: {', '.join(sorted(hash_[:10] for hash_ in known))}")
        if not known:
            source.needed(f"{short(word)}, which the catalogue does not know,")
        return Named(word, known[0], False, "revision")
    (here,) = source.clone.resolve(word)
    if here is None and len(known) == 1:
        return Named(word, known[0], False, "revision")
    return Named(word, here or source.clone.commit(word), True, "revision")


def is_number(word: str) -> bool:
    """Could it be the number of a pull request?"""
    return _NUMBER.fullmatch(word) is not None


def commit_in(source: Source, word: str) -> str:
    """The hash of the commit that `word` means, which the clone has. Raises LacksError if it has not."""
    clone = source.needed(word)
    return clone.commit(find(source, word).hash)


def parent_of(clone: Clone, commit: str) -> str:
    """The hash of a commit's first parent; of a commit without one, that of the tree without files.

    Raises LacksError if it is the boundary of a shallow clone.
    """
    if commit in clone.boundary:
        raise LacksError(f"this clone lacks the parent of {commit[:10]}{clone.remedy()}")
    (found,) = clone.resolve(f"{commit}^1")
    return found or EMPTY_TREE[len(commit)]


def titles(clone: Clone, *commits: str) -> list[str]:
    """Each commit (a hash) as "decb88e0e3 (2026-06-09) its subject", with the author's day; the empty tree as such."""
    real = [commit for commit in commits if commit not in EMPTY_TREE.values()]
    said = clone.git("log", "--no-walk=unsorted", "-z", "--format=%H%x00%as%x00%s", *dict.fromkeys(real))
    fields = said.decode(errors="replace").split("\0")
    told = {
        hash_: f"{hash_[:10]} ({date_of(day)}) {subject}"
        for hash_, day, subject in zip(fields[::3], fields[1::3], fields[2::3], strict=False)
    }
    return [told.get(commit, "the empty tree") for commit in commits]


def titles_with(clone: Clone, number: int) -> list[str]:
    """Hashes of the main line's commits whose title ends with this pull request's number, the newest first."""
    said = clone.git(
        "log", "-z", "--format=%H%x00%s", "--fixed-strings", f"--grep=(#{number})", clone.main.commit, "--"
    )
    fields = said.decode(errors="replace").split("\0")
    pairs = zip(fields[::2], fields[1::2], strict=False)
    return [hash_ for hash_, subject in pairs if pull_request(subject) == number]


def _pull_request(source: Source, word: str, number: int, sure: bool) -> Named | None:
    if not sure and not 1000 <= number <= 999_999:
        return None
    known = [commit.hash for commit in catalogue.commits() if commit.pr == number]
    known = known or [commit.hash for commit in catalogue.story() if commit.pr == number]
    if source.clone is None:
        if known:
            return Named(word, known[0], False, "PR", _also(source, word, known[0], sure))
        if sure:
            source.needed(f"PR #{number}, which the catalogue does not know,")
        return None
    here = [hash_ for hash_ in source.clone.resolve(*known) if hash_] or titles_with(source.clone, number)
    if here:
        return Named(word, here[0], True, "PR", _also(source, word, here[0], sure))
    if known:
        return Named(word, known[0], False, "PR")
    if sure:
        raise LacksError(f"no commit of PR #{number} on {source.clone.main.name} of this clone{source.clone.remedy()}")
    return None


def _also(source: Source, word: str, chosen: str, sure: bool) -> str:
    """What the digits could mean beside the pull request."""
    if sure:
        return ""
    if source.clone is None:
        others = {commit.hash for commit in catalogue.commits() if commit.hash.startswith(word)} - {chosen}
    else:
        others = {hash_ for hash_ in source.clone.resolve(word) if hash_} - {chosen}
    if not others:
        return ""
    other = min(others)
    return f"{word} is read as PR #{word}; a commit's hash begins with it too: {other[:10]} names that one"


def _release(source: Source, word: str, version: str) -> Named | None:
    known = next((release.commit for release in catalogue.releases() if release.version == version), None)
    if source.clone is None:
        return Named(word, known, False, "release") if known else None
    tag, as_it_is, commit = source.clone.resolve(f"refs/tags/v{version}", word, known or f"refs/tags/v{version}")
    found = tag or as_it_is or commit
    if found:
        return Named(word, found, True, "release" if found in (tag, commit) else "revision")
    raise LacksError(f"this clone lacks the tag v{version} (git fetch --tags {REPOSITORY} brings it)")


def _in_catalogue(word: str) -> list[str]:
    """Hashes that the catalogue knows and that begin with the word, as git takes it: four digits at least."""
    if word.startswith("-"):
        raise HistoryError(f"a revision cannot begin with '-': {word}")
    if not re.fullmatch("[0-9a-fA-F]{4,40}", word):
        return []
    hashes = {release.commit for release in catalogue.releases()}
    hashes |= {commit.hash for commit in catalogue.commits()} | {commit.hash for commit in catalogue.story()}
    return sorted(hash_ for hash_ in hashes if hash_.startswith(word.lower()))
