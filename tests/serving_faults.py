"""One mix of everything in serving, and what the tests would complain of if there were a fault in it: pages, chunks,
shared prefixes, a pool that runs out, retractions, an abort.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from builders import NextLogits, agreeing_now_and_then, peaked_logits, random_logits
from serving import VOCAB, Visit, assert_as_foretold, foretold, serve

from refspec import Engine, SamplingParams, SpecConfig
from refspec.memory.allocator import IntegrityError, OutOfSlots
from refspec.models.scripted import ScriptedModel

TREE = SpecConfig(topk=3, num_steps=3, num_draft_tokens=12, page_size=4, exact_branch_kv=True)
SLOTS = 80
SURE, UNSURE = peaked_logits(VOCAB), random_logits(VOCAB)
# What the target says, and its draft: itself, or one that is right now and then, on branches of every rank.
PAIRS = {
    "right": (SURE, ScriptedModel(SURE, VOCAB)),
    "errs": (UNSURE, ScriptedModel(agreeing_now_and_then(UNSURE, random_logits(VOCAB, salt=5)), VOCAB)),
}


def visits(said: NextLogits) -> list[Visit]:
    """Prompts that begin alike, one that is aborted, and one that goes on where another's output ended."""
    shared = [*range(9), 3, 3, 1]
    came = [
        Visit([*shared[: 5 + i % 8], i, i % 3], SamplingParams(max_new_tokens=14 + i), comes=3 * i) for i in range(9)
    ]
    came[4] = replace(came[4], leaves=16)
    # Its last block is whole and ends with a page, and nobody evicts it before the next one comes.
    last = Visit([6, 6, 1, 8, 0, 3, 3, 9], SamplingParams(max_new_tokens=21), comes=100)
    goes_on = [*last.prompt, *foretold(said, last)[0], 5]
    return [*came, last, Visit(goes_on, SamplingParams(max_new_tokens=9), comes=130)]


@functools.cache
def accept_lens_alone(name: str) -> list[list[int]]:
    said, draft = PAIRS[name]
    engine = Engine(ScriptedModel(said, VOCAB), draft, replace(TREE, page_size=1))
    return [engine.generate([visit.prompt], visit.params)[0].accept_lens for visit in visits(said)]


def what_shows(spec: SpecConfig = TREE) -> set[str]:
    """Complaints of the tests about one mix of everything: pages, chunks, shared prefixes, a pool that runs out, an
    abort.
    """
    return {complaint for name in PAIRS for complaint in complaints_about(name, spec)}


def complaints_about(name: str, spec: SpecConfig) -> set[str]:
    (said, draft), complaints = PAIRS[name], set()
    came = visits(said)
    engine = Engine(ScriptedModel(said, VOCAB), draft, spec, kv_slots=SLOTS, prefix_cache=True, chunk_size=5)

    def between(step: int) -> None:
        due = [request for request in engine.scheduler.running.requests if request.retractions == 0]
        if step % 7 == 6 and due:
            engine.scheduler.retract(due[0])

    try:
        requests, watcher = serve(engine, came, between)
    except IntegrityError:
        return {"check"}
    except OutOfSlots:
        return {"slots"}
    if name == "right" and any(len(tree.accepted_rows) != spec.num_steps + 1 for tree in watcher.requests):
        complaints.add("draft quality")
    for request, alone in zip(requests, accept_lens_alone(name), strict=True):
        if request.accept_lens != alone[: len(request.accept_lens)]:
            complaints.add("accept lengths")
    try:
        assert_as_foretold(said, came, requests)
    except AssertionError:
        complaints.add("output")
    stats = engine.stats
    if not (stats.retractions and stats.cached_tokens and stats.evicted_tokens):
        complaints.add("nothing happened")
    return complaints
