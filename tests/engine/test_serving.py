"""Whoever comes when, in whatever pool: each request says what plain greedy says, and its drafts are what they would be
if it were alone.

Two things are asked of every mix. The output is foretold from the scripted function itself. And the draft loses
nothing: a request that was read in chunks, from the prefix cache, or again after a retraction has just the accept
lengths that it has alone, in one piece and cold; with a draft that equals its target, they are full.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from builders import agreeing_now_and_then, peaked_logits, random_logits
from pairwise import pairwise
from serving import (
    FACTORS,
    VOCAB,
    assert_as_foretold,
    name_of,
    prepared,
    retractor,
    serve,
    settings_of,
    spec_of,
    visits_of,
)

from refspec import Engine
from refspec.models.scripted import ScriptedModel

SAMPLE = pairwise(FACTORS)
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

    alone = prepared(Engine(target, draft, spec_of(row, page=1)), row)
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
