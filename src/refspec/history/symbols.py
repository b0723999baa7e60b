"""The life of a name in Python: where it was defined first, where it moved, what it was called before and after.

Every commit on the main line (of merges, the first parent's side) that touches the folder is looked at, with the
contents of all its files before and after, which take git about as long to hand out as the log itself. A definition
that vanishes in a commit and appears in another file, or in another class, moved; one that vanishes while another with
nearly the same body appears was renamed. What left the folder, or came into it, is looked for in the rest of the
repository's changes in that commit.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from refspec.history.catalogue import DIRECTORY
from refspec.history.clone import Clone, HistoryError
from refspec.history.commits import pull_request
from refspec.history.likeness import changed_lines, likeness, telling_lines
from refspec.history.outline import Definition, Kind, parse, scan
from refspec.history.raw_log import SWEEP, RawChange, RawCommit, contents, known_contents, parse_change, read_raw_log

What = Literal[
    "born", "there already", "back", "came", "changed", "moved", "renamed from", "renamed to", "left", "died"
]

# From this likeness on, a definition that appears in a commit in which another vanishes is that one: of the same name
# in another file; a method of the same name in another class of the file; one of another name, or a method elsewhere.
SAME_NAME = 0.3
SAME_FILE = 0.5
OTHER_NAME = 0.6
# And from this one on, one that is born beside another is a copy of it.
COPY = 0.8
# A class in whose place and file another has so many of its methods, word for word, is that one.
KEPT = 0.8
# So many versions of files are read at once; of a larger folder, only files that ever mentioned the name.
MANY = 8_000


@dataclass(frozen=True)
class Place:
    """Where a definition stands: a file, and the qualified name within it."""

    path: str
    name: str


@dataclass(frozen=True)
class Event:
    """What a commit did to a definition.

    | what          | place                         | other                                            |
    |---------------|-------------------------------|--------------------------------------------------|
    | born, back    | where it is                   | of born, a definition that it is a copy of       |
    | there already | where it is                   | None: the commit's parents are not in the clone  |
    | came, left    | its place within the folder   | its place beyond the folder                      |
    | changed       | where it is                   | None                                             |
    | moved         | where it is then              | where it was                                     |
    | renamed from  | where it is                   | what it was called before, and where             |
    | renamed to    | where it was                  | what it is called then, and where                |
    | died          | where it was                  | None                                             |

    before, after: the definition in the commit's parent and in the commit, within the folder; None where there is none.
    """

    hash: str
    author_date: str
    committer_date: str
    pr: int | None
    subject: str
    what: What
    place: Place
    other: Place | None = None
    before: Definition | None = None
    after: Definition | None = None

    @cached_property
    def _lines(self) -> tuple[int, int]:
        unknown = self.what in ("there already", "came", "left", "renamed from", "renamed to")
        texts = (b"" if one is None else one.text for one in (self.before, self.after))
        return (0, 0) if unknown else changed_lines(*texts)

    @property
    def lines_added(self) -> int:
        """So many lines more are needed, at least, to make the definition what it is afterwards."""
        return self._lines[0]

    @property
    def lines_deleted(self) -> int:
        """So many lines less."""
        return self._lines[1]


@dataclass(frozen=True)
class Life:
    """One definition from its birth on, the oldest event first. place: where it is, or where it was last."""

    kind: Kind
    place: Place
    alive: bool
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Mention:
    """A commit in which the number of a name's mentions in the folder changed, and what it is afterwards."""

    hash: str
    author_date: str
    subject: str
    number: int


@dataclass(frozen=True)
class SymbolHistory:
    """Lives of the definitions that bear a name, by their first commit; where there are none, its mentions.

    mentions: commits in which their number changed, the oldest first. mentioned_in: files that mention it at the end.
    begins: commits of a shallow clone at which the history seen here begins, not the folder's own. unseen: commits in
    which a life began or ended, and of which the clone lacks contents beyond the folder, where it may have come from or
    gone to.
    """

    name: str
    path: str
    lives: tuple[Life, ...]
    mentions: tuple[Mention, ...]
    mentioned_in: tuple[str, ...]
    begins: tuple[str, ...]
    unseen: tuple[str, ...]


@dataclass
class _Commit:
    """A commit and what it did to the definitions of the name: before, after, and how the two belong together."""

    raw: RawCommit
    before: dict[Place, Definition] = field(default_factory=dict)
    after: dict[Place, Definition] = field(default_factory=dict)
    moves: list[tuple[Place, Place]] = field(default_factory=list)
    came: dict[Place, Place] = field(default_factory=dict)  # where from, beyond the folder
    left: dict[Place, Place] = field(default_factory=dict)  # where to
    other_names: dict[Place, Place] = field(default_factory=dict)
    unseen: bool = False  # does the clone lack contents that it changed beyond the folder?

    def vanished(self) -> list[Place]:
        gone = {old for old, _ in self.moves}
        return [place for place in self.before if place not in self.after and place not in gone]

    def appeared(self) -> list[Place]:
        come = {new for _, new in self.moves}
        return [place for place in self.after if place not in self.before and place not in come]


def read_symbol(clone: Clone, name: str, path: str = DIRECTORY, revision: str | None = None) -> SymbolHistory:
    """The lives of all definitions of `name`, an identifier or several with dots between, in the folder or file `path`.

    Up to `revision`, a hash; None: the main line.

    "verify" means functions, methods, classes and names that are called so wherever they are, "Worker.verify" those in
    a class Worker. Raises HistoryError if it is no name, or if nothing in `path` ever mentioned it; LacksError if the
    clone has no contents of files.
    """
    check_name(name)
    own = name.rpartition(".")[2]
    tip = revision or clone.main.commit
    log = read_raw_log(clone, tip, "--no-renames", path=path)
    if not log:
        raise HistoryError(f"no commit on {clone.main.name} touches {path}{clone.remedy()}")
    if len(_contents(log)) > MANY:
        _only_mentioning(clone, log, own, path, tip)
    blobs = _Blobs(clone, own)
    blobs.load(_contents(log))
    commits = [_Commit(raw) for raw in log]
    for commit in commits:
        for change in commit.raw.changes:
            commit.before |= blobs.definitions(change.path, change.old)
            commit.after |= blobs.definitions(change.path, change.new)
    structural = [commit for commit in commits if commit.before.keys() != commit.after.keys()]
    for commit in structural:
        _check(commit, blobs)
        commit.moves = _paired(commit)
    _look_elsewhere(clone, [c for c in structural if c.vanished() or c.appeared()], blobs, path)
    lives = [life for life in _lives(commits, clone.boundary) if _is_meant(life, name)]
    mentions, mentioned_in = ([], []) if lives else _mentions(commits, blobs)
    if not lives and not mentions:
        raise HistoryError(f"nothing in {path} ever mentioned {own}{clone.remedy()}")
    begins = tuple(commit.raw.hash for commit in commits if commit.raw.hash in clone.boundary)
    ends = {event.hash for life in lives for event in life.events if event.what in ("born", "back", "died")}
    unseen = tuple(commit.raw.hash for commit in commits if commit.unseen and commit.raw.hash in ends)
    return SymbolHistory(name, path, tuple(lives), tuple(mentions), tuple(mentioned_in), begins, unseen)


def check_name(name: str) -> None:
    """Raises HistoryError unless `name` is an identifier, or several with dots between."""
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
        raise HistoryError(f"not a name in Python: {name!r} (as in verify, or EAGLEWorker.verify)")


# --- what git knows


def _contents(log: Iterable[RawCommit]) -> set[str]:
    return {blob for commit in log for change in commit.changes for blob in (change.old, change.new) if blob}


def _only_mentioning(clone: Clone, log: list[RawCommit], own: str, path: str, revision: str) -> None:
    """Drops changes of files that never mentioned the name."""
    mentioning = read_raw_log(clone, revision, "--no-renames", f"-S{own}", path=path)
    paths = {change.path for commit in mentioning for change in commit.changes}
    for commit in log:
        commit.changes = [change for change in commit.changes if change.path in paths]


class _Blobs:
    """Contents of files, and the definitions of one name in them. word: that name, as it stands in contents."""

    def __init__(self, clone: Clone, own: str) -> None:
        self._clone = clone
        self._own = own
        self.word = own.encode()
        self.contents: dict[str, bytes] = {}
        self._mentioning: set[str | None] = set()
        self._definitions: dict[str, list[Definition]] = {}

    def load(self, names: Iterable[str], lacking: bool = False) -> None:
        """Raises LacksError if some are missing, unless they may be `lacking`."""
        read = known_contents if lacking else contents
        for name, content in read(self._clone, set(names) - self.contents.keys()).items():
            self.contents[name] = content
            if self.word in content:
                self._mentioning.add(name)

    def mentions(self, blob: str | None) -> bool:
        return blob in self._mentioning

    def definitions(self, path: str, blob: str | None) -> dict[Place, Definition]:
        """Those of one place are taken together, as those of a property are, or the two of an if and its else."""
        if blob is None or blob not in self._mentioning or not path.endswith(".py"):
            return {}
        if blob not in self._definitions:
            self._definitions[blob] = scan(self.contents[blob], self._own)
        found: dict[Place, Definition] = {}
        for one in self._definitions[blob]:
            place = Place(path, one.name)
            known = found.get(place)
            found[place] = replace(known, text=known.text + b"\n" + one.text) if known else one
        return found

    def check(self, path: str, blob: str | None) -> dict[Place, Definition]:
        """The same after a look at the syntax tree, where this Python can read it."""
        if self.mentions(blob) and path.endswith(".py"):
            assert blob is not None
            try:
                exact = parse(self.contents[blob], self._own)
            except SyntaxError:
                pass
            else:
                if [one.name for one in exact] != [one.name for one in self._definitions[blob]]:
                    self._definitions[blob] = exact
        return self.definitions(path, blob)


def _check(commit: _Commit, blobs: _Blobs) -> None:
    """Looks again, more closely, at files in which a definition seems to have come or gone."""
    for change in commit.raw.changes:
        before, after = blobs.definitions(change.path, change.old), blobs.definitions(change.path, change.new)
        if before.keys() != after.keys():
            for place in (*before, *after):
                commit.before.pop(place, None)
                commit.after.pop(place, None)
            commit.before |= blobs.check(change.path, change.old)
            commit.after |= blobs.check(change.path, change.new)


# --- moved and renamed


def _paired(commit: _Commit) -> list[tuple[Place, Place]]:
    """Definitions of the name that vanish in one place and appear in another, most alike first."""
    rated = sorted(
        (
            (likeness(commit.before[old].text, commit.after[new].text), _threshold(old, new), old, new)
            for old in commit.vanished()
            for new in commit.appeared()
            if (commit.before[old].kind == "name") == (commit.after[new].kind == "name")
        ),
        key=lambda row: (row[0], -row[1]),
        reverse=True,
    )
    pairs: list[tuple[Place, Place]] = []
    for like, enough, old, new in rated:
        variable = commit.before[old].kind == "name" and old.name == new.name
        if (like >= enough or variable) and not any(old == a or new == b for a, b in pairs):
            pairs.append((old, new))
    return pairs


def _threshold(old: Place, new: Place) -> float:
    """How alike the two must be to be one."""
    return SAME_NAME if old.name == new.name else SAME_FILE if old.path == new.path else OTHER_NAME


def _look_elsewhere(clone: Clone, commits: Sequence[_Commit], blobs: _Blobs, path: str) -> None:
    """Finds what came from beyond the folder or went there, and what bears another name."""
    commits = [commit for commit in commits if commit.raw.hash not in clone.boundary]
    if not commits:
        return
    lists = "".join(f"{commit.raw.hash} {commit.raw.parent or ''}".rstrip() + "\n" for commit in commits)
    said = clone.git(
        *("diff-tree", "--stdin", "-r", "--root", "-z", "--raw", "--no-abbrev", "--no-renames", "--always", "--"),
        stdin=lists.encode(),
    )
    everywhere = _parsed_diff_tree(said)
    elsewhere: dict[str, list[RawChange]] = {}
    for commit in commits:
        inside = {change.path for change in commit.raw.changes}
        others = [c for c in everywhere.get(commit.raw.hash, []) if c.path.endswith(".py") and c.path not in inside]
        elsewhere[commit.raw.hash] = others if len(others) <= SWEEP else []
    needed = {
        commit.raw.hash: {
            blob
            for change in elsewhere[commit.raw.hash]
            for blob in ((change.new,) * bool(commit.vanished()) + (change.old,) * bool(commit.appeared()))
            if blob
        }
        for commit in commits
    }
    blobs.load((blob for wanted in needed.values() for blob in wanted), lacking=True)
    for commit in commits:
        commit.unseen = not needed[commit.raw.hash] <= blobs.contents.keys()
    for commit in commits:
        others = elsewhere[commit.raw.hash]
        for old in commit.vanished():
            found = _same_name(commit.before[old], others, "new", blobs)
            if found:
                commit.left[old] = found
                continue
            found = _other_name(commit.before[old], old, [*commit.raw.changes, *others], "new", blobs)
            if found:
                commit.other_names[old] = found
        for new in commit.appeared():
            found = _same_name(commit.after[new], others, "old", blobs)
            if found:
                commit.came[new] = found
                continue
            found = _other_name(commit.after[new], new, [*commit.raw.changes, *others], "old", blobs)
            if found:
                commit.other_names[new] = found


def _parsed_diff_tree(said: bytes) -> dict[str, list[RawChange]]:
    found: dict[str, list[RawChange]] = {}
    changes: list[RawChange] = []
    fields = iter(said.decode(errors="replace").split("\0"))
    for entry in fields:
        if entry.startswith(":"):
            changes.append(parse_change(entry, fields))
        elif entry.strip():
            changes = found.setdefault(entry.strip(), [])
    return found


Side = Literal["old", "new"]


def _blob(change: RawChange, side: Side) -> str | None:
    return change.new if side == "new" else change.old


def _other(side: Side) -> Side:
    return "old" if side == "new" else "new"


def _same_name(one: Definition, changes: Sequence[RawChange], side: Side, blobs: _Blobs) -> Place | None:
    """Where in `changes` a definition of the same name, much like this one, stands on `side` but not on the other."""
    best: tuple[float, Place | None] = (SAME_NAME, None)
    for change in changes:
        # The other side may not have been read; that it is there on both cannot be told then, and matters little.
        there = blobs.definitions(change.path, _blob(change, side))
        before = blobs.definitions(change.path, _blob(change, _other(side)))
        for place, definition in there.items():
            if place not in before and (like := likeness(one.text, definition.text)) >= best[0]:
                best = (like, place)
    return best[1]


def _other_name(one: Definition, place: Place, changes: Sequence[RawChange], side: Side, blobs: _Blobs) -> Place | None:
    """Where in `changes` nearly the same under another name stands on `side` but not on the other.

    A class goes by its methods first: one in whose place another has them all is that one, whatever either shares with
    classes elsewhere.
    """
    if one.kind == "name":
        return _other_name_of_variable(one, place, changes, side, blobs)
    if one.kind == "class":
        for change in changes:
            if change.path == place.path and (name := _renamed_classes(change, side, blobs).get(place.name)):
                return Place(change.path, name)
    own = place.name.rpartition(".")[2]
    telling = telling_lines(one.text.split(b"\n")[1:])
    if not telling:
        return None
    telling = telling[:: 1 + len(telling) // 40]
    enough = OTHER_NAME if len(telling) >= 4 else 1.0
    best: tuple[float, Place | None] = (enough, None)
    for change in changes:
        content = blobs.contents.get(_blob(change, side) or "", b"")
        if not change.path.endswith(".py") or 2 * sum(line in content for line in telling) < enough * len(telling):
            continue  # a quick look
        known = {d.name for d in scan(blobs.contents.get(_blob(change, _other(side)) or "", b""))}
        for other in scan(content):
            other_own = other.name.rpartition(".")[2]
            if other_own == own or other.name in known or (other.kind == "class") != (one.kind == "class"):
                continue
            like = likeness(one.text, _called(other.text, other_own, own))
            if like >= best[0] and other.name not in _renamed_classes(change, _other(side), blobs):
                best = (like, Place(change.path, other.name))
    return best[1]


def _renamed_classes(change: RawChange, side: Side, blobs: _Blobs) -> dict[str, str]:
    """Classes that the file has on the other side alone, and their names on `side`.

    Of two of the same scope, nearly all methods of the earlier one, two at least, are in the later one as they were.
    """
    before, after = (
        {d.name: d for d in scan(blobs.contents.get(blob or "", b""))} for blob in (change.old, change.new)
    )
    renamed: dict[str, str] = {}
    for old in (d.name for d in before.values() if d.kind == "class" and d.name not in after):
        scope, _, own = old.rpartition(".")
        methods = {name.removeprefix(old): d.text for name, d in before.items() if name.startswith(f"{old}.")}
        rated = [(0, "")]
        for new in (d.name for d in after.values() if d.kind == "class" and d.name not in before):
            new_scope, _, new_own = new.rpartition(".")
            if new_scope == scope:
                there = ((text, after.get(f"{new}{name}")) for name, text in methods.items())
                rated.append((sum(d is not None and _called(d.text, new_own, own) == text for text, d in there), new))
        kept, new = max(rated)
        if kept >= max(2, KEPT * len(methods)):
            renamed[old] = new
    return renamed if side == "new" else {new: old for old, new in renamed.items()}


def _other_name_of_variable(
    one: Definition, place: Place, changes: Sequence[RawChange], side: Side, blobs: _Blobs
) -> Place | None:
    """One line says little: the other must say the same, and a further line must have changed the same name."""
    scope, _, own = place.name.rpartition(".")
    line = one.text.partition(b"\n")[0].strip()
    for change in changes:
        if change.path != place.path:
            continue
        here, there = (blobs.contents.get(_blob(change, s) or "", b"") for s in (_other(side), side))
        went, came = ({line.strip() for line in text.split(b"\n")} for text in (here, there))
        went, came = went - came, came - went
        mentioning = [line for line in went if own.encode() in line]
        candidates = {match[1].decode() for new in came if (match := re.match(rb"(\w+)[ \t]*[:=]", new))}
        rated = []
        for other in candidates - {own}:
            if _called(line, own, other) not in came or scan(here, other):
                continue
            if any(found.name.rpartition(".")[0] == scope for found in scan(there, other)):
                rated.append((sum(_called(mention, own, other) in came for mention in mentioning), other))
        number, other = max(rated, default=(0, ""))
        if number >= 2:
            return Place(change.path, f"{scope}.{other}" if scope else other)
    return None


def _called(text: bytes, name: str, other: str) -> bytes:
    """The text with `other` wherever it says `name`."""
    return re.sub(rb"(?<![\w\x80-\xff])" + re.escape(name.encode()) + rb"(?![\w\x80-\xff])", other.encode(), text)


# --- lives


@dataclass
class _Life:
    kind: Kind
    place: Place
    alive: bool = True
    events: list[Event] = field(default_factory=list)
    text: bytes = b""  # as it is, or was last


def _lives(commits: Sequence[_Commit], boundary: frozenset[str]) -> list[Life]:
    lives: list[_Life] = []
    here: dict[Place, _Life] = {}  # alive
    died: dict[Place, _Life] = {}
    for commit in commits:
        moved = dict(commit.moves)
        arrivals: dict[Place, _Life] = {}
        for place, old in commit.before.items():
            life = here.get(place)
            if life is None:
                continue  # it was there before the history that is known
            there = moved.get(place, place)
            new = commit.after.get(there)
            if place in moved:
                life.events.append(_event(commit, "moved", there, place, old, new))
                arrivals[there] = here.pop(place)
            elif new is None:
                life.events.append(_end(commit, place, old))
                life.alive = False
                died[place] = here.pop(place)
            elif new.text != old.text:
                life.events.append(_event(commit, "changed", place, None, old, new))
        here |= arrivals
        for place, new in commit.after.items():
            if place not in here:
                life = died.pop(place, None) or _Life(new.kind, place)
                if not life.events:
                    lives.append(life)
                here[place] = life
                life.events.append(_birth(commit, place, new, life, here, boundary))
                life.alive = True
            life = here[place]
            life.kind, life.place, life.text = new.kind, place, new.text
    return [Life(life.kind, life.place, life.alive, tuple(life.events)) for life in lives]


def _end(commit: _Commit, place: Place, old: Definition) -> Event:
    if place in commit.left:
        return _event(commit, "left", place, commit.left[place], old)
    if place in commit.other_names:
        return _event(commit, "renamed to", place, commit.other_names[place], old)
    return _event(commit, "died", place, None, old)


def _birth(
    commit: _Commit,
    place: Place,
    new: Definition,
    life: _Life,
    here: dict[Place, _Life],
    boundary: frozenset[str],
) -> Event:
    if commit.raw.hash in boundary:
        return _event(commit, "there already", place, None, None, new)
    if place in commit.came:
        return _event(commit, "came", place, commit.came[place], None, new)
    if place in commit.other_names:
        return _event(commit, "renamed from", place, commit.other_names[place], None, new)
    if life.events:
        return _event(commit, "back", place, None, None, new)
    others = [] if new.kind == "name" else [other for other in here.values() if other is not life]
    like, origin = max(((likeness(o.text, new.text), o.place) for o in others), key=lambda o: o[0], default=(0.0, None))
    return _event(commit, "born", place, origin if like >= COPY else None, None, new)


def _event(
    commit: _Commit,
    what: What,
    place: Place,
    other: Place | None = None,
    before: Definition | None = None,
    after: Definition | None = None,
) -> Event:
    raw = commit.raw
    pr = pull_request(raw.subject)
    dates = (raw.author_date, raw.committer_date)
    return Event(raw.hash, *dates, pr, raw.subject, what, place, other, before, after)


def _is_meant(life: Life, name: str) -> bool:
    places = {event.place.name for event in life.events}
    places |= {event.other.name for event in life.events if event.other and event.what in ("moved", "came", "left")}
    return any(f".{place}".endswith(f".{name}") for place in places)


def _mentions(commits: Sequence[_Commit], blobs: _Blobs) -> tuple[list[Mention], list[str]]:
    word = re.compile(rb"(?<![\w\x80-\xff])" + re.escape(blobs.word) + rb"(?![\w\x80-\xff])")
    counts: dict[str, int] = {}

    def number(blob: str | None) -> int:
        if not blobs.mentions(blob):
            return 0
        assert blob is not None
        if blob not in counts:
            counts[blob] = len(word.findall(blobs.contents[blob]))
        return counts[blob]

    found: list[Mention] = []
    files: dict[str, int] = {}
    total = 0
    for commit in commits:
        before = total
        for change in commit.raw.changes:
            now = number(change.new)
            total += now - files.get(change.path, 0)
            files[change.path] = now
        if total != before or any(number(c.old) != number(c.new) for c in commit.raw.changes):
            found.append(Mention(commit.raw.hash, commit.raw.author_date, commit.raw.subject, total))
    return found, sorted(path for path, n in files.items() if n)
