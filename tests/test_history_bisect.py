"""`refspec history bisect-demo`: git bisect really runs, and what it finds is nowhere written down."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from small_history import FOLDER, Step, git, make_history
from typer.testing import CliRunner

from refspec.cli.main import app
from refspec.history import bisect_demo, catalogue, demo_repository
from refspec.history.bisect_demo import Lesson, place, teach

RUNS_GIT = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Lesson]:
    folder = tmp_path_factory.mktemp("kept")
    return folder, teach(folder)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def run(*args: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["history", "bisect-demo", *map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


# --- the repository


def test_edits_apply_wherever_the_commit_stands() -> None:
    for where in demo_repository.PLACES:
        changes = demo_repository.history(where)
        assert len(list(demo_repository.trees(changes))) == len(changes)
        assert len({change.subject for change in changes}) == len(changes)


def test_every_commit_runs_but_one(tmp_path: Path) -> None:
    """And counts what it should; the repository's own tests pass wherever it can run."""
    changes = demo_repository.history(demo_repository.USUAL_PLACE)
    behind = len(changes) - demo_repository.BEHIND
    (tmp_path / bisect_demo.SCRIPT).write_text(bisect_demo.RUN_SCRIPT)
    both = (
        "import os, runpy, sys; sys.path.insert(0, os.getcwd()); at = sys.argv[1]; "
        f"at == 'broken' or runpy.run_path({demo_repository.TEST!r}, run_name='__main__'); "
        f"runpy.run_path('../{bisect_demo.SCRIPT}', run_name='__main__')"
    )
    for number, files in list(enumerate(demo_repository.trees(changes), start=1 - behind))[behind:]:
        (tmp_path / str(number)).mkdir()
        for path, text in files.items():
            (tmp_path / str(number) / path).write_text(text)
        broken = number == demo_repository.UNRUNNABLE
        expected = 125 if broken else int(number >= demo_repository.USUAL_PLACE)
        command = [sys.executable, "-E", "-s", "-S", "-B", "-c", both, "broken" if broken else "whole"]
        done = subprocess.run(command, cwd=tmp_path / str(number), capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (expected, ""), changes[number + behind - 1].subject


def test_an_edit_that_does_not_apply() -> None:
    change = demo_repository.Change("x", (demo_repository.Replace("a", "b"),))
    with pytest.raises(ValueError, match="'a' is not in exactly one place"):
        list(demo_repository.trees([change]))


# --- the search


def test_the_commit_is_found_wherever_it_stands(tmp_path: Path) -> None:
    """Here right behind the good end; test_json: at the bad one."""
    lesson = teach(tmp_path, 1)
    assert lesson.suspects == (lesson.commits[0],)
    assert lesson.suspects[0].subject == "Simplify the draft loop"
    assert 4 <= len(lesson.trials) <= 8
    assert lesson.trials[-1].left == 1


def test_what_is_tried_is_told(kept: tuple[Path, Lesson]) -> None:
    folder, lesson = kept
    assert (lesson.good.said, lesson.good.answer, lesson.good.passes) == ("4 draft forwards a round", "good", True)
    assert (lesson.bad.said, lesson.bad.answer, lesson.bad.passes) == ("5 draft forwards a round", "bad", True)
    assert {trial.answer for trial in lesson.trials} == {"good", "bad", "skip"}
    left = len(lesson.commits)
    for trial in lesson.trials:
        assert {"good": 0, "bad": 1, "skip": 125}[trial.answer] == trial.status
        assert trial.left == left if trial.answer == "skip" else trial.left < left
        left = trial.left
    assert "-            if step == self.num_steps - 1:\n-                break\n" in lesson.diff
    assert git(folder / bisect_demo.REPOSITORY, "status", "--porcelain", "--ignored") == ""
    assert git(folder / bisect_demo.REPOSITORY, "for-each-ref", "refs/bisect") == ""


def test_git_bisect_run_finds_the_same(kept: tuple[Path, Lesson]) -> None:
    folder, lesson = kept
    repository = folder / bisect_demo.REPOSITORY
    git(repository, "bisect", "start", "main", "v0.1", "--")
    said = git(repository, "bisect", "run", sys.executable, f"../{bisect_demo.SCRIPT}")
    assert f"{lesson.suspects[0].hash} is the first bad commit" in said
    tried = re.findall(r"^# (?:good|bad|skip): \[(\w+)\]", git(repository, "bisect", "log"), re.MULTILINE)[2:]
    assert tried == [trial.commit.hash for trial in lesson.trials]
    git(repository, "bisect", "reset")


def test_a_commit_that_cannot_run_beside_the_one_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then git cannot tell the two apart, and both are named."""
    real = bisect_demo._Repository.run

    def unable(self: bisect_demo._Repository, script: str) -> tuple[str, int]:
        subject = self.git("log", "-1", "--format=%s").strip()
        return ("cannot run", 125) if subject == "Simplify the draft loop" else real(self, script)

    monkeypatch.setattr(bisect_demo._Repository, "run", unable)
    lesson = teach(tmp_path)
    usual = demo_repository.USUAL_PLACE
    assert {*lesson.suspects} == {*lesson.commits[usual - 1 : usual + 1]}
    assert lesson.diff == ""


def test_an_exit_status_without_a_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bisect_demo, "ANSWERS", {0: "good", 1: "bad"})
    with pytest.raises(ValueError, match=r"the run script ended with 125 at [0-9a-f]{10}: cannot run: No module named"):
        teach(tmp_path)


# --- in spite of what is around


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings of a user that would spoil it: other names, hooks that fail, signatures, another hash."""
    (tmp_path / "hooks").mkdir()
    for hook in ("post-checkout", "pre-commit", "reference-transaction", "post-index-change"):
        (tmp_path / "hooks" / hook).write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\nexit 1\n")
        (tmp_path / "hooks" / hook).chmod(0o755)
    (tmp_path / "template" / "hooks").mkdir(parents=True)
    (tmp_path / "template" / "hooks" / "post-checkout").symlink_to(tmp_path / "hooks" / "post-checkout")
    config = f"""
        [init] defaultBranch = trunk
               templateDir = {tmp_path}/template
               defaultObjectFormat = sha256
        [core] hooksPath = {tmp_path}/hooks
               autocrlf = true
               abbrev = 4
        [commit] gpgSign = true
        [tag] gpgSign = true
        [color] ui = always
        [log] showSignature = true
              date = relative
        [diff] noprefix = true
               external = false
        [alias] bisect = !false
        [safe] bareRepository = explicit
        """
    (tmp_path / ".gitconfig").write_text(config)
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.hooksPath")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(tmp_path / "hooks"))
    monkeypatch.setenv("GIT_DEFAULT_HASH", "sha256")
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(tmp_path / "template"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "template"))
    return tmp_path


def test_GIT_12_settings_of_the_user(settings: Path, kept: tuple[Path, Lesson]) -> None:
    """The same hashes for everybody, and the environment is afterwards as it was."""
    before = dict(os.environ)
    (settings / "work").mkdir()
    assert teach(settings / "work") == kept[1]
    assert dict(os.environ) == before
    assert not (settings / "hooked").exists()


INTERRUPTED = (KeyboardInterrupt(), 130, "refspec: interrupted\n")
FAILING = (OSError(28, "No space left on device", "x"), 1, "refspec: x: No space left on device\n")


@pytest.mark.parametrize(
    ("what", "status", "said", "keep"),
    [(*INTERRUPTED, None), (*INTERRUPTED, "new"), (*INTERRUPTED, "empty"), (*FAILING, None)],
)
def test_interrupted_or_failing_it_leaves_nothing(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, what: BaseException, status: int, said: str, keep: str | None
) -> None:
    def fail(*_: object) -> None:
        raise what

    monkeypatch.setattr(bisect_demo._Repository, "run", fail)
    args: list[str | Path] = []
    if keep:
        args = ["--keep", temporary.parent / keep]
    if keep == "empty":
        (temporary.parent / keep).mkdir()
    assert run(*args) == (status, "", said)
    assert list(temporary.iterdir()) == []
    assert {entry.name for entry in temporary.parent.iterdir()} == ({"tmp", "empty"} if keep == "empty" else {"tmp"})
    assert not keep or not [*(temporary.parent / keep).glob("*")]


def test_no_git(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(temporary))
    assert run() == (1, "", "refspec: git is needed: install it, then run this again\n")
    assert list(temporary.iterdir()) == []


# --- the command


def test_json(temporary: Path, kept: tuple[Path, Lesson]) -> None:
    """Of a search for a commit at the end. Nothing is left behind."""
    status, out, err = run("--json", "--where", "29")
    document = json.loads(out)
    assert (status, err, document["folder"]) == (0, "", None)
    assert document["culprit"] == document["suspects"][0] == document["commits"][28]
    assert document["culprit"]["subject"] == kept[1].suspects[0].subject
    assert document["culprit"]["hash"] != kept[1].suspects[0].hash
    assert [document["good"]["name"], document["bad"]["name"]] == ["v0.1", "main"]
    assert len(document["commits"]) == demo_repository.BEHIND
    assert len(document["trials"]) > 3
    assert list(temporary.iterdir()) == []


def test_screen(temporary: Path, kept: tuple[Path, Lesson]) -> None:
    status, out, err = run("--keep", temporary.parent / "it's here")
    assert (status, err) == (0, "")
    for trial in kept[1].trials:
        assert f"{trial.commit.hash[:10]} {trial.commit.subject}\n    {trial.said}: exit {trial.status}" in out
    assert f"  {kept[1].suspects[0].hash[:10]} Simplify the draft loop, 2025-01-28\n" in out
    assert "    -            if step == self.num_steps - 1:\n" in out
    again = re.search(
        r"^    (cd .*)\n    (git bisect start .*)\n    (git bisect run) python3 (.*)\n    (.*reset)\n", out, re.M
    )
    assert again
    commands = [again[1], again[2], f"{again[3]} '{sys.executable}' {again[4]}", again[5]]
    done = subprocess.run(["sh", "-ec", "\n".join(commands)], env=RUNS_GIT, capture_output=True, text=True)
    assert f"{kept[1].suspects[0].hash} is the first bad commit" in done.stdout
    assert not any(line.endswith(" ") for line in out.splitlines())


@pytest.mark.parametrize("where", ["0", "-1", "14", "15", "30"])
def test_where_it_cannot_be(temporary: Path, where: str) -> None:
    status, out, err = run("--where", where)
    assert (status, out) == (2, "")
    assert err == f"refspec: --where takes 1 to 29, except 14 and 15, where others have to be: {where}\n"


@pytest.mark.parametrize("kind", ["full", "file"])
def test_keep_overwrites_nothing(tmp_path: Path, kind: str) -> None:
    target = tmp_path / kind
    if kind == "full":
        target.mkdir()
        (target / "mine").write_text("mine")
    else:
        target.write_text("mine")
    complaint = f"refspec: {target} is there already: name a folder that does not exist, or an empty one\n"
    assert run("--keep", target) == (1, "", complaint)
    assert (target / "mine" if kind == "full" else target).read_text() == "mine"


# --- SGLang


def test_what_is_said_of_sglang_is_in_the_catalogue() -> None:
    known = catalogue.commits_by_hash()
    assert "EAGLE2 worker" in known[bisect_demo.MORE].subject
    assert known[bisect_demo.SGLANG_ANSWER].pr == 3468
    assert bisect_demo.FEWER in {f"v{release.version}" for release in catalogue.releases()}


def test_commands_for_sglang(kept: tuple[Path, Lesson], tmp_path: Path) -> None:
    """On a repository in its image, bare, with a file that is no Python, and one without the loop."""
    loop = "for i in range(num_steps):\n    first()\n    {}forward()\n"
    more, fewer = loop.format(""), loop.format("if i == num_steps - 1:\n        break\n    ")
    texts = [more, more + "# a\n", "x = 1\n", more + "# b\n", fewer, fewer + "# c\n", fewer + "# d\n"]
    steps = [Step(f"{n}", {f"{FOLDER}/eagle_worker.py": text}) for n, text in enumerate(texts)]
    steps.insert(2, Step("elsewhere", {"README.md": "x"}))
    commits = make_history(tmp_path / "clone", steps, bare=True)
    (tmp_path / bisect_demo.SOURCE_SCRIPT).write_text((kept[0] / bisect_demo.SOURCE_SCRIPT).read_text())
    start, search, reset = bisect_demo.SGLANG_COMMANDS
    start = start.replace(bisect_demo.FEWER, "main").replace(bisect_demo.MORE[:10], commits[0])
    search = search.replace("python3", f"'{sys.executable}'")
    done = subprocess.run(
        ["sh", "-ec", f"{start}\n{search}\n{reset}"],
        cwd=tmp_path / "clone",
        env=RUNS_GIT,
        capture_output=True,
        text=True,
    )
    assert f"{commits[5]} is the first fewer commit" in done.stdout, done.stdout + done.stderr
    assert git(tmp_path / "clone", "for-each-ref", "refs/bisect") == ""


def test_a_folder_that_is_named_and_new(tmp_path: Path) -> None:
    with place(tmp_path / "a" / "b") as folder:
        assert folder == tmp_path / "a" / "b"
    assert folder.is_dir()


def test_ended_by_a_signal_while_git_works(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git ends too, and what it goes on to write until then is removed with the rest."""
    script = temporary.parent / "bin/git"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\ncase " $* " in *" fast-import "*)\n'
        f"kill -TERM {os.getpid()}\n"
        "i=0; while [ $i -lt 100 ]; do i=$((i+1)); mkdir -p .git/$i; sleep 0.02; done;;\nesac\n"
        f'exec "{shutil.which("git")}" "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert run() == (143, "", "")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(temporary.iterdir()) == []
