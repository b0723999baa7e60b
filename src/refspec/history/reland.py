"""What was tried, reverted and landed again: what the second try has that the first had not.

A pair of patches is compared, not a pair of trees: what others changed in between is in neither. Of each file, the
lines that both tries added or removed, in the same order, are taken away; what is left of the reland's is what had been
missing. A change whose file was moved or split in between is looked for in the other files.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from difflib import SequenceMatcher
from typing import Literal

from refspec.history.catalogue import Commit
from refspec.history.clone import NO_DATE, Clone, LacksError, date_of
from refspec.history.commits import pull_request
from refspec.history.outline import Definition, parse
from refspec.history.patches import EMPTY_TREE, Comparison, FileDiff, Line, compare

# The pull requests that the course tells of: the first try, its revert, the reland.
LESSON = (26866, 26981, 26997)

_TAGS = r"^(?:\[[^\]]*\]\s*)*"
_REVERT = re.compile(_TAGS + r"revert\b[:\s]*(.+)", re.IGNORECASE)
_RELAND = re.compile(_TAGS + r"(?:re-?land|re-?do|re-?apply)\b[:\s]*(.+)", re.IGNORECASE)

Inverse = Literal["exact", "lines", "no"]


@dataclass(frozen=True)
class Tries:
    """A first try, its revert, and the reland, as far as titles tell of them."""

    first: Commit | None
    revert: Commit | None
    reland: Commit | None


@dataclass(frozen=True)
class Stretch:
    """Neighbouring lines that the reland alone changed. functions: those that they are in, by qualified names."""

    functions: tuple[str, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class FileOfBoth:
    """One file in both tries.

    path: in the reland; None if that leaves it alone. first_path: in the first try; None if that left it alone.
    shared: how many lines both added or removed. missing: what the reland alone did. dropped: what the first try alone
    did.
    """

    path: str | None
    first_path: str | None
    shared: int
    missing: tuple[Stretch, ...]
    dropped: tuple[Line, ...]


@dataclass(frozen=True)
class Findings:
    """inverse: is the revert the first try's opposite? "exact": each file is what it had been, bit for bit; "lines": so
    are the lines, but the files had moved on; None without a revert, and where that is not known.

    differing: lines in which the revert and the opposite differ. files: None if the clone lacks contents of files.
    """

    inverse: Inverse | None
    differing: int
    files: tuple[FileOfBoth, ...] | None


def tries(commits: Sequence[Commit]) -> list[Tries]:
    """Every revert and reland that a title tells of, the oldest first. commits: the oldest first.

    `Revert "T"` and `Reland "T"` (or Redo, Reapply) point to the last commit before with that title, or with the pull
    request's number that they name. A commit of the same title after the revert is a reland as well.
    """
    found: list[Tries] = []
    before = _Titles()
    undoing: dict[str, int] = {}  # by a revert's hash, its place in `found`
    tried: dict[str, list[int]] = defaultdict(list)  # the same by a first try's hash, and by its title
    for commit in commits:
        if match := _REVERT.match(commit.subject):
            undone = before.meant(match[1], commit)
            if undone and undone.hash in undoing:  # the revert of a revert
                again = undoing[undone.hash]
                found[again] = replace(found[again], reland=commit)
            else:
                undoing[commit.hash] = len(found)
                if undone:
                    tried[undone.hash].append(len(found))
                    tried[_plain(undone.subject)].append(len(found))
                found.append(Tries(undone, commit, None))
        else:
            match = _RELAND.match(commit.subject)
            first = before.meant(match[1], commit) if match else None
            keys = [_plain(match[1] if match else commit.subject), *([first.hash] if first else [])]
            meant = [n for key in keys for n in tried.get(key, ()) if found[n].reland is None]
            if meant:
                found[max(meant)] = replace(found[max(meant)], reland=commit)
            elif match:
                found.append(Tries(first, None, commit))
        before.add(commit)
    return found


def about(clone: Clone, *hashes: str) -> list[tuple[Commit, str]]:
    """Each commit, and what to compare it with: its first parent, or the tree without files. One git process.

    Raises LacksError for a commit whose parents are not in the clone.
    """
    form = "%H%x00%P%x00%aI%x00%cI%x00%s"
    asked = "".join(f"{hash_}\n" for hash_ in hashes).encode()
    said = clone.git("log", "-z", "--no-walk=unsorted", "--no-patch", "--stdin", f"--format={form}", stdin=asked)
    fields = said.decode(errors="replace").split("\0")
    found = {}
    for at in range(0, len(fields) - 4, 5):
        hash_, parents, authored, committed, subject = fields[at : at + 5]
        if hash_ in clone.boundary:
            raise LacksError(f"this clone lacks the parents of {hash_[:10]}{clone.remedy()}")
        before = parents.split()[0] if parents else EMPTY_TREE[len(hash_)]
        dates = date_of(authored), date_of(committed)
        found[hash_] = Commit(hash_, *dates, pull_request(subject), subject), before
    return [found[hash_] for hash_ in hashes]


def minutes(before: Commit, after: Commit) -> int | None:
    """Whole minutes from when one came to the main line until the other did; None if a date is not known."""
    if NO_DATE in (before.committer_date, after.committer_date):
        return None
    seconds = datetime.fromisoformat(after.committer_date) - datetime.fromisoformat(before.committer_date)
    return int(seconds.total_seconds() // 60)


def day_in_utc(commit: Commit) -> str:
    """When it came to the main line. Local days of several people can be in another order than the commits."""
    if commit.committer_date == NO_DATE:
        return NO_DATE
    return datetime.fromisoformat(commit.committer_date).astimezone(UTC).date().isoformat()


def examine(
    clone: Clone, first: tuple[Commit, str], revert: tuple[Commit, str] | None, reland: tuple[Commit, str]
) -> Findings:
    """What the reland has that the first try had not; each commit as `about` has it."""
    tried, landed = (compare(clone, before, commit.hash) for commit, before in (first, reland))
    undone = compare(clone, revert[1], revert[0].hash) if revert else None
    inverse, differing = _inverse(tried, undone) if undone else (None, 0)
    if not (tried.whole and landed.whole):
        return Findings(inverse, differing, None)
    sources = _Sources(clone, landed.files)
    return Findings(inverse, differing, tuple(_files(tried.files, landed.files, sources)))


class _Titles:
    """The commits so far, to be found by their titles and numbers, the last one first."""

    def __init__(self) -> None:
        self._commits: list[Commit] = []
        self._plain: list[str] = []
        self._by_title: dict[str, int] = {}
        self._by_number: dict[int | None, int] = {}

    def add(self, commit: Commit) -> None:
        title = _plain(commit.subject)
        self._by_title[title] = self._by_number[commit.pr] = len(self._commits)
        self._commits.append(commit)
        self._plain.append(title)

    def meant(self, title: str, commit: Commit) -> Commit | None:
        """The one that a revert's or a reland's title is about, given without that word."""
        numbers = [int(number) for number in re.findall(r"#(\d+)", title) if int(number) != commit.pr]
        plain = _plain(title)
        found = [self._by_title.get(plain, -1), *(self._by_number.get(number, -1) for number in numbers)]
        if plain and ("…" in title or "..." in title):  # GitHub cuts long titles
            places = reversed(range(len(self._plain)))
            found.append(next((n for n in places if self._plain[n].startswith(plain)), -1))
        return self._commits[max(found)] if max(found) >= 0 else None


def _plain(title: str) -> str:
    """A title without tags in front, numbers of pull requests and quotes, in small letters."""
    title = re.sub(_TAGS, "", title.lstrip("\"'“‘ "))
    title = re.sub(r"\(#\d+[^)]*\)?", "", title)
    return " ".join(re.findall(r"[^\W_]+", title.casefold()))


def _inverse(tried: Comparison, undone: Comparison) -> tuple[Inverse | None, int]:
    there = {(file.old_path or file.path, file.path, file.old_blob, file.new_blob) for file in tried.files}
    back = {(file.path, file.old_path or file.path, file.new_blob, file.old_blob) for file in undone.files}
    if there == back:
        return "exact", 0
    if not (tried.whole and undone.whole):
        return None, 0
    forward = Counter((file.path, line.sign, line.text) for file in tried.files for line in _changed(file))
    opposite = {"+": "-", "-": "+"}
    backward = Counter(
        (file.old_path or file.path, opposite[line.sign], line.text) for file in undone.files for line in _changed(file)
    )
    differing = (forward - backward).total() + (backward - forward).total()
    return ("no" if differing else "lines"), differing


def _changed(file: FileDiff) -> list[Line]:
    return [line for hunk in file.hunks() for line in hunk.lines if line.sign != " "]


def _files(tried: Sequence[FileDiff], landed: Sequence[FileDiff], sources: _Sources) -> Iterator[FileOfBoth]:
    """The files of the reland in git's order, then those that it leaves alone."""
    left = {file.path: file for file in tried}
    for file in landed:
        lines = _changed(file)
        partner = left.get(file.path) or left.get(file.old_path or "") or _moved(lines, left.values(), landed)
        before = _changed(partner) if partner else []
        if partner:
            del left[partner.path]
        shared, missing, dropped = _apart(before, lines)
        yield FileOfBoth(
            file.path,
            partner.path if partner else None,
            shared,
            tuple(sources.stretches(file, missing)),
            tuple(dropped),
        )
    for file in left.values():
        yield FileOfBoth(None, file.path, 0, (), tuple(_changed(file)))


def _moved(lines: list[Line], left: Iterable[FileDiff], landed: Sequence[FileDiff]) -> FileDiff | None:
    """The file, of those that the reland leaves alone, whose change is most like these lines: by half at least."""
    names = {path for file in landed for path in (file.path, file.old_path)}
    best, score = None, 0.5
    for file in left:
        before = _changed(file)
        if file.path not in names and before:
            alike = _apart(before, lines)[0] / min(len(before), len(lines)) if lines else 0
            if alike >= score:
                best, score = file, alike
    return best


def _apart(before: Sequence[Line], after: Sequence[Line]) -> tuple[int, list[Line], list[Line]]:
    """How many lines both have, in the same order; which the second alone has; which the first alone has."""
    ours, theirs = ([line.sign + line.text for line in lines] for lines in (before, after))
    blocks = SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    in_before = {block.a + n for block in blocks for n in range(block.size)}
    in_after = {block.b + n for block in blocks for n in range(block.size)}
    return (
        len(in_after),
        [line for n, line in enumerate(after) if n not in in_after],
        [line for n, line in enumerate(before) if n not in in_before],
    )


class _Sources:
    """The Python files of a comparison before and after, to tell which function a line is in. One git process."""

    def __init__(self, clone: Clone, files: Sequence[FileDiff]) -> None:
        blobs = sorted({blob for file in files for blob in (file.old_blob, file.new_blob) if file.path.endswith(".py")})
        contents = zip(blobs, clone.objects(*blobs), strict=True)
        self._definitions = {blob: _definitions(content or b"") for blob, content in contents}

    def stretches(self, file: FileDiff, lines: Sequence[Line]) -> Iterator[Stretch]:
        """The lines, hunk by hunk."""
        wanted = set(lines)
        for hunk in file.hunks():
            chosen = [line for line in hunk.lines if line in wanted and line.sign != " "]
            if chosen:
                named = [line for line in chosen if line.text.strip()] or chosen
                functions = dict.fromkeys(self._function(file, line) or hunk.within for line in named)
                yield Stretch(tuple(name for name in functions if name), tuple(chosen))

    def _function(self, file: FileDiff, line: Line) -> str:
        there = self._definitions.get(file.old_blob if line.sign == "-" else file.new_blob, ())
        around = [one for one in there if one.first <= line.number <= one.last]
        return min(around, key=lambda one: (one.last - one.first, one.name)).name if around else ""


def _definitions(source: bytes) -> list[Definition]:
    """The functions and classes; none of what this Python cannot read."""
    try:
        return [definition for definition in parse(source) if definition.kind != "name"]
    except SyntaxError:
        return []
