"""The checks of the study notes on EAGLE, where they speak of the code: which models run, how often, and on what.

A round is not run but followed through its source (see `walk`), with settings of ours; the forwards are counted on the
way.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any

from refspec.history.claims.checking import Part, check
from refspec.history.claims.eagle_round import (
    FIRST_WORKER,
    MODES,
    ONE_FORWARD_LESS,
    RELEASE,
    ROUND,
    SCHEDULER,
    SERVER,
    TARGET,
    TREES,
    WORKER,
    assignments,
    calls_of,
    follow_round,
    is_draft,
    models_run,
    settings_of,
    shows,
)
from refspec.history.claims.evidence import Defined, definition, definitions, each, exists, full_path
from refspec.history.claims.walk import UNKNOWN, Call, value_of, walk, written
from refspec.history.claims.wording import listed
from refspec.history.clone import Clone, HistoryError

TREE_BUILDER, PREPROCESS = "build_eagle_tree.py", "build_tree_kernel_efficient_preprocess"


# --- whose worker it is, and what the scheduler sees of it


@check("E12")
def which_model_the_worker_runs(clone: Clone) -> Sequence[Part]:
    """EAGLEWorker is itself the target model's worker, and holds a ModelRunner of the draft's beside it."""
    start = definition(clone, RELEASE, WORKER, "EAGLEWorker.__init__")
    runner = definition(clone, RELEASE, WORKER, "EAGLEWorker.draft_model_runner")
    drafts = [
        written(keyword.value)
        for call in calls_of(start.node, "super().__init__")
        for keyword in call.keywords
        if keyword.arg == "is_draft_worker"
    ]
    held = [target for target, value in assignments(start.node) if value == "target_worker"]
    given = _returns(runner.node)
    return [
        Part(
            "the model that it runs as a TpModelWorker is the target",
            drafts != ["True"],
            f"super().__init__ is given is_draft_worker={', '.join(drafts) or 'nothing'}; the target's worker is "
            f"{'held as ' + ', '.join(held) if held else 'not held'}",
            command=shows(RELEASE, WORKER, start),
        ),
        Part(
            "beside it, it holds another ModelRunner for the draft",
            given != ["self.model_runner"],
            f"draft_model_runner returns {', '.join(given) or 'nothing'} (line {runner.first})",
            command=shows(RELEASE, WORKER, runner),
        ),
    ]


@check("E13")
def what_the_scheduler_calls(clone: Clone) -> Sequence[Part]:
    """To the scheduler it is still forward_batch_generation, without a branch."""
    known = definitions(clone, RELEASE, SCHEDULER)
    called = []
    for plain in (True, False):
        settings = {"self.is_generation": True, "self.spec_algorithm.is_none()": plain}
        way = walk(known, "Scheduler.run_batch", settings)
        called.append(sorted({call.name for call in way.calls if ".forward_batch_" in call.name}))
    scheduler = known["Scheduler"].node
    branches = [
        node.lineno
        for node in ast.walk(scheduler)
        if isinstance(node, ast.If | ast.IfExp) and "spec_algorithm" in written(node.test)
    ]
    return [
        Part(
            "run_batch calls the same with and without speculation",
            called[0] == called[1] != [],
            f"without: {', '.join(called[0]) or 'nothing'}; with: {', '.join(called[1]) or 'nothing'}",
            command=shows(RELEASE, SCHEDULER, known["Scheduler.run_batch"]),
        ),
        Part(
            "the scheduler has no branch on it",
            not branches,
            f"{len(branches)} conditions of Scheduler's ask spec_algorithm, in lines {listed(sorted(branches))}",
            command=f"git grep -n spec_algorithm {RELEASE} -- :/{full_path(SCHEDULER)}",
        ),
    ]


@check("E15")
def three_ways(clone: Clone) -> Sequence[Part]:
    """Three branches: decode, idle, extend; an idle batch runs the target only."""
    known = definitions(clone, RELEASE, WORKER)
    counts = {mode: models_run(follow_round(known, settings_of(mode))) for mode in MODES}
    ways = {branch for mode in MODES for branch in [_branch_of(known[ROUND].node, mode)] if branch}
    later = definitions(clone, "10d60cd41b", WORKER)
    idle_later = models_run(follow_round(later, settings_of("idle")))
    return [
        Part(
            "it has three branches, for decode, idle and extend",
            len(ways) == len(MODES),
            f"{len(ways)} different ones, in lines {listed(sorted(ways))}",
            command=shows(RELEASE, WORKER, known[ROUND]),
        ),
        Part(
            "decode and extend run both models",
            all(min(counts[mode]) > 0 for mode in ("decode", "extend")),
            "; ".join(f"{mode}: target {counts[mode][0]}, draft {counts[mode][1]}" for mode in ("decode", "extend"))
            + " (num_steps 3)",
        ),
        Part(
            "idle runs the target only",
            counts["idle"] == (1, 0),
            f"idle: target {counts['idle'][0]}, draft {counts['idle'][1]}; since 10d60cd41b: target {idle_later[0]}, "
            f"draft {idle_later[1]}",
        ),
    ]


@check("E16")
def what_a_round_returns(clone: Clone) -> Sequence[Part]:
    """Its return value is the total of accepted tokens."""
    worker = definitions(clone, RELEASE, WORKER)
    returned = follow_round(worker, settings_of("decode")).returned
    last = written(returned.elts[-1]) if isinstance(returned, ast.Tuple) else "no tuple"
    verify = definition(clone, RELEASE, TREES, "EagleVerifyInput.verify").node
    moved = {written(call.args[0]) for call in calls_of(verify, "batch.seq_lens.add_")}
    run = definition(clone, RELEASE, SCHEDULER, "Scheduler.run_batch").node
    added = [
        written(node.value)
        for node in ast.walk(run)
        if isinstance(node, ast.AugAssign) and "accepted" in written(node.target)
    ]
    return [
        Part(
            "the last of what it returns is the sum of the accepted lengths",
            last.startswith("sum(") and "accept_length" in last,
            f"after a decode round: {last}",
            command=shows(RELEASE, WORKER, worker[ROUND]),
        ),
        Part(
            "the bonus token is not among them",
            moved == {"accept_length + 1"} and all("batch.batch_size()" in one for one in added) and bool(added),
            f"seq_lens grows by {', '.join(sorted(moved)) or 'nothing'}; the scheduler counts "
            f"{', '.join(added) or 'nothing'}",
            core=False,
        ),
    ]


# --- how often the models run


@check("E17")
def draft_forwards(clone: Clone) -> Sequence[Part]:
    """The draft model runs num_steps + 1 times in a round."""
    steps = range(1, 6)
    revisions = (FIRST_WORKER, f"{ONE_FORWARD_LESS}^", ONE_FORWARD_LESS, RELEASE)
    runs = {}
    for revision, known in zip(revisions, each(lambda one: definitions(clone, one, WORKER), revisions), strict=True):
        runs[revision] = [models_run(follow_round(known, settings_of("decode", steps=s)))[1] for s in steps]
    table = "; ".join(f"{revision}: {listed(runs[revision])}" for revision in revisions)
    return [
        Part(
            "a round runs the draft num_steps + 1 times",
            runs[RELEASE] == [s + 1 for s in steps],
            f"for num_steps 1 to 5, {table}",
            command=f"git show {ONE_FORWARD_LESS} -- :/{full_path(WORKER)}",
        )
    ]


@check("E18")
def draft_forwards_of_three_steps(clone: Clone) -> Sequence[Part]:
    """With num_steps=3, a round has 3 forwards of the draft and one that extends it."""
    known = definitions(clone, RELEASE, WORKER)
    way = follow_round(known, settings_of("decode", steps=3))
    models_run(way)
    verified = min(way.at(TARGET), default=len(way.calls))
    places = [place for place, call in enumerate(way.calls) if is_draft(call)]
    before, after = sum(place < verified for place in places), sum(place > verified for place in places)
    return [
        Part(
            "3 forwards of the draft come before the verification",
            before == 3,
            f"{before} do",
            command=_in_draft(known),
        ),
        Part("1 comes after it, to extend", after == 1, f"{after} does" if after == 1 else f"{after} do"),
    ]


@check("E19")
def target_forwards(clone: Clone) -> Sequence[Part]:
    """The target model runs once in a round."""
    known = definitions(clone, RELEASE, WORKER)
    runs = [models_run(follow_round(known, settings_of("decode", steps=s)))[0] for s in range(1, 6)]
    return [Part("a round runs the target once", set(runs) == {1}, f"for num_steps 1 to 5: {listed(runs)}")]


@check("E20")
def candidates(clone: Clone) -> Sequence[Part]:
    """With 3 steps and topk 4, 4+4+4 = 12 candidates are scored, and the root."""
    scored = _candidates_scored(clone, topk=4, steps=3)
    kept = _kept_candidates(clone, verified=8)
    return [
        Part(
            "12 candidates are scored",
            scored == [4, 4, 4],
            f"{'+'.join(map(str, scored))} = {sum(scored)} are",
            command=shows(RELEASE, TREES, definition(clone, RELEASE, TREES, "select_top_k_tokens")),
        ),
        Part(
            "all of them are verified with the root",
            kept == sum(scored),
            f"of num_draft_tokens = 8 the tree keeps {kept} candidates and the root",
            command=shows(RELEASE, TREE_BUILDER, definition(clone, RELEASE, TREE_BUILDER, PREPROCESS)),
        ),
    ]


@check("E21")
def size_of_verification(clone: Clone) -> Sequence[Part]:
    """The input of verification is 1 + the number of candidates."""
    defaults = {
        tuple(ast.literal_eval(node.value))
        for node in ast.walk(definition(clone, RELEASE, SERVER, "auto_choose_speculative_params").node)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
    }
    if len(defaults) != 1:
        raise HistoryError(f"{RELEASE} has no one default of the settings: {sorted(defaults) or 'none'}")
    steps, topk, draft_tokens = defaults.pop()
    scored = sum(_candidates_scored(clone, topk=topk, steps=steps))
    settings = settings_of("decode", steps=steps, topk=topk)
    settings["self.server_args.speculative_num_draft_tokens"] = draft_tokens
    way = follow_round(definitions(clone, RELEASE, WORKER), settings)
    created = _argument_given(clone, way.named("EagleVerifyInput.create"), "num_verify_tokens")
    if created is UNKNOWN:
        raise HistoryError(f"{RELEASE}: how many tokens are verified cannot be read off its source")
    field = _field_given(clone, "num_verify_tokens")
    return [
        Part(
            "verification takes the root and all candidates",
            created == 1 + scored,
            f"by default, num_steps {steps}, topk {topk}, num_draft_tokens {draft_tokens}: {scored} candidates are "
            f"scored, and {field} = {created} tokens of each request are verified, the root among them",
        )
    ]


@check("E44")
def a_graph_of_its_own(clone: Clone) -> Sequence[Part]:
    """The draft has a CUDA graph of its own, because its shapes are fixed."""
    file, runner = "eagle_draft_cuda_graph_runner.py", "EAGLEDraftCudaGraphRunner"
    came = exists(clone, "013021b6a1", file) and not exists(clone, "013021b6a1^", file)
    way = walk(definitions(clone, RELEASE, WORKER), "EAGLEWorker.init_cuda_graphs", {})
    start = definition(clone, RELEASE, file, f"{runner}.__init__").node
    per_request = [value for target, value in assignments(start) if target == "self.num_tokens_per_bs"]
    return [
        Part(
            "the draft has a graph runner of its own",
            bool(way.named(runner)),
            f"init_cuda_graphs {'makes' if way.named(runner) else 'does not make'} an {runner}; its file "
            f"{'came' if came else 'did not come'} with 013021b6a1",
        ),
        Part(
            "the settings fix its shapes",
            bool(per_request) and all("speculative_eagle_topk" in value for value in per_request),
            f"tokens of each request: {', '.join(per_request) or 'not told'}",
            core=False,
        ),
    ]


def _in_draft(known: Mapping[str, Defined]) -> str:
    """A command that shows where the worker runs the draft."""
    return shows(
        RELEASE,
        WORKER,
        *(
            one
            for name, one in known.items()
            if name.startswith(("EAGLEWorker.draft_forward", "EAGLEWorker.forward_draft_extend_after"))
        ),
    )


def _branch_of(function: ast.AST, mode: str) -> int | None:
    """The line in which what a function does in that mode begins: its first branch on the mode that is taken."""
    for node in ast.walk(function):
        if isinstance(node, ast.If) and ".forward_mode.is_" in written(node.test):
            while True:
                if written(node.test) == f"batch.forward_mode.is_{mode}()":
                    return node.body[0].lineno
                if not node.orelse:
                    return None
                if not isinstance(node.orelse[0], ast.If):
                    return node.orelse[0].lineno
                node = node.orelse[0]
    return None


# --- the tree of candidates


def _candidates_scored(clone: Clone, topk: int, steps: int) -> list[int]:
    """How many candidates of a request each step of drafting scores: the size of the scores that it hands on."""
    way = follow_round(definitions(clone, RELEASE, WORKER), settings_of("decode", steps=steps, topk=topk))
    select = definition(clone, RELEASE, TREES, "select_top_k_tokens")
    return [_scored(select, call.arguments[0], topk) for call in way.named("select_top_k_tokens")]


def _scored(select: Defined, step: Any, topk: int) -> int:
    """The size of the first tensor of what select_top_k_tokens hands on, for one request."""
    assert isinstance(select.node, ast.FunctionDef)
    shapes: dict[str, tuple[int, ...]] = {
        "topk_p": (1, topk) if step == 0 else (topk, topk),
        "scores": (1, topk),
    }
    for statement in _taken(select.node.body, {"i": step}):
        if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)):
            continue
        value = statement.value
        if statement.targets[0].id == "tree_info" and isinstance(value, ast.Tuple):
            shape = _shape(value.elts[0], shapes, {"topk": topk})
            if shape is not None:
                return math.prod(shape)
        shape = _shape(value, shapes, {"topk": topk})
        shapes.pop(statement.targets[0].id, None)
        if shape is not None:
            shapes[statement.targets[0].id] = shape
    raise HistoryError(f"{RELEASE}: how many candidates {select.name} scores cannot be read off its source")


def _taken(body: Sequence[ast.stmt], known: Mapping[str, Any]) -> list[ast.stmt]:
    """The statements that are run, where conditions compare what is known."""
    taken: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If):
            way = value_of(statement.test, known)
            taken += _taken(statement.body if way else statement.orelse, known)
        else:
            taken.append(statement)
    return taken


def _shape(node: ast.expr, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The shape of a tensor's expression, of the few kinds that occur here; None for others."""
    if isinstance(node, ast.Name):
        return shapes.get(node.id)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    if written(node.func) == "torch.mul":
        one, other = (_shape(part, shapes, sizes) for part in node.args)
        return _broadcast(one, other) if one and other else None
    shape, numbers = _shape(node.func.value, shapes, sizes), [value_of(part, sizes) for part in node.args]
    if shape is None or not all(isinstance(number, int) for number in numbers):
        return None
    if node.func.attr == "unsqueeze" and len(numbers) == 1:
        return (*shape[: numbers[0]], 1, *shape[numbers[0] :])
    if node.func.attr == "reshape" and numbers.count(-1) <= 1:
        rest = math.prod(shape) // math.prod(number for number in numbers if number != -1)
        return tuple(rest if number == -1 else number for number in numbers)
    return None


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    longest = max(len(one), len(other))
    pairs = zip((1,) * (longest - len(one)) + one, (1,) * (longest - len(other)) + other, strict=True)
    return tuple(map(max, pairs))


def _kept_candidates(clone: Clone, verified: int) -> int:
    """How many candidates the tree keeps, where that many tokens are to be verified."""
    way = walk(definitions(clone, RELEASE, TREE_BUILDER), PREPROCESS, {"num_verify_tokens": verified})
    kept = [call.arguments[1] for call in way.named("topk") if len(call.arguments) > 1]
    if len(kept) != 1 or kept[0] is UNKNOWN:
        raise HistoryError(f"{RELEASE}: how many candidates {PREPROCESS} keeps cannot be read off its source")
    return int(kept[0])


def _argument_given(clone: Clone, calls: Sequence[Call], parameter: str) -> Any:
    """What EagleVerifyInput.create is given for a parameter."""
    names = _parameters(definition(clone, RELEASE, TREES, "EagleVerifyInput.create").node)[1:]
    for call in calls:
        given = dict(zip(names, call.arguments, strict=False)) | call.keywords
        if parameter in given:
            return given[parameter]
    return UNKNOWN


def _field_given(clone: Clone, parameter: str) -> str:
    """Which field of the verification's input EagleVerifyInput.create makes of a parameter."""
    known = definitions(clone, RELEASE, TREES)
    fields = [written(one.target) for one in known["EagleVerifyInput"].node.body if isinstance(one, ast.AnnAssign)]
    for call in calls_of(known["EagleVerifyInput.create"].node, "cls"):
        given = dict(zip(fields, map(ast.unparse, call.args), strict=False))
        given |= {keyword.arg: written(keyword.value) for keyword in call.keywords if keyword.arg}
        for field, value in given.items():
            if value == parameter:
                return field
    return "no field"


def _returns(node: ast.AST) -> list[str]:
    return [written(one.value) for one in ast.walk(node) if isinstance(one, ast.Return) and one.value]


def _parameters(node: ast.AST) -> list[str]:
    return [one.arg for one in node.args.args] if isinstance(node, ast.FunctionDef) else []
