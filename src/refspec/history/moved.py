"""Was a refactoring a pure move? The syntax trees of two revisions, definition by definition, across files.

Trees are compared without positions, comments and formatting; then without docstrings. A class stands for what it says
itself (bases, decorators, fields), a function likewise; what is defined in them is matched on its own, unless the whole
is the same. Who belongs to whom is found in this order, the largest first, and never by trying all against all:

1. the same tree, be it elsewhere or under another name;
2. the class that took in most of another's unchanged methods;
3. the same name, or a similar tree: of few candidates, found through rare bits of their trees, the most alike.

A definition that others of its file and class have overtaken has moved; the order of a class's fields is a part of its
tree. Sources are parsed, never run or imported;
they are read from files that differ, so what was copied from an untouched file is new here.
"""

from __future__ import annotations

import ast
import difflib
import gc
import io
import os
import textwrap
import tokenize
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from refspec.history.catalogue import DIRECTORY
from refspec.history.clone import PLAIN_DIFF, Clone, HistoryError, LacksError
from refspec.history.definitions import Definition, Unit, UnreadError, units_of
from refspec.history.raw_log import parse_change

Revision = Literal["before", "after"]
Difference = Literal["docstring", "imports", "comments", "formatting"]
Fate = Literal["unchanged", "moved", "renamed", "moved and changed", "changed"]

SMALL = 12  # bits of a tree: below that, equal trees are no sign of kinship unless the names agree
ALIKE_IN_NAME = 0.4  # how alike two definitions of one qualified name in two files must be
ALIKE = 0.7  # and two that share no name
CANDIDATES = 4  # most similar ones that are looked at for a definition
COMMON = 16  # a bit of a tree that more definitions share says nothing
LARGEST_TABLE = 250_000  # entries, of a comparison bit by bit

LACKED = "this clone lacks it"  # why a file without contents is unread

# Contents by path; None for what the clone lacks.
Files = dict[str, bytes | None]


@dataclass(frozen=True)
class Match:
    """A definition that is there before and after.

    differs: of equal trees, what else is not equal. similarity: 1 for equal trees; of a class's own statements, without
    what is defined in it. along: it went, or stayed, with the class or function that it is defined in, and both their
    trees are the same. members: how many went along with it. bases: of a class, those before and after, if they are not
    the same.
    """

    before: Definition
    after: Definition
    fate: Fate
    differs: tuple[Difference, ...]
    similarity: float
    along: bool
    members: int
    bases: tuple[str, str] | None = None

    def diff(self) -> Iterator[str]:
        """The unified diff of the two sources, line by line."""
        old, new = ([*textwrap.dedent(side.source).split("\n")] for side in (self.before, self.after))
        old_name, new_name = (f"{side.path}:{side.lines[0]}" for side in (self.before, self.after))
        return difflib.unified_diff(old, new, old_name, new_name, lineterm="")


@dataclass(frozen=True)
class Single:
    """A definition of one revision only. copy_of: one of the other with the same tree, which is matched otherwise."""

    definition: Definition
    copy_of: Definition | None = None

    @property
    def is_forgiven(self) -> bool:
        """Is it an assignment or a statement that is a copy? Each file needs its own logger."""
        return self.copy_of is not None and self.definition.kind in ("assignment", "statement")


@dataclass(frozen=True)
class Unread:
    """A file that no syntax tree could be made of, in one revision.

    unknown: how many definitions the other revision's file has whose fate that leaves open.
    """

    revision: Revision
    path: str
    why: str
    unknown: int


@dataclass(frozen=True)
class Refactoring:
    """Two revisions, compared. files: Python files that differ; other_files: how many others do."""

    files: tuple[str, ...]
    other_files: int
    matches: tuple[Match, ...]
    vanished: tuple[Single, ...]
    appeared: tuple[Single, ...]
    unread: tuple[Unread, ...] = ()

    def of(self, fate: Fate) -> list[Match]:
        """Matches of that fate."""
        return [match for match in self.matches if match.fate == fate]

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many definitions met each fate."""
        fates = Counter(match.fate for match in self.matches)
        names: tuple[Fate, ...] = ("unchanged", "moved", "renamed", "moved and changed", "changed")
        return {fate: fates[fate] for fate in names} | {
            "vanished": len(self.vanished),
            "appeared": len(self.appeared),
        }

    @property
    def forgiven(self) -> dict[str, int]:
        """How many of those that vanished, and of those that appeared, are forgiven."""
        sides = {"vanished": self.vanished, "appeared": self.appeared}
        return {fate: sum(single.is_forgiven for single in singles) for fate, singles in sides.items()}

    @property
    def reasons(self) -> list[str]:
        """What keeps it from being a pure move, as "2 vanished". What is forgiven does not."""
        counts = dict(self.counts)
        for fate, number in self.forgiven.items():
            counts[fate] -= number
        return [f"{counts[fate]} {fate}" for fate in list(counts)[2:] if counts[fate]]

    @property
    def is_pure_move(self) -> bool | None:
        """Is every definition still there, and unchanged but for comments, formatting and docstrings?

        None if that depends on files that could not be read.
        """
        if self.unread and not self.of("changed"):
            return None
        return not self.reasons


def compare_revisions(clone: Clone, before: str, after: str, path: str = DIRECTORY) -> Refactoring:
    """What became of the definitions under `path`, from one revision (a hash) to another.

    path: from the root, which itself is "". Only files that differ are read. Raises HistoryError if neither
    revision has the path, LacksError if the clone lacks contents.
    """
    if any(c in path for c in "\n\0") or not any(clone.check(f"{before}:{path}", f"{after}:{path}")):
        raise HistoryError(f"neither revision has the path {path} (it counts from the repository's root)")
    changed = list(_changed_files(clone, before, after, path))
    python = [file for file in changed if file[0].endswith((".py", ".pyi"))]
    blobs = list(clone.objects(*(blob for _, *pair in python for blob in pair if blob)))
    if blobs and not any(blob is not None for blob in blobs):
        raise LacksError(f"this clone lacks the contents of all files that differ{clone.remedy_for_contents()}")
    contents = iter(blobs)
    sides: tuple[Files, Files] = ({}, {})
    for name, *pair in python:
        for side, blob in zip(sides, pair, strict=True):
            if blob:
                side[name] = next(contents)
    return compare_sources(*sides, other_files=len(changed) - len(python))


def compare_sources(before: Files, after: Files, other_files: int = 0) -> Refactoring:
    """What became of the definitions of one set of files in another."""
    with _without_collector():
        return _compare(before, after, other_files)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Of millions of nodes none is garbage, and looking through them again and again takes longer than the rest."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _compare(before: Files, after: Files, other_files: int) -> Refactoring:
    unread: dict[tuple[Revision, str], str] = {}
    units: dict[Revision, list[Unit]] = {"before": [], "after": []}
    for revision, files in _sides(before, after):
        for path, content in sorted(files.items()):
            try:
                if content is None:
                    raise UnreadError(LACKED)
                units[revision] += units_of(path, content)
            except UnreadError as error:
                unread[revision, path] = str(error)
    matcher = _Matcher(units["before"], units["after"])
    matcher.run()
    back = {b: a for a, b in matcher.pairs.items()}
    vanished = list(_singles(matcher.before, matcher.pairs, back))
    appeared = list(_singles(matcher.after, back, matcher.pairs))
    unknown = Counter(("after", single.definition.path) for single in vanished)
    unknown += Counter(("before", single.definition.path) for single in appeared)
    return Refactoring(
        tuple(sorted(before.keys() | after.keys())),
        other_files,
        tuple(matcher.matches()),
        tuple(single for single in vanished if ("after", single.definition.path) not in unread),
        tuple(single for single in appeared if ("before", single.definition.path) not in unread),
        tuple(Unread(revision, path, why, unknown[revision, path]) for (revision, path), why in unread.items()),
    )


def _sides(before: Files, after: Files) -> Iterator[tuple[Revision, Files]]:
    yield "before", before
    yield "after", after


def _changed_files(clone: Clone, before: str, after: str, path: str) -> Iterator[tuple[str, str, str]]:
    """Path, and the blob before and after ("": none), of each file that differs; links and submodules are left out."""
    limit = ["--", path] if path else []
    said = clone.git(
        "diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", *PLAIN_DIFF, before, after, *limit
    )
    fields = iter(os.fsdecode(said).removesuffix("\0").split("\0"))
    for field in fields if said else ():
        change = parse_change(field, fields)
        pairs = zip(change.modes, change.hashes, strict=True)
        old, new = (hash_ if mode.startswith("100") else "" for mode, hash_ in pairs)
        if (old or new) and old != new:
            yield change.path, old, new


class _Matcher:
    """Pairs the definitions of two revisions. before, after: all of them; pairs: of those before, their partners."""

    def __init__(self, before: Sequence[Unit], after: Sequence[Unit]) -> None:
        self.before = [unit for top in before for unit in top.walk()]
        self.after = [unit for top in after for unit in top.walk()]
        self.pairs: dict[Unit, Unit] = {}
        self._taken: set[Unit] = set()  # partners, after
        self._identical: set[Unit] = set()  # before, the text being the same and in its place
        self._heirs: dict[str, Counter[str]] = defaultdict(Counter)  # of each path, where its definitions went
        self._ratios: dict[tuple[Unit, Unit], float] = {}

    def run(self) -> None:
        self._pair_identical()
        self._pair_equal(lambda unit: unit.whole, lambda unit: unit.tree.weight, self._pair_whole)
        self._pair_equal(lambda unit: unit.own, lambda unit: unit.tree.own_weight, self._pair)
        self._pair_emptied_classes()
        self._pair_alike()

    def _free(self) -> tuple[list[Unit], list[Unit]]:
        return [a for a in self.before if a not in self.pairs], [b for b in self.after if b not in self._taken]

    def _pair(self, a: Unit, b: Unit) -> None:
        self.pairs[a] = b
        self._taken.add(b)
        self._heirs[a.path][b.path] += 1

    def _pair_whole(self, a: Unit, b: Unit) -> bool:
        """With all that is in them, unless some of that belongs elsewhere already. Returns whether it did."""
        inner = list(zip(a.walk(), b.walk(), strict=True))
        if any(self.pairs.get(x) is not y and (x in self.pairs or y in self._taken) for x, y in inner):
            return False
        for x, y in inner:
            self._pair(x, y)
        return True

    def _pair_identical(self) -> None:
        """What a glance at the text settles needs no look at its tree."""

        def key(unit: Unit) -> Hashable:
            return unit.path, unit.name, unit.guards, unit.whole_text

        partners = _grouped(self.after, key)
        for value, group in _grouped(self.before, key).items():
            for a, b in zip(group, partners.get(value, ()), strict=False):
                if a not in self.pairs and b not in self._taken and self._pair_whole(a, b):
                    self._identical |= set(a.walk())

    def _pair_equal(
        self, print_of: Callable[[Unit], bytes], weight: Callable[[Unit], int], pair: Callable[[Unit, Unit], object]
    ) -> None:
        """Pairs units of one fingerprint, the heaviest first: what is in them goes along."""
        sides = [_grouped(side, print_of) for side in self._free()]
        for fingerprint in sorted(sides[0].keys() & sides[1].keys(), key=lambda f: -weight(sides[0][f][0])):
            olds, news = (side[fingerprint] for side in sides)
            is_large = weight(olds[0]) >= SMALL
            for key, needs_weight in _KINSHIP:
                if needs_weight and not is_large:
                    break
                olds = [a for a in olds if a not in self.pairs]
                news = [b for b in news if b not in self._taken]
                if not olds or not news:
                    break
                later: dict[Hashable, list[Unit]] = defaultdict(list)
                for b in reversed(news):
                    later[key(b, b.path)].append(b)
                for a in olds:
                    group = later.get(key(a, self._heir(a.path)))
                    while group and a not in self.pairs:
                        b = group.pop()
                        if b not in self._taken:
                            pair(a, b)

    def _heir(self, path: str) -> str:
        """The path to which most of another's definitions went, as far as is known."""
        heirs = self._heirs.get(path)
        return heirs.most_common(1)[0][0] if heirs else path

    def _pair_emptied_classes(self) -> None:
        """A class without a partner and the one that took in most of its methods, unless a namesake is there."""
        votes: dict[Unit, Counter[Unit]] = defaultdict(Counter)
        for a, b in self.pairs.items():
            if a.parent and b.parent and a.parent not in self.pairs and b.parent not in self._taken:
                votes[a.parent][b.parent] += 1
        namesakes = {(unit.path, unit.name) for unit in self._free()[1]}
        for a, counted in votes.items():
            b, number = counted.most_common(1)[0]
            is_namesake = (a.path, a.name) == (b.path, b.name)
            if (
                b not in self._taken
                and a.kind == b.kind
                and (is_namesake or (a.path, a.name) not in namesakes)
                and 2 * number >= min(len(a.inner), len(b.inner))
            ):
                self._pair(a, b)
                self._pair_members(a, b)

    def _pair_members(self, a: Unit, b: Unit) -> None:
        """What is too small to be told elsewhere: here it is in the class that its class became."""
        olds = [unit for unit in a.inner if unit not in self.pairs]
        news = _grouped((unit for unit in b.inner if unit not in self._taken), _name_and_tree)
        for key, group in _grouped(olds, _name_and_tree).items():
            for old, new in zip(group, news.get(key, ()), strict=False):
                self._pair_whole(old, new)

    def _pair_alike(self) -> None:
        """Pairs by name and by similarity, the best first."""
        olds, news = self._free()
        scored: list[tuple[float, int, Unit, Unit]] = []
        for a, b in dict.fromkeys(self._candidates(olds, news)):
            if a.kind != b.kind:
                continue
            same_name, same_path = a.last_name == b.last_name, a.path == b.path
            same_place = same_name and (a.container == b.container or self._went_along(a, b))
            needed, bonus = ALIKE, 0.05 * same_path
            in_name = ALIKE_IN_NAME if a.kind in ("function", "class") else ALIKE
            if same_place:
                needed, bonus = (0.0, 0.25) if same_path else (in_name, 0.15)
            elif same_name:
                needed, bonus = in_name, 0.1 + bonus
            ratio = self._ratio(a, b, needed)
            if ratio >= needed:
                scored.append((-(ratio + bonus), len(scored), a, b))
        for *_, a, b in sorted(scored, key=lambda entry: entry[:2]):
            if a not in self.pairs and b not in self._taken:
                self._pair(a, b)

    def _went_along(self, a: Unit, b: Unit) -> bool:
        return a.parent is not None and b.parent is not None and self.pairs.get(a.parent) is b.parent

    def _candidates(self, olds: list[Unit], news: list[Unit]) -> Iterator[tuple[Unit, Unit]]:
        """A few for each unit. Where one in the same place is about as similar as any, it is the only one."""
        shares: dict[int, list[Unit]] = defaultdict(list)
        for b in news:
            for share in _shares(b):
                shares[share].append(b)
        in_place, *by_name = (
            _Namesakes(olds, news, key)
            for key in (
                lambda unit: (unit.path, unit.name),
                lambda unit: unit.name,
                lambda unit: (unit.path, unit.last_name),
            )
        )
        for a in olds:
            votes = Counter(b for share in _shares(a) if len(shares.get(share, ())) <= COMMON for b in shares[share])
            best = votes.most_common(CANDIDATES)
            near = in_place.of(a)
            if not near or (best and 2 * max(votes[b] for b in near) < best[0][1]):
                near = [*near, *(b for names in by_name for b in names.of(a)), *(b for b, _ in best)]
            yield from ((a, b) for b in near)

    def _ratio(self, a: Unit, b: Unit, needed: float = 0.0) -> float:
        if (a, b) not in self._ratios:
            old, new = ([side.guards, *side.tree.statements] for side in (a, b))
            self._ratios[a, b] = _similarity(old, new, needed)
        return self._ratios[a, b]

    def matches(self) -> list[Match]:
        """The pairs, in the order of the revision after."""
        back = {b: a for a, b in self.pairs.items()}
        reordered = self._reordered()
        members: Counter[Unit] = Counter()
        found = []
        for b in reversed(self.after):  # members before their class
            a = back.get(b)
            if a is None:
                continue
            is_equal = self._is_equal(a, b)
            if not is_equal:
                in_place = (a.path, a.name) == (b.path, b.name)
                fate: Fate = "changed" if in_place else "moved and changed"
            elif a.last_name != b.last_name:
                fate = "renamed"
            elif (a.path, a.name) != (b.path, b.name) or b in reordered:
                fate = "moved"
            else:
                fate = "unchanged"
            differs = tuple(_differences(a, b)) if is_equal and a not in self._identical else ()
            similarity = 1.0 if is_equal else min(self._ratio(a, b), 0.999)
            along = (
                is_equal
                and a.last_name == b.last_name
                and a.parent is not None
                and b.parent is not None
                and self._went_along(a, b)
                and self._is_equal(a.parent, b.parent)
            )
            if along and b.parent:
                members[b.parent] += 1 + members[b]
            bases = None if is_equal else _bases(a, b)
            found.append(Match(a.definition, b.definition, fate, differs, similarity, along, members[b], bases))
        return found[::-1]

    def _is_equal(self, a: Unit, b: Unit) -> bool:
        return a in self._identical or a.own == b.own

    def _reordered(self) -> set[Unit]:
        """Units after that others of their file and class have overtaken: all but a longest ordered sequence."""
        at = {unit: number for number, unit in enumerate(self.before)}
        siblings: dict[Hashable, list[tuple[int, Unit]]] = defaultdict(list)
        for a, b in self.pairs.items():
            if (a.path, a.name) == (b.path, b.name):
                siblings[b.path, b.parent].append((at[a], b))
        rank = {unit: number for number, unit in enumerate(self.after)}
        moved: set[Unit] = set()
        for group in siblings.values():
            group.sort(key=lambda entry: rank[entry[1]])
            kept = _longest_increasing([number for number, _ in group])
            moved |= {unit for number, (_, unit) in enumerate(group) if number not in kept}
        return moved


class _Namesakes:
    """Units after that agree with one before in a key: all if they are few, else the one of the same number."""

    def __init__(self, olds: list[Unit], news: list[Unit], key: Callable[[Unit], Hashable]) -> None:
        self._key = key
        self._news = _grouped(news, key)
        self._numbers = {a: number for group in _grouped(olds, key).values() for number, a in enumerate(group)}

    def of(self, a: Unit) -> list[Unit]:
        found = self._news.get(self._key(a), [])
        return found if len(found) <= CANDIDATES else found[self._numbers[a] : self._numbers[a] + 1]


# How two units of the same tree are kin, the nearest first; and whether a small tree needs more than that. heir: where
# the most of the file went, or of the later one the path itself.
_KINSHIP: tuple[tuple[Callable[[Unit, str], Hashable], bool], ...] = (
    (lambda unit, heir: (unit.path, unit.name, tuple(unit.tree.docstrings)), False),
    (lambda unit, heir: (unit.path, unit.name), False),
    (lambda unit, heir: (heir, unit.name), False),
    (lambda unit, heir: (unit.name, tuple(unit.tree.docstrings)), False),
    (lambda unit, heir: unit.name, False),
    (lambda unit, heir: (unit.path, unit.last_name), False),
    (lambda unit, heir: (unit.last_name, tuple(unit.tree.docstrings)), True),
    (lambda unit, heir: unit.last_name, True),
    (lambda unit, heir: (unit.path, unit.container), True),
    (lambda unit, heir: unit.path, True),
    (lambda unit, heir: None, True),
)


def _grouped(units: Iterable[Unit], key: Callable[[Unit], Hashable]) -> dict[Hashable, list[Unit]]:
    groups: dict[Hashable, list[Unit]] = defaultdict(list)
    for unit in units:
        groups[key(unit)].append(unit)
    return groups


def _name_and_tree(unit: Unit) -> Hashable:
    return unit.last_name, unit.whole


def _shares(unit: Unit) -> set[int]:
    """Numbers of bits of the tree, a quarter of all runs of four: two units that are alike have some in common."""
    if unit.tree.own_weight < SMALL:
        return set()
    bits = [bit for bit in unit.tree.own_bits if bit not in "[]-"]
    runs = (zlib.crc32("\0".join(bits[at : at + 4]).encode("utf-8", "surrogatepass")) for at in range(len(bits) - 3))
    return {number for number in runs if number % 4 == 0}


def _similarity(old: Sequence[tuple[str, ...]], new: Sequence[tuple[str, ...]], needed: float) -> float:
    """Twice the bits in common, in order, over the bits of both: statement by statement, then bit by bit.

    It stops early, with something below `needed`, where that cannot be reached.
    """
    total = sum(map(len, old)) + sum(map(len, new))
    counts = [Counter(bit for statement in side for bit in statement) for side in (old, new)]
    most = 2 * (counts[0] & counts[1]).total()
    if not total or most < needed * total:
        return most / total if total else 1.0
    common = 0
    for tag, a, a_end, b, b_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            common += sum(map(len, old[a:a_end]))
        elif tag == "replace":
            x = [bit for statement in old[a:a_end] for bit in statement]
            y = [bit for statement in new[b:b_end] for bit in statement]
            if len(x) * len(y) <= LARGEST_TABLE:
                common += sum(block.size for block in difflib.SequenceMatcher(None, x, y, False).get_matching_blocks())
            else:
                common += (Counter(x) & Counter(y)).total()
    return 2 * common / total


def _differences(a: Unit, b: Unit) -> Iterator[Difference]:
    """What else differs in the sources of two units whose trees are the same."""
    if a.source == b.source:
        return
    docstring, imports = a.tree.docstrings != b.tree.docstrings, a.tree.imports != b.tree.imports
    comments = _comments(a.source) != _comments(b.source)
    if docstring:
        yield "docstring"
    if imports:
        yield "imports"
    if comments:
        yield "comments"
    if not (docstring or imports or comments) and a.last_name == b.last_name:
        yield "formatting"


def _bases(a: Unit, b: Unit) -> tuple[str, str] | None:
    """Of two classes, what they inherit from, if that is not the same."""
    if not isinstance(a.node, ast.ClassDef) or not isinstance(b.node, ast.ClassDef):
        return None
    old, new = (", ".join(ast.unparse(part) for part in (*n.bases, *n.keywords)) for n in (a.node, b.node))
    return (old, new) if old != new else None


def _comments(source: str) -> list[str]:
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                found.append(token.string)
    except (tokenize.TokenError, SyntaxError):  # a class without its methods need not be one
        pass
    return found


def _singles(units: list[Unit], partners: dict[Unit, Unit], others: dict[Unit, Unit]) -> Iterator[Single]:
    """Units without a partner; with one of the other revision that has the same name and tree, and a partner."""
    singles = [unit for unit in units if unit not in partners]
    names = {unit.last_name for unit in singles}
    twins = {_name_and_tree(other): other for other in reversed(others) if other.last_name in names}
    for unit in singles:
        twin = twins.get(_name_and_tree(unit))
        yield Single(unit.definition, twin.definition if twin else None)


def _longest_increasing(numbers: Sequence[int]) -> set[int]:
    """Indices of a longest increasing subsequence."""
    ends: list[int] = []  # smallest last number of a sequence of each length
    last: list[int] = []  # its index
    before: list[int] = []
    for index, number in enumerate(numbers):
        length = bisect_left(ends, number)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [number]
        last[length : length + 1] = [index]
    kept = set()
    at = last[-1] if last else -1
    while at >= 0:
        kept.add(at)
        at = before[at]
    return kept
