"""What a clone is, and what it can and cannot answer."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass

from refspec.history import catalogue
from refspec.history.catalogue import DIRECTORY, REPOSITORY
from refspec.history.clone import Clone, GitError, Head, LacksError
from refspec.history.cloning import commit_graph_size

COMMITS, TREES, CONTENTS, TAGS = "commits", "lists of files", "contents of the folder", "tags"
OTHERS = "contents of other files"

# What each command needs of a clone, beyond what the catalogue knows.
NEEDS = {
    "log": (COMMITS, TREES),
    "dir --releases": (COMMITS, TREES, TAGS),
    "story, show, diff, reland": (COMMITS, TREES, CONTENTS),
    "symbol, lines, follow": (COMMITS, TREES, CONTENTS),
    "compare, moved": (COMMITS, TREES, CONTENTS),
    "claims": (COMMITS, TREES, CONTENTS, OTHERS, TAGS),
}
FROM_THE_CATALOGUE = "overview, log, dir, follow, explore, story, show and reland without diffs, and claims' verdicts"


@dataclass(frozen=True)
class MainLineSeen:
    """The main line of a clone, beside the catalogue's.

    date: the committer's day. ahead: commits that the clone has beyond the catalogue's reach; behind: those that it has
    not yet; None where the clone lacks what it takes to count them. A main line with both has forked.
    """

    name: str
    commit: str
    date: str
    ahead: int | None
    behind: int | None


@dataclass(frozen=True)
class CloneKind:
    """What kind of clone it is. main is None if there is no commit."""

    is_bare: bool
    is_linked: bool
    is_submodule: bool
    is_shallow: bool
    filter: str | None
    object_format: str
    head: Head
    main: MainLineSeen | None


@dataclass(frozen=True)
class Finding:
    """One thing that commands need. found: what there is of it. remedy: how to get the rest, "" if it is there."""

    need: str
    ok: bool
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Examination:
    """What was found of each need, what follows for commands, and whether a commit-graph makes it fast.

    commit_graph: its size in bytes, None if there is none.
    """

    findings: tuple[Finding, ...]
    git_version: str
    commit_graph: int | None

    def lacks(self, command: str) -> list[str]:
        """What `command`, one of NEEDS, lacks to answer in full."""
        return [finding.need for finding in self.findings if finding.need in NEEDS[command] and not finding.ok]

    @property
    def ok(self) -> bool:
        """Can every command answer in full?"""
        return all(finding.ok for finding in self.findings)


def kind_of(clone: Clone) -> CloneKind:
    """What kind of clone it is, and how far it reaches."""
    try:
        main = _main_line_seen(clone)
    except LacksError:
        main = None
    return CloneKind(
        clone.is_bare,
        clone.is_linked,
        clone.is_submodule,
        clone.is_shallow,
        clone.filter,
        clone.object_format,
        clone.head,
        main,
    )


def examine(clone: Clone) -> Examination:
    """Looks for everything that a command may need. What is damaged is found by reading it, but only in the folder."""
    return Examination(
        (_commits(clone), *_trees_and_contents(clone), _others(clone), _tags(clone)),
        ".".join(map(str, clone.git_version)),
        commit_graph_size(clone),
    )


def _main_line_seen(clone: Clone) -> MainLineSeen:
    main, reach = clone.main, catalogue.reach()
    date = (
        clone.git("log", "-1", "--format=%cd", "--date=format:%Y-%m-%d", "--no-mailmap", main.commit).decode().strip()
    )
    ahead = behind = None
    if clone.present(reach.commit):
        said = clone.git("rev-list", "--left-right", "--count", f"{main.commit}...{reach.commit}").split()
        ahead, behind = int(said[0]), int(said[1])
    return MainLineSeen(main.name, main.commit, date, ahead, behind)


def _commits(clone: Clone) -> Finding:
    try:
        clone.git("log", "--format=%s", "--no-mailmap", clone.main.commit)  # a commit-graph holds no titles
    except GitError as error:
        return Finding(COMMITS, False, str(error), "a new clone is whole again")
    except LacksError:
        pass  # there are none
    story = [commit.hash for commit in catalogue.story()]
    known = [commit.hash for commit in catalogue.commits()]
    present = clone.present(*story, *known)
    of_story, of_known = len(present & set(story)), len(present & set(known))
    found = f"{of_known} of {len(known)} that the catalogue knows, {of_story} of {len(story)} of the story"
    if clone.is_shallow:
        found += f"; shallow: cut off at {_counted(len(clone.boundary), 'commit')}"
    remedy = _brings(clone, "git fetch --unshallow" if clone.is_shallow else "git fetch")
    if not present:
        remedy = "is it a clone of SGLang? refspec history clone makes one"
    ok = of_story == len(story) and of_known == len(known) and not clone.is_shallow
    return Finding(COMMITS, ok, found, "" if ok else remedy)


def _trees_and_contents(clone: Clone) -> tuple[Finding, Finding]:
    unknown = Finding(CONTENTS, False, "without lists of files, nobody can say which there are", "")
    try:
        main = clone.main.commit
    except LacksError as error:
        return Finding(TREES, False, str(error)), unknown
    try:
        # Unlike other commands, rev-list names what is missing in a partial clone without trying to fetch it.
        said = clone.git(
            "rev-list", "--objects", "--no-object-names", "--missing=print", main, "--tags", "--", DIRECTORY
        )
    except LacksError:
        return Finding(TREES, False, "they are missing", _brings(clone)), unknown
    except GitError as error:
        return Finding(TREES, False, str(error), "a new clone is whole again"), unknown
    hashes = said.decode().split()
    there = [hash_ for hash_ in hashes if not hash_.startswith("?")]
    trees = Finding(TREES, True, "those of the folder are there, at each commit and tag")
    missing = len(hashes) - len(there)
    if damage := _damage(clone, there):
        return trees, Finding(CONTENTS, False, damage, "a new clone is whole again")
    if missing and not clone.is_partial:
        return trees, Finding(CONTENTS, False, f"{missing} are missing", "git fsck says which; a new clone has them")
    if missing:
        return trees, Finding(CONTENTS, False, f"{missing} versions of files are missing", _brings(clone))
    return trees, Finding(CONTENTS, True, "all versions of its files are there, and their hashes are right")


def _damage(clone: Clone, hashes: list[str]) -> str:
    """What is wrong with the first object that is not what its hash says; "" if none is."""
    try:
        kinds = clone.check(*hashes)
        if None in kinds:
            return f"{hashes[kinds.index(None)]} cannot be read"
        blobs = [hash_ for hash_, kind in zip(hashes, kinds, strict=True) if kind and kind[1] == "blob"]
        for hash_, content in zip(blobs, clone.objects(*blobs), strict=True):
            if content is None:
                return f"{hash_} cannot be read"
            hashed = hashlib.new(clone.object_format, b"blob %d\0" % len(content), usedforsecurity=False)
            hashed.update(content)
            if hashed.hexdigest() != hash_:
                return f"{hash_} is damaged"
    except GitError as error:
        return str(error)
    return ""


def _others(clone: Clone) -> Finding:
    if not clone.is_partial:
        return Finding(OTHERS, True, "none was left out")
    remedy = f"refspec history clone --full {shlex.quote(str(clone.folder)) if clone.is_ours else ''}".strip()
    found = "those that claims ask for, but for one that asks for all (F12)" if clone.is_ours else "they were left out"
    return Finding(OTHERS, False, f"{found} (--filter={clone.filter})", f"{remedy} brings all")


def _tags(clone: Clone) -> Finding:
    releases = [release for release in catalogue.releases() if release.files]  # older ones are not all tagged
    tags = clone.resolve(*(f"refs/tags/v{release.version}" for release in releases))
    there = sum(tag is not None for tag in tags)
    moved = [r.version for r, tag in zip(releases, tags, strict=True) if tag not in (None, r.commit)]
    found = (
        f"{there} of the {len(releases)} releases that have the folder are tagged"
        if there
        else "no tag of a release is known"
    )
    if moved:
        found += f"; v{moved[0]} and {len(moved) - 1} more are on other commits than the catalogue's"
    ok = there == len(tags)
    return Finding(TAGS, ok, found, "" if ok else _brings(clone, f"git fetch --tags {REPOSITORY}"))


def _brings(clone: Clone, command: str = "") -> str:
    """How to get what is missing: with `command`, if there is one that does."""
    if clone.is_ours:
        return f"refspec history clone {shlex.quote(str(clone.folder))} brings them"
    return f"{command} brings them" if command else "refspec history clone makes a clone that has them"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
