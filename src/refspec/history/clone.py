"""One clone of SGLang, asked through git in bulk: never written to, and the network is not touched.

Any kind of clone will do: bare, mirror, worktree, shallow, blobless, of SHA-1 or SHA-256. What it lacks is said.
Three habits keep it from harm. Names that a user gives (revisions) reach git through its standard input, where nothing
is an option, and come back as hashes; only those, and paths behind a `--`, stand on command lines. Settings of the
user's that would change what is parsed are overruled. And git may not fetch what a partial clone lacks.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from git.cmd import Git

OLDEST_GIT = (2, 25)
# Upstream's main line is the first of these that the clone has. A fork's HEAD may be any other branch.
MAIN_LINES = ("refs/remotes/origin/main", "refs/heads/main", "refs/heads/master", "HEAD")

# Settings that would change what git prints, and what they are by default.
SETTINGS = {
    "color.ui": "false",
    "core.quotePath": "false",
    "core.pager": "cat",
    "core.commentChar": "#",
    "diff.algorithm": "default",
    "diff.context": "3",
    "diff.indentHeuristic": "true",
    "diff.interHunkContext": "0",
    "diff.mnemonicPrefix": "false",
    "diff.noprefix": "false",
    "diff.orderFile": os.devnull,
    "diff.relative": "false",
    "diff.renameLimit": "1000",
    "diff.renames": "true",
    "diff.submodule": "short",
    "diff.suppressBlankEmpty": "false",
    "grep.lineNumber": "false",
    "i18n.logOutputEncoding": "UTF-8",
    "log.abbrevCommit": "false",
    "log.date": "default",
    "log.decorate": "false",
    "log.diffMerges": "separate",
    "log.follow": "false",
    "log.mailmap": "true",
    "log.showRoot": "true",
    "log.showSignature": "false",
    "format.pretty": "medium",
}
# For every `git log` and `git diff`: the diff itself, whatever programs of the user's there are to show another.
PLAIN_DIFF = ("--no-color", "--no-ext-diff", "--no-textconv")

# Variables that point git to another repository than the one asked for, as in a hook or an alias of git's.
_ELSEWHERE = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_COMMON_DIR GIT_DIR GIT_GRAFT_FILE GIT_IMPLICIT_WORK_TREE GIT_INDEX_FILE "
    "GIT_INTERNAL_SUPER_PREFIX GIT_NAMESPACE GIT_OBJECT_DIRECTORY GIT_PREFIX GIT_QUARANTINE_PATH GIT_REPLACE_REF_BASE "
    "GIT_SHALLOW_FILE GIT_WORK_TREE GIT_DIFF_OPTS GIT_EXTERNAL_DIFF GIT_NOTES_DISPLAY_REF GIT_NOTES_REF "
    "GIT_GLOB_PATHSPECS GIT_ICASE_PATHSPECS GIT_NOGLOB_PATHSPECS GIT_LITERAL_PATHSPECS"
).split()
_ENVIRONMENT = {
    "GIT_ALLOW_PROTOCOL": "none",  # what a partial clone lacks it lacks;
    "GIT_NO_LAZY_FETCH": "1",  # older gits know the first only
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_LITERAL_PATHSPECS": "1",  # a path is that path, whatever it looks like
    "GIT_NO_REPLACE_OBJECTS": "1",  # the commit itself, whatever `git replace` put in its place
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
}
_HEX = re.compile(rb"[0-9a-f]{40}|[0-9a-f]{64}")


class HistoryError(ValueError):
    """Something was asked of the history that cannot be answered. The message says what to do."""


class GitError(HistoryError):
    """git is missing, too old, refuses the clone, or cannot read it."""


class LacksError(HistoryError):
    """The clone lacks what the answer needs: commits, tags, or contents of files."""


@dataclass(frozen=True)
class MainLine:
    """The branch that is taken for upstream's. name: as people write it, "origin/main"."""

    name: str
    commit: str


class Clone:
    """A clone in `folder`, or around it.

    Raises GitError if git is missing or too old, if there is no repository, or if git refuses to read it.
    """

    def __init__(self, folder: Path) -> None:
        for name in _ELSEWHERE:
            os.environ.pop(name, None)
        self.folder = folder
        self._git = _git(folder)
        said, complaint, status = self._execute(["rev-parse", "--absolute-git-dir", "--git-common-dir"])
        if status:
            raise GitError(_refusal(folder, complaint))
        git_dir, common = os.fsdecode(said).splitlines()[-2:]
        self.git_dir = Path(git_dir)
        self.common_dir = (folder / common).resolve()  # of a linked worktree: the repository that it belongs to

    # --- asking

    def git(self, *arguments: str, stdin: bytes = b"", allowed: Sequence[int] = (0,)) -> bytes:
        """What git prints.

        No argument may come from a user, unless as part of one, as in f"-S{text}", or behind a "--". Raises LacksError
        if the clone lacks an object that is needed, GitError for whatever else makes git end with another status than
        those allowed.
        """
        overruled = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
        said, complaint, status = self._execute([f"--git-dir={self.git_dir}", *overruled, *arguments], stdin)
        if status not in allowed:
            raise self._failure(complaint)
        return said

    def resolve(self, *names: str) -> list[str | None]:
        """The hash of the commit that each name means, in any form that git takes; None where the clone has none.

        One git process for all. Raises HistoryError for a name that cannot be one.
        """
        for name in names:
            if name.startswith("-"):
                raise HistoryError(f"a revision cannot begin with '-': {name}")
            if not name or any(c in name for c in "\n\0"):
                raise HistoryError(f"not a revision: {name!r}")
        found = self.check(*(f"{name}^{{commit}}" for name in names))
        return [entry[0] if entry else None for entry in found]

    def commit(self, name: str) -> str:
        """The hash of the commit that `name` means. Raises LacksError if the clone has none of that name."""
        (found,) = self.resolve(name)
        if found is None:
            raise LacksError(f"this clone lacks the revision {name}{self.remedy()}")
        return found

    def check(self, *names: str) -> list[tuple[str, str, int] | None]:
        """Hash, type and size of each object, as `git cat-file --batch-check` has them; None where there is none.

        A name may be any that git takes, such as f"{commit}:{path}"; it has no line breaks. One process for all.
        """
        if not names:
            return []
        lines = self.git(
            "cat-file", "--batch-check", stdin="".join(f"{name}\n" for name in names).encode(errors="surrogateescape")
        )
        found: list[tuple[str, str, int] | None] = []
        for line in lines.splitlines():
            hash_, _, rest = line.partition(b" ")
            kind, _, size = rest.partition(b" ")
            known = _HEX.fullmatch(hash_) and size.isdigit()
            found.append((hash_.decode(), kind.decode(), int(size)) if known else None)
        return found

    def objects(self, *names: str) -> Iterator[bytes | None]:
        """The contents of each object, as `git cat-file --batch` has them; None where there is none. One process.

        A name may be any that git takes, such as f"{commit}:{path}"; it has no line breaks.
        """
        if not names:
            return
        said = self.git(
            "cat-file", "--batch", stdin="".join(f"{name}\n" for name in names).encode(errors="surrogateescape")
        )
        at = 0
        for _ in names:
            end = said.index(b"\n", at)
            hash_, _, rest = said[at:end].partition(b" ")
            size = rest.partition(b" ")[2]
            if _HEX.fullmatch(hash_) and size.isdigit():
                at = end + 1 + int(size)
                yield said[end + 1 : at]
                at += 1
            else:
                at = end + 1
                yield None

    # --- what kind of clone it is

    @cached_property
    def main(self) -> MainLine:
        """The main line: origin/main, else main, else master, else HEAD. Raises LacksError if there is no commit."""
        for name, found in zip(MAIN_LINES, self.resolve(*MAIN_LINES), strict=True):
            if found:
                return MainLine(re.sub("^refs/(remotes|heads)/", "", name), found)
        raise LacksError(f"there is no commit in {self.folder}: name a clone of SGLang with --clone")

    @cached_property
    def is_shallow(self) -> bool:
        """Does its history end before the first commit?"""
        return (self.common_dir / "shallow").is_file()

    @cached_property
    def filter(self) -> str | None:
        """What it was cloned without, as git's --filter has it: "blob:none", "tree:0", ...; None if without nothing."""
        said = self.git("config", "--get-regexp", r"^remote\..*\.partialclonefilter$", allowed=(0, 1))
        return said.decode(errors="replace").splitlines()[0].partition(" ")[2] if said else None

    @cached_property
    def boundary(self) -> frozenset[str]:
        """The commits of a shallow clone whose parents are not there."""
        try:
            return frozenset((self.common_dir / "shallow").read_text(encoding="ascii", errors="replace").split())
        except FileNotFoundError:
            return frozenset()

    def remedy(self) -> str:
        """What may bring what the clone lacks, to go behind a message that says so; "" if nothing is known to."""
        if self.is_shallow:
            return " (it is shallow: git fetch --unshallow brings the rest)"
        return ""

    # --- the process

    def _execute(self, arguments: list[str], stdin: bytes = b"") -> tuple[bytes, str, int]:
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            status, said, complaint = self._git.execute(
                [self._git.GIT_PYTHON_GIT_EXECUTABLE or "git", *arguments],
                istream=given,
                env=_ENVIRONMENT,
                with_extended_output=True,
                with_exceptions=False,
                stdout_as_string=False,
                strip_newline_in_stdout=False,
            )
        if isinstance(complaint, bytes):
            complaint = complaint.decode(errors="replace")
        return bytes(said), complaint, int(status)

    def _failure(self, complaint: str) -> HistoryError:
        lines = [line for line in complaint.splitlines() if line.startswith(("fatal:", "error:"))]
        said = (lines or complaint.splitlines() or ["git failed, and does not say why"])[0]
        # A partial clone says that it could not fetch; which words it has for that depends on git's version.
        if self.filter and re.search(
            r"promisor|could not fetch|transport .* not allowed|missing (blob|tree)", complaint
        ):
            what = "file contents" if self.filter.startswith("blob") else "its lists of files"
            return LacksError(
                f"this clone lacks what that needs: it was made without {what} (--filter={self.filter}), and nothing "
                "is fetched here (refspec history clone --full makes a whole one)"
            )
        return GitError(f"git cannot read {self.folder}: {said} (git fsck says more)")


def _git(folder: Path) -> Git:
    if not folder.is_dir():
        raise GitError(f"no such folder: {folder}")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # without git, the import below would fail
    from git.cmd import Git
    from git.exc import GitCommandNotFound

    git = Git(str(folder))
    try:
        version = git.version_info
    except (GitCommandNotFound, OSError):
        raise GitError("git is needed: install it, then run this again") from None
    if version[:2] < OLDEST_GIT:
        raise GitError(
            f"git {'.'.join(map(str, version))} is too old: {'.'.join(map(str, OLDEST_GIT))} or newer is needed"
        )
    return git


def _refusal(folder: Path, complaint: str) -> str:
    advice = re.search(r"git config --global --add safe\.directory (.*)", complaint)
    if advice:
        return f"git refuses {folder}, which belongs to another user; if you trust it, run: {advice[0]}"
    if "not a git repository" in complaint:
        return f"not a git repository: {folder} (name a clone of SGLang)"
    return f"git cannot read {folder}: {next(iter(complaint.splitlines()), 'it does not say why')}"
