"""One clone of SGLang, asked through git in bulk: never written to, and the network is not touched.

Any kind of clone will do: bare, mirror, worktree, shallow, blobless, of SHA-1 or SHA-256. What it lacks is said.
Four habits keep it from harm. Names that a user gives (revisions) reach git through its standard input, where nothing
is an option, and come back as hashes; only those, and paths behind a `--`, stand on command lines. Settings of the
user's or of the clone's that would change what is parsed, or run a program, are overruled. git may not fetch what a
partial clone lacks. And it runs in the clone's .git folder, as if that were the work tree: so a path counts from the
top, in a submodule too, and what happens to be checked out has no say.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from git.cmd import Git

OLDEST_GIT = (2, 25)
# Upstream's main line is the first of these that the clone has. A fork's HEAD may be any other branch.
MAIN_LINES = ("refs/remotes/origin/main", "refs/heads/main", "refs/heads/master", "HEAD")

NO_DATE = "not known"
OURS = "refspec.clone"  # the setting by which a clone that `refspec history clone` made is known

# Settings that would change what git prints or run a program, and what they are by default.
SETTINGS = {
    "advice.graftFileDeprecated": "false",
    "color.ui": "false",
    "core.abbrev": "10",
    "core.attributesFile": os.devnull,
    "core.commentChar": "#",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.pager": "cat",
    "core.quotePath": "false",
    "diff.algorithm": "default",
    "diff.context": "3",
    "diff.dstPrefix": "b/",
    "diff.indentHeuristic": "true",
    "diff.interHunkContext": "0",
    "diff.mnemonicPrefix": "false",
    "diff.noprefix": "false",
    "diff.orderFile": os.devnull,
    "diff.relative": "false",
    "diff.renameLimit": "1000",
    "diff.renames": "true",
    "diff.srcPrefix": "a/",
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
    "mailmap.blob": "",  # of a bare clone git takes HEAD's; commits.mailmap names the main line's
    "mailmap.file": os.devnull,
}
# For every `git log`, `git diff` and `git show`: the diff itself, whatever programs there are to show another.
PLAIN_DIFF = ("--no-color", "--no-ext-diff", "--no-textconv")

# Variables that point git to another repository than the one asked for, as in a hook or an alias of git's.
ELSEWHERE = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_ATTR_SOURCE GIT_COMMON_DIR GIT_CONFIG GIT_DIR GIT_GRAFT_FILE "
    "GIT_IMPLICIT_WORK_TREE GIT_INDEX_FILE GIT_INTERNAL_SUPER_PREFIX GIT_NAMESPACE GIT_OBJECT_DIRECTORY GIT_PREFIX "
    "GIT_QUARANTINE_PATH GIT_REPLACE_REF_BASE GIT_SHALLOW_FILE GIT_WORK_TREE GIT_DIFF_OPTS GIT_EXTERNAL_DIFF "
    "GIT_NOTES_DISPLAY_REF GIT_NOTES_REF GIT_GLOB_PATHSPECS GIT_ICASE_PATHSPECS GIT_NOGLOB_PATHSPECS "
    "GIT_LITERAL_PATHSPECS"
).split()
_ENVIRONMENT = {
    "GIT_ALLOW_PROTOCOL": "none",  # what a partial clone lacks it lacks;
    "GIT_NO_LAZY_FETCH": "1",  # older gits know the first only
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_GRAFT_FILE": os.devnull,  # the commit's own parents, whatever info/grafts gives it
    "GIT_LITERAL_PATHSPECS": "1",  # a path is that path, whatever it looks like
    "GIT_NO_REPLACE_OBJECTS": "1",  # the commit itself, whatever `git replace` put in its place
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
}
_HEX = re.compile(rb"[0-9a-f]{40}|[0-9a-f]{64}")
# What ends git, instead of finding nothing, for names such as @{upstream}, @{push} and main@{99}.
_NO_BRANCH = re.compile(
    r"\b(upstream|push|pushing)\b|does not point to a branch|no such branch|log for .* only (has|goes back)"
)
_ROOT = re.compile(r"([0-9a-f]{64}|[0-9a-f]{40})(?![^:^~])")  # of a name that begins with a hash in full


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


@dataclass(frozen=True)
class Head:
    """What HEAD is. branch: its whole name, "refs/heads/main"; None if detached. commit: None if it is unborn."""

    branch: str | None
    commit: str | None


class Clone:
    """A clone in `folder`, or around it.

    From then on, this process is without the variables that point git elsewhere (ELSEWHERE). Raises GitError if git is
    missing or too old, if there is no repository, or if git refuses to read it.
    """

    def __init__(self, folder: Path) -> None:
        for name in ELSEWHERE:
            os.environ.pop(name, None)
        self.folder = folder
        self._git = git_in(folder)
        self.git_version = self._git.version_info
        question = ["rev-parse", "--is-bare-repository", "--absolute-git-dir"]
        said, complaint, status = self._execute(question)
        if status and "safe.bareRepository" in complaint and folder.stat().st_uid == os.geteuid():
            # That setting is about programs of a repository that one happens to be in. This one's are not run.
            said, complaint, status = self._execute(["--git-dir=.", *question])
        if status:
            raise GitError(_refusal(folder, complaint))
        bare, _, git_dir = os.fsdecode(said).removesuffix("\n").partition("\n")  # a path may hold line breaks itself
        if bare not in ("true", "false") or not git_dir:
            raise GitError(f"git gives no answer that can be read in {folder}: is it the git that it should be?")
        self.is_bare = bare == "true"
        self.git_dir = Path(git_dir)
        self.common_dir = _common_dir(self.git_dir)
        self._git = type(self._git)(git_dir)

    # --- asking

    def git(self, *arguments: str, stdin: bytes = b"", allowed: Sequence[int] = (0,)) -> bytes:
        """What git prints.

        No argument may come from a user, unless as part of one, as in f"-S{text}", or behind a "--". Raises LacksError
        if the clone lacks an object that is needed, GitError for whatever else makes git end with another status than
        those allowed.
        """
        here = (f"--git-dir={self.git_dir}", f"--work-tree={self.git_dir}")
        settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
        said, complaint, status = self._execute([*here, *settings, *arguments], stdin)
        if status not in allowed:
            raise self._failure(complaint)
        return said

    def resolve(self, *names: str) -> list[str | None]:
        """The hash of the commit that each name means, in any form that git takes; None where the clone has none.

        One git process for all. Raises HistoryError for a name that cannot be one.
        """
        for name in names:
            if name.startswith("-"):
                raise HistoryError(f"a revision cannot begin with '-': {short(name)}")
            if not name or any(c in "\n\0" or "\ud800" <= c < "\udc80" for c in name):
                raise HistoryError(f"not a revision: {short(name)!r}")
        # Behind ":/", all that follows is the text that is looked for, and what is found is a commit.
        try:
            found = self.check(*(name if name.startswith(":/") else f"{name}^{{commit}}" for name in names))
        except GitError as error:
            if not _NO_BRANCH.search(str(error)):
                raise
            return [None] if len(names) == 1 else [self.resolve(name)[0] for name in names]
        return [entry[0] if entry else None for entry in found]

    def commit(self, name: str) -> str:
        """The hash of the commit that `name` means. Raises LacksError if the clone has none of that name."""
        (found,) = self.resolve(name)
        if found is None:
            raise LacksError(f"this clone lacks the revision {short(name)}{self.remedy()}")
        return found

    def check(self, *names: str) -> list[tuple[str, str, int] | None]:
        """Hash, type and size of each object, as `git cat-file --batch-check` has them; None where there is none.

        A name may be any that git takes, such as f"{commit}:{path}"; it has no line breaks. The number of
        processes does not grow with that of names. Raises LacksError if a name leads to contents or a list of files
        that a partial clone was made without.
        """
        there = self._there(names)
        lines = iter(self._batch("--batch-check", compress(names, there)).split(b"\n"))
        found: list[tuple[str, str, int] | None] = []
        for is_there in there:
            hash_, _, rest = (next(lines) if is_there else b"").partition(b" ")
            kind, _, size = rest.partition(b" ")
            known = _HEX.fullmatch(hash_) and size.isdigit()
            found.append((hash_.decode(), kind.decode(), int(size)) if known else None)
        return found

    def objects(self, *names: str) -> Iterator[bytes | None]:
        """The contents of each object, as `git cat-file --batch` has them; None where there is none.

        Names and errors are those of `check`.
        """
        there = self._there(names)
        said = self._batch("--batch", compress(names, there))
        at = 0
        for is_there in there:
            if not is_there:
                yield None
                continue
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

    def present(self, *hashes: str) -> frozenset[str]:
        """Those of these hashes, each in full, whose objects are there. At most two processes for all."""
        if not hashes:
            return frozenset()
        if not self.is_partial:
            return frozenset(entry[0] for entry in self.check(*hashes) if entry)
        # cat-file would try to fetch what is not there. rev-list can be told to ignore it, in all versions of git; but
        # only commits count for it, whatever its options. The order of these matters.
        said = self.git(
            "rev-list",
            "--ignore-missing",
            "--missing=allow-any",
            "--no-walk=unsorted",
            "--stdin",
            stdin="".join(f"{hash_}\n" for hash_ in hashes).encode(),
        )
        commits = frozenset(said.decode().split())
        others = frozenset(hashes) - commits
        return commits | (others & self._all_objects if others else others)

    @cached_property
    def _all_objects(self) -> frozenset[str]:
        said = self.git("cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered", "--buffer")
        return frozenset(said.decode().split())

    def _there(self, names: Sequence[str]) -> list[bool]:
        """May git be asked for each? Of a partial clone, git tries to fetch a hash that is not there, and ends."""
        hashes = [_ROOT.match(name) for name in names] if self.is_partial else []
        if not any(hashes):
            return [True] * len(names)
        present = self.present(*(hash_[0] for hash_ in hashes if hash_))
        return [hash_ is None or hash_[0] in present for hash_ in hashes]

    def _batch(self, command: str, names: Iterable[str]) -> bytes:
        asked = "".join(f"{name}\n" for name in names).encode(errors="surrogateescape")
        return self.git("cat-file", command, stdin=asked) if asked else b""

    # --- what kind of clone it is

    @cached_property
    def main(self) -> MainLine:
        """The main line: origin/main, else main, else master, else HEAD. Raises LacksError if there is no commit."""
        for name, found in zip(MAIN_LINES, self.resolve(*MAIN_LINES), strict=True):
            if found:
                return MainLine(re.sub("^refs/(remotes|heads)/", "", name), found)
        raise LacksError(f"there is no commit in {self.folder}: name a clone of SGLang with --clone")

    @cached_property
    def head(self) -> Head:
        """The branch that HEAD is on, and the commit that it means."""
        branch = self.git("symbolic-ref", "-q", "HEAD", allowed=(0, 1)).decode(errors="replace").strip()
        return Head(branch or None, self.resolve("HEAD")[0])

    @cached_property
    def is_shallow(self) -> bool:
        """Does its history end before the first commit?"""
        return bool(self.boundary)

    @cached_property
    def boundary(self) -> frozenset[str]:
        """The commits of a shallow clone whose parents are not there."""
        try:
            return frozenset((self.common_dir / "shallow").read_text(encoding="ascii", errors="replace").split())
        except FileNotFoundError:
            return frozenset()

    @property
    def is_partial(self) -> bool:
        """May objects be missing, because git would fetch them when they are needed?"""
        return any(
            name == "extensions.partialclone"
            or (name.endswith(".promisor") and value.lower() in ("", "true", "yes", "1"))
            for name, value in self._settings.items()
        )

    @property
    def filter(self) -> str | None:
        """What it was cloned without, as git's --filter has it: "blob:none", "tree:0", ...; None if without nothing."""
        filters = (value for name, value in self._settings.items() if name.endswith(".partialclonefilter"))
        return next(filters, "unknown" if self.is_partial else None)

    @property
    def object_format(self) -> str:
        """What hashes it has: "sha1" or "sha256"."""
        return self._settings.get("extensions.objectformat", "sha1")

    @property
    def is_submodule(self) -> bool:
        """Is it part of another repository, which keeps its .git folder?"""
        return "core.worktree" in self._settings and "modules" in self.git_dir.parts

    @property
    def is_linked(self) -> bool:
        """Is it a work tree that `git worktree add` made beside a repository?"""
        return self.git_dir.resolve() != self.common_dir

    @property
    def is_ours(self) -> bool:
        """Did `refspec history clone` make it?"""
        return OURS in self._settings

    @cached_property
    def _settings(self) -> dict[str, str]:
        """Those of its settings that say what it is, by their names in lower case but for what stands in the middle."""
        wanted = rf"^(remote\..*\.(promisor|partialclonefilter)|extensions\..*|core\.worktree|{re.escape(OURS)})$"
        said, complaint, status = self._execute(
            [f"--git-dir={self.git_dir}", "config", "--null", "--get-regexp", wanted]
        )
        if status not in (0, 1):
            raise GitError(_refusal(self.folder, complaint))
        return dict(part.partition("\n")[::2] for part in said.decode(errors="replace").split("\0") if part)

    def remedy(self) -> str:
        """What may bring what the clone lacks, to go behind a message that says so; "" if nothing is known to."""
        if self.is_ours:
            what = "the rest" if self.is_shallow else "what is new"
            return f" (refspec history clone {shlex.quote(str(self.folder))} brings {what})"
        if self.is_shallow:
            return " (it is shallow: git fetch --unshallow brings the rest)"
        return ""

    def remedy_for_contents(self) -> str:
        """The same where contents of files are missing, or lists of files."""
        if not self.is_partial:
            return self.remedy() or " (git fsck says more)"
        if self.is_ours:
            return f" (refspec history clone --full {shlex.quote(str(self.folder))} brings them)"
        return f": it was made with --filter={self.filter} (refspec history clone --full DIR makes a whole one)"

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
        # A partial clone says that it could not fetch; which words it has for that depends on git's version.
        if self.is_partial and re.search(
            r"promisor|could not fetch|lazy fetching disabled|transport .* not allowed"
            r"|missing (blob|tree)|unable to read (tree )?[0-9a-f]{40}",
            complaint,
        ):
            what = "lists of files" if str(self.filter).startswith("tree") else "contents of files"
            return LacksError(f"this clone lacks {what} that are needed{self.remedy_for_contents()}")
        said = reason(complaint)
        more = " (git fsck says more)" if re.search(r"[0-9a-f]{40}|corrupt|inflate|zlib|\bpack", said) else ""
        return GitError(f"git cannot answer from {self.folder}: {said}{more}")


def date_of(said: str) -> str:
    """A date as git prints it, in ISO 8601; NO_DATE if git has none to print, or one that never was.

    A commit's lines of author and committer may be broken: then git leaves the placeholder as it is, or prints nothing.
    """
    try:
        datetime.fromisoformat(said)
    except ValueError:
        return NO_DATE
    return said


def reason(complaint: str) -> str:
    """The line of git's complaint that says why it ended. Others may be hints, warnings, or what GIT_TRACE asks for."""
    lines = complaint.strip().splitlines()
    said = [line for line in lines if line.startswith(("fatal:", "error:"))]
    return (said or lines or ["it does not say why"])[0]


def short(name: str) -> str:
    """What a user gave, to be shown; of what is very long, its beginning."""
    return name if len(name) <= 100 else name[:100] + "..."


def git_in(folder: Path) -> Git:
    """git, to be run in that folder. Raises GitError if there is no such folder, or git is missing or too old."""
    if not folder.is_dir():
        raise GitError(f"no such folder: {folder}")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # without git, the import below would fail
    unknown = "git does not say which version it is: is the git that PATH names first the one that it should be?"
    try:
        from git.cmd import Git
        from git.exc import GitCommandError, GitCommandNotFound
    except ModuleNotFoundError:
        raise
    except ImportError:  # GitPython asks for the version at once
        raise GitError(unknown) from None

    git = Git(str(folder))
    try:
        version = git.version_info
    except (GitCommandNotFound, OSError):
        raise GitError("git is needed: install it, then run this again") from None
    except (GitCommandError, IndexError, ValueError):
        version = ()
    if len(version) < 2:
        raise GitError(unknown)
    if version[:2] < OLDEST_GIT:
        raise GitError(
            f"git {'.'.join(map(str, version))} is too old: {'.'.join(map(str, OLDEST_GIT))} or newer is needed"
        )
    return git


def _common_dir(git_dir: Path) -> Path:
    """Of a linked worktree, the repository that it belongs to. As gitrepository-layout(5) has it, not as git tells."""
    try:
        named = (git_dir / "commondir").read_bytes().removesuffix(b"\n")
    except OSError:
        return git_dir.resolve()
    return (git_dir / os.fsdecode(named)).resolve()


def _refusal(folder: Path, complaint: str) -> str:
    advice = re.search(r"git config --global --add safe\.directory (.*)", complaint)
    if advice:
        return f"git refuses {folder}, which belongs to another user; if you trust it, run: {advice[0]}"
    if "not a git repository" in complaint:
        return f"not a git repository: {folder} (name a clone of SGLang)"
    return f"git cannot read {folder}: {reason(complaint)}"
