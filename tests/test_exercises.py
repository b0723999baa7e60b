"""What exercises are made of, and the folder in which they are done."""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import refspec
from refspec.chapters import REPOSITORY, Chapter, CourseError, find_chapters
from refspec.grader.exercise import (
    HINTS,
    Exercise,
    all_exercises,
    find_exercise,
    load_exercises,
    select_exercises,
)
from refspec.grader.judge import call
from refspec.grader.problems import problem_of
from refspec.grader.workspace import (
    MARKER,
    Workspace,
    WorkspaceError,
    find_workspace,
    make_file,
    read_file,
    replace_file,
    submitted_file,
)

EXERCISES = all_exercises()
each_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)


# --- the exercises ----------------------------------------------------------------------------------------------------


def test_every_chapter_has_exercises() -> None:
    assert [len(load_exercises(chapter)) >= 2 for chapter in find_chapters()] == [True] * len(find_chapters())


@each_exercise
def test_the_solution_has_the_parameters_of_the_skeleton(exercise: Exercise) -> None:
    tree = ast.parse(exercise.skeleton)
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == exercise.function)
    parameters = [argument.arg for argument in function.args.args]
    assert parameters == list(inspect.signature(exercise.reference()).parameters)
    assert all(list(case) == parameters for case in problem_of(exercise.id).examples)


@each_exercise
def test_the_skeleton_names_every_parameter_and_output(exercise: Exercise) -> None:
    docstring = ast.get_docstring(next(n for n in ast.parse(exercise.skeleton).body if isinstance(n, ast.FunctionDef)))
    assert docstring is not None
    for parameter in inspect.signature(exercise.reference()).parameters:
        assert f" {parameter} " in docstring
    for output in problem_of(exercise.id).shapes:
        assert f" {output} " in docstring


@each_exercise
def test_the_example_in_the_skeleton_is_right_and_is_the_first(exercise: Exercise) -> None:
    """Run as a doctest, with the solution in the place of what is to be written."""
    namespace: dict[str, Any] = {"__name__": "solution"}
    exec(compile(exercise.solution_text(), "solution", "exec", dont_inherit=True), namespace)
    calls: list[tuple[Any, ...]] = []
    solution = namespace[exercise.function]
    namespace[exercise.function] = lambda *args: calls.append(args) or solution(*args)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(solution) or "", namespace, exercise.id, None, 0)
    assert len(test.examples) >= 3
    assert doctest.DocTestRunner().run(test).failed == 0
    first = problem_of(exercise.id).examples[0]
    assert [arg if isinstance(arg, int) else arg.tolist() for arg in calls[0]] == [
        value if isinstance(value, int) else value.tolist() for value in first.values()
    ]


@each_exercise
def test_the_examples_are_small(exercise: Exercise) -> None:
    for case in problem_of(exercise.id).examples:
        assert not isinstance(call(exercise.reference(), case), Exception)
        assert all(isinstance(value, int) or value.size <= 8 for value in case.values())


@each_exercise
def test_the_skeleton_does_not_hold_the_solution(exercise: Exercise) -> None:
    body = exercise.solution_text().removeprefix(exercise.skeleton[: exercise.skeleton.index("    raise NotImpl")])
    assert len(body.splitlines()) > 5
    assert not set(filter(str.strip, body.splitlines())) & set(exercise.skeleton.splitlines())


@each_exercise
def test_the_solution_is_the_packages_own_text(exercise: Exercise) -> None:
    source = inspect.getsource(exercise.reference())
    tail = exercise.solution_text()[-200:]
    assert source.endswith(tail)


@each_exercise
def test_the_fourth_hint_leads_to_the_solution(exercise: Exercise, tmp_path: Path) -> None:
    """From the skeleton and from a text without a line break at its end, applied by patch."""
    if shutil.which("patch") is None:
        pytest.skip("patch is not installed")
    for text in (exercise.skeleton, f"def {exercise.function}():\n    pass", ""):
        file = tmp_path / "answer.py"
        file.write_text(text + ("\n" if text and not text.endswith("\n") else ""))
        diff = exercise.solution_diff(text)
        subprocess.run(["patch", "--quiet", str(file)], input=diff, text=True, check=True)
        assert file.read_text() == exercise.solution_text()
    assert exercise.solution_diff(exercise.solution_text()) == ""


@each_exercise
def test_texts_are_there(exercise: Exercise) -> None:
    assert exercise.title
    assert len(exercise.hints) == len(HINTS) - 1
    assert len({len(hint) > 100 for hint in exercise.hints}) == 1
    for misconception in exercise.misconceptions:
        assert misconception.sentence.startswith(("You ", "Your ", "Of ", "At ", "After "))
        assert len(misconception.sentence) < 320


def copy_of_chapters(folder: Path) -> Path:
    shutil.copytree(REPOSITORY / "chapters", folder / "chapters")
    return folder / "chapters"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("title =", "name ="), "must hold the texts title, task, function, solution"),
        (lambda text: text.replace("hints = [", "hints = ['', "), "must hold 3 hints"),
        (lambda text: "title = ", "walk_tree.toml"),
        (lambda text: text.replace('"Walk the tree greedily"', "3"), "must hold the texts"),
    ],
)
def test_a_broken_exercise_is_named(tmp_path: Path, change: Any, said: str) -> None:
    chapters = copy_of_chapters(tmp_path)
    file = chapters / "01_one_round" / "exercises" / "walk_tree.toml"
    file.write_text(change(file.read_text()))
    with pytest.raises(CourseError, match=r"walk_tree\.toml") as error:
        all_exercises(chapters)
    assert said in str(error.value)


def test_a_missing_skeleton_and_a_silent_misconception_are_named(tmp_path: Path) -> None:
    chapters = copy_of_chapters(tmp_path)
    (chapters / "01_one_round" / "misconceptions" / "walk_tree" / "silent.py").write_text("x = 1\n")
    with pytest.raises(CourseError, match=r"silent\.py has no docstring"):
        _ = find_exercise("walk_tree", chapters).misconceptions
    (chapters / "01_one_round" / "exercises" / "walk_tree.py").unlink()
    with pytest.raises(CourseError, match=r"has no skeleton beside it: walk_tree\.py"):
        all_exercises(chapters)


def test_names(tmp_path: Path) -> None:
    assert find_exercise("walk").id == find_exercise("walk_tree").id == "walk_tree"
    assert [e.id for e in select_exercises("1")] == [e.id for e in select_exercises("01_one_round")]
    assert [e.id for e in select_exercises("next")] == ["next_beams"]
    assert select_exercises(None) == EXERCISES
    for name in ("", "nope", "99", "walk_tree_"):
        with pytest.raises(CourseError, match="there are: next_beams, walk_tree"):
            select_exercises(name)
    chapters = copy_of_chapters(tmp_path)
    folder = chapters / "01_one_round" / "exercises"
    for suffix in (".toml", ".py"):
        shutil.copy(folder / f"walk_tree{suffix}", folder / f"walk_trees{suffix}")
    assert find_exercise("walk_tree", chapters).id == "walk_tree"
    with pytest.raises(CourseError, match="may be any of: walk_tree, walk_trees"):
        find_exercise("walk", chapters)


# --- the workspace ----------------------------------------------------------------------------------------------------

WALK = find_exercise("walk_tree")


@pytest.fixture
def place(tmp_path: Path) -> Workspace:
    place = Workspace(tmp_path / "workspace")
    assert place.start(WALK)
    return place


def test_starting_writes_the_skeleton_once(place: Workspace) -> None:
    file = place.file(WALK)
    assert file == place.folder / "01_one_round" / "walk_tree.py"
    assert file.read_text() == WALK.skeleton
    file.write_text("mine")
    assert not place.start(WALK)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("what", ["a pipe", "a device without end", "a folder", "too much"])
def test_what_is_no_plain_file_is_named_and_not_waited_for(place: Workspace, what: str) -> None:
    file = place.file(WALK)
    file.unlink()
    if what == "a pipe":
        os.mkfifo(file)
    elif what == "a device without end":
        file.symlink_to("/dev/zero")
    elif what == "a folder":
        file.mkdir()
    else:
        file.write_bytes(b"#" * (2 << 20))
    said = "larger than 1024 KiB" if what == "too much" else "is no plain file"
    for read in (lambda: read_file(file), lambda: place.reset(WALK)):
        with pytest.raises(WorkspaceError, match=said):
            read()
    assert place.state(WALK) == "changed"
    assert not place.start(WALK)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    place = Workspace(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("refspec.grader.workspace.os.chmod", full)
        with pytest.raises(OSError, match="No space left"):
            place.start(WALK)
        assert list(place.file(WALK).parent.iterdir()) == []
    place.start(WALK)
    place.file(WALK).write_text("mine")
    monkeypatch.setattr("refspec.grader.workspace.os.chmod", full)
    with pytest.raises(OSError, match="No space left"):
        place.reset(WALK)
    assert [(file.name, file.read_text()) for file in place.file(WALK).parent.iterdir()] == [("walk_tree.py", "mine")]


@pytest.mark.parametrize("has_links", [True, False])
def test_making_a_file_never_replaces_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr("refspec.grader.workspace.os.link", no_links)
    file = tmp_path / "file"
    assert make_file(file, b"one")
    assert not make_file(file, b"two")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"one", 0o666 & ~current_umask())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_states(place: Workspace, tmp_path: Path) -> None:
    assert Workspace(tmp_path / "elsewhere").state(WALK) == "not_started"
    assert place.state(WALK) == "unchanged"
    file = place.file(WALK)
    file.write_text("mine")
    assert place.state(WALK) == "changed"
    import hashlib

    place.record_pass(WALK, hashlib.sha256(b"mine").hexdigest())
    assert place.state(WALK) == "passed"
    file.write_text("mine, changed")
    assert place.state(WALK) == "changed"


def test_resetting_keeps_every_text(place: Workspace) -> None:
    file = place.file(WALK)
    assert place.reset(WALK) is None
    kept = []
    for text in ("one", "two", "three"):
        file.write_text(text)
        kept.append(place.reset(WALK))
        assert file.read_text() == WALK.skeleton
    assert [path.name for path in kept if path] == ["walk_tree.py.1", "walk_tree.py.2", "walk_tree.py.3"]
    assert [path.read_text() for path in kept if path] == ["one", "two", "three"]
    file.unlink()
    assert place.reset(WALK) is None
    assert file.read_text() == WALK.skeleton
    assert sorted(path.name for path in file.parent.iterdir()) == ["walk_tree.py"] + [p.name for p in kept if p]


def test_where_the_workspace_is(place: Workspace, tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    given_folder = tmp_path / "given"
    assert find_workspace(given_folder, deep).folder == given_folder
    for here in (tmp_path, deep, place.folder, place.folder / "01_one_round"):
        assert find_workspace(None, here).folder == place.folder
    (deep / "workspace").mkdir()
    assert find_workspace(None, deep).folder == place.folder  # that one is not ours
    (deep / "workspace" / MARKER).mkdir()
    assert find_workspace(None, deep).folder == deep / "workspace"


def test_a_new_workspace_is_here(tmp_path: Path) -> None:
    assert find_workspace(None, tmp_path).folder == tmp_path / "workspace"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("inside", [Path(refspec.__file__).parent, REPOSITORY / "chapters" / "01_one_round"])
def test_never_inside_the_package(inside: Path, tmp_path: Path) -> None:
    for find in (lambda: find_workspace(inside / "mine"), lambda: find_workspace(None, inside)):
        with pytest.raises(WorkspaceError, match="take another folder, with --workspace"):
            find()
    (tmp_path / "link").symlink_to(inside)
    with pytest.raises(WorkspaceError):
        find_workspace(tmp_path / "link")
    with pytest.raises(WorkspaceError, match="not a folder"):
        find_workspace(Path(__file__))
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(WorkspaceError, match="not a folder"):
        find_workspace(tmp_path / "round")


def test_submissions_may_be_flat_or_by_chapter(tmp_path: Path) -> None:
    by_chapter = tmp_path / "01_one_round" / "walk_tree.py"
    assert submitted_file(tmp_path, WALK) == by_chapter
    (tmp_path / "walk_tree.py").touch()
    assert submitted_file(tmp_path, WALK) == tmp_path / "walk_tree.py"


def test_replacing_a_file_keeps_its_mode_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    replace_file(file, b"one")
    assert file.stat().st_mode & 0o777 == 0o666 & ~current_umask()
    file.chmod(0o640)
    replace_file(file, b"two")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"two", 0o640)
    link = tmp_path / "link"
    link.symlink_to(file)
    replace_file(link, b"three")
    assert (link.is_symlink(), file.read_bytes()) == (True, b"three")
    link.unlink()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path, b"three")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def current_umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_a_chapter_without_exercises_has_none(tmp_path: Path) -> None:
    assert load_exercises(Chapter(tmp_path)) == []
