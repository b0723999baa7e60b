"""`git log --raw`, as it is: the contents that each commit replaced, by their hashes; and those contents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from refspec.history.clone import PLAIN_DIFF, Clone, LacksError

# A commit that changes more files than this is a sweep: nothing is looked for in the contents of all of them.
SWEEP = 400
_FORMAT = "%x00%H%x00%P%x00%aI%x00%cI%x00%s"
_FIELDS = 5
_NO_FILE = ("000000", "160000")  # modes: nothing there; a submodule, whose hash is that of a commit elsewhere


@dataclass(slots=True)
class RawChange:
    """A file before and after a commit: hashes of its contents, None where there is no file.

    status: A, D, M, T, or R with the path before in old_path.
    """

    status: str
    path: str
    old_path: str | None
    old: str | None
    new: str | None


@dataclass(slots=True)
class RawCommit:
    """parent: the first one, which the changes are measured against; None of a commit that has none."""

    hash: str
    parent: str | None
    author_date: str
    committer_date: str
    subject: str
    changes: list[RawChange]


def read_raw_log(clone: Clone, revision: str, *options: str, path: str | None = None) -> list[RawCommit]:
    """The commits up to `revision`, a hash, that touch `path` (None: all), the oldest first; of merges, the first
    parent's side alone, so that each commit is the next one's parent.

    options: of git log's; --no-renames, or -M in one of its forms, is to be among them. One git process.
    """
    said = clone.git(
        *("log", "-z", "--first-parent", "-m", "--raw", "--no-abbrev", f"--format={_FORMAT}", *PLAIN_DIFF, *options),
        *(revision, "--", *([path] if path else [])),
    )
    found: list[RawCommit] = []
    fields = said.decode(errors="replace").split("\0")
    at = 0
    while at < len(fields):
        field = fields[at].lstrip("\n")
        if not field:
            at += 1
        elif field[0] == ":":
            change = parse_change(field, fields[at + 1])
            at += 2
            if change.status in "RC":
                change.old_path, change.path = change.path, fields[at]
                at += 1
            found[-1].changes.append(change)
        else:
            parents, authored, committed, subject = fields[at + 1 : at + _FIELDS]
            found.append(RawCommit(field, parents.split(" ")[0] or None, authored, committed, subject, []))
            at += _FIELDS
    return found[::-1]


def contents(clone: Clone, hashes: Iterable[str]) -> dict[str, bytes]:
    """What files hold, by the hashes of it. Raises LacksError if the clone lacks any of it."""
    wanted = set(hashes)
    found = known_contents(clone, wanted)
    if len(found) < len(wanted):
        name = min(wanted - found.keys())
        raise LacksError(f"this clone lacks the contents of files, such as {name[:10]}{clone.remedy_for_contents()}")
    return found


def known_contents(clone: Clone, hashes: Iterable[str]) -> dict[str, bytes]:
    """What the clone has of the contents with these hashes."""
    wanted = sorted(set(hashes))
    held = zip(wanted, clone.objects(*wanted), strict=True)
    return {name: content for name, content in held if content is not None}


def parse_change(raw: str, path: str) -> RawChange:
    """A file's entry, `:mode mode hash hash status`, and the path behind it."""
    old_mode, new_mode, old, new, status = raw[1:].split(" ")
    return RawChange(
        status[0], path, None, None if old_mode in _NO_FILE else old, None if new_mode in _NO_FILE else new
    )
