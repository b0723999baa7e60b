"""`refspec history log`: which commits are chosen, how they are counted, and what a clone cannot tell of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from small_history import FOLDER, START, Step, clone, counted_git, git, make_history
from typer.testing import CliRunner

from refspec.cli.main import app
from refspec.history import catalogue
from refspec.history.catalogue import Commit, FileChange
from refspec.history.log import Choice, by_month

ESCAPES = "Paint it \x1b[31mred\x07 (#4003)"
SEPARATORS = "--amend me | fix; a, b"
BODY = "0123456789abcdef0123456789abcdef01234567\nof two\x1ffields"
STEPS = [
    Step("Begin (#4001)", {f"{FOLDER}/a.py": "one\ntwo\nthree\n", "README.md": "r\n"}, tags=("v0.4.6",)),
    Step("Elsewhere (#4002)", {"README.md": "other\n"}),
    Step(ESCAPES, {f"{FOLDER}/c/deep.py": "x\n"}, zone="-0800"),
    Step("Move it (#4004)", {f"{FOLDER}/a.py": None, f"{FOLDER}/b.py": "one\ntwo\nthree\n"}, author="Bob <b@x>"),
    Step(SEPARATORS, {f"{FOLDER}/b.py": "one\n2\nthree\n"}, body=BODY, author="Robert <r@y>"),
    Step(b"caf\xe9", {f"{FOLDER}/caf\\351.py": "x\n"}),
    Step(b"th\xe9 vert", {f"{FOLDER}/b.py": "one\n2\n3\n"}, encoding="ISO-8859-1"),
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log") / "sglang"
    make_history(folder, STEPS)
    return folder


def run(*arguments: str | Path, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["history", "log", *map(str, arguments)])
    assert result.exit_code == status, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.stderr if status else result.stdout


def told(*arguments: str | Path, status: int = 0) -> Any:
    result = CliRunner().invoke(app, ["history", "log", "--json", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def subjects(*arguments: str | Path) -> list[str]:
    return [commit["subject"] for commit in told(*arguments)["commits"]]


def test_all_commits_of_the_folder_the_newest_first(repository: Path) -> None:
    document = told("--clone", repository)
    expected = git(repository, "log", "--format=%H", "--", FOLDER).splitlines()
    assert [commit["hash"] for commit in document["commits"]] == expected
    assert (document["found"], document["of"], document["main"]) == (6, 6, "main")
    first = document["commits"][-1]
    assert first["url"] == "https://github.com/sgl-project/sglang/pull/4001"
    assert first["author_date"].startswith("2024-12-30T07:30:00")
    assert (first["lines_added"], first["lines_deleted"]) == (3, 0)


def test_lines_are_those_of_git(repository: Path) -> None:
    for commit in told("--clone", repository)["commits"]:
        said = git(repository, "show", "-M", "--format=", "--numstat", commit["hash"], "--", FOLDER)
        numbers = [line.split("\t")[:2] for line in said.splitlines()]
        assert commit["lines_added"] == sum(int(added) for added, _ in numbers)
        assert commit["lines_deleted"] == sum(int(deleted) for _, deleted in numbers)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--since", "2025-01"], [3, 4, 5, 6]),
        (["--until", "2024"], [0, 2]),  # the third was written on 31 December, where its author lives
        (["--until", "2024", "--by", "committer"], [0]),
        (["--since", "2024-12-31", "--until", "2024-12-31"], [2]),
        (["--since", "2025-01-02", "--until", "2025-01"], [3, 4, 5, 6]),
        (["--pr", "4001", "--pr", "#4004"], [0, 3]),
        (["--pr", "4002"], []),
        (["--file", "a.py"], [0, 3]),
        (["--file", "b.py"], [3, 4, 6]),
        (["--file", f"{FOLDER}/a.py"], [0, 3]),
        (["--file", "deep.py"], [2]),
        (["--file", "c/"], [2]),
        (["--file", "[ab].py"], [0, 3, 4, 6]),
        (["--file", "README.md"], []),
        (["--text", "IT move"], [3]),
        (["--text", "| fix;"], [4]),
        (["-n", "2"], [5, 6]),
        (["--file", "b.py", "-n", "1", "--reverse"], [6]),
    ],
)
def test_filters(repository: Path, options: list[str], expected: list[int]) -> None:
    status = 1 if {"4002", "README.md"} & set(options) else 0  # what no commit knows is said
    found = [commit["hash"] for commit in told("--clone", repository, "--reverse", *options, status=status)["commits"]]
    every = git(repository, "log", "--reverse", "--format=%H").splitlines()
    assert [every.index(hash_) for hash_ in found] == expected


def test_both_sources_answer_alike() -> None:
    """The filters see commits, wherever these come from: a rename counts by both of its names in the catalogue too."""
    assert [commit["pr"] for commit in told("--catalogue", "--pr", "#26997")["commits"]] == [26997]
    found = told("--catalogue", "--file", "eagle_utils.py", "--since", "2025-10-01", "--until", "2025-10-01")
    assert 10735 in [commit["pr"] for commit in found["commits"]]
    assert told("--catalogue", "--text", "RELAND tree")["commits"][0]["pr"] == 26997
    assert told("--catalogue")["found"] == len(catalogue.commits()) == 637


def test_a_file_that_crossed_the_border_is_found_by_its_name_outside() -> None:
    inside = FileChange("A", f"{FOLDER}/x.py")
    crossing = FileChange("R", f"{FOLDER}/x.py", "python/sglang/x.py")
    commit = Commit("0" * 40, "", "", None, "", (inside,), crossings=(crossing,))
    assert Choice(files=("python/sglang/x.py",)).takes(commit)
    assert not Choice(files=("y.py",)).takes(commit)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--since", "2026-13"], "a day, month or year is meant, as 2026-06-01, 2026-06 or 2026, not '2026-13'"),
        (["--until", "2026-02-30"], "not '2026-02-30'"),
        (["--since", "yesterday"], "not 'yesterday'"),
        (["--since", "2026-07", "--until", "2026-06-30"], "2026-07 is after 2026-06-30"),
        (["--pr", "main"], "--pr takes the number of a pull request, as 26997, not 'main'"),
        (["--path", "../x"], "--path: not a path in SGLang's repository"),
        (["--path", "/etc"], "--path: not a path in SGLang's repository"),
        (["--authors", "--by-month"], "one of them at a time"),
        (["--lang", "fr"], "--lang takes zh or en, not 'fr'"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: list[str], complaint: str) -> None:
    assert complaint in run("--catalogue", *options, status=2)


def test_a_time_may_end_where_it_begins() -> None:
    assert Choice("2026-06", "2026-06-10").since == "2026-06"
    assert Choice("2026", "2026").until == "2026"


def test_the_catalogue_says_that_others_need_a_clone() -> None:
    assert "who wrote a commit needs a clone of SGLang" in run("--catalogue", "--authors", status=1)
    assert "another folder needs a clone of SGLang" in run("--catalogue", "--path", "python", status=1)


def test_another_folder(repository: Path) -> None:
    assert subjects("--clone", repository, "--path", "README.md") == ["Elsewhere (#4002)", "Begin (#4001)"]
    assert subjects("--clone", repository, "--path", f"{FOLDER}/c/", "--file", "deep.py") == [ESCAPES]
    assert told("--clone", repository, "--path", ".")["of"] == 7
    assert told("--clone", repository, "--path", "--all", status=1)["of"] == 0, "a path is no option"


def test_GIT_08_two_identities_are_one_author_where_mailmap_says_so(repository: Path, tmp_path: Path) -> None:
    def authors(folder: Path) -> dict[str, int]:
        return {row["author"]: row["commits"] for row in told("--clone", folder, "--authors")["authors"]}

    without = authors(repository)
    assert (without["Bob"], without["Robert"]) == (1, 1)
    mapped = tmp_path / "mapped"
    make_history(mapped, [*STEPS, Step("Map", {".mailmap": "Bob <b@x> Robert <r@y>\n"})])
    bare = clone(mapped, tmp_path / "bare", "--bare")
    for folder in (mapped, bare, mapped / FOLDER):  # git itself finds the file in the first two only
        assert authors(folder)["Bob"] == 2
        assert "Robert" not in authors(folder)
    screen = run("--clone", mapped, "--authors")
    assert [line.split() for line in screen.splitlines()[:2]] == [["4", "a"], ["2", "Bob"]]


def test_GIT_08_a_mailmap_that_the_clone_lacks_is_told(tmp_path: Path) -> None:
    make_history(tmp_path / "mapped", [*STEPS, Step("Map", {".mailmap": "Bob <b@x> Robert <r@y>\n"})])
    blobless = clone(tmp_path / "mapped", tmp_path / "blobless", "--bare", "--filter=blob:none")
    assert "lacks the contents of .mailmap" in run("--clone", blobless, "--authors", status=1)
    assert told("--clone", blobless)["found"] == 6


def test_GIT_09_bytes_that_are_no_utf8(repository: Path) -> None:
    found = subjects("--clone", repository, "--reverse")
    assert found[4:] == ["caf�", "thé vert"]
    assert told("--clone", repository, "--file", "caf*.py")["commits"][0]["files"][0]["path"] == f"{FOLDER}/caf�.py"


def test_GIT_10_separators_and_dashes_in_a_title(repository: Path) -> None:
    assert subjects("--clone", repository, "--reverse")[3] == SEPARATORS
    assert told("--clone", repository)["of"] == 6
    assert SEPARATORS in run("--clone", repository)


def test_escapes_in_a_title_do_nothing_to_the_terminal(repository: Path) -> None:
    screen = run("--clone", repository)
    assert "Paint it \\x1b[31mred\\x07" in screen
    assert not {"\x1b", "\x07"} & set(screen)
    assert subjects("--clone", repository, "--pr", "4003") == [ESCAPES]


def test_GIT_12_settings_of_the_users_change_nothing(repository: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    shutil.copytree(repository, trap)
    (tmp_path / "map").write_text("Bob <b@x> Robert <r@y>\n")
    for name, value in {
        "color.ui": "always",
        "log.showSignature": "true",
        "format.pretty": "oneline",
        "log.date": "relative",
        "log.abbrevCommit": "true",
        "diff.noprefix": "true",
        "diff.renames": "false",
        "core.quotePath": "true",
        "i18n.logOutputEncoding": "ISO-8859-1",
        "mailmap.file": str(tmp_path / "map"),
    }.items():
        git(trap, "config", name, value)
    assert told("--clone", trap)["commits"] == told("--clone", repository)["commits"]
    assert told("--clone", trap, "--authors")["authors"] == told("--clone", repository, "--authors")["authors"]


def test_GIT_01_the_boundary_of_a_shallow_clone_is_not_credited(repository: Path, tmp_path: Path) -> None:
    shallow = clone(repository, tmp_path / "shallow", "--depth", "2")
    document = told("--clone", shallow)
    assert (document["shallow"], document["found"]) == (True, 2)
    newest, boundary = document["commits"]
    assert (newest["boundary"], newest["lines_added"]) == (False, 1)
    assert boundary["boundary"]
    assert (boundary["files"], boundary["lines_added"]) == ([], None)
    screen = run("--clone", shallow)
    assert "(boundary) caf�" in screen
    assert "it is shallow: what came before is not in it; what a boundary commit changed is not known" in screen
    assert told("--clone", shallow, "--by-month")["months"] == {"2025-01": 1}


def test_a_blobless_clone_has_dashes_and_says_why(repository: Path, tmp_path: Path) -> None:
    blobless = clone(repository, tmp_path / "blobless", "--bare", "--filter=blob:none")
    document = told("--clone", blobless)
    assert [commit["lines_added"] for commit in document["commits"]] == [None] * 6
    assert document["commits"][3]["files"] == [{"status": "R", "path": f"{FOLDER}/b.py", "old_path": f"{FOLDER}/a.py"}]
    assert "where lines are a dash it lacks contents of files" in " ".join(run("--clone", blobless).split())


def test_a_treeless_clone_is_told_what_it_lacks(repository: Path, tmp_path: Path) -> None:
    treeless = clone(repository, tmp_path / "treeless", "--bare", "--filter=tree:0")
    complaint = run("--clone", treeless, status=1)
    assert "lacks lists of files that are needed" in complaint
    assert "--catalogue asks the embedded catalogue" in complaint


def test_months_without_commits_are_counted_too(repository: Path) -> None:
    dates = ("2024-11-30", "2025-02-01", "2025-02-02")
    commits = [Commit("0" * 40, f"{date}T00:00:00Z", f"{date}T00:00:00Z", None, "") for date in dates]
    assert by_month(commits) == {"2024-11": 1, "2024-12": 0, "2025-01": 0, "2025-02": 2}
    assert by_month([]) == {}
    assert told("--clone", repository, "--by-month")["months"] == {"2024-12": 2, "2025-01": 4}


def test_months_read_as_the_script_prints_them(repository: Path) -> None:
    """scripts/spec-timeline.sh has the same lines, with bars of #."""
    tip = git(repository, "rev-parse", "main")[:10]
    english = run("--clone", repository, "--by-month").replace("█", "#").splitlines()
    assert english[:4] == [
        f"{FOLDER} on main ({tip}), commits per month",
        "2024-12     2  ##",
        "2025-01     4  ####",
        "total       6",
    ]
    chinese = run("--clone", repository, "--by-month", "--lang", "zh").splitlines()
    assert (chinese[0], chinese[3]) == (f"{FOLDER}，main（{tip}）上每月的提交数", "合计        6")
    assert chinese[4].startswith("6 个提交，来自克隆 ")


def test_a_line_of_the_table(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = git(repository, "log", "--reverse", "--format=%H").splitlines()
    lines = run("--clone", repository, "--reverse").splitlines()
    assert lines[0] == f"2024-12-30  {hashes[0][:10]}  #4001  +3 -0  Begin"
    assert lines[1] == f"2024-12-31  {hashes[2][:10]}  #4003  +1 -0  Paint it \\x1b[31mred\\x07"
    assert lines[3] == f"2025-01-03  {hashes[4][:10]}         +1 -1  {SEPARATORS}"
    assert lines[-1] == f"6 commits on main up to {hashes[-1][:10]}, from the clone {repository}"
    monkeypatch.setenv("COLUMNS", "40")
    narrow = run("--clone", repository, "--pr", "4001").splitlines()
    assert narrow[:2] == [f"2024-12-30 {hashes[0][:10]} #4001 +3 -0", "  Begin"]


@pytest.mark.parametrize("columns", [40, 80])
def test_the_table_fits(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("--catalogue").splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) > 637 * (2 if columns == 40 else 1)


def test_into_a_pipe_nothing_is_cut() -> None:
    longest = max(catalogue.commits(), key=lambda commit: len(commit.subject))
    assert longest.subject.removesuffix(f" (#{longest.pr})") in run("--catalogue", "--pr", str(longest.pr))


def test_pull_requests_are_links_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "https://github.com/sgl-project/sglang/pull/26997\x1b\\" in run("--catalogue", "--pr", "26997")


def test_the_number_of_git_processes_does_not_grow(repository: Path, tmp_path: Path) -> None:
    many = tmp_path / "many"
    make_history(many, [*STEPS, *(Step(f"n{n}", {f"{FOLDER}/n.py": f"{n}\n"}) for n in range(60))], bare=True)
    calls = []
    for folder, found in ((repository, 6), (many, 66)):
        (tmp_path / str(found)).mkdir()
        with counted_git(tmp_path / str(found)) as started:
            assert told("--clone", folder)["found"] == found
        calls.append(len(started))
    assert calls[0] == calls[1] <= 8


def test_nothing_is_written_into_the_clone(repository: Path) -> None:
    def state() -> list[tuple[str, int]]:
        return sorted((str(path), os.stat(path).st_mtime_ns) for path in repository.rglob("*"))

    before = state()
    run("--clone", repository)
    run("--clone", repository, "--authors")
    assert state() == before


def test_long_stretches_of_empty_months(tmp_path: Path) -> None:
    """A commit with a wrong clock puts centuries in between; they are one line, in the script as well."""
    steps = [Step("One", {f"{FOLDER}/a.py": "1\n"}, seconds=-START), Step("Two", {f"{FOLDER}/a.py": "2\n"}, seconds=0)]
    make_history(tmp_path / "r", steps)
    for language, gap in (
        ("en", "1970-02 to 2024-11: no commit in 658 months"),
        ("zh", "1970-02 至 2024-11：658 个月没有提交"),
    ):
        done = CliRunner().invoke(
            app, ["history", "log", "--by-month", "--lang", language, "--clone", str(tmp_path / "r")]
        )
        assert done.stdout.splitlines()[1:4] == ["1970-01     1  █", gap, "2024-12     1  █"]
        script = Path(__file__).parent.parent / "scripts/spec-timeline.sh"
        said = subprocess.run([script, "--lang", language, tmp_path / "r"], capture_output=True, encoding="utf-8")
        assert said.stdout.splitlines()[1:4] == ["1970-01     1  #", gap, "2024-12     1  #"]
