"""What git says with --raw -z: the contents that each commit replaced, by their hashes; and those contents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from refspec.history.clone import PLAIN_DIFF, Clone, LacksError, date_of

# A commit that changes more files than this is a sweep: nothing is looked for in the contents of all of them.
SWEEP = 400
_FORMAT = "%x00%H%x00%P%x00%aI%x00%cI%x00%s"
_FIELDS = 5
# Modes: not told; nothing there; a submodule, whose hash is that of a commit elsewhere.
_NO_CONTENTS = ("", "000000", "160000")


@dataclass(slots=True)
class RawChange:
    """A file before and after a commit. status: A, D, M, T, or R with the path before in old_path.

    modes, hashes: before and after, as git has them: zeros where there is no file; "" where git was not asked.
    """

    status: str
    path: str
    old_path: str | None
    modes: tuple[str, str] = ("", "")
    hashes: tuple[str, str] = ("", "")

    @property
    def old(self) -> str | None:
        """The hash of its contents before, if there are any."""
        return None if self.modes[0] in _NO_CONTENTS else self.hashes[0]

    @property
    def new(self) -> str | None:
        """The hash of its contents afterwards, if there are any."""
        return None if self.modes[1] in _NO_CONTENTS else self.hashes[1]


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
    fields = iter(said.decode(errors="replace").split("\0"))
    for field in fields:
        entry = field.lstrip("\n")
        if entry.startswith(":"):
            found[-1].changes.append(parse_change(entry, fields))
        elif entry:
            parents, authored, committed, subject = islice(fields, _FIELDS - 1)
            dates = date_of(authored), date_of(committed)
            found.append(RawCommit(entry, parents.split(" ")[0] or None, *dates, subject, []))
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


def parse_change(entry: str, fields: Iterator[str]) -> RawChange:
    """A file's entry, `:mode mode hash hash status`, with the path that it takes off `fields`; of a rename, both."""
    old_mode, new_mode, old, new, status = entry[1:].split(" ")
    old_path = next(fields) if status[0] in "RC" else None
    return RawChange(status[0], next(fields), old_path, (old_mode, new_mode), (old, new))
