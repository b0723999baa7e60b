"""The folder at releases and other revisions: its files, and which of them came, went and were renamed in between.

A clone is asked with as many git processes for a hundred revisions as for one: the trees of all by one `cat-file
--batch-check`; their files by one `diff-tree --stdin`, which is given each tree beside the one before it, the first
beside the empty tree, and so tells of all of them how they came to be; and lines that the catalogue does not know by
one `cat-file --batch`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from refspec.history import catalogue
from refspec.history.catalogue import DIRECTORY, Release
from refspec.history.clone import PLAIN_DIFF, Clone, LacksError
from refspec.history.patches import EMPTY_TREE
from refspec.history.raw_log import parse_change
from refspec.history.revisions import VERSION, find, is_number
from refspec.history.sources import Source

_PAIR = re.compile(r"([0-9a-f]{40,}) ([0-9a-f]{40,})\n?")


@dataclass(frozen=True)
class Snapshot:
    """The folder at one revision.

    name: as it was asked for; of a release its tag, "v0.4.6". commit: None of a wheel, whose commit is not known.
    date: the author's day. source: "clone", "catalogue" or "wheel"; the last two know Python files alone. files: name
    below the folder -> lines, None where they are not known, and in the order of git's trees. came, went, renamed (old
    name -> new): against the snapshot before it; of the first one all None, for nothing is known of what was before.
    They tell of all files; those that are counted are the Python files, see `change`.
    tree: the folder's, in the clone.
    """

    name: str
    commit: str | None
    date: str | None
    source: str
    files: dict[str, int | None]
    came: tuple[str, ...] | None = None
    went: tuple[str, ...] | None = None
    renamed: dict[str, str] | None = None
    tree: str | None = None

    @property
    def python_files(self) -> list[str]:
        return [name for name in self.files if name.endswith(".py")]

    @property
    def workers(self) -> list[str]:
        """The Python files with worker in their names, not in those of folders."""
        return [name for name in self.python_files if "worker" in name.rsplit("/", 1)[-1]]

    @property
    def lines(self) -> int | None:
        """Of the Python files; None if those of one are not known."""
        known = [lines for name in self.python_files if (lines := self.files[name]) is not None]
        return sum(known) if len(known) == len(self.python_files) else None

    @property
    def other_files(self) -> list[str]:
        """Those that are counted nowhere. A catalogue and a wheel know none."""
        return [name for name in self.files if not name.endswith(".py")]

    def change(self, python: bool = True) -> tuple[list[str], list[str], dict[str, str]]:
        """What came, went and was renamed of the Python files, or of the others."""
        came, went = ([n for n in names or () if n.endswith(".py") == python] for names in (self.came, self.went))
        renamed = {old: new for old, new in (self.renamed or {}).items() if new.endswith(".py") == python}
        return came, went, renamed

    @property
    def changed(self) -> bool:
        """Has it other Python files than the one before it? The first one has."""
        return self.came is None or any(self.change())


@dataclass(frozen=True)
class Growth:
    """Snapshots in order, and what could not be had for them.

    lacking: revisions that were asked for and are nowhere to be had. without_files: those of them that the clone has,
    but without the lists of their files. tagless: the clone has no tag of a release, so the catalogue was asked.
    """

    snapshots: tuple[Snapshot, ...]
    lacking: tuple[str, ...] = ()
    without_files: tuple[str, ...] = ()
    tagless: bool = False


def growth_of_releases(source: Source) -> Growth:
    """All releases that have the folder, in the order of their versions.

    Of the clone's tags where it has them, with the lists of their files; else of the catalogue; else of a published
    wheel.
    """
    found: dict[str, Snapshot] = {}
    renames: Renames = {}
    tags = _release_tags(source.clone) if source.clone else {}
    if source.clone:
        held, renames = _read(source.clone, tags)
        found = {name[1:]: snapshot for name, snapshot in held.items() if snapshot.files}
    known = {release.version: release for release in catalogue.releases() if release.files}
    for version, release in known.items():
        found.setdefault(version, _of_release(release))
    for version, files in catalogue.wheels().items():
        if version not in known:
            found.setdefault(version, _of_wheel(version, files))
    ordered = [found[version] for version in sorted(found, key=_version_key)]
    return Growth(tuple(_compared(ordered, renames)), tagless=source.clone is not None and not tags)


def growth_at(source: Source, names: Sequence[str]) -> Growth:
    """The folder at these revisions, in this order.

    A version, with or without a v, means the tag of that release, whatever branches have that name; where the clone
    lacks it, and where there is no clone, the catalogue's release or wheel. In a clone, numbers are pull requests as
    `revisions.find` has them, by processes of their own. Raises HistoryError for a name that cannot be one.
    """
    labels = {name: f"v{name.removeprefix('v')}" if is_version(name) else name for name in names}
    held: dict[str, Snapshot] = {}
    present: dict[str, str] = {}
    renames: Renames = {}
    if source.clone:
        asked = [_asked(source, label) for label in labels.values()]
        hashes = source.clone.resolve(*asked)
        present = {name: commit for name, commit in zip(labels, hashes, strict=True) if commit}
        held, renames = _read(source.clone, present)
    answers = {name: held.get(name) or _from_catalogue(name, present.get(name)) for name in labels}
    ordered = [replace(snapshot, name=labels[name]) for name, snapshot in answers.items() if snapshot]
    lacking = [name for name, snapshot in answers.items() if not snapshot]
    return Growth(
        tuple(_compared(ordered, renames)),
        tuple(labels[name] for name in lacking),
        tuple(labels[name] for name in lacking if name in present),
    )


def _asked(source: Source, label: str) -> str:
    """What the clone is to be asked for."""
    if is_version(label):
        return f"refs/tags/{label}"
    try:
        return find(source, label).hash if is_number(label) else label
    except LacksError:
        return label


def is_version(name: str) -> bool:
    """Is it the version of a release, as "0.4.6" or "v0.4.6"?"""
    return VERSION.fullmatch(name) is not None


# --- from the clone

# By the trees of the folder before and after: old name -> new name.
Renames = dict[tuple[str, str], dict[str, str]]


def _release_tags(clone: Clone) -> dict[str, str]:
    """The commit of each release that the clone has a tag of, in the order of the versions. "v0.4.6" -> its hash."""
    said = clone.git("for-each-ref", "--format=%(refname:lstrip=2) %(objectname)", "refs/tags/v*")
    tags = dict(line.split(" ") for line in said.decode(errors="replace").splitlines())
    found = {name: tags[name] for name in sorted(filter(is_version, tags), key=_version_key)}
    known = {release.commit for release in catalogue.releases()}
    others = [name for name, hash_ in found.items() if hash_ not in known]  # annotated ones, and tags of no commits
    commits = found | dict(zip(others, clone.resolve(*(f"refs/tags/{name}" for name in others)), strict=True))
    return {name: commit for name, commit in commits.items() if commit}


def _read(clone: Clone, commits: dict[str, str]) -> tuple[dict[str, Snapshot], Renames]:
    """The snapshot at each commit whose list of files the clone has, and the renames between one and the next.

    Lines are the catalogue's if the commit is a release that it knows, else of the contents, where the clone has them.
    If it knows them all, renames are left to it as well: git would have to read files for them. A commit without the
    folder has no files.
    """
    known = {release.commit: release for release in catalogue.releases()}
    asked = {name: commit for name, commit in commits.items() if commit not in known or known[commit].files}
    try:
        entries = clone.check(*(f"{commit}:{DIRECTORY}" for commit in asked.values()))
    except LacksError:
        return {}, {}
    trees = {name: entry[0] for name, entry in zip(asked, entries, strict=True) if entry}
    without = set(asked) - set(trees)
    treeless = bool(without) and (clone.filter or "").startswith("tree")
    lacking = {name for name in without if treeless or asked[name] in known}
    commits = {name: commit for name, commit in commits.items() if name not in lacking}
    unknown = [name for name, commit in commits.items() if commit not in known]
    blobs, renames = _walk(clone, list(trees.values()), with_renames=bool(unknown))
    lines = _lines(clone, {blob for name in unknown if name in trees for blob in blobs[trees[name]].values()})
    days = _days(clone, [commits[name] for name in unknown])
    found = {}
    for name, commit in commits.items():
        release = known.get(commit)
        held = blobs[trees[name]] if name in trees else {}
        files = {file: release.files.get(file) if release else lines.get(blob) for file, blob in held.items()}
        day = release.author_date[:10] if release else days[commit]
        found[name] = Snapshot(name, commit, day, "clone", files, tree=trees.get(name))
    return found, renames


def _walk(clone: Clone, trees: Sequence[str], with_renames: bool) -> tuple[dict[str, dict[str, str]], Renames]:
    """Of each tree its files with their blobs, in git's order; and, where wanted, the renames from one to the next.

    Two files are one that was renamed if they are alike by half; where the clone lacks contents, if they are the same.
    """
    if not trees:
        return {}, {}
    # Beside the empty tree, all files of the first one came.
    pairs = zip([EMPTY_TREE[len(trees[0])], *trees], trees, strict=False)
    asked = "".join(f"{old} {new}\n" for old, new in pairs if old != new).encode()
    command = ("diff-tree", "--stdin", "-r", "-z", "--raw", "--no-abbrev", *PLAIN_DIFF)
    try:
        said = clone.git(*command, "-M" if with_renames else "--no-renames", stdin=asked)
    except LacksError:
        said = clone.git(*command, "-M100%", stdin=asked)
    files: dict[str, dict[str, str]] = {}
    renames: Renames = {}
    held: dict[str, str] = {}
    renamed: dict[str, str] = {}
    fields = iter(os.fsdecode(said).split("\0"))
    for field in fields:
        while pair := _PAIR.match(field):
            held = files[pair[2]] = dict(held)
            renamed = renames[pair[1], pair[2]] = {}
            field = field[pair.end() :]
        if field.startswith(":"):
            change = parse_change(field, fields)
            if change.old_path:
                renamed[change.old_path] = change.path
                held.pop(change.old_path, None)
            if change.status == "D":
                held.pop(change.path, None)
            else:
                held[change.path] = change.hashes[1]
    ordered = {tree: dict(sorted(held.items(), key=_as_git_sorts)) for tree, held in files.items()}
    return ordered, renames if with_renames else {}


def _as_git_sorts(item: tuple[str, str]) -> bytes:
    return os.fsencode(item[0])


def _lines(clone: Clone, blobs: set[str]) -> dict[str, int]:
    """Lines of each blob that the clone has. One process."""
    ordered = sorted(blobs)
    try:
        contents = list(clone.objects(*ordered))
    except LacksError:
        return {}
    known = {blob: content for blob, content in zip(ordered, contents, strict=True) if content is not None}
    return {blob: len(content.splitlines()) for blob, content in known.items()}


def _days(clone: Clone, commits: Sequence[str]) -> dict[str, str]:
    """The author's day of each commit. One process."""
    if not commits:
        return {}
    asked = "".join(f"{commit}\n" for commit in commits).encode()
    said = clone.git("log", "--no-walk=unsorted", "--stdin", "--format=%H %ad", "--date=short", stdin=asked)
    return dict(line.split(" ") for line in said.decode().splitlines())


# --- from the catalogue


def _from_catalogue(name: str, commit: str | None) -> Snapshot | None:
    """The release or wheel of that version or hash. commit: what the clone takes the name for."""
    version = name.removeprefix("v")
    for release in catalogue.releases():
        if commit in (None, release.commit) and (
            release.version == version
            or release.commit == commit
            or (re.fullmatch("[0-9a-f]{7,40}", name) and release.commit.startswith(name))
        ):
            return _of_release(release)
    files = None if commit else catalogue.wheels().get(version)
    return _of_wheel(version, files) if files else None


def _of_release(release: Release) -> Snapshot:
    return Snapshot(
        f"v{release.version}",
        release.commit,
        release.author_date[:10],
        "catalogue",
        dict(sorted(release.files.items())),
    )


def _of_wheel(version: str, files: dict[str, int]) -> Snapshot:
    return Snapshot(f"v{version}", None, None, "wheel", dict(sorted(files.items())))


# --- one beside another


def _compared(snapshots: Sequence[Snapshot], renames: Renames) -> Iterator[Snapshot]:
    """The snapshots, each with what sets it apart from the one before it.

    Renames are git's where it has compared the two, else those of the commits that the catalogue knows. Between two
    wheels none are known.
    """
    yield from snapshots[:1]
    for before, after in pairwise(snapshots):
        old, new = set(before.files), set(after.files)
        if {before.source, after.source} != {"clone"}:  # of wheels, and to the catalogue, Python files alone are known
            old, new = ({name for name in files if name.endswith(".py")} for files in (old, new))
        went, came = old - new, new - old
        by_git = renames.get((before.tree or "", after.tree or ""))
        renamed: dict[str, str] = {}
        for name in sorted(went) if came and not before.source == after.source == "wheel" else ():
            later = [by_git.get(name)] if by_git is not None else _renames_by_catalogue().get(name, [])
            target = next((target for target in later if target in came), None)
            if target and target.endswith(".py") == name.endswith(".py"):
                renamed[name] = target
                came.remove(target)
        yield replace(after, came=tuple(sorted(came)), went=tuple(sorted(went - set(renamed))), renamed=renamed)


@cache
def _renames_by_catalogue() -> dict[str, list[str]]:
    """Each name that the folder's files have had -> the names that they had later, the last one first."""
    later: dict[str, list[str]] = {}
    for old, new in reversed(catalogue.renames()):
        later.setdefault(old, [*later.get(new, ()), new])
    return later


def _version_key(version: str) -> tuple[int, ...]:
    match = VERSION.fullmatch(version)
    assert match
    major, minor, patch, candidate, post = match.groups()
    return int(major), int(minor), int(patch), int(candidate or 1_000_000), int(post or -1)
