"""The checks of the study notes on EAGLE, where they speak of the code: what a round of decoding does, in which order.

Release 0.4.6 is the one that the notes describe. A round is not run but followed through its source (see `walk`), with
settings of ours: how often a model runs and what is allocated is counted on the way.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any

from refspec.history.claims.checking import Part, check
from refspec.history.claims.evidence import (
    Definition,
    change,
    commit,
    definition,
    definitions,
    each,
    exists,
    grep,
)
from refspec.history.claims.walk import UNKNOWN, Call, Walk, value_of, walk, written
from refspec.history.clone import Clone, HistoryError

RELEASE = "v0.4.6"
WORKER = "eagle_worker.py"
TREES = "eagle_utils.py"
SCHEDULER = "/python/sglang/srt/managers/scheduler.py"
SETTINGS = "/python/sglang/srt/server_args.py"
ROUND = "EAGLEWorker.forward_batch_speculative_generation"
ROUND_SINCE_OVERLAP = "EAGLEWorker.forward_batch_generation"

FIRST_WORKER = "815dce0554"
ONE_FORWARD_LESS = "d23cb9a01e"
PAGES = "b26bc86b36"


# --- whose worker it is, and what the scheduler sees of it


@check("E12")
def which_model_the_worker_runs(clone: Clone) -> Sequence[Part]:
    """EAGLEWorker is itself the target model's worker, and holds a ModelRunner of the draft's beside it."""
    start = definition(clone, RELEASE, WORKER, "EAGLEWorker.__init__")
    runner = definition(clone, RELEASE, WORKER, "EAGLEWorker.draft_model_runner")
    drafts = [
        written(keyword.value)
        for call in _calls(start.node, "super().__init__")
        for keyword in call.keywords
        if keyword.arg == "is_draft_worker"
    ]
    held = [target for target, value in _assigned(start.node) if value == "target_worker"]
    given = _returned(runner.node)
    return [
        Part(
            "the model that it runs as a TpModelWorker is the target",
            drafts != ["True"],
            f"super().__init__ is given is_draft_worker={', '.join(drafts) or 'nothing'}; the target's worker is "
            f"{'held as ' + ', '.join(held) if held else 'not held'}",
        ),
        Part(
            "beside it, it holds another ModelRunner for the draft",
            given != ["self.model_runner"],
            f"draft_model_runner returns {', '.join(given) or 'nothing'} (line {runner.first})",
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
        node.lineno for node in ast.walk(scheduler) if isinstance(node, ast.If | ast.IfExp) and _speaks_of(node.test)
    ]
    return [
        Part(
            "run_batch calls the same with and without speculation",
            called[0] == called[1],
            f"without: {', '.join(called[0]) or 'nothing'}; with: {', '.join(called[1]) or 'nothing'}",
        ),
        Part(
            "the scheduler has no branch on it",
            not branches,
            f"{len(branches)} conditions of Scheduler's ask spec_algorithm, in lines {_listed(branches)}",
        ),
    ]


@check("E15")
def three_ways(clone: Clone) -> Sequence[Part]:
    """Three branches: decode, idle, extend; an idle batch runs the target only."""
    known = definitions(clone, RELEASE, WORKER)
    counts = {mode: _models(_round(known, _settings(mode))) for mode in MODES}
    ways = {branch for mode in MODES for branch in [_branch(known[ROUND].node, mode)] if branch}
    later = definitions(clone, "10d60cd41b", WORKER)
    idle_later = _models(_round(later, _settings("idle")))
    return [
        Part(
            "it has three branches, for decode, idle and extend",
            len(ways) == len(MODES),
            f"{len(ways)} different ones, in lines {_listed(sorted(ways))}",
        ),
        Part(
            "decode and extend run both models",
            all(min(counts[mode]) > 0 for mode in ("decode", "extend")),
            "; ".join(f"{mode}: target {counts[mode][0]}, draft {counts[mode][1]}" for mode in ("decode", "extend")),
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
    returned = _round(definitions(clone, RELEASE, WORKER), _settings("decode")).returned
    last = written(returned.elts[-1]) if isinstance(returned, ast.Tuple) else "no tuple"
    verify = definition(clone, RELEASE, TREES, "EagleVerifyInput.verify").node
    moved = {written(call.args[0]) for call in _calls(verify, "batch.seq_lens.add_")}
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
        runs[revision] = [_models(_round(known, _settings("decode", steps=s)))[1] for s in steps]
    table = "; ".join(f"{revision}: {_listed(runs[revision])}" for revision in revisions)
    return [
        Part(
            "a round runs the draft num_steps + 1 times",
            runs[RELEASE] == [s + 1 for s in steps],
            f"for num_steps 1 to 5, {table}",
        )
    ]


@check("E18")
def draft_forwards_of_three_steps(clone: Clone) -> Sequence[Part]:
    """With num_steps=3, a round has 3 forwards of the draft and one that extends it."""
    way = _round(definitions(clone, RELEASE, WORKER), _settings("decode", steps=3))
    verified = min(way.at(TARGET), default=len(way.calls))
    places = [place for place, call in enumerate(way.calls) if _is_draft(call)]
    before, after = sum(place < verified for place in places), sum(place > verified for place in places)
    return [
        Part("3 forwards of the draft come before the verification", before == 3, f"{before} do"),
        Part("1 comes after it, to extend", after == 1, f"{after} does" if after == 1 else f"{after} do"),
    ]


@check("E19")
def target_forwards(clone: Clone) -> Sequence[Part]:
    """The target model runs once in a round."""
    known = definitions(clone, RELEASE, WORKER)
    runs = [_models(_round(known, _settings("decode", steps=s)))[0] for s in range(1, 6)]
    return [Part("a round runs the target once", set(runs) == {1}, f"for num_steps 1 to 5: {_listed(runs)}")]


@check("E20")
def candidates(clone: Clone) -> Sequence[Part]:
    """With 3 steps and topk 4, 4+4+4 = 12 candidates are scored, and the root."""
    scored = _candidates(clone, topk=4, steps=3)
    kept = _kept_of_them(clone, verified=8)
    return [
        Part(
            "12 candidates are scored",
            scored == [4, 4, 4],
            f"{'+'.join(map(str, scored))} = {sum(scored)}: the first step scores topk of them, a later one topk of "
            "each of the topk beams",
        ),
        Part(
            "all of them are verified with the root",
            kept == sum(scored),
            f"of num_draft_tokens = 8 the tree keeps {kept} candidates and the root",
        ),
    ]


@check("E21")
def size_of_verification(clone: Clone) -> Sequence[Part]:
    """The input of verification is 1 + the number of candidates."""
    defaults = {
        tuple(ast.literal_eval(node.value))
        for node in ast.walk(definition(clone, RELEASE, SETTINGS, "auto_choose_speculative_params").node)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
    }
    if len(defaults) != 1:
        raise HistoryError(f"{RELEASE} has no one default of the settings: {sorted(defaults) or 'none'}")
    steps, topk, draft_tokens = defaults.pop()
    scored = sum(_candidates(clone, topk=topk, steps=steps))
    settings = _settings("decode", steps=steps, topk=topk)
    settings["self.server_args.speculative_num_draft_tokens"] = draft_tokens
    way = _round(definitions(clone, RELEASE, WORKER), settings)
    created = _argument(clone, way.named("EagleVerifyInput.create"), "num_verify_tokens")
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
    per_request = [value for target, value in _assigned(start) if target == "self.num_tokens_per_bs"]
    return [
        Part(
            "the draft has a graph runner of its own",
            bool(way.named(runner)),
            f"init_cuda_graphs {'makes' if way.named(runner) else 'does not make'} a {runner}; its file "
            f"{'came' if came else 'did not come'} with 013021b6a1",
        ),
        Part(
            "the settings fix its shapes",
            bool(per_request) and all("speculative_eagle_topk" in value for value in per_request),
            f"tokens of each request: {', '.join(per_request) or 'not told'}",
            core=False,
        ),
    ]


# --- slots of the cache


@check("E22")
def draft_slots(clone: Clone) -> Sequence[Part]:
    """Draft allocates batch x topk x num_steps slots at once, with a backup."""
    known = definitions(clone, RELEASE, WORKER)
    agree, found, written = [], [], ""
    for batch, topk, steps in ((1, 4, 3), (3, 2, 5), (2, 8, 4)):
        way = _round(known, _settings("decode", steps=steps, topk=topk) | {"batch.batch_size()": batch})
        made = _before(way, way.named("alloc_token_slots"), TARGET)
        sizes = [call.arguments[0] for call in made if call.arguments]
        backed = all(call.keywords.get("backup_state") is True for call in made)
        agree.append((sizes == [batch * topk * steps], bool(made) and backed))
        found.append(f"{batch} x {topk} x {steps}: {_listed(sizes)}")
        written = f"{len(_before(way, _drafts(way), TARGET))} steps where num_steps is {steps}"
    return [
        Part(
            "draft allocates batch x topk x num_steps slots, in one call",
            all(size for size, _ in agree),
            f"slots asked for at {'; '.join(found)}; the draft writes those of {written}",
        ),
        Part(
            "and has the allocator's state backed up",
            all(backed for _, backed in agree),
            "each call asks for a backup" if all(b for _, b in agree) else "not each call asks for a backup",
            core=False,
        ),
    ]


@check("E23")
def when_draft_slots_go_back(clone: Clone) -> Sequence[Part]:
    """The allocator is rolled back after verification, by what was accepted."""
    revisions = (RELEASE, FIRST_WORKER, "013021b6a1", "d3d4d76758", PAGES)
    ways = {}
    for revision, known in zip(revisions, each(lambda one: definitions(clone, one, WORKER), revisions), strict=True):
        ways[revision] = _round(known, _settings("decode"))
    back, verified = ways[RELEASE].at("restore_state"), ways[RELEASE].at(TARGET)
    given = [written(call.node.args[0]) for call in ways[RELEASE].named("restore_state") if call.node.args]
    whole = [name for name in given if "accept" not in name]
    return [
        Part(
            "the allocator's state is restored after verification",
            bool(back and verified) and min(back) > max(verified),
            f"{RELEASE}: restore_state is {_place(back, verified)}; draft slots were given back "
            + ", ".join(
                f"at {one} {_place(ways[one].at(*GIVING_BACK), ways[one].at(TARGET))}" for one in revisions[1:]
            ),
        ),
        Part(
            "acceptance decides what is given back",
            bool(given) and not whole,
            f"restore_state is given {', '.join(given) or 'nothing'}, the backup as it was: all draft slots go back",
        ),
    ]


@check("E24")
def what_verification_frees(clone: Clone) -> Sequence[Part]:
    """Verification keeps the slots of what was accepted and frees the rest."""
    found = definition(clone, RELEASE, TREES, "EagleVerifyInput.verify")
    node = found.node
    freed = [call.args[0] for call in _calls(node, "token_to_kv_pool_allocator.free") if call.args]
    masks = [written(one.slice) for one in freed if isinstance(one, ast.Subscript)]
    assigned = _assigned(node)
    values = dict(assigned)
    rest = [mask for mask in masks if "True" in values.get(mask, "") and values.get(f"{mask}[accept_index]") == "False"]
    kept = sorted({value for target, value in assigned if target == "batch.out_cache_loc"})
    return [
        Part(
            "it frees the slots that were not accepted",
            bool(freed) and len(rest) == len(freed),
            "; ".join(
                f"{written(one)} is freed in line {one.lineno}"
                + (f", where {mask} leaves out accept_index" if mask in rest else "")
                for one, mask in zip(freed, masks or [""], strict=False)
            )
            or "it frees nothing",
        ),
        Part(
            "it keeps those that were",
            bool(kept) and all(value.endswith("accept_index]") for value in kept),
            f"batch.out_cache_loc becomes {' or '.join(kept) or 'nothing else'}",
        ),
    ]


@check("E25")
def pages_and_branches(clone: Clone) -> Sequence[Part]:
    """With page_size above 1 each request is computed by itself, its last partial page copied; that is #4908."""
    revisions = (PAGES, RELEASE, "b1286a116a", "18fb51583f")
    ways = {}
    for revision, known in zip(revisions, each(lambda one: definitions(clone, one, WORKER), revisions), strict=True):
        ways[revision] = _round(known, _settings("decode", topk=4, page=16))
    copies = {revision: bool(_before(way, way.named("move_kv_cache"), TARGET)) for revision, way in ways.items()}
    chosen = {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 8}
    settings = {f"self.speculative_{name}": value for name, value in chosen.items()}
    set_to = _started(clone, RELEASE, settings | {"self.page_size": 16})
    again = change(clone, "84ca0ffb8c", "eagle_info_v2.py")
    moved = sum("move_kv_cache(" in line for line in again.plus)
    return [
        Part(
            "#4908 takes page_size above 1 together with topk above 1",
            commit(clone, PAGES).pr == 4908 and not ways[PAGES].raised,
            "; ".join(f"{one}: {_outcome(ways[one], copies[one])}" for one in revisions)
            + f"; {RELEASE} sets topk to {_known(set_to.get('self.speculative_eagle_topk', UNKNOWN))} "
            "when page_size is 16 and topk 4",
        ),
        Part(
            "#4908 copies the last partial page",
            copies[PAGES],
            f"draft copies the cache at {', '.join(one for one in revisions if copies[one]) or 'none of these'}; "
            f"84ca0ffb8c adds {moved} such call(s) to the second version of the worker",
        ),
    ]


@check("E26")
def backup_and_restore(clone: Clone) -> Sequence[Part]:
    """Backup and restore is original to the design."""
    way = _round(definitions(clone, RELEASE, WORKER), _settings("decode"))
    revisions = (FIRST_WORKER, f"{PAGES}^", PAGES)
    places = {
        one: {path for path, _, _ in grep(clone, one, "backup_state|restore_state", "/python")} for one in revisions
    }
    return [
        Part(
            "drafting backs the allocator's state up and restores it",
            bool(way.named("restore_state")),
            f"{RELEASE} {'does' if way.named('restore_state') else 'does not'}",
        ),
        Part(
            "it did so from the first",
            bool(places[FIRST_WORKER]),
            "files that speak of it: " + "; ".join(f"{len(places[one])} at {one}" for one in revisions),
            core=False,
        ),
    ]


@check("E27")
def in_the_radix_tree(clone: Clone) -> Sequence[Part]:
    """Accepted tokens enter the radix tree as ordinary ones do."""
    part_3, refactored = "ad20b7957e", "d3d4d76758"
    now = _started(clone, RELEASE, {})
    first, before, after = (_started(clone, one, {}) for one in (part_3, f"{refactored}^", refactored))
    return [
        Part(
            "with EAGLE there is a radix cache",
            now.get(NO_RADIX_CACHE) is False,
            f"{RELEASE}: {_switches(now)}",
        ),
        Part(
            "there was one from the first",
            first.get(NO_RADIX_CACHE) is False,
            f"{part_3}: {_switches(first)}; {refactored}^: {_switches(before)}; {refactored}: {_switches(after)}",
            core=False,
        ),
    ]


# --- following a round

MODES = ("decode", "idle", "extend")
TARGET = "target_worker.forward_batch_generation"
GIVING_BACK = ("restore_state", "clear_draft_cache", "token_to_kv_pool.free", "token_to_kv_pool_allocator.free")
NO_RADIX_CACHE = "self.disable_radix_cache"
CHUNK = "self.chunked_prefill_size"


def _settings(mode: str, steps: int = 3, topk: int = 4, page: int = 1) -> dict[str, Any]:
    """What is known as a round begins. Under which name the worker knows a setting depends on the revision."""
    known: dict[str, Any] = {"batch.batch_size()": 1, "batch.is_extend_in_batch": False, "self.page_size": page}
    known |= {f"batch.forward_mode.is_{one}()": one == mode for one in MODES}
    for holder in ("self", "self.server_args"):
        known[f"{holder}.speculative_num_steps"] = steps
        known[f"{holder}.{'topk' if holder == 'self' else 'speculative_eagle_topk'}"] = topk
    return known


def _round(known: Mapping[str, Definition], settings: Mapping[str, Any]) -> Walk:
    """A round of the worker's, under whichever of its two names it has."""
    return walk(known, ROUND_SINCE_OVERLAP if ROUND_SINCE_OVERLAP in known else ROUND, settings)


def _is_draft(call: Call) -> bool:
    """A forward of the worker's own model, which is the draft (E12)."""
    return call.name.endswith(".forward") and "model_runner" in call.name and "target" not in call.name


def _drafts(way: Walk) -> list[Call]:
    return [call for call in way.calls if _is_draft(call)]


def _models(way: Walk) -> tuple[int, int]:
    """How often the target and the draft run."""
    return len(way.named(TARGET)), len(_drafts(way))


def _before(way: Walk, calls: Sequence[Call], later: str) -> list[Call]:
    """Those of the calls that come before any of that name."""
    end = min(way.at(later), default=len(way.calls))
    early = {id(call) for call in way.calls[:end]}
    return [call for call in calls if id(call) in early]


def _branch(function: ast.AST, mode: str) -> int | None:
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


def _place(these: Sequence[int], those: Sequence[int]) -> str:
    if not these:
        return "not found"
    if not those or max(these) < min(those):
        return "before verification"
    return "after verification" if min(these) > max(those) else "before and after verification"


def _outcome(way: Walk, copies: bool) -> str:
    if way.raised:
        return f"raises {way.raised}"
    return f"drafts, and {'copies the cache' if copies else 'copies nothing in the cache'}"


def _started(clone: Clone, revision: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The server's settings once it has adjusted them, with EAGLE chosen and the rest as by default."""
    known = definitions(clone, revision, SETTINGS)
    values: dict[str, Any] = {}
    fields = known["ServerArgs"].node.body if "ServerArgs" in known else []
    for field in fields:
        if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Constant):
            values[f"self.{written(field.target)}"] = field.value.value
    values |= {"self.speculative_algorithm": "EAGLE", CHUNK: 8192} | dict(settings)
    return walk(known, "ServerArgs.__post_init__", values).values


def _switches(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.removeprefix('self.')} = {_known(values.get(name, UNKNOWN))}" for name in (NO_RADIX_CACHE, CHUNK)
    )


def _known(value: Any) -> str:
    return "what is not known" if value is UNKNOWN else str(value)


# --- the tree of candidates


def _candidates(clone: Clone, topk: int, steps: int) -> list[int]:
    """How many candidates of a request each step of drafting scores: the size of the scores that it hands on."""
    way = _round(definitions(clone, RELEASE, WORKER), _settings("decode", steps=steps, topk=topk))
    select = definition(clone, RELEASE, TREES, "select_top_k_tokens")
    return [_scored(select, call.arguments[0], topk) for call in way.named("select_top_k_tokens")]


def _scored(select: Definition, step: Any, topk: int) -> int:
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


def _kept_of_them(clone: Clone, verified: int) -> int:
    """How many candidates the tree keeps, where that many tokens are to be verified."""
    name = "build_tree_kernel_efficient_preprocess"
    way = walk(definitions(clone, RELEASE, "build_eagle_tree.py"), name, {"num_verify_tokens": verified})
    kept = [call.arguments[1] for call in way.named("topk") if len(call.arguments) > 1]
    if len(kept) != 1 or kept[0] is UNKNOWN:
        raise HistoryError(f"{RELEASE}: how many candidates {name} keeps cannot be read off its source")
    return int(kept[0])


def _argument(clone: Clone, calls: Sequence[Call], parameter: str) -> Any:
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
    for call in _calls(known["EagleVerifyInput.create"].node, "cls"):
        given = dict(zip(fields, map(ast.unparse, call.args), strict=False))
        given |= {keyword.arg: written(keyword.value) for keyword in call.keywords if keyword.arg}
        for field, value in given.items():
            if value == parameter:
                return field
    return "no field"


# --- reading syntax trees


def _calls(node: ast.AST, name: str) -> list[ast.Call]:
    return [one for one in ast.walk(node) if isinstance(one, ast.Call) and written(one.func) == name]


def _assigned(node: ast.AST) -> list[tuple[str, str]]:
    """What is assigned to what, as written, in the file's order."""
    assignments = [one for one in ast.walk(node) if isinstance(one, ast.Assign)]
    assignments.sort(key=lambda one: one.lineno)
    return [(written(target), written(one.value)) for one in assignments for target in one.targets]


def _returned(node: ast.AST) -> list[str]:
    return [written(one.value) for one in ast.walk(node) if isinstance(one, ast.Return) and one.value]


def _parameters(node: ast.AST) -> list[str]:
    return [one.arg for one in node.args.args] if isinstance(node, ast.FunctionDef) else []


def _speaks_of(node: ast.AST, word: str = "spec_algorithm") -> bool:
    return word in written(node)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values)) or "none"
