"""What every exercise must show: its skeleton fails, its solution passes, and each misconception is told apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from refspec.grader.compare import UnlikeError, named_arrays, same
from refspec.grader.exercise import Exercise, Misconception, all_exercises
from refspec.grader.judge import Judge, call, draw_cases, load_misconception
from refspec.grader.problems import Case, problem_of

EXERCISES = all_exercises()
BANK = [(exercise, misconception) for exercise in EXERCISES for misconception in exercise.misconceptions]
each_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """One nursery for all tests here."""
    with Judge(seed=1) as judge:
        yield judge


@each_exercise
def test_the_skeleton_fails(judge: Judge, exercise: Exercise) -> None:
    result = judge.grade_text(exercise, exercise.skeleton.encode(), "answer.py")
    assert (result.verdict, result.headline) == ("fail", f"{exercise.function} is not written yet")


@each_exercise
@pytest.mark.parametrize("seed", range(3))
def test_the_solution_passes(judge: Judge, exercise: Exercise, seed: int) -> None:
    judge.seed = seed
    result = judge.grade_text(exercise, exercise.solution_text().encode(), "answer.py")
    judge.seed = 1
    assert (result.verdict, result.facts) == ("pass", ())
    assert result.cases > len(problem_of(exercise.id).examples) + 30


@pytest.mark.parametrize(("exercise", "misconception"), BANK, ids=lambda x: x.id)
def test_a_misconception_fails_with_its_own_diagnosis(
    judge: Judge, exercise: Exercise, misconception: Misconception
) -> None:
    result = judge.grade_text(exercise, misconception.source.encode(), "answer.py")
    assert (result.verdict, result.misconception) == ("fail", misconception.id)
    assert result.diagnosis == misconception.sentence
    assert result.picture is not None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("exercise", "misconception"), BANK, ids=lambda x: x.id)
def test_a_misconception_is_wrong_in_the_cases_of_every_seed(
    exercise: Exercise, misconception: Misconception, seed: int
) -> None:
    """Drawn alone, without the examples. In this process: it is the cases that are tried here."""
    problem, function = problem_of(exercise.id), load_misconception(misconception, exercise.function)
    cases = draw_cases(problem, random.Random(seed), 42)
    assert any(is_wrong(exercise, function, case) for case in cases)


def is_wrong(exercise: Exercise, function: Callable[..., Any], case: Case) -> bool:
    names = problem_of(exercise.id).outputs
    answers = [call(each, case) for each in (exercise.reference(), function)]
    try:
        right, yours = (named_arrays(names, answer) for answer in answers)  # type: ignore[arg-type] # it may have raised
    except UnlikeError:
        return True
    return not same(right, yours)


def test_diagnoses_do_not_depend_on_the_seed(judge: Judge) -> None:
    """Of those that differ least."""
    judge.seed = 2
    try:
        for exercise in EXERCISES:
            for misconception in exercise.misconceptions[::3]:
                result = judge.grade_text(exercise, misconception.source.encode(), "answer.py")
                assert result.misconception == misconception.id
    finally:
        judge.seed = 1


def variant(exercise: Exercise, before: str, after: str) -> str:
    """The solution with one thing in it changed."""
    text = exercise.solution_text()
    assert text.count(before) == 1
    return text.replace(before, after)


TOPK, STEPS = "stable_topk(child_scores.flatten(1), topk)", "range(1, num_steps + 1)"
SUBTLE = {
    "an unstable sort": (0, TOPK, "(x[:, :topk] for x in child_scores.flatten(1).sort(dim=1, descending=True))"),
    "scores at level 0": (
        0,
        "repeat_interleave(topk, dim=0), topk_p, level",
        "repeat_interleave(topk, dim=0), scores, level",
    ),
    "one draft fewer": (1, STEPS, "range(1, num_steps)"),
    **{f"{n} drafts at most": (1, STEPS, f"range(1, min(num_steps, {n}) + 1)") for n in (2, 3, 4)},
}


@pytest.mark.parametrize("name", SUBTLE)
def test_what_is_wrong_now_and_then_fails_with_every_seed_and_gets_no_diagnosis(judge: Judge, name: str) -> None:
    number, before, after = SUBTLE[name]
    exercise = EXERCISES[number]
    source = variant(exercise, before, after)
    namespace: dict[str, Any] = {"__name__": "variant"}
    exec(compile(source, name, "exec", dont_inherit=True), namespace)
    for seed in range(20):
        cases = draw_cases(problem_of(exercise.id), random.Random(seed), 42)
        assert any(is_wrong(exercise, namespace[exercise.function], case) for case in cases), seed
    result = judge.grade_text(exercise, source.encode(), "answer.py")
    assert (result.verdict, result.misconception) == ("fail", None)


def test_a_diagnosis_rests_on_more_than_the_cases_of_the_run(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which there are the two examples here. In both, the two answers are the same."""
    monkeypatch.setattr("refspec.grader.judge.DRAWN", 0)
    misconception = next(m for m in EXERCISES[1].misconceptions if m.id == "no_bonus")
    other = misconception.source + "\nno_bonus = walk_tree\n\n" + AFRESH["walk_tree"].replace("walk_tree", "afresh")
    other += "\ndef walk_tree(*args):\n    return (afresh if args[-1] == 3 else no_bonus)(*args)\n"
    found = [
        judge.grade_text(EXERCISES[1], source.encode(), "answer.py").misconception
        for source in (misconception.source, other)
    ]
    assert found == ["no_bonus", None]


def test_counting_the_root_and_counting_the_bonus_are_one_misconception(judge: Judge) -> None:
    source = AFRESH["walk_tree"].replace("len(path) - 1)", "len(path))")
    result = judge.grade_text(EXERCISES[1], source.encode(), "answer.py")
    assert result.misconception == "one_too_many"
    assert result.diagnosis is not None
    assert "neither the root" in result.diagnosis


@each_exercise
def test_every_bank_holds_enough(exercise: Exercise) -> None:
    assert len(exercise.misconceptions) >= 5


# --- with fresh eyes --------------------------------------------------------------------------------------------------

# From the skeletons and hints alone, in plain Python: what they say is enough, and the same as what the package does.
AFRESH = {
    "next_beams": """
def next_beams(i, topk_p, topk_index, hidden_states, scores, topk):
    p, tokens, states = topk_p.tolist(), topk_index.tolist(), hidden_states.tolist()
    b = len(scores)
    ids, hidden, best_scores, child_scores, child_tokens, entries = [], [], [], [], [], []
    for r in range(b):
        if i == 0:
            ids += tokens[r]
            hidden += [states[r]] * topk
            best_scores.append(p[r])
            child_scores.append([p[r]])
            child_tokens.append(tokens[r])
            entries.append([-1, *range(topk)])
            continue
        rows = range(r * topk, (r + 1) * topk)
        table = [[float(scores[r, j]) * own for own in p[row]] for j, row in enumerate(rows)]
        pool = [(-score, j * topk + c) for j, line in enumerate(table) for c, score in enumerate(line)]
        chosen = [place for _, place in sorted(pool)[:topk]]
        flat = [token for row in rows for token in tokens[row]]
        ids += [flat[place] for place in chosen]
        hidden += [states[r * topk + place // topk] for place in chosen]
        best_scores.append([table[place // topk][place % topk] for place in chosen])
        child_scores.append(table)
        child_tokens.append(flat)
        before = topk + (i - 1) * topk * topk
        entries.append([before + place for place in chosen])
    return ids, hidden, best_scores, (child_scores, child_tokens, entries)
""",
    "walk_tree": """
def walk_tree(candidates, index, first, sibling, wants, num_steps):
    b, n = candidates.shape
    predict, paths, counts = [0] * (b * n), [], []
    for r in range(b):
        path = [0]
        while True:
            node = path[-1]
            predict[index[r, node]] = int(wants[r, node])
            children = [int(first[r, node])]
            while children[-1] >= 0:
                children.append(int(sibling[r, children[-1]]))
            fitting = [child for child in children[:-1] if candidates[r, child] == wants[r, node]]
            if not fitting or len(path) > num_steps:
                break
            path.append(fitting[0])
        counts.append(len(path) - 1)
        paths.append([r * n + node for node in path] + [-1] * (num_steps + 1 - len(path)))
    return predict, paths, counts
""",
}


@each_exercise
def test_an_answer_written_afresh_passes(judge: Judge, exercise: Exercise) -> None:
    result = judge.grade_text(exercise, AFRESH[exercise.id].encode(), "answer.py")
    assert (result.verdict, result.headline.partition(",")[0]) == ("pass", "right")
