"""`refspec history story`: a commentary that holds, and the part of a diff that matters."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from small_history import FOLDER, Step, clone, counted_git, git, make_history
from typer.testing import CliRunner

import refspec.cli.history.story as command
from refspec.cli.main import app
from refspec.history import catalogue, story
from refspec.history.catalogue import CatalogueError, StoryCommit
from refspec.history.clone import Clone, HistoryError, LacksError
from refspec.history.story import Commentary, Look, commentary, diff_of, excerpt, find_commit, neighbours

LABELS = [*map(str, range(1, 26)), "R1", "R2", "R3", "R4", "R5", "31"]
TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


def run(*arguments: str | Path, columns: int | None = None) -> Outcome:
    environment = {"COLUMNS": str(columns)} if columns else {}
    result = CliRunner().invoke(app, ["history", "story", *map(str, arguments)], env=environment)
    return Outcome(result.exit_code, result.stdout, result.stderr)


# --- the commentary


def test_every_commit_of_the_story_has_a_commentary() -> None:
    assert list(commentary()) == [commit.label for commit in catalogue.story()] == LABELS
    for label, told in commentary().items():
        assert 60 <= len(" ".join(told.paragraphs).split()) <= 150, label
        assert told.modules, label


def test_what_the_commentary_names_exists() -> None:
    claims = {claim.id for claim in catalogue.claims()}
    tests = re.findall(r"def (test_\w+)", "".join(file.read_text("utf-8") for file in TESTS.rglob("test_*.py")))
    tested = set(re.findall(r"[A-Z]{3,4}_\d\d", " ".join(tests)))
    for label, told in commentary().items():
        assert not [name for name in told.modules if importlib.util.find_spec(name) is None], label
        assert set(told.claims) <= claims, label
        assert {name.replace("-", "_") for name in told.cases} <= tested, label


def test_hashes_and_pull_requests_in_the_prose_are_in_the_catalogue() -> None:
    hashes = {commit.hash[:10] for commit in (*catalogue.commits(), *catalogue.story())}
    requests = {commit.pr for commit in (*catalogue.commits(), *catalogue.story())}
    named = 0
    for label, told in commentary().items():
        prose = " ".join(told.paragraphs)
        for name in re.findall(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,40}\b", prose):
            assert name in hashes, f"{label}: {name}"
            named += 1
        for number in re.findall(r"#(\d+)", prose):
            assert int(number) in requests, f"{label}: #{number}"
    assert named >= 8


def test_each_file_to_look_at_was_changed_by_the_commit() -> None:
    known = catalogue.commits_by_hash()
    checked = 0
    for commit in catalogue.story():
        changed = {change.path for change in known[commit.hash].changes} if commit.hash in known else set()
        for look in commentary()[commit.label].looks:
            if look.path.startswith(catalogue.DIRECTORY):
                assert look.path in changed, f"{commit.label}: {look.path}"
                checked += 1
    assert checked > 40


TEXT = (Path(story.__file__).parent / "facts" / "story.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("## 2\n", "## 1\n", "tells of commit 1 twice"),
        ("## 2\n", "## 26\n", "other commits than its story.tsv"),
        (
            "- refspec: refspec.workers.registry, refspec.contracts",
            "- refspec: torch",
            "at commit 1: 'torch' has another",
        ),
        ("- claims: E5\n", "- claims: five\n", "at commit 1: 'five' has another form"),
        ("- claims: E5\n", "- refspec: refspec.config\n", "stands there twice"),
        ("- claims: E5\n", "- remarks: none\n", "'remarks' is no kind of item"),
        ("spec_info.py: SpeculativeAlgorithm, SpecInfo, from_string", "spec_info.py", "names nothing to look for"),
    ],
)
def test_a_damaged_commentary_is_told_by_its_commit(old: str, new: str, complaint: str) -> None:
    assert old in TEXT, "the trap is set"
    with pytest.raises(CatalogueError, match=re.escape(complaint)):
        story.parse_commentary(TEXT.replace(old, new, 1))


# --- which commit


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("8", "8"),
        ("r4", "R4"),
        ("31", "31"),
        ("#3269", "8"),
        ("3269", "8"),
        ("013021b6a1", "8"),
        ("013021B6", "8"),
        ("9f5655340897ae0af9425acd528e809cf223c2dc", "R5"),
        (" 7 ", "7"),
    ],
)
def test_a_commit_is_found_by_label_pull_request_and_hash(name: str, label: str) -> None:
    assert find_commit(name).label == label


@pytest.mark.parametrize("name", ["", "0", "26", "9f5", "#99", "deadbeef", "-x", "R6", "*"])
def test_no_other_name_means_a_commit(name: str) -> None:
    with pytest.raises(HistoryError, match="not among the 31 commits of the story"):
        find_commit(name)


def test_the_commits_follow_one_another() -> None:
    label, seen = "1", ["1"]
    while after := neighbours(label)[1]:
        assert neighbours(after.label)[0] == find_commit(label)
        seen.append(label := after.label)
    assert seen == LABELS


# --- what is shown


def test_the_list_has_each_commit_with_its_reason() -> None:
    out = run().out
    for commit in catalogue.story():
        assert f"{commit.label:>2}  {commit.author_date}  {commit.hash[:10]}  #{commit.pr}  +" in out
        assert commit.subject in out
    assert "31  2026-05-12  48fc26a814  #25015  +4 -3\n" in out, "lines that the story leaves to the commits"
    assert [row["label"] for row in json.loads(run("--json").out)] == LABELS


def test_without_a_clone_there_is_the_commentary_and_no_diff() -> None:
    outcome = run("14", "--catalogue")
    assert outcome.status == 0
    for text in (
        "14  2025-03-30  b26bc86b36  #4908  +205 -39 in the folder",
        "Support page size > 1 + eagle (#4908)",
        "https://github.com/sgl-project/sglang/pull/4908",
        "Look at:    python/sglang/srt/mem_cache/paged_allocator.py: backup_state, restore_state",
        "In refspec: refspec.memory.allocator, refspec.kernels.align_evict_mask_to_page_size",
        "Claim E23:  Allocator state is rolled back after verify according to acceptance: false",
        "Cases:      MEM-03, MEM-07, PAGE-01",
        "Next: refspec history story 15",
    ):
        assert text in outcome.out
    assert (
        " ".join(commentary()["14"].paragraphs).split()
        == outcome.out.split()[
            (start := outcome.out.split().index("With")) : start + len(" ".join(commentary()["14"].paragraphs).split())
        ]
    )
    found = json.loads(run("14", "--catalogue", "--json").out)
    assert (found["hash"], found["diff"], found["next"], found["previous"]) == (
        find_commit("14").hash,
        None,
        "15",
        "13",
    )
    assert "That was the last of them." in run("31", "--catalogue").out


def test_no_line_of_prose_is_wider_than_the_terminal() -> None:
    for columns in (40, 80):
        for label in ("6", "24", "R3"):
            lines = run(label, "--catalogue", columns=columns).out.splitlines()
            wide = [line for line in lines[1:] if len(line) > columns and " " in line.strip()]
            assert not wide


# --- the diff, on a commit made here


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    old = "".join(f"    line_{n} = {n}\n" for n in range(200))
    new = old.replace("    line_150 = 150\n", "    wanted = 150\n").replace("    line_20 = 20\n", "    other = 20\n")
    folder = tmp_path_factory.mktemp("story") / "sglang"
    hashes = make_history(
        folder,
        [
            Step("before", {f"{FOLDER}/a.py": old, f"{FOLDER}/b.py": "x = 1\n", "else.py": "1\n"}),
            Step(
                "told",
                {
                    f"{FOLDER}/a.py": new,
                    f"{FOLDER}/b.py": "x = 2  # \x1b[31m red\n",
                    f"{FOLDER}/c.py": "".join(f"    made_{n} = {n}\n" for n in range(300)) + "def sought(): pass\n" * 3,
                    "else.py": "2\n",
                },
            ),
        ],
    )
    return folder, hashes


@pytest.fixture
def told(history: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> StoryCommit:
    """The story has one commit, of the repository made here, and its commentary looks at three files."""
    commit = StoryCommit("1", history[1][1], "2024-12-31", 2150, "told", 1, 1, "why")
    looks = tuple(
        Look(f"{FOLDER}/{name}", names)
        for name, names in (("a.py", ("wanted",)), ("b.py", ("x",)), ("c.py", ("sought",)))
    )
    only = {"1": Commentary(("Prose.",), looks, ("refspec.config",), (), ())}
    monkeypatch.setattr(catalogue, "story", lambda: (commit,))
    monkeypatch.setattr(story, "commentary", lambda: only)
    monkeypatch.setattr(command, "commentary", lambda: only)
    return commit


def test_the_part_that_matters_is_shown_and_the_rest_counted(
    history: tuple[Path, list[str]], told: StoryCommit, tmp_path: Path
) -> None:
    a, b, c = diff_of(Clone(history[0]), told)
    assert "+    wanted = 150" in a.lines
    assert a.left_out == 0, "a short diff is shown whole"
    assert b.lines[-2:] == ("-x = 1", "+x = 2  # \x1b[31m red")
    assert "+def sought(): pass" in c.lines
    assert "+    made_1 = 1" not in c.lines
    whole = diff_of(Clone(history[0]), told, whole=True)
    assert "+    made_1 = 1" in whole[2].lines
    assert len(whole[2].lines) == c.left_out + sum(line is not None for line in c.lines)
    with counted_git(tmp_path) as calls:
        outcome = run("1", "--clone", history[0])
    assert len(calls) <= 6
    assert f"({c.left_out} more lines of this file: --full-diff)" in outcome.out
    assert "\x1b" not in outcome.out
    assert "+x = 2  # \\x1b[31m red" in outcome.out
    assert "else.py" not in outcome.out
    assert "made_1 = 1\n" in run("1", "--clone", history[0], "--full-diff").out
    parts = json.loads(run("1", "--clone", history[0], "--json").out)["diff"]
    assert [part["path"] for part in parts] == [f"{FOLDER}/{name}.py" for name in "abc"]


def test_an_excerpt_has_its_share_of_each_name() -> None:
    diff = ["diff --git a/f b/f", "--- a/f", "+++ b/f"]
    for hunk in range(10):
        diff += [f"@@ -{hunk}00,9 +{hunk}00,9 @@ def f{hunk}():", *(f" {hunk}.{n}" for n in range(9)), f"-name{hunk}"]
        diff += [f"+name{hunk}_longer", f"+name{hunk}", *(f" {hunk}.{n}" for n in range(9, 18))]
    found = excerpt(diff, ("name7", "name2", "absent"), 20)
    assert found[:3] == tuple(diff[:3])
    hunks = [line for line in found if line and line.startswith("@@")]
    assert hunks == ["@@ -200,9 +200,9 @@ def f2():", "@@ -700,9 +700,9 @@ def f7():"]
    assert "+name2" in found
    assert "+name7" in found
    assert sum(line is not None for line in found) <= 3 + 2 + 20
    assert [line for line in diff if line in found] == [line for line in found if line is not None], "in their order"
    assert not any(before is after is None for before, after in pairwise(found))
    assert excerpt(diff, ("absent",), 20)[3] == diff[3], "without a hit, how the diff begins"
    assert excerpt(diff, ("absent",), 1000) == tuple(diff)


def test_what_a_clone_lacks_is_said_and_the_commentary_shown(
    history: tuple[Path, list[str]], told: StoryCommit, tmp_path: Path
) -> None:
    source = history[0]
    lacking = {
        clone(source, tmp_path / "blobless", "--bare", "--filter=blob:none"): "it was made with --filter=blob:none",
        clone(source, tmp_path / "shallow", "--bare", "--depth=1"): "this clone's history begins with it",
    }
    make_history(tmp_path / "other", [Step("another")], bare=True)
    lacking[tmp_path / "other"] = f"this clone lacks the commit {told.hash[:10]}"
    for folder, complaint in lacking.items():
        outcome = run("1", "--clone", folder)
        assert outcome.status == 1
        assert complaint in outcome.err
        assert outcome.err.count("\n") == 1
        assert "Prose." in outcome.out
        assert json.loads(run("1", "--clone", folder, "--json").out)["diff"] is None
    with pytest.raises(LacksError, match="unshallow"):
        diff_of(Clone(tmp_path / "shallow"), told)


def test_a_users_settings_do_not_change_the_diff(history: tuple[Path, list[str]], told: StoryCommit) -> None:
    before = diff_of(Clone(history[0]), told)
    for name, value in (
        ("color.ui", "always"),
        ("diff.noprefix", "true"),
        ("diff.mnemonicPrefix", "true"),
        ("diff.external", "false"),
        ("format.pretty", "oneline"),
        ("log.showSignature", "true"),
        ("diff.context", "0"),
    ):
        git(history[0], "config", name, value)
    assert diff_of(Clone(history[0]), told) == before
