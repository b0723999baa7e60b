"""What checks read off a clone: commits, files, definitions, diffs. Each is read once, and many at a time.

A revision is a release of the catalogue ("v0.4.6"), a hash of seven digits or more, or one of these followed by ^ or ~:
never the name of a branch or tag, which may be anything in somebody's clone. A path is below the catalogue's DIRECTORY;
with a slash in front it is below the repository's root: "eagle_worker.py", "/python/sglang/srt/managers/scheduler.py".

Every function raises LacksError if the clone lacks what it would need, and NotThereError for what the history does not
hold: a file that a revision has not, a definition that a file has not. Under `Shelf.gathering` it raises NotYet for
what has not been read so far, so that a caller can run many checks up to there and then fetch for all of them at once.
Each notes the command that shows a reader the same (`Shelf.trail`), before it looks.

A check that reads a file at eight revisions, one after another, would be run nine times, and git started for each of
them: what is not here yet ends the run. `each` asks for all before it lets NotYet out:

    sizes = each(lambda revision: len(lines(clone, revision, "eagle_worker.py")), revisions)

The first run notes eight files, git hands them out together, and the second run comes to its end.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cache, cached_property, lru_cache
from typing import TypeVar

from refspec.history import catalogue
from refspec.history.catalogue import DIRECTORY
from refspec.history.clone import PLAIN_DIFF, Clone, HistoryError, LacksError
from refspec.history.commits import pull_request
from refspec.history.patches import FileDiff, changes_by

Asked = TypeVar("Asked")
Told = TypeVar("Told")


class NotThereError(HistoryError):
    """The history does not hold what was asked for. The message names it."""


class NotYet(Exception):
    """What was asked for is to be fetched first."""


@dataclass(frozen=True)
class CommitFacts:
    """A commit. Dates as ISO 8601 in the zone of whoever made it: the first ten characters are that person's day."""

    hash: str
    author_date: str
    committer_date: str
    subject: str
    body: str
    parents: tuple[str, ...]

    @property
    def pr(self) -> int | None:
        """The number of the pull request that the title ends with."""
        return pull_request(self.subject)


@dataclass(frozen=True)
class Defined:
    """A function or class. name: with its classes, "EAGLEWorker.draft". bases: of a class, as written."""

    name: str
    first: int
    last: int
    bases: tuple[str, ...]
    text: str
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Change:
    """What a commit did to a file. status: as in patches.FileDiff. path, old_path: from the repository's root; alike if
    it was not renamed.

    added: number after, and text, of each line. removed: number before, and text.
    """

    status: str
    path: str
    old_path: str
    added: tuple[tuple[int, str], ...]
    removed: tuple[tuple[int, str], ...]

    @property
    def plus(self) -> list[str]:
        """The texts of the lines added."""
        return [text for _, text in self.added]

    @property
    def minus(self) -> list[str]:
        """The texts of the lines removed."""
        return [text for _, text in self.removed]


# --- what checks ask


def commit(clone: Clone, revision: str) -> CommitFacts:
    """The commit."""
    shelf = shelf_of(clone)
    shelf.trail("git", "show", "-s", "--format=fuller", revision)
    hash_ = shelf.resolved(revision)
    return _commit_facts(hash_, shelf.content(hash_, revision))


def text(clone: Clone, revision: str, path: str) -> str:
    """A file's text."""
    shelf = shelf_of(clone)
    rooted = full_path(path)
    shelf.trail("git", "show", f"{revision}:{rooted}")
    hash_ = shelf.resolved(revision)
    return shelf.file(hash_, rooted, revision).decode(errors="replace")


def lines(clone: Clone, revision: str, path: str) -> list[str]:
    """A file's lines; the first has index 0."""
    said = text(clone, revision, path)
    return said.removesuffix("\n").split("\n") if said else []


def where(clone: Clone, revision: str, path: str, pattern: str, first: int = 1, last: int | None = None) -> list[int]:
    """The numbers (from 1) of the lines, from `first` to `last`, in which the regular expression is found."""
    numbered = enumerate(lines(clone, revision, path), start=1)
    return [n for n, line in numbered if first <= n <= (last or n) and re.search(pattern, line)]


def exists(clone: Clone, revision: str, path: str) -> bool:
    """Has the revision this file or folder? Its contents need not be in the clone."""
    shelf = shelf_of(clone)
    rooted = full_path(path)
    shelf.trail("git", "ls-tree", "--full-tree", revision, "--", rooted)
    hash_ = shelf.resolved(revision)
    folder, name = posixpath.split(rooted)
    try:
        return name in shelf.folder(hash_, folder, revision)
    except NotThereError:
        return False


def files(clone: Clone, revision: str, folder: str = "") -> list[str]:
    """The files in a folder and those below it, sorted, named from there. Their contents need not be in the clone."""
    shelf = shelf_of(clone)
    rooted = full_path(folder)
    shelf.trail("git", "ls-tree", "-r", "--full-tree", "--name-only", revision, *(["--", rooted] if rooted else []))
    hash_ = shelf.resolved(revision)
    return sorted(_files(shelf, hash_, rooted, revision))


def definitions(clone: Clone, revision: str, path: str) -> dict[str, Defined]:
    """The functions and classes of a Python file, by name with their classes, in the file's order."""
    said = text(clone, revision, path)
    try:
        return _definitions(said)
    except (SyntaxError, ValueError) as error:  # ValueError: there is a NUL in it
        raise HistoryError(f"this Python cannot read {path} at {revision}: {error}") from None


def definition(clone: Clone, revision: str, path: str, name: str) -> Defined:
    """One of them."""
    found = definitions(clone, revision, path)
    if name not in found:
        raise NotThereError(f"{path} at {revision} defines no {name}")
    return found[name]


def changes(clone: Clone, revision: str) -> tuple[Change, ...]:
    """What a commit changed, file by file; a file that is half alike is the same one renamed."""
    shelf = shelf_of(clone)
    shelf.trail("git", "show", "-M", "--stat", revision)
    hash_ = shelf.resolved(revision)
    return shelf.diff(hash_, revision)


def touched(clone: Clone, revision: str) -> list[str]:
    """The paths, from the repository's root, of the files that a commit changed; of a renamed one, both.

    Their contents need not be in the clone. One git process each.
    """
    shelf = shelf_of(clone)
    shelf.trail("git", "show", "--no-renames", "--name-status", revision)
    return shelf.touched(shelf.resolved(revision), revision)


def change(clone: Clone, revision: str, path: str) -> Change:
    """What it changed in one file, named as it is afterwards."""
    shelf = shelf_of(clone)
    rooted = full_path(path)
    shelf.trail("git", "show", revision, "--", f":/{rooted}")
    hash_ = shelf.resolved(revision)
    for one in shelf.diff(hash_, revision):
        if one.path == rooted:
            return one
    raise NotThereError(f"{revision} does not touch {path}")


def on_main(clone: Clone, revision: str) -> bool:
    """Is the commit on the main line, at least as far as the catalogue knows it?"""
    shelf = shelf_of(clone)
    shelf.trail("git", "branch", "-a", "--contains", revision)
    hash_ = shelf.known(revision)
    if hash_ in shelf.main_line:
        return True
    if clone.is_shallow or shelf.resolved(catalogue.reach().commit) not in shelf.main_line:
        raise LacksError(f"this clone's {clone.main.name} ends too early, or begins too late, to hold {revision}")
    return False


def grep(clone: Clone, revision: str, pattern: str, folder: str = "/") -> list[tuple[str, int, str]]:
    """Path (from the root), number and text of each line in which git finds the extended regular expression.

    One git process each.
    """
    shelf = shelf_of(clone)
    rooted = full_path(folder)
    below = ["--", rooted] if rooted else []
    shelf.trail("git", "grep", "-nE", pattern, revision, "--", f":/{rooted}")
    hash_ = shelf.resolved(revision)
    shelf.demand_contents(hash_, rooted, revision)
    said = shelf.answer("grep", "-nzIE", "-e", pattern, hash_, *below)
    found = []
    for line in said.split("\n")[:-1]:
        name, number, content = line.split("\0", 2)
        found.append((name.partition(":")[2], int(number), content))
    return found


def touching(clone: Clone, needle: str, path: str = "", until: str | None = None) -> list[str]:
    """The commits that changed how often `needle` stands below a path, the oldest first: git's -S.

    Up to a revision; None: the catalogue's last. One git process each, and a slow one.
    """
    shelf = shelf_of(clone)
    until = until or catalogue.reach().commit[:10]
    rooted = full_path(path)
    below = ["--", rooted] if rooted else []
    shelf.trail("git", "log", "--oneline", "--reverse", f"-S{needle}", until, "--", f":/{rooted}")
    hash_ = shelf.resolved(until)
    return shelf.answer("log", "--reverse", "--format=%H", f"-S{needle}", *PLAIN_DIFF, hash_, *below).split()


def each(ask: Callable[[Asked], Told], many: Iterable[Asked]) -> list[Told]:
    """What is told of each of many. All are asked before the first has to be waited for, so that one fetch will do."""
    told, waits = [], False
    for one in many:
        try:
            told.append(ask(one))
        except NotYet:
            waits = True
    if waits:
        raise NotYet
    return told


def full_path(path: str) -> str:
    """From the repository's root; see the module on slashes."""
    return path.strip("/") if path.startswith("/") else f"{DIRECTORY}/{path}".rstrip("/")


# --- what has been read


class Shelf:
    """All that was read off one clone."""

    def __init__(self, clone: Clone) -> None:
        self._clone = clone
        self._commits: dict[str, str | None] = {}
        self._contents: dict[str, bytes | HistoryError | None] = {}
        self._diffs: dict[str, tuple[Change, ...] | HistoryError] = {}
        self._answers: dict[tuple[str, ...], str | HistoryError] = {}
        self._wanted_commits: list[str] = []
        self._wanted_contents: list[str] = []
        self._wanted_diffs: dict[str, str] = {}
        self._gathers = False
        self._trail: dict[str, None] = {}

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """In the block, what is not here yet is noted, and NotYet raised. Afterwards all of it is fetched."""
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False
        self._fetch()

    @contextmanager
    def trailing(self) -> Iterator[dict[str, None]]:
        """Gives what holds, once the block is left, the commands that show what was read in it, each once."""
        self._trail = {}
        yield self._trail

    def trail(self, *command: str) -> None:
        """Notes a command, word by word, that shows a reader what is being read."""
        self._trail[shlex.join(command)] = None

    def known(self, revision: str) -> str | None:
        """The hash of the commit; None if the clone has none."""
        if revision not in self._commits:
            self._wanted_commits.append(revision)
            self._fetch_or_wait()
        return self._commits[revision]

    def resolved(self, revision: str) -> str:
        """The hash of the commit. Raises LacksError if the clone has none."""
        hash_ = self.known(revision)
        if hash_ is None:
            raise LacksError(f"this clone lacks the commit {revision}{self._clone.remedy()}")
        return hash_

    def content(self, hash_: str, what: str) -> bytes:
        """An object. what: as people call it."""
        found = self._object(hash_)
        if found is None:
            raise self._lacks(what)
        return found

    def file(self, commit_: str, path: str, revision: str) -> bytes:
        """What is in a file of a commit."""
        return self._at(commit_, path, revision, f"the contents of {path} at {revision}")

    def folder(self, commit_: str, path: str, revision: str) -> dict[str, tuple[bool, str]]:
        """The names in a folder of a commit, whether each is a folder, and its hash."""
        tree = self._at(commit_, path, revision, f"the list of files of {path or revision}")
        try:
            return _entries(tree, len(commit_) // 2)
        except ValueError:
            raise NotThereError(f"{path} at {revision} is no folder") from None

    def _object(self, name: str) -> bytes | None:
        if name not in self._contents:
            self._wanted_contents.append(name)
            self._fetch_or_wait()
        return _or_raise(self._contents[name])

    def _at(self, commit_: str, path: str, revision: str, what: str) -> bytes:
        found = self._object(f"{commit_}:{path}") if not self._clone.is_partial else None
        if found is None:  # not in the history, or not in the clone: step by step, it can be told
            found = self.content(self._hash_at(commit_, path, revision), what)
        return found

    def _hash_at(self, commit_: str, path: str, revision: str) -> str:
        if not path:
            return self.content(commit_, revision).split(b"\n", 1)[0].removeprefix(b"tree ").decode()
        above, name = posixpath.split(path)
        entries = self.folder(commit_, above, revision)
        if name not in entries:
            raise NotThereError(f"{revision} has no {path}")
        return entries[name][1]

    def demand_contents(self, commit_: str, path: str, revision: str) -> None:
        """Raises LacksError unless the clone has the contents of all files below a path."""
        if not self._clone.is_partial:
            return
        listed = self.answer("ls-tree", "-r", "-z", "--full-tree", commit_, *(["--", path] if path else []))
        entries = (line.partition("\t")[0].split(" ") for line in listed.split("\0") if line)
        blobs = {hash_ for _, kind, hash_ in entries if kind == "blob"}
        if not blobs <= self._clone.present(*blobs):
            raise self._lacks(f"the contents of files below {path or 'the top'} at {revision}")

    def diff(self, hash_: str, revision: str) -> tuple[Change, ...]:
        """What the commit changed."""
        if hash_ not in self._diffs:
            self._wanted_diffs[hash_] = revision
            self._fetch_or_wait()
        return _or_raise(self._diffs[hash_])

    def touched(self, hash_: str, revision: str) -> list[str]:
        """The paths that the commit changed."""
        if hash_ in self._clone.boundary:
            raise self._lacks(f"the commit before {revision}")
        options = ("--root", "-r", "-z", "--no-renames", "--name-only", "--no-commit-id")
        return self.answer("diff-tree", *options, hash_).split("\0")[:-1]

    @cached_property
    def main_line(self) -> frozenset[str]:
        """The hashes of all commits of the main line."""
        return frozenset(self.answer("rev-list", self._clone.main.commit).split())

    def answer(self, *arguments: str) -> str:
        """What git prints, asked once."""
        if arguments not in self._answers:
            try:
                said = self._clone.git(*arguments, allowed=(0, 1) if arguments[0] == "grep" else (0,))
                self._answers[arguments] = said.decode(errors="replace")
            except HistoryError as error:
                self._answers[arguments] = error
        return _or_raise(self._answers[arguments])

    # --- fetching: one git process for all commits, one for all contents, one for all diffs

    def _fetch_or_wait(self) -> None:
        if self._gathers:
            raise NotYet
        self._fetch()

    def _fetch(self) -> None:
        revisions, self._wanted_commits = list(dict.fromkeys(self._wanted_commits)), []
        contents, self._wanted_contents = list(dict.fromkeys(self._wanted_contents)), []
        diffs, self._wanted_diffs = self._wanted_diffs, {}
        self._commits |= zip(revisions, self._clone.resolve(*map(_git_name, revisions)), strict=True)
        self._fetch_contents(contents)
        self._fetch_diffs(diffs)

    def _fetch_contents(self, names: Sequence[str]) -> None:
        found = self._in_bulk(self._read_contents, names)
        self._contents |= found

    def _read_contents(self, names: Sequence[str]) -> dict[str, bytes | None]:
        return dict(zip(names, self._clone.objects(*names), strict=True))

    def _in_bulk(
        self, read: Callable[[Sequence[str]], dict[str, Told]], names: Sequence[str]
    ) -> dict[str, Told | HistoryError]:
        """What is read for all names at once; where that fails, for a damaged object, one by one."""
        try:
            return {**read(names)}
        except HistoryError as error:
            if len(names) == 1:
                return {names[0]: error}
            return {name: found for one in names for name, found in self._in_bulk(read, [one]).items()}

    def _fetch_diffs(self, wanted: dict[str, str]) -> None:
        boundary = self._clone.boundary & wanted.keys()
        lacking = boundary | self._undiffable([hash_ for hash_ in wanted if hash_ not in boundary])
        for hash_ in lacking:
            what = "the commit before" if hash_ in boundary else "the contents of files before or after"
            self._diffs[hash_] = self._lacks(f"{what} {wanted[hash_]}")
        diffs = self._in_bulk(self._read_diffs, [hash_ for hash_ in wanted if hash_ not in lacking])
        self._diffs |= diffs

    def _undiffable(self, hashes: Sequence[str]) -> set[str]:
        """The commits of a partial clone that has not all contents of what they changed."""
        if not self._clone.is_partial or not hashes:
            return set()
        given = "".join(f"{hash_}\n" for hash_ in hashes).encode()
        options = ("--stdin", "--root", "-r", "--raw", "--no-renames", "--no-abbrev")
        try:
            said = self._clone.git("diff-tree", *options, stdin=given).decode(errors="replace")
        except LacksError:  # not even the lists of files
            return set(hashes)
        needed: dict[str, set[str]] = {}
        objects: set[str] = set()
        for line in said.split("\n"):
            if line.startswith(":"):
                objects |= {hash_ for hash_ in line.split(" ")[2:4] if hash_.strip("0")}
            elif line:
                objects = needed.setdefault(line, set())
        present = self._clone.present(*set().union(*needed.values()))
        return {hash_ for hash_, objects in needed.items() if not objects <= present}

    def _read_diffs(self, hashes: Sequence[str]) -> dict[str, tuple[Change, ...]]:
        return {hash_: tuple(map(_change, files_)) for hash_, files_ in changes_by(self._clone, *hashes).items()}

    def _lacks(self, what: str) -> LacksError:
        return LacksError(f"this clone lacks {what}{self._clone.remedy_for_contents()}")


@lru_cache(maxsize=1)
def shelf_of(clone: Clone) -> Shelf:
    """What was read off a clone so far."""
    return Shelf(clone)


_Read = TypeVar("_Read")


def _or_raise(found: _Read | HistoryError) -> _Read:
    if isinstance(found, HistoryError):
        raise found
    return found


def _git_name(revision: str) -> str:
    """What git calls the revision: a name that no branch or tag can be meant by. See the module."""
    named = re.fullmatch(r"(v?[\w.]+)((?:[\^~]\d*)*)", revision)
    if named is None:
        raise ValueError(f"{revision!r} is no name of a revision here")
    base, steps = named.groups()
    hash_ = _releases().get(base.removeprefix("v")) or _catalogued(base)
    if hash_ is None and not re.fullmatch("[0-9a-f]{7,64}", base):
        raise ValueError(f"{revision!r} is neither a release nor a hash")
    return f"commit-g{hash_ or base}{steps}"  # as `git describe` has it: the hash alone counts


@cache
def _releases() -> dict[str, str]:
    return {release.version: release.commit for release in catalogue.releases()}


def _catalogued(start: str) -> str | None:
    hashes = {known.hash for known in catalogue.commits()} | {known.hash for known in catalogue.story()}
    found = [hash_ for hash_ in hashes if hash_.startswith(start)]
    return found[0] if len(found) == 1 else None


def _commit_facts(hash_: str, content: bytes) -> CommitFacts:
    head, _, message = content.decode(errors="replace").partition("\n\n")
    fields = [line.partition(" ")[::2] for line in head.split("\n")]
    values = dict(fields)
    subject, _, body = message.lstrip("\n").partition("\n\n")
    return CommitFacts(
        hash_,
        _date(values["author"]),
        _date(values["committer"]),
        " ".join(subject.split("\n")).strip(),
        body.strip("\n"),
        tuple(value for name, value in fields if name == "parent"),
    )


def _date(signature: str) -> str:
    _, seconds, zone = signature.rsplit(" ", 2)
    minutes = int(zone[:-2]) * 60 + int(zone[0] + zone[-2:])
    return datetime.fromtimestamp(int(seconds), timezone(timedelta(minutes=minutes))).isoformat()


def _entries(tree: bytes, hash_bytes: int) -> dict[str, tuple[bool, str]]:
    """The names in a tree object, whether each is a folder, and its hash."""
    found = {}
    at = 0
    while at < len(tree):
        end = tree.index(b"\0", at)
        mode, _, name = tree[at:end].partition(b" ")
        at = end + 1 + hash_bytes
        found[name.decode(errors="surrogateescape")] = (mode == b"40000", tree[end + 1 : at].hex())
    return found


def _files(shelf: Shelf, hash_: str, folder: str, revision: str) -> Iterator[str]:
    for name, (is_folder, _) in shelf.folder(hash_, folder, revision).items():
        if is_folder:
            for below in _files(shelf, hash_, posixpath.join(folder, name), revision):
                yield f"{name}/{below}"
        else:
            yield name


def _change(file: FileDiff) -> Change:
    both = [line for hunk in file.hunks() for line in hunk.lines]
    added, removed = (tuple((line.number, line.text) for line in both if line.sign == sign) for sign in "+-")
    return Change(file.status, file.path, file.old_path or file.path, added, removed)


@lru_cache(maxsize=256)
def _definitions(said: str) -> dict[str, Defined]:
    found: dict[str, Defined] = {}
    all_lines = said.split("\n")

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + child.name
                last = child.end_lineno or child.lineno
                bases = tuple(map(ast.unparse, child.bases)) if isinstance(child, ast.ClassDef) else ()
                body = "\n".join(all_lines[child.lineno - 1 : last])
                found[name] = Defined(name, child.lineno, last, bases, body, child)
                walk(child, f"{name}.")
            elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                walk(child, prefix)

    walk(ast.parse(said), "")
    return found
