"""Our functions beside SGLang's: the table of counterparts, and what is read off a clone made on the spot."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_history import Step, clone, counted_git, make_history
from typer.testing import CliRunner

import refspec
from refspec.cli.main import app
from refspec.history import catalogue, counterparts
from refspec.history.catalogue import CatalogueError
from refspec.history.clone import Clone, HistoryError, LacksError
from refspec.history.compare import compare_at, cuda_function, operation_named, our_function, python_function

PACKAGE = Path(refspec.__file__).parent
Run = Callable[..., Any]

# --- the table


@pytest.mark.parametrize("counterpart", counterparts.counterparts(), ids=lambda c: f"{c.operation}-{c.kind}")
def test_each_of_ours_exists(counterpart: counterparts.Counterpart) -> None:
    function = our_function(counterpart.ours)
    assert re.search(rf"(def|class) {function.name.rpartition('.')[2]}\b", function.text)
    lines = (PACKAGE.parents[1] / function.path).read_text(encoding="utf-8").split("\n")
    assert function.text.split("\n") == lines[function.line - 1 :][: function.text.count("\n") + 1]


def test_every_kernel_is_in_it() -> None:
    files = (PACKAGE / "kernels").glob("*.py")
    kernels = {file.stem for file in files if f"def {file.stem}_torch(" in file.read_text(encoding="utf-8")}
    assert len(kernels) == 26
    assert kernels <= set(counterparts.operations())


def test_times_are_in_order_and_paths_are_sglangs() -> None:
    reach = catalogue.reach().date
    for counterpart in counterparts.counterparts():
        for place in counterpart.places:
            assert re.fullmatch(r"(python/sglang|sgl-kernel)/[\w/.-]+\.(py|cu|cuh)", place.path)
            assert place.path.endswith(".py") == (counterpart.kind != "cuda")
            for point in filter(None, (place.since, place.until)):
                is_wheel = (point.commit, point.day) == (counterparts.WHEEL, "")
                assert is_wheel or (re.fullmatch("[0-9a-f]{10}", point.commit) and point.day <= reach)
            if place.until and place.until.day:
                assert place.since.day <= place.until.day


def test_commits_that_the_catalogue_knows_are_of_the_same_day() -> None:
    days = {commit.hash[:10]: commit.author_date[:10] for commit in catalogue.commits()}
    points = {
        point
        for counterpart in counterparts.counterparts()
        for place in counterpart.places
        for point in (place.since, place.until)
        if point and point.commit in days
    }
    assert len(points) > 30
    assert {point: days[point.commit] for point in points} == {point: point.day for point in points}


@pytest.mark.parametrize(
    ("operation", "commit", "old", "new"),
    [
        (
            "assign_draft_cache_locs",
            "3fe6bc390b",
            "assign_draft_cache_locs_page_size_1",
            "assign_draft_cache_locs_contiguous",
        ),
        ("build_tree", "56222658ec", "build_tree_kernel_efficient_tmp", "build_tree_kernel_efficient"),
        ("compact_to_front", "3fe6bc390b", "_compact_accepted_to_front", "_compact_accept_to_front"),
        ("compaction_moves", "3fe6bc390b", "fill_accepted_out_cache_loc", "fill_accept_out_cache_loc"),
        (
            "compaction_moves",
            "3fe6bc390b",
            "move_accepted_tokens_to_target_kvcache",
            "move_accept_tokens_to_target_kvcache",
        ),
        ("extend_after_verify", "b8574f6953", "forward_extend_after_decode", "forward_draft_extend_after_decode"),
        ("gather_rows", "c95179bc85", "_gather_spec_extras", "gather_spec_extras"),
        ("next_roots", "1613bae412", "fill_new_verified_id", "fill_bonus_tokens"),
        ("organize_draft_results", "56222658ec", "build_tree_kernel_efficient_preprocess", "organize_draft_results"),
    ],
)
def test_a_name_that_was_another_before_is_known_by_both(operation: str, commit: str, old: str, new: str) -> None:
    """Commits that only renamed it: without the old name, `compare` would deny that it was there."""
    places = [place for counterpart in counterparts.counterparts_of(operation) for place in counterpart.places]
    assert old in {p.function.rpartition(".")[2] for p in places if p.until and p.until.commit == commit}
    assert new in {p.function.rpartition(".")[2] for p in places if p.since.commit == commit}


def test_what_was_reverted_and_landed_again_is_known_twice() -> None:
    """Commits 22 to 24 of the story: the function is there at the first and the third."""
    places = [place for counterpart in counterparts.counterparts_of("compact_to_front") for place in counterpart.places]
    spans = [(place.since.commit, place.until and place.until.commit) for place in places]
    assert spans[:2] == [("1d4ee060c2", "f6d0beaca8"), ("ac99794e64", "3fe6bc390b")]


def test_what_commits_moved_agrees_with_the_catalogues_files() -> None:
    """A place in the folder that a commit ended: the commit touched that file."""
    known = {commit.hash[:10]: commit for commit in catalogue.commits()}
    checked = 0
    for counterpart in counterparts.counterparts():
        for place in counterpart.places:
            if place.until and place.until.commit in known and place.path.startswith(catalogue.DIRECTORY):
                changes = known[place.until.commit].changes + known[place.until.commit].crossings
                assert place.path in {path for change in changes for path in (change.path, change.old_path)}
                checked += 1
    assert checked > 30


def test_the_oracle_names_the_same_functions() -> None:
    """oracle/operations call SGLang's kernels by file and name: those of the wheel that the table reaches to."""
    checked = 0
    for file in sorted((PACKAGE / "oracle" / "operations").glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        said = [
            ast.literal_eval(keyword.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            for keyword in node.keywords
            if keyword.arg == "sglang_source"
        ]
        if not said or not said[0].endswith("@0.5.23"):
            continue
        path, function = re.match(r"([\w/.]+):(\w+)", said[0]).groups()  # type: ignore[union-attr]
        places = {
            (place.path, place.function)
            for counterpart in counterparts.counterparts_of(file.stem)
            for place in counterpart.places
            if place.until is None
        }
        assert (f"python/sglang/{path}", function) in places, said[0]
        checked += 1
    assert checked >= 18


def test_a_damaged_table_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "facts").mkdir()
    text = (PACKAGE / "history" / "facts" / "counterparts.tsv").read_text(encoding="utf-8")
    monkeypatch.setattr(counterparts, "__file__", str(tmp_path / "counterparts.py"))
    for old, new, complaint in (("operation", "op", "other columns"), ("\ttriton\t", "\tc\t", "line 2 .* damaged")):
        (tmp_path / "facts" / "counterparts.tsv").write_text(text.replace(old, new, 1), encoding="utf-8")
        counterparts.counterparts.cache_clear()
        with pytest.raises(CatalogueError, match=complaint):
            counterparts.counterparts()
    monkeypatch.undo()
    counterparts.counterparts.cache_clear()


def test_operations_go_by_several_names() -> None:
    names = {
        "build_tree": "build_tree",
        "kernels.build_tree:build_tree_torch": "build_tree",
        "refspec.kernels.build_tree.build_tree_torch": "build_tree",
        "VerifyTreeGreedy": "verify_tree_greedy",
        "EAGLEWorker.draft_forward": "draft",
        "eagle_sample": "verify",
    }
    assert {name: operation_named(name) for name in names} == names
    with pytest.raises(HistoryError, match=r"no operation build_tre \(did you mean build_tree\?"):
        operation_named("build_tre")


# --- functions in sources

CUDA = r"""
#include <a.h>
// void walk(int a) { in a comment }
void walk(int a);  // declared
static const char* brace = "void walk(int) {";
template <typename T,
          int N>
__global__ void __launch_bounds__(128) walk(
    T* a,  // { not this
    int b = f(1)) {
  char c = '}'; /* } nor
  this } */
  long big = 1'000'000;
  if (b) { c = '\''; }
  walk<T>(a);
}
int last() { return 0; }
"""


def test_a_cuda_function_by_its_braces() -> None:
    function = cuda_function("a.cu", CUDA.encode(), "walk")
    assert function is not None
    assert (function.line, function.text) == (6, CUDA[CUDA.index("template") : CUDA.index("int last")].rstrip())
    assert cuda_function("a.cu", CUDA.replace("\n", "\r\n").encode(), "walk") == function
    last = cuda_function("a.cu", CUDA.encode(), "last")
    assert last is not None
    assert last.text == "int last() { return 0; }"
    for name in ("brace", "f", "a", "nothing"):
        assert cuda_function("a.cu", CUDA.encode(), name) is None
    assert cuda_function("a.cu", b"void f() { never closed", "f") is None


def test_a_python_function_with_its_decorators() -> None:
    text = "class A:\n    @d\n    def f(self):\n        return 1\nif x:\n    def f(): return 2\n"
    found = python_function("a.py", text.encode(), "A.f")
    assert found is not None
    assert (found.line, found.text) == (2, "    @d\n    def f(self):\n        return 1")
    found = python_function("a.py", text.encode(), "f")
    assert found is not None
    assert found.text == "    def f(): return 2"
    assert python_function("a.py", text.encode(), "g") is None
    with pytest.raises(HistoryError, match=r"a\.py: line 1: "):
        python_function("a.py", b"def (", "f")


# --- on a repository

SPECULATIVE = "python/sglang/srt/speculative"
TOPK = "import torch\n\n\ndef select_top_k_tokens(i, topk):\n\treturn i, topk  # \x1b[31mred\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A function where the table has it; elsewhere, beside a namesake; gone."""
    folder = tmp_path_factory.mktemp("compare") / "repo"
    kernel = "__global__ void build_tree_efficient(int a) {\n  a = 1;\n}\n"
    tree = "def build_tree_kernel_efficient(a):\n    return a\n"
    steps = [
        Step("Nothing yet (#1)", {"README.md": "a"}),
        Step(
            "Here (#2)",
            {
                f"{SPECULATIVE}/eagle_utils.py": TOPK,
                f"{SPECULATIVE}/build_eagle_tree.py": tree,
                "sgl-kernel/csrc/speculative/eagle_utils.cu": kernel,
            },
            tags=("v0.4.6",),
        ),
        Step(
            "Elsewhere (#3)",
            {
                f"{SPECULATIVE}/eagle_utils.py": "def verify(): pass\nclass EagleVerifyInput: pass\n",
                f"{SPECULATIVE}/broken.py": "def select_top_k_tokens(:\n",
                f"{SPECULATIVE}/new.py": TOPK,
                f"{SPECULATIVE}/build_eagle_tree.py": None,
            },
        ),
        Step("Gone \x1b[31m(#4)", {f"{SPECULATIVE}/new.py": None}),
        Step("Newer Python (#5)", {f"{SPECULATIVE}/eagle_utils.py": f"{TOPK}def later(:\n"}),
        Step(
            "Gone again (#6)", {f"{SPECULATIVE}/eagle_utils.py": "def verify(): pass\nclass EagleVerifyInput: pass\n"}
        ),
    ]
    return folder, make_history(folder, steps)


@pytest.fixture
def run(repository: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("REFSPEC_SGLANG", str(repository[0]))
    return lambda *arguments: CliRunner().invoke(app, ["history", "compare", *arguments])


def test_one_after_the_other_where_no_width_is_known(run: Run) -> None:
    told = run("select_top_k_tokens", "--at", "0.4.6")
    assert told.exit_code == 0, told.output
    ours, theirs = told.stdout.split("SGLang's: ")
    assert ours.startswith("select_top_k_tokens, at 0.4.6: ")
    assert "\nours: src/refspec/spec/draft.py:" in ours
    assert re.search(r"^ +\d+ def select_top_k_tokens\($", ours, re.MULTILINE)
    assert theirs == (
        f"{SPECULATIVE}/eagle_utils.py:4\n    4 def select_top_k_tokens(i, topk):\n"
        "    5     return i, topk  # \\x1b[31mred\n\n"
    )


def test_side_by_side_where_there_is_room(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "143")
    wide = run("select_top_k_tokens", "--at", "#2").stdout
    assert re.search(r"def select_top_k_tokens\( .* 4 def select_top_k_tokens\(i, topk\):", wide)
    assert max(map(len, wide.splitlines())) <= 143
    for width in ("142", "40"):
        monkeypatch.setenv("COLUMNS", width)
        narrow = run("select_top_k_tokens", "--at", "#2").stdout
        assert not re.search(r"def select_top_k_tokens\( .* def", narrow)
        assert max(map(len, narrow.splitlines())) <= int(width)


def test_several_kinds(run: Run) -> None:
    told = run("build_tree", "--at", "v0.4.6")
    assert (
        "SGLang also has cuda: sgl-kernel/csrc/speculative/eagle_utils.cu:1 build_tree_efficient (--kind cuda)"
        in told.stdout
    )
    assert "kernels/build_tree.py" in told.stdout
    cuda = json.loads(run("build_tree", "--at", "v0.4.6", "--kind", "cuda", "--json").stdout)
    assert (cuda["kind"], cuda["ours"]["name"]) == ("cuda", "_build_tree_kernel")
    assert cuda["theirs"]["text"].endswith("  a = 1;\n}")
    told = run("select_top_k_tokens", "--kind", "cuda")
    assert (told.exit_code, told.stderr) == (1, "refspec: select_top_k_tokens has no cuda counterpart, but python\n")


def test_elsewhere_it_is_found_by_its_name(run: Run, repository: tuple[Path, list[str]]) -> None:
    told = run("select_top_k_tokens", "--at", "#3")
    assert told.exit_code == 0, told.output
    assert "It is not where the table of counterparts has it" in told.stdout
    document = json.loads(run("select_top_k_tokens", "--at", "#3", "--json").stdout)
    assert (document["listed"], document["theirs"]["path"], document["commit"]) == (
        False,
        f"{SPECULATIVE}/new.py",
        repository[1][2],
    )


def test_what_came_back_to_its_place_is_shown_once(tmp_path: Path) -> None:
    text = "class EAGLEWorkerV2:\n    def _compact_accepted_to_front(self):\n        return 1\n"
    made = make_history(tmp_path / "repo", [Step("a", {f"{SPECULATIVE}/eagle_worker_v2.py": text})])
    found = compare_at(Clone(tmp_path / "repo"), "compact_to_front", made[0])
    assert found.theirs.name == "EAGLEWorkerV2._compact_accepted_to_front"
    assert found.others == ()


def test_a_method_is_not_found_in_a_namesake(run: Run) -> None:
    told = run("commit", "--at", "#3")
    assert told.exit_code == 1
    assert "no counterpart of commit" in told.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["select_top_k_tokens"],
            "nearest is .*eagle_utils.py:select_top_k_tokens since 013021b6a1 .*--at 013021b6a1",
        ),
        (
            ["select_top_k_tokens", "--at", "#5"],
            f"{SPECULATIVE}/eagle_utils.py: line 6: .*it may be of a newer Python",
        ),
        (["build_chain_tree"], "it is known from the wheel of 0.5.23 alone, .*eagle.py:build_chain_tree"),
        (["nothing"], "no operation nothing"),
        (["draft", "--at", "nowhere"], "this clone lacks the revision nowhere"),
        (["draft", "--at=-x"], "a revision cannot begin with '-'"),
        (["draft", "--at", "#77"], "no commit of PR #77 on main"),
    ],
)
def test_what_cannot_be_shown(run: Run, arguments: list[str], complaint: str) -> None:
    told = run(*arguments)
    assert told.exit_code == 1
    assert re.search(complaint, told.stderr), told.stderr
    assert len(told.stderr.splitlines()) == 1
    assert told.stdout == ""


def test_after_its_end_the_commit_before_that_is_named(tmp_path: Path) -> None:
    late = 86_400 * 700
    made = make_history(tmp_path / "repo", [Step("late", {"a": "b"}, seconds=late)])
    with pytest.raises(HistoryError, match=r"EAGLEWorker\.forward_batch_generation until 28c1a3cb45 .*28c1a3cb45~1"):
        compare_at(Clone(tmp_path / "repo"), "round", made[0])


def test_the_list_needs_no_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REFSPEC_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, ["history", "compare"])
    assert told.exit_code == 0
    assert "build_tree\n  refspec.kernels.build_tree:build_tree_torch\n  python: python/sglang/" in told.stdout
    document = json.loads(CliRunner().invoke(app, ["history", "compare", "--json"]).stdout)
    assert {entry["operation"] for entry in document} == set(counterparts.operations())
    needs = CliRunner().invoke(app, ["history", "compare", "draft"])
    assert needs.exit_code == 1
    assert needs.stderr.startswith("refspec: compare needs a clone of SGLang")


def test_a_blobless_clone_says_what_it_lacks(repository: tuple[Path, list[str]], tmp_path: Path) -> None:
    blobless = Clone(clone(repository[0], tmp_path / "blobless", "--filter=blob:none", "--no-checkout"))
    with pytest.raises(LacksError, match="lacks contents of files that are needed"):
        compare_at(blobless, "select_top_k_tokens", repository[1][1])


def test_git_is_started_a_few_times_only(run: Run, tmp_path: Path) -> None:
    with counted_git(tmp_path) as calls:
        assert run("select_top_k_tokens", "--at", "#3").exit_code == 0
    assert len(calls) <= 10


def test_torch_is_not_imported(repository: tuple[Path, list[str]]) -> None:
    script = (
        "import sys; from pathlib import Path; from refspec.history.clone import Clone; "
        "from refspec.history.compare import compare_at; "
        f"compare_at(Clone(Path({str(repository[0])!r})), 'build_tree', {repository[1][1]!r}); "
        "sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 0
