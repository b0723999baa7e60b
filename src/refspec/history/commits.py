"""The commits of a folder, off a clone."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice

from refspec.history import catalogue
from refspec.history.catalogue import DIRECTORY, Commit, FileChange
from refspec.history.clone import PLAIN_DIFF, Clone, LacksError, date_of
from refspec.history.raw_log import parse_change

# Separated by NUL, which no message holds, with a hash in front: whatever a title looks like, it cannot be taken for
# something else.
_FORMAT = "%H%x00%aI%x00%cI%x00%aN%x00%s"
_FIELDS = 5


def read_commits(clone: Clone, path: str = DIRECTORY, revision: str | None = None) -> list[Commit]:
    """Every commit up to `revision` (a hash; None: the main line) that touches `path`, the oldest first.

    Two files are one that was renamed if they are alike by half, as git has it by default. Where the clone lacks
    contents, only files that moved unchanged are found in that way; of commits that the catalogue knows, its word is
    taken. Lines are the catalogue's as well, so of later commits they are None. Raises LacksError if the clone has no
    lists of files.
    """
    revision = revision or clone.main.commit
    known = catalogue.commits_by_hash() if path == DIRECTORY else {}
    try:
        said, whole = _log(clone, path, revision, "-M"), True
    except LacksError:
        said, whole = _log(clone, path, revision, "-M100%"), False
    found = []
    for commit in _parsed(said, clone.boundary):
        fact = known.get(commit.hash)
        if fact:
            commit = replace(
                commit,
                changes=commit.changes if whole and not commit.boundary else fact.changes,
                lines_added=fact.lines_added,
                lines_deleted=fact.lines_deleted,
                crossings=fact.crossings,
            )
        found.append(commit)
    return found[::-1]


def pull_request(subject: str) -> int | None:
    """The number of the pull request that a title ends with, as in "Fix (#12)"."""
    number = re.search(r"\(#(\d+)\)\s*$", subject)
    return int(number[1]) if number else None


def mailmap(clone: Clone) -> tuple[str, ...]:
    """What to tell git, before its command, so that authors come out as the .mailmap of the main line has them.

    Nothing if there is none, or if the clone lacks its contents.
    """
    try:
        (found,) = clone.check(f"{clone.main.commit}:.mailmap")
    except LacksError:
        return ()
    return ("-c", f"mailmap.blob={found[0]}") if found else ()


def lacks_mailmap(clone: Clone) -> bool:
    """Has the main line a .mailmap that this clone lacks the contents of?"""
    try:
        listed = clone.git("ls-tree", clone.main.commit, "--", ".mailmap")
    except LacksError:
        return True
    return bool(listed) and not mailmap(clone)


def _log(clone: Clone, path: str, revision: str, renames: str) -> bytes:
    what = ["log", "-z", f"--format={_FORMAT}", "--raw", "--no-abbrev", renames, *PLAIN_DIFF]
    return clone.git(*mailmap(clone), *what, revision, "--", path)


def _parsed(said: bytes, boundary: frozenset[str]) -> list[Commit]:
    """`git log -z --raw`: five fields of a commit, then its files, each `:modes hashes status` and one or two paths."""
    found: list[tuple[list[str], list[FileChange]]] = []
    fields = iter(said.decode(errors="replace").split("\0"))
    for field in fields:
        entry = field.lstrip("\n")
        if entry.startswith(":"):
            change = parse_change(entry, fields)
            found[-1][1].append(FileChange(change.status, change.path, change.old_path))
        elif entry:
            found.append(([entry, *islice(fields, _FIELDS - 1)], []))
    return [
        Commit(
            hash_,
            date_of(authored),
            date_of(committed),
            pull_request(subject),
            subject,
            () if hash_ in boundary else tuple(changes),  # git shows a boundary as if it had added all that there is
            author=author,
            boundary=hash_ in boundary,
        )
        for (hash_, authored, committed, author, subject), changes in found
    ]
