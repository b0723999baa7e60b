"""`refspec history dir`: the folder at releases and revisions, whatever kind of clone there is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_history import FOLDER, Step, clone, counted_git, git, make_history
from typer.testing import CliRunner

from refspec.cli.main import app
from refspec.history import catalogue
from refspec.history.clone import Clone
from refspec.history.directory import Snapshot, growth_at, growth_of_releases
from refspec.history.sources import Source

SCRIPT = Path(__file__).parents[1] / "scripts" / "spec-dir.sh"
OTHERS = ["other files, not counted:"]
BODY = "".join(f"line {n} of a file that is renamed later\n" for n in range(30))

STEPS = [
    Step("before", {"README.md": "x"}, tags=("v0.4.0",)),
    Step(
        "first",
        {
            f"{FOLDER}/info.py": BODY,
            f"{FOLDER}/worker_notes.txt": "no Python\n",
            f"{FOLDER}/workers/tree.py": "1\n2\n3",
            "python/sglang/srt/other/worker.py": "not here\n",
        },
        tags=("v0.4.6", "nonsense", "v1"),
    ),
    Step(
        "second",
        {
            f"{FOLDER}/info.py": None,
            f"{FOLDER}/spec_info.py": BODY + "one more\n",
            f"{FOLDER}/eagle_worker.py": "a\n" * 10,
            f"{FOLDER}/deep/er/base_worker_x.py": "b\n",
        },
        tags=("v0.5.0rc0",),
    ),
    Step("third (#77)", {f"{FOLDER}/eagle_worker.py": "a\n" * 12}, tags=("v0.5.0",)),
    Step("fourth", {f"{FOLDER}/workers/tree.py": None}, tags=("v0.5.10",), zone="-0800"),
    Step("fifth", {f"{FOLDER}/ev\\033il_worker.py": "x\n"}),
]


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


def run(*arguments: str | Path, columns: int | None = None) -> Outcome:
    environment = {"COLUMNS": str(columns)} if columns else {}
    result = CliRunner().invoke(app, ["history", "dir", *map(str, arguments)], env=environment)
    return Outcome(result.exit_code, result.stdout, result.stderr)


def document(*arguments: str | Path) -> dict[str, Any]:
    outcome = run("--json", *arguments)
    found: dict[str, Any] = json.loads(outcome.out)
    return found


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which v0.4.6 is a branch too, of another commit, and all refs are packed."""
    folder = tmp_path_factory.mktemp("full") / "sglang"
    hashes = make_history(folder, STEPS)
    git(folder, "branch", "v0.4.6", hashes[-1])
    git(folder, "pack-refs", "--all")
    assert not list((folder / ".git/refs/tags").iterdir())
    return folder


def of(snapshots: tuple[Snapshot, ...], source: str) -> list[Snapshot]:
    return [snapshot for snapshot in snapshots if snapshot.source == source]


# --- what is counted


def test_releases_of_the_clone_in_the_order_of_their_versions(full: Path) -> None:
    found = of(growth_of_releases(Source(Clone(full), "")).snapshots, "clone")
    assert [row.name for row in found] == ["v0.4.6", "v0.5.0rc0", "v0.5.0", "v0.5.10"]
    assert [len(row.python_files) for row in found] == [2, 4, 4, 3]
    assert [len(row.workers) for row in found] == [0, 2, 2, 2], "py alone, and not for the folder workers/"
    assert [row.lines for row in found] == [33, 45, 47, 44]
    assert list(found[1].files) == [
        "deep/er/base_worker_x.py",
        "eagle_worker.py",
        "spec_info.py",
        "worker_notes.txt",
        "workers/tree.py",
    ]


def test_files_that_came_went_and_were_renamed(full: Path) -> None:
    first, second, third, fourth = growth_at(
        Source(Clone(full), ""), ["0.4.6", "0.5.0rc0", "0.5.0", "v0.5.10"]
    ).snapshots
    assert (first.came, first.went, first.renamed) == (None, None, None)
    assert second.came == ("deep/er/base_worker_x.py", "eagle_worker.py")
    assert (second.went, second.renamed) == ((), {"info.py": "spec_info.py"})
    assert not third.changed
    assert (fourth.came, fourth.went, fourth.renamed) == ((), ("workers/tree.py",), {})


def test_a_number_is_a_pull_request(full: Path) -> None:
    found = growth_at(Source(Clone(full), ""), ["#77", "0.5.0", "#78"])
    assert [row.name for row in found.snapshots] == ["#77", "v0.5.0"]
    assert found.snapshots[0].commit == found.snapshots[1].commit
    assert found.lacking == ("#78",)


def test_python_files_are_counted_and_others_named_apart(tmp_path: Path) -> None:
    steps = [
        Step("one", {f"{FOLDER}/info.py": BODY, f"{FOLDER}/table.py": BODY.upper()}, tags=("v0.5.2",)),
        Step(
            "two",
            {
                f"{FOLDER}/spec_info.py": BODY,
                f"{FOLDER}/info.py": None,
                f"{FOLDER}/table.txt": BODY.upper(),
                f"{FOLDER}/table.py": None,
                f"{FOLDER}/cpp/trie.cpp": "1;\n",
                f"{FOLDER}/worker.py": "a\n",
            },
            tags=("v0.5.3",),
        ),
        Step("others alone", {f"{FOLDER}/cpp/trie.h": "2;\n"}, tags=("v0.5.4",)),
    ]
    make_history(tmp_path / "folder", steps)
    _, second, third = growth_at(Source(Clone(tmp_path / "folder"), ""), ["0.5.2", "0.5.3", "0.5.4"]).snapshots
    assert second.change() == (["worker.py"], ["table.py"], {"info.py": "spec_info.py"})
    assert second.change(python=False) == (["cpp/trie.cpp", "table.txt"], [], {})
    assert (third.came, third.changed) == (("cpp/trie.h",), False)
    assert third.lines == 31
    out = run("--clone", tmp_path / "folder", "--at", "0.5.2", "--at", "0.5.3").out
    names = ["+ worker.py", "- table.py", "~ info.py -> spec_info.py", *OTHERS, "+ cpp/trie.cpp", "+ table.txt"]
    assert "".join(f"            {name}\n" for name in names) in out
    assert out.endswith(
        "Files, workers and lines are of Python files.\n+ came, - went, ~ renamed, against the one before it.\n"
    )
    files = run("--clone", tmp_path / "folder", "--at", "0.5.4", "--files").out.splitlines()
    assert [line.strip() for line in files if "spec_info" in line or "trie" in line or "other" in line] == [
        *("30  spec_info.py", *OTHERS, "cpp/trie.cpp", "cpp/trie.h")
    ]


def test_revisions_in_any_order_and_twice_the_same_tree(full: Path) -> None:
    names = ["0.5.0rc0", "0.4.6", "HEAD~2", "v0.5.0", "0.4.0"]
    found = growth_at(Source(Clone(full), ""), names).snapshots
    assert [row.name for row in found] == ["v0.5.0rc0", "v0.4.6", "HEAD~2", "v0.5.0", "v0.4.0"]
    assert found[1].renamed == {"spec_info.py": "info.py"}
    assert found[2].renamed == {"info.py": "spec_info.py"}
    assert (found[3].came, found[3].went, found[3].renamed) == ((), (), {})
    assert (found[4].files, len(found[4].went or ())) == ({}, 5)


def test_a_version_is_the_tag_and_not_the_branch_of_that_name(full: Path) -> None:
    (row,) = growth_at(Source(Clone(full), ""), ["v0.4.6"]).snapshots
    assert row.commit == git(full, "rev-parse", "refs/tags/v0.4.6")
    assert row.commit != git(full, "rev-parse", "refs/heads/v0.4.6")


def test_a_tag_that_is_annotated_broken_or_of_no_commit(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    hashes = make_history(folder, STEPS[:3], bare=True)
    git(folder, "tag", "-a", "-m", "annotated", "v0.4.7", hashes[1])
    git(folder, "tag", "v0.4.8", f"{hashes[1]}:{FOLDER}")
    (folder / "refs/tags/v0.4.9").write_text("1" * 40 + "\n")
    found = of(growth_of_releases(Source(Clone(folder), "")).snapshots, "clone")
    assert [(row.name, row.commit) for row in found] == [
        ("v0.4.6", hashes[1]),
        ("v0.4.7", hashes[1]),
        ("v0.5.0rc0", hashes[2]),
    ]


def test_the_day_is_the_authors(full: Path) -> None:
    (row,) = growth_at(Source(Clone(full), ""), ["0.5.10"]).snapshots
    assert row.date == git(full, "log", "-1", "--format=%ad", "--date=short", "v0.5.10")
    assert row.date != git(full, "log", "-1", "--format=%cd", "--date=short", "v0.5.10"), "the trap is set"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_what_spec_dir_says_is_said_in_the_same_words(full: Path, language: str) -> None:
    last = git(full, "rev-parse", "HEAD~1")[:10]
    said = subprocess.run(
        ["bash", SCRIPT, "--lang", language, full],
        env={"PATH": os.environ["PATH"], "REF": last},
        capture_output=True,
        text=True,
        check=True,
    )
    outcome = run("--clone", full, "--lang", language, "--at", "0.4.6", "--at", "v0.5.0rc0", "--at", last)
    assert [line for line in outcome.out.splitlines() if not line.startswith(" ")][:3] == said.stdout.splitlines()


@pytest.mark.parametrize(
    ("language", "words"),
    [("en", "this clone lacks the commit 29f6d408c0"), ("zh", "这个克隆里没有提交 29f6d408c0")],
)
def test_what_the_clone_lacks_is_said_in_the_same_words(full: Path, language: str, words: str) -> None:
    said = subprocess.run(
        ["bash", SCRIPT, "--lang", language, full],
        env={"PATH": os.environ["PATH"], "REF": "29f6d408c0"},
        capture_output=True,
        text=True,
        check=False,
    )
    outcome = run("--clone", full, "--lang", language, "--at", "29f6d408c0", "--at", "0.4.6")
    assert words in said.stderr
    assert (outcome.status, outcome.err) == (1, f"refspec: {words}\n")
    assert outcome.out.startswith("v0.4.6 "), "the rest is printed"


# --- kinds of clones


@pytest.fixture(scope="module")
def clones(full: Path) -> dict[str, Path]:
    base = full.parent
    return {
        "blobless": clone(full, base / "blobless", "--bare", "--filter=blob:none"),
        "treeless": clone(full, base / "treeless", "--bare", "--filter=tree:0"),
        "tagless": clone(full, base / "tagless", "--bare", "--no-tags"),
        "shallow": clone(full, base / "shallow", "--bare", "--depth=1"),
    }


def test_GIT_04_without_tags_that_is_said_and_no_version_is_made_up(clones: dict[str, Path]) -> None:
    outcome = run("--clone", clones["tagless"], "--releases")
    assert "This clone has no tags of releases" in outcome.out
    assert outcome.status == 0
    assert {row["source"] for row in document("--clone", clones["tagless"], "--releases")["snapshots"]} == {
        "catalogue",
        "wheel",
    }
    head = git(clones["tagless"], "rev-parse", "HEAD")
    outcome = run("--clone", clones["tagless"], "--at", "HEAD")
    assert outcome.out.startswith("HEAD ")
    assert head[:10] in outcome.out
    assert not re.search(r"v\d+\.\d", outcome.out)
    outcome = run("--clone", clones["tagless"], "--at", "9.9.9")
    assert (outcome.status, outcome.out.strip()) == (1, "")
    assert "this clone lacks the tag v9.9.9 (git fetch --tags https://github.com/sgl-project/sglang" in outcome.err


def test_without_contents_lines_are_unknown_and_the_rest_is_not(full: Path, clones: dict[str, Path]) -> None:
    found = document("--clone", clones["blobless"], "--at", "0.4.6", "--at", "0.5.0")
    whole = document("--clone", full, "--at", "0.4.6", "--at", "0.5.0")
    assert [row["lines"] for row in found["snapshots"]] == [None, None]
    for key in ("python_files", "workers", "commit", "date"):
        assert [row[key] for row in found["snapshots"]] == [row[key] for row in whole["snapshots"]]
    changed = found["snapshots"][1]
    assert (changed["renamed"], changed["went"]) == ({}, ["info.py"]), "a rename with a change cannot be known"
    outcome = run("--clone", clones["blobless"], "--at", "0.4.6")
    assert (outcome.status, "- lines" in outcome.out) == (0, True)
    assert "Lines are not known where this clone lacks the contents." in outcome.out


def test_without_lists_of_files_the_catalogue_answers_or_nobody(clones: dict[str, Path]) -> None:
    found = document("--clone", clones["treeless"], "--at", "0.4.5", "--at", "HEAD")
    assert [(row["name"], row["source"], row["python_files"]) for row in found["snapshots"]] == [
        ("v0.4.5", "catalogue", 5)
    ]
    assert (found["lacking"], found["without_files"]) == (["HEAD"], ["HEAD"])
    outcome = run("--clone", clones["treeless"], "--at", "HEAD")
    assert (outcome.status, outcome.out) == (1, "")
    assert "this clone has HEAD but not the list of its files (was it made with --filter=tree:0?)" in outcome.err
    assert run("--clone", clones["treeless"], "--releases").status == 0


def test_a_shallow_clone_says_what_would_bring_the_rest(clones: dict[str, Path]) -> None:
    outcome = run("--clone", clones["shallow"], "--at", "HEAD~1", "--at", "HEAD")
    assert outcome.err == (
        "refspec: this clone lacks the commit HEAD~1 (it is shallow: git fetch --unshallow brings the rest)\n"
    )
    assert outcome.out.startswith("HEAD ")


def test_a_clone_of_sha256(tmp_path: Path) -> None:
    make_history(tmp_path / "c", STEPS[:3], object_format="sha256", bare=True)
    found = document("--clone", tmp_path / "c", "--at", "0.4.6", "--at", "0.5.0rc0")["snapshots"]
    assert [(row["python_files"], row["lines"]) for row in found] == [(2, 33), (4, 45)]
    assert found[1]["renamed"] == {"info.py": "spec_info.py"}


def test_the_number_of_git_processes_does_not_depend_on_that_of_the_releases(tmp_path: Path) -> None:
    counts = []
    for number in (2, 40):
        steps = [
            Step(f"{n}", {f"{FOLDER}/f{n}.py": f"{n}\n", f"{FOLDER}/f{n - 1}.py": None}, tags=(f"v7.0.{n}",))
            for n in range(1, number + 1)
        ]
        steps[0].files.pop(f"{FOLDER}/f0.py")
        folder = tmp_path / str(number)
        make_history(folder, steps, bare=True)
        with counted_git(folder) as calls:
            outcome = run("--clone", folder, "--releases")
        assert outcome.out.count("\nv7.0.") == number
        with counted_git(folder / "objects") as more:
            run("--clone", folder, *(f"--at=7.0.{n}" for n in range(1, number + 1)))
        counts.append((len(calls), len(more)))
    assert counts[0] == counts[1]


# --- without a clone


def test_the_catalogue_alone_has_every_release_with_the_folder_and_the_wheels() -> None:
    growth = growth_of_releases(Source(None, ""))
    held = [release for release in catalogue.releases() if release.files]
    wheels = [version for version in catalogue.wheels() if version > "0.5.18" and len(version) == 6]
    assert len(growth.snapshots) == len(held) + len(wheels) == 92 + 5
    assert [row.name for row in of(growth.snapshots, "wheel")] == [f"v{version}" for version in wheels]
    assert [row.name for row in of(growth.snapshots, "catalogue")] == [f"v{release.version}" for release in held]
    by_name = {row.name: row for row in growth.snapshots}
    assert (by_name["v0.4.6"].lines, len(by_name["v0.4.6"].python_files)) == (2112, 5)
    assert by_name["v0.5.3rc2"].renamed == {"eagle_utils.py": "eagle_info.py"}
    assert "spec_tp_sync.py" in (by_name["v0.5.19"].came or ())


def test_by_default_only_releases_are_shown_that_changed_the_set_of_files() -> None:
    shown = document("--catalogue")["snapshots"]
    every = document("--catalogue", "--releases")["snapshots"]
    assert 20 < len(shown) < 40 < len(every)
    assert shown == [row for n, row in enumerate(every) if not n or row["came"] or row["went"] or row["renamed"]]


def test_a_revision_of_the_catalogue_and_one_that_it_lacks() -> None:
    assert "no release" not in run("--catalogue", "--at", "84022c0e56").out
    outcome = run("--catalogue", "--at", "main", "--at", "84022c0e56", "--at", "0.5.23")
    assert outcome.status == 1
    assert outcome.err.startswith("refspec: the catalogue lacks main, and there is no clone (refspec history clone")
    assert "  5 files, 1 with worker in its name: eagle_worker\n" in outcome.out
    assert "v0.5.23      66 files, 11 with worker in their names: " in outcome.out
    assert "w: read from the published wheel" in outcome.out


# --- how it looks


def test_no_line_is_wider_than_the_terminal() -> None:
    for columns in (40, 80):
        for arguments in ([], ["--releases"], ["--at", "0.4.6", "--at", "0.5.18"]):
            lines = run("--catalogue", *arguments, columns=columns).out.splitlines()
            wide = [line for line in lines if len(line) > columns and " " in line.strip(" +-~")]
            assert not wide
    assert any("█" in line for line in run("--catalogue", columns=80).out.splitlines())


def test_chinese_columns_stand_under_their_headings() -> None:
    head, first, *_ = run("--catalogue", "--lang", "zh", columns=80).out.splitlines()
    cells = sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in head.partition("行数")[0]) + 4
    assert first[:cells].endswith(" 19")
    assert "改变了文件集合的版本" in run("--catalogue", "--lang", "zh").out


def test_files_are_listed_with_their_lines(full: Path) -> None:
    out = run("--clone", full, "--at", "0.5.0", "--files").out.splitlines()
    assert "                12  eagle_worker.py" in out
    newest = run("--catalogue", "--files").out
    assert newest.startswith("v0.5.23 ")
    assert newest.count("  eagle_worker_v2.py\n") == 1


def test_a_name_with_an_escape_does_nothing_to_the_terminal(full: Path) -> None:
    outcome = run("--clone", full, "--at", "0.5.10", "--at", "main")
    assert "\x1b" not in outcome.out
    assert "+ ev\\x1bil_worker.py" in outcome.out
    assert "ev\x1bil_worker.py" in document("--clone", full, "--at", "main")["snapshots"][0]["files"]


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (["--at=-x"], 1, "a revision cannot begin with '-': -x"),
        (["--at="], 1, "not a revision: ''"),
        (["--releases", "--files"], 2, "--releases goes with neither --at nor --files"),
        (["--lang", "de"], 2, "--lang takes zh or en, not 'de'"),
    ],
)
def test_what_cannot_be_asked(full: Path, arguments: list[str], status: int, complaint: str) -> None:
    outcome = run("--clone", full, *arguments)
    assert (outcome.status, outcome.err, outcome.out) == (status, f"refspec: {complaint}\n", "")


def test_bytes_that_are_no_text_become_replacement_marks(tmp_path: Path) -> None:
    make_history(
        tmp_path / "r", [Step("a", {f"{FOLDER}/a.py": "x\n"}), Step("b", {rf"{FOLDER}/caf\351.py": "x = 1\n"})]
    )
    (row,) = document("--at", "HEAD", "--clone", tmp_path / "r")["snapshots"]
    assert list(row["files"]) == ["a.py", "caf�.py"]
    told = CliRunner().invoke(app, ["history", "moved", "HEAD", "--clone", str(tmp_path / "r"), "--json"])
    assert json.loads(told.stdout)["files"] == [f"{FOLDER}/caf�.py"]
    assert "\\udc" not in told.stdout
