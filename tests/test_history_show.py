"""`refspec history show`, `diff` and `reland`: commits, what they changed, and what a clone cannot tell of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_history import FOLDER, Step, clone, counted_git, git, make_history
from typer.testing import CliRunner

from refspec.cli.main import app
from refspec.history import catalogue, patches
from refspec.history.catalogue import Commit
from refspec.history.clone import Clone
from refspec.history.patches import compare
from refspec.history.reland import tries

LONG_AGO = -315_000_000  # seconds; before all releases that the catalogue knows
BODY = "0123456789abcdef0123456789abcdef01234567\nof two\x1ffields | \x1b[2J\n\n--end"
OLD = "class Worker:\n    def draft(self):\n        return 1\n\n    def verify(self):\n        return 2\n"
TRIED = OLD.replace("return 1", "steps = 3\n        return steps")
TOP = "import os\nimport sys\n\n"
LANDED = TOP + TRIED.replace("return 2", "if self.idle:\n            return 0\n        return 2")
HOOK, HELPER = f"{FOLDER}/hook.py", f"{FOLDER}/ops/helper.py"

STEPS = [
    Step("Begin (#4001)", {f"{FOLDER}/w.py": OLD, HOOK: "a\nb\nc\n", "README.md": "r\n"}, tags=("v0.4.6",)),
    Step("Try it (#5001)", {f"{FOLDER}/w.py": TRIED, HOOK: "a\nB\nc\n"}),
    Step('Revert "Try it" (#5002)', {f"{FOLDER}/w.py": OLD, HOOK: "a\nb\nc\n"}),
    # The base moves on: lines on top of one file, the other one goes elsewhere.
    Step("Tidy (#5004)", {f"{FOLDER}/w.py": TOP + OLD, HOOK: None, HELPER: "a\nb\nc\n"}, tags=("v0.4.7rc1",)),
    Step(
        "Reland try it (#5001) (#5003)",
        {f"{FOLDER}/w.py": LANDED, HELPER: "a\nB\nc\n", "pool.py": "def move():\n    pass\n"},
        tags=("v0.4.7", "w-tag"),
    ),
    Step("--amend me | fix; a, b", {f"{FOLDER}/odd.txt": "diff --git a/x b/x\n@@ -1 +1 @@\n"}, body=BODY, zone="+0800"),
    Step(
        b"caf\xe9 \x1b[31m", {f"{FOLDER}/caf\\351.py": "x\n", f"{FOLDER}/odd.txt": "diff --git a/y b/y\n@@ -1 +1 @@\n"}
    ),
    Step(b"th\xe9 vert", {"README.md": "s\n"}, encoding="ISO-8859-1"),
    Step("Bring in (#5005)", {"README.md": None, f"{FOLDER}/README.md": "s\n", f"{FOLDER}/w.py": None}),
]
# As our own diffs have it: git takes the nearest function for a heading if it knows that a file is Python.
GIT = ("-c", f"core.attributesFile={Path(patches.__file__).parent / 'python.gitattributes'}", "-c", "core.abbrev=10")
MINUTES = (0, 100, 199, 300, 3000, 4000, 5000, 6000, 7000)
BEGIN, TRY, REVERT, TIDY, RELAND, ODD, CAFE, LATIN, BRING = range(9)


def history(steps: list[Step]) -> list[Step]:
    times = [*MINUTES, *range(8000, 8000 + len(steps))]
    return [
        Step(s.subject, s.files, s.tags, s.body, LONG_AGO + 60 * minute, s.zone, s.author, s.encoding)
        for s, minute in zip(steps, times, strict=False)
    ]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("show") / "sglang"
    make_history(folder, history(STEPS))
    return folder


@pytest.fixture(scope="module")
def commits(repository: Path) -> list[str]:
    return git(repository, "log", "--reverse", "--format=%H").splitlines()


def run(*arguments: str | Path, status: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["history", *map(str, arguments)])
    assert result.exit_code == status, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.stdout, result.stderr


def told(*arguments: str | Path, status: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", status=status)[0])


# --- show


def test_a_commit_with_its_files_and_its_diff(repository: Path, commits: list[str]) -> None:
    document = told("show", commits[RELAND], "--clone", repository)
    assert document["hash"] == commits[RELAND]
    assert (document["subject"], document["pr"]) == ("Reland try it (#5001) (#5003)", 5003)
    assert (document["kind"], document["parents"]) == ("plain", [commits[TIDY]])
    assert [(file["path"], file["status"]) for file in document["files"]] == [(HELPER, "M"), (f"{FOLDER}/w.py", "M")]
    assert document["files_elsewhere"] == 1
    assert (document["lines_added"], document["lines_deleted"]) == (5, 2)
    patch = "".join(file["patch"] for file in document["files"])
    expected = git(repository, *GIT, "show", "--format=", commits[RELAND], "--", FOLDER)
    assert patch == f"{expected}\n"
    screen, _ = run("show", commits[RELAND], "--clone", repository)
    assert patch in screen
    assert "https://github.com/sgl-project/sglang/pull/5003" in screen
    assert "1 file elsewhere (--all-files)" in screen


def test_options_leave_out_or_add(repository: Path, commits: list[str]) -> None:
    stat, _ = run("show", commits[RELAND], "--stat", "--clone", repository)
    assert "M  +4 -1  w.py" in stat
    assert "@@" not in stat
    bare, _ = run("show", commits[RELAND], "--no-diff", "--clone", repository)
    assert "M  w.py" in bare
    every = told("show", commits[RELAND], "--all-files", "--clone", repository)
    assert [file["path"] for file in every["files"]] == ["pool.py", HELPER, f"{FOLDER}/w.py"]
    assert every["files_elsewhere"] is None


def test_a_file_that_crossed_the_border_was_renamed(repository: Path) -> None:
    document = told("show", "5005", "--clone", repository)
    files = [(file["status"], file["old_path"], file["path"]) for file in document["files"]]
    assert files == [("R", "README.md", f"{FOLDER}/README.md"), ("D", None, f"{FOLDER}/w.py")]
    assert f"R  +0  -0  README.md -> {FOLDER}/README.md" in run("show", "5005", "--clone", repository)[0]


def test_the_first_commit_and_a_merge_say_what_they_are_compared_with(tmp_path: Path) -> None:
    folder = tmp_path / "merged"
    first, _ = make_history(folder, [Step("One", {f"{FOLDER}/a.py": "1\n"}), Step("Two", {f"{FOLDER}/b.py": "2\n"})])
    git(folder, "checkout", "-q", "-b", "side", first)
    (folder / FOLDER / "a.py").unlink()
    (folder / FOLDER / "a.py").symlink_to("b.py")
    git(folder, "commit", "-q", "-a", "-m", "Side")
    git(folder, "checkout", "-q", "main")
    git(folder, "merge", "-q", "--no-ff", "-m", "Merge it", "side")
    root = told("show", first, "--clone", folder)
    assert (root["kind"], root["parents"], root["lines_added"]) == ("root", [], 1)
    assert "the first of its line: compared with nothing" in run("show", first, "--clone", folder)[0]
    merge = told("show", "HEAD", "--clone", folder)
    assert (merge["kind"], len(merge["parents"])) == ("merge", 2)
    assert [(file["status"], file["path"]) for file in merge["files"]] == [("T", f"{FOLDER}/a.py")]
    assert merge["files"][0]["patch"].count("diff --git") == 2
    assert "a merge: compared with the first of its parents" in run("show", "HEAD", "--clone", folder)[0]
    two = told("diff", first, "HEAD", "--clone", folder)["files"]
    assert [(file["status"], file["patch"].count("diff --git")) for file in two] == [("T", 2), ("A", 1)]


def test_a_repository_of_sha256(tmp_path: Path) -> None:
    first, second = make_history(tmp_path / "new", history(STEPS[:2]), object_format="sha256", bare=True)
    root = told("show", first, "--clone", tmp_path / "new")
    assert (len(root["hash"]), root["kind"], len(root["files"])) == (64, "root", 2)
    assert told("diff", first, second, "--clone", tmp_path / "new")["lines_added"] == 3


@pytest.mark.parametrize("word", ["5003", "#5003", "v0.4.7", "0.4.7", "HEAD~4", "w-tag"])
def test_words_for_a_commit(repository: Path, commits: list[str], word: str) -> None:
    document = told("show", word, "--no-diff", "--clone", repository)
    assert document["hash"] == commits[RELAND]
    assert document["reading"] == ("PR" if "5003" in word else "release" if "0.4" in word else "revision")


def test_a_pull_request_goes_before_a_hash_that_begins_alike(tmp_path: Path) -> None:
    make_history(tmp_path / "r", [Step("One", {"a": "1\n"})])
    hash_ = git(tmp_path / "r", "rev-parse", "HEAD")
    for n in range(2000):  # until a hash begins with a number of four digits
        digits = hash_[:4]
        if digits.isdigit() and digits[0] != "0":
            break
        git(tmp_path / "r", "commit", "-q", "--amend", "-m", f"One {n}")
        hash_ = git(tmp_path / "r", "rev-parse", "HEAD")
    git(tmp_path / "r", "commit", "-q", "--allow-empty", "-m", f"Two (#{digits})")
    document = told("show", digits, "--clone", tmp_path / "r")
    assert (document["subject"], document["reading"]) == (f"Two (#{digits})", "PR")
    assert document["note"] == (
        f"{digits} is read as PR #{digits}; a commit's hash begins with it too: {hash_[:10]} names that one"
    )
    assert document["note"] in run("show", digits, "--clone", tmp_path / "r")[0]
    assert told("show", f"#{digits}", "--clone", tmp_path / "r")["note"] == ""
    assert told("show", hash_[:10], "--clone", tmp_path / "r")["hash"] == hash_


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("nosuch", "this clone lacks the revision nosuch"),
        ("#99999", "no commit of PR #99999 on main of this clone"),
        ("0.9.9", "this clone lacks the tag v0.9.9 (git fetch --tags https://github.com/sgl-project/sglang brings it)"),
        ("--output=x", "a revision cannot begin with '-': --output=x"),
        ("HEAD:README.md", "this clone lacks the revision HEAD:README.md"),
    ],
)
def test_words_for_nothing(repository: Path, word: str, complaint: str) -> None:
    assert complaint in run("show", "--clone", repository, "--", word, status=1)[1]
    assert complaint in run("diff", "--clone", repository, "--", "HEAD", word, status=1)[1]


def test_GIT_10_a_message_comes_back_as_it_is(repository: Path) -> None:
    document = told("show", "HEAD~3", "--clone", repository)
    assert (document["subject"], document["body"].rstrip("\n")) == ("--amend me | fix; a, b", BODY)
    assert document["author_date"].endswith("+08:00")
    screen, _ = run("show", "HEAD~3", "--clone", repository)
    assert "    of two\\x1ffields | \\x1b[2J\n\n    --end\n" in screen


def test_GIT_09_bytes_that_are_no_utf8(repository: Path) -> None:
    broken = told("show", "HEAD~2", "--clone", repository)
    assert broken["subject"].startswith("caf� ")
    assert [file["path"] for file in broken["files"]] == [f"{FOLDER}/caf�.py", f"{FOLDER}/odd.txt"]
    assert told("show", "HEAD~1", "--clone", repository)["subject"] == "thé vert"
    screen, _ = run("show", "HEAD~2", "--clone", repository)
    assert "\\x1b[31m" in screen
    assert "\x1b" not in screen


def test_lines_that_look_like_a_patch_are_lines(repository: Path, commits: list[str]) -> None:
    (file,) = (f for f in compare(Clone(repository), commits[ODD], commits[CAFE]).files if f.path.endswith("odd.txt"))
    (hunk,) = file.hunks()
    assert [(line.sign, line.number, line.text) for line in hunk.lines] == [
        ("-", 1, "diff --git a/x b/x"),
        ("+", 1, "diff --git a/y b/y"),
        (" ", 2, "@@ -1 +1 @@"),
    ]


def test_the_releases_that_held_it_first(repository: Path) -> None:
    assert told("show", "5001", "--clone", repository)["releases"] == {
        "first": "v0.4.7rc1",
        "final": "v0.4.7",
        "unknown": "",
    }
    assert "v0.4.7 was the first with it" in run("show", "5003", "--clone", repository)[0]
    assert told("show", "HEAD", "--clone", repository)["releases"]["first"] is None


def test_GIT_04_without_tags_no_release_is_made_up(repository: Path, tmp_path: Path) -> None:
    untagged = clone(repository, tmp_path / "untagged", "--no-tags")
    releases = told("show", "5001", "--clone", untagged)["releases"]
    assert releases["first"] is None
    assert "the clone lacks tags of releases" in releases["unknown"]


def test_a_release_whose_tag_is_not_there_keeps_the_answer_open(tmp_path: Path) -> None:
    """v0.4.6 holds it, but v0.4.4 and others, which the catalogue knows to lie between, may as well."""
    make_history(tmp_path / "r", [Step("One", seconds=0), Step("Two", tags=("v0.4.6",), seconds=9_000_000)])
    assert told("show", "HEAD~1", "--clone", tmp_path / "r")["releases"]["first"] is None


def test_GIT_01_the_boundary_of_a_shallow_clone_is_not_credited(repository: Path, tmp_path: Path) -> None:
    shallow = clone(repository, tmp_path / "shallow", "--depth", "2")
    document = told("show", "HEAD~1", "--clone", shallow, status=1)
    assert (document["kind"], document["files"], document["lines_added"]) == ("boundary", None, None)
    screen, complaint = run("show", "HEAD~1", "--clone", shallow, status=1)
    assert "thé vert" in screen
    assert "its parents are not in this clone, so what it changed is not known (it is shallow" in complaint
    assert told("show", "HEAD", "--clone", shallow)["lines_deleted"] > 0
    assert "not known: the clone is shallow" in run("show", "HEAD", "--clone", shallow)[0]


def test_a_blobless_clone_shows_files_without_lines(repository: Path, tmp_path: Path) -> None:
    blobless = clone(repository, tmp_path / "blobless", "--bare", "--filter=blob:none")
    screen, complaint = run("show", "5003", "--clone", blobless, status=1)
    assert "M  w.py" in screen
    assert "this clone lacks contents of these files, so the diff is not known" in complaint
    assert run("show", "5003", "--no-diff", "--clone", blobless)[1] == ""
    document = told("diff", "5001", "5003", "--clone", blobless, status=1)
    assert [file["patch"] for file in document["files"]] == [None] * len(document["files"])
    assert document["lines_added"] is None
    findings = told("reland", "5001", "5003", "--clone", blobless, status=1)
    assert (findings["files"], findings["inverse"]) == (None, "exact"), "hashes of files tell that much"


def test_a_treeless_clone_shows_the_message(repository: Path, tmp_path: Path) -> None:
    treeless = clone(repository, tmp_path / "treeless", "--bare", "--filter=tree:0")
    screen, complaint = run("show", "HEAD~4", "--clone", treeless, status=1)
    assert "Reland try it" in screen
    assert "lacks lists of files that are needed: it was made with --filter=tree:0" in complaint


# --- from the catalogue


def test_the_catalogue_shows_what_it_knows() -> None:
    document = told("show", "26997", "--catalogue")
    assert document["hash"].startswith("ac99794e64")
    assert (document["kind"], document["body"], document["lines_added"]) == ("unknown", None, 67)
    assert document["story"]["label"] == "23"
    screen, _ = run("show", "ac99794e64", "--catalogue")
    assert "M  triton_ops/eagle.py" in screen
    assert "From the catalogue; a clone has the message and the diff too." in screen
    assert told("show", "#2640", "--catalogue")["committer_date"] is None
    assert told("show", "0.5.18", "--catalogue")["hash"].startswith("71de97b264")


def test_the_catalogue_tells_a_release_where_it_is_certain() -> None:
    assert told("show", "2150", "--catalogue")["releases"]["first"] == "v0.4.1.post4"
    assert "not known" in told("show", "26997", "--catalogue")["releases"]["unknown"]


def test_a_file_that_crossed_the_border_is_listed_once() -> None:
    crossed = next(commit for commit in catalogue.commits() if commit.crossings)
    paths = [file["path"] for file in told("show", crossed.hash, "--catalogue")["files"]]
    assert len(paths) == len(set(paths))
    assert {change.path for change in crossed.crossings} <= set(paths)


def test_the_catalogue_says_what_it_does_not_know() -> None:
    assert "PR #1, which the catalogue does not know, needs a clone" in run("show", "#1", "--catalogue", status=1)[1]
    assert "HEAD, which the catalogue does not know, needs" in run("show", "HEAD", "--catalogue", status=1)[1]
    assert "begins several hashes" in _ambiguous()


def _ambiguous() -> str:
    prefixes = [commit.hash[:4] for commit in catalogue.commits()]
    twice = next(p for p in prefixes if prefixes.count(p) > 1 and not p.isdigit())
    return run("show", twice, "--catalogue", status=1)[1]


def test_a_clone_that_lacks_a_known_commit_falls_back_to_the_catalogue(repository: Path) -> None:
    screen, complaint = run("show", "26997", "--clone", repository, status=1)
    assert "triton_ops/eagle.py" in screen
    assert "this clone lacks that commit, so the catalogue answers" in complaint


# --- diff


def test_diff_is_that_of_git(repository: Path, commits: list[str]) -> None:
    document = told("diff", "0.4.6", "#5003", "--clone", repository)
    assert (document["from"]["hash"], document["to"]["hash"]) == (commits[BEGIN], commits[RELAND])
    expected = git(repository, *GIT, "diff", commits[BEGIN], commits[RELAND], "--", FOLDER).splitlines()
    assert [line for file in document["files"] for line in file["patch"].splitlines()] == expected
    screen, _ = run("diff", "0.4.6", "5003", "--clone", repository)
    assert screen.splitlines()[0] == (
        f"0.4.6 ({commits[BEGIN][:10]}) to 5003 ({commits[RELAND][:10]}), {FOLDER}: 2 files, +8 -2"
    )
    assert screen.endswith("\n".join(expected) + "\n")


def test_diff_of_other_paths(repository: Path) -> None:
    def files(*options: str) -> list[str]:
        return [file["path"] for file in told("diff", "v0.4.6", "w-tag", "--clone", repository, *options)["files"]]

    assert files("--path", "pool.py") == ["pool.py"]
    assert files("--path", "ops/") == [HELPER], "below the folder, since there is no such folder elsewhere"
    assert files("--path", "pool.py", "--path", f"{FOLDER}/w.py") == ["pool.py", f"{FOLDER}/w.py"]
    assert files("--path", ".") == ["pool.py", HELPER, f"{FOLDER}/w.py"]
    for path in ("*.py", "--stat"):  # a path is that path, and no option
        said = run("diff", "v0.4.6", "w-tag", "--path", path, "--clone", repository, status=1)[1]
        assert f"neither revision has {path}\n" in said
    assert "--path: not a path in" in run("diff", "a", "b", "--path", "../..", "--clone", repository, status=2)[1]


def test_diff_needs_a_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REFSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "a diff needs a clone of SGLang, and no clone was found" in run("diff", "a", "b", status=1)[1]


# --- reland


def test_what_the_first_try_had_not(repository: Path) -> None:
    """Line numbers have moved and one file went elsewhere: neither is a difference."""
    document = told("reland", "5001", "5003", "--clone", repository)
    assert (document["revert"]["pr"], document["inverse"]) == (5002, "exact")
    assert (document["minutes_to_revert"], document["minutes_to_reland"]) == (99, 2900)
    files = {file["path"]: file for file in document["files"]}
    assert list(files) == ["pool.py", HELPER, f"{FOLDER}/w.py"]
    assert (files[HELPER]["first_path"], files[HELPER]["shared_lines"], files[HELPER]["missing"]) == (HOOK, 2, [])
    assert (files["pool.py"]["first_path"], files["pool.py"]["missing"][0]["functions"]) == (None, ["move"])
    worker = files[f"{FOLDER}/w.py"]
    assert worker["shared_lines"] == 3
    assert [(part["functions"], part["lines_added"]) for part in worker["missing"]] == [(["Worker.verify"], 2)]
    assert [line["text"].strip() for line in worker["missing"][0]["lines"]] == ["if self.idle:", "return 0"]
    assert worker["dropped"] == {"lines_added": 0, "lines_deleted": 0, "lines": []}


def test_the_screen_of_a_reland(repository: Path) -> None:
    screen, _ = run("reland", "5001", "--clone", repository)  # titles tell of the other two
    assert "99 minutes later" in screen
    assert "the exact inverse" in screen
    assert "Lines changed in the reland alone: 4, in 2 files; in both: 5; in the first try alone: 0." in screen
    assert "  Worker.verify  +2 -0\n+           if self.idle:\n+               return 0\n" in screen
    assert f"As in the first try:\n  {HELPER}\n" in screen
    assert "self.idle" not in run("reland", "5001", "--stat", "--clone", repository)[0]


def test_a_revert_that_is_no_inverse(tmp_path: Path) -> None:
    steps = [
        Step("Begin", {f"{FOLDER}/a.py": "1\n2\n3\n4\n5\n6\n7\n8\n"}),
        Step("Try (#5001)", {f"{FOLDER}/a.py": "1\n2\n3\n4\n5\n6\n7\nX\n"}),
        Step("Between", {f"{FOLDER}/a.py": "0\n2\n3\n4\n5\n6\n7\nX\n"}),
        Step('Revert "Try" (#5002)', {f"{FOLDER}/a.py": "0\n2\n3\n4\n5\n6\n7\n8\n"}),
        Step("Try (#5003)", {f"{FOLDER}/a.py": "0\n2\n3\n4\n5\n6\n7\nX\nY\n"}),
        Step('Revert "Try" (#5004)', {f"{FOLDER}/a.py": "0\n2\n3\n4\n5\n6\n7\n"}),
        Step("[tag] Redo: try (#5005)", {f"{FOLDER}/a.py": "0\n2\n3\n4\n5\n6\n7\nX\n"}),
    ]
    make_history(tmp_path / "r", steps)
    moved = told("reland", "5001", "--clone", tmp_path / "r")
    assert (moved["inverse"], moved["reland"]["pr"]) == ("lines", 5003)
    other = told("reland", "5003", "5005", "--clone", tmp_path / "r")
    assert (other["inverse"], other["inverse_differing_lines"]) == ("no", 1)
    (file,) = other["files"]
    assert [line["text"] for line in file["dropped"]["lines"]] == ["8", "Y"]
    assert "not the inverse, by 1 line" in run("reland", "5003", "5005", "--clone", tmp_path / "r")[0]


def test_titles_tell_of_reverts_and_relands() -> None:
    def commit(number: int, subject: str) -> Commit:
        return Commit(f"{number:040}", "", "", number, f"{subject} (#{number})")

    found = tries(
        [
            commit(1, "[Spec] Share `slots`"),
            commit(2, "Other"),
            commit(3, 'Revert "[Spec] Share `slots`"'),
            commit(4, "[Fix] Reland: share slots"),
            commit(5, 'Revert "Oth…'),
            commit(6, "Other"),
            commit(7, 'Revert "Nobody knows"'),
            commit(8, "Revert both (#6)"),
            commit(9, 'Revert "Revert both" (#8)'),
            commit(10, "Revertible state"),
            commit(11, "Redo it all"),
        ]
    )
    numbers = [tuple(one and one.pr for one in (each.first, each.revert, each.reland)) for each in found]
    assert numbers == [(1, 3, 4), (2, 5, 6), (None, 7, None), (6, 8, 9), (None, None, 11)]


def test_the_catalogue_lists_reverts_and_has_files_of_the_reland() -> None:
    pairs = {
        (row["first"] or {}).get("pr"): (row["reland"] or {}).get("pr")
        for row in told("reland", "--list", "--catalogue")
    }
    assert (pairs[26866], pairs[7163], pairs[26235], pairs[28683]) == (26997, 7213, 26397, 28855)
    screen, _ = run("reland", "--catalogue")
    assert "99 minutes later" in screen
    assert "in the reland alone: eagle_draft_extend_cuda_graph_runner.py, triton_ops/eagle.py" in screen
    assert "line by line, needs a clone" in screen


def test_a_reland_that_titles_do_not_tell_of(repository: Path) -> None:
    assert "no title tells that 5004 was reverted" in run("reland", "5004", "--clone", repository, status=1)[1]
    assert "one of them at a time" in run("reland", "5001", "--list", "--clone", repository, status=2)[1]


# --- all of them


COMMANDS = (["show", "5003"], ["show", "HEAD~3"], ["diff", "0.4.6", "5003"], ["reland", "5001"], ["reland", "--list"])


def test_GIT_12_settings_of_the_users_change_nothing(repository: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    shutil.copytree(repository, trap)
    (tmp_path / "attributes").write_text("*.py -diff\n* text diff=shout\n")
    for name, value in {
        "color.ui": "always",
        "log.showSignature": "true",
        "format.pretty": "oneline",
        "log.date": "relative",
        "diff.noprefix": "true",
        "diff.mnemonicPrefix": "true",
        "diff.context": "0",
        "diff.renames": "false",
        "diff.external": "false",
        "diff.shout.textconv": "false",
        "core.attributesFile": str(tmp_path / "attributes"),
        "core.quotePath": "true",
        "core.abbrev": "20",
        "tag.sort": "-refname",
    }.items():
        git(trap, "config", name, value)
    for command in COMMANDS:
        trapped, plain = told(*command, "--clone", trap), told(*command, "--clone", repository)
        if isinstance(plain, dict):
            assert (trapped.pop("clone"), plain.pop("clone")) == (str(trap), str(repository)), command
        assert trapped == plain, command


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("larger") / "many"
    more = [Step(f"n{n}", {f"{FOLDER}/n.py": f"{n}\n"}) for n in range(40)]
    make_history(folder, history([*STEPS[:RELAND], *more, *STEPS[RELAND:]]), bare=True)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_the_number_of_git_processes_does_not_grow(
    repository: Path, larger: Path, tmp_path: Path, command: list[str]
) -> None:
    calls = []
    for folder in (repository, larger):
        (tmp_path / folder.name).mkdir()
        with counted_git(tmp_path / folder.name) as started:
            told(*command, "--clone", folder)
        calls.append(len(started))
    assert calls[0] == calls[1] <= 16


def test_colours_end_with_their_line(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    screen, _ = run("show", "5003", "--clone", repository)
    assert "\x1b[32m+        if self.idle:\x1b[0m\n" in screen
    assert "\x1b[36m@@ " in screen
    monkeypatch.setenv("NO_COLOR", "1")
    plain, _ = run("show", "5003", "--clone", repository)
    assert "\x1b[32m" not in plain
    assert "+        if self.idle:" in plain


# --- commits whose lines of author and committer are broken


@pytest.fixture(scope="module")
def undated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root that is as it should be, then a commit without dates, then one with a zone that none has; each tagged."""
    folder = tmp_path_factory.mktemp("undated") / "repository"
    make_history(folder, [Step("Root (#1)", {f"{FOLDER}/a.py": "a = 1\n"}, ("v0.4.0",))])
    for number, (author, committer) in enumerate(
        [("broken", "C <c>"), ("X <x@y> 1700000000 +9960", "X <x@y> abc")], start=2
    ):
        (folder / FOLDER / "a.py").write_text(f"a = {number}\n")
        git(folder, "add", ".")
        tree, parent = git(folder, "write-tree"), git(folder, "rev-parse", "HEAD")
        text = f"tree {tree}\nparent {parent}\nauthor {author}\ncommitter {committer}\n\nBroken (#{number})\n"
        made = git(folder, "hash-object", "-t", "commit", "-w", "--stdin", "--literally", stdin=text.encode())
        git(folder, "update-ref", "HEAD", made)
        git(folder, "tag", f"v9.{number}.0")
    git(folder, "update-ref", "refs/tags/v9.9.0", "HEAD^{tree}")
    return folder


def asked(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["history", *map(str, arguments)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("revision", ["HEAD", "HEAD~1"])
def test_a_commit_without_a_date(undated: Path, revision: str) -> None:
    status, out, err = asked("show", revision, "--clone", undated)
    assert (status, err) == (0, "")
    assert re.search(r"^author +not known  ", out, re.MULTILINE)
    assert re.search(r"^committed +not known$", out, re.MULTILINE)


def test_a_tag_on_a_commit_without_a_date_is_passed_over(undated: Path) -> None:
    status, out, err = asked("show", "v0.4.0", "--json", "--clone", undated)
    assert (status, err) == (0, "")
    assert json.loads(out)["releases"]["first"] == "v0.4.0"


def test_other_commands_on_commits_without_dates(undated: Path) -> None:
    status, out, _ = asked("log", "--by-month", "--json", "--clone", undated)
    assert (status, json.loads(out)["months"]) == (0, {"2024-12": 1, "not known": 2})
    assert "\n1 of 3 commits" in asked("log", "--since", "2020", "--clone", undated)[1]
    for arguments in (["log"], ["diff", "HEAD~2", "HEAD"], ["symbol", "a"], ["follow", "a.py"], ["reland", "HEAD~1"]):
        _, out, err = asked(*arguments, "--clone", undated)
        assert "%" not in out, arguments
        assert "isoformat" not in err, arguments
    _, _, err = asked("compare", "commit", "--at", "HEAD~1", "--clone", undated)
    assert re.search(r"no counterpart of commit at [0-9a-f]{10} \(not known\)$", err.strip())
