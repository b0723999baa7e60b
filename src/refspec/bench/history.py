"""`refspec bench history`: what the explorer adds to git and to Python's start.

Each command runs as a user's does, in a process of its own, beside what cannot be done without: the git commands that
answer the same, and a Python that imports the libraries that it needs. A machine's speed drifts, so in each turn every
command and its floor run once, in an order that is drawn anew; given are the medians over the turns, and their ratio.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TURNS = 15
FOLDER = "python/sglang/srt/speculative"
SYMBOL = "EAGLEWorker"
LIBRARIES = "import git, typer, rich.table"
LIGHT_LIBRARIES = "import typer, rich.table"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Contest:
    """A command of `refspec history`, and its floor: commands of git, in a row, and what Python imports.

    bound: up to which ratio the command keeps its promise.
    """

    name: str
    command: tuple[str, ...]
    git_commands: tuple[tuple[str, ...], ...]
    stdin: tuple[bytes, ...]  # of each git command
    imports: str
    bound: float


@dataclass(frozen=True)
class Standing:
    """How one contest went. floor_ms: the git commands' and Python's start, added up."""

    name: str
    ms: float
    floor_ms: float
    ratio: float
    bound: float
    git_processes: int | None  # that the command starts; None where they cannot be counted
    floor: list[str]


def bench_history(
    clone: Path | None, turns: int = TURNS, progress: Progress = lambda done, total: None
) -> dict[str, Any]:
    """The first screen of the catalogue; with a full clone of SGLang also log, dir --releases and symbol.

    Raises ValueError if `clone` is no repository with a main line.
    """
    contests = [first_screen(), *(contests_on(clone) if clone else [])]
    taken: dict[str, list[tuple[float, float]]] = {contest.name: [] for contest in contests}
    draw = random.Random(0)
    for turn in range(turns + 1):
        for contest in draw.sample(contests, len(contests)):
            times = [0.0, 0.0]
            for side in draw.sample((0, 1), 2):
                times[side] = (_ours, _floor)[side](contest, clone)
            if turn:  # the first one fills the caches of the disk
                taken[contest.name].append((times[0], times[1]))
        progress(turn + 1, turns + 1)
    return {
        "clone": str(clone) if clone else None,
        "turns": turns,
        "standings": [asdict(_standing(contest, taken[contest.name], clone)) for contest in contests],
    }


def first_screen() -> Contest:
    """`refspec history` off the catalogue."""
    return Contest("first screen", ("overview", "--catalogue"), (), (), LIGHT_LIBRARIES, 1.5)


def contests_on(clone: Path) -> list[Contest]:
    """The commands that read the whole history of the folder, each with git commands that answer the same."""
    main = _main_line(clone)
    tags = _git(clone, ("for-each-ref", "--format=%(refname)", "refs/tags")).split()
    trees = b"".join(b"%s:%s\n" % (tag, FOLDER.encode()) for tag in tags)
    log = ("log", "--format=%H%x00%aI%x00%cI%x00%s", "--name-status", "-M", main, "--", FOLDER)
    pickaxe = ("log", f"-G(def|class) +{SYMBOL}\\b", "-p", "--format=%H%x00%aI%x00%s", main, "--", FOLDER)
    return [
        Contest("log", ("log", "--no-pager"), (log,), (b"",), LIBRARIES, 1.3),
        Contest(
            "dir --releases",
            ("dir", "--releases", "--no-pager"),
            (("for-each-ref", "--format=%(refname) %(objectname)", "refs/tags"), ("cat-file", "--batch")),
            (b"", trees),
            LIBRARIES,
            1.3,
        ),
        Contest(f"symbol {SYMBOL}", ("symbol", SYMBOL, "--no-pager"), (pickaxe,), (b"",), LIBRARIES, 1.3),
    ]


def _main_line(clone: Path) -> str:
    for name in ("refs/remotes/origin/main", "refs/heads/main", "refs/heads/master"):
        if _git(clone, ("rev-parse", "--verify", "--quiet", name), allowed=(0, 1)).strip():
            return name
    raise ValueError(f"{clone} has no main line: name a full clone of SGLang with --clone")


def _standing(contest: Contest, times: Sequence[tuple[float, float]], clone: Path | None) -> Standing:
    ours, floor = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    git_lines = [f"git {' '.join(command)}" for command in contest.git_commands]
    python_line = f'python -c "{contest.imports}"'
    return Standing(
        contest.name,
        ours,
        floor,
        ours / floor,
        contest.bound,
        _count_git(contest, clone),
        [*git_lines, python_line],
    )


def _ours(contest: Contest, clone: Path | None) -> float:
    return _timed(_command_line(contest, clone))


def _floor(contest: Contest, clone: Path | None) -> float:
    total = _timed([sys.executable, "-c", contest.imports])
    for command, given in zip(contest.git_commands, contest.stdin, strict=True):
        total += _timed(["git", "-C", str(clone), *command], given)
    return total


def _command_line(contest: Contest, clone: Path | None) -> list[str]:
    where = ["--clone", str(clone)] if contest.git_commands else []
    return [sys.executable, "-m", "refspec", "history", *contest.command, *where]


def _timed(command: Sequence[str], given: bytes = b"", env: dict[str, str] | None = None) -> float:
    begin = time.perf_counter()
    done = subprocess.run(command, input=given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env)
    seconds = time.perf_counter() - begin
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise ValueError(f"{' '.join(command)} ended with status {done.returncode}, and said: {said[-1]}")
    return seconds


def _git(clone: Path, arguments: Sequence[str], allowed: Sequence[int] = (0,)) -> bytes:
    done = subprocess.run(["git", "-C", str(clone), *arguments], capture_output=True)
    if done.returncode not in allowed:
        raise ValueError(f"git cannot read {clone}: name a full clone of SGLang with --clone")
    return done.stdout


def _count_git(contest: Contest, clone: Path | None) -> int | None:
    """Runs the command once with a `git` in front of the real one that notes each call."""
    real = shutil.which("git")
    if real is None or os.name != "posix":
        return None
    with tempfile.TemporaryDirectory() as folder:
        notes, script = Path(folder) / "calls", Path(folder) / "git"
        script.write_text(f'#!/bin/sh\necho >>"{notes}"\nexec "{real}" "$@"\n')
        script.chmod(0o755)
        notes.touch()
        path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
        _timed(_command_line(contest, clone), env=os.environ | {"PATH": path})
        return len(notes.read_text().splitlines())
