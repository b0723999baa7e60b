"""What a round reserves, and what happens when the pool does not have it."""

from __future__ import annotations

from typing import Any

import pytest
from builders import (
    agreeing_now_and_then,
    random_logits,
)
from kv_contents import worker_of
from serving import VOCAB, Visit, assert_all_back, assert_as_foretold, serve, step_until
from torch import Tensor

from refspec import Engine, SamplingParams, SpecConfig
from refspec.models.scripted import ScriptedModel

SAID = random_logits(VOCAB)
TARGET = ScriptedModel(SAID, VOCAB)
DRAFT = ScriptedModel(agreeing_now_and_then(SAID, random_logits(VOCAB, salt=5)), VOCAB)
CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
TREE = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, exact_branch_kv=True)


@pytest.mark.parametrize("cache", [False, True], ids=["", "cache"])
@pytest.mark.parametrize("page", [1, 2, 4])
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "chain"])
def test_MEM_09_one_request_fills_the_pool(speculative: bool, page: int, cache: bool) -> None:
    """It ends with an error of its own, keeps the tokens that it has, and the next one is served."""
    spec = SpecConfig(topk=1, num_steps=2, num_draft_tokens=3, page_size=page) if speculative else None
    settings: dict[str, Any] = {"kv_slots": 16, "page_size": page, "prefix_cache": cache}
    engine = Engine(TARGET, DRAFT if spec else None, spec, **settings)
    big = engine.add_request(list(range(10)), SamplingParams(max_new_tokens=20))
    small = engine.add_request([3, 1], SamplingParams(max_new_tokens=4))
    step_until(engine, lambda: big.finish_reason is not None)
    assert big.finish_reason == "out_of_slots"
    text = Engine(TARGET).generate([list(range(10))], SamplingParams(max_new_tokens=20))[0].token_ids
    assert 0 < len(big.output_ids) < 20
    assert big.output_ids == text[: len(big.output_ids)]
    assert big.output_ids == engine.result(big).token_ids
    # It ended only when not even the slots of one more round were to be had.
    kv_len = 10 + len(big.output_ids) - 1
    assert kv_len + (3 if spec else 1) > 16 - (page - 1)
    assert (big.row, big.kv_len) == (0, 0)
    held = engine.scheduler.cache.evictable_size if engine.scheduler.cache else 0
    assert engine.allocator.available() + held + small.kv_len - small.cached_len >= 16 - (page - 1)
    step_until(engine, lambda: small.finish_reason is not None)
    assert (small.output_ids, small.finish_reason) == (
        Engine(TARGET).generate([[3, 1]], SamplingParams(max_new_tokens=4))[0].token_ids,
        "length",
    )
    assert_all_back(engine)


def test_MEM_09_a_retracted_request_that_can_never_come_back_ends_too() -> None:
    """Two fill the pool; the younger one goes, and when its turn comes again the pool is too small for it alone."""
    engine = Engine(TARGET, kv_slots=16)
    visits = [Visit(list(range(n)), SamplingParams(max_new_tokens=20)) for n in (7, 6)]
    requests, _ = serve(engine, visits)
    text = [Engine(TARGET).generate([visit.prompt], visit.params)[0].token_ids for visit in visits]
    assert [request.finish_reason for request in requests] == ["out_of_slots"] * 2
    assert [request.output_ids for request in requests] == [text[0][:10], text[1][:11]]
    assert requests[1].retractions == 1


@pytest.mark.parametrize("spec", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("cache", [False, True], ids=["", "cache"])
def test_FIN_07_fifty_requests_with_a_budget_of_one_in_a_tiny_pool(
    spec: SpecConfig | None, chunk: int | None, cache: bool
) -> None:
    """They end at prefill, whichever chunk it ends with, and make room for the next ones. Nothing is ever verified."""
    engine = Engine(
        TARGET, DRAFT if spec else None, spec, kv_slots=14, max_running=4, chunk_size=chunk, prefix_cache=cache
    )
    visits = [Visit([i % 7, *range(1 + i % 5)], SamplingParams(max_new_tokens=1)) for i in range(50)]
    requests, _ = serve(engine, visits)
    assert_as_foretold(SAID, visits, requests)
    assert {request.finish_reason for request in requests} == {"length"}
    assert engine.stats.rounds == engine.stats.forwards["target"] == engine.stats.retractions == 0


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("spec", [CHAIN, TREE, SpecConfig(topk=4, num_steps=3, num_draft_tokens=20)], ids=str)
def test_MEM_15_the_reserve_is_what_a_round_takes_and_not_twice_that(spec: SpecConfig, page: int) -> None:
    """Read before each round of two requests. Slots of draft and tree are never taken at one time."""
    spec = SpecConfig(**{**vars(spec), "page_size": page})
    engine = Engine(TARGET, DRAFT, spec)
    worker, allocator = worker_of(engine), engine.allocator
    lowest: list[int] = []
    take = allocator._take

    def taking(pages: int) -> Tensor:
        slots = take(pages)
        lowest.append(allocator.available())
        return slots

    allocator._take = taking  # type: ignore[method-assign]
    requests = [engine.add_request([1, 2, 3, 4, 5, i], SamplingParams(max_new_tokens=20)) for i in range(2)]
    engine.step()
    seen = 0
    while any(request.finish_reason is None for request in requests):
        kv_lens, before = engine.scheduler.running.prefix_lens, allocator.available()
        lowest.clear()
        engine.step()
        assert worker.slots_for_round(kv_lens) == before - min(lowest, default=before)
        if page == 1:
            one = max(spec.topk * spec.num_steps, spec.num_draft_tokens)
            assert worker.slots_for_round(kv_lens) == one * len(kv_lens)
        seen += 1
    assert seen > 4
    assert_all_back(engine)


def test_MEM_15_a_cached_prefix_survives_where_there_is_room() -> None:
    """21 cached tokens, two requests with rounds of 4: in 21 + 2 x (6 + 12 - 1 + 4) slots nothing is evicted."""
    shared, params = list(range(10)) * 2, SamplingParams(max_new_tokens=12)
    room = 21 + 2 * (6 + 12 - 1 + CHAIN.num_draft_tokens)
    for slots, evicted in ((room, False), (room - 12, True)):
        engine = Engine(TARGET, DRAFT, CHAIN, kv_slots=slots, prefix_cache=True)
        engine.generate([[*shared, 3]], SamplingParams(max_new_tokens=1))  # ends at its prefill: no draft row, no cache
        assert engine.scheduler.cache is not None
        assert engine.scheduler.cache.evictable_size == 0
        engine.generate([[*shared, 3]], SamplingParams(max_new_tokens=2))
        assert engine.scheduler.cache.evictable_size == 21
        engine.generate([[7, 7, 7, 7, 7, 7], [8, 8, 8, 8, 8, 8]], params)
        assert (engine.stats.evicted_tokens > 0) == evicted
        before = engine.stats.cached_tokens
        engine.generate([[*shared, 3, 5]], params)
        assert engine.stats.cached_tokens - before == (0 if evicted else 20)
        assert_all_back(engine)


# --- nothing is left behind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_MEM_01_the_pool_is_full_again_after_every_request(spec: SpecConfig) -> None:
    """Page 4, pool 64: prompt 5, 3 new tokens, twenty times."""
    engine = Engine(TARGET, DRAFT, SpecConfig(**{**vars(spec), "page_size": 4}), kv_slots=64)
    for i in range(20):
        engine.generate([[1, 2, 3, 4, i % VOCAB]], SamplingParams(max_new_tokens=3), lambda round_: engine.check())
        assert engine.allocator.available() == 64
    assert_all_back(engine)


@pytest.mark.parametrize("way", ["finish", "retract", "abort"])
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_MEM_02_three_ways_to_leave(spec: SpecConfig, way: str) -> None:
    """Page 4, prompt 6, a round or two behind it: every page comes back, and once, however the request leaves."""
    engine = Engine(TARGET, DRAFT, SpecConfig(**{**vars(spec), "page_size": 4}), kv_slots=64)
    request = engine.add_request([1, 2, 3, 4, 5, 6], SamplingParams(max_new_tokens=8))
    step_until(engine, lambda: len(request.output_ids) > 1)
    assert engine.allocator.available() == 64 - -(-request.kv_len // 4) * 4
    if way == "retract":
        engine.scheduler.retract(request)
    elif way == "abort":
        engine.abort(request)
    else:
        step_until(engine, lambda: request.finish_reason is not None)
    engine.check()
    assert engine.allocator.available() == 64
    step_until(engine, lambda: request.finish_reason is not None)
    assert_all_back(engine)
