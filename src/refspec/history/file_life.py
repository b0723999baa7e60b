"""The life of a file: through renames, across the border of its folder, and into what it was split.

`git log --follow` asks about one name at a time, from the end backwards, and takes a name for the file: where a file
was renamed and another took its old name, or where one of several heirs is asked for, it tells a part of the story. So
all changes of all files are read, once, and followed from the beginning on.

A split is no rename: of a file that shrank, was deleted or was renamed, a good part of the lines appears in other files
of the same commit. It is told by comparing the lines that went with those that came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from refspec.history import catalogue
from refspec.history.catalogue import DIRECTORY
from refspec.history.clone import Clone, HistoryError, LacksError
from refspec.history.commits import pull_request
from refspec.history.likeness import changed_lines, telling_lines
from refspec.history.paths import file_meant, readings
from refspec.history.raw_log import SWEEP, RawChange, RawCommit, known_contents, read_raw_log

What = Literal["born", "there already", "back", "changed", "renamed", "deleted"]

# A split needs so many lines that went elsewhere, and this part of all that went or came.
SPLIT_LINES = 10
SPLIT_PART = 0.2


@dataclass(frozen=True)
class Flow:
    """Lines that a commit took to another file, or from one."""

    path: str
    lines: int


@dataclass(frozen=True)
class FileEvent:
    """What a commit did to the file.

    path: its name afterwards, or its last one. old_path: of "renamed", the name before. lines_added, lines_deleted: the
    fewest; None where contents are not known. went_to, came_from: of a split, the files, most lines first.
    """

    hash: str
    author_date: str
    committer_date: str
    pr: int | None
    subject: str
    what: What
    path: str
    old_path: str | None = None
    lines_added: int | None = None
    lines_deleted: int | None = None
    went_to: tuple[Flow, ...] = ()
    came_from: tuple[Flow, ...] = ()


@dataclass(frozen=True)
class FileLife:
    """One file's events, the oldest first.

    paths: its names, one after another. alive: is it there at the end? contents: were lines, splits and renames with
    changes looked for? others: other files that had its name at another time: their names, in order of time. begins: is
    the first event no birth, because the history that is known begins there?
    """

    paths: tuple[str, ...]
    alive: bool
    events: tuple[FileEvent, ...]
    contents: bool
    others: tuple[tuple[str, ...], ...]
    begins: bool


@dataclass
class _Life:
    paths: list[str]
    alive: bool = True
    events: list[tuple[RawCommit, RawChange]] = field(default_factory=list)


def follow(clone: Clone | None, file: str) -> FileLife:
    """The life of the file that is called `file`, or was called so last; off the catalogue where there is no clone.

    file: below the folder of speculative decoding, or from the repository's root. Raises HistoryError if there never
    was such a file, LacksError if the clone has no lists of files. Where it has no contents, the catalogue's word is
    taken for renames that it knows, and the rest is told without them.
    """
    remedy = clone.remedy() if clone else " as far as the catalogue knows"
    if clone is None:
        commits, whole, boundary = _raw(catalogue.commits()), False, frozenset[str]()
    else:
        boundary = clone.boundary
        _meant(file, _names(clone, file), remedy)  # takes a fraction of the time that renames take
        try:
            commits, whole = _in_clone(clone, "-M"), True
        except LacksError:
            commits, whole = _in_parts(clone), False
    lives = _lives(commits)
    path = _meant(file, (path for life in lives for path in life.paths), remedy)
    named = [life for life in lives if path in life.paths]
    life = max(named, key=lambda one: (one.alive and one.paths[-1] == path, lives.index(one)))
    events = [_event(commit, change, n, boundary) for n, (commit, change) in enumerate(life.events)]
    if clone is not None:
        events = _with_lines(clone, life, events, boundary)
        whole = whole and all(event.lines_added is not None for event in events if event.what != "there already")
    others = tuple(tuple(other.paths) for other in named if other is not life)
    begins = events[0].what == "there already"
    return FileLife(tuple(life.paths), life.alive, tuple(events), whole, others, begins)


def lives_of_files(commits: Iterable[catalogue.Commit]) -> list[FileLife]:
    """The life of each file that commits of a folder (the oldest first) touch, in the order of births.

    Without splits and lines, which only contents tell, and without what happened beyond the folder, but for the moves
    over its border that the catalogue knows.
    """
    found = []
    for life in _lives(_raw(commits)):
        events = tuple(_event(commit, change, n, frozenset()) for n, (commit, change) in enumerate(life.events))
        begins = events[0].what == "there already"
        found.append(FileLife(tuple(life.paths), life.alive, events, False, (), begins))
    return found


def _names(clone: Clone, file: str) -> set[str]:
    """Paths that there ever were: those that the catalogue knows if `file` is one of them, else all."""
    facts = (change for commit in catalogue.commits() for change in commit.changes)
    names = {path for change in facts for path in (change.path, change.old_path) if path}
    if not names.isdisjoint(readings(file)):
        return names
    return {change.path for commit in _in_clone(clone, "--no-renames") for change in commit.changes}


def _meant(file: str, known: Iterable[str], remedy: str) -> str:
    """The path that `file` stands for. Raises HistoryError if there is none, with what is near."""
    path, near = file_meant(file, known)
    if path is None:
        hint = f"; there is {', '.join(near)}" if near else ""
        raise HistoryError(f"no file was ever called {file}, in the folder or from the root{remedy}{hint}")
    return path


# --- all changes


def _in_clone(clone: Clone, renames: str) -> list[RawCommit]:
    return read_raw_log(clone, clone.main.commit, renames)


def _raw(commits: Iterable[catalogue.Commit]) -> list[RawCommit]:
    return [RawCommit(c.hash, None, c.author_date, c.committer_date, c.subject, _facts(c)) for c in commits]


def _facts(commit: catalogue.Commit) -> list[RawChange]:
    crossed = {path for change in commit.crossings for path in (change.path, change.old_path)}
    changes = [change for change in commit.changes if change.path not in crossed]
    return [RawChange(c.status, c.path, c.old_path) for c in (*changes, *commit.crossings)]


def _in_parts(clone: Clone) -> list[RawCommit]:
    """Of a clone that lacks contents: renames that changed nothing, those in the folder if its contents are there, and
    those that the catalogue knows."""
    commits = _in_clone(clone, "-M100%")
    try:
        inside = {
            commit.hash: commit.changes for commit in read_raw_log(clone, clone.main.commit, "-M", path=DIRECTORY)
        }
    except LacksError:
        inside = {}
    known = catalogue.commits_by_hash()
    for commit in commits:
        hashes = {change.path: change for change in commit.changes}
        better = [change for change in inside.get(commit.hash, []) if change.status == "R"]
        if fact := known.get(commit.hash):
            better = [change for change in _facts(fact) if change.status == "R"]
        for change in better:
            old, new = hashes.get(change.old_path or ""), hashes.get(change.path)
            if old and new and (old.status, new.status) == ("D", "A"):
                commit.changes = [one for one in commit.changes if one is not old and one is not new]
                commit.changes.append(
                    replace(change, modes=(old.modes[0], new.modes[1]), hashes=(old.hashes[0], new.hashes[1]))
                )
    return commits


def _lives(commits: Iterable[RawCommit]) -> list[_Life]:
    lives: list[_Life] = []
    alive: dict[str, _Life] = {}
    deleted: dict[str, _Life] = {}
    for commit in commits:
        arrived: dict[str, _Life] = {}
        for change in commit.changes:
            path = change.path
            if change.status == "R" and change.old_path is not None:
                life = alive.pop(change.old_path, None)
                if life is None:
                    life = _Life([change.old_path])
                    lives.append(life)
                life.paths.append(path)
                arrived[path] = life
            elif change.status == "D":
                life = alive.pop(path, None)
                if life is None:
                    continue
                life.alive = False
                deleted[path] = life
            else:
                life = alive.get(path)
                if life is None or change.status in "AC":
                    life = deleted.pop(path, None) or _Life([path])
                    if not life.events:
                        lives.append(life)
                    life.alive = True
                    arrived[path] = life
            life.events.append((commit, change))
        alive |= arrived
    return lives


def _event(commit: RawCommit, change: RawChange, number: int, boundary: frozenset[str]) -> FileEvent:
    what: What
    if change.status == "R":
        what = "renamed"
    elif change.status == "D":
        what = "deleted"
    elif change.status in "AC":
        what = "back" if number else "there already" if commit.hash in boundary else "born"
    else:
        what = "changed" if number else "there already"
    dates, pr = (commit.author_date, commit.committer_date), pull_request(commit.subject)
    old_path = change.old_path if change.status == "R" else None
    return FileEvent(commit.hash, *dates, pr, commit.subject, what, change.path, old_path)


# --- lines


def _with_lines(clone: Clone, life: _Life, events: list[FileEvent], boundary: frozenset[str]) -> list[FileEvent]:
    held = _Held(clone)
    held.load(change for _, change in life.events)
    lines = [held.lines(change) for _, change in life.events]
    split = [
        max(gone.total(), come.total()) >= SPLIT_LINES and len(commit.changes) <= SWEEP and commit.hash not in boundary
        for (commit, _), (gone, come) in zip(life.events, lines, strict=True)
    ]
    held.load(
        change
        for (commit, own), wanted in zip(life.events, split, strict=True)
        for change in commit.changes
        if wanted and change is not own
    )
    found = []
    for event, (commit, change), (gone, come), wanted in zip(events, life.events, lines, split, strict=True):
        if event.what != "there already" and held.has(change):
            plus, minus = changed_lines(held.texts[change.old], held.texts[change.new])
            event = replace(event, lines_added=plus, lines_deleted=minus)
        if wanted:
            others = [(other, *held.lines(other)) for other in commit.changes if other is not change]
            event = replace(
                event,
                went_to=_flows(gone, [(other.path, theirs) for other, _, theirs in others]),
                came_from=_flows(come, [(other.old_path or other.path, theirs) for other, theirs, _ in others]),
            )
        found.append(event)
    return found


class _Held:
    """Contents that the clone has. texts: by their hashes; of None, which is no file, they are empty."""

    def __init__(self, clone: Clone) -> None:
        self._clone = clone
        self.texts: dict[str | None, bytes] = {None: b""}

    def load(self, changes: Iterable[RawChange]) -> None:
        hashes = {blob for change in changes for blob in (change.old, change.new) if blob}
        self.texts.update(known_contents(self._clone, hashes - self.texts.keys()))

    def has(self, change: RawChange) -> bool:
        """Those before and after the change? A catalogue's knows no hashes."""
        return (change.old or change.new) is not None and {change.old, change.new} <= self.texts.keys()

    def lines(self, change: RawChange) -> tuple[Counter[bytes], Counter[bytes]]:
        """Lines that the file lost in the change, and those that it gained; telling ones only."""
        if not self.has(change):
            return Counter(), Counter()
        old, new = (self.texts[blob].split(b"\n") for blob in (change.old, change.new))
        before, after = set(old), set(new)
        gone = Counter(telling_lines(line for line in old if line not in after))
        come = Counter(telling_lines(line for line in new if line not in before))
        return gone - come, come - gone  # what was only indented in another way is neither


def _flows(lines: Counter[bytes], others: Iterable[tuple[str, Counter[bytes]]]) -> tuple[Flow, ...]:
    """Each line counts for one file, the one that shares the most."""
    left = lines.copy()
    flows = []
    for path, theirs in sorted(others, key=lambda other: -(lines & other[1]).total()):
        shared = left & theirs
        if shared.total() >= max(SPLIT_LINES, SPLIT_PART * lines.total()):
            flows.append(Flow(path, shared.total()))
            left -= shared
    return tuple(flows)
