"""`refspec exercises`, `start`, `grade`, `hint` and `reset`, as learners and graders meet them."""

from __future__ import annotations

import json
import os
import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import refspec
from refspec.cli.main import app
from refspec.grader import judge
from refspec.grader.exercise import find_exercise
from refspec.grader.sandbox import Sandbox

RIGHT = {name: find_exercise(name).solution_text() for name in ("next_beams", "walk_tree")}
TWO_AT_MOST = RIGHT["walk_tree"].replace("range(1, num_steps + 1)", "range(1, min(num_steps, 2) + 1)")
LOOP = "def {name}(*args):\n    while True:\n        pass\n"


class Ended:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    def json(self) -> Any:
        assert self.err == ""
        return json.loads(self.out)


@pytest.fixture(scope="module", autouse=True)
def one_nursery() -> Iterator[None]:
    """For all runs in this file, which do not wait for another to load torch. How one begins and ends with its grader
    is asked in test_grader_processes.py.
    """
    with Sandbox() as sandbox, pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "Sandbox", lambda: sandbox)
        patch.setattr(judge.Judge, "close", lambda self: None)
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and nothing in the environment that says otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REFSPEC_WORKSPACE", raising=False)
    return tmp_path


def run(*args: str | Path) -> Ended:
    """In this process, where torch is loaded already."""
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def verdicts(ended: Ended) -> dict[str, str]:
    return {result["id"]: result["verdict"] for result in ended.json()["results"]}


def hand_in(folder: Path, **texts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


# --- a learner's way --------------------------------------------------------------------------------------------------


def test_from_the_list_to_a_pass(here: Path) -> None:
    listed = run("exercises", "--json").json()
    assert listed["workspace"] == str(here / "workspace")
    assert [(e["id"], e["chapter"], e["state"]) for e in listed["exercises"]] == [
        ("next_beams", "01_one_round", "not_started"),
        ("walk_tree", "01_one_round", "not_started"),
    ]
    assert set(listed["exercises"][0]) == {"id", "chapter", "title", "file", "function", "state"}
    assert list(here.iterdir()) == []  # looking makes nothing

    started = run("start", "01")
    assert started.status == 0
    assert "workspace/01_one_round/walk_tree.py\n    Walk the tree greedily" in started.out
    file = here / "workspace" / "01_one_round" / "walk_tree.py"
    assert "raise NotImplementedError" in file.read_text()

    assert verdicts(run("grade", "walk_tree", "--json")) == {"walk_tree": "fail"}
    file.write_text(RIGHT["walk_tree"])
    passed = run("grade", "walk")
    assert (passed.status, "passed" in passed.out) == (0, True)
    states = {e["id"]: e["state"] for e in run("exercises", "--json").json()["exercises"]}
    assert states == {"next_beams": "unchanged", "walk_tree": "passed"}


def test_starting_again_leaves_what_is_there(here: Path) -> None:
    made = run("start", "1", "--json").json()["exercises"]
    assert [exercise["made"] for exercise in made] == [True, True]
    file = here / "workspace" / "01_one_round" / "walk_tree.py"
    file.write_text("mine")
    again = run("start", "01_one_round")
    assert again.out.count("there already, and left as it is") == 2
    assert file.read_text() == "mine"


def test_reset_says_where_the_old_text_is(here: Path) -> None:
    run("start", "01")
    file = here / "workspace" / "01_one_round" / "walk_tree.py"
    file.write_text("mine")
    ended = run("reset", "walk_tree")
    assert ended.out.splitlines() == [
        "workspace/01_one_round/walk_tree.py is the skeleton again",
        "What you had written is in workspace/01_one_round/walk_tree.py.1",
    ]
    assert Path(f"{file}.1").read_text() == "mine"
    assert run("reset", "walk_tree", "--json").json()["kept"] is None


def test_hints(here: Path) -> None:
    for number in (1, 2, 3):
        ended = run("hint", "walk_tree", str(number))
        assert f"hint {number} of 4" in ended.out
        assert f"More: refspec hint walk_tree {number + 1}" in ended.out
    assert run("hint", "walk_tree").out == run("hint", "walk_tree", "1").out
    diff = run("hint", "walk_tree", "4", "--json").json()
    assert (diff["kind"], diff["of"]) == ("the difference", 4)
    assert "-    raise NotImplementedError\n" in diff["text"]
    run("start", "01")
    (here / "workspace" / "01_one_round" / "walk_tree.py").write_text(RIGHT["walk_tree"])
    assert "none: your file is the solution" in run("hint", "walk_tree", "4").out
    assert "passes" not in run("hint", "walk_tree", "4").out
    run("grade", "walk_tree")
    assert "Your file passes as it is." in run("hint", "walk_tree", "4").out
    assert run("hint", "walk_tree", "4", "--json").json()["passed"]
    assert run("hint", "walk_tree", "5").status == 2
    assert run("hint", "walk_tree", "0").status == 2


def test_a_hint_may_be_had_without_a_workspace(here: Path) -> None:
    assert run("hint", "next_beams", "4").status == 0
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("name", ["nope", "07", ""])
@pytest.mark.parametrize("what", ["grade", "start", "hint", "reset"])
def test_unknown_names_are_bad_usage_and_the_known_are_named(here: Path, what: str, name: str) -> None:
    ended = run(what, name)
    assert ended.status == 2
    assert ended.err.count("\n") == 1
    assert "there are: next_beams, walk_tree" in ended.err


def test_the_workspace_of_the_environment_and_of_the_option(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFSPEC_WORKSPACE", str(here / "of the environment"))
    run("start", "01")
    run("start", "01", "--workspace", here / "of the option")
    assert sorted(path.name for path in here.iterdir()) == ["of the environment", "of the option"]


def test_a_workspace_in_the_package_is_refused(here: Path) -> None:
    ended = run("start", "01", "--workspace", Path(refspec.__file__).parent / "mine")
    assert (ended.status, "take another folder" in ended.err) == (1, True)


# --- grading ----------------------------------------------------------------------------------------------------------


def test_GRD_06_four_files_of_which_one_is_right(here: Path) -> None:
    """Each on its own, as there are two exercises; what one does is nothing to the next."""
    bad = {
        "syntax": ("# 1\n# 2\n# 3\n# 4\n# 5\n# 6\ndef next_beams(:\n", "error", "line 7"),
        "import": ("import no_such_module\n", "error", "no_such_module"),
        "exit": ("import sys\nsys.exit(0)\n", "fail", "ends the process"),
    }
    for name, (text, verdict, said) in bad.items():
        folder = hand_in(here / name, next_beams=text, walk_tree=RIGHT["walk_tree"])
        ended = run("grade", "--submission", folder, "--json")
        assert ended.status == 1
        assert verdicts(ended) == {"next_beams": verdict, "walk_tree": "pass"}
        assert said in ended.json()["results"][0]["headline"]


def test_GRD_01_a_loop_and_a_right_file(here: Path) -> None:
    """The whole command, with the limit that learners have."""
    folder = hand_in(here / "work", next_beams=LOOP.format(name="next_beams"), walk_tree=RIGHT["walk_tree"])
    ended = run("grade", "--submission", folder, "--json")
    assert verdicts(ended) == {"next_beams": "timeout", "walk_tree": "pass"}
    assert ended.json()["results"][0]["headline"] == "timed out after 5 s"
    assert ended.status == 1


def test_exit_statuses(here: Path) -> None:
    nothing = run("grade")
    assert (nothing.status, "Nothing to grade yet. To begin: refspec start 01" in nothing.out) == (1, True)
    assert verdicts(run("grade", "--json")) == {"next_beams": "not_started", "walk_tree": "not_started"}
    run("start", "walk_tree")
    (here / "workspace" / "01_one_round" / "walk_tree.py").write_text(RIGHT["walk_tree"])
    assert run("grade").status == 0  # all that there is
    assert run("grade", "next_beams").status == 1  # asked for, and not there
    folder = hand_in(here / "submitted", walk_tree=RIGHT["walk_tree"])
    assert run("grade", "--submission", folder).status == 1  # a submission is whole
    hand_in(folder, next_beams=RIGHT["next_beams"])
    assert run("grade", "--submission", folder).status == 0


@pytest.mark.parametrize(
    "args",
    [
        ("--watch", "--json"),
        ("--watch", "--junit", "x.xml"),
        ("--watch", "--submission", "."),
        ("--submission", "absent"),
        ("--seed", "-1"),
        ("--time-limit", "0"),
        ("--time-limit", "inf"),
        ("--time-limit", "nan"),
        ("--time-limit", "3e6"),
        ("--submission", ""),
        ("--nope",),
    ],
)
def test_bad_usage(here: Path, args: tuple[str, ...]) -> None:
    ended = run("grade", *args)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.count("\n") == 1


def test_nothing_is_written_into_a_submission(here: Path) -> None:
    folder = hand_in(here / "submitted" / "01_one_round", walk_tree=RIGHT["walk_tree"])
    before = [(path, path.stat().st_mtime_ns) for path in sorted(folder.parent.rglob("*"))]
    assert verdicts(run("grade", "walk_tree", "--submission", folder.parent, "--json")) == {"walk_tree": "pass"}
    assert [(path, path.stat().st_mtime_ns) for path in sorted(folder.parent.rglob("*"))] == before
    assert [path.name for path in here.iterdir()] == ["submitted"]


def test_a_seed_repeats_a_run(here: Path) -> None:
    folder = hand_in(here / "submitted", walk_tree=TWO_AT_MOST)
    results = [
        run("grade", "walk", "--submission", folder, *args, "--json").json()["results"][0]
        for args in ((), ("--seed", "5"))
    ]
    assert [result["verdict"] for result in results] == ["fail", "fail"]
    assert results[1]["seed"] == 5 != results[0]["seed"]
    assert [path.name for path in here.iterdir()] == ["submitted"]  # whatever was used to make the case smaller


def test_the_seed_is_said_where_it_matters(here: Path) -> None:
    """And what is not limited, once for each run that graded anything."""
    misconception = next(m for m in find_exercise("walk_tree").misconceptions if m.id == "no_bonus")
    for text, seeds in ((TWO_AT_MOST, 1), (misconception.source, 0), (RIGHT["walk_tree"], 0)):
        folder = hand_in(here / "submitted", walk_tree=text)
        out = run("grade", "walk_tree", "--submission", folder).out
        assert (out.count("were drawn from seed"), out.count("not limited on this system")) == (seeds, 1)
    (folder / "walk_tree.py").unlink()
    out = run("grade", "walk_tree", "--submission", folder).out
    assert "Nothing to grade: no walk_tree.py in" in out
    assert "not limited" not in out


def test_the_next_step(here: Path) -> None:
    run("start", "01")
    out = " ".join(run("grade").out.split())
    assert "Next: read the chapter (refspec site serve), then write it; refspec hint walk_tree" in out
    hand_in(here / "workspace" / "01_one_round", **RIGHT)
    assert "Next: refspec quiz 01" in run("grade").out


@pytest.mark.parametrize("columns", ["20", "40"])
def test_narrow_terminals(here: Path, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    misconception = find_exercise("next_beams").misconceptions[0]
    folder = hand_in(here / "submitted", next_beams=misconception.source, walk_tree=TWO_AT_MOST)
    ended = run("grade", "--submission", folder)
    assert ended.status == 1
    assert max(map(len, ended.out.splitlines())) <= int(columns)


def test_a_pass_that_cannot_be_noted_is_one_all_the_same(here: Path) -> None:
    run("start", "walk_tree")
    hand_in(here / "workspace" / "01_one_round", walk_tree=RIGHT["walk_tree"])
    (here / "workspace" / ".refspec" / "passed").write_text("a file in the place of the folder")
    ended = run("grade", "walk_tree")
    assert (ended.status, "1 of 1 exercise passed" in ended.out) == (0, True)
    assert ended.err.startswith("refspec: that walk_tree passed cannot be noted: ")
    assert ended.err.count("\n") == 1


def test_folders_with_escape_codes_in_their_names(here: Path) -> None:
    for ended in (run("start", "01", "--workspace", "a\x1b[2Jb"), run("grade", "--submission", "\x1b[2J")):
        assert "\x1b" not in ended.out + ended.err
        assert "\\x1b[2J" in ended.out + ended.err


def test_reports(here: Path) -> None:
    text = RIGHT["walk_tree"].replace("    b, n =", "    print('\\x1b[1m \\x00')\n    b, n =", 1)
    misconception = find_exercise("next_beams").misconceptions[0]
    folder = hand_in(here / "submitted", walk_tree=text, next_beams=misconception.source)
    ended = run("grade", "--submission", folder, "--junit", "out.xml", "--gradescope", "out.json", "--json")
    assert ended.status == 1
    results = ended.json()["results"]
    assert [result["misconception"] for result in results] == [misconception.id, None]

    suite = ET.fromstring((here / "out.xml").read_bytes())[0]
    assert {key: suite.attrib[key] for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "2",
        "failures": "1",
        "errors": "0",
        "skipped": "0",
    }
    failure = suite[0].find("failure")
    assert failure is not None
    assert failure.text is not None
    assert misconception.sentence in failure.text
    printed = suite[1].find("system-out")
    assert printed is not None
    assert "\\x1b[1m" in (printed.text or "")

    scope = json.loads((here / "out.json").read_text())
    assert [(test["score"], test["max_score"], test["status"]) for test in scope["tests"]] == [
        (0, 1, "failed"),
        (1, 1, "passed"),
    ]
    assert misconception.sentence in scope["tests"][0]["output"]
    assert sorted(path.name for path in here.iterdir()) == ["out.json", "out.xml", "submitted"]


def test_a_skipped_and_a_broken_exercise_in_junit(here: Path) -> None:
    folder = hand_in(here / "submitted", walk_tree="def walk_tree(:")
    run("grade", "--submission", folder, "--junit", "out.xml")
    suite = ET.fromstring((here / "out.xml").read_bytes())[0]
    assert [case[0].tag for case in suite] == ["skipped", "error"]


def test_a_report_that_cannot_be_written_is_one_line(here: Path) -> None:
    folder = hand_in(here / "submitted", walk_tree=RIGHT["walk_tree"])
    ended = run("grade", "walk_tree", "--submission", folder, "--junit", here / "absent" / "out.xml")
    assert (ended.status, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert "cannot write" in ended.err


def test_reports_go_through_links_pipes_and_devices(here: Path) -> None:
    folder = hand_in(here / "submitted", walk_tree=RIGHT["walk_tree"])
    (here / "link").symlink_to(here / "real.xml")
    os.mkfifo(here / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((here / "pipe").read_text()))
    reader.start()
    run("grade", "walk_tree", "--submission", folder, "--junit", "link", "--gradescope", "pipe")
    reader.join(10)
    assert json.loads(read[0])["tests"][0]["score"] == 1
    assert (here / "link").is_symlink()
    assert (here / "pipe").is_fifo()
    assert ET.fromstring((here / "real.xml").read_bytes())[0].attrib["tests"] == "1"
    assert run("grade", "walk_tree", "--submission", folder, "--junit", "/dev/null").status == 0
    assert Path("/dev/null").is_char_device()


def test_feedback_reads_like_a_tutors(here: Path) -> None:
    """Headline, picture, diagnosis, next step; in 80 columns, and as plain text."""
    misconception = next(m for m in find_exercise("walk_tree").misconceptions if m.id == "first_child_only")
    folder = hand_in(here / "submitted", walk_tree=misconception.source)
    out = run("grade", "walk_tree", "--submission", folder).out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80
    joined = " ".join(out.split())
    places = [
        joined.index("walk_tree failed in example 1 of 2 (shown below)"),
        joined.index("after node 0 the target wants 7, and node 2, its second child, holds that; but your walk"),
        joined.index("node 1 token 6"),
        joined.index("your accept_index: [[0, -1, -1]]"),
        joined.index("expected accept_index: [[0, 2, 3]]"),
        joined.index(misconception.sentence),
        joined.index("Next: refspec hint walk_tree"),
        joined.index("0 of 1 exercise passed"),
    ]
    assert places == sorted(places)


def test_help_names_every_command() -> None:
    out = run("--help").out
    for name in ("exercises", "start", "grade", "hint", "reset"):
        assert re.search(rf"^\s+{name} ", out, re.MULTILINE)
