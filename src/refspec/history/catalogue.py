"""What is known of SGLang's history without a clone: facts alone, read off its main line and its published wheels.

The files of `facts/` are tab-separated with a line of names on top; format.json says which version of this format they
have, and up to which commit of the main line they reach. Every row is checked when it is read.

| file                               | one row for each                                                               |
|------------------------------------|--------------------------------------------------------------------------------|
| commits.tsv                        | commit on the main line that touches the folder, the oldest first              |
| releases.tsv, release_files.tsv    | release; file of the folder in a release                                       |
| wheel_files.tsv                    | file of the folder in a published wheel                                        |
| story.tsv                          | commit that teaches something                                                  |
| claims.tsv                         | statement that circulates about this code, with its verdict and the evidence   |
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

FORMAT = 1
REPOSITORY = "https://github.com/sgl-project/sglang"
DIRECTORY = "python/sglang/srt/speculative"

_HASH = re.compile(r"[0-9a-f]{40}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d")

Row = TypeVar("Row")


class CatalogueError(ValueError):
    """The embedded catalogue is not what this version of refspec can read."""


@dataclass(frozen=True)
class FileChange:
    """What a commit did to one file.

    status: A added, D deleted, M modified, R renamed (and perhaps modified), T of another type. path: within the
    repository, as it is afterwards (for D: as it was). old_path: of R, the path before.
    """

    status: str
    path: str
    old_path: str | None = None


@dataclass(frozen=True)
class Commit:
    """One commit, as far as it concerns a folder.

    author_date, committer_date: ISO 8601 with the zone of whoever made it; the first ten characters are that person's
    local day. pr: number of the pull request that the title ends with. changes: files of the folder, in git's order.
    lines_added, lines_deleted: in the folder; None where it is not known. author: as .mailmap has it; None in the
    catalogue, which holds no names. boundary: its parents are not in the clone, so what it changed is not known.
    crossings: files that it moved into the folder from outside, or out of it. The catalogue alone knows them; in
    `changes` they are added or deleted.
    """

    hash: str
    author_date: str
    committer_date: str
    pr: int | None
    subject: str
    changes: tuple[FileChange, ...] = ()
    lines_added: int | None = None
    lines_deleted: int | None = None
    author: str | None = None
    boundary: bool = False
    crossings: tuple[FileChange, ...] = ()


@dataclass(frozen=True)
class Release:
    """One release. files: those of the folder, with their lines. on_main: is its commit on the main line?"""

    version: str
    commit: str
    author_date: str
    committer_date: str
    subject: str
    on_main: bool
    branch_point: str
    commits_off_main: int
    files: dict[str, int]


@dataclass(frozen=True)
class StoryCommit:
    """A commit that teaches something.

    label: "1", "2", ... in the order of the story, or "R1", ... for one that stands beside it.
    """

    label: str
    hash: str
    author_date: str
    pr: int
    subject: str
    lines_added: int | None
    lines_deleted: int | None
    why: str


@dataclass(frozen=True)
class Claim:
    """A statement that circulates about this code.

    id: its source's letter and its number within it, as "E7". verdict: as "true", "false", "imprecise". evidence: what
    decides; paths are below DIRECTORY unless they say otherwise, and @ names the revision.
    """

    id: str
    source: str
    claim: str
    verdict: str
    evidence: str


@dataclass(frozen=True)
class Reach:
    """How far the catalogue reaches along the main line."""

    commit: str
    date: str


@cache
def reach() -> Reach:
    """Up to where the catalogue knows the main line. Raises CatalogueError for a format that is not FORMAT."""
    said = json.loads(_text("format.json"))
    if said.get("format") != FORMAT:
        raise CatalogueError(f"the catalogue has format {said.get('format')}, and this refspec reads {FORMAT}")
    if (said.get("repository"), said.get("directory")) != (REPOSITORY, DIRECTORY):
        raise CatalogueError("the catalogue is about another repository or folder")
    return Reach(_hash(said["main_commit"]), _matched(_DATE, said["main_date"]))


@cache
def commits() -> tuple[Commit, ...]:
    """Every commit on the main line that touches DIRECTORY, the oldest first."""
    return _rows("commits.tsv", COMMIT_COLUMNS, _commit)


@cache
def commits_by_hash() -> dict[str, Commit]:
    """`commits`, by hash."""
    return {commit.hash: commit for commit in commits()}


@cache
def renames() -> tuple[tuple[str, str], ...]:
    """Each file that a commit of `commits` renamed within DIRECTORY: its names below it, the old one and the new one.

    In the order of the commits, and sooner had than these.
    """
    rows = _rows("commits.tsv", COMMIT_COLUMNS, lambda row: _pairs(row[9]))
    return tuple(pair for pairs in rows for pair in pairs)


@cache
def releases() -> tuple[Release, ...]:
    """Every release, in the order of the versions' publication."""
    files: dict[str, dict[str, int]] = {}
    for version, _, name, lines in _rows("release_files.tsv", "version commit file lines", tuple):
        files.setdefault(version, {})[name] = int(lines)
    return _rows("releases.tsv", RELEASE_COLUMNS, lambda row: _release(row, files))


@cache
def wheels() -> dict[str, dict[str, int]]:
    """The folder's Python files in published wheels: version -> name below DIRECTORY -> lines."""
    found: dict[str, dict[str, int]] = {}
    for version, name, lines in _rows("wheel_files.tsv", "version file lines", tuple):
        found.setdefault(version, {})[name] = int(lines)
    return found


@cache
def story() -> tuple[StoryCommit, ...]:
    """The commits that teach something, in the order in which they are told."""
    return _rows("story.tsv", "n hash author_date PR subject spec_lines_added spec_lines_deleted why", _story)


# Sources of claims, and the letter with which the ids of their claims begin.
CLAIM_LETTERS = {
    "study notes: EAGLE integration": "E",
    "PR notes: #32887": "C",
    "PR notes: #26997": "T",
    "PR notes: #27607": "F",
    "code reading": "P",
}


@cache
def claims() -> tuple[Claim, ...]:
    """The statements, in the order of their sources. An id counts within its source."""
    numbers: dict[str, int] = {}

    def claim(row: list[str]) -> Claim:
        letter = CLAIM_LETTERS[row[0]]
        numbers[letter] = numbers.get(letter, 0) + 1
        return Claim(f"{letter}{numbers[letter]}", *row)

    return _rows("claims.tsv", "source claim verdict evidence", claim)


COMMIT_COLUMNS = (
    "n hash author_date committer_date pr subject added modified deleted renamed moved_in_from_outside "
    "moved_out_of_dir lines_added lines_deleted"
)
RELEASE_COLUMNS = (
    "version commit author_date committer_date subject on_main branch_point_on_main commits_off_main "
    "pypi_upload_date spec_py_files spec_worker_files spec_py_lines"
)


def _text(name: str) -> str:
    return (Path(__file__).parent / "facts" / name).read_text(encoding="utf-8")


def _rows(name: str, columns: str, read: Callable[[list[str]], Row]) -> tuple[Row, ...]:
    reach()
    lines = csv.reader(_text(name).splitlines(), delimiter="\t")
    if next(lines, None) != columns.split():
        raise CatalogueError(f"the catalogue's {name} has other columns than {columns}")
    found = []
    for number, row in enumerate(lines, start=2):
        try:
            if len(row) != len(columns.split()):
                raise ValueError(f"{len(row)} fields")
            found.append(read(row))
        except (ValueError, KeyError) as error:
            raise CatalogueError(f"line {number} of the catalogue's {name} is damaged: {error}") from None
    return tuple(found)


def _commit(row: list[str]) -> Commit:
    _, hash_, authored, committed, pr, subject, added, modified, deleted, renamed, moved_in, moved_out, plus, minus = (
        row
    )
    changes = [
        FileChange(status, f"{DIRECTORY}/{name}")
        for status, names in (("A", added), ("M", modified), ("D", deleted))
        for name in names.split()
    ]
    changes += [FileChange("R", f"{DIRECTORY}/{new}", f"{DIRECTORY}/{old}") for old, new in _pairs(renamed)]
    crossings = [FileChange("R", f"{DIRECTORY}/{new}", old) for old, new in _pairs(moved_in)]
    crossings += [FileChange("R", new, f"{DIRECTORY}/{old}") for old, new in _pairs(moved_out)]
    return Commit(
        _hash(hash_),
        _matched(_TIME, authored),
        _matched(_TIME, committed),
        int(pr) if pr else None,
        subject,
        tuple(sorted(changes, key=lambda change: change.path)),
        int(plus),
        int(minus),
        crossings=tuple(crossings),
    )


def _release(row: list[str], files: dict[str, dict[str, int]]) -> Release:
    version, commit, authored, committed, subject, on_main, branch_point, off_main, _, n_files, n_workers, n_lines = row
    held = files.get(version, {})
    python = {name: lines for name, lines in held.items() if name.endswith(".py")}
    workers = [name for name in python if "worker" in name.rsplit("/", 1)[-1]]
    if [len(python), len(workers), sum(python.values())] != [int(n_files), int(n_workers), int(n_lines)]:
        raise ValueError(f"{version}: its files do not add up")
    if on_main not in ("yes", "no"):
        raise ValueError(f"on_main is {on_main!r}")
    return Release(
        version,
        _hash(commit),
        _matched(_TIME, authored),
        _matched(_TIME, committed),
        subject,
        on_main == "yes",
        _hash(branch_point),
        int(off_main),
        held,
    )


def _story(row: list[str]) -> StoryCommit:
    label, hash_, date, pr, subject, plus, minus, why = row
    return StoryCommit(
        _matched(re.compile(r"R?\d+"), label),
        _hash(hash_),
        _matched(_DATE, date),
        int(pr),
        subject,
        int(plus) if plus else None,
        int(minus) if minus else None,
        why,
    )


def _pairs(renames: str) -> list[tuple[str, str]]:
    pairs = []
    for rename in renames.split():
        old, arrow, new = rename.partition("=>")
        if not (old and arrow and new):
            raise ValueError(f"{rename!r} is no rename")
        pairs.append((old, new))
    return pairs


def _hash(text: str) -> str:
    return _matched(_HASH, text)


def _matched(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError(f"{text!r} has another form than {pattern.pattern}")
    return text
