"""The life of a name: born, moved, renamed, changed, died, told apart from others of the same name."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from refspec.cli.main import app
from refspec.history.clone import Clone, HistoryError, LacksError
from refspec.history.cloning import make_clone
from refspec.history.file_life import follow
from refspec.history.likeness import changed_lines, likeness, longest_common
from refspec.history.outline import parse, scan
from refspec.history.symbols import Life, Place, read_symbol
from tests import small_history
from tests.small_history import FOLDER, Step, counted_git, git, make_history

DRAFT = '''\
@torch.compile(
    dynamic=True,
)
def draft(self, batch):
    """Text that has less indentation
than the function, def draft(): and a class in it.
    """
    scores = batch.scores_of_the_last_step
    tokens = self.model.forward(batch.input_ids)
    return select(tokens, scores, draft=draft)


'''
WORKER = """\
class Worker:
    steps: int = 3

    def draft(self):
        return self.runner.run_the_draft(self.steps)

    def verify(self):
        accepted = self.target.forward_the_tree()
        self.pool.free_what_was_rejected(accepted)
        return accepted, self.steps
"""
STEPS = (
    Step("born (#1)", {f"{FOLDER}/a.py": "import torch\n\n\n" + DRAFT + "LAST = 1\n"}),
    Step("named elsewhere", {f"{FOLDER}/b.py": "from a import draft\n\nx = f(\n    draft=draft,\n)\n"}),
    Step("a method of that name", {f"{FOLDER}/worker.py": WORKER}),
    Step("not its lines", {f"{FOLDER}/a.py": "import torch\nimport os\n\n\n" + DRAFT + "LAST = 2\n"}),
    Step(
        "changed",
        {
            f"{FOLDER}/a.py": "import torch\nimport os\n\n\n"
            + DRAFT.replace("tokens, scores", "tokens, more")
            + "LAST = 2\n"
        },
    ),
    Step("moved (#6)", {f"{FOLDER}/a.py": "LAST = 2\n", f"{FOLDER}/b.py": DRAFT + "OTHER = 1\n"}),
    Step("renamed", {f"{FOLDER}/b.py": DRAFT.replace("def draft(self", "def propose(self") + "OTHER = 1\n"}),
    Step("died", {f"{FOLDER}/b.py": "OTHER = 1\n"}),
    Step("back", {f"{FOLDER}/b.py": DRAFT.replace("def draft(self", "def propose(self") + "OTHER = 1\n"}),
    Step(
        "a class with another name, and a field too",
        {f"{FOLDER}/worker.py": WORKER.replace("Worker", "Eagle").replace("steps", "num_steps")},
    ),
    Step("out of the folder", {f"{FOLDER}/worker.py": None, "python/sglang/kernels/worker.py": WORKER + "x = 1\n"}),
    Step("into the folder", {f"{FOLDER}/c.py": WORKER, "python/sglang/kernels/worker.py": "pass\n"}),
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("symbol") / "repository"
    make_history(folder, STEPS)
    return folder


@pytest.fixture(scope="module")
def clone(repository: Path) -> Clone:
    return Clone(repository)


def told(life: Life) -> list[str]:
    return [f"{event.what}: {event.subject}" for event in life.events]


def test_a_function_is_followed_from_birth_to_the_new_name(clone: Clone) -> None:
    function, method, moved_in = read_symbol(clone, "draft").lives
    assert told(function) == ["born: born (#1)", "changed: changed", "moved: moved (#6)", "renamed to: renamed"]
    born, changed, moved, renamed = function.events
    assert (born.lines_added, born.lines_deleted, born.pr) == (10, 0, 1)
    assert (changed.lines_added, changed.lines_deleted) == (1, 1)
    assert (moved.other, moved.place) == (Place(f"{FOLDER}/a.py", "draft"), Place(f"{FOLDER}/b.py", "draft"))
    assert renamed.other == Place(f"{FOLDER}/b.py", "propose")
    assert not function.alive
    # The method that is called so is another; of its class, it takes the new name.
    assert told(method)[:2] == ["born: a method of that name", "moved: a class with another name, and a field too"]
    assert method.events[1].place.name == "Eagle.draft"
    assert moved_in.alive


def test_the_new_name_begins_where_the_old_one_ends(clone: Clone) -> None:
    (life,) = read_symbol(clone, "propose").lives
    assert told(life) == ["renamed from: renamed", "died: died", "back: back"]
    assert life.events[0].other == Place(f"{FOLDER}/b.py", "draft")
    assert life.alive


def test_a_class_and_a_field_are_renamed(clone: Clone) -> None:
    worker, again = read_symbol(clone, "Worker").lives
    assert told(worker) == ["born: a method of that name", "renamed to: a class with another name, and a field too"]
    assert worker.events[1].other == Place(f"{FOLDER}/worker.py", "Eagle")
    assert told(again) == ["came: into the folder"]
    (eagle,) = read_symbol(clone, "Eagle").lives
    assert told(eagle)[0] == "renamed from: a class with another name, and a field too"


def test_what_leaves_the_folder_or_comes_is_no_death_and_no_birth(clone: Clone) -> None:
    lives = read_symbol(clone, "verify").lives
    assert [told(life)[-1] for life in lives] == ["left: out of the folder", "came: into the folder"]
    assert lives[0].events[-1].other == Place("python/sglang/kernels/worker.py", "Worker.verify")
    assert lives[1].events[0].other == Place("python/sglang/kernels/worker.py", "Worker.verify")


def test_a_qualified_name_asks_for_one_of_them(clone: Clone) -> None:
    assert {life.place.name for life in read_symbol(clone, "Worker.draft").lives} == {"Eagle.draft", "Worker.draft"}
    with pytest.raises(HistoryError, match=r"nothing in .* ever mentioned nonesuch"):
        read_symbol(clone, "Worker.nonesuch")


def test_a_field_is_renamed_where_more_than_its_own_line_says_so(tmp_path: Path) -> None:
    before = "class A:\n    n: int\n    k: int\n\n    def f(self):\n        return self.n + 1\n"
    make_history(
        tmp_path / "r",
        (
            Step("born", {f"{FOLDER}/a.py": before, f"{FOLDER}/b.py": before.replace("self.n", "0")}),
            Step(
                "renamed",
                {
                    f"{FOLDER}/a.py": before.replace("n:", "m:").replace("self.n", "self.m"),
                    f"{FOLDER}/b.py": before.replace("self.n", "0").replace("n:", "m:"),
                },
            ),
        ),
    )
    ends = {life.place.path[-4:]: life.events[-1] for life in read_symbol(Clone(tmp_path / "r"), "n").lives}
    assert (ends["a.py"].what, ends["a.py"].other) == ("renamed to", Place(f"{FOLDER}/a.py", "A.m"))
    assert ends["b.py"].what == "died"


def test_a_class_is_the_one_in_its_place_whatever_else_it_took_in(tmp_path: Path) -> None:
    base = "class Base:\n    def draft(self):\n        return None\n\n    def init(self):\n        return Base\n"
    method = "    def prepare(self, batch):\n" + "".join(
        f"        batch.field_{n} = self.compute({n})\n" for n in range(9)
    )
    steps = [
        Step("born", {f"{FOLDER}/base.py": base, f"{FOLDER}/mixin.py": "class Mixin:\n" + method}),
        Step("renamed", {f"{FOLDER}/base.py": base.replace("Base", "Eagle") + "\n" + method, f"{FOLDER}/mixin.py": ""}),
    ]
    make_history(tmp_path / "repository", steps)
    clone = Clone(tmp_path / "repository")
    (eagle,) = read_symbol(clone, "Eagle").lives
    assert eagle.events[0].other == Place(f"{FOLDER}/base.py", "Base")
    (old,) = read_symbol(clone, "Base").lives
    assert told(old) == ["born: born", "renamed to: renamed"]
    assert old.events[-1].other == Place(f"{FOLDER}/base.py", "Eagle")
    (mixin,) = read_symbol(clone, "Mixin").lives
    assert told(mixin) == ["born: born", "died: renamed"]


def test_a_copy_is_born_like_the_other(tmp_path: Path) -> None:
    make_history(
        tmp_path / "r",
        (
            Step("one", {f"{FOLDER}/a.py": DRAFT}),
            Step("two", {f"{FOLDER}/b.py": DRAFT, f"{FOLDER}/c.py": "draft = 1\n"}),
        ),
    )
    one, copy, variable = read_symbol(Clone(tmp_path / "r"), "draft").lives
    assert one.events[0].other is None
    assert copy.events[0].other == one.place
    assert (variable.kind, variable.events[0].other) == ("name", None)


def test_a_name_that_is_only_mentioned_says_where(clone: Clone) -> None:
    history = read_symbol(clone, "model")
    assert not history.lives
    assert [mention.subject for mention in history.mentions][:1] == ["born (#1)"]
    assert [mention.number for mention in history.mentions][-3:] == [1, 0, 1]
    assert history.mentioned_in == (f"{FOLDER}/b.py",)


def test_a_folder_elsewhere_may_be_asked(clone: Clone) -> None:
    (life,) = read_symbol(clone, "verify", "python").lives
    assert told(life)[0] == "born: a method of that name"
    assert life.place.path == f"{FOLDER}/c.py"
    assert [event.what for event in life.events] == ["born", "moved", "moved", "moved"]
    with pytest.raises(HistoryError, match=r"no commit on main touches nonesuch"):
        read_symbol(clone, "verify", "nonesuch")


def test_of_a_large_folder_only_files_that_mention_the_name_are_read(
    clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_symbol(clone, "propose")
    monkeypatch.setattr("refspec.history.symbols.MANY", 3)
    assert read_symbol(clone, "propose") == whole


@pytest.mark.parametrize("commits", [3, 40])
def test_the_number_of_git_processes_does_not_grow(tmp_path: Path, commits: int) -> None:
    steps = [
        Step(f"{n}", {f"{FOLDER}/{n % 7}.py": f"def f():\n    return {n}\n" if n % 3 else None})
        for n in range(1, commits + 1)
    ]
    steps = [step for step in steps if None not in step.files.values()]
    make_history(tmp_path / "r", [*steps, Step("gone", dict.fromkeys(steps[0].files))])
    with counted_git(tmp_path) as calls:
        read_symbol(Clone(tmp_path / "r"), "f")
    assert len([call for call in calls if "version" not in call.split()[:1]]) <= 8, calls


@pytest.mark.parametrize("name", ["", "a b", "-x", "a-b", "a.", ".a", "class", "9a", "--help=", "a\nb", "a;b"])
def test_what_is_no_name_is_refused(clone: Clone, name: str) -> None:
    with pytest.raises(HistoryError, match=r"not a name in Python"):
        read_symbol(clone, name)


def test_a_shallow_clone_tells_no_birth(repository: Path, tmp_path: Path) -> None:
    shallow = Clone(small_history.clone(repository, tmp_path / "s", "--depth=2"))
    history = read_symbol(shallow, "propose")
    assert [event.what for event in history.lives[0].events] == ["there already"]
    assert len(history.begins) == 1
    result = CliRunner().invoke(app, ["history", "symbol", "propose", "--clone", str(tmp_path / "s")])
    assert result.exit_code == 1
    assert "there already" in result.stdout
    assert "the clone is shallow" in result.stderr
    assert "git fetch --unshallow" in result.stderr


def test_a_blobless_clone_says_so(repository: Path, tmp_path: Path) -> None:
    blobless = small_history.clone(repository, tmp_path / "b", "--filter=blob:none", "--bare")
    with pytest.raises(LacksError, match="contents"):
        read_symbol(Clone(blobless), "draft")


def test_a_clone_with_the_folder_s_contents_alone_says_what_it_cannot_see(repository: Path, tmp_path: Path) -> None:
    """What `refspec history clone` makes by default."""
    make_clone(tmp_path / "c", f"file://{repository}")
    clone = Clone(tmp_path / "c")
    whole, history = read_symbol(Clone(repository), "draft"), read_symbol(clone, "draft")
    assert history.lives[0] == whole.lives[0]
    assert not read_symbol(clone, "propose").unseen
    # Where it went, and where from, holds contents beyond the folder.
    assert [told(life)[-1] for life in history.lives[1:]] == ["died: out of the folder", "born: into the folder"]
    assert len(history.unseen) == 2
    status, out, err = run("draft", "--clone", tmp_path / "c")
    assert status == 1
    assert "died" in out
    assert err.count("\n") == 1
    assert f"not known (refspec history clone --full {tmp_path / 'c'} brings them)" in err


def test_empty_commits_submodules_and_merges(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    first, _ = make_history(folder, [Step("one", {f"{FOLDER}/a.py": "def f():\n    return 1\n"}), Step("")])
    git(folder, "checkout", "-q", "-b", "side", first)
    git(folder, "update-index", "--add", "--cacheinfo", f"160000,{first},{FOLDER}/f.py")
    (folder / FOLDER / "a.py").write_text("def f():\n    return 2\n")
    git(folder, "commit", "-q", "-m", "on the side", "--", f"{FOLDER}/a.py")
    git(folder, "commit", "-q", "-m", "a submodule")
    git(folder, "checkout", "-q", "main")
    git(folder, "merge", "-q", "-m", "merged", "side")
    (life,) = read_symbol(Clone(folder), "f").lives
    assert told(life) == ["born: one", "changed: merged"]
    assert [event.what for event in follow(Clone(folder), "a.py").events] == ["born", "changed"]
    assert [event.what for event in follow(Clone(folder), "f.py").events] == ["born"]


def test_sha256_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    steps = (
        Step(
            b"caf\xe9 \x1b[31m",
            {rf"{FOLDER}/caf\351.py": b"def f():\n    return '\xe9'\n", f"{FOLDER}/b.py": "def f(:"},
        ),
        Step("-changed", {rf"{FOLDER}/caf\351.py": b"# \xe9\ndef f():\n    return '\xe8'\n"}),
    )
    make_history(tmp_path / "r", steps, object_format="sha256")
    lives = read_symbol(Clone(tmp_path / "r"), "f").lives
    assert [told(life) for life in lives if "caf" in life.place.path] == [
        ["born: caf\ufffd \x1b[31m", "changed: -changed"]
    ]
    assert {life.place.path for life in lives} == {f"{FOLDER}/caf\ufffd.py", f"{FOLDER}/b.py"}
    result = CliRunner().invoke(app, ["history", "symbol", "f", "--clone", str(tmp_path / "r")])
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert r"\x1b[31m" in result.stdout


# --- the command


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["history", "symbol", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_tells_a_life(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run("draft", "--clone", repository)
    assert status == 0
    assert "function draft in b.py\nborn 2024-12-30, changed once, moved once, renamed 2025-01-05\n" in out
    assert re.search(r"  moved +\+1 -1  moved \(#6\)\n {24}a.py -> b.py\n", out)
    assert "b.py:draft -> b.py:propose\n" in out
    monkeypatch.setenv("COLUMNS", "40")
    rows = [line for line in run("draft", "--clone", repository)[1].splitlines() if re.match("202|  [^ ]", line)]
    assert "  a method of that name" in rows
    assert max(map(len, rows)) <= 40


def test_the_command_speaks_chinese(repository: Path) -> None:
    status, out, _ = run("draft", "--clone", repository, "--lang", "zh")
    assert status == 0
    assert "函数 draft（b.py）\n2024-12-30 出生，改动 1 次，移动 1 次，2025-01-05 改名\n" in out
    assert "从未定义过 model" in run("model", "--clone", repository, "--lang", "zh")[1]
    assert run("draft", "--clone", repository, "--lang", "fr")[0] == 2


def test_the_command_prints_json(repository: Path) -> None:
    status, out, _ = run("draft", "--clone", repository, "--json")
    document = json.loads(out)
    assert status == 0
    assert [event["what"] for event in document["lives"][0]["events"]] == ["born", "changed", "moved", "renamed to"]
    assert len(document["lives"][0]["events"][0]["hash"]) == 40
    assert json.loads(run("model", "--clone", repository, "--json")[1])["mentioned_in"] == [f"{FOLDER}/b.py"]


def test_the_command_refuses_in_one_line(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REFSPEC_CACHE", str(tmp_path / "none"))
    assert run("a-b", "--clone", repository) == (
        2,
        "",
        "refspec: not a name in Python: 'a-b' (as in verify, or EAGLEWorker.verify)\n",
    )
    status, out, err = run("nonesuch", "--clone", repository)
    assert (status, out, err.count("\n")) == (1, "", 1)
    status, out, err = run("draft")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "needs a clone of SGLang" in err


def test_a_mention_is_told_on_the_screen(repository: Path) -> None:
    status, out, _ = run("model", "--clone", repository)
    assert status == 0
    assert f"model was never defined in {FOLDER}, only mentioned\n" in out
    assert "mentioned now in b.py\n" in out


# --- definitions


SOURCE = b'''\
import x

A: int = 1
B = C = {
    "k": f(A=1),
}
if x:
    def one():
        return 1
else:
    @wraps(
        one,
    )
    # a comment
    @two
    async def one(
        self,
        A=3,
    ) -> None:
        D = 1
        class Inner(
            Base,
            metaclass=Meta,
        ):
            """
def one(): in a text
            """
            D = """
E = 1
"""
# no deeper than the function

            def f(self): ...
    # of what follows
A = 2
'''


def test_a_scan_finds_what_the_syntax_tree_has() -> None:
    everything = parse(SOURCE)
    assert {one.name for one in everything} == {"A", "B", "C", "one", "one.Inner", "one.Inner.f"}
    for name in ("A", "B", "C", "D", "E", "one", "f", "Inner", "Meta", "metaclass", "x", "nonesuch"):
        assert scan(SOURCE, name) == parse(SOURCE, name), name
    assert scan(SOURCE) == [one for one in everything if one.kind != "name"]


def test_a_scan_agrees_with_the_syntax_tree_on_our_own_files() -> None:
    """Whole files of real Python, ours: hundreds of functions, classes and names."""
    files = sorted((Path(__file__).parents[1] / "src" / "refspec").rglob("*.py"))[::4]
    checked = 0
    for file in files:
        source = file.read_bytes()
        everything = parse(source)
        assert scan(source) == [one for one in everything if one.kind != "name"], file
        for name in {one.name.rpartition(".")[2] for one in everything if one.kind == "name"}:
            assert scan(source, name) == [one for one in everything if f".{one.name}".endswith(f".{name}")], (
                file,
                name,
            )
        checked += len(everything)
    assert checked > 500


def test_a_scan_of_a_long_class_takes_time_in_proportion() -> None:
    """5,000 methods with texts in quotes: a tenth of a second, a minute if each is told by all that is above it."""
    method = b'    @property\n    def f%d(self):\n        """def g(): is text."""\n        return 1\n\n'
    source = b"class A:\n" + b"".join(method % n for n in range(5000)) + b"def last(): ...\n"
    started = time.process_time()
    found = scan(source)
    assert time.process_time() - started < 10
    assert [(one.name, one.first) for one in found[1:-1]] == [(f"A.f{n}", 2 + 5 * n) for n in range(5000)]
    assert (found[-1].name, found[-1].first) == ("last", 25002)


# --- likeness


def test_the_longest_common_subsequence_is_the_longest() -> None:
    draw = random.Random(7)

    def slowly(a: list[int], b: list[int]) -> int:
        row = [0] * (len(b) + 1)
        for x in a:
            before = row[:]
            for j, y in enumerate(b):
                row[j + 1] = before[j] + 1 if x == y else max(row[j], before[j + 1])
        return row[-1]

    for _ in range(200):
        a, b = ([draw.randrange(5) for _ in range(draw.randrange(12))] for _ in range(2))
        assert longest_common(a, b) == slowly(a, b), (a, b)


def test_lines_are_counted_as_git_does() -> None:
    assert changed_lines(b"", b"a\nb\n") == (2, 0)
    assert changed_lines(b"a\nb\n", b"") == (0, 2)
    assert changed_lines(b"a\nb\nc\n", b"a\nx\nc\nd\n") == (2, 1)
    assert changed_lines(b"a\nb", b"a\nb") == (0, 0)
    assert changed_lines(b"a\na\n", b"a\na\na\n") == (1, 0)
    assert likeness(b"a\n  b\n\n", b"  a\nb") == 1
    assert likeness(b"", b"") == 0
