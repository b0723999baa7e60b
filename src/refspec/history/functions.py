"""Every change of one function's lines, wherever they were: the definition cut out of each version of its file.

`git log -L` asks the same, but it knows of lines only. `-L :NAME:FILE` looks for a line that a pattern for functions
matches: without the attribute diff=python it has none for Python and finds no method; with it, a function ends where
the next `def` or `class` is, be it one within it; and NAME is a regular expression, so the first line that happens to
match is taken. From there on, lines are carried back through each diff: a function that was written anew is lost there,
or another one is told instead, and one that came from another file was born when it came. So here the definition is
found again in each version, as `refspec.history.symbols` does it, and the diffs are of its text alone.
"""

from __future__ import annotations

import difflib
import os
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from refspec.history.catalogue import DIRECTORY
from refspec.history.clone import PLAIN_DIFF, Clone, HistoryError, LacksError
from refspec.history.outline import Definition, parse, scan
from refspec.history.paths import file_meant, readable, readings
from refspec.history.revisions import commit_in
from refspec.history.sources import Source
from refspec.history.symbols import Event, Place, check_name, read_symbol


@dataclass(frozen=True)
class FunctionLines:
    """What changed a definition.

    place: where it is at the revision `commit`. ranges: its first and last lines there, several where an if and its
    else, or a property's getter and setter, define it. changes: the newest first, each with the diff of its text, hunks
    as `diff -u` has them; "" where nothing but its place changed. begins: is the last of them no birth, because the
    clone's history begins there? unseen: of its birth, the clone lacks what says whether it came from another folder.
    """

    place: Place
    commit: str
    ranges: tuple[tuple[int, int], ...]
    changes: tuple[tuple[Event, str], ...]
    begins: bool
    unseen: bool


def read_lines(clone: Clone, what: str, revision: str | None = None) -> FunctionLines:
    """The changes of what `what` names, "FILE:NAME", up to `revision` (None: the main line).

    revision: as `revisions.find` takes it. FILE is below the folder of speculative decoding or from the repository's
    root; NAME is a function, class, method ("Class.method") or a name that the module or a class assigns. Raises
    HistoryError, which says what there is, if the revision has no such file or the file no such name; LacksError if the
    clone has no contents of files.
    """
    file, name = parts_of(what)
    commit = commit_in(Source(clone, "given"), revision) if revision is not None else clone.main.commit
    path = _path(clone, commit, file, revision or clone.main.name)
    if not path.endswith(".py"):
        raise HistoryError(f"{readable(path)} is not Python: --clone's git log -L can follow lines of other files")
    (source,) = clone.objects(f"{commit}:{path}")
    if source is None:
        raise LacksError(f"this clone lacks the contents of {readable(path)}{clone.remedy_for_contents()}")
    found = _definitions(source, path, name)
    place = Place(readable(path), found[0].name)
    folder = DIRECTORY if path.startswith(f"{DIRECTORY}/") else posixpath.dirname(path) or "."
    history = read_symbol(clone, place.name, folder, commit)
    life = next((life for life in history.lives if life.alive and life.place == place), None)
    if life is None:
        lines = f"-L{found[0].first},{found[0].last}:{place.path}"
        raise HistoryError(
            f"{place.path} lays out {place.name} in a way that is not followed here (git log {lines} may)"
        )
    changes = tuple((event, diff(event.before, event.after)) for event in life.events[::-1])
    ranges = tuple((one.first, one.last) for one in found)
    first = life.events[0]
    return FunctionLines(place, commit, ranges, changes, first.what == "there already", first.hash in history.unseen)


def diff(before: Definition | None, after: Definition | None) -> str:
    """The unified diff of two texts of a definition, lines numbered as in their files.

    Of several that are taken together, such as a property's getter and setter, as if they followed the first at once.
    """
    old, new = (one.text.decode(errors="replace").split("\n") if one else [] for one in (before, after))
    lines = []
    for line in list(difflib.unified_diff(old, new, lineterm=""))[2:]:
        if line.startswith("@@"):
            line = _HUNK.sub(lambda m: _shifted(m, before, after), line)
        lines.append(line)
    return "\n".join(lines)


_HUNK = re.compile(r"-(\d+)((?:,\d+)?) \+(\d+)")


def _shifted(hunk: re.Match[str], before: Definition | None, after: Definition | None) -> str:
    old, new = (int(n) + (one.first - 1 if one else 0) for n, one in ((hunk[1], before), (hunk[3], after)))
    return f"-{old}{hunk[2]} +{new}"


def parts_of(what: str) -> tuple[str, str]:
    """FILE and NAME of "FILE:NAME"; a colon in FILE is a part of it. Raises HistoryError if it is not of this form."""
    file, _, name = what.rpartition(":")
    if not file or any(c in file for c in "\n\0"):
        raise HistoryError(f"not FILE:NAME: {what!r} (as in eagle_info.py:EagleDraftInput.filter_batch)")
    check_name(name)
    return file, name


def _path(clone: Clone, commit: str, file: str, revision: str) -> str:
    """The file's path from the root, with surrogates where it is not UTF-8."""
    candidates = readings(file)
    entries = clone.check(*(f"{commit}:{path}" for path in candidates))
    paths = [path for path, entry in zip(candidates, entries, strict=True) if entry and entry[1] == "blob"]
    if not paths:
        listed = clone.git("ls-tree", "-r", "-z", "--name-only", commit, "--", DIRECTORY)
        paths = [os.fsdecode(raw) for raw in listed.split(b"\0") if raw]
    found, near = file_meant(file, paths)
    if found is None:
        raise HistoryError(f"no file {readable(file)} at {revision}{_listed(near)}{_last(clone, commit, candidates)}")
    return found


def _last(clone: Clone, commit: str, paths: Sequence[str]) -> str:
    """What to say of a file that was there once."""
    said = clone.git(
        "log", "-1", "--diff-filter=D", "--no-renames", "--format=%h %as", *PLAIN_DIFF, commit, "--", *paths
    )
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
        raise HistoryError(
            f"{readable(path)} defines no {name}{_listed(near[:4])} (if it has gone, refspec history symbol {own} says "
            "when, and --from REV walks back from before)"
        )
    if len(names) > 1:
        raise HistoryError(f"{readable(path)} defines several {name}: say which of {', '.join(names)}")
    return exact or found
