"""`refspec oracle` as its users meet it. The wheels here are made up; those of SGLang are for tests/parity."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_cli import run
from test_oracle_check import OPERATION, SOUND
from test_oracle_wheel import FILES, KERNEL, Wheel, made_up_wheel

from refspec.cli import oracle
from refspec.oracle import check, wheel
from refspec.oracle.opinions import OPINIONS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "made_up.whl"


@pytest.fixture(autouse=True)
def pinned(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """One made-up wheel is all that is needed; the cache is empty; pip has no network."""
    monkeypatch.setenv("REFSPEC_CACHE", str(tmp_path / "cache"))
    pinned = made_up_wheel(file)
    monkeypatch.setattr(wheel, "WHEELS", {pinned.version: pinned})
    pip = tmp_path / "fakes" / "pip"
    pip.mkdir(parents=True)
    (pip / "__init__.py").touch()  # without it, the real pip would come first
    (pip / "__main__.py").write_text("raise SystemExit('WARNING: connection broken by NewConnectionError')")
    monkeypatch.setenv("PYTHONPATH", str(pip.parent))
    return pinned


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only operation there is; SGLang's answer to one case is wrong, and our kernel dies of another."""
    code = """
def triton_answer(x):
    if 0 in x: os.kill(os.getpid(), signal.SIGSEGV)
    return {"y": x + 1}
def sglang_answer(x): return {"y": torch.where(x == 1, 7, x + 1)}
"""
    (tmp_path / "fakes" / "made_up_for_the_cli.py").write_text(SOUND + code + OPERATION)
    monkeypatch.syspath_prepend(tmp_path / "fakes")
    monkeypatch.setattr(check, "operation_names", lambda: ["made_up"])
    monkeypatch.setattr(check, "module_of", lambda _: "made_up_for_the_cli")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return "made_up"


# --- wheels -----------------------------------------------------------------------------------------------------------


def test_status_of_nothing(tmp_path: Path) -> None:
    result = run("oracle", "status")
    assert (result.status, result.err) == (1, "")
    assert result.out == "SGLang 1.0: absent\nto mend it: refspec oracle fetch\n"
    result = run("oracle", "status", "--json")
    assert result.status == 1
    folder = str(tmp_path / "cache" / "sglang" / "1.0")
    state = {"version": "1.0", "status": "absent", "folder": folder, "detail": "", "remedy": "refspec oracle fetch"}
    assert json.loads(result.out) == {"ok": False, "wheels": [state]}


def test_fetch_without_network(pinned: Wheel) -> None:
    result = run("oracle", "fetch")
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("refspec: SGLang 1.0 was not fetched: pip cannot reach its package index. A wheel ")
    assert result.err.endswith("bring sglang-1.0-py3-none-any.whl and run `refspec oracle fetch --wheel FILE`\n")


def test_a_wheel_that_is_brought_and_then_damaged(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "sglang" / "1.0"
    result = run("oracle", "fetch", "--wheel", file)
    assert (result.status, result.out, result.err) == (0, f"SGLang 1.0: ready, {folder}\n", "")
    assert run("oracle", "status", "--json").json()["ok"]
    (folder / KERNEL).write_text("")
    result = run("oracle", "status")
    assert result.status == 1
    assert result.out.startswith(f"SGLang 1.0: damaged ({KERNEL} is not what the wheel holds), {folder}\n")
    assert run("oracle", "fetch", "--wheel", file, "--json").json()["ok"]
    assert (folder / KERNEL).read_text() == FILES[KERNEL]


def test_a_wheel_that_is_not_there_or_not_the_one(file: Path, pinned: Wheel) -> None:
    result = run("oracle", "fetch", "--wheel", "")
    assert (result.status, result.err) == (2, "refspec: --wheel needs the name of a wheel's file\n")
    result = run("oracle", "fetch", "--wheel", "/dev/zero")
    assert (result.status, result.err) == (1, "refspec: /dev/zero: not a regular file\n")
    result = run("oracle", "fetch", "--wheel", file.with_name("none.whl"))
    assert result.status == 1
    assert result.err == f"refspec: {file.with_name('none.whl')}: No such file or directory\n"
    file.write_text("no wheel")
    result = run("oracle", "fetch", "--wheel", file)
    assert result.status == 1
    assert result.err.startswith(f"refspec: {file} is not one of the wheels that are needed: its SHA-256 is ")
    assert result.err.endswith(f"{pinned.sha256}\n")


# --- check ------------------------------------------------------------------------------------------------------------


def test_check_reports_what_differs_and_what_fails(made_up: str, file: Path) -> None:
    run("oracle", "fetch", "--wheel", file)
    result = run("oracle", "check", "--cases", "2", "--seed", "3", "--jobs", "1")
    assert (result.status, result.err) == (1, "")
    words = " ".join(result.out.split())
    assert "operation cases CPU CPU CPU differ borderline asked 5 made_up 6 6 of 6 6 1 0 0" in words
    for word in ("torch, triton, sglang", "differ", "borderline", "not asked"):
        assert f"{word}: cases " in words
    assert (
        "made_up, case it's one: torch and sglang-interpret differ in y at (0,): 2 against 7 "
        "refspec oracle check made_up --seed 3 --case" in words
    )
    assert "made_up, case one zero: triton-interpret failed: its process ended by SIGSEGV" in words
    assert "not run: triton-gpu, sglang-gpu, sgl_kernel: no GPU that torch can use" in words

    result = run("oracle", "check", made_up, "--seed", "3", "--case", "it's one", "--jobs", "1", "--json")
    assert (result.status, result.err) == (1, "")
    report = json.loads(result.out)
    assert (report["ok"], report["seed"], [state["status"] for state in report["wheels"]]) == (False, 3, ["ready"])
    (operation,) = report["operations"]
    assert (operation["ok"], operation["cases"], operation["failures"]) == (False, 1, [])
    assert operation["opinions"]["sglang-interpret"] == {"answered": 1, "failed": 0, "not_asked": 0}
    assert operation["not_run"]["triton-gpu"] == "no GPU that torch can use"
    assert operation["differences"][0] == {
        "case": "it's one",
        "opinions": ["torch", "sglang-interpret"],
        "output": "y",
        "place": [0],
        "values": ["2", "7"],
        "reproduce": """refspec oracle check made_up --seed 3 --case 'it'"'"'s one'""",
    }


def report(*opinions: str) -> check.OperationReport:
    report = check.OperationReport("align_evict_mask_to_page_size", "", 0, cases=2126)
    report.opinions = {name: check.Count(2126) for name in opinions}
    report.opinions["triton-interpret"] = check.Count(2125, failed=1)
    return report


def shown(columns: int, report: check.OperationReport) -> list[str]:
    console = Console(width=columns, file=StringIO(), highlight=False)
    oracle._show_reports(console, [report])
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def test_the_table_at_80_columns_has_whole_words() -> None:
    assert list(oracle.HEADINGS) == list(OPINIONS)
    lines = shown(80, report("torch", "triton-interpret", "sglang-interpret"))
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["torch", "triton", "sglang", "not"]
    assert lines[1].split() == ["operation", "cases", "CPU", "CPU", "CPU", "differ", "borderline", "asked"]
    assert lines[3].split() == "align_evict_mask_to_page_size 2126 2126 of 2126 2126 0 0 0".split()


@pytest.mark.parametrize(
    ("columns", "opinions"), [(40, list(OPINIONS)[:2]), (80, list(OPINIONS)), (200, list(OPINIONS))]
)
def test_where_the_table_has_no_room_lines_tell_the_same(columns: int, opinions: list[str]) -> None:
    lines = shown(columns, report(*opinions))
    assert max(map(len, lines)) <= columns
    words = " ".join(" ".join(lines).split())
    assert "…" not in words
    if columns == 200:
        assert lines[1].split()[2:8] == ["CPU", "CPU", "GPU", "CPU", "GPU", "GPU"]
    else:
        assert "align_evict_mask_to_page_size: 2126 cases answered: torch 2126, triton-interpret 2125 of 2126" in words
        assert "differ 0, borderline 0, not asked 0" in words


def test_a_damaged_wheel_is_a_reason(made_up: str, file: Path, tmp_path: Path) -> None:
    run("oracle", "fetch", "--wheel", file)
    (tmp_path / "cache" / "sglang" / "1.0" / KERNEL).write_text("")
    result = run("oracle", "check", made_up, "--case", "it's one", "--jobs", "1")
    reason = f"refspec oracle fetch; 1.0 is damaged: {KERNEL} is not what the wheel holds"
    assert f"not run: sglang-interpret: the wheel of SGLang 1.0 is not ready: {reason}\n" in result.out


def test_one_case_shows_its_inputs_and_without_the_wheel_ours_are_compared(made_up: str) -> None:
    result = run("oracle", "check", made_up, "--case", "it's one", "--jobs", "1")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith("case it's one:\n  x = tensor([1])\n")
    assert "not run: sglang-interpret: the wheel of SGLang 1.0 is not ready: refspec oracle fetch\n" in result.out
    assert "sglang\n" not in result.out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--case", "small-1"], 2, "--case names a case of one operation: refspec oracle check OP --case LABEL"),
        (["no_such"], 2, "there is no operation 'no_such'; those that can be checked: align_evict_mask"),
        (["assign_req_to_token", "--case", "tiny-1"], 2, "assign_req_to_token has no case 'tiny-1'; it has "),
        (["--cases", "-1"], 2, "Invalid value for '--cases'"),
        (["--seed", "99999999999999999999999999"], 2, "Invalid value for '--seed'"),
        (["--seed", "-1"], 2, "Invalid value for '--seed'"),
        (["--jobs", "0"], 2, "Invalid value for '--jobs'"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], status: int, words: str) -> None:
    result = run("oracle", "check", *arguments)
    assert (result.status, result.out) == (status, "")
    assert result.err.startswith(f"refspec: {words}")
    assert result.err.count("\n") == 1


def test_a_machine_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refspec.kernels.backend.TRITON_INSTALLED", False)
    result = run("oracle", "check")
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("refspec: Triton is not installed, so there is nothing to compare")
