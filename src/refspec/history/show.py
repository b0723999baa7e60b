"""One commit: its message, its files, what it changed, which releases held it first, and what it teaches."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from refspec.history import catalogue
from refspec.history.catalogue import DIRECTORY, Commit, Release, StoryCommit
from refspec.history.clone import NO_DATE, Clone, HistoryError, LacksError, date_of
from refspec.history.commits import mailmap, pull_request
from refspec.history.patches import EMPTY_TREE, Comparison, FileDiff, compare, compare_around
from refspec.history.revisions import VERSION, Named
from refspec.history.sources import Source

_CANDIDATE = re.compile(r"\d(rc|a|b)\d+$")

Parentage = Literal["plain", "root", "merge", "boundary", "unknown"]


@dataclass(frozen=True)
class Releases:
    """The releases that held a commit first; none, and what is to be said in `unknown`, unless it is certain.

    first: of all. final: the first that is no candidate, if that is another.
    """

    first: str | None
    final: str | None = None
    unknown: str = ""


@dataclass(frozen=True)
class Details:
    """One commit.

    author_date, committer_date: ISO 8601 with zones, or NO_DATE; a day alone for a commit that the story alone knows,
    which has no committer_date then. author, body: None without a clone. kind: "root" has no parent, "merge" several,
    of which the first is what it is compared with, "boundary" some that the clone lacks, "unknown": there is no clone
    to ask.
    comparison: what it changed, as the clone has it, else the catalogue; None where neither knows. lines_added,
    lines_deleted: of the files in comparison, else the catalogue's, for the folder. lacks: what the clone cannot tell,
    a sentence each.
    """

    hash: str
    subject: str
    author_date: str
    committer_date: str | None
    pr: int | None
    kind: Parentage
    parents: tuple[str, ...]
    author: str | None
    body: str | None
    comparison: Comparison | None
    lines_added: int | None
    lines_deleted: int | None
    releases: Releases
    story: StoryCommit | None
    lacks: tuple[str, ...] = ()


def details(source: Source, named: Named, *, contents: bool = True, all_files: bool = False) -> Details:
    """All that is known of a commit. A constant number of git processes.

    contents: are lines and patches wanted? all_files: those outside the folder too? Raises HistoryError if the clone
    is damaged, and without one if the catalogue has no more than the hash.
    """
    story = next((commit for commit in catalogue.story() if commit.hash == named.hash), None)
    fact = catalogue.commits_by_hash().get(named.hash)
    if source.clone is None or not named.here:
        return _from_catalogue(source, named, fact, story)
    return _from_clone(source.clone, named.hash, fact, story, contents, all_files)


def releases_of(clone: Clone, hash_: str, committed: str) -> Releases:
    """The releases that hold a commit, as the clone's tags have it; `committed`: when it was."""
    if clone.is_shallow:
        return Releases(None, unknown="not known: the clone is shallow")
    form = "%(refname:lstrip=2)%00%(*committerdate:unix)%(committerdate:unix)"
    said = clone.git("for-each-ref", f"--format={form}", f"--contains={hash_}", "refs/tags/v*")
    tags = [line.split("\0") for line in said.decode(errors="replace").splitlines()]
    # One on a commit without a date, which comes out as 0 or nothing, or on no commit has no place among the others.
    holding = sorted(
        (int(seconds), name)
        for name, seconds in tags
        if seconds not in ("", "0") and name.startswith("v") and VERSION.fullmatch(name)
    )
    until = holding[0][0] if holding else _seconds("9999-12-31T00:00:00+00:00")
    later = [
        f"refs/tags/v{release.version}"
        for release in catalogue.releases()
        if _seconds(committed) <= _seconds(release.committer_date) < until
    ]
    missing = later and not all(clone.check(*later))
    if missing:
        return Releases(None, unknown="not known: the clone lacks tags of releases")
    if not holding:
        return Releases(None, unknown="none of this clone's tags holds it")
    final = next((name for _, name in holding if not _CANDIDATE.search(name)), None)
    return Releases(holding[0][1], final if final != holding[0][1] else None)


def _releases_in_catalogue(fact: Commit) -> Releases:
    """Certain where the next release by date was made on the main line, whose commits never go back in time."""
    committed = _seconds(fact.committer_date)
    later = [release for release in catalogue.releases() if _seconds(release.committer_date) >= committed]
    later.sort(key=lambda release: _seconds(release.committer_date))
    if not later:
        return Releases(None, unknown="none that the catalogue knows")
    if not later[0].on_main:
        return Releases(
            None, unknown="not known: they are made on branches by then, and which hold it a clone can tell"
        )
    final = next((release for release in later if not _CANDIDATE.search(release.version)), None)
    certain = final and final.on_main and final != later[0]
    return Releases(f"v{later[0].version}", f"v{final.version}" if final and certain else None)


def _from_clone(
    clone: Clone, hash_: str, fact: Commit | None, story: StoryCommit | None, contents: bool, all_files: bool
) -> Details:
    form = "%P%x00%aI%x00%cI%x00%aN%x00%s%x00%b"
    said = clone.git(*mailmap(clone), "log", "-1", "-z", "--no-patch", f"--format={form}", hash_, "--")
    parents, authored, committed, author, subject, body = (
        said.decode(errors="replace").removesuffix("\0").split("\0", 5)
    )
    authored, committed = date_of(authored), date_of(committed)
    above = tuple(parents.split())
    kind: Parentage = (
        "boundary" if hash_ in clone.boundary else "plain" if len(above) == 1 else "merge" if above else "root"
    )
    comparison = None
    lacks = []
    if kind == "boundary":
        lacks.append(f"its parents are not in this clone, so what it changed is not known{clone.remedy()}")
    else:
        before = above[0] if above else EMPTY_TREE[len(hash_)]
        try:
            if all_files:
                comparison = compare(clone, before, hash_, contents=contents)
            else:
                comparison = compare_around(clone, before, hash_, DIRECTORY, contents)
        except LacksError as error:
            lacks.append(str(error))
        if contents and comparison and not comparison.whole:
            lacks.append(
                "this clone lacks contents of these files, so the diff is not known" + clone.remedy_for_contents()
            )
    if comparison is None and fact:
        comparison = Comparison(_files(fact), None, False)
    known = comparison.lines() if comparison and comparison.whole else None
    added, deleted = known or ((fact.lines_added, fact.lines_deleted) if fact else (None, None))
    return Details(
        hash_,
        subject,
        authored,
        committed,
        pull_request(subject),
        kind,
        above,
        author,
        body,
        comparison,
        added,
        deleted,
        releases_of(clone, hash_, committed),
        story,
        tuple(lacks),
    )


def _from_catalogue(source: Source, named: Named, fact: Commit | None, story: StoryCommit | None) -> Details:
    lacks = ("this clone lacks that commit, so the catalogue answers" + source.clone.remedy(),) if source.clone else ()
    release = next((release for release in catalogue.releases() if release.commit == named.hash), None)
    known = fact or story or release
    if known is None:
        raise HistoryError(f"the catalogue knows no more of {named.word} than its hash, {named.hash}")
    comparison = Comparison(_files(fact), None, False) if fact else None
    return Details(
        named.hash,
        known.subject,
        known.author_date,
        None if isinstance(known, StoryCommit) else known.committer_date,
        pull_request(known.subject),
        "unknown",
        (),
        None,
        None,
        comparison,
        None if isinstance(known, Release) else known.lines_added,
        None if isinstance(known, Release) else known.lines_deleted,
        _releases_in_catalogue(fact) if fact else Releases(None, unknown="not known: the catalogue does not tell"),
        story,
        lacks,
    )


def _files(fact: Commit) -> tuple[FileDiff, ...]:
    """Each file once: one that crossed the folder's border is in `changes` as well, as added or deleted."""
    crossed = {path for change in fact.crossings for path in (change.path, change.old_path)}
    changes = [change for change in fact.changes if change.path not in crossed or change.status not in "AD"]
    return tuple(
        FileDiff(change.status, change.path, change.old_path, "", "")
        for change in sorted((*changes, *fact.crossings), key=lambda change: change.path)
    )


def _seconds(date: str) -> float:
    """Since 1970; of a commit without a date, before all others."""
    return -math.inf if date == NO_DATE else datetime.fromisoformat(date).timestamp()
