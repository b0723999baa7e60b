"""What a watch tells of an engine is what happened there: every event, every count, every page."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from builders import agreeing_now_and_then, random_logits, scripted_engine

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardMode
from refspec.engine.watch import (
    Admitted,
    Arrived,
    Committed,
    Event,
    Evicted,
    Finished,
    Page,
    Read,
    Retracted,
    Waits,
    Watch,
)
from refspec.models.scripted import ScriptedModel

VOCAB = 11
CHAIN = SpecConfig(topk=1, num_steps=2, num_draft_tokens=3)  # a scripted draft is always right: 3 tokens a round


def engine_of(spec: SpecConfig | None = CHAIN, **settings: Any) -> Engine:
    return scripted_engine(random_logits(VOCAB), VOCAB, spec, **settings)


def budget(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens)


def test_one_request_from_its_arrival_to_its_end() -> None:
    engine = engine_of(chunk_size=3)
    watch = Watch(engine)
    request = engine.add_request([1, 2, 3, 4, 5], budget(5))
    assert watch.unfinished == [request]
    assert watch.step() == [Arrived(1, 0, 5), Admitted(1, 0, 0, 5, again=False), Read(1, 0, 3, 2, again=False)]
    assert watch.mode is ForwardMode.EXTEND
    assert watch.step() == [Read(2, 0, 2, 0, again=False), Committed(2, 0, 1, in_round=False)]
    assert watch.step() == [Committed(3, 0, 3, in_round=True)]
    assert watch.mode is ForwardMode.DECODE
    assert watch.step() == [Committed(4, 0, 1, in_round=True), Finished(4, 0, "length", 5, 2)]
    assert watch.unfinished == []
    assert watch.step() == []
    assert (watch.mode, watch.steps) == (None, 5)


def test_one_that_ends_with_its_first_token() -> None:
    engine = engine_of(spec=None)
    watch = Watch(engine)
    engine.add_request([1, 2], budget(1))
    assert watch.step() == [
        Arrived(1, 0, 2),
        Admitted(1, 0, 0, 2, again=False),
        Read(1, 0, 2, 0, again=False),
        Committed(1, 0, 1, in_round=False),
        Finished(1, 0, "length", 1, 0),
    ]


def test_a_cached_prefix_is_told() -> None:
    engine = engine_of(prefix_cache=True)
    watch = Watch(engine)
    engine.add_request([1, 2, 3, 4, 5, 6], budget(4))
    watch.step()
    engine.add_request([1, 2, 3, 4, 9], budget(4))
    assert watch.step()[:3] == [
        Arrived(2, 1, 5),
        Admitted(2, 1, 3, 2, again=False),  # 3 and not 4: the draft's row at the fourth token has seen the fifth
        Read(2, 1, 2, 0, again=False),
    ]
    now = watch.snapshot()
    assert Counter(page.readers for page in now.pages if page.cached) == {(0, 1): 3, (0,): 3, (1,): 2}
    assert (now.cached_slots, now.read_slots, now.found_tokens) == (8, 8, 3)
    assert [state.found_tokens for state in now.requests] == [0, 3]


def test_retracted_and_admitted_again() -> None:
    engine = engine_of(spec=None, kv_slots=12)
    watch = Watch(engine)
    for start in (1, 5):
        engine.add_request([start] * 4, budget(6))
    events = [event for _ in range(20) for event in watch.step()]
    [lost] = [event for event in events if isinstance(event, Retracted)]
    # Two of 4 tokens have 4 free slots between them, which are 2 rounds.
    assert lost == Retracted(4, 1, slots=6, output_tokens=3)
    again = [event for event in events if isinstance(event, Admitted | Read) and event.again]
    assert again == [Admitted(7, 1, 0, 6, again=True), Read(7, 1, 6, 0, again=True)]
    assert [event.request for event in events if isinstance(event, Finished)] == [0, 1]


def test_what_the_cache_gives_up_is_told() -> None:
    engine = engine_of(spec=None, kv_slots=12, prefix_cache=True)
    watch = Watch(engine)
    engine.add_request([1] * 6, budget(2))
    for _ in range(2):
        assert not [event for event in watch.step() if isinstance(event, Evicted)]
    engine.add_request([5] * 6, budget(2))  # 7 slots are the first one's: 5 are free, 7 needed
    assert watch.step()[:2] == [Arrived(3, 1, 6), Evicted(3, 7, (1,))]
    assert watch.snapshot().evicted_tokens == engine.stats.evicted_tokens == 7


def test_why_one_waits_is_told_once() -> None:
    engine = engine_of(spec=None, kv_slots=10)
    watch = Watch(engine)
    for _ in range(3):
        engine.add_request([1] * 4, budget(4))
    told = [event for _ in range(12) for event in watch.step() if isinstance(event, Waits)]
    # Two have 4 tokens each, and need 2 slots for a round; the third would need 4 and a round of 3.
    assert told == [Waits(1, 2, needed_slots=7, room=2, behind=0)]
    assert watch.unfinished == []


def test_a_prefix_that_it_would_find_is_no_room() -> None:
    engine = engine_of(spec=None, kv_slots=16, prefix_cache=True)
    watch = Watch(engine)
    engine.add_request([1] * 5, budget(1))
    watch.step()  # 5 cached slots are left
    for prompt in ([2] * 8, [1] * 9, [3]):
        engine.add_request(prompt, budget(3))
    told = [event for _ in range(9) for event in watch.step() if isinstance(event, Waits)]
    # Of the 11 others 9 are taken, after a round. 4 more tokens to read, and a round of 2.
    assert told == [Waits(3, 2, needed_slots=6, room=2, behind=1)]
    assert [state.found_tokens for state in watch.snapshot().requests] == [0, 0, 5, 0]


def test_a_request_too_large_for_the_pool_and_one_that_is_aborted() -> None:
    engine = engine_of(spec=None, kv_slots=6)
    watch = Watch(engine)
    engine.add_request([1] * 4, budget(9))
    waiting = engine.add_request([2] * 4, budget(9))
    watch.step()
    engine.abort(waiting)
    assert watch.step() == [Committed(2, 0, 1, in_round=True), Finished(2, 1, "abort", 0, 0)]
    watch.step()
    assert watch.step() == [Finished(4, 0, "out_of_slots", 3, 2)]


def test_a_step_of_somebody_else_and_requests_that_were_there() -> None:
    """A watch may come late, and be told of steps that it did not take: it sees their sum."""
    engine = engine_of()
    first = engine.add_request([1, 2, 3], budget(20))
    engine.step()
    engine.step()
    watch = Watch(engine)
    assert watch.unfinished == []
    assert watch.step() == [Arrived(1, 0, 3), Committed(1, 0, 3, in_round=True)]
    assert watch.requests == [first]
    engine.step()
    engine.step()
    assert watch.look() == [Committed(2, 0, 6, in_round=True)]
    assert watch.steps == 2


# --- sums and pages, in every mix -------------------------------------------------------------------------------------


def mix(spec: SpecConfig | None, page_size: int, cache: bool, chunk: int | None, retraction: str) -> Watch:
    """Requests of all sizes, half of them alike, on a pool that holds two or three of them."""
    target = ScriptedModel(random_logits(VOCAB), VOCAB)
    draft = ScriptedModel(agreeing_now_and_then(random_logits(VOCAB), random_logits(VOCAB, 5)), VOCAB)
    return Watch(
        Engine(
            target,
            draft if spec else None,
            spec,
            kv_slots=96,
            page_size=page_size,
            prefix_cache=cache,
            chunk_size=chunk,
            retraction=retraction,
        )
    )


PROMPTS = [[7] * 9 + [p] * (1 + 3 * (p % 3)) if p % 2 else [p] * (3 + p) for p in range(10)]


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("k", "retraction", "algorithm"),
    [
        (None, "newest", "eagle"),
        (1, "largest", "eagle"),
        (2, "least_output", "eagle"),
        (2, "newest", "eagle"),
        (2, "newest", "eagle-v2"),
    ],
)
def test_events_add_up_and_pages_are_the_pools(
    k: int | None, page_size: int, cache: bool, chunk: int | None, retraction: str, algorithm: str
) -> None:
    spec = SpecConfig(algorithm, k, num_steps=2, num_draft_tokens=3, page_size=page_size) if k else None
    watch = mix(spec, page_size, cache, chunk, retraction)
    engine, events = watch.engine, list[Event]()
    for p, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, budget(20 + p))
    requests = list(watch.unfinished)
    while watch.unfinished:
        events += watch.step()
        check_snapshot(watch)
    assert watch.requests == requests
    assert engine.stats.retractions > 0
    assert (cache and chunk) or any(isinstance(event, Waits) for event in events)

    tokens: Counter[int] = Counter()
    rounds: Counter[int] = Counter()
    read: Counter[int] = Counter()
    reading: dict[int, int] = {}  # what each has still to read
    waits: dict[int, bool] = {}
    lost: dict[int, bool] = defaultdict(bool)  # whether it was retracted
    ended: dict[int, Finished] = {}
    for event in events:
        match event:
            case Arrived(request=r, prompt_tokens=n):
                assert n == len(PROMPTS[r])
                waits[r] = True
            case Admitted(request=r, tokens_to_read=n, found_tokens=found, again=again):
                assert waits[r]
                assert again == lost[r]
                assert found + n == len(PROMPTS[r]) + max(0, tokens[r] - 1)
                assert found == 0 or cache
                waits[r], reading[r] = False, n
            case Waits(request=r, needed_slots=n, room=room):
                assert waits[r]
                assert n > room
            case Read(request=r, tokens=n, unread=left):
                assert chunk is None or n <= chunk
                assert reading[r] == n + left
                reading[r] = left
                read[r] += n
            case Committed(request=r, tokens=n, in_round=in_round):
                assert not waits[r]
                assert not reading[r]
                assert in_round == (tokens[r] > 0)
                tokens[r] += n
                rounds[r] += in_round
            case Retracted(request=r, output_tokens=n, slots=slots):
                assert not waits[r]
                assert n == tokens[r]
                lost[r] = True
                assert slots > 0 or cache  # else it may all be in the cache already
                waits[r] = True
            case Finished(request=r, reason=reason, output_tokens=n, rounds=m):
                assert (reason, n, m) == (requests[r].finish_reason, tokens[r], rounds[r])
                ended[r] = event
    assert sorted(ended) == list(range(len(PROMPTS)))
    assert [tokens[r] for r in range(len(PROMPTS))] == [len(request.output_ids) for request in requests]
    stats = engine.stats
    assert sum(isinstance(e, Retracted) for e in events) == stats.retractions
    assert sum(e.found_tokens for e in events if isinstance(e, Admitted)) == stats.cached_tokens
    assert sum(e.slots for e in events if isinstance(e, Evicted)) == stats.evicted_tokens
    assert (stats.cached_tokens > 0) == cache
    now = watch.snapshot()
    assert (now.retractions, now.found_tokens, now.evicted_tokens) == (
        stats.retractions,
        stats.cached_tokens,
        stats.evicted_tokens,
    )
    assert (now.rounds, now.committed_tokens) == (stats.rounds, stats.committed_tokens)
    assert now.committed_tokens == sum(tokens.values()) - len(PROMPTS)


def check_snapshot(watch: Watch) -> None:
    """Its pages are those that the engine's own check finds, page by page."""
    engine, now = watch.engine, watch.snapshot()
    engine.check()
    size = now.page_size
    assert now.slots == engine.allocator.size
    free = {int(page) - 1 for page in engine.allocator.free_pages}
    assert free == {p for p, page in enumerate(now.pages) if page == Page()}
    assert now.free_slots == len(free) * size
    assert now.held_slots == size * sum(page.holder is not None for page in now.pages)
    assert now.cached_slots == size * sum(page.cached for page in now.pages)
    assert now.read_slots == size * sum(bool(page.readers) for page in now.pages)
    for number, (state, request) in enumerate(zip(now.requests, watch.requests, strict=True)):
        own = sum(page.holder == number for page in now.pages) * size
        shared = sum(number in page.readers for page in now.pages) * size
        assert shared == request.cached_len
        assert own == -(-(request.held_len - request.cached_len) // size) * size
        assert state.output_ids == tuple(request.output_ids)
        where = {"waiting": request in engine.scheduler.waiting, "done": request.finish_reason is not None}
        where["reading"] = request is engine.scheduler.chunked
        where["running"] = request in engine.scheduler.running.requests
        assert [name for name, true in where.items() if true] == [state.state]
        if state.state == "reading":
            assert state.tokens_to_read - state.read_tokens == request.unread_len > 0


def test_events_are_plain_data() -> None:
    assert Retracted(3, 1, 6, 2).as_dict() == {
        "event": "retracted",
        "step": 3,
        "request": 1,
        "slots": 6,
        "output_tokens": 2,
    }
