"""What changed between two trees, file by file: with lines and patches where the clone has the contents."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from refspec.history.clone import PLAIN_DIFF, Clone, LacksError
from refspec.history.paths import readable
from refspec.history.raw_log import parse_change

# The tree without files, which git knows without storing it, by the length of a hash.
EMPTY_TREE = {
    40: "4b825dc642cb6eb9a060e54bf8d69288fbee4904",
    64: "6ef19b41225c5369f1c104d45d8d85efa9b057b53b14b4b9b939dd74decc5321",
}
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@ ?(.*)")
# Hunks are headed by the function that they are in; no attributes of the user's count; and hashes in patches are no
# longer in larger clones.
_SETTINGS = (
    *("-c", f"core.attributesFile={Path(__file__).parent / 'python.gitattributes'}"),
    *("-c", "core.abbrev=10"),
)


@dataclass(frozen=True)
class Line:
    """A line of a hunk. sign: "+", "-", or " " for context. number: in the file that has it; the new one for both."""

    sign: str
    number: int
    text: str


@dataclass(frozen=True)
class Hunk:
    """One stretch of changes. within: what git takes for the function around it, or ""."""

    within: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class FileDiff:
    """What happened to one file.

    status: A, D, M, R, T as in catalogue.FileChange. old_blob, new_blob: hashes, all zeros where there is no file; ""
    in the catalogue, which has none. lines_added, lines_deleted: None where they are not known, and for what is not
    text. patch: as git prints it, "" if the clone lacks the contents.
    """

    status: str
    path: str
    old_path: str | None
    old_blob: str
    new_blob: str
    lines_added: int | None = None
    lines_deleted: int | None = None
    patch: str = ""

    def hunks(self) -> list[Hunk]:
        """The patch, taken apart."""
        found: list[tuple[str, list[Line]]] = []
        old = new = 0
        for text in self.patch.split("\n"):
            if head := _HUNK.match(text):
                old, new = int(head[1]), int(head[2])
                found.append((head[3], []))
            elif found and text[:1] in ("+", "-", " "):
                found[-1][1].append(Line(text[0], old if text[0] == "-" else new, text[1:]))
                old += text[0] != "+"
                new += text[0] != "-"
        return [Hunk(within, tuple(lines)) for within, lines in found]


@dataclass(frozen=True)
class Comparison:
    """files: of those that were asked for. elsewhere: how many other files changed, None if that was not looked at.

    whole: were contents there, so that lines and patches are known? If not, a file that moved and changed counts as
    one deleted and one added.
    """

    files: tuple[FileDiff, ...]
    elsewhere: int | None
    whole: bool

    def lines(self) -> tuple[int, int]:
        """Lines added and deleted in all of the files."""
        return sum(file.lines_added or 0 for file in self.files), sum(file.lines_deleted or 0 for file in self.files)


def compare(clone: Clone, old: str, new: str, paths: Sequence[str] = (), contents: bool = True) -> Comparison:
    """Files below `paths` (none: all) that differ between two trees or commits, which are hashes; one git process.

    Two files are one that was renamed only if both are below `paths`. contents: are lines and patches wanted?
    """
    if contents:
        try:
            files = _parsed(_diff(clone, old, new, "-M", paths, "--numstat", "-p"))
            return Comparison(_readable(files), None, True)
        except LacksError:
            pass
    return Comparison(_readable(_parsed(_diff(clone, old, new, "-M100%", paths))), None, False)


def compare_around(clone: Clone, old: str, new: str, folder: str, contents: bool = True) -> Comparison:
    """The same for one folder, but a file that moved across its border is one that was renamed. Two git processes."""
    try:
        everything = _diff(clone, old, new, "-M")
    except LacksError:
        everything = _diff(clone, old, new, "-M100%")
    inside, elsewhere = [], 0
    for file in _parsed(everything):
        if any(path and path.startswith(f"{folder}/") for path in (file.path, file.old_path)):
            inside.append(file)
        else:
            elsewhere += 1
    if contents and inside:
        paths = [path for file in inside for path in (file.path, file.old_path) if path]
        found = compare(clone, old, new, paths)
        if found.whole:
            return replace(found, elsewhere=elsewhere)
    return Comparison(_readable(inside), elsewhere, contents and not inside)


def changes_by(clone: Clone, *commits: str) -> dict[str, tuple[FileDiff, ...]]:
    """What each commit, a hash, changed against its parent; nothing for a merge. Patches have no context.

    One git process for all. Raises LacksError if the clone lacks contents of any.
    """
    if not commits:
        return {}
    given = "".join(f"{commit}\n" for commit in commits).encode()
    options = ("--stdin", "--root", "-r", "-z", "--raw", "--no-abbrev", "--numstat", "-p", "-U0", "-M")
    said = clone.git(*_SETTINGS, "diff-tree", *options, *PLAIN_DIFF, stdin=given)
    # A patch's lines all have a sign or a word in front.
    parts = re.split(rf"(?:^|(?<=\n))({'|'.join(commits)})\0(?=:)".encode(), said)
    found = {hash_.decode(): _readable(_parsed(part)) for hash_, part in zip(parts[1::2], parts[2::2], strict=True)}
    return {commit: found.get(commit, ()) for commit in commits}


def _diff(clone: Clone, old: str, new: str, renames: str, paths: Sequence[str] = (), *what: str) -> bytes:
    return clone.git(
        *_SETTINGS, "diff-tree", "-r", "-z", "--raw", "--no-abbrev", *what, renames, *PLAIN_DIFF, old, new, "--", *paths
    )


def _readable(files: Iterable[FileDiff]) -> tuple[FileDiff, ...]:
    """With a replacement mark for what is not UTF-8 in a path, as everywhere else."""

    return tuple(
        replace(file, path=readable(file.path), old_path=readable(file.old_path) if file.old_path else None)
        for file in files
    )


def _parsed(said: bytes) -> list[FileDiff]:
    """`git diff-tree -z --raw --numstat -p`: a record of each file, its numbers, an empty field, and the patches.

    Bytes of a path that are not UTF-8 are kept in such a way that they can be handed back to git.
    """
    raw, _, patches = said.partition(b"\0\0diff --git ")
    fields = iter(os.fsdecode(raw.rstrip(b"\0")).split("\0"))
    files: list[FileDiff] = []
    numbers: list[tuple[int | None, int | None]] = []
    for field in fields:
        if field.startswith(":"):
            change = parse_change(field, fields)
            files.append(FileDiff(change.status, change.path, change.old_path, *change.hashes))
        elif counts := re.match(r"(\d+|-)\t(\d+|-)\t", field):
            numbers.append((_count(counts[1]), _count(counts[2])))
            if counts.end() == len(field):
                next(fields), next(fields)
    if not numbers:
        return files
    parts = iter(_split(patches.decode(errors="replace")))
    found = []
    for file, (added, deleted) in zip(files, numbers, strict=True):
        # A file of another type is shown as one that goes and one that comes.
        patch = next(parts) + (next(parts) if file.status == "T" else "")
        found.append(replace(file, lines_added=added, lines_deleted=deleted, patch=patch))
    return found


def _split(patches: str) -> Iterator[str]:
    """The patch of each file: content always has a sign in front, so that no line of it looks like a file's head."""
    for part in patches.split("\ndiff --git "):
        yield f"diff --git {part.removesuffix(chr(10))}\n"


def _count(text: str) -> int | None:
    return None if text == "-" else int(text)
