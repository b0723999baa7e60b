"""Git repositories made on the spot, small ones in SGLang's image: what tests of the history run on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "python/sglang/srt/speculative"
START = 1735543800  # 2024-12-30 07:30 UTC


@dataclass(frozen=True)
class Step:
    """One commit. files: what it writes; None deletes. Texts may be bytes, to hold what is not UTF-8.

    seconds: when, after START; None: a day after the one before. zone: of the author; the committer is in UTC.
    """

    subject: str | bytes
    files: dict[str, str | bytes | None] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    body: str | bytes = ""
    seconds: int | None = None
    zone: str = "+0000"
    author: str = "a <a@b>"
    encoding: str = ""


def git(folder: Path, *arguments: str | Path, stdin: bytes = b"") -> str:
    """Runs git without any settings of whoever runs the tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *map(str, arguments)]
    done = subprocess.run(command, env=environment, input=stdin, capture_output=True, check=True)
    return done.stdout.decode(errors="replace").strip()


def make_history(
    folder: Path, steps: Sequence[Step], *, branch: str = "main", object_format: str = "sha1", bare: bool = False
) -> list[str]:
    """A repository in `folder` with a commit for each step, the oldest first; returns their hashes.

    It serves partial clones over file://. Its work tree, unless `bare`, is checked out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", branch, f"--object-format={object_format}", *(["--bare"] if bare else []))
    stream = b"".join(_stream(steps, branch))
    said = git(folder, "fast-import", "--quiet", f"--export-marks={folder / 'marks'}", stdin=stream)
    assert said == ""
    marks = dict(line.split() for line in (folder / "marks").read_text().splitlines())
    (folder / "marks").unlink()
    git(folder, "config", "uploadpack.allowFilter", "true")
    git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    if not bare:
        git(folder, "checkout", "-q", "-f", branch)
    return [marks[f":{n}"] for n in range(1, len(steps) + 1)]


def make_branches(folder: Path, branches: Mapping[str, Sequence[Step]], *, object_format: str = "sha1") -> None:
    """A bare repository in which each branch has a history of its own, in one go. It serves partial clones."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "--bare", "-b", next(iter(branches)), f"--object-format={object_format}")
    with (folder / "config").open("a") as config:
        config.write("[uploadpack]\n\tallowFilter = true\n\tallowAnySHA1InWant = true\n")
    stream = b"".join(part for branch, steps in branches.items() for part in _stream(steps, branch))
    assert git(folder, "fast-import", "--quiet", stdin=stream) == ""


def clone(source: Path, target: Path, *options: str) -> Path:
    """A clone over file://, as `git clone` with these options makes it."""
    git(source.parent, "clone", "-q", *options, f"file://{source}", target)
    return target


@contextmanager
def counted_git(folder: Path) -> Iterator[list[str]]:
    """A list that holds, once the block is left, the command line of each git process that was started in it."""
    real, log = shutil.which("git"), folder / "git-calls"
    (folder / "recorder").mkdir()
    script = folder / "recorder" / "git"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>"{log}"\nexec "{real}" "$@"\n')
    script.chmod(0o755)
    log.touch()
    calls: list[str] = []
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{script.parent}{os.pathsep}{before}"
    try:
        yield calls
    finally:
        os.environ["PATH"] = before
        calls += log.read_text(errors="replace").splitlines()


def _stream(steps: Sequence[Step], branch: str) -> Iterator[bytes]:
    seconds = -86_400
    for number, step in enumerate(steps, start=1):
        seconds = step.seconds if step.seconds is not None else seconds + 86_400
        message = _bytes(step.subject) + (b"\n\n" + _bytes(step.body) if step.body else b"")
        yield f"commit refs/heads/{branch}\nmark :{number}\n".encode()
        yield f"author {step.author} {START + seconds} {step.zone}\n".encode()
        yield f"committer c <c@d> {START + seconds} +0000\n".encode()
        if step.encoding:
            yield f"encoding {step.encoding}\n".encode()
        yield b"data %d\n%s\n" % (len(message), message)
        for path, text in step.files.items():
            if text is None:
                yield f"D {_quoted(path)}\n".encode()
            else:
                content = _bytes(text)
                yield b"M 100644 inline %s\ndata %d\n%s\n" % (_quoted(path).encode(), len(content), content)
        yield b"\n"
        for tag in step.tags:
            yield f"reset refs/tags/{tag}\nfrom :{number}\n\n".encode()


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def _quoted(path: str) -> str:
    """As fast-import takes it. A path may hold backslash escapes of bytes, as in r"caf\\351.py"."""
    return '"' + path.replace('"', '\\"') + '"'
