"""Every change of one function: the right lines, whatever Python's forms, and the right changes, whatever git loses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from refspec.cli.main import app
from refspec.history.clone import Clone, HistoryError, LacksError
from refspec.history.functions import read_lines
from tests import small_history
from tests.small_history import FOLDER, Step, git, make_history

A = """\
def build(n):
    return n


class Worker:
    @property
    def tree(self):
        return self._tree

    @tree.setter
    def tree(self, value):
        self._tree = value

    @staticmethod
    @cached(
        size=1,
    )
    async def verify(batch):
        def inner(x):
            return x + 1

        accepted = await forward(batch)
        return inner(accepted)

    def other(self):
        return 0
"""
REWRITTEN = A.replace(
    "        accepted = await forward(batch)\n        return inner(accepted)\n",
    "        return await verify_anew(batch)\n",
)
STEPS = (
    Step("worker (#1)", {f"{FOLDER}/a.py": A}),
    Step(
        "above and below it", {f"{FOLDER}/a.py": "import os\n" + A.replace("return 0", "return 1").replace("n)", "m)")}
    ),
    Step("a decorator", {f"{FOLDER}/a.py": "import os\n" + A.replace("size=1", "size=2")}),
    Step("inner (#7)", {f"{FOLDER}/a.py": "import os\n" + A.replace("x + 1", "x + 2")}, tags=("v0.1.0",)),
    Step(
        "the file moves",
        {f"{FOLDER}/a.py": None, f"{FOLDER}/sub/b c:1,2.py": "import os\n" + A.replace("x + 1", "x + 2")},
    ),
    Step("rewritten", {f"{FOLDER}/sub/b c:1,2.py": REWRITTEN}),
    Step("no Python", {f"{FOLDER}/x.cpp": "int f() { return 1; }\n", "top.py": "def top():\n    return 1\n"}),
    Step("at the top", {"top.py": "def top():\n    return 2\n"}),
)
FILE = "sub/b c:1,2.py"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines") / "repository"
    make_history(folder, STEPS)
    return folder


@pytest.fixture(scope="module")
def clone(repository: Path) -> Clone:
    return Clone(repository)


def subjects(clone: Clone, what: str, revision: str | None = None) -> list[str]:
    return [event.subject for event, _ in read_lines(clone, what, revision).changes]


def test_a_method_with_decorators_is_found_whole(clone: Clone) -> None:
    found = read_lines(clone, f"{FILE}:Worker.verify")
    assert found.ranges == ((14, 22),)
    assert [event.subject for event, _ in found.changes] == [
        *("rewritten", "the file moves", "inner (#7)", "a decorator", "worker (#1)")
    ]
    diffs = [diff for _, diff in found.changes]
    assert diffs[1] == ""
    assert diffs[3].splitlines() == [
        *("@@ -15,6 +15,6 @@", "     @staticmethod", "     @cached("),
        *("-        size=1,", "+        size=2,", "     )"),
        *("     async def verify(batch):", "         def inner(x):"),
    ]
    assert diffs[4].startswith("@@ -0,0 +14,10 @@\n+    @staticmethod\n")


def test_git_alone_finds_no_method_or_another(clone: Clone, repository: Path, tmp_path: Path) -> None:
    """The traps: without diff=python there is no such function; with it, it ends at the one within."""
    path = f"{FOLDER}/a.py"
    with pytest.raises(subprocess.CalledProcessError):
        git(repository, "log", "-s", "--format=%s", f"-L:verify:{path}", "HEAD~4")
    attributes = tmp_path / "attributes"
    attributes.write_text("*.py diff=python\n")
    told = git(
        repository, "-c", f"core.attributesFile={attributes}", "log", "-s", f"-L:verify:{path}", "HEAD~4", "--format=%s"
    )
    assert "inner" not in told.splitlines()
    assert subjects(clone, "a.py:verify", "HEAD~4") == ["inner (#7)", "a decorator", "worker (#1)"]


def test_a_user_s_drivers_and_attributes_change_nothing(
    clone: Clone, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_lines(clone, f"{FILE}:verify")
    (tmp_path / "attributes").write_text("*.py diff=python\n*.py binary\n")
    settings = {
        "core.attributesFile": str(tmp_path / "attributes"),
        "diff.python.xfuncname": "!.*",
        "diff.python.textconv": "x",
    }
    monkeypatch.setenv("GIT_CONFIG_COUNT", str(len(settings)))
    for n, (name, value) in enumerate(settings.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{n}", name)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{n}", value)
    assert read_lines(Clone(repository), f"{FILE}:verify") == before


def test_all_forms_of_names(clone: Clone) -> None:
    assert read_lines(clone, "a.py:Worker.tree", "HEAD~4").ranges == ((7, 9), (11, 13))
    assert read_lines(clone, "a.py:inner", "HEAD~4").place.name == "Worker.verify.inner"
    assert subjects(clone, "a.py:inner", "HEAD~4") == ["inner (#7)", "worker (#1)"]
    assert subjects(clone, f"{FOLDER}/a.py:build", "HEAD~4") == ["a decorator", "above and below it", "worker (#1)"]
    assert subjects(clone, "top.py:top") == ["at the top", "no Python"]
    assert subjects(clone, f"./sub/../{FILE}:build")[0] == "the file moves"


@pytest.mark.parametrize("revision", ["#7", "0.1.0", "v0.1.0"])
def test_a_pull_request_and_a_release_are_revisions(clone: Clone, revision: str) -> None:
    assert subjects(clone, "a.py:inner", revision) == ["inner (#7)", "worker (#1)"]


def test_what_is_not_there_is_told_with_what_is_near(clone: Clone) -> None:
    with pytest.raises(HistoryError, match=r"b c:1,2.py defines no Worker.verfy; there is Worker.verify"):
        read_lines(clone, f"{FILE}:Worker.verfy")
    with pytest.raises(
        HistoryError, match=r"no file a.py at main; it was there until 2025-01-03: --from [0-9a-f]+\^ looks"
    ):
        read_lines(clone, "a.py:build")
    with pytest.raises(HistoryError, match=r"no file nonesuch.py at HEAD"):
        read_lines(clone, "nonesuch.py:build", "HEAD")
    with pytest.raises(HistoryError, match=r"x.cpp is not Python"):
        read_lines(clone, "x.cpp:f")
    with pytest.raises(HistoryError, match=r"no file sub at main"):
        read_lines(clone, "sub:f")
    with pytest.raises(LacksError, match="lacks the revision nonesuch"):
        read_lines(clone, "a.py:build", "nonesuch")


def test_several_of_a_name_must_be_told_apart(tmp_path: Path) -> None:
    text = "class A:\n    def f(self): ...\n\n\nclass B:\n    def f(self): ...\n"
    make_history(tmp_path / "r", [Step("one", {f"{FOLDER}/a.py": text})])
    clone = Clone(tmp_path / "r")
    with pytest.raises(HistoryError, match=r"a.py defines several f: say which of A.f, B.f"):
        read_lines(clone, "a.py:f")
    assert read_lines(clone, "a.py:B.f").ranges == ((6, 6),)


@pytest.mark.parametrize("what", ["", "a.py", "a.py:", ":f", "a.py:.*", "a.py:-x", "a.py:f(", "a\n.py:f", "a.py:f:g h"])
def test_what_is_no_function_of_a_file_is_refused(clone: Clone, what: str) -> None:
    with pytest.raises(HistoryError, match=r"not FILE:NAME|not a name in Python"):
        read_lines(clone, what)


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["history", "lines", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_shows_the_newest_first(repository: Path) -> None:
    status, out, err = run(f"{FILE}:Worker.verify", "--clone", repository)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == [f"Worker.verify in {FOLDER}/{FILE}", lines[1]]
    assert lines[1].startswith("lines 14-22 at ")
    assert lines[1].endswith(": 5 commits")
    titles = [line for line in lines if line[:3] == "202"]
    assert [line.split("  ", 2)[2] for line in titles] == [
        "rewritten",
        "the file moves",
        "inner (#7)",
        "a decorator",
        "worker (#1)",
    ]
    assert f"moved: a.py -> {FILE}" in lines
    assert "-            return x + 1" in lines


def test_the_command_prints_json(repository: Path) -> None:
    status, out, _ = run("a.py:build", "--from", "HEAD~4", "--clone", repository, "--json")
    document = json.loads(out)
    assert status == 0
    assert document["place"] == {"path": f"{FOLDER}/a.py", "name": "build"}
    assert document["commit"] == git(repository, "rev-parse", "HEAD~4")
    assert "-def build(n):\n+def build(m):" in document["changes"][1]["diff"]


def test_the_command_refuses_in_one_line(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REFSPEC_CACHE", str(tmp_path / "none"))
    for status, arguments in (
        (2, ["a.py:f(", "--clone", repository]),
        (1, ["a.py:build", "--clone", repository]),
        (1, [f"{FILE}:build", "--clone", repository, "--from=-p"]),
        (1, [f"{FILE}:build"]),
    ):
        code, out, err = run(*arguments)
        assert (code, out, err.count("\n")) == (status, "", 1), err


def test_a_shallow_and_a_blobless_clone_say_so(repository: Path, tmp_path: Path) -> None:
    small_history.clone(repository, tmp_path / "s", "--depth=3")
    status, out, err = run(f"{FILE}:Worker.verify", "--clone", tmp_path / "s")
    assert status == 1
    assert "there already" in out
    assert "the clone is shallow" in err
    small_history.clone(repository, tmp_path / "b", "--filter=blob:none", "--bare")
    status, out, err = run(f"{FILE}:Worker.verify", "--clone", tmp_path / "b")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "refspec history clone" in err
