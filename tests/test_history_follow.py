"""The life of a file: through renames, over the border of the folder, and into what it was split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from refspec.cli.main import app
from refspec.history import catalogue
from refspec.history.clone import Clone, HistoryError
from refspec.history.cloning import make_clone
from refspec.history.file_life import FileLife, Flow, follow
from tests import small_history
from tests.small_history import FOLDER, Step, counted_git, git, make_history


def text(word: str, lines: int) -> str:
    return "".join(f"{word}_{n} = compute({n}, {word!r})\n" for n in range(lines))


# What happened to eagle_utils.py in SGLang: it became eagle_info.py but for what went to spec_utils.py, and later
# another file took its name.
STEPS = (
    Step("born (#1)", {f"{FOLDER}/utils.py": text("info", 30) + text("tool", 20)}),
    Step("changed", {f"{FOLDER}/utils.py": text("info", 31) + text("tool", 20)}),
    Step(
        "organized (#3)",
        {
            f"{FOLDER}/utils.py": None,
            f"{FOLDER}/info.py": text("info", 31),
            f"{FOLDER}/tools.py": text("tool", 20) + text("more", 40),
        },
    ),
    Step("another of the old name", {f"{FOLDER}/utils.py": text("other", 40)}),
    Step("out", {f"{FOLDER}/info.py": None, "python/sglang/kernels/info.py": text("info", 31)}),
    Step("outside", {"python/sglang/kernels/info.py": text("info", 32)}),
    Step("gone", {"python/sglang/kernels/info.py": None}),
    Step("back", {"python/sglang/kernels/info.py": text("info", 32)}),
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("follow") / "repository"
    make_history(folder, STEPS)
    return folder


@pytest.fixture(scope="module")
def clone(repository: Path) -> Clone:
    return Clone(repository)


def told(life: FileLife) -> list[str]:
    return [f"{event.what}: {event.subject}" for event in life.events]


def test_GIT_06_a_moved_file_has_both_commits_and_its_old_path(tmp_path: Path) -> None:
    make_history(
        tmp_path / "r", [Step("one", {"f.py": text("f", 3)}), Step("two", {"f.py": None, "d x/g.py": text("f", 3)})]
    )
    for name in ("d x/g.py", "f.py", "./d x//g.py"):
        life = follow(Clone(tmp_path / "r"), name)
        assert [(event.what, event.path, event.old_path) for event in life.events] == [
            ("born", "f.py", None),
            ("renamed", "d x/g.py", "f.py"),
        ]
        assert life.paths == ("f.py", "d x/g.py")
    status, out, _ = run("d x/g.py", "--clone", tmp_path / "r")
    assert status == 0
    assert "d x/g.py\nbefore: f.py\nborn 2024-12-30, 2 commits, still there\n" in out


def test_a_life_goes_on_over_renames_and_the_border(clone: Clone) -> None:
    life = follow(clone, "info.py")
    assert told(life) == [
        *("born: born (#1)", "changed: changed", "renamed: organized (#3)", "renamed: out", "changed: outside"),
        *("deleted: gone", "back: back"),
    ]
    assert life.paths == (f"{FOLDER}/utils.py", f"{FOLDER}/info.py", "python/sglang/kernels/info.py")
    assert life.alive
    assert life.events[2].pr == 3
    assert [(event.lines_added, event.lines_deleted) for event in life.events] == [
        *((50, 0), (1, 0), (0, 20), (0, 0), (1, 0), (0, 32), (32, 0))
    ]


def test_a_split_is_told_on_both_sides(clone: Clone) -> None:
    assert follow(clone, "info.py").events[2].went_to == (Flow(f"{FOLDER}/tools.py", 20),)
    born = follow(clone, "tools.py").events[0]
    assert (born.what, born.came_from, born.went_to) == ("born", (Flow(f"{FOLDER}/utils.py", 20),), ())
    assert follow(clone, "info.py").events[3].went_to == ()


def test_a_name_that_two_files_had(clone: Clone, repository: Path) -> None:
    naive = git(repository, "log", "--follow", "--format=%s", "--", f"{FOLDER}/utils.py").splitlines()
    assert "another of the old name" in naive, "and nothing tells it from the first"
    life = follow(clone, "utils.py")
    assert told(life) == ["born: another of the old name"]
    assert life.others == ((f"{FOLDER}/utils.py", f"{FOLDER}/info.py", "python/sglang/kernels/info.py"),)


def test_a_file_that_takes_the_name_of_one_that_was_renamed(tmp_path: Path) -> None:
    one, two = text("one", 30), text("two", 30)
    make_history(
        tmp_path / "r",
        [
            Step("born", {f"{FOLDER}/a.py": one, f"{FOLDER}/b.py": two}),
            Step(
                "moved on",
                {f"{FOLDER}/a.py": None, f"{FOLDER}/b.py": None, f"{FOLDER}/c.py": one, f"{FOLDER}/d.py": two},
            ),
            Step("to names that were", {f"{FOLDER}/c.py": None, f"{FOLDER}/d.py": None, f"{FOLDER}/b.py": one}),
        ],
    )
    life = follow(Clone(tmp_path / "r"), "b.py")
    assert [path[-4:] for path in life.paths] == ["a.py", "c.py", "b.py"]
    assert [[path[-4:] for path in other] for other in life.others] == [["b.py", "d.py"]]


def test_a_file_that_never_was_is_told_with_what_is_near(clone: Clone) -> None:
    with pytest.raises(
        HistoryError, match=r"no file was ever called infos.py, in the folder or from the root; there is info.py"
    ):
        follow(clone, "infos.py")
    with pytest.raises(HistoryError, match=r"no file was ever called --help"):
        follow(clone, "--help")
    with pytest.raises(
        HistoryError, match=r"called eagle_inf.py, in .* or from the root as far as the catalogue knows; .*eagle_info"
    ):
        follow(None, "eagle_inf.py")


def test_a_file_of_that_name_elsewhere_is_pointed_at(tmp_path: Path) -> None:
    files = {f"{FOLDER}/llama_eagles.py": "1\n", "python/sglang/srt/models/llama_eagle.py": "2\n"}
    make_history(tmp_path / "repository", [Step("one", dict(files))])
    with pytest.raises(HistoryError, match=r"from the root; there is python/sglang/srt/models/llama_eagle.py$"):
        follow(Clone(tmp_path / "repository"), "llama_eagle.py")


def test_paths_and_titles_that_are_no_text(tmp_path: Path) -> None:
    steps = [
        Step(b"caf\xe9", {rf"{FOLDER}/caf\351 \".py": text("f", 3), f"{FOLDER}/sub/x\ty.py": "1\n"}),
        Step("\x1b[31m-red", {rf"{FOLDER}/caf\351 \".py": None, rf"{FOLDER}/th\351.py": text("f", 3)}),
    ]
    steps = [Step(s.subject, {path.replace('\\"', ""): f for path, f in s.files.items()}) for s in steps]
    make_history(tmp_path / "r", steps, object_format="sha256")
    clone = Clone(tmp_path / "r")
    assert told(follow(clone, "th\ufffd.py")) == ["born: caf\ufffd", "renamed: \x1b[31m-red"]
    assert told(follow(clone, "x\ty.py")) == ["born: caf\ufffd"]
    status, out, _ = run(b"th\xe9.py".decode(errors="surrogateescape"), "--clone", tmp_path / "r")
    assert status == 0
    assert "\x1b" not in out
    assert "caf\ufffd .py -> th\ufffd.py" in out


def test_the_number_of_git_processes_is_constant(repository: Path, tmp_path: Path) -> None:
    with counted_git(tmp_path) as calls:
        follow(Clone(repository), "info.py")
    assert len(calls) <= 8, calls


def test_a_merge_counts_as_what_it_brought(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    make_history(folder, [Step("one", {"a.py": text("a", 9)}), Step("two", {"b.py": "1\n"})])
    git(folder, "checkout", "-q", "-b", "side", "HEAD~1")
    git(folder, "mv", "a.py", "c.py")
    git(folder, "commit", "-q", "-m", "on the side")
    git(folder, "checkout", "-q", "main")
    git(folder, "merge", "-q", "-m", "merged", "side")
    assert told(follow(Clone(folder), "c.py")) == ["born: one", "renamed: merged"]


# --- without all that a clone can have


def test_the_catalogue_knows_renames() -> None:
    life = follow(None, "eagle_info.py")
    assert [path.rpartition("/")[2] for path in life.paths] == ["eagle_utils.py", "eagle_info.py"]
    assert life.events[0].hash.startswith("815dce0554")
    renamed = next(event for event in life.events if event.what == "renamed")
    assert (renamed.hash[:10], renamed.pr) == ("73d4a5f879", 10735)
    assert not life.contents
    later = follow(None, "eagle_utils.py")
    assert [path.rpartition("/")[2] for path in later.others[0]] == ["eagle_utils.py", "eagle_info.py"]
    assert later.events[0].hash.startswith("56222658ec")


def test_the_catalogue_knows_crossings() -> None:
    life = follow(None, "triton_ops/cache_locs.py")
    assert life.paths[-1] == "python/sglang/kernels/ops/speculative/cache_locs.py"
    assert life.events[-1].what == "renamed"


def test_every_commit_of_the_catalogue_can_be_followed() -> None:
    """What it says of files is one story: nothing is changed that is not there."""
    paths = sorted({change.path for commit in catalogue.commits() for change in commit.changes})
    assert len(paths) > 100
    for path in paths[::10]:
        life = follow(None, path)
        assert life.events[0].what in ("born", "renamed"), path
        assert not life.begins


def test_a_blobless_clone_tells_what_it_can(repository: Path, tmp_path: Path) -> None:
    small_history.clone(repository, tmp_path / "b", "--filter=blob:none", "--bare")
    status, out, err = run("python/sglang/kernels/info.py", "--clone", tmp_path / "b")
    assert status == 1
    assert "out\n" in out
    assert "split" not in out
    assert "lacks contents of files, so splits" in err
    assert "made with --filter=blob:none (refspec history clone --full DIR makes" in err
    life = follow(Clone(tmp_path / "b"), "python/sglang/kernels/info.py")
    assert told(life)[:2] == ["born: organized (#3)", "renamed: out"]  # that of utils.py took contents to see


def test_a_clone_with_the_folder_s_contents_alone_knows_the_folder(repository: Path, tmp_path: Path) -> None:
    """What `refspec history clone` makes by default."""
    make_clone(tmp_path / "c", f"file://{repository}")
    whole, life = follow(Clone(repository), "info.py"), follow(Clone(tmp_path / "c"), "info.py")
    assert told(life) == told(whole)
    assert life.events[:4] == whole.events[:4], "the lines and the split as well"
    assert not life.contents
    status, out, err = run("info.py", "--clone", tmp_path / "c")
    assert status == 1
    assert "split: 20 lines went to tools.py" in out
    assert "--full" in err


def test_a_blobless_clone_takes_the_catalogue_s_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = make_history(tmp_path / "r", STEPS)
    small_history.clone(tmp_path / "r", tmp_path / "b", "--filter=blob:none", "--bare")
    rename = catalogue.FileChange("R", f"{FOLDER}/info.py", f"{FOLDER}/utils.py")
    known = catalogue.Commit(
        hashes[2], "", "", 3, "organized", (rename, catalogue.FileChange("A", f"{FOLDER}/tools.py"))
    )
    monkeypatch.setattr(catalogue, "commits_by_hash", lambda: {hashes[2]: known})
    assert told(follow(Clone(tmp_path / "b"), "info.py")) == [
        *("born: born (#1)", "changed: changed", "renamed: organized (#3)", "renamed: out", "changed: outside"),
        *("deleted: gone", "back: back"),
    ]


def test_a_shallow_clone_tells_no_birth(repository: Path, tmp_path: Path) -> None:
    small_history.clone(repository, tmp_path / "s", "--depth=3")
    status, out, err = run("python/sglang/kernels/info.py", "--clone", tmp_path / "s")
    assert status == 1
    assert "there already" in out
    assert "born" not in out
    assert "the clone is shallow" in err


# --- the command


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["history", "follow", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_shows_splits_and_other_files(repository: Path) -> None:
    status, out, err = run("utils.py", "--clone", repository)
    assert (status, err) == (0, "")
    assert "another file had that name too: utils.py, which became info.py, then python/sglang/kernels/info.py\n" in out
    status, out, _ = run("info.py", "--clone", repository)
    assert "python/sglang/kernels/info.py\nbefore: info.py\nbefore: utils.py\nborn 2024-12-30, 7 commits" in out
    assert f"{' ' * 24}utils.py -> info.py\n{' ' * 24}split: 20 lines went to tools.py\n" in out


def test_the_command_prints_json(repository: Path) -> None:
    status, out, _ = run("info.py", "--clone", repository, "--json")
    document = json.loads(out)
    assert status == 0
    assert document["paths"][0] == f"{FOLDER}/utils.py"
    assert document["events"][2]["went_to"] == [{"path": f"{FOLDER}/tools.py", "lines": 20}]
    status, out, _ = run("eagle_info.py", "--catalogue", "--json")
    assert (status, json.loads(out)["contents"]) == (0, False)


def test_the_command_works_without_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REFSPEC_CACHE", str(tmp_path / "none"))
    status, out, err = run("eagle_worker.py")
    assert (status, err) == (0, "")
    assert "from the embedded catalogue (no clone was found): splits need a clone\n" in out
    assert "deleted 2026-06-08" in out
    assert "7 commits, left the folder 2026-07-10 (what" in run("triton_ops/cache_locs.py")[1]
    status, out, err = run("nonesuch.py")
    assert (status, out, err.count("\n")) == (1, "", 1)
