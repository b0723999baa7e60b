"""A clone of SGLang, made or brought up to date: the one place where the history asks the network, or writes.

`git clone` cannot go on where it was interrupted, so here the history comes in steps, each of which keeps what it
brought: the main line's last 500 commits, then four times as many and so on until all are there, then the tags, then
the contents of CONTENTS in batches. What is there already says which step is next. The clone is bare, and unless all of
it is asked for it is partial: of the contents of files it has what the commands here ask for, CONTENTS above all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from refspec.history import catalogue
from refspec.history.catalogue import DIRECTORY, REPOSITORY
from refspec.history.clone import ELSEWHERE, MAIN_LINES, OURS, Clone, GitError, HistoryError, git_in, reason
from refspec.history.counterparts import counterparts

CONTENTS = (DIRECTORY,)
# Where claims look besides: at which revisions, into which files.
BEYOND = (
    ("refs/tags/v0.4.6 815dce0554 b26bc86b36^", ("python",)),
    (
        "9fafa62db7^ 9fafa62db7 9fb48f951f^ 9fb48f951f 52a34d7448^ 52a34d7448 e983e43248^ e983e43248 d315eb7250 HEAD",
        (
            "python/sglang/srt/arg_groups/speculative_hook.py",
            "python/sglang/srt/layers/attention/flashattention_backend.py",
            "python/sglang/srt/layers/attention/flashinfer_mla_backend.py",
            "python/sglang/srt/models/deepseek_v2.py",
            "sgl-kernel/csrc/speculative/eagle_utils.cu",
        ),
    ),
)
FIRST_STEP = 500  # commits
STEP_GROWTH = 4
CONTENTS_STEP = 1000  # files' contents in one batch
OLDEST_GIT_FOR_CONTENTS = (2, 29)
OLDEST_GIT_TO_REFETCH = (2, 36)
TRANSPORTS = ("https", "ssh", "git", "file")

# Our own run changes nothing but what it says: no housekeeping, no hooks, no other repositories. A server that sends
# nothing for a minute is given up.
_SETTINGS = (
    "core.fsmonitor=false core.hooksPath=/dev/null fetch.prune=false fetch.pruneTags=false "
    "fetch.recurseSubmodules=false fetch.unpackLimit=1 fetch.writeCommitGraph=false gc.auto=0 http.lowSpeedLimit=1 "
    "http.lowSpeedTime=60 maintenance.auto=false"
).split()
_SCHEME = re.compile(r"([A-Za-z][\w+.-]*:/+|)(.*)", re.DOTALL)
_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Cloned:
    """A clone that is complete, as far as its source lets it be.

    source: without a password. contents: "all", "folder" or "none". missing: contents of the folder, and others that
    commands ask for, that did not come. is_shallow: the source's own history does not reach back to the first commit.
    notes: what else is worth saying.
    """

    folder: Path
    source: str
    main_line: str
    commit: str
    commits: int
    tags: int
    contents: str
    missing: int
    is_shallow: bool
    size: int
    notes: tuple[str, ...]


def make_clone(
    folder: Path, source: str | None = None, *, full: bool = False, contents: bool = True, tell: Tell | None = None
) -> Cloned:
    """Makes a clone in `folder`, goes on with one that was interrupted, or brings one up to date.

    source: a URL, or the path of a repository; None: where the clone in `folder` is from, else REPOSITORY. full:
    with the contents of all files. contents: with those that the commands ask for. tell: is handed what happens, a line
    at a time. Raises HistoryError, and leaves `folder` as it is, if it holds something that was not made here; also if
    the source cannot be read, or the connection breaks: what has come until then is kept.
    """
    folder = folder.resolve()
    version = git_in(Path(os.sep)).version_info  # wherever it runs
    if not _is_ours(folder):
        if not full:
            _check_version(version, full=False, contents=contents)
        _make_empty(folder, checked_source(REPOSITORY if source is None else source), full, tell)
    _check_owner(folder)
    with _locked(folder) as lock:
        repository = _Repository(folder, lock, tell)
        if repository.is_partial:
            _check_version(version, full=full, contents=contents)
        if source is not None and checked_source(source) != repository.url:
            was, asked = without_password(repository.url), without_password(source)
            raise HistoryError(f"{folder} is a clone of {was}: name another folder for one of {asked}")
        notes = repository.bring_history()
        if full:
            repository.bring_everything()
        elif contents:
            repository.bring_contents()
        clone = Clone(folder)
        if clone.is_shallow:
            notes.append("the source's own history is cut off, and so this one's is")
        else:
            repository.say("commit-graph")
            try:
                write_commit_graph(clone)
            except HistoryError as error:
                notes.append(str(error))
        missing = len(repository.missing())
        return Cloned(
            folder,
            without_password(repository.url),
            clone.main.name,
            clone.main.commit,
            int(repository.git("rev-list", "--count", clone.main.commit)),
            len(repository.git("for-each-ref", "--format=.", "refs/tags").split()),
            "all" if not clone.is_partial else "none" if missing else "folder",
            missing,
            clone.is_shallow,
            sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
            tuple(notes),
        )


def checked_source(source: str) -> str:
    """The source as git is to have it: a URL as it is, a path in full. Raises HistoryError for what is neither."""
    if source.startswith("-"):
        shown = without_password(source)
        raise HistoryError(f"a source cannot begin with '-': {shown} (a folder of that name is ./{shown})")
    if "::" in source or any(c < " " for c in source):
        raise HistoryError(f"neither a URL nor a path: {without_password(source)!r}")
    scheme, is_url, _ = source.partition("://")
    if is_url:
        if scheme not in TRANSPORTS:
            raise HistoryError(
                f"a clone comes over {', '.join(TRANSPORTS)}, not over {scheme}: {without_password(source)}"
            )
        return source
    path = Path(source)
    if source and path.is_dir():
        return str(path.resolve())
    if re.match(r"[^/]+:", source) and not path.exists():  # as in git@host:path
        return source
    raise HistoryError(f"no such repository: {without_password(source)}")


def without_password(source: str) -> str:
    """The source, to be shown: of what may hold a password, that which stands behind the last "@"."""
    scheme, rest = _SCHEME.fullmatch(source).groups()  # type: ignore[union-attr] # it matches any text
    before, _, behind = rest.rpartition("@")
    is_path = source.startswith("/") or scheme.startswith("file:")
    return source if is_path or not (scheme or ":" in before) else scheme + behind


def write_commit_graph(clone: Clone) -> int:
    """Has git write a commit-graph into the clone, with the paths that commits change; returns its size in bytes.

    Raises HistoryError where git would write none: for a shallow clone, or where the clone's settings forbid it.
    """
    if clone.is_shallow:
        raise HistoryError(f"git writes no commit-graph for a shallow clone{clone.remedy()}")
    # Which paths a commit changes, git tells from lists of files. (2, 27): the first that can note it.
    can = clone.git_version >= (2, 27) and not str(clone.filter).startswith("tree")
    clone.git("commit-graph", "write", "--reachable", *(["--changed-paths"] if can else []))
    size = commit_graph_size(clone)
    if size is None:
        raise HistoryError(f"git wrote no commit-graph: is core.commitGraph off in {clone.folder}, or has it grafts?")
    return size


def commit_graph_size(clone: Clone) -> int | None:
    """The size of the clone's commit-graph in bytes; None if it has none of its own."""
    info = clone.common_dir / "objects" / "info"
    files = [info / "commit-graph", *(info / "commit-graphs").glob("*.graph")]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return sum(sizes) if sizes else None


class _Repository:
    """The clone that is being made. lock: held by each git that runs in it, so that none can be left over unseen."""

    def __init__(self, folder: Path, lock: int, tell: Tell | None) -> None:
        self.folder = folder
        self._lock = lock
        self._tell = tell
        self._step = ""
        for left_over in (*folder.glob("objects/pack/tmp_*"), *folder.glob("*.lock"), *folder.glob("refs/**/*.lock")):
            left_over.unlink(missing_ok=True)  # of a git that was killed
        self.url = ""
        said = self.git("config", "--null", "--get-regexp", r"^remote\.origin\.", allowed=(0, 1))
        settings = dict(part.partition("\n")[::2] for part in said.split("\0"))
        self.url = settings.get("remote.origin.url", "")
        self._main_line = settings.get("remote.origin.fetch", "")  # +THEIR_NAME:OUR_NAME
        if not (self.url and self._main_line):
            raise _damaged(folder)
        self._filter = settings.get("remote.origin.partialclonefilter", "")

    @property
    def is_partial(self) -> bool:
        """Is it made without contents?"""
        return bool(self._filter)

    def say(self, step: str) -> None:
        """Tells which step comes now."""
        self._step = step
        if self._tell:
            self._tell(step)

    def git(self, *arguments: str, stdin: bytes = b"", allowed: tuple[int, ...] = (0,)) -> str:
        """What git prints. Raises HistoryError if it ends with another status than those allowed."""
        return self._run(arguments, stdin, allowed)[0]

    def bring_history(self) -> list[str]:
        """All commits of the main line and all tags, each with its lists of files. Returns what is worth saying."""
        notes: list[str] = []
        here = self._main_line.partition(":")[2]
        fresh = not self.git("for-each-ref", here)
        if fresh:
            self.say(f"the last {FIRST_STEP} commits")
            if "filtering not recognized" in self._fetch(
                f"--depth={FIRST_STEP}", "--no-tags", "origin", self._main_line
            ):
                notes.append("the server cannot leave contents out, so all came (it lacks uploadpack.allowFilter)")
                self.forget_filter()
        cut_off = ""
        while (boundary := self._boundary()) and boundary != cut_off:
            cut_off = boundary
            number = int(self.git("rev-list", "--count", here))
            self.say(f"the last {number * STEP_GROWTH} commits")
            self._fetch(f"--deepen={number * (STEP_GROWTH - 1)}", "--no-tags", "origin", self._main_line)
        self.say("tags" if fresh else "what is new")
        self._fetch("--update-shallow", "--no-tags", "origin", self._main_line, "+refs/tags/*:refs/tags/*")
        return notes

    def bring_everything(self) -> None:
        """Of a partial clone, the contents of all files: one step, since servers take long to choose among them."""
        if self._filter:
            self.say("everything once more, with all contents")
            self._fetch("--refetch", "--no-filter", "--no-tags", "origin", self._main_line, "+refs/tags/*:refs/tags/*")
            self.forget_filter()

    def bring_contents(self) -> None:
        """The contents that are `missing`."""
        missing = self.missing()
        for at in range(0, len(missing), CONTENTS_STEP):
            self.say(f"contents, {at} of {len(missing)}")
            batch = "".join(f"{hash_}\n" for hash_ in missing[at : at + CONTENTS_STEP]).encode()
            # As git does it when it needs what a partial clone lacks.
            self._fetch("--no-tags", "--no-write-fetch-head", "--stdin", "origin", negotiate=False, stdin=batch)

    def missing(self) -> list[str]:
        """The contents that the clone is to have and has not: those below CONTENTS at all commits; those that commits
        of the story changed, wherever; those that are BEYOND; and those that
        `compare` looks into at the main line's end.
        """
        clone = Clone(self.folder)
        missing = self._missing("--all", "--", *CONTENTS)
        compared = {place.path for counterpart in counterparts() for place in counterpart.places}
        for revisions, paths in BEYOND:
            if there := [commit for commit in clone.resolve(*revisions.split()) if commit]:
                missing |= self._missing("--no-walk", "--sparse", *there, "--", *paths)
        missing |= self._missing("--no-walk", "--sparse", clone.main.commit, "--", *compared)
        story = clone.present(*(commit.hash for commit in catalogue.story()))
        options = ("--stdin", "-r", "--raw", "--no-abbrev", "--no-commit-id")
        told = clone.git("diff-tree", *options, stdin="".join(f"{commit}\n" for commit in story).encode())
        changed = {hash_ for line in told.decode(errors="replace").splitlines() for hash_ in line.split()[2:4]}
        changed = {hash_ for hash_ in changed if hash_.strip("0")}
        return sorted(missing | (changed - clone.present(*changed)))

    def _missing(self, *what: str) -> set[str]:
        said = self.git("rev-list", "--objects", "--no-object-names", "--missing=print", *what)
        return {line[1:] for line in said.splitlines() if line.startswith("?")}

    def forget_filter(self) -> None:
        """It is a whole clone from now on."""
        self._filter = ""
        for name in ("remote.origin.promisor", "remote.origin.partialCloneFilter", "extensions.partialClone"):
            self.git("config", "--unset", name, allowed=(0, 5))

    def _boundary(self) -> str:
        """Where history is cut off: hashes of commits, "" if it is whole."""
        try:
            return (self.folder / "shallow").read_text(encoding="ascii")
        except FileNotFoundError:
            return ""

    def _fetch(self, *arguments: str, negotiate: bool = True, stdin: bytes = b"") -> str:
        options = [f"--filter={self._filter}"] if self._filter else []
        settings = [] if negotiate else ["-c", "fetch.negotiationAlgorithm=noop"]
        progress = "--progress" if self._tell else "--quiet"
        return self._run((*settings, "fetch", progress, *options, *arguments), stdin)[1]

    def _run(self, arguments: tuple[str, ...], stdin: bytes = b"", allowed: tuple[int, ...] = (0,)) -> tuple[str, str]:
        tell, step = self._tell, self._step
        follow = (lambda line: tell(f"{step}: {_hidden(line, self.url)}")) if tell else None
        status, said, complaint = _run_git(
            (f"--git-dir={self.folder}", *arguments), stdin=stdin, tell=follow, keep=(self._lock,)
        )
        if status not in allowed:
            raise _failure(complaint, self.folder, self.url)
        return said, complaint


def _make_empty(folder: Path, source: str, full: bool, tell: Tell | None) -> None:
    """Makes the clone without anything in it. It appears in `folder` at once, with all its settings, or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise _something_else(folder)
    if tell:
        tell("asking the source")
    main_line, object_format = _main_line_of(source, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
        made = Path(place) / "made"
        here = f"refs/heads/{main_line.rsplit('/', 1)[-1] if main_line in MAIN_LINES else main_line[11:]}"
        settings = {
            OURS: "true",
            "remote.origin.url": source,
            "remote.origin.fetch": f"+{main_line}:{here}",
            "remote.origin.tagOpt": "--tags",
        }
        if not full:
            settings |= {"remote.origin.promisor": "true", "remote.origin.partialCloneFilter": "blob:none"}
        steps = [
            ("init", "--quiet", "--bare", "--template=", *object_format, str(made)),
            *((f"--git-dir={made}", "config", name, value) for name, value in settings.items()),
            (f"--git-dir={made}", "symbolic-ref", "HEAD", here),
        ]
        for arguments in steps:
            status, _, complaint = _run_git(arguments)
            if status:
                raise _failure(complaint, folder, source)
        try:
            os.rename(made, folder)
        except OSError as error:
            # Of two that make it at once, the later goes on with what the earlier made, or finds it at work.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not _is_ours(folder):
                raise _something_else(folder) from None


def _main_line_of(source: str, folder: Path) -> tuple[str, list[str]]:
    """The source's name for the main line, and the option that git needs to make a repository with such hashes."""
    status, said, complaint = _run_git(("ls-remote", "--symref", "--", source, "HEAD", "main", "master"))
    if status:
        raise _failure(complaint, folder, source)
    refs: dict[str, str] = {}
    pointed = ""  # the branch that HEAD is on; of another name than those asked for, its commit is HEAD's
    for line in said.splitlines():
        value, _, name = line.partition("\t")
        if _HASH.fullmatch(value):
            refs[name] = value
        elif name == "HEAD" and value.startswith("ref: refs/heads/"):
            pointed = value.removeprefix("ref: ")
    if pointed and "HEAD" in refs:
        refs[pointed] = refs["HEAD"]
    for name in (*MAIN_LINES[:-1], pointed):
        if name in refs:
            return name, ["--object-format=sha256"] if len(refs[name]) == 64 else []
    raise HistoryError(f"{without_password(source)} has no branch main, no branch master, and none that its HEAD is on")


def _something_else(folder: Path) -> HistoryError:
    return HistoryError(f"{folder} holds something else: name a new folder, or an empty one")


def _damaged(folder: Path) -> HistoryError:
    return HistoryError(f"{folder} is damaged: remove it, or name another folder")


def _check_version(version: tuple[int, ...], *, full: bool, contents: bool) -> None:
    """Can this git bring what is asked for to a clone that was made without contents? Raises GitError if not."""
    if full:
        oldest, purpose = OLDEST_GIT_TO_REFETCH, "bringing all contents to a clone that was made without them"
    else:
        oldest, purpose = OLDEST_GIT_FOR_CONTENTS, "bringing contents of some files alone"
    if (full or contents) and version[:2] < oldest:
        needed = ".".join(map(str, oldest))
        raise GitError(
            f"{purpose} needs git {needed} or newer (or --full for a clone in a new folder, or --no-contents)"
        )


def _check_owner(folder: Path) -> None:
    """Raises GitError if git refuses the folder, as one of another user's: its settings may start programs.

    git asks who a repository belongs to where it finds one itself, but not where --git-dir names one.
    """
    try:
        found = Clone(folder).git_dir.resolve()
    except GitError as error:
        if "not a git repository" in str(error):
            raise _damaged(folder) from None
        raise
    if found != folder:
        raise _damaged(folder)  # what was found is around it


def _is_ours(folder: Path) -> bool:
    if not (folder / "config").is_file():
        return False
    status, said, _ = _run_git(("config", "--file", str(folder / "config"), "--get", OURS))
    return status == 0 and said.strip() == "true"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Nobody else makes a clone in this folder at the same time. The lock ends with the last process that has it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HistoryError(f"another refspec history clone is at work in {folder}") from None
        yield lock
    finally:
        os.close(lock)


def _run_git(
    arguments: tuple[str, ...], *, stdin: bytes = b"", tell: Tell | None = None, keep: tuple[int, ...] = ()
) -> tuple[int, str, str]:
    """Runs git, which may use the network. Returns its status, what it printed, and what it complained of.

    If this process is interrupted, git and whatever it started end with it. Raises GitError if there is no git.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    environment |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": ":".join(TRANSPORTS)}
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    program = shutil.which("git")
    if program is None:
        raise GitError("git is needed: install it, then run this again")
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(stdin)
        given.seek(0)
        process = None
        try:
            with _signals_held():  # or it could be left running, when one comes before it has its name here
                process = subprocess.Popen(
                    [program, *settings, *arguments],
                    stdin=given,
                    stdout=printed,
                    stderr=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,
                    pass_fds=keep,
                )
            complaint = _followed(process, tell)
            status = process.wait()
        except BaseException:
            if process:
                end(process)
            raise
        printed.seek(0)
        return status, printed.read().decode(errors="surrogateescape"), complaint


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """A signal that would raise an exception in the block raises it at the block's end.

    They are held here and not blocked by the kernel, since a process that the block starts would inherit that.
    """
    held: list[int] = []
    # Python runs handlers in the main thread, and they can be set there alone.
    in_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if in_main else ()
    handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: held.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for came in held:
        signal.raise_signal(came)


def _followed(process: subprocess.Popen[bytes], tell: Tell | None) -> str:
    """What it says on stderr, but for its progress: lines that are followed by their next version."""
    assert process.stderr
    kept, rest = b"", b""
    with process.stderr as stream:
        while piece := os.read(stream.fileno(), 65_536):
            *whole, rest = re.split(rb"(?<=[\r\n])", rest + piece)
            for line in whole:
                if line.endswith(b"\n"):
                    kept += line
                if tell and line.strip():
                    tell(line.decode(errors="replace").strip())
    return (kept + rest).decode(errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a session of its own, and whatever it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            return


def _failure(complaint: str, folder: Path, source: str) -> HistoryError:
    """What became of it, and what to do."""
    url, source = source, without_password(source)
    again = "the same command, run again, goes on from here"
    if "No space left" in complaint or "Disk quota" in complaint:
        return GitError(f"the disk is full: make room for {folder}; {again}")
    if re.search(r"does(?:n't| not) appear to be a git repo|[Rr]epository .*not found|does not exist", complaint):
        return GitError(f"there is no repository at {source}")
    if "not a git repository" in complaint:
        return _damaged(folder)
    if "unadvertised object" in complaint:
        return GitError(
            f"{source} hands out no single objects: refspec history clone --full in a new folder needs none"
        )
    if re.search(
        r"Could not resolve|unable to (access|look up|connect)|Connection (refused|timed out|reset)|unreachable"
        r"|Could not read from remote|hung up|early EOF|RPC failed|unexpected disconnect|timed out",
        complaint,
    ):
        return GitError(f"cannot reach {source}: {_hidden(_cause(complaint), url)} ({again})")
    return GitError(f"git cannot make the clone in {folder}: {_hidden(reason(complaint), url)} ({again})")


def _hidden(said: str, source: str) -> str:
    """What git said, without a password that stands in `source`, whole or in parts."""
    shown = without_password(source)
    if shown != source:
        said = said.replace(source, shown)
        scheme, rest = _SCHEME.fullmatch(source).groups()  # type: ignore[union-attr] # it matches any text
        user, _, password = rest.rpartition("@")[0].partition(":")
        secret = password or ("" if scheme.startswith("ssh") else user)
        for part in filter(None, re.split(r"[:/@]", secret)):
            said = re.sub(rf"(?<!\w){re.escape(part)}(?!\w)", "...", said)
    return re.sub(r"((?<!file):/+)[^\s/]*@", r"\1", said)  # of another, which the server points to


def _cause(complaint: str) -> str:
    """Of a broken connection: the first line that is more than the consequence of another."""
    said = [line for line in complaint.splitlines() if line.startswith(("fatal:", "error:", "ssh:"))]
    return (said or [reason(complaint)])[0]
