"""A lesson: which commit changed the number of draft forwards, found by bisection.

It makes the repository of `demo_repository` in a folder of its own, and asks git bisect for real: each commit that git
picks is checked out, its code is run, its draft forwards are counted, and git is told what came of it. Nothing here
knows which commit it is. Neither the network nor any setting of the user's has a part in it, so that everybody sees
the same hashes.

The lesson ends with SGLang, where a round took num_steps + 1 draft forwards at first, and num_steps since a commit of
four lines. Its worker cannot run without a GPU, so there a script reads the loop.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from refspec.history import catalogue, demo_repository
from refspec.history.clone import GitError, HistoryError, git_in
from refspec.history.cloning import end
from refspec.history.demo_repository import BAD, FIRST_SECOND, GOOD, NUM_STEPS, USUAL_PLACE

REPOSITORY = "drafter"  # folders and files below the one that the lesson takes place in
SCRIPT = "count_forwards.py"
SOURCE_SCRIPT = "read_the_loop.py"

# What `git bisect run` starts at each commit. It lies outside the repository, or a checkout would change it as well.
RUN_SCRIPT = f"""\
import os
import sys

sys.dont_write_bytecode = True  # checkouts follow so fast that stale bytecode would look new
sys.path.insert(0, os.getcwd())
calls = 0
try:
    from main import generate
    from model import DraftModel

    forward = DraftModel.forward

    def counted(self, tokens):
        global calls
        calls += 1
        return forward(self, tokens)

    DraftModel.forward = counted
    tokens, rounds = generate([1, 2, 3], 20, {NUM_STEPS})
except Exception as error:
    print(f"cannot run: {{error}}")
    sys.exit(125)  # git bisect skip
per_round = (calls - 1) / rounds  # the prompt's extend is in no round
print(f"{{per_round:g}} draft forwards a round")
sys.exit({{{NUM_STEPS}: 0, {NUM_STEPS + 1}: 1}}.get(per_round, 125))  # git bisect good, bad, skip
"""

MORE, FEWER = "815dce0554793d0788faf4eaacf0c7271c070e95", "v0.4.6"  # num_steps + 1 forwards a round, and num_steps
SGLANG_FILE = f"{catalogue.DIRECTORY}/eagle_worker.py"
SGLANG_ANSWER = "d23cb9a01ed7f7e39f40e3f5ad7d271d3ac52ce2"
SGLANG_SCRIPT = f'''\
import ast
import subprocess
import sys

file = "{SGLANG_FILE}"
shown = subprocess.run(["git", "show", f"BISECT_HEAD:{{file}}"], capture_output=True)
if shown.returncode:
    sys.exit(125)
loops = [
    node
    for node in ast.walk(ast.parse(shown.stdout))
    if isinstance(node, ast.For) and "num_steps" in ast.unparse(node.iter)
]
if len(loops) != 1:
    sys.exit(125)
leaves = any(isinstance(node, ast.Break) for node in ast.walk(loops[0]))
print("num_steps draft forwards" if leaves else "num_steps + 1 draft forwards")
sys.exit(1 if leaves else 0)
'''
SGLANG_COMMANDS = (
    f"git bisect start --no-checkout --term-old=more --term-new=fewer {FEWER} {MORE[:10]} -- {SGLANG_FILE}",
    f"git bisect run python3 ../{SOURCE_SCRIPT}",
    "git bisect reset",
)

ANSWERS = {0: "good", 1: "bad", 125: "skip"}


@dataclass(frozen=True)
class DemoCommit:
    """A commit of the small repository."""

    hash: str
    date: str
    subject: str


@dataclass(frozen=True)
class End:
    """One of the two commits that a bisection starts from. passes: do the repository's own tests, run there?

    said: what the run script printed there.
    """

    name: str
    commit: DemoCommit
    said: str
    answer: str
    passes: bool


@dataclass(frozen=True)
class Trial:
    """A commit that git bisect picked.

    said, status: the run script's line and exit status; answer: what git was told, "good", "bad" or "skip"; left: how
    many commits may still be the first bad one, after that.
    """

    commit: DemoCommit
    said: str
    status: int
    answer: str
    left: int


@dataclass(frozen=True)
class Lesson:
    """What happened. commits: those behind the good end, the oldest first: one of them is the first bad one.

    suspects: what bisection came to: that one, or more if those between could not be run. diff: of the one.
    """

    commits: tuple[DemoCommit, ...]
    good: End
    bad: End
    trials: tuple[Trial, ...]
    suspects: tuple[DemoCommit, ...]
    diff: str


@contextmanager
def place(keep: Path | None = None) -> Iterator[Path]:
    """A folder for the lesson: `keep`, or one that is removed afterwards.

    Whatever ends the block early, nothing is left behind. Raises HistoryError if there is something in `keep` already.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="refspec-bisect-") as name:
            try:
                yield Path(name).resolve()
            finally:
                _emptied(Path(name))
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise HistoryError(f"{keep} is there already: name a folder that does not exist, or an empty one")
    made = not keep.exists()
    keep.mkdir(parents=True, exist_ok=True)
    try:
        yield keep.resolve()
    except BaseException:
        _emptied(keep)
        if made:
            keep.rmdir()
        raise


def teach(folder: Path, where: int = USUAL_PLACE) -> Lesson:
    """Makes the repository in `folder`, which is empty, and bisects it. Both scripts lie beside it afterwards.

    where: the place, behind the good end, of the commit to be found. Raises ValueError if it cannot be there, GitError
    if git is missing or fails.
    """
    changes = demo_repository.history(where)
    (folder / SCRIPT).write_text(RUN_SCRIPT, encoding="utf-8")
    (folder / SOURCE_SCRIPT).write_text(SGLANG_SCRIPT, encoding="utf-8")
    with _no_settings(folder):
        repository = _Repository(folder / REPOSITORY)
        repository.make(changes)
        return _bisect(repository)


def _bisect(repository: _Repository) -> Lesson:
    known = {commit.hash: commit for commit in repository.commits(BAD)}
    commits = tuple(repository.commits(f"{GOOD}..{BAD}"))
    good, bad = (_end(repository, name, known) for name in (GOOD, BAD))
    if (good.answer, bad.answer) != ("good", "bad"):
        raise HistoryError(f"nothing to look for: at {GOOD}, {good.said}; at {BAD}, {bad.said}")
    repository.git("bisect", "start", BAD, GOOD, "--")
    trials: list[Trial] = []
    suspects = repository.suspects()
    skipped: set[str] = set()
    while set(suspects[1:]) - skipped:  # the first of them is known to be bad
        picked = repository.git("rev-parse", "HEAD").strip()
        said, status = repository.run(f"../{SCRIPT}")
        answer = ANSWERS.get(status)
        if answer is None:
            raise HistoryError(f"the run script ended with {status} at {picked[:10]}: {said}")
        if answer == "skip":
            skipped.add(picked)
        # With 2, git says that nothing is left to try but what was skipped.
        repository.git("bisect", answer, allowed=(0, 2))
        suspects = repository.suspects()
        trials.append(Trial(known[picked], said, status, answer, len(suspects)))
    repository.git("bisect", "reset")
    diff = repository.git("show", "--format=", "--no-color", "--no-ext-diff", suspects[0]) if len(suspects) == 1 else ""
    return Lesson(commits, good, bad, tuple(trials), tuple(known[hash_] for hash_ in suspects), diff)


def _end(repository: _Repository, name: str, known: dict[str, DemoCommit]) -> End:
    repository.git("checkout", "-q", name)
    said, status = repository.run(f"../{SCRIPT}")
    _, failed = repository.run(demo_repository.TEST)
    commit = known[repository.git("rev-parse", "HEAD").strip()]
    return End(name, commit, said, ANSWERS.get(status, "skip"), not failed)


class _Repository:
    """The small repository. Whoever uses it has put the user's settings aside."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._program = git_in(folder).GIT_PYTHON_GIT_EXECUTABLE or "git"

    def git(self, *arguments: str, stdin: str = "", allowed: Sequence[int] = (0,)) -> str:
        """What git prints. Raises GitError if it ends otherwise than allowed."""
        process = subprocess.Popen(
            [self._program, *arguments],
            cwd=self.folder,
            env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            said, complaint = process.communicate(stdin.encode())
        except BaseException:
            end(process)
            raise
        if process.returncode not in allowed:
            told = " ".join(complaint.decode(errors="replace").split())
            raise GitError(f"git {arguments[0]} failed in {self.folder}: {told}")
        return said.decode(errors="replace")

    def make(self, changes: Sequence[demo_repository.Change]) -> None:
        """Its commits, at once; the last is checked out."""
        self.git("init", "-q", "--template=")
        self.git("symbolic-ref", "HEAD", f"refs/heads/{BAD}")
        self.git("fast-import", "--quiet", stdin="".join(_stream(changes)))
        self.git("reset", "-q", "--hard", BAD)

    def commits(self, revisions: str) -> Iterator[DemoCommit]:
        """Those commits, the oldest first."""
        said = self.git("log", "--reverse", "--no-color", "--no-decorate", "--format=%H %as %s", revisions)
        for line in said.splitlines():
            hash_, date, subject = line.split(" ", 2)
            yield DemoCommit(hash_, date, subject)

    def suspects(self) -> list[str]:
        """The commits that may be the first bad one by what git bisect was told, beginning with one known to be bad."""
        return self.git("rev-list", "refs/bisect/bad", "--not", "--glob=refs/bisect/good-*").split()

    def run(self, script: str) -> tuple[str, int]:
        """The last line that a script of Python prints, run in the work tree, and its exit status."""
        command = [sys.executable, "-E", "-s", "-S", "-B", script]  # without settings, without packages, fast
        done = subprocess.run(
            command, cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace"
        )
        lines = (done.stdout or done.stderr).splitlines()
        return (lines[-1] if lines else ""), done.returncode


def _stream(changes: Sequence[demo_repository.Change]) -> Iterator[str]:
    """The commits, as git fast-import takes them. The texts are ASCII, so a character is a byte."""
    for day, (change, files) in enumerate(zip(changes, demo_repository.trees(changes), strict=True)):
        person = f"refspec <refspec@example.invalid> {FIRST_SECOND + day * 86_400} +0000"
        yield f"commit refs/heads/{BAD}\nauthor {person}\ncommitter {person}\n"
        yield f"data {len(change.subject)}\n{change.subject}\ndeleteall\n"
        for path, text in files.items():
            yield f"M 100644 inline {path}\ndata {len(text)}\n{text}\n"
        if change.tag:
            yield f"reset refs/tags/{change.tag}\nfrom refs/heads/{BAD}\n\n"


@contextmanager
def _no_settings(home: Path) -> Iterator[None]:
    """git neither reads a setting of the user's or of the machine's nor looks at another repository, in this block."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("GIT_") and not name.startswith("GIT_PYTHON_") and name != "GIT_EXEC_PATH":
            del os.environ[name]
    os.environ |= {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_DEFAULT_HASH": "sha1",  # whatever git's own default is by then
        "GIT_PAGER": "cat",
        "HOME": str(home),  # where a git that does not know GIT_CONFIG_GLOBAL looks for settings
        "XDG_CONFIG_HOME": str(home),
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _emptied(folder: Path) -> None:
    """Removes what is in it. A process that was ended while it was being started may write for a moment yet."""
    for wait in (0.02, 0.1, 0.5, 2.0, 0.0):
        try:
            for entry in folder.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            return
        except OSError:
            if not wait:
                raise
            time.sleep(wait)
