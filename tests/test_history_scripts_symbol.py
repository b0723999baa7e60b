"""scripts/spec-symbol.sh and scripts/spec-timeline.sh, on a small repository in SGLang's image."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from script_machine import REPO, Machine, settings
from small_history import FOLDER, Step, make_history

SYMBOL, TIMELINE = REPO / "scripts" / "spec-symbol.sh", REPO / "scripts" / "spec-timeline.sh"
WORKER, UTILS = f"{FOLDER}/worker.py", f"{FOLDER}/utils.py"
MONTH = 31 * 86_400

BORN = "import x\n\n\nclass Tree(Base):\n    Treeish = 1\n"
STEPS = [
    Step("Add the tree", {WORKER: BORN, "python/sglang/tree.py": "class Tree:\n"}),
    Step("Tree from worker \x1b[31m--amend | é", {UTILS: "from worker import Tree\nTree, OakTree = 1, TreeOak\n"}),
    Step("Other names only", {UTILS: "from worker import Tree\nTree, OakTree = 2, TreeOak\n"}, seconds=MONTH),
    Step("elsewhere", {"README.md": "Tree\n"}),
    Step("Another base", {WORKER: BORN.replace("Base", "object")}),
    Step("Rename", {WORKER: None, f"{FOLDER}/a b.py": BORN.replace("Base", "object")}),
    Step("Reorder", {f"{FOLDER}/a b.py": "class Tree(object):\n    Treeish = 1\n\n\nimport x\nimport x\n\n\n"}),
    Step("One more", {UTILS: "class Other:\n    async def Tree(self):\n        return Tree\n"}, seconds=4 * MONTH),
    Step("One less", {UTILS: "class Other:\n    pass\n"}),
    Step("Gone", {f"{FOLDER}/a b.py": None}),
    Step(
        "Back as a variable",
        {UTILS: "Tree: type = object\r\nif Tree == Tree:\n    pass\n", f"{FOLDER}/té.h": "--Tree;\n"},
    ),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, list[str]]:
    """A machine with the repository `small`, and its commits."""
    machine = Machine(tmp_path_factory.mktemp("machine"))
    return machine, make_history(machine.folder / "small", STEPS)


@pytest.fixture
def machine(made: tuple[Machine, list[str]], tmp_path: Path) -> Machine:
    """Of its own, with a copy of `small` in it."""
    machine = Machine(tmp_path)
    shutil.copytree(made[0].folder / "small", tmp_path / "small")
    return machine


@pytest.fixture
def commits(made: tuple[Machine, list[str]]) -> list[str]:
    return made[1]


def life(commits: list[str], main: str = "main") -> list[str]:
    """What is to be printed of Tree."""
    dates = ["2024-12-30", "2024-12-31", "2025-01-30", "", "2025-02-01", "2025-02-02", "2025-02-03", "2025-05-03"]
    dates += ["2025-05-04", "2025-05-05", "2025-05-06"]
    title = [
        f"{date}  {commit[:10]}  {step.subject}".replace("\x1b", "?")
        for date, commit, step in zip(dates, commits, STEPS, strict=True)
    ]
    return [
        *(title[0], "  born in worker.py: class Tree(Base):"),
        *(title[1], "  named in utils.py +2"),
        *(title[2], "  named in utils.py +1 -1"),
        *(title[4], "  changed in worker.py: class Tree(object):"),
        *(title[5], "  moved from worker.py to a b.py: class Tree(object):"),
        *(title[6], "  moved within a b.py"),
        *(title[7], "  also in utils.py: async def Tree(self):", "  named in utils.py +1 -2"),
        *(title[8], "  gone from utils.py", "  named in utils.py -1"),
        *(title[9], "  died in a b.py"),
        *(title[10], "  back in utils.py: Tree: type = object", "  named in té.h +1, utils.py +1"),
        f"At {main} ({commits[-1][:10]}) it is defined in utils.py",
    ]


def months(commits: list[str], main: str = "main") -> list[str]:
    counts = [("2024-12", 2), ("2025-01", 1), ("2025-02", 3), ("2025-03", 0), ("2025-04", 0), ("2025-05", 4)]
    return [
        f"{FOLDER} on {main} ({commits[-1][:10]}), commits per month",
        *(f"{month}  {count:4}  {'#' * count}".rstrip() for month, count in counts),
        "total      10",
    ]


# --- what they print


def test_life_of_a_symbol(machine: Machine, commits: list[str]) -> None:
    """GIT_06, GIT_10: a file that is renamed, a title that would do something to a terminal."""
    assert machine.run(SYMBOL, "Tree", "small") == (0, life(commits), "")


def test_commits_of_a_month(machine: Machine, commits: list[str]) -> None:
    assert machine.run(TIMELINE, "small") == (0, months(commits), "")


def test_in_chinese(machine: Machine, commits: list[str]) -> None:
    status, lines, err = machine.run(SYMBOL, "Tree", "small", "--lang=zh")
    assert (status, err, len(lines)) == (0, "", len(life(commits)))
    assert lines[1] == "  出生：worker.py：class Tree(Base):"
    assert lines[-1] == f"在 main ({commits[-1][:10]}) 上，它定义在 utils.py"
    status, lines, err = machine.run(TIMELINE, "small", LANG="zh_CN.UTF-8")
    assert (status, err, lines[-1]) == (0, "", "合计       10")


def test_a_name_that_is_never_defined(machine: Machine, commits: list[str]) -> None:
    _, lines, _ = machine.run(SYMBOL, "OakTree", "small")
    assert lines[-1] == f"Up to main ({commits[-1][:10]}) it was never defined in {FOLDER}"
    assert len(lines) == 7
    assert not any(word in line for line in lines for word in ("born", "also", "died"))


def test_a_definition_that_is_gone(machine: Machine, commits: list[str]) -> None:
    _, lines, _ = machine.run(SYMBOL, "Other", "small")
    assert [line for line in lines if line.startswith("  ")] == [
        "  born in utils.py: class Other:",
        "  died in utils.py",
    ]
    assert lines[-1] == f"At main ({commits[-1][:10]}) no definition is left in {FOLDER}"


def test_long_bars_are_scaled(machine: Machine) -> None:
    steps = [Step("x", {WORKER: str(i)}, seconds=MONTH * (i >= 90) + i) for i in range(91)]
    make_history(machine.folder / "many", steps)
    _, lines, _ = machine.run(TIMELINE, "many")
    assert lines[1:] == [f"2024-12    90  {'#' * 60}", "2025-01     1  #", "total      91"]


@pytest.mark.parametrize("script", [[SYMBOL, "Tree"], [TIMELINE]], ids=["symbol", "timeline"])
def test_history_that_is_merged(machine: Machine, script: list[str | Path]) -> None:
    """A commit on a branch counts once, and its merge does not."""
    run = machine.git
    run("-C", "small", "checkout", "-q", "-b", "side", "HEAD~1")
    run("-C", "small", "rm", "-q", "-r", FOLDER)
    (machine.folder / "small" / FOLDER).mkdir(parents=True)
    (machine.folder / "small" / FOLDER / "side.py").write_text("def Tree(): pass\n")
    run("-C", "small", "add", ".")
    run("-C", "small", "commit", "-q", "-m", "on the side")
    run("-C", "small", "checkout", "-q", "main")
    before = machine.run(*script, "small")[1]
    run("-C", "small", "merge", "-q", "-s", "ours", "-m", "merged, and nothing taken", "side")
    assert machine.run(*script, "small")[1][1:-1] == before[1:-1]


# --- on which clones


def bare(machine: Machine) -> Path:
    return machine.clone("--bare", "--no-tags")


def mirror_without_config(machine: Machine) -> Path:
    path = machine.clone("--mirror")
    (path / "config").unlink()
    return path


def folder_inside(machine: Machine) -> Path:
    return machine.clone() / FOLDER


def git_folder(machine: Machine) -> Path:
    return machine.clone() / ".git"


def linked_worktree(machine: Machine) -> Path:
    machine.git("-C", machine.clone(), "worktree", "add", "-q", machine.folder / "linked")
    return machine.folder / "linked"


def GIT_03_detached(machine: Machine) -> Path:
    path = machine.clone()
    machine.git("-C", path, "checkout", "-q", "--detach", "HEAD~4")
    return path


def fork(machine: Machine) -> Path:
    """HEAD, and a main of its own, are elsewhere; upstream's main line is origin/main."""
    path = machine.clone()
    machine.git("-C", path, "checkout", "-q", "-b", "work", "HEAD~4")
    machine.git("-C", path, "branch", "-q", "-f", "main", "HEAD~1")
    return path


@pytest.mark.parametrize(
    "make", [bare, mirror_without_config, folder_inside, git_folder, linked_worktree, GIT_03_detached, fork]
)
def test_same_output_on_any_clone(machine: Machine, commits: list[str], make: Callable[[Machine], Path]) -> None:
    path = make(machine)
    main = "main" if make in (bare, mirror_without_config) else "origin/main"
    assert machine.run(SYMBOL, "Tree", path) == machine.run(SYMBOL, "Tree", cwd=path) == (0, life(commits, main), "")
    assert machine.run(TIMELINE, path) == machine.run(TIMELINE, cwd=path) == (0, months(commits, main), "")


@pytest.mark.parametrize(("branch", "name"), [("master", "master"), ("trunk", "HEAD")])
def test_main_line_of_another_name(machine: Machine, commits: list[str], branch: str, name: str) -> None:
    machine.git("-C", "small", "branch", "-q", "-m", branch)
    assert machine.run(SYMBOL, "Tree", "small")[1] == life(commits, name)


def test_sha256(machine: Machine) -> None:
    made = make_history(machine.folder / "sha256", STEPS, object_format="sha256")
    assert machine.run(SYMBOL, "Tree", "sha256") == (0, life(made), "")


def test_GIT_01_shallow_clone(machine: Machine, commits: list[str]) -> None:
    """The oldest commit is not credited with what lies in it."""
    path = machine.clone("--depth", "4")
    shallow = "the clone is shallow: git fetch --unshallow brings the rest\n"
    status, lines, err = machine.run(SYMBOL, "Tree", path)
    whole = life(commits, "origin/main")
    assert status == 1
    assert lines == [
        whole[12],
        "  the history of this clone begins here",
        "  defined in a b.py: class Tree(object):",
        "  defined in utils.py: async def Tree(self):",
        *whole[15:],
    ]
    assert (
        err
        == f"spec-symbol.sh: what came before the oldest commit of this clone is not known\nspec-symbol.sh: {shallow}"
    )

    status, lines, err = machine.run(TIMELINE, path)
    assert (status, lines[1:]) == (1, ["2025-05     3  ###", "total       3"])
    assert err == (
        "spec-timeline.sh: the months before the oldest commit of this clone are not counted\n"
        f"spec-timeline.sh: {shallow}"
    )


def test_clones_without_contents(machine: Machine, commits: list[str]) -> None:
    """One line says what is missing, and nothing is fetched though the origin is at hand."""
    blobless = machine.clone("--filter=blob:none", "--bare")
    treeless = machine.clone("--filter=tree:0", "--bare")
    before = [machine.git("-C", path, "count-objects", "-v") for path in (blobless, treeless)]
    assert machine.run(SYMBOL, "Tree", blobless) == (
        1,
        [],
        "spec-symbol.sh: this clone lacks contents of files: it was made with --filter=blob:none, "
        "and nothing is fetched here\n",
    )
    assert machine.run(TIMELINE, blobless) == (0, months(commits), "")
    assert machine.run(TIMELINE, treeless) == (
        1,
        [],
        "spec-timeline.sh: this clone lacks lists of files: it was made with --filter=tree:0, "
        "and nothing is fetched here\n",
    )
    assert [machine.git("-C", path, "count-objects", "-v") for path in (blobless, treeless)] == before


def test_corrupt_object(machine: Machine, commits: list[str]) -> None:
    """What could be read is printed."""
    path = machine.folder / "small"
    blob = machine.git("-C", path, "rev-parse", f"HEAD:{UTILS}")
    (path / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    status, lines, err = machine.run(SYMBOL, "Tree", "small")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith(f"spec-symbol.sh: git cannot read {path}/.git: ")
    assert lines == life(commits)[: len(lines)]
    assert len(lines) > 10
    assert machine.run(TIMELINE, "small") == (0, months(commits), "")


@pytest.mark.parametrize("script", [[SYMBOL, "Tree"], [TIMELINE]], ids=["symbol", "timeline"])
def test_nothing_to_tell(machine: Machine, script: list[str | Path]) -> None:
    machine.git("init", "-q", "empty")
    status, lines, err = machine.run(*script, "empty")
    assert (status, lines, err.splitlines()[0]) == (1, [], f"{script[0].name}: there is no commit in this clone")
    assert "does not look like a clone of SGLang" in err
    make_history(machine.folder / "other", [Step("x", {"a.py": "Tree = 1\n"})])
    status, lines, err = machine.run(*script, "other")
    assert (status, lines, err.count("\n")) == (1, [], 2)
    assert f"{FOLDER} on main ever named Tree" in err or f"no commit on main touches {FOLDER}" in err


# --- in spite of which settings


def test_GIT_12_settings_of_the_user(machine: Machine, commits: list[str]) -> None:
    env = settings(machine)
    more = "[diff] relative = true\n orderFile = nonesuch\n algorithm = patience\n[log] showRoot = false\n"
    with (machine.folder / "home" / ".gitconfig").open("a") as file:
        file.write(more)
    (machine.folder / "small" / ".git" / "info" / "attributes").write_text("*.py -diff\n")
    del env["GIT_NOGLOB_PATHSPECS"]
    env |= {"GIT_EXTERNAL_DIFF": "false", "GIT_DIFF_OPTS": "--unified=5", "GIT_DIR": "x", "GIT_LITERAL_PATHSPECS": "1"}
    for path in ("small", f"small/{FOLDER}"):
        assert machine.run(SYMBOL, "Tree", path, **env) == (0, life(commits), "")
        assert machine.run(TIMELINE, path, **env) == (0, months(commits), "")


def test_number_of_git_processes_does_not_grow(machine: Machine, commits: list[str]) -> None:
    real = (machine.folder / "bin" / "git").resolve()
    (machine.folder / "bin" / "git").unlink()
    bash = machine.folder / "bin" / "bash"
    (machine.folder / "bin" / "git").write_text(f'#!{bash}\necho "$*" >>"{machine.folder}/calls"\nexec "{real}" "$@"\n')
    (machine.folder / "bin" / "git").chmod(0o755)
    numbers = {}
    for script in ([SYMBOL, "Tree"], [TIMELINE]):
        assert machine.run(*script, "small")[0] == 0
        numbers[script[0].name] = len((machine.folder / "calls").read_text().splitlines())
        (machine.folder / "calls").unlink()
    assert numbers == {"spec-symbol.sh": 6, "spec-timeline.sh": 5}


# --- what they say when something is wrong


@pytest.mark.parametrize("name", ["a b", "", "a.b", "9a", "é", "$(touch made)", "a*", "(", "a\nb", "--", "-S"])
def test_no_name_of_python(machine: Machine, name: str) -> None:
    message = f"spec-symbol.sh: error: NAME is one name in Python, such as EAGLEWorker, not '{name}'\n"
    assert machine.run(SYMBOL, "--", name, "small") == (2, [], message)
    assert not (machine.folder / "made").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "a NAME is needed, such as EAGLEWorker (spec-symbol.sh --help says more)"),
        (["-Tree"], "unknown option -Tree (spec-symbol.sh --help lists them; a folder of that name is ./-Tree)"),
        (["Tree", "small", "home"], "one PATH at most, not small and home"),
        (["Tree", "home"], "not a git repository: home (name a clone of SGLang)"),
        (["Tree", "nonesuch"], "no such folder: nonesuch"),
        (["Tree", "--lang", "fr"], "--lang takes zh or en, not 'fr'"),
    ],
)
def test_refused_in_one_line(machine: Machine, args: list[str], message: str) -> None:
    assert machine.run(SYMBOL, *args) == (2, [], f"spec-symbol.sh: error: {message}\n")


def test_help_in_both_languages(machine: Machine) -> None:
    status, english, err = machine.run(SYMBOL, "--help")
    assert (status, err, english[0]) == (0, "", "usage: scripts/spec-symbol.sh [--lang zh|en] NAME [PATH]")
    status, chinese, err = machine.run(SYMBOL, "-h", "--lang", "zh")
    assert (status, err, chinese[0]) == (0, "", "用法：scripts/spec-symbol.sh [--lang zh|en] 名字 [路径]")
    for word in ("born", "also", "moved", "changed", "named", "gone", "back", "died"):
        assert any(line.startswith(f"  {word} ") or f"  {word} " in line for line in english)


def test_a_name_that_was_never_there(machine: Machine) -> None:
    message = f"spec-symbol.sh: no line of {FOLDER} on main ever named nonesuch\n"
    machine.git("-C", "small", "checkout", "-q", "HEAD")
    assert machine.run(SYMBOL, "nonesuch", "small") == (1, [], message)


def test_reader_that_goes_away(machine: Machine) -> None:
    command = f'set -o pipefail; "{SYMBOL}" Tree small | exit'
    done = subprocess.run(["bash", "-c", command], env=machine.env, cwd=machine.folder, capture_output=True, timeout=60)
    assert done.stderr == b""


def test_a_very_long_line(machine: Machine) -> None:
    """Its beginning is read for a definition, and it is searched for the name alone."""
    long = "a+b " * 100_000
    steps = [Step("One", {f"{FOLDER}/a.py": f"Tree = 1  # {long}\n# {long} Tree\n# {long}Treeish\n"})]
    (commit,) = make_history(machine.folder / "long", steps)
    status, lines, err = machine.run(SYMBOL, "Tree", "long")
    assert (status, err) == (0, "")
    assert lines[0] == f"2024-12-30  {commit[:10]}  One"
    assert [line[:26] for line in lines[1:]] == [
        "  born in a.py: Tree = 1  ",
        "  named in a.py +1",
        f"At main ({commit[:10]}) it is",
    ]
