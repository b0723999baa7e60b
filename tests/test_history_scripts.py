"""scripts/eagle-commits.sh and scripts/spec-dir.sh: what they print, on which clones, in spite of which settings.

SGLang's history is too large to carry along, so these tests make a small repository of their own. spec-dir.sh runs on
it as it is, since all that it asks for are two tags and REF. The hashes that eagle-commits.sh asks for exist in SGLang
alone: as it is, the script shows what it says of commits that are missing; to see it print, `asking_for` copies the
scripts and puts the small repository's hashes in place of the twelve.

Every script runs on a PATH that holds bash, git and readlink, and nothing else.
"""

import os
import pty
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from script_machine import REPO, Machine, settings

EAGLE, SPEC_DIR = REPO / "scripts" / "eagle-commits.sh", REPO / "scripts" / "spec-dir.sh"
TIMELINE = REPO / "scripts" / "spec-timeline.sh"
TWELVE = (
    "9c05c6898e b0524c3789 ad20b7957e 815dce0554 8c8779cd05 013021b6a1 "
    "f9905d59a8 862dd76c76 9fafa62db7 9fb48f951f e983e43248 b26bc86b36"
).split()
FOLDER = "python/sglang/srt/speculative"
LONG = "Añadir un trabajador – 推测解码 " * 6  # 27 characters six times, in 35 bytes each
SPEC_LINES = [
    "v0.4.6        2 files, 1 with worker in its name: eagle_worker",
    'v0.5.0rc0     5 files, 3 with worker in their names: caf\ufffd_worker eagle_worker worker\u00a0"x"\\',
    "HEAD          1 file, 0 with worker in their names",
]
NO_REF = "spec-dir.sh: this clone lacks the commit 29f6d408c0 (REF=... names another)\n"
NO_TAGS = "".join(
    f"spec-dir.sh: this clone lacks the tag {tag} (git fetch --tags https://github.com/sgl-project/sglang brings it)\n"
    for tag in ("v0.4.6", "v0.5.0rc0")
)


def history() -> bytes:
    """The stream that `git fast-import` makes `small` from: five commits, the oldest first."""

    def commit(subject: bytes, files: dict[str, str], author: str, encoding: str = "") -> bytes:
        tree = "deleteall\n" + "".join(f'M 100644 inline "{name}"\ndata 1\n.\n' for name in files)
        return (
            f"commit refs/heads/main\nauthor a <a@b> {author}\ncommitter c <c@d> 1767225600 +0000\n".encode()
            + (f"encoding {encoding}\n".encode() if encoding else b"")
            + b"data %d\n%s\n" % (len(subject), subject)
            + tree.encode()
        )

    base = {f"{FOLDER}/{name}": "" for name in ("eagle_worker.py", "eagle_utils.py", "worker.cpp", ".worker")}
    base |= {"python/sglang/worker.py": "", "test/srt/speculative/worker.py": ""}
    # The names that git would quote: \351 is a byte that is not UTF-8, \302\240 a space that does not break.
    more = {f"{FOLDER}/{name}": "" for name in (r"caf\351_worker.py", r"worker\302\240\"x\"\\.py", "worker_parts/a.py")}
    body = b"\n\n0123456789012345678901234567890123456789\n\x1f\n"
    return b"".join(
        [
            commit(b"--amend me | fix; a, b  c\x1fd" + body, base, "1735543800 -0800"),  # there still 2024-12-29
            b"tag v0.4.6\nfrom refs/heads/main\ntagger a <a@b> 1735543800 -0800\ndata 0\n",
            commit(LONG.encode(), base | more, "1735596000 +1400"),  # 2024-12-30 22:00 in UTC
            b"reset refs/tags/v0.5.0rc0\nfrom refs/heads/main\n\n",
            commit(b"caf\xe9 raw", base, "1735732800 +0000"),
            commit(b"caf\xe9 said", base, "1735732800 +0000", "ISO-8859-1"),
            commit(b"x" * 84, {f"{FOLDER}/eagle_utils.py": ""}, "1735732800 +0000"),
        ]
    )


def small_lines(commits: list[str]) -> list[str]:
    """What eagle-commits.sh is to print of `small`: 24 columns of date and hash, then 72 of the title."""
    dates = ["2024-12-29", "2024-12-31", "2025-01-01", "2025-01-01", "2025-01-01"]
    titles = ["--amend me | fix; a, b  c\x1fd", LONG[:72], "caf\ufffd raw", "café said", "x" * 72]
    return [f"{date}  {commit[:10]}  {title}" for date, commit, title in zip(dates, commits, titles, strict=True)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """With the repository `small`, which serves partial clones as well."""
    machine = Machine(tmp_path)
    machine.git("init", "-q", "-b", "main", tmp_path / "small")
    machine.git("-C", tmp_path / "small", "fast-import", "--quiet", stdin=history())
    machine.git("-C", tmp_path / "small", "config", "uploadpack.allowFilter", "true")
    machine.git("-C", tmp_path / "small", "config", "uploadpack.allowAnySHA1InWant", "true")
    return machine


@pytest.fixture
def commits(machine: Machine) -> list[str]:
    return machine.git("-C", "small", "rev-list", "--reverse", "main").split()


# --- what they print


def test_eagle_commits_prints_each(machine: Machine, commits: list[str]) -> None:
    """In the order asked for, the author's day, ten digits, 96 characters; GIT_10: whatever the title holds."""
    script = machine.asking_for(*reversed(commits))
    assert machine.run(script, "small") == (0, small_lines(commits)[::-1], "")


def test_GIT_09_bytes_that_are_not_utf8(machine: Machine, commits: list[str]) -> None:
    """Without an encoding a replacement mark, with one the letter; so too in a file's name (see SPEC_LINES)."""
    _, lines, _ = machine.run(machine.asking_for(*commits[2:4]), "small")
    assert [line[24:] for line in lines] == ["caf\ufffd raw", "café said"]


def test_spec_dir_counts_python_files_of_the_folder(machine: Machine) -> None:
    assert machine.run(SPEC_DIR, "small", REF="HEAD") == (0, SPEC_LINES, "")


def test_spec_dir_in_chinese(machine: Machine) -> None:
    assert machine.run(SPEC_DIR, "--lang", "zh", "small") == (
        1,
        [
            "v0.4.6        2 个文件：1 个带 worker 的文件；eagle_worker",
            'v0.5.0rc0     5 个文件：3 个带 worker 的文件；caf\ufffd_worker eagle_worker worker\u00a0"x"\\',
        ],
        "spec-dir.sh：这个克隆里没有提交 29f6d408c0（可用 REF=... 指定别的版本）\n",
    )


def test_names_of_workers_are_cut_at_120_characters(machine: Machine) -> None:
    stream = "commit refs/heads/many\ncommitter c <c@d> 1767225600 +0000\ndata 0\n" + "".join(
        f"M 100644 inline {FOLDER}/wörker_worker_{i}.py\ndata 0\n" for i in range(9)
    )
    machine.git("-C", "small", "fast-import", "--quiet", stdin=stream.encode())
    names = " ".join(f"wörker_worker_{i}" for i in range(9))
    _, lines, _ = machine.run(SPEC_DIR, "small", REF="many")
    assert lines[2] == f"many          9 files, 9 with worker in their names: {names[:120]}"


@pytest.mark.parametrize(
    ("env", "args", "chinese"),
    [
        ({}, [], False),
        ({"LANG": "zh_CN.UTF-8"}, [], True),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_TW"}, [], True),
        ({"LANG": "zh_CN.UTF-8", "LC_MESSAGES": "en_US.UTF-8"}, [], False),
        ({"LC_MESSAGES": "zh_CN.UTF-8", "LC_ALL": "C"}, [], False),
        ({"LANG": "zh_CN.UTF-8", "LC_MESSAGES": "", "LC_ALL": ""}, [], True),
        ({"LC_ALL": "zh_CN.GBK", "LANG": "C"}, [], True),
        ({"LANGUAGE": "zh", "LC_CTYPE": "zh_CN.UTF-8"}, [], False),
        ({"LC_ALL": "zh_CN.UTF-8"}, ["--lang", "en"], False),
        ({"LC_ALL": "C"}, ["--lang=zh"], True),
    ],
)
def test_language(machine: Machine, env: dict[str, str], args: list[str], chinese: bool) -> None:
    """Whatever the locale, what is printed is UTF-8, and characters are counted, not bytes."""
    status, lines, _ = machine.run(SPEC_DIR, *args, "small", REF="HEAD", **env)
    assert status == 0
    assert [line[:14] for line in lines] == [line[:14] for line in SPEC_LINES]
    assert all(("个文件：" in line) == chinese for line in lines)


@pytest.mark.parametrize("locale", ["C", "POSIX", "C.UTF-8", "zh_CN.GBK", "ja_JP.SJIS", "no such locale"])
def test_titles_do_not_depend_on_the_locale(machine: Machine, commits: list[str], locale: str) -> None:
    """Of a locale that the machine does not have, bash itself warns on stderr."""
    assert machine.run(machine.asking_for(*commits), "small", LC_ALL=locale)[:2] == (0, small_lines(commits))


@pytest.mark.parametrize("script", [EAGLE, SPEC_DIR, TIMELINE])
def test_help_in_both_languages_needs_no_clone(machine: Machine, script: Path) -> None:
    status, english, err = machine.run(script, "/nonexistent", "--help")
    assert (status, err, english[0]) == (0, "", f"usage: scripts/{script.name} [--lang zh|en] [PATH]")
    status, chinese, err = machine.run(script, "-h", "--lang", "zh")
    assert (status, err, chinese[0]) == (0, "", f"用法：scripts/{script.name} [--lang zh|en] [路径]")
    assert len([line for line in english if "--lang zh|en" in line]) == 2


# --- on which clones


def bare(machine: Machine) -> Path:
    return machine.clone("--bare")


def mirror_without_config(machine: Machine) -> Path:
    path = machine.clone("--mirror")
    (path / "config").unlink()
    return path


def blobless_offline(machine: Machine) -> Path:
    path = machine.clone("--filter=blob:none", "--no-checkout")
    (machine.folder / "small").rename(machine.folder / "small, out of reach")
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
    machine.git("-C", path, "checkout", "-q", "--detach")
    return path


def path_with_spaces(machine: Machine) -> Path:
    return machine.clone().rename(machine.folder / " a path  with späces ")


def replaced(machine: Machine) -> Path:
    """With `git replace`, one commit stands in for another."""
    path = machine.clone()
    machine.git("-C", path, "replace", "v0.4.6^{commit}", "HEAD")
    return path


CLONES = [
    bare,
    mirror_without_config,
    blobless_offline,
    folder_inside,
    git_folder,
    linked_worktree,
    GIT_03_detached,
    path_with_spaces,
    replaced,
]


@pytest.mark.parametrize("make", CLONES)
def test_same_output_on_any_clone(machine: Machine, commits: list[str], make: Callable[[Machine], Path]) -> None:
    path = make(machine)
    script = machine.asking_for(*commits)
    assert machine.run(script, path) == machine.run(script, cwd=path) == (0, small_lines(commits), "")
    assert machine.run(SPEC_DIR, path, REF="HEAD") == machine.run(SPEC_DIR, cwd=path, REF="HEAD") == (0, SPEC_LINES, "")


def test_GIT_01_shallow_clone(machine: Machine, commits: list[str]) -> None:
    """Two of five commits are there; the oldest of them, whose parent is not, is printed like the other."""
    path = machine.clone("--depth", "2")
    status, lines, err = machine.run(machine.asking_for(*commits), path)
    assert (status, lines) == (1, small_lines(commits)[3:])
    missing = [f"eagle-commits.sh: this clone lacks the commit {commit[:10]}" for commit in commits[:3]]
    assert err.splitlines() == [
        *missing,
        "eagle-commits.sh: the clone is shallow: git fetch --unshallow brings the rest",
    ]

    status, lines, err = machine.run(SPEC_DIR, path, REF="HEAD")
    assert (status, lines) == (1, SPEC_LINES[2:])
    assert err == NO_TAGS + "spec-dir.sh: the clone is shallow: git fetch --unshallow brings the rest\n"


def test_GIT_04_no_tags(machine: Machine) -> None:
    """A branch of the tag's name is not the tag."""
    path = machine.clone("--no-tags")
    machine.git("-C", path, "branch", "v0.4.6")
    assert machine.run(SPEC_DIR, path, REF="HEAD") == (1, SPEC_LINES[2:], NO_TAGS)


def test_nothing_is_fetched(machine: Machine, commits: list[str]) -> None:
    """Not even where git would: in partial clones whose origin is at hand. Without trees no file can be counted."""
    treeless = machine.clone("--filter=tree:0", "--bare")
    before = machine.git("-C", treeless, "count-objects", "-v")
    assert machine.run(machine.asking_for(*commits), treeless) == (0, small_lines(commits), "")
    status, lines, err = machine.run(SPEC_DIR, treeless, REF="HEAD")
    assert (status, lines, err.count("but not the list of its files"), err.count("\n")) == (1, [], 3, 3)

    one_branch = machine.clone("--filter=blob:none", "--bare")
    machine.git("-C", "small", "commit", "-q", "--allow-empty", "-m", "later")
    later = machine.git("-C", "small", "rev-parse", "HEAD")
    assert machine.run(machine.asking_for(later), one_branch)[0] == 1
    assert machine.run(SPEC_DIR, one_branch, REF=later)[0] == 1
    assert machine.git("-C", treeless, "count-objects", "-v") == before


# --- in spite of which settings


def test_GIT_12_settings_of_the_user(machine: Machine, commits: list[str]) -> None:
    raw = machine.git("-C", "small", "cat-file", "commit", commits[4])
    signed = raw.replace("\n\n", "\ngpgsig -----BEGIN PGP SIGNATURE-----\n \n -----END PGP SIGNATURE-----\n\n", 1)
    commits[4] = machine.git("-C", "small", "hash-object", "-t", "commit", "-w", "--stdin", stdin=signed.encode())
    env = settings(machine)
    utf_8 = "--encoding=UTF-8"
    assert "a good signature" in machine.git("-C", "small", "log", "-1", utf_8, commits[4]), "the trap is set"
    assert machine.run(machine.asking_for(*commits), "small", **env) == (0, small_lines(commits), "")
    assert machine.run(SPEC_DIR, "small", REF="HEAD", **env) == (0, SPEC_LINES, "")


@pytest.mark.parametrize(
    "names",
    [["GIT_DIR"], ["GIT_DIR", "GIT_WORK_TREE"], ["GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR"], ["GIT_SHALLOW_FILE"]],
)
def test_git_variables_point_elsewhere(machine: Machine, commits: list[str], names: list[str]) -> None:
    """As they do in a hook, or in an alias of git's."""
    env = dict.fromkeys(names, str(machine.folder / "elsewhere"))
    assert machine.run(machine.asking_for(*commits), "small", **env) == (0, small_lines(commits), "")
    assert machine.run(SPEC_DIR, "small", REF="HEAD", **env) == (0, SPEC_LINES, "")


def test_no_pager_at_a_terminal(machine: Machine, commits: list[str]) -> None:
    mine, theirs = pty.openpty()
    command = [machine.asking_for(*commits), "small"]
    env = machine.env | {"TERM": "xterm", "GIT_PAGER": f"touch {machine.folder / 'paged'}; cat"}
    done = subprocess.run(command, env=env, cwd=machine.folder, stdout=theirs, stderr=theirs, timeout=60)
    os.close(theirs)
    assert done.returncode == 0
    assert os.read(mine, 10_000).decode().splitlines() == small_lines(commits)
    os.close(mine)
    assert not (machine.folder / "paged").exists()


def test_called_through_a_symlink_or_by_bash(machine: Machine) -> None:
    (machine.folder / "go").symlink_to(SPEC_DIR)
    assert machine.run(machine.folder / "go", "small", REF="HEAD")[:2] == (0, SPEC_LINES)
    bash = machine.folder / "bin" / "bash"
    assert machine.run(bash, SPEC_DIR.name, machine.folder / "small", cwd=SPEC_DIR.parent, REF="HEAD")[1] == SPEC_LINES


# --- what they say when something is wrong


def test_the_twelve_commits_are_those_of_sglang(machine: Machine) -> None:
    """None is here, so each gets its line; and the last line says what is the matter."""
    other = machine.folder / "other"
    machine.git("init", "-q", other)
    for path in ("small", other):
        status, lines, err = machine.run(EAGLE, path)
        assert (status, lines) == (1, [])
        missing = [f"eagle-commits.sh: this clone lacks the commit {commit}" for commit in TWELVE]
        assert err.splitlines()[:12] == missing
    assert err.splitlines()[12:] == [
        f"eagle-commits.sh: {other}/.git does not look like a clone of SGLang: name the path of one"
    ]


def test_what_is_there_is_printed_though_some_is_missing(machine: Machine, commits: list[str]) -> None:
    script = machine.asking_for(commits[0], "0123456789" * 4, commits[4])
    expected = [small_lines(commits)[i] for i in (0, 4)]
    assert machine.run(script, "small") == (1, expected, "eagle-commits.sh: this clone lacks the commit 0123456789\n")
    assert machine.run(SPEC_DIR, "small") == (1, SPEC_LINES[:2], NO_REF)


@pytest.mark.parametrize("ref", ["nonesuch", "HEAD:python", "HEAD..v0.4.6", "a b", "$(touch made)"])
def test_ref_that_is_no_commit(machine: Machine, ref: str) -> None:
    status, lines, err = machine.run(SPEC_DIR, "small", REF=ref)
    assert (status, lines) == (1, SPEC_LINES[:2])
    assert err == f"spec-dir.sh: this clone lacks the commit {ref} (REF=... names another)\n"
    assert not (machine.folder / "made").exists()


def test_commit_without_the_folder(machine: Machine) -> None:
    machine.git("-C", "small", "checkout", "-q", "--orphan", "empty")
    machine.git("-C", "small", "rm", "-rfq", "--cached", ".")
    machine.git("-C", "small", "commit", "-q", "--allow-empty", "-m", "no files")
    _, lines, _ = machine.run(SPEC_DIR, "small", REF="empty")
    assert lines[2] == "empty         0 files, 0 with worker in their names"


REFUSALS = [
    (["no/such folder"], "no such folder: no/such folder"),
    ([""], "no such folder: "),
    (["home"], "not a git repository: home (name a clone of SGLang)"),
    ([], "not a git repository: . (name a clone of SGLang)"),
    (["small", "home"], "one PATH at most, not small and home"),
    (["--lang", "fr"], "--lang takes zh or en, not 'fr'"),
    (["--lang"], "--lang takes zh or en, not ''"),
    (["--lang=", "small"], "--lang takes zh or en, not ''"),
]


@pytest.mark.parametrize(("args", "message"), REFUSALS)
@pytest.mark.parametrize("script", [EAGLE, SPEC_DIR, TIMELINE])
def test_refused_in_one_line(machine: Machine, script: Path, args: list[str], message: str) -> None:
    assert machine.run(script, *args) == (2, [], f"{script.name}: error: {message}\n")


@pytest.mark.parametrize("script", [EAGLE, SPEC_DIR, TIMELINE])
def test_no_git(machine: Machine, script: Path) -> None:
    (machine.folder / "bin" / "git").unlink()
    message = "git is needed: install it, then run this again"
    assert machine.run(script, "small") == (2, [], f"{script.name}: error: {message}\n")


def test_ref_that_looks_like_an_option(machine: Machine) -> None:
    assert machine.run(SPEC_DIR, "small", REF="--all")[0::2] == (
        2,
        "spec-dir.sh: error: REF is a revision, not --all\n",
    )


def test_path_that_looks_like_an_option(machine: Machine, commits: list[str]) -> None:
    machine.clone().rename(machine.folder / "-p")
    script = machine.asking_for(*commits)
    status, lines, err = machine.run(script, "-p")
    assert (status, lines) == (2, [])
    assert err == (
        "eagle-commits.sh: error: unknown option -p "
        "(eagle-commits.sh --help lists them; a folder of that name is ./-p)\n"
    )
    for args in (["./-p"], ["--", "-p"]):
        assert machine.run(script, *args) == (0, small_lines(commits), "")


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_GIT_13_repository_of_another_user(machine: Machine, commits: list[str], lang: str) -> None:
    """The message names the folder and the remedy, nothing is changed; and the remedy, pasted into a shell, helps."""
    path = path_with_spaces(machine)
    if os.geteuid() == 0:
        for entry in (path, path / ".git"):
            os.chown(entry, 54321, -1)
    else:
        machine.env |= {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"}  # a switch of git's own
    script = machine.asking_for(*commits)
    status, lines, err = machine.run(script, "--lang", lang, path)
    assert (status, lines, err.count("\n")) == (2, [], 1)
    assert str(path) in err
    assert list((machine.folder / "home").iterdir()) == []

    remedy = re.search(r"git config --global --add safe\.directory .*", err)
    assert remedy
    subprocess.run(["bash", "-c", remedy[0]], env=machine.env, check=True)
    assert machine.run(script, path) == (0, small_lines(commits), "")


def test_settings_that_git_cannot_read(machine: Machine) -> None:
    (machine.folder / "home" / ".gitconfig").write_text("[\n")
    status, lines, err = machine.run(EAGLE, "small")
    assert (status, lines, err.count("\n")) == (2, [], 1)
    assert err.startswith("eagle-commits.sh: error: git cannot read small: fatal: bad config line 1 in file ")


@pytest.mark.parametrize("ignored", [False, True])
def test_reader_that_goes_away(machine: Machine, commits: list[str], ignored: bool) -> None:
    """As in `| head -n 1`. Where SIGPIPE is ignored, as under some job runners, writing fails instead."""
    read, write = os.pipe()
    os.close(read)
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        done = subprocess.run(
            [machine.asking_for(*commits), "small"],
            env=machine.env,
            cwd=machine.folder,
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=60,
            restore_signals=not ignored,
        )
    finally:
        signal.signal(signal.SIGPIPE, before)
        os.close(write)
    message = b"eagle-commits.sh: error: cannot write to standard output\n"
    assert (done.returncode, done.stderr) == ((2, message) if ignored else (-signal.SIGPIPE, b""))


def test_a_revision_that_would_do_something_to_a_terminal(machine: Machine) -> None:
    status, lines, err = machine.run(SPEC_DIR, "small", REF="\x1b[31m")
    assert (status, lines, err) == (
        1,
        SPEC_LINES[:2],
        "spec-dir.sh: this clone lacks the commit ?[31m (REF=... names another)\n",
    )
