"""Checks of the notes on #32887: rows of parents that a chain of drafts prepares once."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from refspec.history.claims.checking import Part, check
from refspec.history.claims.evidence import (
    Defined,
    NotThereError,
    change,
    changes,
    commit,
    definition,
    definitions,
    full_path,
    touched,
    where,
)
from refspec.history.claims.syntax import called, calls, name_of, whole_number
from refspec.history.claims.wording import at_lines, committed, figures, is_pull_request, listed, merged
from refspec.history.clone import Clone

CHAIN = "9f56553408"  # #32887
MULTI_LAYER = "multi_layer_eagle_worker_v2.py"
REBUILD = "_rebuild_topk1_chain_buffers"


@check("C1")
def merged_in_july(clone: Clone) -> Sequence[Part]:
    """It was merged on 2026-07-30, 17:55."""
    return [merged(clone, CHAIN, "2026-07-30 17:55")]


@check("C2")
def five_files(clone: Clone) -> Sequence[Part]:
    """It touches the five files that are listed."""
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
def methods_of_subclasses(clone: Clone) -> Sequence[Part]:
    """The sub-classes in eagle_worker_v2 and standalone_worker_v2 lose their own method."""
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
        f"{path}: {class_} {had} @ {CHAIN}^, and {has} @ {CHAIN} ({figures(lost)})",
        core,
    )


@check("C4")
def rows_of_parents(clone: Clone) -> Sequence[Part]:
    """The rows of parents are -1, 0, .., S-2, in as many columns as there are steps."""
    path = "base_spec_worker.py"
    rebuild = definition(clone, CHAIN, path, f"EagleDraftWorkerBase.{REBUILD}")
    width, bounds, line = _row_of_parents(rebuild)
    rows = {}
    for steps in range(1, 9):
        columns = whole_number(width, {"num_steps": steps})
        rows[steps] = list(range(*(whole_number(bound, {"parent_width": columns}) for bound in bounds)))
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


def _row_of_parents(rebuild: Defined) -> tuple[ast.expr, tuple[ast.expr, ast.expr], int]:
    """Of the method: the expression for parent_width, the bounds of the row's arange, and that one's line."""
    width = bounds = None
    for node in ast.walk(rebuild.node):
        if isinstance(node, ast.Assign):
            target = ast.unparse(node.targets[0])
            if target == "parent_width":
                width = node.value
            elif target == "self._topk1_parents_prealloc":
                bounds = next((call for call in calls(node.value) if name_of(call) == "torch.arange"), None)
    if width is None or bounds is None or len(bounds.args) != 2:
        raise NotThereError(f"{rebuild.name} makes no row of parents by torch.arange from a parent_width")
    return width, (bounds.args[0], bounds.args[1]), bounds.lineno


@check("C5")
def organizing_moved(clone: Clone) -> Sequence[Part]:
    """What cat, topk, sort and gather did moved into _draft_forward_organize."""
    name = "MultiLayerEagleDraftWorker._draft_forward_organize"
    sought = ["torch.cat", "torch.topk", "torch.sort", "torch.gather"]
    before = definition(clone, f"{CHAIN}^", MULTI_LAYER, "MultiLayerEagleDraftWorker.draft_forward")
    now = definitions(clone, CHAIN, MULTI_LAYER)
    had = [call for call in sought if call in called(before)]
    shared = definitions(clone, f"{CHAIN}^", "eagle_utils.py").get("organize_draft_results")
    if name not in now:
        return [Part(f"{name} is new", False, f"{MULTI_LAYER} @ {CHAIN} does not define it")]
    has = [call for call in sought if call in called(now[name])]
    instead = [call for call in ("organize_draft_results",) if call in called(now[name])]
    return [
        Part(
            "draft_forward loses the organizing of drafts to a new _draft_forward_organize",
            had == sought
            and name not in definitions(clone, f"{CHAIN}^", MULTI_LAYER)
            and not set(sought) & set(called(now["MultiLayerEagleDraftWorker.draft_forward"])),
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
def steps_stay(clone: Clone) -> Sequence[Part]:
    """At present nothing changes the number of steps at run time."""
    alone = "speculative_num_steps is set in __init__ alone"
    multi = _switches_steps(clone, MULTI_LAYER)
    single = _switches_steps(clone, "eagle_worker_v2.py")
    rebuilds = where(clone, CHAIN, "eagle_worker_v2.py", rf"dw\.{REBUILD}\(\)")
    return [
        Part(
            "nothing changes the number of steps of the multi-layer worker once it is made",
            not multi,
            f"{MULTI_LAYER} @ {CHAIN}: {listed(multi, alone)}",
        ),
        Part(
            "nor those of EAGLEWorkerV2",
            not single,
            f"eagle_worker_v2.py @ {CHAIN}: {listed(single, alone)}"
            + (f"; the rows are rebuilt at {at_lines(rebuilds)}" if rebuilds else ""),
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
def above_capacity(clone: Clone) -> Sequence[Part]:
    """It falls back safely where a batch is larger than the prepared rows."""
    forward = definition(clone, CHAIN, MULTI_LAYER, "MultiLayerEagleDraftWorker.draft_forward")
    guard = "topk_index.shape[0] <= parents_prealloc.shape[0]"
    guards = [
        node
        for node in forward.node.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        if guard in map(ast.unparse, node.test.values) and isinstance(node.body[-1], ast.Return)
    ]
    after = [node for node in forward.node.body if guards and node.lineno > guards[0].lineno]
    falls_back = any(name_of(call) == "self._draft_forward_organize" for node in after for call in calls(node))
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
def another_in_the_file(clone: Clone) -> Sequence[Part]:
    """#32850 touches the same file."""
    other = "313a518bee"
    facts = commit(clone, other)
    both = sorted({*touched(clone, other)} & {*touched(clone, CHAIN)})
    return [
        is_pull_request(clone, other, 32850),
        Part(
            "it touches a file that #32887 touches",
            bool(both),
            f"{other} ({committed(facts)}) and {CHAIN} touch {listed(both, 'no file in common')}",
        ),
    ]
