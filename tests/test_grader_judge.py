"""The judge's verdicts: what passes, what fails, and what a learner is told."""

from __future__ import annotations

import io
import json
import os
import random
import re
import selectors
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console

from refspec.grader import sandbox
from refspec.grader.compare import first_difference, named_arrays
from refspec.grader.exercise import Exercise, Misconception, all_exercises, find_exercise
from refspec.grader.judge import Judge, Result, call, draw_cases, find_fault
from refspec.grader.limits import Limits
from refspec.grader.problems import problem_of
from refspec.grader.report import as_text

EXERCISES = all_exercises()


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """One nursery for all tests here."""
    with Judge(seed=1) as judge:
        yield judge


def grade(judge: Judge, source: str, exercise: str = "walk_tree") -> Result:
    return judge.grade_text(find_exercise(exercise), textwrap.dedent(source).encode(), "answer.py")


def solved(exercise: str = "walk_tree") -> str:
    return find_exercise(exercise).solution_text()


def with_first_line(line: str, exercise: str = "walk_tree") -> str:
    """The solution, in whose function this comes first."""
    text = solved(exercise)
    body = text.index('    """\n', text.index("def ")) + len('    """\n')
    return text[:body] + textwrap.indent(line, "    ") + "\n" + text[body:]


def at_the_top(line: str, exercise: str = "walk_tree") -> str:
    """The solution, in whose file this is done first."""
    return solved(exercise).replace("import torch\n", f"import torch\n{line}\n", 1)


def with_last_line(line: str, exercise: str = "walk_tree") -> str:
    """The solution, and behind it another function of its name, which may call it as `right`."""
    return (
        solved(exercise)
        + f"\n\nright = {exercise}\n\n\ndef {exercise}(*args):\n"
        + textwrap.indent(line, "    ")
        + "\n"
    )


# --- cases ------------------------------------------------------------------------------------------------------------


def test_drawn_cases_have_the_edges() -> None:
    rng = random.Random(0)
    beams = draw_cases(problem_of("next_beams"), rng, 84)
    assert {case["i"] for case in beams} >= {0, 1, 2, 3}
    assert {case["topk"] for case in beams} >= {1, 2, 3, 4}
    assert {len(case["scores"]) for case in beams} == {1, 2, 3}
    trees = draw_cases(problem_of("walk_tree"), rng, 84)
    answers = [call(find_exercise("walk_tree").reference(), case) for case in trees]
    accepted = [int(n) - int(case["num_steps"]) for case, answer in zip(trees, answers, strict=True) for n in answer[2]]
    assert max(accepted) == 0
    assert any(0 in answer[2] for answer in answers)
    assert {case["num_steps"] for case in trees} >= {1, 2, 3, 4}


def test_another_seed_draws_other_cases_and_the_same_one_the_same() -> None:
    def drawn(seed: int) -> list[str]:
        return [str(case) for case in draw_cases(problem_of("walk_tree"), random.Random(seed), 42)]

    assert drawn(1) == drawn(1) != drawn(2)


def test_without_a_seed_every_run_draws_anew(judge: Judge) -> None:
    judge.seed = None
    seeds = {grade(judge, solved()).seed for _ in range(3)}
    judge.seed = 1
    assert len(seeds) == 3


# --- what is returned -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        "tuple(part.tolist() for part in right(*args))",
        "[part.numpy() for part in right(*args)]",
        "[part.to(torch.int64) for part in right(*args)]",
        "[list(part) for part in right(*args)]",
    ],
)
def test_lists_arrays_and_other_widths_are_as_good(judge: Judge, form: str) -> None:
    assert grade(judge, with_last_line(f"return {form}")).verdict == "pass"


@pytest.mark.parametrize(
    ("form", "headline"),
    [
        ("None", "it must return 3 things, (predict, accept_index, accept_token_num); yours returned None"),
        ("right(*args)[:2]", "it must return 3 things, (predict, accept_index, accept_token_num); yours returned 2"),
        ("{}", "yours returned a value of type dict"),
        ("[part.float() for part in right(*args)]", "accept_index must hold whole numbers; yours holds fractions"),
        ("[part.bool() for part in right(*args)]", "accept_index must hold whole numbers; yours holds truth values"),
        ("[part.unsqueeze(0) for part in right(*args)]", "accept_index must have the shape (b, num_steps+1) = (1, 3)"),
        ("(*right(*args)[:2], [1, [2]])", "the rows of accept_token_num must have one length"),
        ("(*right(*args)[:2], ['one'])", "accept_token_num must be an array of numbers; yours is a value of type str"),
        ("(*right(*args)[:2], [1, 2.0])", "accept_token_num must hold numbers of one kind"),
        ("(*right(*args)[:2], 10**30)", "yours is a value of type integer of more than 64 bits"),
    ],
)
def test_another_form_is_named(judge: Judge, form: str, headline: str) -> None:
    result = grade(judge, with_last_line(f"return {form}"))
    assert result.verdict == "fail"
    assert headline in result.headline


def test_a_list_that_holds_itself_is_no_answer(judge: Judge) -> None:
    result = grade(judge, with_last_line("knot = []\nknot += [knot, knot]\nreturn knot"))
    assert result.verdict == "fail"


def test_GRD_03_changed_inputs(judge: Judge) -> None:
    """Sorted in place when the answer is there: the answer is right, and the reference must not see the change."""
    result = grade(
        judge,
        with_last_line("answer = right(*args)\nargs[0].copy_(args[0].sort(dim=1, descending=True)[0])\nreturn answer"),
    )
    assert result.verdict == "fail"
    assert result.headline.startswith("input candidates was changed")


@pytest.mark.parametrize("change", ["args[4].zero_()", "args[0].resize_(0)", "args[2][0, 0] += 1"])
def test_GRD_03_however_they_are_changed(judge: Judge, change: str) -> None:
    result = grade(judge, with_last_line(f"answer = right(*args)\n{change}\nreturn answer"))
    assert (result.verdict, "was changed" in result.headline) == ("fail", True)


def test_GRD_04_all_nan(judge: Judge) -> None:
    source = with_last_line(
        "ids, hidden, scores, (children, *rest) = right(*args)\n"
        "return ids, hidden, scores, (torch.full_like(children, float('nan')), *rest)",
        "next_beams",
    )
    result = grade(judge, source, "next_beams")
    assert (result.verdict, result.headline) == ("fail", "child_scores[0, 0, 0] is NaN")


def test_GRD_11_a_table_of_the_examples_fails_on_unseen_cases(judge: Judge) -> None:
    problem, exercise = problem_of("walk_tree"), find_exercise("walk_tree")
    table = [
        (case["candidates"].tolist(), [part.tolist() for part in call(exercise.reference(), case)])
        for case in problem.examples
    ]
    source = f"""
    TABLE = {table!r}

    def walk_tree(candidates, *_):
        for tokens, answer in TABLE:
            if candidates.tolist() == tokens:
                return answer
        b, n, steps = *candidates.shape, _[-1]
        return [0] * (b * n), [[r * n] + [-1] * steps for r in range(b)], [0] * b
    """
    result = grade(judge, source)
    assert (result.verdict, result.where) == ("fail", "in an unseen case, made smaller")
    assert not any(fact.startswith("expected") for fact in result.facts)


@pytest.mark.parametrize("seed", range(6))
def test_GRD_11_what_is_right_in_an_unseen_case_is_not_printed(judge: Judge, seed: int) -> None:
    """Right in the examples, wrong elsewhere: in what is said no output stands as it should be."""
    source = with_last_line(
        "predict, path, count = right(*args)\n"
        "if args[0].tolist() not in ([[5, 6, 7, 9]], [[5, 6, 7], [3, 4, 8]]):\n"
        "    path = torch.where(path > 0, path - 1, path)\n"
        "return predict, path, count"
    )
    judge.seed = seed
    result = grade(judge, source)
    judge.seed = 1
    assert result.verdict == "fail"
    said = as_text(result)
    assert "expected" not in said
    yours = re.findall(r"\[\[.*\]\]", said)
    assert len(yours) == 1  # the learner's own path
    assert f"your accept_index: {yours[0]}" in said


def test_an_example_shows_what_is_expected(judge: Judge) -> None:
    result = grade(judge, find_misconception("walk_tree", "no_bonus").source)
    assert result.facts == ("your predict: [7, 0, 9, 0]", "expected predict: [7, 0, 9, 4]")


def find_misconception(exercise: str, name: str) -> Misconception:
    return next(m for m in find_exercise(exercise).misconceptions if m.id == name)


def test_failing_cases_are_made_small(judge: Judge) -> None:
    """no_limit fails in no example; the least tree that shows it has a root, a child and a grandchild."""
    result = grade(judge, find_misconception("walk_tree", "no_limit").source)
    assert result.where is not None
    assert result.where == "in an unseen case, made smaller"
    assert len(re.findall(r"node \d+  token", as_text(result))) == 3


@pytest.mark.parametrize("seed", range(3))
def test_failing_cases_are_made_small_whatever_was_drawn(judge: Judge, seed: int) -> None:
    """Wrong where a path of four is accepted: nothing smaller than a chain of five shows it."""
    source = solved().replace("range(1, num_steps + 1)", "range(1, min(num_steps, 3) + 1)")
    judge.seed = seed
    result = grade(judge, source)
    judge.seed = 1
    assert len(re.findall(r"node \d+  token", as_text(result))) == 5
    assert "num_steps = 4" in as_text(result)


def test_nobody_elses_thought_is_named_for_a_wrong_answer_of_its_own(judge: Judge) -> None:
    result = grade(judge, with_last_line("a, b, c = right(*args)\nreturn a, b, c * 3"))
    assert (result.verdict, result.misconception, result.diagnosis) == ("fail", None, None)


@pytest.mark.parametrize(
    ("exercise", "before", "after", "said"),
    [
        (
            "next_beams",
            "scores, chosen = stable_topk(child_scores.flatten(1), topk)",
            "scores, chosen = stable_topk(child_scores.flatten(1), topk)\n    chosen = chosen[:, :1].expand(-1, topk)",
            "your beam 1 is token 11, the same child as your beam 0; the next best is token 12, child 1 of beam 0",
        ),
        (
            "walk_tree",
            "[-1] * (num_steps + 1)",
            "[0] * (num_steps + 1)",
            "request 0: the path has 1 node; behind its end accept_index must be -1, and yours is 0",
        ),
    ],
)
def test_what_is_said_of_an_answer(judge: Judge, exercise: str, before: str, after: str, said: str) -> None:
    source = solved(exercise)
    assert before in source
    assert grade(judge, source.replace(before, after), exercise).headline.startswith(said)


def test_explaining_does_not_rest_on_tokens_that_differ() -> None:
    """Two beams have a child with token 5. The answer takes one of them for the other, with this one's score."""
    problem = problem_of("next_beams")
    case = {
        "i": 1,
        "topk_p": np.array([[0.5, 0.25], [0.75, 0.25]], np.float32),
        "topk_index": np.array([[4, 5], [5, 6]]),
        "hidden_states": np.array([[1], [2]], np.float32),
        "scores": np.array([[0.5, 0.25]], np.float32),
        "topk": 2,
    }
    right = named_arrays(problem.outputs, call(find_exercise("next_beams").reference(), case))  # type: ignore[arg-type]
    yours = {**right, "scores": np.array([[0.25, 0.125]], np.float32), "entries": np.array([[2, 3]])}
    difference = first_difference(right, yours, problem.reading_order, problem.shapes)
    assert difference is not None
    assert problem.explain(case, right, yours, difference).headline == (
        "your beam 1 is token 5 (0.5 * 0.25 = 0.125), "
        "but token 5, child 0 of beam 1 (0.25 * 0.75 = 0.1875) scores higher"
    )


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_whatever_is_wrong_can_be_explained(exercise: Exercise) -> None:
    """Right answers with one number changed, anywhere and to anything."""
    problem, rng = problem_of(exercise.id), random.Random(0)
    console = Console(width=78, file=io.StringIO())
    explained = set()
    for case in draw_cases(problem, rng, 400):
        right = named_arrays(problem.outputs, call(exercise.reference(), case))  # type: ignore[arg-type]
        yours = {name: array.copy() for name, array in right.items()}
        array = yours[rng.choice(list(yours))].reshape(-1)
        other = rng.choice([-1, 0, 1, 7, rng.randint(-(2**31), 2**31 - 1), int(array[rng.randrange(array.size)])])
        array[rng.randrange(array.size)] = other
        difference = first_difference(right, yours, problem.reading_order, problem.shapes)
        if difference is not None:
            explanation = problem.explain(case, right, yours, difference)
            assert len(explanation.headline) > 20
            console.print(explanation.picture)
            explained.add(difference.output)
    assert explained == set(problem.reading_order)


# --- what cannot run --------------------------------------------------------------------------------------------------


def test_GRD_06_a_syntax_error_names_its_line(judge: Judge) -> None:
    result = grade(judge, "# 1\n# 2\n# 3\n# 4\n# 5\n# 6\ndef walk_tree(:\n    pass\n")
    assert result.verdict == "error"
    assert result.headline.startswith("syntax error in line 7: ")


def test_GRD_06_a_missing_module_is_named(judge: Judge) -> None:
    result = grade(judge, at_the_top("import no_such_module"))
    assert result.verdict == "error"
    assert result.headline.startswith("it imports no_such_module, which is not installed here")


def test_GRD_06_leaving_while_loaded_fails(judge: Judge) -> None:
    result = grade(judge, at_the_top("import sys; sys.exit(0)"))
    assert (result.verdict, "ends the process" in result.headline) == ("fail", True)


def test_GRD_06_and_the_next_one_passes(judge: Judge) -> None:
    for source in ("def walk_tree(:", "import no_such_module", "raise SystemExit"):
        grade(judge, source)
    assert grade(judge, solved()).verdict == "pass"


@pytest.mark.parametrize(
    ("source", "headline"),
    [
        ("", "the file defines no function walk_tree"),
        ("walk_tree = 3", "the file defines no function walk_tree"),
        ("x = 1 / 0", "the file cannot be loaded: ZeroDivisionError in line 1: division by zero"),
        ("from torch import no_such_thing", "the file cannot be loaded: ImportError in line 1"),
        ("raise KeyboardInterrupt", "the file cannot be loaded: KeyboardInterrupt in line 1"),
        ("import answer_of_mine", "it imports answer_of_mine, which is not installed here"),
        ("x = '\\xff'\n\0", "syntax error"),
    ],
)
def test_files_that_cannot_be_judged(judge: Judge, source: str, headline: str) -> None:
    result = grade(judge, source)
    assert result.verdict == "error"
    assert headline in result.headline


def test_a_file_in_no_encoding(judge: Judge) -> None:
    exercise = find_exercise("walk_tree")
    late = judge.grade_text(exercise, solved().encode() + b"# \xff\n", "answer.py")
    assert (late.verdict, late.headline) == ("error", "the file is not UTF-8 text")
    early = judge.grade_text(exercise, b"# \xff\n" + solved().encode(), "answer.py")
    assert (early.verdict, early.headline.startswith("syntax error: ")) == ("error", True)


def test_a_file_in_the_encoding_that_it_names(judge: Judge) -> None:
    source = b"# -*- coding: latin-1 -*-\n# \xe9\n" + solved().encode()
    assert judge.grade_text(find_exercise("walk_tree"), source, "answer.py").verdict == "pass"


def test_an_exception_says_where(judge: Judge) -> None:
    result = grade(judge, "def walk_tree(*args):\n    return helper()\n\n\ndef helper():\n    return [][1]\n")
    assert (result.verdict, result.headline) == (
        "fail",
        "walk_tree raises IndexError in line 6: list index out of range",
    )


@pytest.mark.parametrize(
    ("source", "headline"),
    [
        ("def walk_tree(*args):\n    raise NotImplementedError\n", "walk_tree is not written yet"),
        (
            "def walk_tree(*args):\n    raise NotImplementedError('later')\n",
            "walk_tree raises NotImplementedError in line 2: later",
        ),
        (
            "class Base:\n    def f(self): raise NotImplementedError()\ndef walk_tree(*args):\n    Base().f()\n",
            "walk_tree raises NotImplementedError in line 2",
        ),
        ("def walk_tree(*args):\n    args[0] @ 'x'\n", "walk_tree raises TypeError in line 2"),
        ("class refused(Exception): pass\ndef walk_tree(*a): raise refused", "walk_tree raises refused in line 2"),
        ("def walk_tree(*a): raise type('E' * 999, (Exception,), {})", f"walk_tree raises {'E' * 80} in line 1"),
        ("raise ModuleNotFoundError", "the file cannot be loaded: ModuleNotFoundError in line 1"),
    ],
)
def test_an_exception_is_called_what_it_is(judge: Judge, source: str, headline: str) -> None:
    result = grade(judge, source)
    assert result.headline.startswith(headline)
    assert result.unwritten == ("not written yet" in headline)
    assert len(result.headline) < 200


@pytest.mark.parametrize("raised", ["SystemExit(0)", "KeyboardInterrupt", "GeneratorExit", "MemoryError"])
def test_whatever_is_raised_is_an_answer(judge: Judge, raised: str) -> None:
    result = grade(judge, f"def walk_tree(*args):\n    raise {raised}\n")
    assert result.verdict == "fail"
    assert result.headline.startswith(f"walk_tree raises {raised.partition('(')[0]}")


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
@pytest.mark.parametrize("where", ["at the top", "in the function"])
def test_the_solution_cannot_be_imported(judge: Judge, exercise: Exercise, where: str) -> None:
    module, _, name = exercise.solution.partition(":")
    source = f"from {module} import {name} as {exercise.function}"
    if where == "in the function":
        source = f"def {exercise.function}(*args):\n    {source} as found\n    return found(*args)\n".replace(
            f" as {exercise.function} as", " as"
        )
    result = judge.grade_text(exercise, source.encode(), "answer.py")
    assert result.verdict == "fail"
    assert result.headline.startswith(f"the exercise is to write this function: {module}, which holds it, cannot be")


def test_nor_what_imports_it(judge: Judge) -> None:
    result = grade(judge, "from refspec import Engine", "next_beams")
    assert (result.verdict, "the exercise is to write this function" in result.headline) == ("fail", True)


def test_the_given_tool_can_be_imported(judge: Judge) -> None:
    assert "from refspec.kernels import stable_topk" in solved("next_beams")
    assert grade(judge, solved("next_beams"), "next_beams").verdict == "pass"


# --- limits -----------------------------------------------------------------------------------------------------------


def test_GRD_01_an_endless_loop_and_then_a_right_answer(judge: Judge) -> None:
    """With the limit that learners have; and nothing is left of it."""
    started = time.monotonic()
    result = grade(judge, "import time\ndef walk_tree(*args):\n    while True:\n        pass\n")
    assert (result.verdict, result.headline) == ("timeout", "timed out after 5 s")
    assert result.where == "in example 1 of 2 (shown below)"
    assert "node 2  token 7" in as_text(result)
    assert grade(judge, solved("next_beams"), "next_beams").verdict == "pass"
    assert time.monotonic() - started < 10
    assert nursery_children(judge) == []


def test_GRD_01_one_that_starts_a_process(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    source = f"""
    import os, subprocess, sys

    def walk_tree(*args):
        child = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        with open({str(note)!r}, "w") as file:
            file.write(str(child.pid))
        while True:
            pass
    """
    with Judge(Limits(seconds=1.5)) as judge:
        result = grade(judge, source)
        assert (result.verdict, result.headline) == ("timeout", "timed out after 1.5 s")
        assert nursery_children(judge) == []
    assert not psutil.pid_exists(int(note.read_text()))


def nursery_children(judge: Judge) -> list[psutil.Process]:
    process = judge.sandbox._process
    assert process is not None
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("loop", ["while True: pass", "import time; time.sleep(100)"])
def test_a_loop_while_loading(loop: str) -> None:
    with Judge(Limits(seconds=0.5)) as judge:
        result = grade(judge, loop)
    assert (result.verdict, result.where) == ("timeout", "while it was loaded")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is limited on Linux alone")
@pytest.mark.parametrize(
    "take",
    ["bytearray(3 << 30)", "torch.zeros(3 << 28)", "[0] * (3 << 28)", "__import__('mmap').mmap(-1, 3 << 30)"],
)
def test_memory_is_limited(judge: Judge, take: str) -> None:
    result = grade(judge, with_first_line(f"much = {take}"))
    assert result.verdict == "fail"
    assert "memory" in result.headline.lower()
    assert "memory" not in judge.sandbox.not_enforced


def test_files_are_limited(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with Judge(Limits(seconds=60)) as patient:  # on a busy disk, even what is allowed takes long
        result = grade(patient, with_first_line(f"open({str(file)!r}, 'wb').write(bytes(64 << 20))"))
    assert result.verdict == "fail"
    assert file.stat().st_size <= Limits.file_mb << 20


def test_much_printing_is_cut_and_does_not_stop_it(judge: Judge) -> None:
    result = grade(judge, with_first_line("print('x' * 1_000_000)"))
    assert result.verdict == "pass"
    assert len(result.printed) == Limits.printed_kb << 10


def test_what_is_shown_was_printed_in_the_case_that_is_shown(judge: Judge) -> None:
    """In an example, in an unseen case that was made smaller, in one that hung, in one that left, while loading."""
    print_case = "print('the case', args[0].tolist(), flush=True)"
    wrong = "b, n = args[0].shape\nreturn [0] * (b * n), [[7] * (args[-1] + 1)] * b, [0] * b"
    first, second = ("the case [[5, 6, 7, 9]]\n", "the case [[5, 6, 7], [3, 4, 8]]\n")
    for text, printed in (
        (f"{print_case}\n{wrong}", first),
        (f"{print_case}\nif len(args[0]) == 1: return right(*args)\n{wrong}", second),
        (f"{print_case}\nif len(args[0]) == 2: import os; os._exit(3)\nreturn right(*args)", second),
    ):
        assert grade(judge, with_last_line(text)).printed == printed
    unseen = grade(judge, with_last_line(f"{print_case}\nif args[0].shape[1] in (3, 4): return right(*args)\n{wrong}"))
    tokens = re.findall(r"node \d+  token \d+", as_text(unseen))
    assert unseen.unseen
    assert unseen.printed.count("the case") == 1
    assert len(json.loads(unseen.printed.removeprefix("the case"))[0]) == len(tokens)
    assert grade(judge, "print('loading')\n1 / 0").printed == "loading\n"
    with Judge(Limits(seconds=0.5)) as quick:
        hung = with_last_line(f"{print_case}\nwhile len(args[0]) == 2: pass\nreturn right(*args)")
        assert grade(quick, hung).printed == second


def test_what_is_printed_is_shown_without_its_power(judge: Judge) -> None:
    result = grade(judge, with_first_line("print('\\x1b[2J ✓ \\x07 \\ud800')"))
    assert result.verdict == "pass"
    assert result.printed.startswith("\\x1b[2J ✓ \\x07 \\ud800\n")


def test_processes_are_counted(judge: Judge) -> None:
    source = """
    import os, time

    def walk_tree(*args):
        for _ in range(100):
            if os.fork() == 0:
                time.sleep(60)
        time.sleep(60)
    """
    result = grade(judge, source)
    assert (result.verdict, result.headline) == ("fail", "it started more than 64 processes, and was ended")
    assert nursery_children(judge) == []


def test_what_is_not_enforced_is_said(judge: Judge) -> None:
    result = grade(judge, solved())
    assert {"network", "files"} <= set(result.not_enforced)
    assert any("processes" in limit and "root" in limit for limit in result.not_enforced) == (os.geteuid() == 0)


def test_a_reply_without_measure_costs_no_time(judge: Judge) -> None:
    for much in ("[0] * 2_500_000", "[0] * 500_000", "[[[]] * 15_000] * 30", "[[0.5]] * 19_000", "[args[0]] * 19_000"):
        started = time.process_time()  # our own: how long the child may take is limited elsewhere
        once = "globals().setdefault('calls', []).append(1)\nif len(calls) > 1: import os; os._exit(0)"
        result = grade(judge, with_last_line(f"{once}\nreturn {much}, [], []"))
        assert result.verdict == "fail"
        assert time.process_time() - started < 15  # the first took 38


def test_the_child_sees_little_of_the_graders_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "of the grader")
    monkeypatch.setenv("LC_TIME", "C")
    with Judge(seed=1) as judge:
        said = grade(judge, at_the_top("import os; print(sorted(os.environ))")).printed
    assert "A_SECRET" not in said
    assert "LC_TIME" in said
    assert "PATH" in said


def test_a_nursery_that_was_ended_in_the_meantime_is_started_again() -> None:
    with Judge(seed=1) as judge:
        assert grade(judge, solved()).verdict == "pass"
        assert judge.sandbox._process is not None
        judge.sandbox._process.kill()
        judge.sandbox._process.wait()
        assert grade(judge, solved()).verdict == "pass"


def test_who_was_stopped_himself_asks_again(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, and fg when all the time was over: nobody had read what the child wrote."""

    class Stopped(selectors.DefaultSelector):  # type: ignore[valid-type,misc]
        times = 0

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            Stopped.times += 1
            if Stopped.times == 1:
                time.sleep(1.5)
            return super().select(timeout)

    monkeypatch.setattr(sandbox, "STOPPED_SECONDS", 1.0)
    monkeypatch.setattr(sandbox, "GRACE_SECONDS", -3.9)  # with 5 s for the job: it is lost after 1.1
    monkeypatch.setattr(sandbox.selectors, "DefaultSelector", Stopped)
    assert grade(judge, solved()).verdict == "pass"
    assert Stopped.times > 2


def test_a_fault_of_the_judge_is_named_and_the_next_file_judged(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("a fault\nof ours")

    with monkeypatch.context() as patched:
        patched.setattr("refspec.grader.judge.find_fault", fails)
        result = grade(judge, solved())
    assert result.verdict == "error"
    assert result.headline.startswith(
        "the judge itself failed, which is a fault of refspec (ZeroDivisionError in test_"
    )
    assert result.headline.endswith("): a fault of ours")
    assert grade(judge, solved()).verdict == "pass"


# --- files ------------------------------------------------------------------------------------------------------------


def test_GRD_08_an_edit_in_the_same_second_and_of_the_same_size(judge: Judge, tmp_path: Path) -> None:
    right = solved()
    wrong = right.replace("wanted = choice[r][node]", "wanted = choice[r][   0]")
    assert len(right) == len(wrong)
    file = tmp_path / "walk_tree.py"
    exercise = find_exercise("walk_tree")
    file.write_text(wrong)
    before = file.stat()
    assert judge.grade(exercise, file).verdict == "fail"
    file.write_text(right)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert judge.grade(exercise, file).verdict == "pass"
    assert [path.name for path in tmp_path.rglob("*")] == ["walk_tree.py"]


def test_GRD_09_two_graders_at_once(judge: Judge, tmp_path: Path) -> None:
    """In one folder, on different exercises, ten times: as one by one, and nothing is left behind."""
    texts = {"walk_tree": (solved(), "pass"), "next_beams": ("def next_beams(*_): return 1", "fail")}
    for name, (text, _) in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    with Judge(seed=1) as other, ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            results = [
                pool.submit(one.grade, find_exercise(name), tmp_path / f"{name}.py")
                for one, name in zip((judge, other), texts, strict=True)
            ]
            assert [result.result().verdict for result in results] == [verdict for _, verdict in texts.values()]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["next_beams.py", "walk_tree.py"]


@pytest.mark.parametrize("name", ["my work/é dir", "\udcff"])
def test_GRD_10_odd_paths(judge: Judge, tmp_path: Path, name: str) -> None:
    file = tmp_path / name / "walk_tree.py"
    try:
        file.parent.mkdir(parents=True)
    except (OSError, UnicodeEncodeError):
        pytest.skip("a name that this file system does not take")
    file.write_text(with_first_line("print('✓')"), encoding="utf-8")
    result = judge.grade(find_exercise("walk_tree"), file)
    assert (result.verdict, result.printed[:2]) == ("pass", "✓\n")


def test_files_that_are_none(judge: Judge, tmp_path: Path) -> None:
    exercise = find_exercise("walk_tree")
    assert judge.grade(exercise, tmp_path / "absent.py").verdict == "not_started"
    assert judge.grade(exercise, tmp_path).headline == f"{tmp_path} is no plain file"
    os.mkfifo(tmp_path / "pipe.py")
    assert judge.grade(exercise, tmp_path / "pipe.py").verdict == "error"
    (tmp_path / "large.py").write_bytes(b"#" * (2 << 20))
    assert "larger than 1024 KiB" in judge.grade(exercise, tmp_path / "large.py").headline


def test_modules_beside_the_judge_are_not_taken_for_others(judge: Judge) -> None:
    """Not json, not torch: the nursery does not look where it was started."""
    result = grade(judge, at_the_top("import sys; print(sys.path[0])"))
    assert result.printed.strip() not in ("", os.getcwd())


# --- reports ----------------------------------------------------------------------------------------------------------


def test_pictures_fit_into_80_columns(judge: Judge) -> None:
    for exercise, name in (("next_beams", "beams_in_pool_order"), ("walk_tree", "no_bonus"), ("walk_tree", "no_limit")):
        result = grade(judge, find_misconception(exercise, name).source, exercise)
        assert result.picture is not None
        console = Console(width=78, color_system=None)
        with console.capture() as captured:
            console.print(result.picture)
        assert max(map(len, captured.get().splitlines())) <= 78


def test_the_fault_of_one_answer_is_found_from_a_private_copy() -> None:
    """find_fault computes what is right itself, and leaves the case as it is."""
    from refspec.grader.judge import _Answer

    exercise, problem = find_exercise("walk_tree"), problem_of("walk_tree")
    case = problem.examples[0]
    before = {name: np.copy(value) for name, value in case.items()}
    inputs = {name: value for name, value in case.items() if isinstance(value, np.ndarray)}
    answer = _Answer(call(exercise.reference(), case), inputs)
    assert find_fault(exercise, problem, case, answer) is None
    assert all(np.array_equal(before[name], case[name]) for name in case)


def test_the_seed_of_torch_is_not_ours_to_change(judge: Judge) -> None:
    before = torch.get_rng_state()
    grade(judge, find_misconception("walk_tree", "no_limit").source)
    assert torch.equal(before, torch.get_rng_state())


def test_results_can_be_written_as_json(judge: Judge) -> None:
    from refspec.grader.report import as_json

    result = grade(judge, find_misconception("walk_tree", "no_limit").source)
    document = json.loads(json.dumps(as_json([result], judge.limits)))
    assert document["results"][0]["misconception"] == "no_limit"
    assert document["limits"]["seconds"] == 5.0
