"""The commits of a folder, chosen by day, pull request, file or title, and counted by month or by author."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from fnmatch import fnmatchcase
from typing import Literal

from refspec.history.catalogue import DIRECTORY, Commit
from refspec.history.clone import NO_DATE, PLAIN_DIFF, Clone, HistoryError, LacksError

Whose = Literal["author", "committer"]


@dataclass(frozen=True)
class Choice:
    """Which commits are wanted: those that pass every test that is set.

    since, until: a day, month or year, as "2026-06"; both count in. by: whose local day counts. prs: one of these.
    files: patterns; one of them must fit a name of a file, see `fits`. text: each of its words stands in the title,
    in capitals or not.
    """

    since: str | None = None
    until: str | None = None
    by: Whose = "author"
    prs: frozenset[int] = frozenset()
    files: tuple[str, ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        """Raises HistoryError for what is no day, month or year, and for a time that ends before it begins."""
        for text in (self.since, self.until):
            if text is not None and not _is_date(text):
                raise HistoryError(f"a day, month or year is meant, as 2026-06-01, 2026-06 or 2026, not '{text}'")
        if self.since and self.until and self.since[: len(self.until)] > self.until[: len(self.since)]:
            raise HistoryError(f"{self.since} is after {self.until}: nothing can lie between them")

    def takes(self, commit: Commit, path: str = DIRECTORY) -> bool:
        """Does this commit pass? path: the folder that it was read for."""
        when = day(commit, self.by)
        title = commit.subject.casefold()
        return bool(
            not (when == NO_DATE and (self.since or self.until))
            and (not self.since or when[: len(self.since)] >= self.since)
            and (not self.until or when[: len(self.until)] <= self.until)
            and (not self.prs or commit.pr in self.prs)
            and all(word in title for word in self.text.casefold().split())
            and (not self.files or any(fits(pattern, path, commit) for pattern in self.files))
        )


def day(commit: Commit, by: Whose = "author") -> str:
    """The local day of the author, or of the committer, as "2026-06-01"; or NO_DATE."""
    return (commit.author_date if by == "author" else commit.committer_date)[:10]


def fits(pattern: str, folder: str, commit: Commit) -> bool:
    """Did the commit touch a file that the pattern names: by its whole path, below `folder`, or by its last part alone?

    A rename counts by both names. The name of a folder stands for all that is in it; `*`, `?` and `[...]` are as in a
    shell, but take in a slash as well.
    """
    pattern = pattern.rstrip("/") or pattern
    for change in (*commit.changes, *commit.crossings):
        for path in filter(None, (change.path, change.old_path)):
            below = path.removeprefix(f"{folder}/")
            for name in (path, below, below.rsplit("/", 1)[-1]):
                if name == pattern or name.startswith(f"{pattern}/") or fnmatchcase(name, pattern):
                    return True
    return False


def by_month(commits: Iterable[Commit], by: Whose = "author") -> dict[str, int]:
    """How many in each month, "2026-06" -> 97, from the first to the last one; months without any are 0. Behind
    them, as NO_DATE, those of which no month is known.

    Not the boundary of a shallow clone: of those commits it is not known whether they touch the folder.
    """
    counts = Counter(day(commit, by)[:7] for commit in commits if not commit.boundary)
    undated, found = counts.pop(NO_DATE[:7], 0), {}
    month = min(counts, default="")
    while counts and month <= max(counts):
        found[month] = counts[month]
        year, number = divmod(int(month[:4]) * 12 + int(month[5:]), 12)
        month = f"{year:04}-{number + 1:02}"
    return found | ({NO_DATE: undated} if undated else {})


def by_author(commits: Iterable[Commit]) -> list[tuple[str, int]]:
    """How many by each author, most first, then by name."""
    counts = Counter(commit.author or "" for commit in commits)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def count_lines(clone: Clone, commits: Sequence[Commit], path: str = DIRECTORY) -> list[Commit]:
    """The commits, with lines added and deleted below `path` where they were not known and the clone can tell.

    One git process for all, or none. It cannot tell of a commit whose parents it lacks, and of none at all if it lacks
    contents of a file of one of them.
    """
    wanted = [commit.hash for commit in commits if commit.lines_added is None and not commit.boundary]
    if not wanted:
        return list(commits)
    what = ["log", "-z", "--no-walk=unsorted", "--stdin", "--format=%H", "--numstat", "-M", *PLAIN_DIFF]
    try:
        said = clone.git(*what, "--", path, stdin="".join(f"{hash_}\n" for hash_ in wanted).encode())
    except LacksError:
        return list(commits)
    lines = _numbers(said)
    return [
        replace(commit, lines_added=lines[commit.hash][0], lines_deleted=lines[commit.hash][1])
        if commit.lines_added is None and commit.hash in lines
        else commit
        for commit in commits
    ]


def _numbers(said: bytes) -> dict[str, tuple[int, int]]:
    """Of `git log -z --numstat` each commit's hash, and the sums of its files' lines.

    A file is `added, deleted, path`, with tabs between; a renamed one has no path there, but two fields of its own.
    """
    fields = iter(said.decode(errors="replace").split("\0"))
    found: dict[str, tuple[int, int]] = {}
    hash_ = ""
    for field in fields:
        numbers = re.match(r"\n?(\d+|-)\t(\d+|-)\t", field)
        if numbers:
            added, deleted = (0 if number == "-" else int(number) for number in numbers.groups())
            before = found.get(hash_, (0, 0))
            found[hash_] = (before[0] + added, before[1] + deleted)
            if numbers.end() == len(field):
                next(fields), next(fields)
        elif field.strip("\n"):
            hash_ = field
    return found


def _is_date(text: str) -> bool:
    form = re.fullmatch(r"(\d{4})(?:-(\d\d)(?:-(\d\d))?)?", text, re.ASCII)
    if not form:
        return False
    try:
        date(*(int(part) if part else 1 for part in form.groups()))
    except ValueError:
        return False
    return True
