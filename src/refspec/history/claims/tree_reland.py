"""Checks of the notes on #26997: trees for spec v2, reverted and landed again."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from refspec.history import catalogue
from refspec.history.claims.checking import BEYOND_GIT, Finding, Part, check
from refspec.history.claims.evidence import (
    Defined,
    change,
    changes,
    commit,
    definition,
    definitions,
    full_path,
)
from refspec.history.claims.syntax import calls, keyword, name_of, raises
from refspec.history.claims.wording import at_lines, committed, is_pull_request, listed, moment, when_defined
from refspec.history.clone import Clone

TREE, TREE_REVERTED, TREE_AGAIN = "1d4ee060c2", "f6d0beaca8", "ac99794e64"  # #26866, #26981, #26997
TREE_PAGED = "84ca0ffb8c"  # #26972
HOOK = "/python/sglang/srt/arg_groups/speculative_hook.py"
POOLS = "/python/sglang/srt/mem_cache/memory_pool.py"
FINALIZE = "_finalize_accepted_tree_path"
MOVE_ACCEPTED = "move_accepted_tokens_to_target_kvcache"


@check("T1")
def landed_again(clone: Clone) -> Sequence[Part]:
    """It is the reland of #26866 after the revert #26981."""
    first, revert, again = (commit(clone, revision) for revision in (TREE, TREE_REVERTED, TREE_AGAIN))
    times = [moment(one) for one in (first, revert, again)]
    between = round((times[1] - times[0]).total_seconds() / 60)
    inverse = {one.path: (one.minus, one.plus) for one in changes(clone, TREE_REVERTED)} == {
        one.path: (one.plus, one.minus) for one in changes(clone, TREE)
    }
    return [
        is_pull_request(clone, TREE, 26866),
        is_pull_request(clone, TREE_REVERTED, 26981),
        is_pull_request(clone, TREE_AGAIN, 26997),
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
            f"{TREE_AGAIN}, {committed(again)}: {again.subject}",
        ),
    ]


BEYOND_GIT["T2"] = (
    "why #26866 was taken back stands on the page of a pull request; the commit that did it has a title and no text"
)


@check("T3")
def finalizing_is_new(clone: Clone) -> Sequence[Part]:
    """_finalize_accepted_tree_path is new in it."""
    path, name = "eagle_worker_v2.py", f"EAGLEWorkerV2.{FINALIZE}"
    return [
        Part(
            f"#26997 adds {FINALIZE}",
            name in definitions(clone, TREE_AGAIN, path) and name not in definitions(clone, f"{TREE_AGAIN}^", path),
            f"{path}: {when_defined(clone, path, name, f'{TREE_AGAIN}^', TREE_AGAIN)}",
        ),
        Part(
            "it is new there",
            name not in definitions(clone, TREE, path),
            f"{path}: {when_defined(clone, path, name, TREE)}, which is #26866",
            core=False,
        ),
    ]


@check("T4")
def moving_is_new(clone: Clone) -> Sequence[Part]:
    """move_accepted_tokens_to_target_kvcache belongs to the new code."""
    path, name = "eagle_worker_v2.py", f"EAGLEWorkerV2.{MOVE_ACCEPTED}"
    before, after = (definitions(clone, revision, path) for revision in (f"{TREE_AGAIN}^", TREE_AGAIN))
    callers = [number for number, line in change(clone, TREE_AGAIN, path).added if f"self.{MOVE_ACCEPTED}(" in line]
    changed = name in after and (name not in before or before[name].text != after[name].text)
    return [
        Part(
            "#26997 adds or changes it",
            changed,
            f"{path}: {when_defined(clone, path, name, TREE_AGAIN)}; its text is "
            + ("another" if changed else "the same")
            + f" @ {TREE_AGAIN}^",
            command=f"git diff {TREE_AGAIN}^ {TREE_AGAIN} -- :/{full_path(path)}",
        ),
        Part(
            "the new code calls it",
            bool(callers),
            f"{path} @ {TREE_AGAIN}: "
            + (f"an added line calls it, {at_lines(callers)}" if callers else "no added line calls it"),
        ),
        Part(
            "it was not there before #26866",
            name not in definitions(clone, f"{TREE}^", path),
            f"{path}: {when_defined(clone, path, name, f'{TREE}^')}",
            core=False,
        ),
    ]


@check("T5")
def width_of_the_extend(clone: Clone) -> Sequence[Part]:
    """_draft_extend_for_decode goes from num_steps + 1 to num_draft_tokens."""
    path, name = "eagle_worker_v2.py", "EagleDraftWorker._draft_extend_for_decode"
    before, after = (
        keyword(definition(clone, revision, path, name), "num_tokens_per_req")
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
def memory_pool(clone: Clone) -> Sequence[Part]:
    """There is a MemoryPool.move_kv_cache."""
    having = _having(clone, "move_kv_cache", TREE_AGAIN)
    return [
        Part(
            "there is a MemoryPool.move_kv_cache",
            "MemoryPool.move_kv_cache" in having,
            f"memory_pool.py @ {TREE_AGAIN}: move_kv_cache is defined by "
            + listed([f"{one.name.rpartition('.')[0]} (L{one.first})" for one in having.values()], "no class"),
            command=f"git grep -nE 'class .*Pool|def move_kv_cache' {TREE_AGAIN} -- :/{full_path(POOLS)}",
        )
    ]


@check("T7")
def pools_move(clone: Clone) -> Sequence[Part]:
    """The pools of MLA and DSA get move_kv_cache."""
    before, after = (_having(clone, "move_kv_cache", revision) for revision in (f"{TREE_AGAIN}^", TREE_AGAIN))
    return [
        Part(
            f"{pool} gets move_kv_cache",
            f"{pool}.move_kv_cache" in after and f"{pool}.move_kv_cache" not in before,
            "memory_pool.py: " + when_defined(clone, POOLS, f"{pool}.move_kv_cache", f"{TREE_AGAIN}^", TREE_AGAIN),
        )
        for pool in ("MLATokenToKVPool", "DSATokenToKVPool")
    ]


def _having(clone: Clone, method: str, revision: str) -> dict[str, Defined]:
    found = definitions(clone, revision, POOLS).items()
    return {name: one for name, one in found if name.endswith(f".{method}")}


@check("T8")
def silent_fallback(clone: Clone) -> Sequence[Part]:
    """Users fall back to v1 without being told."""
    handle = definition(clone, TREE_AGAIN, HOOK, "_handle_eagle_family")
    warnings = [
        call.lineno
        for call in calls(handle.node)
        if name_of(call) == "logger.warning" and any("spec_v1_reason" in ast.unparse(one) for one in call.args)
    ]
    return [
        Part(
            "nothing is said to the user",
            not warnings,
            f"speculative_hook.py @ {TREE_AGAIN}: "
            + (f"logger.warning names the reason at {at_lines(warnings)}" if warnings else "no warning names it"),
            command=f"git show {TREE_AGAIN}:{full_path(HOOK)} | sed -n '{handle.first},{handle.last}p'",
        )
    ]


@check("T9")
def what_falls_back(clone: Clone) -> Sequence[Part]:
    """Pages of more than one token, and mamba state, fall back to v1."""
    falls = _falls_to_v1(clone, TREE_AGAIN)
    return [
        Part(
            f"topk > 1 with {what} falls back to v1",
            any(word in test for _, test in falls),
            f"speculative_hook.py @ {TREE_AGAIN}: "
            + listed(
                [f"L{line} does so if {test}" for line, test in falls if word in test],
                "what turns the overlap off does not ask for it",
            ),
        )
        for what, word in (("page_size > 1", "page_size > 1"), ("mamba state", "is_mamba_state_model"))
    ]


@check("T10")
def pages_later(clone: Clone) -> Finding:
    """Were pages of more than one token supported with topk > 1 in v2 later?"""
    last = catalogue.reach()
    before = [test for _, test in _falls_to_v1(clone, f"{TREE_PAGED}^") if "page_size" in test]
    parts = [
        is_pull_request(clone, TREE_PAGED, 26972),
        Part(
            "before #26972, page_size > 1 fell back to v1",
            bool(before),
            f"speculative_hook.py @ {TREE_PAGED}^: {listed(before, 'it did not')}",
        ),
    ]
    for revision, when in ((TREE_PAGED, committed(commit(clone, TREE_PAGED))), (last.commit[:10], last.date)):
        falls = [test for _, test in _falls_to_v1(clone, revision) if "page_size" in test]
        allowed = _backends_for_pages(clone, revision)
        parts += [
            Part(
                f"on {when} it does not",
                not falls,
                f"speculative_hook.py @ {revision}: " + listed(falls, "no fallback asks for page_size"),
            ),
            Part(
                "and some attention backends take it; for others ValueError is raised",
                bool(allowed),
                f"speculative_hook.py @ {revision}: {listed(allowed, 'no such list')}",
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
        if isinstance(node, ast.If) and "page_size > 1" in ast.unparse(node.test) and raises(node, "ValueError"):
            for test in ast.walk(node.test):
                if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotIn):
                    listed = names.get(ast.unparse(test.comparators[0]), test.comparators[0])
                    return [str(one.value) for one in ast.walk(listed) if isinstance(one, ast.Constant)]
    return []


@check("T11")
def classes_of_tests(clone: Clone) -> Sequence[Part]:
    """The classes of tests that it adds."""
    return [
        Part(
            f"#26997 adds the test class {name}",
            name in definitions(clone, TREE_AGAIN, path) and name not in definitions(clone, f"{TREE_AGAIN}^", path),
            f"{path[1:]}: {when_defined(clone, path, name, f'{TREE_AGAIN}^', TREE_AGAIN)}",
        )
        for name, path in (
            ("TestEagle3Topk16SpecV2", "/test/registered/spec/eagle/test_spec_eagle_topk.py"),
            ("TestEagle3Topk16V2Retract", "/test/registered/spec/eagle/test_spec_eagle_stress.py"),
        )
    ]
