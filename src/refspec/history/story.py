"""The instructive commits, one by one: what to see in each, and the part of its diff that shows it.

The commentary is facts/story.md. It is Markdown of one form, checked when it is read: a section for each commit of the
catalogue's story, under its label; paragraphs; then a list of

| item    | what it names                                                              |
|---------|----------------------------------------------------------------------------|
| look    | a file of SGLang's, and names that its diff holds: one such item at least  |
| refspec | modules of refspec with the same idea                                      |
| claims  | ids of claims that the commit decides, or has to do with                   |
| cases   | ids of the cases that refspec has tests for                                |
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from refspec.history import catalogue
from refspec.history.catalogue import CatalogueError, StoryCommit
from refspec.history.clone import Clone, HistoryError, LacksError
from refspec.history.patches import compare

EXCERPT_LINES = 50  # of one file's diff
LINES_BEFORE = 3  # of a hunk that is cut, in front of the first line that is looked for

_PATH = re.compile(r"[\w./-]+")
_NAMES = {
    "refspec": re.compile(r"refspec(\.\w+)+"),
    "claims": re.compile(r"[A-Z]\d+"),
    "cases": re.compile(r"[A-Z]+-\d\d"),
}


@dataclass(frozen=True)
class Look:
    """Where to look: a file of SGLang's, from the repository's root, and names that the commit's diff of it holds."""

    path: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Commentary:
    """What there is to see in a commit. paragraphs: prose. The other fields are the module's table."""

    paragraphs: tuple[str, ...]
    looks: tuple[Look, ...]
    modules: tuple[str, ...]
    claims: tuple[str, ...]
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Excerpt:
    """Of a file's diff, the lines that matter. left_out: how many lines are missing; their places hold None."""

    path: str
    lines: tuple[str | None, ...]
    left_out: int


@cache
def commentary() -> dict[str, Commentary]:
    """label -> what there is to see, in the order of the story. Raises CatalogueError if story.md is damaged."""
    text = (Path(__file__).parent / "facts" / "story.md").read_text(encoding="utf-8")
    return parse_commentary(text)


def parse_commentary(text: str) -> dict[str, Commentary]:
    """`commentary` from its text. Raises CatalogueError for another form, and for other labels than the story's."""
    found: dict[str, Commentary] = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        label, _, rest = section.partition("\n")
        if label in found:
            raise CatalogueError(f"the catalogue's story.md tells of commit {label} twice")
        try:
            found[label] = _section(rest)
        except ValueError as error:
            raise CatalogueError(f"the catalogue's story.md is damaged at commit {label}: {error}") from None
    if list(found) != [commit.label for commit in catalogue.story()]:
        raise CatalogueError("the catalogue's story.md has other commits than its story.tsv, or in another order")
    return found


def find_commit(name: str) -> StoryCommit:
    """The commit of the story that `name` means: its label, the number of its PR (with # or without), or a hash.

    A hash may be cut to four digits. Raises HistoryError if the story has none of that name, or several.
    """
    story = catalogue.story()
    given = name.strip().lower()
    for meant in (
        [commit for commit in story if commit.label.lower() == given],
        [commit for commit in story if str(commit.pr) == given.removeprefix("#")],
        [commit for commit in story if len(given) >= 4 and commit.hash.startswith(given)],
    ):
        if len(meant) > 1:
            raise HistoryError(f"{name} begins the hashes of {len(meant)} commits of the story: give more digits")
        if meant:
            return meant[0]
    labels = ", ".join(commit.label for commit in story if not commit.label.isdigit())
    raise HistoryError(
        f"not among the {len(story)} commits of the story: {name} (it takes a label, 1 to 25, 31, {labels}, a PR or a "
        "hash; refspec history show tells of any commit)"
    )


def neighbours(label: str) -> tuple[StoryCommit | None, StoryCommit | None]:
    """The commits that are told before and after the one of that label; None where there is none."""
    story = catalogue.story()
    at = [commit.label for commit in story].index(label)
    return (story[at - 1] if at else None), (story[at + 1] if at + 1 < len(story) else None)


def lines_of(commit: StoryCommit) -> tuple[int | None, int | None]:
    """Lines that the commit adds to the folder and deletes there."""
    if commit.lines_added is None and (known := catalogue.commits_by_hash().get(commit.hash)):
        return known.lines_added, known.lines_deleted
    return commit.lines_added, commit.lines_deleted


def diff_of(clone: Clone, commit: StoryCommit, *, whole: bool = False) -> list[Excerpt]:
    """The commit's diff of the files that the commentary names: of each the part that matters, or if `whole` all of it.

    One git process, besides the one that looks for the commit. Raises LacksError if the clone lacks the commit, what
    came before it, or the contents of its files.
    """
    here, before = clone.resolve(commit.hash, f"{commit.hash}^1")
    if here is None:
        raise LacksError(f"this clone lacks the commit {commit.hash[:10]}{clone.remedy()}")
    if commit.hash in clone.boundary or before is None:
        raise LacksError(
            f"what commit {commit.hash[:10]} changed is not known: this clone's history begins with it{clone.remedy()}"
        )
    looks = commentary()[commit.label].looks
    changed = compare(clone, before, commit.hash, [look.path for look in looks])
    if not changed.whole:
        raise LacksError(
            f"this clone lacks contents of files that commit {commit.hash[:10]} changed{clone.remedy_for_contents()}"
        )
    found = []
    for look in looks:
        for file in changed.files:
            if file.path != look.path:
                continue
            lines = file.patch.rstrip("\n").split("\n")
            kept = tuple(lines) if whole else excerpt(lines, look.names, EXCERPT_LINES)
            found.append(Excerpt(look.path, kept, len(lines) - sum(line is not None for line in kept)))
    return found


def excerpt(diff: list[str], names: tuple[str, ...], limit: int) -> tuple[str | None, ...]:
    """At most about `limit` lines of one file's diff, the hunks first that change a line with one of the names.

    Each name gets its share: of a hunk with several, the first changed line with each, and what stands behind it. The
    lines are in their order; None stands where some are left out.
    """
    first_hunk = next((n for n, line in enumerate(diff) if line.startswith("@@")), len(diff))
    if len(diff) - first_hunk <= limit:
        return tuple(diff)
    wanted = [at for name in names if (at := _first_change(diff, first_hunk, name)) is not None]
    if not wanted:
        wanted = [first_hunk]
    share = max(limit // len(wanted), 2 * LINES_BEFORE)
    hunks = [n for n, line in enumerate(diff) if line.startswith("@@")] + [len(diff)]
    kept = set(range(first_hunk))
    for at in wanted:
        hunk = bisect_right(hunks, at) - 1
        start = max(hunks[hunk], at - LINES_BEFORE)
        kept |= {hunks[hunk], *range(start, min(start + share, hunks[hunk + 1]))}
    lines: list[str | None] = []
    for n, line in enumerate(diff):
        if n in kept or {n - 1, n + 1} <= kept:
            lines.append(line)
        elif not lines or lines[-1] is not None:
            lines.append(None)
    return tuple(lines)


def _first_change(diff: list[str], start: int, name: str) -> int | None:
    """The first changed line with the name, one that is added before one that goes; else any line with it."""
    word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    for signs in ("+", "-", "+-@ "):
        for n in range(start, len(diff)):
            if diff[n][:1] in signs and word.search(diff[n]):
                return n
    return None


def _section(text: str) -> Commentary:
    paragraphs, looks = [], []
    lists: dict[str, tuple[str, ...]] = {}
    for block in text.strip().split("\n\n"):
        if not block.startswith("- "):
            paragraphs.append(" ".join(block.split()))
            continue
        for line in block.splitlines():
            kind, colon, rest = line.removeprefix("- ").partition(": ")
            if not colon or kind in lists:
                raise ValueError(f"{line!r} is no item, or stands there twice")
            if kind == "look":
                path, _, names = rest.partition(": ")
                looks.append(Look(_matched(_PATH, path), tuple(names.split(", "))))
                if not names or not all(looks[-1].names):
                    raise ValueError(f"{line!r} names nothing to look for")
            elif kind in _NAMES:
                lists[kind] = tuple(_matched(_NAMES[kind], name) for name in rest.split(", "))
            else:
                raise ValueError(f"{kind!r} is no kind of item")
    if not paragraphs or not looks:
        raise ValueError("there is no text, or nowhere to look")
    return Commentary(
        tuple(paragraphs), tuple(looks), *(lists.get(kind, ()) for kind in ("refspec", "claims", "cases"))
    )


def _matched(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError(f"{text!r} has another form than {pattern.pattern}")
    return text
