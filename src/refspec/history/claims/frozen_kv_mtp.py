"""Checks of the notes on #27607: the frozen-KV MTP worker goes to spec v2."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from refspec.history.claims.checking import Part, check
from refspec.history.claims.evidence import (
    NotThereError,
    change,
    changes,
    commit,
    definition,
    definitions,
    full_path,
    grep,
    lines,
    where,
)
from refspec.history.claims.syntax import raises
from refspec.history.claims.wording import at_lines, day, figures, is_pull_request, listed, merged, net
from refspec.history.clone import Clone

FROZEN = "decb88e0e3"  # #27607
SCHEDULER = "/python/sglang/srt/managers/scheduler.py"


@check("F1")
def merged_in_june(clone: Clone) -> Sequence[Part]:
    """It was merged on 2026-06-10, 06:30."""
    return [merged(clone, FROZEN, "2026-06-10 06:30")]


@check("F2")
def file_deleted(clone: Clone) -> Sequence[Part]:
    """The file of the v1 worker is deleted."""
    gone = change(clone, FROZEN, "frozen_kv_mtp_worker.py")
    return [
        Part(
            "frozen_kv_mtp_worker.py is deleted",
            gone.status == "D",
            f"{FROZEN}: {gone.status}, {figures(gone)}",
        )
    ]


@check("F3")
def code_shrinks(clone: Clone) -> Sequence[Part]:
    """The code shrinks by about 800 lines."""
    all_of_it = changes(clone, FROZEN)
    whole = net(all_of_it)
    outside = net([one for one in all_of_it if not one.path.startswith("test/")])
    plus, minus = sum(len(one.added) for one in all_of_it), sum(len(one.removed) for one in all_of_it)
    return [
        Part(
            "the code shrinks by about 800 lines",
            any(-900 <= figure <= -700 for figure in (whole, outside)),
            f"{FROZEN}: +{plus}/-{minus}, which is {whole} ({outside} outside test/); "
            f"frozen_kv_mtp_worker_v2.py alone: {figures(change(clone, FROZEN, 'frozen_kv_mtp_worker_v2.py'))}",
            command=f"git show --shortstat --format= {FROZEN}; git show --shortstat --format= {FROZEN} -- ':!test'",
        )
    ]


@check("F4")
def placeholder(clone: Clone) -> Sequence[Part]:
    """The v2 file was a placeholder that raised NotImplementedError."""
    path, before = "frozen_kv_mtp_worker_v2.py", f"{FROZEN}^"
    found = definitions(clone, before, path)
    methods = [one for one in found.values() if not isinstance(one.node, ast.ClassDef)]
    stubs = [one for one in methods if raises(one.node, "NotImplementedError")]
    return [
        Part(
            "before, the v2 file did nothing but raise NotImplementedError",
            bool(methods) and len(stubs) == len(methods),
            f"{path} @ {before}: {len(lines(clone, before, path))} lines, "
            f"{listed([f'{one.name} raises it' for one in stubs], 'which do not raise it')}",
        )
    ]


@check("F5")
def options_of_tests(clone: Clone) -> Sequence[Part]:
    """Tests lose --disable-overlap-schedule and gain --speculative-algorithm."""
    tests = [one for one in changes(clone, FROZEN) if one.path.startswith("test/registered/") and one.status == "M"]
    removed = [line for one in tests for line in one.minus]
    added = [line for one in tests for line in one.plus]
    told = listed([f"{one.path.rpartition('/')[2]} {figures(one)}" for one in tests])
    environment = sum('"SGLANG_ENABLE_SPEC_V2"' in line for line in removed)
    return [
        Part(
            "tests lose --disable-overlap-schedule",
            any("--disable-overlap-schedule" in line for line in removed),
            f"{FROZEN}: no removed line has it; {environment} set SGLANG_ENABLE_SPEC_V2 ({told})"
            if not any("--disable-overlap-schedule" in line for line in removed)
            else f"{FROZEN}: removed lines have it ({told})",
            command=f"git show {FROZEN} -- :/test/registered/spec",
        ),
        Part(
            "and gain --speculative-algorithm",
            any("--speculative-algorithm" in line for line in added),
            f"{FROZEN}: {len(added)} lines are added to them",
        ),
    ]


@check("F6")
def small_adaptations(clone: Clone) -> Sequence[Part]:
    """Scheduler and CUDA-graph runner are adapted a little."""
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
            f"{FROZEN}: scheduler.py {figures(scheduler)}, {runner} {figures(graphs)}",
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
def methods_of_the_draft_worker(clone: Clone) -> Sequence[Part]:
    """The draft worker contains verify and forward_batch_generation."""
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
        f"{path} @ {FROZEN}: {listed(others, 'no class there')} defines it{inherited}",
    )


@check("F8")
def mixin_of_the_draft_worker(clone: Clone) -> Sequence[Part]:
    """The draft worker inherits EagleDraftInputV2Mixin."""
    path, mixin = "frozen_kv_mtp_worker_v2.py", "EagleDraftInputV2Mixin"
    worker = definition(clone, FROZEN, path, "FrozenKVMTPDraftWorker")
    owners = grep(clone, FROZEN, rf"^class [A-Za-z]+\(.*{mixin}", "")
    return [
        Part(
            f"FrozenKVMTPDraftWorker inherits {mixin}",
            mixin in worker.bases,
            f"{path} @ {FROZEN} L{worker.first}: its bases are {listed(worker.bases)}; {mixin} is a base in "
            + listed([f"{name.rpartition('/')[2]} L{number}" for name, number, _ in owners]),
        )
    ]


@check("F9")
def bases(clone: Clone) -> Sequence[Part]:
    """FrozenKVMTPWorkerV2 derives from EAGLEWorkerV2, its draft worker from BaseDraftWorker."""
    path = "frozen_kv_mtp_worker_v2.py"
    return [
        Part(
            f"{name} derives from {base}",
            base in definition(clone, FROZEN, path, name).bases,
            f"{path} @ {FROZEN} L{definition(clone, FROZEN, path, name).first}: "
            f"its bases are {listed(definition(clone, FROZEN, path, name).bases)}",
        )
        for name, base in (("FrozenKVMTPWorkerV2", "EAGLEWorkerV2"), ("FrozenKVMTPDraftWorker", "BaseDraftWorker"))
    ]


@check("F10")
def methods_of_the_algorithm(clone: Clone) -> Sequence[Part]:
    """supports_spec_v2 and create_worker change."""
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
def removed_names(clone: Clone) -> Sequence[Part]:
    """Helpers and an alias are removed."""
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
                f"{path}: {at_lines(before) or 'not there'} @ {FROZEN}^, {at_lines(after) or 'not there'} @ {FROZEN}",
            )
        )
    return parts


@check("F12")
def no_reference_left(clone: Clone) -> Sequence[Part]:
    """No reference to the class of v1 is left."""
    before = _naming(clone, f"{FROZEN}^", "FrozenKVMTPWorker", below="")
    left = _naming(clone, FROZEN, "FrozenKVMTPWorker", below="/")
    return [
        Part(
            "no line names the v1 class any more",
            bool(before) and not left,
            f"{len(before)} lines of speculative/ @ {FROZEN}^, {len(left)} of the repository @ {FROZEN}"
            + (f": {listed(left[:3])}" if left else ""),
            command=f"git grep -nw FrozenKVMTPWorker {FROZEN}",
        )
    ]


def _naming(clone: Clone, revision: str, word: str, below: str) -> list[str]:
    """The lines with this word, as "path:number"."""
    found = grep(clone, revision, word, below)
    return [f"{path}:{number}" for path, number, line in found if re.search(rf"\b{word}\b", line)]


@check("F13")
def two_before(clone: Clone) -> Sequence[Part]:
    """#23802 and #25980 are of the day before."""
    parts = []
    for revision, number in (("d145a6127a", 23802), ("2218622f50", 25980)):
        parts.append(is_pull_request(clone, revision, number))
        of = day(commit(clone, revision))
        parts.append(Part(f"#{number} is of 2026-06-09", of == "2026-06-09", f"{revision}: its author's day is {of}"))
    return parts
