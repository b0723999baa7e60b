"""Checks of the notes on pull requests #32887, #26997 and #27607, and of what was read in the code.

The functions below @check("C1") check claim C1 of the catalogue, and so on: what each claims stands there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone

from refspec.history import catalogue
from refspec.history.claims.checking import BEYOND_GIT, Finding, Part, check
from refspec.history.claims.evidence import (
    Definition,
    FileDiff,
    NotThereError,
    change,
    changes,
    commit,
    definition,
    definitions,
    full_path,
    grep,
    lines,
    on_main,
    touched,
    where,
)
from refspec.history.clone import Clone

CHAIN = "9f56553408"  # #32887
TREE, TREE_REVERTED, TREE_AGAIN = "1d4ee060c2", "f6d0beaca8", "ac99794e64"  # #26866, #26981, #26997
TREE_PAGED = "84ca0ffb8c"  # #26972
FROZEN = "decb88e0e3"  # #27607
POSITIONS_OFF, POSITIONS_RIGHT = "013021b6a1", "48fc26a814"  # #3269, #25015

HOOK = "/python/sglang/srt/arg_groups/speculative_hook.py"
POOLS = "/python/sglang/srt/mem_cache/memory_pool.py"
SCHEDULER = "/python/sglang/srt/managers/scheduler.py"
MULTI_LAYER = "multi_layer_eagle_worker_v2.py"
CHINA = timezone(timedelta(hours=8))  # whoever took the notes read the clock there

REBUILD = "_rebuild_topk1_chain_buffers"
FINALIZE = "_finalize_accepted_tree_path"
MOVE_ACCEPTED = "move_accepted_tokens_to_target_kvcache"


# --- #32887


@check("C1")
def _(clone: Clone) -> Sequence[Part]:
    return [_merged(clone, CHAIN, "2026-07-30 17:55")]


@check("C2")
def _(clone: Clone) -> Sequence[Part]:
    named = [
        "base_spec_worker",
        "eagle_utils",
        "eagle_worker_v2",
        "multi_layer_eagle_worker_v2",
        "standalone_worker_v2",
    ]
    all_of_it = changes(clone, CHAIN)
    names = [one.path.rpartition("/")[2] for one in all_of_it]
    figures = f"+{sum(len(one.added) for one in all_of_it)}/-{sum(len(one.removed) for one in all_of_it)}"
    return [
        Part(
            "it touches the five files that are listed",
            sorted(one.path for one in all_of_it) == [full_path(f"{name}.py") for name in named],
            f"{CHAIN} touches {len(names)} files, {figures}: {', '.join(names)}",
        ),
    ]


@check("C3")
def _(clone: Clone) -> Sequence[Part]:
    return [
        _loses_method(clone, "eagle_worker_v2.py", "EagleDraftWorker", core=True),
        _loses_method(clone, "standalone_worker_v2.py", "StandaloneDraftWorker", core=False),
    ]


def _loses_method(clone: Clone, path: str, class_: str, core: bool) -> Part:
    name = f"{class_}.{REBUILD}"
    before, after = (definitions(clone, revision, path) for revision in (f"{CHAIN}^", CHAIN))
    lost = change(clone, CHAIN, path)
    had = f"defined it at L{before[name].first}" if name in before else "did not define it"
    has = "still does" if name in after else "does not now"
    return Part(
        f"{class_} loses its own {REBUILD}",
        name in before and name not in after,
        f"{path}: {class_} {had} @ {CHAIN}^, and {has} @ {CHAIN} ({_figures(lost)})",
        core,
    )


@check("C4")
def _(clone: Clone) -> Sequence[Part]:
    path = "base_spec_worker.py"
    rebuild = definition(clone, CHAIN, path, f"EagleDraftWorkerBase.{REBUILD}")
    width, bounds, line = _row_of_parents(rebuild)
    rows = {}
    for steps in range(1, 9):
        columns = _value(width, {"num_steps": steps})
        rows[steps] = list(range(*(_value(bound, {"parent_width": columns}) for bound in bounds)))
    wrong = [steps for steps, row in rows.items() if row != list(range(-1, steps - 1))]
    return [
        Part(
            "a row of parents is -1, 0, .., S-2 for S steps",
            all(row == list(range(-1, len(row) - 1)) for row in rows.values()) and not {*wrong} - {1},
            f"{path} @ {CHAIN} L{line}: S=4 gives {rows[4]}",
            command=f"git show {CHAIN}:{full_path(path)} | sed -n '{rebuild.first},{rebuild.last}p'",
        ),
        Part(
            "there are S columns, whatever S is",
            not wrong,
            ", ".join(f"S={steps} gives {len(rows[steps])} columns" for steps in wrong) or "so for S=1 to 8",
            core=False,
        ),
    ]


def _row_of_parents(rebuild: Definition) -> tuple[ast.expr, tuple[ast.expr, ast.expr], int]:
    """Of the method: the expression for parent_width, the bounds of the row's arange, and that one's line."""
    width = bounds = None
    for node in ast.walk(rebuild.node):
        if isinstance(node, ast.Assign):
            target = ast.unparse(node.targets[0])
            if target == "parent_width":
                width = node.value
            elif target == "self._topk1_parents_prealloc":
                bounds = next((call for call in _calls(node.value) if _name(call) == "torch.arange"), None)
    if width is None or bounds is None or len(bounds.args) != 2:
        raise NotThereError(f"{rebuild.name} makes no row of parents by torch.arange from a parent_width")
    return width, (bounds.args[0], bounds.args[1]), bounds.lineno


@check("C5")
def _(clone: Clone) -> Sequence[Part]:
    name = "MultiLayerEagleDraftWorker._draft_forward_organize"
    sought = ["torch.cat", "torch.topk", "torch.sort", "torch.gather"]
    before = definition(clone, f"{CHAIN}^", MULTI_LAYER, "MultiLayerEagleDraftWorker.draft_forward")
    now = definitions(clone, CHAIN, MULTI_LAYER)
    had = [call for call in sought if call in _called(before)]
    shared = definitions(clone, f"{CHAIN}^", "eagle_utils.py").get("organize_draft_results")
    if name not in now:
        return [Part(f"{name} is new", False, f"{MULTI_LAYER} @ {CHAIN} does not define it")]
    has = [call for call in sought if call in _called(now[name])]
    instead = [call for call in ("organize_draft_results",) if call in _called(now[name])]
    return [
        Part(
            "draft_forward loses the organizing of drafts to a new _draft_forward_organize",
            had == sought
            and name not in definitions(clone, f"{CHAIN}^", MULTI_LAYER)
            and not set(sought) & set(_called(now["MultiLayerEagleDraftWorker.draft_forward"])),
            f"{MULTI_LAYER}: draft_forward @ {CHAIN}^ L{before.first} calls {', '.join(had) or 'none of the four'}; "
            f"_draft_forward_organize @ {CHAIN} L{now[name].first} is new",
        ),
        Part(
            "cat, topk, sort and gather moved there",
            has == sought,
            f"it calls {', '.join(has) or 'none of them'}"
            + (f", but {instead[0]}" if instead else "")
            + (f", which eagle_utils.py L{shared.first} @ {CHAIN}^ had before" if instead and shared else ""),
            core=False,
        ),
    ]


@check("C6")
def _(clone: Clone) -> Sequence[Part]:
    multi = _switches_steps(clone, MULTI_LAYER)
    single = _switches_steps(clone, "eagle_worker_v2.py")
    rebuilds = where(clone, CHAIN, "eagle_worker_v2.py", rf"dw\.{REBUILD}\(\)")
    return [
        Part(
            "nothing changes the number of steps of the multi-layer worker once it is made",
            not multi,
            f"{MULTI_LAYER} @ {CHAIN}: {_listed(multi) or 'speculative_num_steps is set in __init__ alone'}",
        ),
        Part(
            "nor those of EAGLEWorkerV2",
            not single,
            f"eagle_worker_v2.py @ {CHAIN}: {_listed(single) or 'speculative_num_steps is set in __init__ alone'}"
            + (f"; the rows are rebuilt at {_at(rebuilds)}" if rebuilds else ""),
            core=False,
        ),
    ]


def _switches_steps(clone: Clone, path: str) -> list[str]:
    """The methods beside __init__ that set an attribute speculative_num_steps, each with its line."""
    found = definitions(clone, CHAIN, path)
    if not found:
        raise NotThereError(f"{path} at {CHAIN} defines nothing")
    return [
        f"{one.name} sets speculative_num_steps (L{one.first})"
        for one in found.values()
        if not isinstance(one.node, ast.ClassDef)
        and not one.name.endswith(".__init__")
        and any(
            isinstance(target, ast.Attribute) and target.attr == "speculative_num_steps"
            for node in ast.walk(one.node)
            if isinstance(node, ast.Assign)
            for target in node.targets
        )
    ]


@check("C7")
def _(clone: Clone) -> Sequence[Part]:
    forward = definition(clone, CHAIN, MULTI_LAYER, "MultiLayerEagleDraftWorker.draft_forward")
    guard = "topk_index.shape[0] <= parents_prealloc.shape[0]"
    guards = [
        node
        for node in forward.node.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        if guard in map(ast.unparse, node.test.values) and isinstance(node.body[-1], ast.Return)
    ]
    after = [node for node in forward.node.body if guards and node.lineno > guards[0].lineno]
    falls_back = any(_name(call) == "self._draft_forward_organize" for node in after for call in _calls(node))
    return [
        Part(
            "the prepared rows serve a batch only if there are enough of them",
            bool(guards),
            f"{MULTI_LAYER} @ {CHAIN}: draft_forward "
            + (f"asks for it at L{guards[0].lineno}" if guards else "does not ask for it"),
            command=f"git show {CHAIN}:{full_path(MULTI_LAYER)} | sed -n '{forward.first},{forward.last}p'",
        ),
        Part(
            "a larger batch takes the general way",
            falls_back,
            "draft_forward goes on to _draft_forward_organize" if falls_back else "nothing follows for a larger one",
        ),
    ]


@check("C8")
def _(clone: Clone) -> Sequence[Part]:
    other = "313a518bee"
    facts = commit(clone, other)
    both = sorted({*touched(clone, other)} & {*touched(clone, CHAIN)})
    return [
        _is_pull_request(clone, other, 32850),
        Part(
            "it touches a file that #32887 touches",
            bool(both),
            f"{other} ({facts.committer_date[:10]}) and {CHAIN} touch {_listed(both) or 'no file in common'}",
        ),
    ]


# --- #26997


@check("T1")
def _(clone: Clone) -> Sequence[Part]:
    first, revert, again = (commit(clone, revision) for revision in (TREE, TREE_REVERTED, TREE_AGAIN))
    times = [datetime.fromisoformat(one.committer_date) for one in (first, revert, again)]
    between = round((times[1] - times[0]).total_seconds() / 60)
    inverse = {one.path: (one.minus, one.plus) for one in changes(clone, TREE_REVERTED)} == {
        one.path: (one.plus, one.minus) for one in changes(clone, TREE)
    }
    return [
        _is_pull_request(clone, TREE, 26866),
        _is_pull_request(clone, TREE_REVERTED, 26981),
        _is_pull_request(clone, TREE_AGAIN, 26997),
        Part(
            "#26981 takes #26866 back",
            revert.subject.startswith("Revert ") and inverse,
            f"{TREE_REVERTED}: {between} minutes later, "
            + ("the inverse line by line" if inverse else "but not the inverse line by line"),
            command=f"git show {TREE}; git show -R {TREE_REVERTED}",
        ),
        Part(
            "#26997 brings it again",
            "Reland" in again.subject and "(#26866)" in again.subject and times[0] < times[1] < times[2],
            f"{TREE_AGAIN}, {again.committer_date[:10]}: {again.subject}",
        ),
    ]


BEYOND_GIT["T2"] = (
    "why #26866 was taken back stands on the page of a pull request; the commit that did it has a title and no text"
)


@check("T3")
def _(clone: Clone) -> Sequence[Part]:
    path, name = "eagle_worker_v2.py", f"EAGLEWorkerV2.{FINALIZE}"
    return [
        Part(
            f"#26997 adds {FINALIZE}",
            name in definitions(clone, TREE_AGAIN, path) and name not in definitions(clone, f"{TREE_AGAIN}^", path),
            f"{path}: {_when_defined(clone, path, name, f'{TREE_AGAIN}^', TREE_AGAIN)}",
        ),
        Part(
            "it is new there",
            name not in definitions(clone, TREE, path),
            f"{path}: {_when_defined(clone, path, name, TREE)}, which is #26866",
            core=False,
        ),
    ]


@check("T4")
def _(clone: Clone) -> Sequence[Part]:
    path, name = "eagle_worker_v2.py", f"EAGLEWorkerV2.{MOVE_ACCEPTED}"
    before, after = (definitions(clone, revision, path) for revision in (f"{TREE_AGAIN}^", TREE_AGAIN))
    calls = [number for number, line in change(clone, TREE_AGAIN, path).added if f"self.{MOVE_ACCEPTED}(" in line]
    changed = name in after and (name not in before or before[name].text != after[name].text)
    return [
        Part(
            "#26997 adds or changes it",
            changed,
            f"{path}: {_when_defined(clone, path, name, TREE_AGAIN)}; its text is "
            + ("another" if changed else "the same")
            + f" @ {TREE_AGAIN}^",
            command=f"git diff {TREE_AGAIN}^ {TREE_AGAIN} -- :/{full_path(path)}",
        ),
        Part(
            "the new code calls it",
            bool(calls),
            f"{path} @ {TREE_AGAIN}: "
            + (f"an added line calls it, {_at(calls)}" if calls else "no added line calls it"),
        ),
        Part(
            "it was not there before #26866",
            name not in definitions(clone, f"{TREE}^", path),
            f"{path}: {_when_defined(clone, path, name, f'{TREE}^')}",
            core=False,
        ),
    ]


@check("T5")
def _(clone: Clone) -> Sequence[Part]:
    path, name = "eagle_worker_v2.py", "EagleDraftWorker._draft_extend_for_decode"
    before, after = (
        _keyword(definition(clone, revision, path, name), "num_tokens_per_req")
        for revision in (f"{TREE_AGAIN}^", TREE_AGAIN)
    )
    return [
        Part(
            "_draft_extend_for_decode goes from num_steps + 1 to num_draft_tokens",
            (before, after) == ("self.speculative_num_steps + 1", "self.speculative_num_draft_tokens"),
            f"{path}: num_tokens_per_req is {before} @ {TREE_AGAIN}^, and {after} @ {TREE_AGAIN}",
            command=f"git show {TREE_AGAIN} -- :/{full_path(path)}",
        )
    ]


@check("T6")
def _(clone: Clone) -> Sequence[Part]:
    having = _having(clone, "move_kv_cache", TREE_AGAIN)
    return [
        Part(
            "there is a MemoryPool.move_kv_cache",
            "MemoryPool.move_kv_cache" in having,
            f"memory_pool.py @ {TREE_AGAIN}: move_kv_cache is defined by "
            + (_listed([f"{one.name.rpartition('.')[0]} (L{one.first})" for one in having.values()]) or "no class"),
            command=f"git grep -nE 'class .*Pool|def move_kv_cache' {TREE_AGAIN} -- :/{full_path(POOLS)}",
        )
    ]


@check("T7")
def _(clone: Clone) -> Sequence[Part]:
    before, after = (_having(clone, "move_kv_cache", revision) for revision in (f"{TREE_AGAIN}^", TREE_AGAIN))
    return [
        Part(
            f"{pool} gets move_kv_cache",
            f"{pool}.move_kv_cache" in after and f"{pool}.move_kv_cache" not in before,
            "memory_pool.py: " + _when_defined(clone, POOLS, f"{pool}.move_kv_cache", f"{TREE_AGAIN}^", TREE_AGAIN),
        )
        for pool in ("MLATokenToKVPool", "DSATokenToKVPool")
    ]


def _having(clone: Clone, method: str, revision: str) -> dict[str, Definition]:
    found = definitions(clone, revision, POOLS).items()
    return {name: one for name, one in found if name.endswith(f".{method}")}


@check("T8")
def _(clone: Clone) -> Sequence[Part]:
    handle = definition(clone, TREE_AGAIN, HOOK, "_handle_eagle_family")
    warnings = [
        call.lineno
        for call in _calls(handle.node)
        if _name(call) == "logger.warning" and any("spec_v1_reason" in ast.unparse(one) for one in call.args)
    ]
    return [
        Part(
            "nothing is said to the user",
            not warnings,
            f"speculative_hook.py @ {TREE_AGAIN}: "
            + (f"logger.warning names the reason at {_at(warnings)}" if warnings else "no warning names the reason"),
            command=f"git show {TREE_AGAIN}:{full_path(HOOK)} | sed -n '{handle.first},{handle.last}p'",
        )
    ]


@check("T9")
def _(clone: Clone) -> Sequence[Part]:
    falls = _falls_to_v1(clone, TREE_AGAIN)
    return [
        Part(
            f"topk > 1 with {what} falls back to v1",
            any(word in test for _, test in falls),
            f"speculative_hook.py @ {TREE_AGAIN}: "
            + (
                _listed([f"L{line} does so if {test}" for line, test in falls if word in test])
                or "what turns the overlap off does not ask for it"
            ),
        )
        for what, word in (("page_size > 1", "page_size > 1"), ("mamba state", "is_mamba_state_model"))
    ]


@check("T10")
def _(clone: Clone) -> Finding:
    last = catalogue.reach()
    before = [test for _, test in _falls_to_v1(clone, f"{TREE_PAGED}^") if "page_size" in test]
    parts = [
        _is_pull_request(clone, TREE_PAGED, 26972),
        Part(
            "before #26972, page_size > 1 fell back to v1",
            bool(before),
            f"speculative_hook.py @ {TREE_PAGED}^: {_listed(before) or 'it did not'}",
        ),
    ]
    for revision, when in ((TREE_PAGED, commit(clone, TREE_PAGED).committer_date[:10]), (last.commit[:10], last.date)):
        falls = [test for _, test in _falls_to_v1(clone, revision) if "page_size" in test]
        allowed = _backends_for_pages(clone, revision)
        parts += [
            Part(
                f"on {when} it does not",
                not falls,
                f"speculative_hook.py @ {revision}: " + (_listed(falls) or "no fallback asks for page_size"),
            ),
            Part(
                "and some attention backends take it; for others ValueError is raised",
                bool(allowed),
                f"speculative_hook.py @ {revision}: {_listed(allowed) or 'no such list'}",
            ),
        ]
    return Finding("yes" if all(part.holds for part in parts) else "no", tuple(parts))


def _falls_to_v1(clone: Clone, revision: str) -> list[tuple[int, str]]:
    """Line and condition of each branch of _handle_eagle_family that turns the overlap off, and so spec v2."""
    handle = definition(clone, revision, HOOK, "_handle_eagle_family")
    return [
        (node.lineno, ast.unparse(node.test))
        for node in ast.walk(handle.node)
        if isinstance(node, ast.If) and any("disable_overlap_schedule = True" in ast.unparse(one) for one in node.body)
    ]


def _backends_for_pages(clone: Clone, revision: str) -> list[str]:
    """The attention backends for which _handle_eagle_family does not refuse topk > 1 with page_size > 1."""
    handle = definition(clone, revision, HOOK, "_handle_eagle_family")
    names = {ast.unparse(node.targets[0]): node.value for node in ast.walk(handle.node) if isinstance(node, ast.Assign)}
    for node in ast.walk(handle.node):
        if isinstance(node, ast.If) and "page_size > 1" in ast.unparse(node.test) and _raises(node, "ValueError"):
            for test in ast.walk(node.test):
                if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotIn):
                    listed = names.get(ast.unparse(test.comparators[0]), test.comparators[0])
                    return [str(one.value) for one in ast.walk(listed) if isinstance(one, ast.Constant)]
    return []


@check("T11")
def _(clone: Clone) -> Sequence[Part]:
    return [
        Part(
            f"#26997 adds the test class {name}",
            name in definitions(clone, TREE_AGAIN, path) and name not in definitions(clone, f"{TREE_AGAIN}^", path),
            f"{path[1:]}: {_when_defined(clone, path, name, f'{TREE_AGAIN}^', TREE_AGAIN)}",
        )
        for name, path in (
            ("TestEagle3Topk16SpecV2", "/test/registered/spec/eagle/test_spec_eagle_topk.py"),
            ("TestEagle3Topk16V2Retract", "/test/registered/spec/eagle/test_spec_eagle_stress.py"),
        )
    ]


# --- #27607


@check("F1")
def _(clone: Clone) -> Sequence[Part]:
    return [_merged(clone, FROZEN, "2026-06-10 06:30")]


@check("F2")
def _(clone: Clone) -> Sequence[Part]:
    gone = change(clone, FROZEN, "frozen_kv_mtp_worker.py")
    return [
        Part(
            "frozen_kv_mtp_worker.py is deleted",
            gone.status == "D",
            f"{FROZEN}: {gone.status}, {_figures(gone)}",
        )
    ]


@check("F3")
def _(clone: Clone) -> Sequence[Part]:
    all_of_it = changes(clone, FROZEN)
    net = _net(all_of_it)
    outside = _net([one for one in all_of_it if not one.path.startswith("test/")])
    plus, minus = sum(len(one.added) for one in all_of_it), sum(len(one.removed) for one in all_of_it)
    return [
        Part(
            "the code shrinks by about 800 lines",
            any(-900 <= figure <= -700 for figure in (net, outside)),
            f"{FROZEN}: +{plus}/-{minus}, which is {net} ({outside} outside test/); "
            f"frozen_kv_mtp_worker_v2.py alone: {_figures(change(clone, FROZEN, 'frozen_kv_mtp_worker_v2.py'))}",
            command=f"git show --shortstat --format= {FROZEN}; git show --shortstat --format= {FROZEN} -- ':!test'",
        )
    ]


@check("F4")
def _(clone: Clone) -> Sequence[Part]:
    path, before = "frozen_kv_mtp_worker_v2.py", f"{FROZEN}^"
    found = definitions(clone, before, path)
    methods = [one for one in found.values() if not isinstance(one.node, ast.ClassDef)]
    stubs = [one for one in methods if _raises(one.node, "NotImplementedError")]
    return [
        Part(
            "before, the v2 file did nothing but raise NotImplementedError",
            bool(methods) and len(stubs) == len(methods),
            f"{path} @ {before}: {len(lines(clone, before, path))} lines, "
            f"{_listed([f'{one.name} raises it' for one in stubs]) or 'which do not raise it'}",
        )
    ]


@check("F5")
def _(clone: Clone) -> Sequence[Part]:
    tests = [one for one in changes(clone, FROZEN) if one.path.startswith("test/registered/") and one.status == "M"]
    removed = [line for one in tests for line in one.minus]
    added = [line for one in tests for line in one.plus]
    figures = _listed([f"{one.path.rpartition('/')[2]} {_figures(one)}" for one in tests])
    environment = sum('"SGLANG_ENABLE_SPEC_V2"' in line for line in removed)
    return [
        Part(
            "tests lose --disable-overlap-schedule",
            any("--disable-overlap-schedule" in line for line in removed),
            f"{FROZEN}: no removed line has it; {environment} set SGLANG_ENABLE_SPEC_V2 ({figures})"
            if not any("--disable-overlap-schedule" in line for line in removed)
            else f"{FROZEN}: removed lines have it ({figures})",
            command=f"git show {FROZEN} -- :/test/registered/spec",
        ),
        Part(
            "and gain --speculative-algorithm",
            any("--speculative-algorithm" in line for line in added),
            f"{FROZEN}: {len(added)} lines are added to them",
        ),
    ]


@check("F6")
def _(clone: Clone) -> Sequence[Part]:
    runner = "frozen_kv_mtp_cuda_graph_runner.py"
    scheduler, graphs = change(clone, FROZEN, SCHEDULER), change(clone, FROZEN, runner)
    comments = all(line.lstrip().startswith("#") for line in (*scheduler.plus, *scheduler.minus))
    renamed = [
        re.sub(r"\bFrozenKVMTPWorker\b", "FrozenKVMTPDraftWorker", line).replace(
            "frozen_kv_mtp_worker import", "frozen_kv_mtp_worker_v2 import"
        )
        for line in graphs.minus
    ]
    return [
        Part(
            "scheduler and CUDA-graph runner are touched, and little",
            max(len(one.added) + len(one.removed) for one in (scheduler, graphs)) < 50,
            f"{FROZEN}: scheduler.py {_figures(scheduler)}, {runner} {_figures(graphs)}",
        ),
        Part(
            "the scheduler's code is adapted",
            not comments,
            "scheduler.py: " + ("comments alone differ" if comments else "its code differs"),
            core=False,
        ),
        Part(
            "the runner's code is adapted",
            renamed != graphs.plus,
            f"{runner}: " + ("the name of a type alone differs" if renamed == graphs.plus else "its code differs"),
            core=False,
        ),
    ]


@check("F7")
def _(clone: Clone) -> Sequence[Part]:
    return [_defines(clone, "FrozenKVMTPDraftWorker", method) for method in ("verify", "forward_batch_generation")]


def _defines(clone: Clone, class_: str, method: str) -> Part:
    path = "frozen_kv_mtp_worker_v2.py"
    found = definitions(clone, FROZEN, path)
    others = [f"{name} (L{one.first})" for name, one in found.items() if name.endswith(f".{method}")]
    inherited = (
        ""
        if others
        else "; FrozenKVMTPWorkerV2" + "".join(f" has that of {base}" for base in found["FrozenKVMTPWorkerV2"].bases)
    )
    return Part(
        f"{class_} contains {method}",
        f"{class_}.{method}" in found,
        f"{path} @ {FROZEN}: {_listed(others) or 'no class there'} defines it{inherited}",
    )


@check("F8")
def _(clone: Clone) -> Sequence[Part]:
    path, mixin = "frozen_kv_mtp_worker_v2.py", "EagleDraftInputV2Mixin"
    worker = definition(clone, FROZEN, path, "FrozenKVMTPDraftWorker")
    owners = grep(clone, FROZEN, rf"^class [A-Za-z]+\(.*{mixin}", "")
    return [
        Part(
            f"FrozenKVMTPDraftWorker inherits {mixin}",
            mixin in worker.bases,
            f"{path} @ {FROZEN} L{worker.first}: its bases are {_listed(worker.bases)}; {mixin} is a base in "
            + _listed([f"{name.rpartition('/')[2]} L{number}" for name, number, _ in owners]),
        )
    ]


@check("F9")
def _(clone: Clone) -> Sequence[Part]:
    path = "frozen_kv_mtp_worker_v2.py"
    return [
        Part(
            f"{name} derives from {base}",
            base in definition(clone, FROZEN, path, name).bases,
            f"{path} @ {FROZEN} L{definition(clone, FROZEN, path, name).first}: "
            f"its bases are {_listed(definition(clone, FROZEN, path, name).bases)}",
        )
        for name, base in (("FrozenKVMTPWorkerV2", "EAGLEWorkerV2"), ("FrozenKVMTPDraftWorker", "BaseDraftWorker"))
    ]


@check("F10")
def _(clone: Clone) -> Sequence[Part]:
    path = "spec_info.py"
    before, after = (definitions(clone, revision, path) for revision in (f"{FROZEN}^", FROZEN))
    parts = []
    for method in ("supports_spec_v2", "create_worker"):
        name = f"SpeculativeAlgorithm.{method}"
        if name not in before or name not in after:
            raise NotThereError(f"{path} at {FROZEN} or before it defines no {name}")
        changed = ast.dump(before[name].node) != ast.dump(after[name].node)
        parts.append(
            Part(
                f"{method} changes",
                changed,
                f"{path} @ {FROZEN} L{after[name].first}: " + ("its code is another" if changed else "the same code"),
                command=f"git show {FROZEN} -- :/{full_path(path)}",
            )
        )
    return parts


@check("F11")
def _(clone: Clone) -> Sequence[Part]:
    parts = []
    for path, name in (
        ("frozen_kv_mtp_utils.py", "select_last_verified_seed"),
        ("frozen_kv_mtp_utils.py", "capture_for_decode"),
        ("frozen_kv_mtp_info.py", "FrozenKVMTPVerifyOutput"),
        ("frozen_kv_mtp_info.py", "_to_frozen_kv_mtp_draft_extend_input"),
    ):
        defines = rf"^(def {name}\(|{name} = )"
        before, after = (where(clone, revision, path, defines) for revision in (f"{FROZEN}^", FROZEN))
        parts.append(
            Part(
                f"{name} is removed",
                bool(before) and not after,
                f"{path}: {_at(before) or 'not there'} @ {FROZEN}^, {_at(after) or 'not there'} @ {FROZEN}",
            )
        )
    return parts


@check("F12")
def _(clone: Clone) -> Sequence[Part]:
    before = _naming(clone, f"{FROZEN}^", "FrozenKVMTPWorker", below="")
    left = _naming(clone, FROZEN, "FrozenKVMTPWorker", below="/")
    return [
        Part(
            "no line names the v1 class any more",
            bool(before) and not left,
            f"{len(before)} lines of speculative/ @ {FROZEN}^, {len(left)} of the repository @ {FROZEN}"
            + (f": {_listed(left[:3])}" if left else ""),
            command=f"git grep -nw FrozenKVMTPWorker {FROZEN}",
        )
    ]


def _naming(clone: Clone, revision: str, word: str, below: str) -> list[str]:
    """The lines with this word, as "path:number"."""
    found = grep(clone, revision, word, below)
    return [f"{path}:{number}" for path, number, line in found if re.search(rf"\b{word}\b", line)]


@check("F13")
def _(clone: Clone) -> Sequence[Part]:
    parts = []
    for revision, number in (("d145a6127a", 23802), ("2218622f50", 25980)):
        parts.append(_is_pull_request(clone, revision, number))
        day = commit(clone, revision).author_date[:10]
        parts.append(Part(f"#{number} is of 2026-06-09", day == "2026-06-09", f"{revision}: its author's day is {day}"))
    return parts


# --- code reading


@check("P1")
def _(clone: Clone) -> Sequence[Part]:
    first, last = commit(clone, POSITIONS_OFF), commit(clone, POSITIONS_RIGHT)
    since, until = first.committer_date[:10], last.committer_date[:10]
    months = (int(until[:4]) - int(since[:4])) * 12 + int(until[5:7]) - int(since[5:7])
    path = "eagle_worker.py"
    order = {
        revision: _advance_and_forward(clone, revision, path)
        for revision in (POSITIONS_OFF, "v0.4.6", "v0.5.0rc0", f"{POSITIONS_RIGHT}^", POSITIONS_RIGHT)
    }
    early = {revision: advance < forward for revision, (advance, forward) in order.items()}
    decided = definition(clone, POSITIONS_OFF, "eagle_utils.py", "EagleVerifyInput.verify")
    put_out, predicted = (_assigned(decided, name) for name in ("verified_id", "predict"))
    mended = [f"{one.path.rpartition('/')[2]} {_figures(one)}" for one in changes(clone, POSITIONS_RIGHT) if one.path]
    drafts_only = all(_lies_in_drafting(clone, one) for one in changes(clone, POSITIONS_RIGHT))
    return [
        Part(
            "the draft's positions were advanced before its forward",
            all(early[revision] for revision in order if revision != POSITIONS_RIGHT) and not early[POSITIONS_RIGHT],
            f"{path}: draft_forward advances them and then runs the model at "
            + _listed([f"{revision} (L{a}, L{b})" for revision, (a, b) in order.items() if early[revision]])
            + "; the other way round at "
            + _listed([f"{revision} (L{b}, L{a})" for revision, (a, b) in order.items() if not early[revision]]),
            command=f"git show {POSITIONS_RIGHT}",
        ),
        Part(
            "that was so for 15 months", months == 15, f"from {since} ({POSITIONS_OFF}) to {until} ({POSITIONS_RIGHT})"
        ),
        Part(
            "verification put out what the target predicts, whatever was drafted",
            put_out == ["predict[accept_index]"] and "logits_output.next_token_logits" in predicted[0],
            f"eagle_utils.py @ {POSITIONS_OFF} L{decided.first}: verified_id is {put_out[0]}, and predict "
            f"{predicted[0]}",
        ),
        Part(
            "what mended it touches drafting alone",
            drafts_only,
            f"{POSITIONS_RIGHT}: {_listed(mended)}, " + ("all in drafting" if drafts_only else "not in drafting alone"),
        ),
    ]


def _assigned(found: Definition, name: str) -> list[str]:
    """What a name is set to, the first time first. Raises NotThereError if it never is."""
    set_to = [
        ast.unparse(node.value)
        for node in ast.walk(found.node)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    if not set_to:
        raise NotThereError(f"{found.name} sets no {name}")
    return set_to


def _advance_and_forward(clone: Clone, revision: str, path: str) -> tuple[int, int]:
    """The lines, in the loop of draft_forward, that advance the positions and that run the model."""
    name = "EAGLEWorker.draft_forward"
    found = definition(clone, revision, path, name)
    for loop in ast.walk(found.node):
        if isinstance(loop, ast.For):
            calls = {_name(call).rpartition("self.")[2]: call.lineno for call in _calls(loop)}
            advance = [line for called, line in calls.items() if called.endswith("positions.add_")]
            forward = [line for called, line in calls.items() if called.endswith(".forward")]
            if advance and forward:
                return advance[0], forward[0]
    raise NotThereError(f"{name} of {path} at {revision} has no loop that advances positions and runs the model")


def _lies_in_drafting(clone: Clone, one: FileDiff) -> bool:
    """Does a change lie in functions that draft: draft_forward, or the runner of the draft's CUDA graphs?"""
    path = one.path.removeprefix(f"{catalogue.DIRECTORY}/")
    if path.startswith("eagle_draft_"):
        return True
    drafting = [
        found for name, found in definitions(clone, POSITIONS_RIGHT, path).items() if name.endswith(".draft_forward")
    ]
    return all(any(found.first <= number <= found.last for found in drafting) for number, _ in one.added)


# --- words and figures


def _merged(clone: Clone, revision: str, when: str) -> Part:
    facts = commit(clone, revision)
    there = datetime.fromisoformat(facts.committer_date).astimezone(CHINA).strftime("%Y-%m-%d %H:%M")
    return Part(
        f"merged on {when}, as clocks at +0800 have it",
        there == when and on_main(clone, revision),
        f"{revision} was committed at {facts.committer_date}, which is {there} +0800",
    )


def _is_pull_request(clone: Clone, revision: str, number: int) -> Part:
    facts = commit(clone, revision)
    return Part(
        f"#{number} is on the main line",
        facts.pr == number and on_main(clone, revision),
        f"{revision}, {facts.committer_date[:16].replace('T', ' ')}: {facts.subject}",
    )


def _when_defined(clone: Clone, path: str, name: str, *revisions: str) -> str:
    said = []
    for revision in revisions:
        found = definitions(clone, revision, path).get(name)
        said.append(f"{'L' + str(found.first) if found else 'not there'} @ {revision}")
    return f"{name}: {', '.join(said)}"


def _figures(one: FileDiff) -> str:
    return f"+{len(one.added)}/-{len(one.removed)}"


def _net(diffs: Sequence[FileDiff]) -> int:
    return sum(len(one.added) - len(one.removed) for one in diffs)


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words)


def _at(numbers: Sequence[int]) -> str:
    return ", ".join(f"L{number}" for number in numbers)


# --- code, as a syntax tree


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Call))


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _called(found: Definition) -> list[str]:
    return [_name(call) for call in _calls(found.node)]


def _keyword(found: Definition, name: str) -> str:
    """What the first call in it that has such a keyword gives for it; "" if none has."""
    values = (one.value for call in _calls(found.node) for one in call.keywords if one.arg == name)
    return next(map(ast.unparse, values), "")


def _raises(node: ast.AST, error: str) -> bool:
    return any(isinstance(one, ast.Raise) and one.exc and error in ast.unparse(one.exc) for one in ast.walk(node))


def _value(node: ast.expr, names: dict[str, int]) -> int:
    """The value of an expression of whole numbers, if it is one; nothing of the clone's is run."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left, names) + _value(right, names)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left, names) - _value(right, names)
        case ast.IfExp(test=ast.Compare(left=left, ops=[ast.Gt()], comparators=[right]), body=body, orelse=other):
            return _value(body if _value(left, names) > _value(right, names) else other, names)
    raise NotThereError(f"{ast.unparse(node)} is no sum of whole numbers")
