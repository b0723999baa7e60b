"""Every change of one function's lines: `git log -L`, with the lines found by Python's syntax tree.

`git log -L :NAME:FILE` looks for a line that its pattern for functions matches. Without the attribute diff=python it has
none for Python and takes lines that are not indented, so it finds no method; with it, a function ends where the next
`def` or `class` is, be it one within it. And NAME is a regular expression. So the lines come from the file itself, in
the revision where the walk begins, decorators included, and git gets their numbers.
"""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from refspec.history.catalogue import DIRECTORY
from refspec.history.clone import PLAIN_DIFF, Clone, HistoryError, LacksError
from refspec.history.commits import pull_request
from refspec.history.definitions import Definition, parse, scan
from refspec.history.symbols import check_name


@dataclass(frozen=True)
class LinesChange:
    """A commit that changed the lines.

    diff: the hunks, as text, each with its line "@@ ... @@". path: the file's name afterwards. boundary: the parents
    are not in the clone, so the diff shows all lines as if they had come then.
    """

    hash: str
    author_date: str
    committer_date: str
    pr: int | None
    subject: str
    path: str
    diff: str
    boundary: bool


@dataclass(frozen=True)
class FunctionLines:
    """What changed a definition, the newest first. ranges: its first and last lines at the revision `commit`."""

    path: str
    name: str
    commit: str
    ranges: tuple[tuple[int, int], ...]
    changes: tuple[LinesChange, ...]


def read_lines(clone: Clone, what: str, revision: str | None = None) -> FunctionLines:
    """The changes of what `what` names, "FILE:NAME", up to `revision` (None: the main line).

    FILE is below the folder of speculative decoding or from the repository's root; NAME is a function, class, method
    ("Class.method") or a name that the module or a class assigns. Raises HistoryError, which says what there is, if the
    revision has no such file or the file no such name; LacksError if the clone has no contents of files.
    """
    file, name = parts_of(what)
    commit = clone.commit(revision) if revision is not None else clone.main.commit
    path = _path(clone, commit, file, revision or clone.main.name)
    (source,) = clone.objects(f"{commit}:{path}")
    if source is None:
        raise LacksError(f"this clone lacks the contents of {_text(path)}{clone.remedy()}")
    found = _definitions(source, path, name)
    ranges = tuple((one.first, one.last) for one in found)
    said = clone.git(
        *("log", f"--format={_FORMAT}", *PLAIN_DIFF, "--text"),
        *(f"-L{first},{last}:{path}" for first, last in ranges),
        *(commit, "--"),
    )
    return FunctionLines(_text(path), found[0].name, commit, ranges, _parsed(said, clone.boundary))


def parts_of(what: str) -> tuple[str, str]:
    """FILE and NAME of "FILE:NAME"; a colon in FILE is a part of it. Raises HistoryError if it is not of this form."""
    file, _, name = what.rpartition(":")
    if not file or any(c in file for c in "\n\0"):
        raise HistoryError(f"not FILE:NAME: {what!r} (as in eagle_info.py:EagleDraftInput.filter_batch)")
    check_name(name)
    return file, name


def _text(path: str) -> str:
    """A path as people read it: bytes that are no UTF-8 become replacement marks."""
    return path.encode(errors="surrogateescape").decode(errors="replace")


def _path(clone: Clone, commit: str, file: str, revision: str) -> str:
    """The file's path from the root, with surrogates where it is not UTF-8."""
    file = posixpath.normpath(file)
    candidates = [f"{DIRECTORY}/{file}", file]
    for path, entry in zip(candidates, clone.check(*(f"{commit}:{path}" for path in candidates)), strict=True):
        if entry and entry[1] == "blob":
            return path
    listed = clone.git("ls-tree", "-r", "-z", "--name-only", commit, "--", DIRECTORY)
    paths = [raw.decode(errors="surrogateescape") for raw in listed.split(b"\0") if raw]
    ends = [path for path in paths if path.endswith(f"/{file}")]
    if len(ends) == 1:
        return ends[0]
    names = [_text(path)[len(DIRECTORY) + 1 :] for path in ends or paths]
    near = names if ends else difflib.get_close_matches(file, names, 4)
    raise HistoryError(f"no file {_text(file)} at {revision}{_listed(near)}{_last(clone, commit, candidates)}")


def _last(clone: Clone, commit: str, paths: Sequence[str]) -> str:
    """What to say of a file that was there once."""
    said = clone.git("log", "-1", "--diff-filter=D", "--no-renames", "--format=%h %as", *PLAIN_DIFF, commit, "--", *paths)
    if not said.strip():
        return clone.remedy()
    hash_, date = said.decode().split()
    return f"; it was there until {date}: --from {hash_}^ looks before that"


def _listed(names: Sequence[str]) -> str:
    return f"; there is {', '.join(names)}" if names else ""


def _definitions(source: bytes, path: str, name: str) -> list[Definition]:
    """Those that `name` means, all of one qualified name. Raises HistoryError, naming those that are near."""
    own = name.rpartition(".")[2]
    try:
        everything = parse(source)
    except SyntaxError:
        everything = [*scan(source), *(one for one in scan(source, own) if one.kind == "name")]
    found = [one for one in everything if f".{one.name}".endswith(f".{name}")]
    exact = [one for one in found if one.name == name]
    names = sorted({one.name for one in exact or found})
    if not names:
        known = {one.name: None for one in everything}
        near = difflib.get_close_matches(name, known, 4)
        last = {full.rpartition(".")[2]: full for full in known}
        near += [last[part] for part in difflib.get_close_matches(own, last, 4) if last[part] not in near]
        raise HistoryError(f"{_text(path)} defines no {name}{_listed(near[:4])}")
    if len(names) > 1:
        raise HistoryError(f"{_text(path)} defines several {name}: say which of {', '.join(names)}")
    return exact or found


# Two NULs and a hash in front: no line of a file can be taken for it.
_FORMAT = "%x00%x00%H%x00%aI%x00%cI%x00%s%x00"
_COMMIT = re.compile("\0\0([0-9a-f]{40,64})\0([^\0]*)\0([^\0]*)\0([^\0]*)\0")


def _parsed(said: bytes, boundary: frozenset[str]) -> tuple[LinesChange, ...]:
    _, *fields = _COMMIT.split(said.decode(errors="replace"))
    found = []
    for at in range(0, len(fields), 5):
        hash_, authored, committed, subject, patch = fields[at : at + 5]
        lines = patch.split("\n")
        path = next((line[6:].rstrip("\t") for line in lines if line.startswith("+++ b/")), "")
        first = next((n for n, line in enumerate(lines) if line.startswith("@@ ")), len(lines))
        found.append(
            LinesChange(
                hash_,
                authored,
                committed,
                pull_request(subject),
                subject,
                path,
                "\n".join(lines[first:]).rstrip("\n"),
                hash_ in boundary,
            )
        )
    return tuple(found)
