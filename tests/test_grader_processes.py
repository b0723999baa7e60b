"""Graders as their users start them: two at once, in odd locales, interrupted, watching."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import refspec
from refspec.grader.exercise import find_exercise, select_exercises
from refspec.grader.workspace import Workspace

SOURCES = str(Path(refspec.__file__).parents[1])
RIGHT = {name: find_exercise(name).solution_text() for name in ("next_beams", "walk_tree")}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and nothing in the environment that says otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REFSPEC_WORKSPACE", raising=False)
    return tmp_path


def start(name: str) -> None:
    """A workspace in the current folder."""
    for exercise in select_exercises(name):
        assert Workspace(Path.cwd() / "workspace").start(exercise)


def hand_in(folder: Path, walk_tree: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "walk_tree.py").write_text(walk_tree, encoding="utf-8")
    return folder


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "refspec", *map(str, args)]


def environment(**changed: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SOURCES, **changed}


def test_GRD_09_two_graders_at_once(here: Path) -> None:
    """In one folder, on different exercises; ten times over in test_grader_judge.py, where they are warm."""
    start("01")
    folder = here / "workspace" / "01_one_round"
    for name, text in RIGHT.items():
        (folder / f"{name}.py").write_text(text)
    pair = [
        subprocess.Popen(command("grade", name, "--json"), cwd=here, env=environment(), stdout=subprocess.PIPE)
        for name in RIGHT
    ]
    for name, process in zip(RIGHT, pair, strict=True):
        out, _ = process.communicate(timeout=60)
        assert [result["id"] for result in json.loads(out)["results"]] == [name]
        assert process.returncode == 0
    left = sorted(str(path.relative_to(here / "workspace")) for path in (here / "workspace").rglob("*"))
    assert left == [
        ".refspec",
        ".refspec/passed",
        ".refspec/passed/next_beams",
        ".refspec/passed/walk_tree",
        "01_one_round",
        "01_one_round/next_beams.py",
        "01_one_round/walk_tree.py",
    ]


@pytest.mark.parametrize("as_json", [True, False])
def test_GRD_10_a_locale_without_utf8(tmp_path: Path, as_json: bool) -> None:
    folder = tmp_path / "my work" / "é dir"
    text = RIGHT["walk_tree"].replace("    b, n =", "    print('✓')\n    b, n =", 1)
    hand_in(folder, walk_tree=text)
    args = ["--json"] if as_json else []
    ended = subprocess.run(
        command("grade", "walk_tree", "--submission", folder, *args),
        env=environment(LC_ALL="C", PYTHONIOENCODING="cp1252"),
        capture_output=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    if as_json:
        assert json.loads(ended.stdout)["results"][0]["printed"].startswith("✓\n")
    else:
        assert b"\\u2713" in ended.stdout


def test_GRD_10_failures_in_ascii(tmp_path: Path) -> None:
    """The picture too."""
    misconception = next(m for m in find_exercise("walk_tree").misconceptions if m.id == "no_bonus")
    folder = hand_in(tmp_path, walk_tree=misconception.source)
    ended = subprocess.run(
        command("grade", "walk_tree", "--submission", folder),
        env=environment(LC_ALL="C", PYTHONIOENCODING="ascii"),
        capture_output=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (1, b"")
    assert b"\\u" not in ended.stdout
    assert b"`-- node 2  token 7" in ended.stdout


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    text = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\nos.fork()\ntime.sleep(60)\n"
    folder = hand_in(tmp_path / "work", walk_tree=text)
    process = subprocess.Popen(
        command("grade", "walk_tree", "--submission", folder, "--time-limit", "60"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    wait_for(lambda: note.exists() and note.read_text() != "")
    family = psutil.Process(process.pid).children(recursive=True)
    assert int(note.read_text()) in [child.pid for child in family]
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"", b"refspec: interrupted\n")
    wait_for(lambda: not any(map(is_running, family)))


def test_watching(here: Path) -> None:
    """A saved file is graded again at once; Ctrl-C ends it with 130."""
    start("walk_tree")
    file = here / "workspace" / "01_one_round" / "walk_tree.py"
    out = here / "out"
    with out.open("wb") as stream:
        process = subprocess.Popen(
            command("grade", "walk_tree", "--watch"),
            env=environment(),
            cwd=here,
            stdout=stream,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        wait_for(lambda: b"is not written yet" in out.read_bytes() and b"watching" in out.read_bytes())
        file.write_text(RIGHT["walk_tree"])
        saved = time.monotonic()
        wait_for(lambda: b"1 of 1 exercise passed" in out.read_bytes())
        assert time.monotonic() - saved < 5  # well below a second where nothing else runs
        file.unlink()
        wait_for(lambda: b"Nothing to grade yet" in out.read_bytes())
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"refspec: interrupted\n")


def wait_for(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
