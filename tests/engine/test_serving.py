"""Whoever comes when, in whatever pool: each request says what plain greedy says, and its drafts are what they would be
if it were alone.

Two things are asked of every mix. The output is foretold from the scripted function itself. And the draft loses
nothing: a request that was read in chunks, from the prefix cache, or again after a retraction has just the accept
lengths that it has alone, in one piece and cold; with a draft that equals its target, they are full.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from builders import agreeing_now_and_then, candidates_of, naive_stop, peaked_logits, random_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from serving import (
    FACTORS,
    TOKENIZER,
    VOCAB,
    Visit,
    assert_all_back,
    assert_as_foretold,
    foretold,
    name_of,
    prepared,
    retractor,
    serve,
    settings_of,
    slots_alone,
    spec_of,
    visits_of,
)

from refspec import Engine, SamplingParams, SpecConfig
from refspec.engine.scheduler import RETRACTION_POLICIES
from refspec.models.scripted import ScriptedModel

SAMPLE = pairwise(FACTORS)
STREAMED = SpecConfig(topk=2, num_steps=3, num_draft_tokens=7)
by_row = pytest.mark.parametrize("row", SAMPLE, ids=name_of)


def test_every_two_values_meet_in_the_sample() -> None:
    for (a, xs), (b, ys) in itertools.combinations(FACTORS.items(), 2):
        assert {(x, y) for x in xs for y in ys} == {(row[a], row[b]) for row in SAMPLE}


@by_row
def test_output_and_accept_lengths_are_those_of_the_request_alone(row: dict[str, Any]) -> None:
    """The draft is right now and then, so that accepted paths of every length come."""
    said = random_logits(VOCAB)
    target = ScriptedModel(said, VOCAB)
    draft = ScriptedModel(agreeing_now_and_then(said, random_logits(VOCAB, salt=5)), VOCAB)
    spec, visits = spec_of(row), visits_of(row)
    engine = prepared(Engine(target, draft, spec, **settings_of(row, spec, visits)), row)
    requests, _ = serve(engine, visits, retractor(engine, row))
    assert_as_foretold(said, visits, requests)

    alone = prepared(Engine(target, draft, replace(spec_of(row, page=1), algorithm="eagle")), row)
    for visit, request in zip(visits, requests, strict=True):
        (generation,) = alone.generate([visit.prompt], visit.params)
        if request.finish_reason != "abort":
            assert engine.result(request) == generation
        assert request.accept_lens == generation.accept_lens[: len(request.accept_lens)]


@by_row
def test_plain_decoding_in_the_same_mix(row: dict[str, Any]) -> None:
    said, visits = random_logits(VOCAB), visits_of(row)
    engine = prepared(Engine(ScriptedModel(said, VOCAB), **settings_of(row, None, visits)), row)
    requests, _ = serve(engine, visits, retractor(engine, row))
    assert_as_foretold(said, visits, requests)


@by_row
def test_a_draft_that_equals_its_target_is_always_right(row: dict[str, Any]) -> None:
    said, spec, visits = peaked_logits(VOCAB), spec_of(row, exact=True), visits_of(row)
    model = ScriptedModel(said, VOCAB)
    engine = prepared(Engine(model, model, spec, **settings_of(row, spec, visits)), row)
    requests, watcher = serve(engine, visits, retractor(engine, row))
    assert_as_foretold(said, visits, requests)
    assert [r.accepted_rows for r in watcher.requests if len(r.accepted_rows) != spec.num_steps + 1] == []
    for request in requests:
        assert set(request.accept_lens[:-1]) <= {spec.num_steps + 1}  # its end may cut the last block


# --- full batches, streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("k", [1, 2, 16])
def test_thirty_two_at_once(k: int, page: int) -> None:
    """They start together and end one by one; half of them share a prefix with a request that has gone."""
    said, spec = (
        peaked_logits(VOCAB),
        SpecConfig(topk=k, num_steps=2, num_draft_tokens=k + 2, page_size=page, exact_branch_kv=True),
    )
    model = ScriptedModel(said, VOCAB)
    engine = Engine(model, model, spec, prefix_cache=True, kv_slots=32 * 16 * 20, max_running=32)
    engine.generate([list(range(18))], SamplingParams(max_new_tokens=2))
    visits = [
        Visit([*range(17 if i % 2 else 0), i % VOCAB, i // VOCAB], SamplingParams(max_new_tokens=2 + i % 9))
        for i in range(32)
    ]
    requests, watcher = serve(engine, visits)
    assert_as_foretold(said, visits, requests)
    assert max(len(round_.requests) for round_ in watcher.rounds) == 32
    assert engine.stats.cached_tokens >= 16 * 16
    assert {len(r.accepted_rows) for r in watcher.requests} == {spec.num_steps + 1}


@pytest.mark.parametrize(
    "spec",
    [None, STREAMED, replace(STREAMED, page_size=4), replace(STREAMED, algorithm="eagle-v2")],
    ids=["plain", "tree", "pages", "v2"],
)
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("cache", [False, True], ids=["", "cache"])
def test_streams_and_others_in_turn(spec: SpecConfig | None, chunk: int | None, cache: bool) -> None:
    """Streams begin at different times, in a pool that they run out of; one is closed early. Nobody is sent a token
    twice, or one behind a stop.
    """
    said = random_logits(VOCAB)
    draft = ScriptedModel(agreeing_now_and_then(said, random_logits(VOCAB, salt=5)), VOCAB)
    slots = 36 if spec else 24
    engine = Engine(
        ScriptedModel(said, VOCAB), draft if spec else None, spec, kv_slots=slots, chunk_size=chunk, prefix_cache=cache
    )
    engine.tokenizer = TOKENIZER
    endings: list[dict[str, Any]] = [{}, {"stop": ("ab", "e")}, {"stop_token_ids": (3, 8)}, {}]
    visits = [
        Visit([1, 2, 3, 4, 5, i], SamplingParams(max_new_tokens=16, **ending)) for i, ending in enumerate(endings)
    ]
    streams = [engine.stream(visit.prompt, visit.params) for visit in visits]
    other = Visit([9, 9, 1], SamplingParams(max_new_tokens=15))
    request = engine.add_request(other.prompt, other.params)
    sent: list[list[int]] = [[] for _ in streams]
    texts, reasons = [""] * 4, [""] * 4
    for turn in range(200):
        if turn == 6:
            streams[3].close()
            engine.check()
        for i, stream in enumerate(streams[: 1 + turn]):
            block = next(stream, None)
            engine.check()
            if block:
                assert block.token_ids
                sent[i] += block.token_ids
                texts[i] += block.text
                reasons[i] = block.finish_reason or ""
    for i, visit in enumerate(visits[:3]):
        output, reason = foretold(said, visit)
        assert (sent[i], reasons[i]) == (output, reason)
        assert texts[i] == naive_stop(TOKENIZER.decode, output, visit.params.stop)[1]
    assert sent[3] == foretold(said, visits[3])[0][: len(sent[3])]
    assert_as_foretold(said, [other], [request])
    assert engine.stats.retractions > 0
    assert_all_back(engine)


# --- anything -----------------------------------------------------------------------------------------------------

prompts = st.builds(
    lambda shared, own: [*range(shared), *own], st.integers(0, 9), st.lists(st.integers(0, 4), min_size=1, max_size=6)
)
guests = st.builds(
    lambda prompt, budget, comes, stays: Visit(
        prompt, SamplingParams(max_new_tokens=budget), comes, None if stays is None else comes + stays
    ),
    prompts,
    st.integers(1, 20),
    st.integers(0, 12),
    st.none() | st.integers(0, 15),
)


@settings(max_examples=30)
@given(
    visits=st.lists(guests, min_size=1, max_size=6),
    algorithm=st.sampled_from(["eagle", "eagle-v2"]),
    k=st.sampled_from([1, 2, 4, 16]),
    steps=st.integers(1, 3),
    page=st.sampled_from([1, 2, 4, 16]),
    chunk=st.sampled_from([None, 1, 3, 7]),
    cache=st.booleans(),
    policy=st.sampled_from(sorted(RETRACTION_POLICIES)),
    surplus=st.integers(0, 3),
    retracted=st.sets(st.integers(0, 40), max_size=6),
)
def test_any_mix(
    visits: list[Visit],
    algorithm: str,
    k: int,
    steps: int,
    page: int,
    chunk: int | None,
    cache: bool,
    policy: str,
    surplus: int,
    retracted: set[int],
) -> None:
    said = random_logits(VOCAB)
    draft = ScriptedModel(agreeing_now_and_then(said, random_logits(VOCAB, salt=5)), VOCAB)
    nodes = min(steps + 4, candidates_of(k, steps) + 1)
    spec = SpecConfig(algorithm, k, steps, nodes, page)
    slots = (4 + surplus) * slots_alone(spec, page, visits) // 4 // page * page
    engine = Engine(
        ScriptedModel(said, VOCAB),
        draft,
        spec,
        kv_slots=slots,
        chunk_size=chunk,
        prefix_cache=cache,
        retraction=policy,
    )

    def between(step: int) -> None:
        running = engine.scheduler.running.requests
        if step in retracted and running:
            engine.scheduler.retract(running[step % len(running)])
            engine.check()

    requests, _ = serve(engine, visits, between)
    assert_as_foretold(said, visits, requests)
    alone = Engine(ScriptedModel(said, VOCAB), draft, replace(spec, algorithm="eagle", page_size=1))
    for visit, request in zip(visits, requests, strict=True):
        (generation,) = alone.generate([visit.prompt], visit.params)
        assert request.accept_lens == generation.accept_lens[: len(request.accept_lens)]
