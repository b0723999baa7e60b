"""`refspec bench history`: each command beside the git commands that answer the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_history import FOLDER, Step, make_history
from typer.testing import CliRunner

from refspec.bench import history as bench
from refspec.bench.history import SYMBOL, bench_history, first_screen
from refspec.cli.main import app


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "small"
    worker = f"{FOLDER}/eagle_worker.py"
    steps = [
        Step("The folder (#1)", {worker: f"class {SYMBOL}:\n    a = 1\n"}, tags=("v0.4.6",)),
        Step("More (#2)", {worker: f"class {SYMBOL}:\n    a = 2\n"}, tags=("v0.5.0rc0",)),
    ]
    make_history(folder, steps, bare=True)
    return folder


def test_every_command_stands_beside_its_floor(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    report = bench_history(small, 1, lambda *done: told.append(done))
    assert told == [(1, 2), (2, 2)]
    standings = {standing["name"]: standing for standing in report["standings"]}
    assert list(standings) == ["first screen", "log", "dir --releases", f"symbol {SYMBOL}"]
    for standing in standings.values():
        assert standing["ratio"] == standing["ms"] / standing["floor_ms"] > 0
    assert standings["first screen"]["git_processes"] == 0
    assert 2 <= standings["log"]["git_processes"] <= 12
    assert standings["log"]["floor"][0].startswith("git log --format=")

    monkeypatch.setattr(bench, "bench_history", lambda *_: report)
    shown = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["bench", "history"]).stdout
    assert all(name in shown for name in standings)
    assert json.loads(CliRunner().invoke(app, ["bench", "history", "--json"]).stdout) == report


def test_a_command_that_fails_is_told_and_not_measured(small: Path) -> None:
    wrong = replace(first_screen(), command=("overview", "--nonesuch"))
    with pytest.raises(ValueError, match=r"overview --nonesuch ended with status 2, and said: .*nonesuch"):
        bench._ours(wrong, small)


def test_a_folder_without_a_main_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "history", "--clone", str(tmp_path)])
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "name a full clone of SGLang with --clone" in done.stderr
