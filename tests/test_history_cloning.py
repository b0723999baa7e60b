"""`refspec history clone`: what it brings, in steps that can be interrupted, and what it leaves alone.

Sources are small repositories, reached over file://. A step of FIRST_STEP commits is made one of three, so that there
are several.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_history import FOLDER, Step, clone, git, make_history
from typer.testing import CliRunner

from refspec.cli.main import app
from refspec.history import catalogue, cloning, sources
from refspec.history.clone import Clone, LacksError
from refspec.history.cloning import Cloned, checked_source, make_clone
from refspec.history.commits import read_commits

STEPS = [
    Step(
        f"Commit {n}",
        {f"{FOLDER}/b.py": f"b = {n}\n", "README.md": f"{n}\n"} if n % 2 else {"README.md": f"{n}\n"},
        ("v0.4.6",) if n == 5 else ("v0.5.0rc0",) if n == 29 else (),
    )
    for n in range(40)
]
VERSIONS = 20  # of the folder's one file


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("history") / "origin"
    make_history(folder, STEPS, bare=True)
    return folder


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without settings. Returns the home."""
    for name in [name for name in os.environ if name.startswith(("GIT_", "REFSPEC_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home/xdg"))
    monkeypatch.setenv("REFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setattr(cloning, "FIRST_STEP", 3)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


class Told:
    """What is told; at the step `stop`, the user presses Ctrl-C."""

    def __init__(self, stop: str = "") -> None:
        self.steps: list[str] = []
        self.stop = stop

    def __call__(self, line: str) -> None:
        if ":" not in line:
            self.steps.append(line)
            if self.stop and line.startswith(self.stop):
                raise KeyboardInterrupt


def made(
    folder: Path, source: Path | str | None, *, full: bool = False, contents: bool = True, stop: str = ""
) -> tuple[Cloned, list[str]]:
    told = Told(stop)
    url = f"file://{source}" if isinstance(source, Path) else source
    return make_clone(folder, url, full=full, contents=contents, tell=told), told.steps


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit status, stdout, stderr of `refspec history clone`."""
    done = CliRunner().invoke(app, ["history", "clone", *map(str, arguments)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


# --- what it brings


def test_all_commits_and_tags_and_the_contents_of_the_folder(origin: Path, tmp_path: Path) -> None:
    seen, steps = made(tmp_path / "c", origin)
    assert steps == [
        "asking the source",
        "the last 3 commits",
        "the last 12 commits",
        "the last 48 commits",
        "tags",
        f"contents, 0 of {VERSIONS}",
        "commit-graph",
    ]
    assert (seen.commits, seen.tags, seen.main_line, seen.contents, seen.missing) == (40, 2, "main", "folder", 0)
    assert (seen.notes, seen.is_shallow) == ((), False)
    asked = Clone(tmp_path / "c")
    assert (asked.is_bare, asked.is_ours, asked.filter, asked.is_shallow) == (True, True, "blob:none", False)
    assert asked.main.commit == asked.head.commit == git(origin, "rev-parse", "main")
    assert [c.subject for c in read_commits(asked)] == [f"Commit {n}" for n in range(40) if n % 2]
    assert list(asked.objects(f"v0.4.6:{FOLDER}/b.py")) == [b"b = 5\n"]
    with pytest.raises(LacksError, match=r"\(refspec history clone --full .*/c brings them\)"):
        asked.check("HEAD:README.md")
    assert (tmp_path / "c/objects/info/commit-graph").is_file()
    assert not list((tmp_path / "c").rglob("hooks"))


def test_once_more_brings_what_is_new(origin: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(origin, tmp_path / "source"))
    made(tmp_path / "c", source)
    assert made(tmp_path / "c", None)[1] == ["what is new", "commit-graph"]
    work = clone(source, tmp_path / "work")
    (work / FOLDER / "b.py").write_text("new\n")
    git(work, "commit", "-qam", "New")
    git(work, "tag", "v9")
    git(work, "tag", "-f", "v0.4.6")
    git(work, "push", "-qf", "origin", "main", "v9", "v0.4.6")
    seen, steps = made(tmp_path / "c", None)
    assert steps == ["what is new", "contents, 0 of 1", "commit-graph"]
    assert (seen.commits, seen.tags) == (41, 3)
    assert git(tmp_path / "c", "rev-parse", "v0.4.6") == seen.commit == git(work, "rev-parse", "HEAD")


def test_without_contents_and_then_with(origin: Path, tmp_path: Path) -> None:
    seen, _ = made(tmp_path / "c", origin, contents=False)
    assert (seen.contents, seen.missing) == ("none", VERSIONS)
    seen, steps = made(tmp_path / "c", None)
    assert (seen.contents, seen.missing, steps[1]) == ("folder", 0, f"contents, 0 of {VERSIONS}")


def test_contents_come_in_batches(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloning, "CONTENTS_STEP", 8)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "c", origin, stop="contents, 8")
    assert made(tmp_path / "c", None)[1] == ["what is new", "contents, 0 of 12", "contents, 8 of 12", "commit-graph"]


def test_contents_that_the_story_and_the_claims_are_about(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a commit of the story changed, before and after; and certain files at certain revisions."""
    commits = git(origin, "rev-list", "--reverse", "main").split()
    story = [replace(catalogue.story()[0], hash=hash_) for hash_ in (commits[10], "1" * 40)]
    monkeypatch.setattr(catalogue, "story", lambda: story)
    monkeypatch.setattr(cloning, "BEYOND", (("refs/tags/v0.4.6 v9", ("README.md",)),))
    seen, _ = made(tmp_path / "c", origin)
    assert (seen.contents, seen.missing) == ("folder", 0)
    asked = Clone(tmp_path / "c")
    there = asked.present(*git(origin, "rev-parse", *(f"{commit}:README.md" for commit in commits)).split())
    assert sorted(asked.objects(*there)) == [b"10\n", b"5\n", b"9\n"]


def test_full(origin: Path, tmp_path: Path) -> None:
    seen, steps = made(tmp_path / "c", origin, full=True)
    assert (seen.contents, seen.missing, steps[-1]) == ("all", 0, "commit-graph")
    assert Clone(tmp_path / "c").filter is None
    git(tmp_path / "c", "fsck", "--full")
    assert made(tmp_path / "c", None)[0].contents == "all"


def test_full_later(origin: Path, tmp_path: Path) -> None:
    made(tmp_path / "c", origin)
    seen, steps = made(tmp_path / "c", None, full=True)
    assert (seen.contents, steps) == ("all", ["what is new", "everything once more, with all contents", "commit-graph"])
    asked = Clone(tmp_path / "c")
    assert (asked.is_partial, list(asked.objects("HEAD~3:README.md"))) == (False, [b"36\n"])
    git(tmp_path / "c", "fsck", "--full")


def test_a_server_that_cannot_filter(origin: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(origin, tmp_path / "source"))
    git(source, "config", "uploadpack.allowFilter", "false")
    seen, _ = made(tmp_path / "c", source)
    assert seen.contents == "all"
    assert seen.notes == ("the server cannot leave contents out, so all came (it lacks uploadpack.allowFilter)",)
    assert not Clone(tmp_path / "c").is_partial


def test_a_shallow_source(origin: Path, tmp_path: Path) -> None:
    source = clone(origin, tmp_path / "source", "--depth", "5", "--bare")
    git(source, "config", "uploadpack.allowFilter", "true")
    seen, _ = made(tmp_path / "c", source)
    assert (seen.commits, seen.is_shallow, seen.notes) == (
        5,
        True,
        ("the source's own history is cut off, and so this one's is",),
    )


def test_sha256(tmp_path: Path) -> None:
    make_history(tmp_path / "source", STEPS[:9], object_format="sha256", bare=True)
    seen, _ = made(tmp_path / "c", tmp_path / "source")
    assert (seen.commits, len(seen.commit), Clone(tmp_path / "c").object_format) == (9, 64, "sha256")


@pytest.mark.parametrize(
    ("refs", "name"),
    [
        (["refs/remotes/origin/main", "refs/heads/main", "refs/heads/x"], "main"),
        (["refs/heads/master", "refs/heads/x"], "master"),
        (["refs/heads/feature/x"], "HEAD"),
    ],
)
def test_which_branch_is_the_main_line(origin: Path, tmp_path: Path, refs: list[str], name: str) -> None:
    """As in any other clone; the first of `refs` is the right one, and HEAD is on the last."""
    source = clone(origin, tmp_path / "source", "--bare")
    git(source, "update-ref", "--no-deref", "HEAD", "main")
    git(source, "update-ref", "-d", "refs/heads/main")
    for number, ref in enumerate(refs):
        git(source, "update-ref", ref, f"HEAD~{number}")
    git(source, "symbolic-ref", "HEAD", refs[-1])
    seen, _ = made(tmp_path / "c", source)
    assert (seen.main_line, seen.commits) == (name, 40)
    assert Clone(tmp_path / "c").head.branch == f"refs/heads/{name.replace('HEAD', 'feature/x')}"


# --- interrupted


@pytest.mark.parametrize("stop", ["the last 12", "the last 48", "tags", "contents", "commit-graph"])
def test_the_same_command_goes_on(origin: Path, tmp_path: Path, stop: str) -> None:
    """What came before stays, and can be used; nothing of it comes twice."""
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "c", origin, stop=stop)
    half = Clone(tmp_path / "c")
    had = half.main.commit and int(git(tmp_path / "c", "rev-list", "--count", "HEAD"))
    assert had == {"the last 12": 3, "the last 48": 12}.get(stop, 40)
    packs = set((tmp_path / "c/objects/pack").glob("*.pack"))
    if half.is_shallow:
        assert half.remedy() == f" (refspec history clone {tmp_path}/c brings the rest)"
    seen, steps = made(tmp_path / "c", None)
    assert "the last 3 commits" not in steps
    assert ("the last 48 commits" in steps) == stop.startswith("the last")
    assert (seen.commits, seen.tags, seen.missing) == (40, 2, 0)
    assert packs <= set((tmp_path / "c/objects/pack").glob("*.pack"))


def test_interrupted_before_anything_came(origin: Path, tmp_path: Path) -> None:
    for stop in ("asking", "the last 3"):
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path / "c", origin, stop=stop)
    assert made(tmp_path / "c", None)[0].commits == 40
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "home"]


@pytest.fixture
def waiting_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git that waits for a server that says nothing, once its processes stand in the file `pids`."""
    real = shutil.which("git")
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin/git"
    script.write_text(
        '#!/bin/sh\ncase " $* " in *" fetch "*)\n'
        f'sleep 60 & echo $$ $! >{tmp_path}/p; mv {tmp_path}/p {tmp_path}/pids; wait;; esac\nexec "{real}" "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    return script


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_git_ends_with_us(origin: Path, tmp_path: Path, waiting_git: Path, number: int) -> None:
    """While git waits for the server, a signal comes: git's processes are gone, and so is what they held."""

    def alarm(*_: object) -> None:
        if (tmp_path / "pids").exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        status, out, err = run(tmp_path / "c", "--from", origin)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (status, out) == (128 + number, "")
    assert err == (
        "refspec: interrupted; the same command, run again, goes on from here\n" if number == signal.SIGINT else ""
    )
    for pid in (tmp_path / "pids").read_text().split():
        wait_until_gone(int(pid))
    waiting_git.unlink()
    assert run(tmp_path / "c")[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_git_ends_with_us_that_has_just_begun(
    origin: Path, tmp_path: Path, waiting_git: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The signal comes while the process is being made, before anything here has its name."""
    real, begun = subprocess.Popen, []

    def begin(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        process = real(command, **settings)
        if "fetch" in command:
            begun.append(process)
            os.kill(os.getpid(), number)
        return process

    monkeypatch.setattr(cloning.subprocess, "Popen", begin)
    assert run(tmp_path / "c", "--from", origin)[0] == 128 + number
    (process,) = begun
    try:
        assert process.poll() is not None
    finally:
        process.kill()


def wait_until_gone(pid: int) -> None:
    for _ in range(2000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def test_left_over_by_a_git_that_was_killed(origin: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "c", origin, stop="the last 48")
    left_over = [tmp_path / "c" / name for name in ("shallow.lock", "packed-refs.lock", "objects/pack/tmp_pack_abc")]
    for file in left_over:
        file.touch()
    assert made(tmp_path / "c", None)[0].commits == 40
    assert not any(file.exists() for file in left_over)


def test_two_at_once(origin: Path, tmp_path: Path) -> None:
    made(tmp_path / "c", origin)
    other = os.open(tmp_path / "c", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        assert run(tmp_path / "c") == (1, "", f"refspec: another refspec history clone is at work in {tmp_path}/c\n")
    finally:
        os.close(other)


# --- what cannot be done


def contents_of(folder: Path) -> Iterator[tuple[str, bytes]]:
    return ((str(file), file.read_bytes() if file.is_file() else b"") for file in sorted(folder.rglob("*")))


def test_a_folder_that_holds_something_else(origin: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a").touch()
    (tmp_path / "file").touch()
    clone(origin, tmp_path / "theirs", "--bare")
    clone(origin, tmp_path / "work")
    for name in ("text", "file", "theirs", "work", "work/.git"):
        before = list(contents_of(tmp_path))
        assert run(tmp_path / name, "--from", origin) == (
            1,
            "",
            f"refspec: {tmp_path / name} holds something else: name a new folder, or an empty one\n",
        )
        assert list(contents_of(tmp_path)) == before
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", "--from", origin)[0] == 0


def test_a_clone_of_another_source(origin: Path, tmp_path: Path) -> None:
    made(tmp_path / "c", origin)
    make_history(tmp_path / "other", [Step("other")], bare=True)
    status, _, err = run(tmp_path / "c", "--from", tmp_path / "other")
    assert status == 1
    assert (
        err == f"refspec: {tmp_path}/c is a clone of file://{origin}: name another folder for one of {tmp_path}/other\n"
    )


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "--upload-pack=touch made",
            "a source cannot begin with '-': --upload-pack=touch made (a folder of that name is ",
        ),
        ("ext::sh -c touch% made", "neither a URL nor a path: 'ext::sh -c touch% made'"),
        ("https://a/b\nc", r"neither a URL nor a path: 'https://a/b\nc'"),
        ("http://a/b", "a clone comes over https, ssh, git, file, not over http: http://a/b"),
        ("ftp://a/b", "a clone comes over https, ssh, git, file, not over ftp: ftp://a/b"),
        ("none", "no such repository: none"),
        ("", "no such repository: "),
        ("home", "there is no repository at {tmp}/home"),
        ("file:///nonexistent", "there is no repository at file:///nonexistent"),
        ("https://user:secret@127.0.0.1:1/x", "cannot reach https://127.0.0.1:1/x: fatal: unable to access "),
        ("git://127.0.0.1:1/x", "cannot reach git://127.0.0.1:1/x: fatal: unable to connect to 127.0.0.1"),
        ("ssh://-oProxyCommand=touch%20made/x", "git cannot make the clone in {tmp}/c: fatal: strange hostname"),
        ("empty", "{tmp}/empty has no branch main, no branch master, and none that its HEAD is on"),
    ],
)
def test_sources_that_are_refused(tmp_path: Path, source: str, complaint: str) -> None:
    git(tmp_path, "init", "-q", "--bare", "empty")
    status, out, err = run("--from", source, tmp_path / "c")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("refspec: " + complaint.format(tmp=tmp_path))
    assert "secret" not in err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "home"]


@pytest.mark.parametrize("source", ["https://a/b", "ssh://git@a/b", "git@a:b/c.git", "file:///a"])
def test_sources_that_git_is_asked_for(source: str) -> None:
    assert checked_source(source) == source


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("fatal: write error: No space left on device", "the disk is full: make room for {c}; the same command"),
        (
            "error: RPC failed; curl 56\nfatal: early EOF",
            "cannot reach file://{origin}: error: RPC failed; curl 56 (the",
        ),
        ("fatal: something else", "git cannot make the clone in {c}: fatal: something else (the same command"),
        (
            "fatal: Server does not allow request for unadvertised object 1",
            "file://{origin} hands out no single objects",
        ),
    ],
)
def test_what_git_complains_of(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, complaint: str
) -> None:
    """Half-way through, as the second step."""
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "c", origin, stop="the last 12")
    real = shutil.which("git")
    (tmp_path / "bin").mkdir()
    (tmp_path / "said").write_text(f"remote: Counting\n{said}\n")
    script = tmp_path / "bin/git"
    script.write_text(
        f'#!/bin/sh\ncase " $* " in *" fetch "*) cat {tmp_path}/said >&2; exit 128;; esac\nexec "{real}" "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    status, out, err = run(tmp_path / "c")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("refspec: " + complaint.format(c=tmp_path / "c", origin=origin))
    script.unlink()
    assert run(tmp_path / "c")[0] == 0


def test_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "home"))
    assert run(tmp_path / "c", "--from", origin) == (1, "", "refspec: git is needed: install it, then run this again\n")


def test_a_place_where_nothing_can_be_made(origin: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, _, err = run(tmp_path / "file/c", "--from", origin)
    assert (status, err.count("\n")) == (1, 1)


@pytest.mark.parametrize("damage", ["[refspec]\nclone = true\n", None])
def test_a_clone_of_ours_that_is_damaged(origin: Path, tmp_path: Path, damage: str | None) -> None:
    made(tmp_path / "c", origin)
    if damage:
        (tmp_path / "c/config").write_text(damage)
    else:
        (tmp_path / "c/HEAD").unlink()
    assert run(tmp_path / "c") == (1, "", f"refspec: {tmp_path}/c is damaged: remove it, or name another folder\n")


# --- whatever is set


def test_settings_and_variables_of_the_user(
    origin: Path, tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = alone / "hooks"
    hooks.mkdir()
    for hook in ("reference-transaction", "post-checkout"):
        (hooks / hook).write_text(f"#!/bin/sh\ntouch {tmp_path}/trace\n")
        (hooks / hook).chmod(0o755)
    (alone / ".gitconfig").write_text(
        f"[core]\n hooksPath = {hooks}\n[init]\n templateDir = {alone}\n defaultBranch = other\n[fetch]\n"
        " prune = true\n recurseSubmodules = true\n[gc]\n auto = 1\n[safe]\n bareRepository = explicit\n"
        "[protocol]\n version = 0\n[color]\n ui = always\n[remote]\n pushDefault = x\n"
    )
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_OBJECT_DIRECTORY", "GIT_INDEX_FILE", "GIT_CONFIG"):
        monkeypatch.setenv(name, str(alone))
    monkeypatch.setenv("GIT_TRACE", "1")
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    seen, _ = made(tmp_path / "c", origin)
    assert (seen.commits, seen.tags, seen.missing, seen.main_line) == (40, 2, 0, "main")
    assert not (tmp_path / "trace").exists()
    assert not (tmp_path / "c/hooks").exists()


# --- as it is run


def test_as_it_is_run(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default into the cache, where the other commands find it."""
    status, out, err = run("--from", f"file://{origin}")
    own = tmp_path / "cache" / sources.OWN_CLONE
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"{own}: a clone of file://{origin}, ")
    assert lines[1].startswith("40 commits, main at ")
    assert lines[1].endswith(f"2 tags; the contents of {FOLDER} and few others")
    found = sources.find_source()
    assert (found.clone is not None) == sources.is_sglang(Clone(own))
    status, out, err = run("--json", "--full", "c", "--from", f"file://{origin}")
    document = json.loads(out)
    assert (status, err, document["contents"], document["folder"]) == (0, "", "all", str(tmp_path / "c"))
    assert "--clone c" in run("c")[1]
    assert run("--full", "--no-contents")[0] == 2


# --- who owns it, which git, and what is shown


def old_git(tmp_path: Path, said: str) -> Path:
    """A folder with a git that answers so when it is asked for its version, and notes what else it is asked for."""
    script = tmp_path / "old/git"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\ncase " $* " in *" version "*) echo "{said}"; exit;; esac\n'
        f'echo "$*" >>{tmp_path}/calls\nexec "{shutil.which("git")}" "$@"\n'
    )
    script.chmod(0o755)
    return script.parent


def test_a_clone_of_another_user(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused before anything in it is removed, and before a program that its settings name could run."""
    made(tmp_path / "c", origin)
    git(tmp_path / "c", "config", "remote.origin.uploadpack", f"touch {tmp_path}/ran; git-upload-pack")
    (tmp_path / "c/shallow.lock").touch()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    status, out, err = run(tmp_path / "c")
    assert (status, out) == (1, "")
    assert err.startswith(f"refspec: git refuses {tmp_path}/c, which belongs to another user; if you trust it, run: ")
    assert (tmp_path / "c/shallow.lock").exists()
    assert not (tmp_path / "ran").exists()


def test_two_that_make_it_at_once(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is done between two steps of ours, and at work from then on."""
    real = os.rename
    locks = []

    def late(made_here: str, folder: str) -> None:
        monkeypatch.setattr(os, "rename", real)
        made(tmp_path / "c", origin)
        locks.append(os.open(tmp_path / "c", os.O_RDONLY))
        fcntl.flock(locks[0], fcntl.LOCK_EX)
        real(made_here, folder)

    monkeypatch.setattr(os, "rename", late)
    try:
        said = run(tmp_path / "c", "--from", f"file://{origin}")
    finally:
        os.close(locks[0])
    assert said == (1, "", f"refspec: another refspec history clone is at work in {tmp_path}/c\n")


@pytest.mark.parametrize(
    ("version", "options", "complaint"),
    [
        ("git version 2.17.1", (), "git 2.17.1 is too old: 2.25 or newer is needed\n"),
        ("git version 2.28.0", (), "bringing contents of some files alone needs git 2.29 or newer (or --full for"),
        ("git version 2.35.9", ("--full", "c"), "bringing all contents to a clone that was made without them needs"),
    ],
)
def test_a_git_that_is_too_old(
    origin: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    options: tuple[str, ...],
    complaint: str,
) -> None:
    """Nothing is fetched first."""
    if options:
        made(tmp_path / "c", origin, contents=False)
    monkeypatch.setenv("PATH", str(old_git(tmp_path, version)), prepend=os.pathsep)
    status, out, err = run(*options, *([] if options else ["c", "--from", f"file://{origin}"]))
    assert (status, out) == (1, "")
    assert err.startswith(f"refspec: {complaint}")
    calls = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    assert "fetch" not in calls.replace("fetch.", "")
    assert "ls-remote" not in calls
    assert bool(options) == (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("https://user:p@ss@h/x", "https://h/x"),
        ("https://user:p/ss@h/x", "https://h/x"),
        ("https:/user:secret@h/x", "https:/h/x"),
        ("https://token@h:8/x", "https://h:8/x"),
        ("user:secret@h:x", "h:x"),
        ("git@h:a/b.git", "git@h:a/b.git"),
        ("https://h/x", "https://h/x"),
        ("file:///a@b/c", "file:///a@b/c"),
        ("/a:b@c", "/a:b@c"),
    ],
)
def test_passwords_are_not_shown(source: str, shown: str) -> None:
    """Neither whole, nor the parts that git takes for a host or a port."""
    assert cloning.without_password(source) == shown
    said = cloning._hidden(f"fatal: unable to access '{source}/': no host user, no port p or secret", source)
    told = {"p@ss": "no host user, no port ... or secret", "secret": "no host user, no port p or ..."}
    password = "secret" if "secret" in source else "p@ss" if "user" in source else ""
    assert said == f"fatal: unable to access '{shown}/': {told.get(password, 'no host user, no port p or secret')}"


@pytest.mark.parametrize("command", [("clone", ""), ("bisect-demo", "--keep", ""), ("log", "--clone", "")])
def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["history", *command])
    assert (done.exit_code, done.stdout, "an empty path" in done.stderr) == (2, "", True)
