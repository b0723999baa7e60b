"""Pools so small that everybody loses his slots at least once: nobody's output, coins or accept lengths change."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import agreeing_now_and_then, hash_of, peaked_logits, random_logits
from pairwise import pairwise
from serving import TOKENIZER, VOCAB, Visit, assert_as_foretold, least_retracted_first, serve, slots_alone, slots_for

from refspec import Engine, Generation, SamplingParams, SpecConfig
from refspec.engine.scheduler import RETRACTION_POLICIES
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import Request

SAID = random_logits(VOCAB)
TARGET = ScriptedModel(SAID, VOCAB)
DRAFT = ScriptedModel(agreeing_now_and_then(SAID, random_logits(VOCAB, salt=5)), VOCAB)
SHAPES = {
    1: SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, exact_branch_kv=True),
    2: SpecConfig(topk=2, num_steps=2, num_draft_tokens=6, exact_branch_kv=True),
    4: SpecConfig(topk=4, num_steps=2, num_draft_tokens=8, exact_branch_kv=True),
    16: SpecConfig(topk=16, num_steps=2, num_draft_tokens=18, exact_branch_kv=True),
}


def crowd(page: int, budget: int, count: int = 6) -> list[Visit]:
    """Requests whose last page is nearly full when they start."""
    lens = [max(5, page - 3 + i % 3) for i in range(count)]
    return [
        Visit([hash_of([p, i]) % VOCAB for p in range(length)], SamplingParams(max_new_tokens=budget))
        for i, length in enumerate(lens)
    ]


def crowded_engine(
    said: Any, draft: ScriptedModel, spec: SpecConfig | None, visits: Sequence[Visit], first: int, **settings: Any
) -> Engine:
    """Slots for the first round of so many, and for the last one of the largest, but not one more."""
    page = spec.page_size if spec else 1
    slots = sum(slots_for(spec, page, len(visit.prompt)) for visit in visits[:first])
    engine = Engine(
        ScriptedModel(said, VOCAB),
        draft if spec else None,
        spec,
        kv_slots=max(slots, slots_alone(spec, page, visits)),
        **settings,
    )
    engine.tokenizer = TOKENIZER
    engine.scheduler.retraction_policy = least_retracted_first
    return engine


# --- everybody ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [False, True], ids=["", "cache"])
@pytest.mark.parametrize(
    ("k", "page", "first"), [(1, 1, 2), (1, 4, 2), (2, 4, 3), (2, 1, 3), (4, 1, 3), (16, 1, 3), (16, 4, 3)]
)
def test_a_storm_in_which_slots_run_out_for_everybody(k: int, page: int, first: int, cache: bool) -> None:
    """And drafts stay as good as they are: they equal their target, and all of them are accepted."""
    said, spec = peaked_logits(VOCAB), replace(SHAPES[k], page_size=page)
    visits = crowd(page, budget=44, count=5)
    engine = crowded_engine(said, ScriptedModel(said, VOCAB), spec, visits, first, prefix_cache=cache)
    requests, watcher = serve(engine, visits)
    assert_as_foretold(said, visits, requests)
    assert min(request.retractions for request in requests) >= 1
    assert sum(request.retractions for request in requests) == engine.stats.retractions
    assert {len(request.accepted_rows) for request in watcher.requests} == {spec.num_steps + 1}


STORMS = pairwise(
    {
        "k": [1, 2, 4, 16],
        "page": [1, 4, 16, 64],
        "chunk": [None, 1, 5],
        "cache": [False, True],
        "prompts": ["own", "one"],
    }
)


@pytest.mark.parametrize("row", STORMS, ids=lambda row: " ".join(f"{name}={value}" for name, value in row.items()))
def test_a_storm_that_spares_nobody(row: dict[str, Any]) -> None:
    """Everybody is retracted once while it decodes, and where prompts are read in chunks, again while it reads anew."""
    spec, visits = replace(SHAPES[row["k"]], page_size=row["page"]), crowd(row["page"], budget=16, count=4)
    if row["prompts"] == "one":
        visits = [visits[0]] * 4
    settings = {"chunk_size": row["chunk"], "prefix_cache": row["cache"]}
    engine = crowded_engine(SAID, DRAFT, spec, visits, first=4, **settings)
    when: set[str] = set()

    def between(step: int) -> None:
        scheduler = engine.scheduler
        due = [request for request in scheduler.running.requests if request.retractions == 0]
        if scheduler.chunked and scheduler.chunked.retractions == 1:
            due = [scheduler.chunked]
        if step % 2 and due:
            request = due[0]
            when.add("reading" if request is scheduler.chunked else "decoding")
            scheduler.retract(request)
            engine.check()
            assert (request.row, request.kv_len, request.cached_len, request.cache_node) == (0, 0, 0, None)
            assert request in scheduler.waiting

    requests, _ = serve(engine, visits, between)
    assert_as_foretold(SAID, visits, requests)
    assert min(request.retractions for request in requests) >= 1
    if row["chunk"] and not row["cache"]:
        assert when == {"reading", "decoding"}
    alone = Engine(TARGET, DRAFT, replace(spec, page_size=1))
    for visit, request in zip(visits, requests, strict=True):
        assert request.accept_lens == alone.generate([visit.prompt], visit.params)[0].accept_lens


@pytest.mark.parametrize("policy", RETRACTION_POLICIES)
def test_who_is_retracted(policy: str) -> None:
    """Of what runs when slots run out, the policy's first; and it goes on in the place in the queue that it had."""
    engine = Engine(TARGET, DRAFT, SHAPES[2], kv_slots=80, retraction=policy)
    prompts, chosen = [[1] * 30, [2] * 4, [3] * 5, [4] * 3], list[int]()
    original = engine.scheduler.retract

    def retract(request: Request) -> None:
        running = engine.scheduler.running.requests
        chosen.append(running.index(request))
        by = {
            "newest": lambda r: r.arrival,
            "largest": lambda r: r.kv_len,
            "least_output": lambda r: -len(r.output_ids),
        }[policy]
        assert by(request) == max(by(other) for other in running)
        original(request)
        assert engine.scheduler.waiting == sorted(engine.scheduler.waiting, key=lambda other: other.arrival)

    engine.scheduler.retract = retract  # type: ignore[method-assign]
    visits = [Visit(prompt, SamplingParams(max_new_tokens=30 - i)) for i, prompt in enumerate(prompts)]
    requests, _ = serve(engine, visits)
    assert_as_foretold(SAID, visits, requests)
    assert chosen


# --- coins --------------------------------------------------------------------------------------------------------

WAYS = {
    "plain": None,
    "target_only": SHAPES[2],
    "rejection": replace(SHAPES[1], sampler="rejection"),
    "block": replace(SHAPES[1], sampler="block"),
}
SETTINGS: list[dict[str, Any]] = [
    {"chunk_size": 3},
    {"prefix_cache": True},
    {"prefix_cache": True, "chunk_size": 2},
    {"page_size": 4, "prefix_cache": True, "chunk_size": 5},
]


PROMPTS = [[5, 6, 7, 8, 9, 1, 2, i % 4] for i in range(8)]
PARAMS = [SamplingParams(max_new_tokens=14, temperature=0.0 if i == 5 else 1.0, seed=i) for i in range(8)]


@functools.cache
def cold(way: str) -> list[Generation]:
    """What each prompt gives alone."""
    engine = Engine(TARGET, DRAFT if WAYS[way] else None, WAYS[way])
    return [engine.generate([prompt], param)[0] for prompt, param in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_seed_means_one_output_retracted_cached_or_in_chunks(way: str, settings: dict[str, Any]) -> None:
    """Prompts that share ids, twice each; a greedy one among them."""
    spec = WAYS[way]
    if spec and "page_size" in settings:
        spec = replace(spec, page_size=settings["page_size"])
    engine = Engine(TARGET, DRAFT if spec else None, spec, kv_slots=64, **settings)
    drawn = [Visit(prompt, param, comes=2 * i) for i, (prompt, param) in enumerate(zip(PROMPTS, PARAMS, strict=True))]

    def between(step: int) -> None:
        due = [request for request in engine.scheduler.running.requests if request.retractions < 2]
        if step % 3 == 2 and due:
            engine.scheduler.retract(due[0])

    requests, _ = serve(engine, drawn, between)
    assert engine.stats.retractions >= 8
    assert (engine.stats.cached_tokens > 0) == ("prefix_cache" in settings)
    assert [engine.result(request) for request in requests] == cold(way)
