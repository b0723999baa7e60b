"""The checks of the study notes on EAGLE, where they speak of commits that followed: what each did, and when.

Days are the author's own unless a part says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from refspec.history.claims.checking import Part, check
from refspec.history.claims.eagle_commits import FOUR, came, came_with, yes
from refspec.history.claims.evidence import CommitFacts, change, changes, commit, definition, definitions, each, where
from refspec.history.claims.walk import walk
from refspec.history.claims.wording import committed, day, listed, moment
from refspec.history.clone import Clone, LacksError

WORKER = "eagle_worker.py"
SCHEDULER = "/python/sglang/srt/managers/scheduler.py"
MODELS = "/python/sglang/srt/models"
BACKENDS = "/python/sglang/srt/layers/attention"


@check("E28")
def what_retraction_frees(clone: Clone) -> Sequence[Part]:
    """#2711: retracting must free the tree's slots too."""
    mend = "8c8779cd05"
    facts = commit(clone, mend)
    way = walk(definitions(clone, mend, WORKER), "EAGLEWorker.finish_request", {})
    recorded = "finish_extend_len"
    reads = recorded in definition(clone, mend, WORKER, "EAGLEWorker.finish_request").text
    retracts = where(clone, mend, SCHEDULER, r"finish_request\(retracted_reqs\)")
    diff = change(clone, mend, "eagle_utils.py")
    freeing = [line for line in diff.plus if re.search(r"\bfree\w*\(", line)]
    moved = sorted(map(str.strip, diff.plus)) == sorted(map(str.strip, diff.minus))
    return [
        Part(
            "on retraction the draft's slots are freed, by what was recorded",
            facts.pr == 2711 and bool(way.named("free")) and reads and bool(retracts),
            f"at {mend} (#{facts.pr}) the scheduler hands retracted requests to finish_request in line "
            f"{listed(retracts)}; it calls free {len(way.named('free'))} times, and "
            f"{'reads' if reads else 'does not read'} {recorded}",
        ),
        Part(
            "#2711 adds that freeing",
            bool(freeing),
            f"lines added: {len(diff.plus)}, of them {len(freeing)} that free something; "
            f"{'one line was moved, and nothing else' if moved and len(diff.plus) == 1 else 'it is no pure move'}",
            core=False,
        ),
    ]


@check("E29")
def follow_ups(clone: Clone) -> Sequence[Part]:
    """Follow-ups #2711, #2730 (concurrent crash), #2939 (max_tokens=1), #3014 (CPU overhead, flush_cache)."""
    expected = {
        "8c8779cd05": (2711, "retract"),
        "a47bf39123": (2730, "concurrent"),
        "b730aa6b9e": (2939, "max token = 1"),
        "287d07a669": (3014, "flush_cache, CPU overhead"),
    }
    facts = each(partial(commit, clone), expected)
    days = sorted(day(one) for one in facts)
    last = commit(clone, FOUR[-1])
    parts = [
        Part(
            f"#{number} has '{words}' in its title",
            one.pr == number and words in one.subject,
            f"{one.hash[:10]}: {one.subject}",
        )
        for one, (number, words) in zip(facts, expected.values(), strict=True)
    ]
    later = all(moment(one) > moment(last) for one in facts)
    return [
        *parts,
        Part("they follow the four", later, f"{days[0]} to {days[-1]}; part 4 is of {day(last)}", core=False),
    ]


@check("E30")
def refactoring_3269(clone: Clone) -> Sequence[Part]:
    """#3269: a refactoring, on 2025-02-03."""
    revision, runner = "013021b6a1", "eagle_draft_cuda_graph_runner.py"
    facts = commit(clone, revision)
    new = came_with(clone, revision, runner)
    return [
        _of(facts, 3269, "2025-02-03"),
        Part(
            "it is a refactoring",
            "refactor" in facts.subject,
            f"its title is {facts.subject!r}; {_size(clone, revision)}; {runner} {came(new)} with it",
        ),
    ]


@check("E31")
def kernels_3373(clone: Clone) -> Sequence[Part]:
    """#3373, on 2025-02-07, moves the kernels of the tree's mask to sgl-kernel."""
    revision, kernel = "f9905d59a8", r"__global__ void build_tree"
    before = where(clone, f"{revision}^", "build_eagle_tree.py", kernel)
    after = where(clone, revision, "build_eagle_tree.py", kernel)
    there = "/sgl-kernel/src/sgl-kernel/csrc"
    new = [
        name for name in ("eagle_utils.cu", "speculative_sampling.cu") if came_with(clone, revision, f"{there}/{name}")
    ]
    now = where(clone, revision, f"{there}/eagle_utils.cu", kernel)
    greedy = each(
        lambda one: where(clone, one, "/sgl-kernel/csrc/speculative/eagle_utils.cu", "(?i)verify_?tree_?greedy"),
        ("52a34d7448^", "52a34d7448"),
    )
    return [
        _of(commit(clone, revision), 3373, "2025-02-07"),
        Part(
            "it moves the kernels that build the tree's mask",
            bool(before and now) and not after,
            f"kernels in build_eagle_tree.py: {len(before)} before, {len(after)} after; in sgl-kernel's "
            f"eagle_utils.cu: {len(now)}; new there: {listed(new)}; kernels of verify_tree_greedy came with "
            f"52a34d7448: {yes(bool(greedy[1]) and not greedy[0])}",
        ),
    ]


@check("E32")
def nextn_3582(clone: Clone) -> Sequence[Part]:
    """#3582: NextN, on 2025-02-15."""
    revision = "862dd76c76"
    new = came_with(clone, revision, f"{MODELS}/deepseek_nextn.py")
    return [
        _of(commit(clone, revision), 3582, "2025-02-15"),
        Part("it brought NextN", new, f"models/deepseek_nextn.py {came(new)} with it"),
    ]


@check("E33")
def shared_embeddings_4033(clone: Clone) -> Sequence[Part]:
    """In February 2025 embeddings and head were shared (#4033)."""
    revision, name = "9fafa62db7", "set_embed_and_head"
    facts = commit(clone, revision)
    model = f"{MODELS}/deepseek_v2.py"
    has = [
        any(one.endswith(f".{name}") for one in found)
        for found in each(lambda one: definitions(clone, one, model), (f"{revision}^", revision))
    ]
    return [
        Part(
            "#4033 shares embeddings and head with the target",
            facts.pr == 4033 and has == [False, True],
            f"{revision} is #{facts.pr}; DeepSeek's model, whose kin NextN's is, has {name}: {yes(has[0])} before it, "
            f"{yes(has[1])} after",
        ),
        _in_month(facts, "2025-02"),
    ]


@check("E34")
def two_backends(clone: Clone) -> Sequence[Part]:
    """March: FlashInfer MLA (#4218) and FA3 (#4951)."""
    parts = []
    for revision, number, file, name in (
        ("9fb48f951f", 4218, "flashinfer_mla_backend.py", "FlashInferMLAMultiStepDraftBackend"),
        ("e983e43248", 4951, "flashattention_backend.py", "FlashAttentionMultiStepBackend"),
    ):
        facts = commit(clone, revision)
        backend = f"{BACKENDS}/{file}"
        has = [name in found for found in each(partial(_defined, clone, backend), (f"{revision}^", revision))]
        parts += [
            Part(
                f"#{number} lets {file.removesuffix('_backend.py')} draft",
                facts.pr == number and has == [False, True],
                f"{revision} is #{facts.pr}; the backend has {name}: {yes(has[0])} before it, {yes(has[1])} after",
            ),
            _in_month(facts, "2025-03"),
        ]
    return parts


@check("E35")
def one_after_another(clone: Clone) -> Sequence[Part]:
    """In March 2025 #4908; overlap, DP attention and PD one after another."""
    pages = commit(clone, "b26bc86b36")
    revisions = {"overlap": "20a6c0a63d", "DP attention": "10d60cd41b", "PD": "d2e0881a34"}
    facts = dict(zip(revisions, each(partial(commit, clone), revisions.values()), strict=True))
    moments = [moment(one) for one in facts.values()]
    return [
        Part(
            "#4908 is of March 2025",
            pages.pr == 4908 and day(pages).startswith("2025-03"),
            f"{pages.hash[:10]} is #{pages.pr}, of {day(pages)}",
        ),
        Part("the three came after it", min(moments) > moment(pages), listed([day(one) for one in facts.values()])),
        Part(
            "in this order",
            moments == sorted(moments),
            "; ".join(f"{name}: {day(one)} ({one.hash[:10]})" for name, one in facts.items()),
            core=False,
        ),
    ]


def _of(facts: CommitFacts, number: int, on: str) -> Part:
    return Part(
        f"#{number} is of {on}",
        facts.pr == number and day(facts) == on,
        f"{facts.hash[:10]} is #{facts.pr}, of {day(facts)}",
    )


def _in_month(facts: CommitFacts, month: str) -> Part:
    return Part(
        f"that was in {month}",
        day(facts).startswith(month),
        f"it is of {day(facts)}, and was committed on {committed(facts)}",
        core=False,
    )


def _size(clone: Clone, revision: str) -> str:
    try:
        files = changes(clone, revision)
    except LacksError:
        return "how much it changed is not in this clone"
    return f"it adds {sum(len(one.added) for one in files)} lines and removes {sum(len(one.removed) for one in files)}"


def _defined(clone: Clone, path: str, revision: str) -> set[str]:
    return set(definitions(clone, revision, path))
