"""Every kind of clone, and everything that can be wrong with one: what it is said to be, and that nothing comes of it.

The kinds are made on the spot from one small repository, whose titles hold what trips parsers. Each is run through
COMMANDS, a list of command lines; what must hold for all of them is in `run_all`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from small_history import FOLDER, Step, clone, counted_git, git, make_history
from typer.testing import CliRunner

from refspec.cli.history import app as history
from refspec.cli.main import app
from refspec.cli.wording import size_of
from refspec.history import catalogue, sources
from refspec.history.catalogue import Reach
from refspec.history.clone import PLAIN_DIFF, Clone, HistoryError, LacksError
from refspec.history.commits import read_commits

# What is run on every kind of clone,
BASIC: list[list[str]] = [
    ["overview"],
    ["where", "--json"],
    ["doctor"],
]
# and what is on those kinds too that are most unlike another: PECULIAR.
COMMANDS: list[list[str]] = [
    *BASIC,
    ["log", "--json"],
    ["dir", "--at", "HEAD"],
    ["story", "1"],
    ["show", "HEAD"],
    ["diff", "HEAD~3", "HEAD"],
    ["reland", "HEAD~1", "HEAD"],
    ["symbol", "EAGLEWorker"],
    ["lines", "b.py:b"],
    ["follow", "eagle worker v2.py"],
    ["compare", "draft"],
    ["moved", "HEAD~3", "HEAD", "--json"],
    ["claims", "E1"],
    ["explore", "--json"],
]

PYTHON = "import torch\n\n\nclass EAGLEWorker:\n    def draft(self):\n        return 1\n"
STEPS = [
    Step("First", {f"{FOLDER}/eagle_worker.py": PYTHON, "README.md": "a\n"}, ("v0.4.6",), zone="-0800"),
    Step(
        "--amend me | fix; a, b\x1fc (#12)",
        {f"{FOLDER}/eagle_worker.py": PYTHON + "\n\nA = 1\n"},
        body=f"{'a' * 40}\n\x1f",
    ),
    Step(b"caf\xe9 raw", {f"{FOLDER}/" + r"caf\351.py": "# b\n"}),
    Step("café said".encode("latin-1"), {f"{FOLDER}/b.py": "b = 2\n"}, encoding="ISO-8859-1"),
    Step(
        "\x1b[31mred\x1b[0m \x9b2J \x07 \u202eback",
        {f"{FOLDER}/eagle worker v2.py": PYTHON, f"{FOLDER}/eagle_worker.py": None},
    ),
    Step("Elsewhere alone", {"README.md": "b\n"}),
    Step("推测解码 \U0001f680 (#7)", {f"{FOLDER}/b.py": "b = 3\n"}, ("v0.5.0rc0",)),
]
SUBJECTS = [
    "First",
    "--amend me | fix; a, b\x1fc (#12)",
    "caf\ufffd raw",
    "café said",
    "\x1b[31mred\x1b[0m \x9b2J \x07 \u202eback",
    "推测解码 \U0001f680 (#7)",
]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("history") / "origin"
    make_history(folder, STEPS)
    return folder


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without settings and without a clone; the current folder is an empty one. Returns the home."""
    for name in [name for name in os.environ if name.startswith(("GIT_", "REFSPEC_"))]:
        if name not in ("GIT_PYTHON_REFRESH",):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    (home / "cwd").mkdir(parents=True)
    for name, value in {"HOME": home, "XDG_CONFIG_HOME": home / "xdg", "REFSPEC_CACHE": home / "cache"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(home / "cwd")
    return home


@pytest.fixture
def known(origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue that knows the small repository as the real one knows SGLang."""
    commits = tuple(read_commits(Clone(origin)))
    real = catalogue.releases()[-1]
    releases = tuple(
        real.__class__(**real.__dict__ | {"version": tag[1:], "commit": git(origin, "rev-parse", tag)})
        for tag in ("v0.4.6", "v0.5.0rc0")
    )
    story = tuple(
        s.__class__(**s.__dict__ | {"hash": c.hash}) for s, c in zip(catalogue.story(), commits, strict=False)
    )
    for name, value in (("commits", commits), ("releases", releases), ("story", story)):
        monkeypatch.setattr(catalogue, name, lambda value=value: value)
    monkeypatch.setattr(catalogue, "reach", lambda: Reach(commits[-1].hash, "2025-01-05"))


# --- the kinds


def with_work_tree(origin: Path, place: Path) -> Path:
    return clone(origin, place / "c")


def git_folder(origin: Path, place: Path) -> Path:
    return clone(origin, place / "c") / ".git"


def bare(origin: Path, place: Path) -> Path:
    return clone(origin, place / "c", "--bare")


def mirror_without_config(origin: Path, place: Path) -> Path:
    (clone(origin, place / "c", "--mirror") / "config").unlink()
    return place / "c"


def linked_worktree(origin: Path, place: Path) -> Path:
    git(clone(origin, place / "c"), "worktree", "add", "-q", place / "linked")
    return place / "linked"


def submodule(origin: Path, place: Path) -> Path:
    """.git is a file, and the folder asked from is not the top of the work tree."""
    git(place, "init", "-q", "super")
    git(place / "super", "-c", "protocol.file.allow=always", "submodule", "add", f"file://{origin}", "sub")
    assert (place / "super/sub/.git").is_file()
    return place / "super/sub/python"


def GIT_01_shallow(origin: Path, place: Path) -> Path:
    return clone(origin, place / "c", "--depth", "2")


def blobless(origin: Path, place: Path) -> Path:
    return clone(origin, place / "c", "--filter=blob:none", "--bare")


def treeless(origin: Path, place: Path) -> Path:
    return clone(origin, place / "c", "--filter=tree:0", "--bare")


def GIT_03_detached(origin: Path, place: Path) -> Path:
    git(clone(origin, place / "c"), "checkout", "-q", "--detach", "HEAD~1")
    return place / "c"


def GIT_04_no_tags(origin: Path, place: Path) -> Path:
    """A branch of a tag's name is not the tag."""
    git(clone(origin, place / "c", "--no-tags"), "branch", "v0.4.6")
    return place / "c"


def tags_named_as_branches(origin: Path, place: Path) -> Path:
    git(clone(origin, place / "c"), "tag", "main", "HEAD~3")
    git(place / "c", "tag", "origin/main", "HEAD~3")
    git(place / "c", "tag", "HEAD", "HEAD~3")
    return place / "c"


def packed_refs(origin: Path, place: Path) -> Path:
    git(clone(origin, place / "c", "--bare"), "pack-refs", "--all")
    assert not any((place / "c/refs").rglob("*/*"))
    return place / "c"


def sha256(origin: Path, place: Path) -> Path:
    make_history(place / "c", STEPS, object_format="sha256")
    return place / "c"


def fork_on_another_branch(origin: Path, place: Path) -> Path:
    git(clone(origin, place / "c"), "checkout", "-q", "-b", "mine")
    git(place / "c", "commit", "-q", "--allow-empty", "-m", "mine")
    git(place / "c", "branch", "-D", "main")
    return place / "c"


def replaced(origin: Path, place: Path) -> Path:
    """One commit stands in for another, and a second has lost its parents, but for who looks at the objects."""
    git(clone(origin, place / "c"), "replace", "v0.4.6^{commit}", "HEAD")
    (place / "c/.git/info").mkdir(exist_ok=True)
    (place / "c/.git/info/grafts").write_text(git(place / "c", "rev-parse", "HEAD~2") + "\n")
    return place / "c"


def awkward_path(origin: Path, place: Path) -> Path:
    return clone(origin, place / " -a path\u2028 with späces; $(x)")


def with_objects_of_another(origin: Path, place: Path) -> Path:
    """They lie in another repository, and a commit-graph is there."""
    git(clone(origin, place / "c", "--shared", "--bare"), "commit-graph", "write", "--reachable", "--changed-paths")
    return place / "c"


WHOLE = [
    with_work_tree,
    git_folder,
    bare,
    mirror_without_config,
    linked_worktree,
    submodule,
    GIT_03_detached,
    GIT_04_no_tags,
    tags_named_as_branches,
    packed_refs,
    sha256,
    fork_on_another_branch,
    replaced,
    awkward_path,
    with_objects_of_another,
]
PARTIAL = [GIT_01_shallow, blobless, treeless]
PECULIAR = [submodule, sha256, *PARTIAL]

# What `where --json` says of each kind, beyond what holds for an ordinary one.
ORDINARY = {
    "is_bare": False,
    "is_linked": False,
    "is_submodule": False,
    "is_shallow": False,
    "filter": None,
    "object_format": "sha1",
    "branch": "refs/heads/main",
    "main": "origin/main",
}
SAID: dict[Callable[[Path, Path], Path], dict[str, Any]] = {
    bare: {"is_bare": True, "main": "main"},
    mirror_without_config: {"is_bare": True, "main": "main"},
    packed_refs: {"is_bare": True, "main": "main"},
    with_objects_of_another: {"is_bare": True, "main": "main"},
    linked_worktree: {"is_linked": True, "branch": "refs/heads/linked"},
    submodule: {"is_submodule": True},
    GIT_01_shallow: {"is_shallow": True},
    blobless: {"is_bare": True, "main": "main", "filter": "blob:none"},
    treeless: {"is_bare": True, "main": "main", "filter": "tree:0"},
    GIT_03_detached: {"branch": None},
    sha256: {"object_format": "sha256", "main": "main"},
    fork_on_another_branch: {"branch": "refs/heads/mine"},
}


# --- what must hold for all


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit status, stdout, stderr; an exception that is none of ours is handed on."""
    done = CliRunner().invoke(app, ["history", *map(str, arguments)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def run_all(path: Path, commands: Sequence[Sequence[str]] = BASIC) -> dict[str, tuple[int, str]]:
    """Runs the commands on the clone: none fails but in one line, or writes anything, or disturbs a terminal.

    Returns the exit status and stdout of each.
    """
    before = listing(path)
    said = {}
    for command in commands:
        status, out, err = run(*command, "--clone", path)
        assert status in (0, 1), (command, status, err)
        assert all(line.startswith("refspec: ") for line in err.splitlines()), (command, err)
        assert status == 1 or not err, (command, err)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out + err), command
        if "--json" in command and not err:
            json.loads(out)
        said[" ".join(command)] = (status, out)
    assert listing(path) == before
    return said


def listing(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file around the clone: its mode, its time, its contents."""
    top = next(place for place in (path, *path.parents) if place.name.startswith("test_"))
    return {
        str(file): (
            (seen := file.lstat()).st_mode,
            seen.st_mtime_ns,
            file.read_bytes() if stat.S_ISREG(seen.st_mode) else b"",
        )
        for file in top.rglob("*")
    }


@pytest.mark.parametrize("make", [*WHOLE, *PARTIAL])
def test_GIT_09_GIT_10_every_kind_of_clone(origin: Path, tmp_path: Path, make: Callable[[Path, Path], Path]) -> None:
    path = make(origin, tmp_path)
    said = run_all(path, COMMANDS if make in PECULIAR else BASIC)
    assert [said[name][0] for name in ("where --json", "overview")] == [0, 0]
    document = json.loads(said["where --json"][1])
    kind = document["kind"]
    flat = {name: kind[name] for name in ORDINARY if name in kind}
    flat |= {"branch": kind["head"]["branch"], "main": kind["main"]["name"]}
    assert flat == ORDINARY | SAID.get(make, {})
    commits = int(git(path, "rev-list", "--count", kind["main"]["commit"]))
    assert kind["main"]["commit"] == git(
        path, "rev-parse", f"refs/{'remotes' if '/' in kind['main']['name'] else 'heads'}/{kind['main']['name']}"
    )
    assert commits == (2 if make is GIT_01_shallow else 7 if make is not replaced else commits)
    assert kind["main"]["date"] == "2025-01-05"
    assert Path(document["clone"]) == path
    if make in (*WHOLE, blobless):
        check_commits(path)


def check_commits(path: Path) -> None:
    """Bytes that are not UTF-8, separators in titles, a body line that looks like a hash, escapes: field by field."""
    commits = read_commits(Clone(path))
    assert [commit.subject for commit in commits] == SUBJECTS
    assert [commit.pr for commit in commits] == [None, 12, None, None, None, 7]
    assert [change.path.removeprefix(FOLDER + "/") for change in commits[2].changes] == ["caf\ufffd.py"]
    assert commits[0].author_date == "2024-12-29T23:30:00-08:00"


def test_GIT_01_the_boundary_is_not_credited_with_the_whole_tree(origin: Path, tmp_path: Path) -> None:
    path = GIT_01_shallow(origin, tmp_path)
    commits = read_commits(Clone(path))
    assert [(commit.subject, commit.boundary, len(commit.changes)) for commit in commits] == [
        ("Elsewhere alone", True, 0),
        (SUBJECTS[-1], False, 1),
    ]
    assert "shallow (history is cut off at 1 commit)" in run("where", "--clone", path)[1]


def test_GIT_03_detached_is_no_branch(origin: Path, tmp_path: Path) -> None:
    path = GIT_03_detached(origin, tmp_path)
    status, out, _ = run("where", "--clone", path)
    assert status == 0
    assert f"HEAD        detached at {git(path, 'rev-parse', 'HEAD')[:10]}\n" in out


def test_treeless_says_what_it_lacks(origin: Path, tmp_path: Path) -> None:
    with pytest.raises(LacksError, match=r"lacks lists of files that are needed: it was made with --filter=tree:0 \("):
        read_commits(Clone(treeless(origin, tmp_path)))


# --- what a doctor says


@pytest.mark.parametrize(
    ("make", "lacking"),
    [
        (with_work_tree, []),
        (submodule, []),
        (replaced, []),
        (GIT_01_shallow, ["commits", "tags"]),
        (blobless, ["contents of the folder", "contents of other files"]),
        (treeless, ["lists of files", "contents of the folder", "contents of other files"]),
        (GIT_04_no_tags, ["tags"]),
    ],
)
def test_doctor_says_what_is_missing(
    origin: Path, tmp_path: Path, known: None, make: Callable[[Path, Path], Path], lacking: list[str]
) -> None:
    path = make(origin, tmp_path)
    status, out, _ = run("doctor", "--json", "--clone", path)
    document = json.loads(out)
    assert [need["need"] for need in document["needs"] if not need["ok"]] == lacking
    assert (status, document["ok"]) == ((1, False) if lacking else (0, True))
    assert all(
        need["remedy"] for need in document["needs"] if not need["ok"] and need["need"] != "contents of the folder"
    )
    assert document["commands"]["lines"]["ok"] == (not {*lacking} - {"tags"})


def test_doctor_counts_missing_contents(origin: Path, tmp_path: Path, known: None) -> None:
    out = run("doctor", "--clone", blobless(origin, tmp_path))[1]
    assert "5 versions of files are missing; refspec history clone makes a clone that has them" in out


def test_doctor_without_a_clone() -> None:
    status, out, err = run("doctor")
    assert (status, err) == (1, "")
    assert out.startswith("No clone was found (refspec history clone makes one")


def test_a_commit_graph_is_written_when_asked_for_and_not_before(origin: Path, tmp_path: Path, known: None) -> None:
    path = with_work_tree(origin, tmp_path)
    graph = path / ".git/objects/info/commit-graph"
    assert "--write-commit-graph writes one" in run("doctor", "--clone", path)[1]
    assert not graph.exists()
    status, out, err = run("doctor", "--write-commit-graph", "--json", "--clone", path)
    assert (status, err) == (0, "")
    assert json.loads(out)["commit_graph_bytes"] == graph.stat().st_size
    assert "graph" not in git(path, "status", "--short")
    assert (
        f"Wrote a commit-graph of {size_of(graph.stat().st_size)}."
        in run("doctor", "--write-commit-graph", "--clone", path)[1]
    )


def test_no_commit_graph_where_git_writes_none(origin: Path, tmp_path: Path) -> None:
    shallow = GIT_01_shallow(origin, tmp_path)
    assert run("doctor", "--write-commit-graph", "--clone", shallow)[2] == (
        "refspec: git writes no commit-graph for a shallow clone "
        "(it is shallow: git fetch --unshallow brings the rest)\n"
    )
    off = clone(origin, tmp_path / "off")
    git(off, "config", "core.commitGraph", "false")
    assert run("doctor", "--write-commit-graph", "--clone", off)[2].startswith("refspec: git wrote no commit-graph: ")
    assert run("doctor", "--write-commit-graph")[2].startswith(
        "refspec: a commit-graph needs a clone of SGLang, and no clone"
    )


# --- damage


def loose(origin: Path, place: Path, name: str) -> Path:
    """The file of one object in a copy of the repository, whose objects are files."""
    copy = Path(shutil.copytree(origin, place / "copy"))
    hash_ = git(copy, "rev-parse", name)
    file = copy / ".git/objects" / hash_[:2] / hash_[2:]
    file.chmod(0o644)
    return file


@pytest.mark.parametrize("damage", [b"garbage", None])
@pytest.mark.parametrize("name", [f"HEAD:{FOLDER}/b.py", f"HEAD:{FOLDER}", "HEAD"])
def test_a_damaged_object_is_told_in_one_line(
    origin: Path, tmp_path: Path, known: None, name: str, damage: bytes | None
) -> None:
    file = loose(origin, tmp_path, name)
    path = tmp_path / "copy"
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    said = run_all(path, [["doctor", "--json"], ["where"]])
    assert said["doctor --json"][0] == 1
    if said["doctor --json"][1]:
        damaged = [need for need in json.loads(said["doctor --json"][1])["needs"] if not need["ok"]]
        assert damaged


def test_an_object_that_is_another_is_noticed(origin: Path, tmp_path: Path, known: None) -> None:
    """It can be read, only its contents are not what its hash says."""
    file = loose(origin, tmp_path, f"HEAD:{FOLDER}/b.py")
    hash_ = git(origin, "rev-parse", "HEAD:README.md")
    shutil.copyfile(origin / ".git/objects" / hash_[:2] / hash_[2:], file)
    document = json.loads(run("doctor", "--json", "--clone", tmp_path / "copy")[1])
    contents = next(need for need in document["needs"] if need["need"] == "contents of the folder")
    assert not contents["ok"]
    assert re.search("damaged|corrupt|mismatch", contents["found"])


# --- repositories that are refused, or hold nothing


def test_no_commit_at_all(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main", "empty")
    said = run_all(tmp_path / "empty", [*BASIC, ["where"]])
    assert said["where"][0] == 0
    assert "HEAD        main, which has no commit yet\nMain line   there is no commit\n" in said["where"][1]
    assert said["doctor"][0] == 1


def refusal(path: Path) -> str:
    """What every command says, since git cannot or will not read the clone."""
    messages = set()
    for command in BASIC:
        status, out, err = run(*command, "--clone", path)
        assert (status, out) == (1, "")
        assert err.startswith("refspec: ")
        assert err.count("\n") == 1
        messages.add(err)
    (message,) = messages
    return message.removeprefix("refspec: ").removesuffix("\n")


def test_GIT_13_repository_of_another_user(
    origin: Path, tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_work_tree(origin, tmp_path)
    if os.geteuid() == 0:
        for entry in (path, path / ".git"):
            os.chown(entry, 54321, -1)
    else:
        monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # a switch of git's own
    message = refusal(path)
    assert message.startswith(f"git refuses {path}, which belongs to another user; if you trust it, run: ")
    assert f"git config --global --add safe.directory {path}" in message
    assert not list(alone.glob(".gitconfig"))
    monkeypatch.chdir(path)
    status, out, _ = run("where")  # where it is merely at hand, it is passed over
    assert status == 0
    assert "Passed over  git refuses" in out


def test_no_git(origin: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal(origin) == "git is needed: install it, then run this again"
    monkeypatch.chdir(origin)
    assert run("overview")[0] == run("where")[0] == 0


@pytest.mark.parametrize(
    ("version", "complaint"),
    [
        ("git version 2.20.1", "git 2.20.1 is too old: 2.25 or newer is needed"),
        ("git version is what", "git does not say which version it is: .*"),
        ("git", "git does not say which version it is: .*"),
        ("git version 2.39.5", "git gives no answer that can be read in .*"),
    ],
)
def test_git_too_old_or_none_at_all(
    origin: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, complaint: str
) -> None:
    (tmp_path / "git").write_text(f"#!/bin/sh\necho {version}\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert re.fullmatch(complaint, refusal(origin))


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("[extensions]\nunheardOf = true\n[core]\nrepositoryformatversion = 1\n", "unknown repository extension"),
        ("[core]\nrepositoryformatversion = 99\n", "Expected git repo version"),
        ("[", "bad config line"),
    ],
)
def test_a_repository_that_git_cannot_read(origin: Path, tmp_path: Path, setting: str, complaint: str) -> None:
    path = bare(origin, tmp_path)
    with (path / "config").open("a") as config:
        config.write(setting)
    message = refusal(path)
    assert message.startswith(f"git cannot read {path}: fatal: ")
    assert complaint in message


def test_no_repository(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty") == f"not a git repository: {tmp_path / 'empty'} (name a clone of SGLang)"
    for name in ("none", "file"):
        assert refusal(tmp_path / name) == f"no such folder: {tmp_path / name}"


# --- in spite of settings


HOSTILE = """
[core]
    fsmonitor = {trace}
    sshCommand = {trace}
    hooksPath = {hooks}
    gitProxy = {trace}
    askPass = {trace}
    editor = {trace}
    pager = {trace}
    alternateRefsCommand = {trace}
    attributesFile = {attributes}
    worktree = /nonexistent
[diff]
    external = {trace}
[diff "trap"]
    command = {trace}
    textconv = {trace}
[filter "trap"]
    clean = {trace}
    smudge = {trace}
    process = {trace}
[gpg]
    program = {trace}
[log]
    showSignature = true
[credential]
    helper = {trace}
[sequence]
    editor = {trace}
[alias]
    log = !{trace}
    cat-file = !{trace}
    rev-list = !{trace}
[pager]
    log = {trace}
    diff = {trace}
[uploadpack]
    packObjectsHook = {trace}
[remote "--upload-pack={trace}"]
    promisor = true
    url = ext::{trace}
[remote "origin"]
    url = ext::{trace}
    vcs = trap
    uploadpack = {trace}
    promisor = true
    partialclonefilter = blob:none
"""


@pytest.mark.parametrize("make", [with_work_tree, blobless])
def test_no_program_of_a_hostile_clone_is_run(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path, Path], Path]
) -> None:
    """Not for what the commands ask today, and not for what they may ask: each way to look at a commit."""
    path = make(origin, tmp_path)
    trace, hooks = tmp_path / "trace", tmp_path / "hooks"
    hooks.mkdir()
    trace.write_text(f"#!/bin/sh\necho $0 >>{tmp_path}/traces\n")
    trace.chmod(0o755)
    for hook in ("post-index-change", "reference-transaction", "fsmonitor-watchman", "post-checkout"):
        shutil.copy(trace, hooks / hook)
    (tmp_path / "attributes").write_text("* diff=trap filter=trap\n")
    git_dir = Path(git(path, "rev-parse", "--absolute-git-dir"))
    (git_dir / "info").mkdir(exist_ok=True)
    (git_dir / "info/attributes").write_text("* diff=trap filter=trap\n")
    head = git(path, "rev-parse", "HEAD")
    with (git_dir / "config").open("a") as config:
        config.write(HOSTILE.format(trace=trace, hooks=hooks, attributes=tmp_path / "attributes"))
    for name in ("GIT_SSH_COMMAND", "GIT_ASKPASS", "GIT_EXTERNAL_DIFF", "GIT_PAGER", "GIT_EDITOR", "GIT_PROXY_COMMAND"):
        monkeypatch.setenv(name, str(trace))
    run_all(path)
    asked = Clone(path)
    for arguments in (
        ["log", "-p", *PLAIN_DIFF, head],
        ["log", "-Sb", *PLAIN_DIFF, head],
        ["log", "-Gb", *PLAIN_DIFF, head],
        ["log", f"-L1,1:{FOLDER}/b.py", *PLAIN_DIFF, head],
        ["log", "--stat", "-M", "--format=%H %G?", *PLAIN_DIFF, head],
        ["show", *PLAIN_DIFF, head],
        ["diff", *PLAIN_DIFF, f"{head}~2", head],
        ["diff-tree", "-p", *PLAIN_DIFF, f"{head}~2", head],
        ["grep", "-e", "b", head],
        ["ls-tree", "-r", head],
        ["rev-list", "--objects", head],
    ):
        try:
            asked.git(*arguments)
        except LacksError:
            assert make is blobless
    for names in ([f"{head}:{FOLDER}/b.py"], [":README.md"], ["HEAD@{0}"], ["1" * 40]):
        try:
            asked.check(*names)
            list(asked.objects(*names))
        except LacksError:
            assert make is blobless
    assert not (tmp_path / "traces").exists()


def test_the_trap_above_can_close(origin: Path, tmp_path: Path) -> None:
    """What `test_no_program_of_a_hostile_clone_is_run` looks for does come about where git is asked plainly."""
    path = with_work_tree(origin, tmp_path)
    trace = tmp_path / "trace"
    trace.write_text(f"#!/bin/sh\necho $0 >>{tmp_path}/traces\n")
    trace.chmod(0o755)
    git(path, "config", "diff.external", str(trace))
    git(path, "diff", "HEAD~2", "HEAD")
    assert (tmp_path / "traces").exists()


SETTINGS_OF_USERS = """
[color]
    ui = always
    diff = always
[core]
    quotePath = true
    abbrev = 4
[diff]
    noprefix = true
    mnemonicPrefix = true
    renames = copies
    renameLimit = 1
    external = false
    relative = true
    orderFile = /nonexistent
    algorithm = patience
    context = 0
[format]
    pretty = oneline
[i18n]
    logOutputEncoding = UTF-16
[log]
    date = relative
    showSignature = true
    follow = true
    abbrevCommit = true
    decorate = full
    mailmap = false
    showRoot = false
    diffMerges = off
[mailmap]
    file = {home}/mailmap
[core]
    pager = false
[alias]
    log = false
"""


def test_GIT_12_settings_of_users_change_nothing(
    origin: Path, tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_work_tree(origin, tmp_path)

    def answers() -> list[Any]:
        asked = Clone(path)
        diff = asked.git("diff", *PLAIN_DIFF, "-p", asked.main.commit + "~3", asked.main.commit)
        return [read_commits(asked), diff, run_all(path)]

    plain = answers()
    (alone / ".gitconfig").write_text(SETTINGS_OF_USERS.format(home=alone))
    (alone / "mailmap").write_text("Somebody Else <a@b>\n")
    assert git_says_otherwise(path, alone)
    assert answers() == plain


def git_says_otherwise(path: Path, home: Path) -> bool:
    """Do the settings bite, where git is asked plainly?"""
    import subprocess

    def log(**environment: str) -> bytes:
        return subprocess.run(
            ["git", "-C", path, "log", "-p", "--color=auto"], env=os.environ | environment, capture_output=True
        ).stdout

    return log() != log(HOME="/nonexistent")


ELSEWHERE = (
    "GIT_DIR GIT_WORK_TREE GIT_COMMON_DIR GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES "
    "GIT_NAMESPACE GIT_SHALLOW_FILE GIT_GRAFT_FILE GIT_CONFIG GIT_EXTERNAL_DIFF GIT_ATTR_SOURCE GIT_REPLACE_REF_BASE"
).split()


def test_variables_that_point_git_elsewhere(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_work_tree(origin, tmp_path)
    plain = run_all(path), read_commits(Clone(path))
    other = tmp_path / "other"
    make_history(other, [Step("another")])
    for name in ELSEWHERE:
        monkeypatch.setenv(name, str(other / ".git"))
    for name in ("GIT_LITERAL_PATHSPECS", "GIT_GLOB_PATHSPECS", "GIT_ICASE_PATHSPECS", "GIT_NOGLOB_PATHSPECS"):
        monkeypatch.setenv(name, "1")
    for name in ("GIT_TRACE", "GIT_TRACE_SETUP", "GIT_TRACE2", "GIT_TRACE_PERFORMANCE", "GIT_CURL_VERBOSE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=9")
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert (run_all(path), read_commits(Clone(path))) == plain


def test_trace_does_not_hide_why_git_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TRACE", "1")
    path = tmp_path / "c"
    git(tmp_path, "init", "-q", "--bare", path)
    with (path / "config").open("a") as config:
        config.write("[")
    assert refusal(path).startswith(f"git cannot read {path}: fatal: bad config line")


# --- names of revisions


# Of each name, the number of the commit that it means; None if it means none.
NAMES = {
    "main": 6,
    "HEAD~1": 5,
    "@": 6,
    "v0.4.6": 0,
    "refs/tags/v0.5.0rc0": 6,
    "HEAD^{/First}": 0,
    ":/First": 0,
    ":/said": 3,
    "@{0}": 6,
    "@{-1}": None,
    "@{...}": None,
    "HEAD~99": None,
    "HEAD^{tree}": None,
    "HEAD:README.md": None,
    ":README.md": None,
    "main..HEAD": None,
    "main...HEAD": None,
    "^main": None,
    "refs/heads/*": None,
    "HEAD ": None,
    "HEAD\r": None,
    "HEAD\tx": None,
    " --all": None,
    "$(touch made)": None,
    "x" * 300_000: None,
    "0" * 40: None,
    "f" * 64: None,
    "\udce9": None,
    "推测": None,
    "a.lock": None,
    "HEAD^{": None,
    "HEAD^{/[}": None,
}


@pytest.mark.parametrize("make", [with_work_tree, blobless])
def test_names_of_revisions(origin: Path, tmp_path: Path, make: Callable[[Path, Path], Path]) -> None:
    """Whatever a name looks like, it is one name: those behind it are found."""
    asked = Clone(make(origin, tmp_path))
    commits = git(origin, "rev-list", "--reverse", "main").split()
    found = dict(zip(NAMES, asked.resolve(*NAMES), strict=True))
    assert found == {name: None if number is None else commits[number] for name, number in NAMES.items()}


@pytest.mark.parametrize("name", ["HEAD@{99}", "@{push}"])
def test_names_at_which_git_gives_up(origin: Path, tmp_path: Path, name: str) -> None:
    """The clone lacks them, and has the others."""
    asked = Clone(with_work_tree(origin, tmp_path))
    git(tmp_path / "c", "checkout", "-q", "-b", "alone")
    assert asked.resolve("HEAD", name) == [git(origin, "rev-parse", "HEAD"), None]
    with pytest.raises(LacksError, match="lacks the revision"):
        asked.commit(name)


def test_a_path_with_a_line_break(origin: Path, tmp_path: Path) -> None:
    """Of a repository, and of a work tree beside it."""
    (tmp_path / "a\nb").mkdir()
    here = clone(origin, tmp_path / "a\nb/c")
    git(here, "worktree", "add", "-q", "--detach", tmp_path / "a\nb/\nd")
    for place in (here, tmp_path / "a\nb/\nd"):
        assert Clone(place).common_dir == here / ".git"
        assert run("log", "-n", "1", "--clone", place)[::2] == (0, "")
    assert Clone(tmp_path / "a\nb/\nd").is_linked


def test_damage_that_a_commit_graph_hides(origin: Path, tmp_path: Path) -> None:
    """A commit that is in the graph, and can no longer be read itself."""
    file = loose(origin, tmp_path, git(origin, "rev-list", "-1", "HEAD~1", "--", FOLDER))
    git(tmp_path / "copy", "commit-graph", "write", "--reachable")
    file.write_bytes(file.read_bytes()[:20] + b"\xff" * 8)
    _, _, err = run("log", "--clone", tmp_path / "copy")
    assert "(git fsck says more)" in err
    needs = json.loads(run("doctor", "--json", "--clone", tmp_path / "copy")[1])["needs"]
    found = next(need for need in needs if need["need"] == "commits")
    assert (found["ok"], "git cannot answer" in found["found"]) == (False, True)


@pytest.mark.parametrize("arguments", [["show", ""], ["show", "x" * 100_000]])
def test_revisions_that_the_catalogue_cannot_know(arguments: list[str]) -> None:
    status, out, err = run(*arguments, "--catalogue")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("refspec: not a revision: ''" if arguments[1] == "" else f"refspec: {'x' * 100}..., which")


@pytest.mark.parametrize("command", ["symbol main --path", "log --path"])
def test_an_empty_path_is_refused(origin: Path, command: str) -> None:
    status, out, err = run(*command.split(), "", "--clone", origin)
    assert (status, out) == (2, "")
    assert "not a path in SGLang's repository" in err


@pytest.mark.parametrize("name", ["*", ".", "..", "/", "../x", "never.py"])
def test_a_name_that_no_file_had_is_not_looked_for_in_renames(origin: Path, tmp_path: Path, name: str) -> None:
    with counted_git(tmp_path) as calls:
        status, out, err = run("follow", name, "--clone", origin)
    assert (status, out) == (1, "")
    assert err.startswith(f"refspec: no file was ever called {name}")
    assert not [call for call in calls if " -M" in call]


@pytest.mark.parametrize("name", ["-x", "--all", "-", "", "a\nb", "a\0b", "\ud800", "--" + "x" * 10_000])
def test_names_that_are_refused(origin: Path, name: str) -> None:
    with pytest.raises(HistoryError, match=r"^(a revision cannot begin with '-'|not a revision): .{0,110}$"):
        Clone(origin).resolve("HEAD", name)


def test_a_partial_clone_is_asked_for_what_it_lacks(origin: Path, tmp_path: Path) -> None:
    """An older git would try to fetch a hash that is not there, fail, and take the other answers with it."""
    asked = Clone(blobless(origin, tmp_path))
    blob, main = git(origin, "rev-parse", "HEAD:README.md"), asked.main.commit
    assert asked.present(main, blob, "1" * 40) == {main}
    assert asked.check(blob, main, f"{'1' * 40}:a", f"{main}:{FOLDER}")[0::2] == [None, None]
    assert list(asked.objects("1" * 40, blob)) == [None, None]
    with pytest.raises(LacksError, match=r"this clone lacks the revision 1{40}$"):
        asked.commit("1" * 40)
    with pytest.raises(
        LacksError, match="lacks contents of files that are needed: it was made with --filter=blob:none"
    ):
        asked.check(f"{main}:README.md")


# --- what users type

TYPED = "--output=typed"  # git would take it for an option, and write a file
# Of each command, what takes a text, and a command line that has this one there.
PLACES = {
    ("clone", "folder"): ["--from", "ORIGIN", "--", TYPED],
    ("clone", "source"): ["--from", TYPED],
    ("where", "clone"): ["--clone", TYPED],
    ("log", "since"): ["--since", TYPED],
    ("log", "until"): ["--until", TYPED],
    ("log", "prs"): ["--pr", TYPED],
    ("log", "files"): ["--file", TYPED],
    ("log", "text"): ["--text", TYPED],
    ("log", "path"): ["--path", TYPED],
    ("dir", "at"): ["--at", TYPED],
    ("story", "which"): ["--", TYPED],
    ("show", "commit"): ["--", TYPED],
    ("diff", "a"): ["--", TYPED, "HEAD"],
    ("diff", "b"): ["--", "HEAD", TYPED],
    ("diff", "paths"): ["--path", TYPED, "HEAD~3", "HEAD"],
    ("reland", "first"): ["--", TYPED, "HEAD"],
    ("reland", "second"): ["--", "HEAD", TYPED],
    ("symbol", "name"): ["--", TYPED],
    ("symbol", "path"): ["--path", TYPED, "b"],
    ("lines", "function"): ["--", f"{TYPED}:{TYPED}"],
    ("lines", "revision"): ["--from", TYPED, "b.py:b"],
    ("follow", "file"): ["--", TYPED],
    ("compare", "operation"): ["--", TYPED],
    ("compare", "at"): ["--at", TYPED, "draft"],
    ("moved", "before"): ["--", TYPED],
    ("moved", "after"): ["--", "HEAD", TYPED],
    ("moved", "path"): ["--path", TYPED, "HEAD~3", "HEAD"],
    ("claims", "ids"): ["--", TYPED],
    ("claims", "source"): ["--source", TYPED],
    ("claims", "verdict"): ["--verdict", TYPED],
    ("bisect-demo", "keep"): ["--keep", TYPED],
}


@pytest.mark.parametrize(("command", "parameter"), PLACES)
def test_what_a_user_types_is_no_option_of_git_s(origin: Path, tmp_path: Path, command: str, parameter: str) -> None:
    line = [str(origin) if word == "ORIGIN" else word for word in PLACES[command, parameter]]
    (tmp_path / "calls").mkdir()
    with counted_git(tmp_path / "calls") as calls:
        run(command, *(["--clone", origin] if "clone" in taking_texts(command) - {parameter} else []), *line)
    options = [call.partition(" -- ")[0].split(" ") for call in calls]
    assert not [call for call in options if any(word.startswith(TYPED) for word in call)]
    assert not [*tmp_path.rglob("typed"), *origin.rglob("typed")]
    if (command, parameter) in (("log", "path"), ("symbol", "path"), ("diff", "paths")):
        assert any(f" -- {TYPED}" in call for call in calls)


def test_every_text_that_a_command_takes_is_tried() -> None:
    """--clone alone is tried once: it is the same everywhere. --lang takes two words."""
    taken = {(command, name) for command in history.COMMANDS for name in taking_texts(command)}
    assert {place for place in taken if place[1] not in ("clone", "lang")} == {*PLACES} - {("where", "clone")}


def test_every_command_that_asks_a_clone_is_tried_on_all_kinds() -> None:
    asking = {command for command in history.COMMANDS if "clone" in taking_texts(command)}
    assert asking == {line[0] for line in COMMANDS}


OF_FEW_VALUES = ("boolean", "int", "integer", "int range", "integer range", "choice")


def taking_texts(command: str) -> set[str | None]:
    """The parameters of a command that take whatever is typed."""
    parameters = typer.main.get_command(app).commands["history"].commands[command].params  # type: ignore[attr-defined]
    return {parameter.name for parameter in parameters if parameter.type.name not in OF_FEW_VALUES}


# --- how much git is run


@pytest.fixture(scope="module")
def long_history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long") / "long"
    files = [{f"{FOLDER}/b.py": f"b = {n}\n"} if n % 100 == 0 else {"README.md": str(n)} for n in range(20_000)]
    steps = [*STEPS[:-3], *(Step(f"n {n}", file) for n, file in enumerate(files)), *STEPS[-3:]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_TRIM_THRESHOLD_", "100000000")  # or git hands memory back after each object, for seconds
        make_history(folder, [replace(step, seconds=n) for n, step in enumerate(steps)], bare=True)
    return folder


def test_20000_commits_and_no_more_processes(origin: Path, long_history: Path, tmp_path: Path) -> None:
    numbers = {}
    Clone(origin)  # GitPython asks for git's version when it is imported
    for path in (origin, long_history):
        (tmp_path / path.name).mkdir()
        with counted_git(tmp_path / path.name) as calls:
            for command in COMMANDS:
                run(*command, "--clone", path)
            commits = read_commits(Clone(path))
        numbers[path] = len(calls)
    assert len(commits) == 206
    assert numbers[origin] == numbers[long_history] < 10 * len(COMMANDS)


# --- which clone


def test_the_clone_around_the_current_folder_then_our_own(
    origin: Path, tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone_and_passed_over() -> tuple[str | None, list[tuple[str, bool]]]:
        document = json.loads(run("where", "--json")[1])
        return document["clone"], [(other["folder"], other["broken"]) for other in document["passed_over"]]

    assert clone_and_passed_over() == (None, [])
    own = alone / "cache" / sources.OWN_CLONE
    own.parent.mkdir()
    clone(origin, own, "--bare")
    assert clone_and_passed_over() == (str(own), [])
    inside = clone(origin, tmp_path / "c") / FOLDER
    monkeypatch.chdir(inside)
    assert clone_and_passed_over() == (str(inside), [])
    other = tmp_path / "other"
    make_history(other, [Step("another")])
    monkeypatch.chdir(other)
    assert clone_and_passed_over() == (str(own), [(str(other), False)])
    (own / "HEAD").write_text("nonsense")
    assert clone_and_passed_over() == (None, [(str(other), False), (str(own), True)])
    assert "Passed over  " in run("where")[1]
    monkeypatch.setenv("REFSPEC_SGLANG", str(inside))
    assert clone_and_passed_over() == (str(inside), [])
    assert json.loads(run("where", "--json", "--catalogue")[1])["clone"] is None


def test_a_treeless_clone_at_hand_is_no_obstacle(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(treeless(origin, tmp_path))
    assert run("overview")[0] == 0


def test_a_current_folder_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run("where")[0] == run("overview")[0] == 0


def test_a_home_that_is_a_repository(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with dotfiles: refspec's cache folder lies in it, and is not taken for a clone."""
    git(alone, "init", "-q")
    monkeypatch.chdir("/")
    assert json.loads(run("where", "--json")[1])["passed_over"] == []


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise sources.cache.NoHomeError("none")

    monkeypatch.setattr(sources.cache, "folder", no_home)
    assert run("where")[0] == 0


@pytest.mark.parametrize(
    ("reach", "said"),
    [
        (6, ", as the clone does"),
        (4, "; the clone has 2 commits more"),
        (None, ", which the clone has not"),
    ],
)
def test_how_the_clone_compares_with_the_catalogue(
    origin: Path, monkeypatch: pytest.MonkeyPatch, reach: int | None, said: str
) -> None:
    commits = git(origin, "rev-list", "--reverse", "main").split()
    hash_ = "1" * 40 if reach is None else commits[reach]
    monkeypatch.setattr(catalogue, "reach", lambda: Reach(hash_, "2025-01-05"))
    assert f"reaches to {hash_[:10]} of 2025-01-05{said}\n" in run("where", "--clone", origin)[1]


def test_a_main_line_that_is_behind_or_has_parted(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bare(origin, tmp_path)
    reach = git(path, "rev-parse", "main")
    monkeypatch.setattr(catalogue, "reach", lambda: Reach(reach, "2025-01-05"))
    git(path, "update-ref", "refs/heads/main", "main~2")
    assert "; the clone's main line lacks 2 of them\n" in run("where", "--clone", path)[1]
    parted = git(path, "commit-tree", "-p", "main", "-m", "parted", "main^{tree}")
    git(path, "update-ref", "refs/heads/main", parted)
    assert "; since they parted, that has 2 commits and the clone's main line 1\n" in run("where", "--clone", path)[1]
