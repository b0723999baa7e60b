"""First come, first served; who is short of slots waits again; nobody who left holds anything."""

from __future__ import annotations

import pytest
from builders import (
    agreeing_now_and_then,
    assert_all_free,
    assert_same_output,
    generate_watched,
    ragged_prompts,
    random_logits,
    scripted_engine,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec import Engine, SamplingParams, SpecConfig
from refspec.memory.allocator import IntegrityError
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import Request

VOCAB = 11
SPEC = SpecConfig(topk=2, num_steps=3, num_draft_tokens=7)  # 7 slots of its own in a round


def engine_of(**settings: int) -> Engine:
    return scripted_engine(random_logits(VOCAB), VOCAB, SPEC, **settings)


def request_of(engine: Engine, index: int = 0, prompt_len: int = 4, budget: int = 8) -> Request:
    return Request(
        index, [1 + index] * prompt_len, SamplingParams(max_new_tokens=budget), frozenset(), engine.max_context
    )


def running(engine: Engine) -> list[int]:
    return [request.index for request in engine.scheduler.running.requests]


def test_a_request_needs_its_prompt_and_a_rounds_own_to_start() -> None:
    assert engine_of().scheduler.slots_to_start(4) == 4 + 7
    assert scripted_engine(random_logits(VOCAB), VOCAB, None).scheduler.slots_to_start(4) == 4 + 1


@pytest.mark.parametrize(("slots", "admitted"), [(11, [0]), (21, [0]), (22, [0, 1]), (32, [0, 1]), (33, [0, 1, 2])])
def test_as_many_are_admitted_as_can_read_their_prompts_and_have_a_round(slots: int, admitted: list[int]) -> None:
    engine = engine_of(kv_slots=slots)
    for index in range(3):
        engine.scheduler.add(request_of(engine, index))
    engine.scheduler.step()
    assert running(engine) == admitted
    assert [request.index for request in engine.scheduler.waiting] == [i for i in range(3) if i not in admitted]


def test_no_more_run_than_may() -> None:
    engine = engine_of(max_running=2)
    for index in range(5):
        engine.scheduler.add(request_of(engine, index))
    engine.scheduler.step()
    assert running(engine) == [0, 1]


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    engine = engine_of(kv_slots=50)
    for index, prompt_len in enumerate((8, 30, 1)):
        engine.scheduler.add(request_of(engine, index, prompt_len, budget=1 if index == 2 else 8))
    engine.scheduler.step()
    assert running(engine) == [0]
    order = []
    while engine.scheduler.waiting or running(engine):
        engine.scheduler.step()
        order += [index for index in running(engine) if index not in order]
    assert order == [0, 1]  # the last one ends at its prefill, after the large one's
    assert_all_free(engine)


def test_one_that_waits_is_prefilled_as_soon_as_there_is_room() -> None:
    engine = engine_of(max_running=2)
    for index, budget in enumerate((2, 30, 30)):
        engine.scheduler.add(request_of(engine, index, budget=budget))
    engine.scheduler.step()  # prefill of 0 and 1
    engine.scheduler.step()  # a round, in which 0 ends
    assert running(engine) == [1]
    engine.scheduler.step()
    assert running(engine) == [1, 2]


def test_step_with_nobody_there_does_nothing() -> None:
    engine = engine_of()
    engine.scheduler.step()
    assert engine.stats.forwards == {}
    assert_all_free(engine)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 15)), min_size=1, max_size=6),
    surplus=st.integers(0, 40),
    max_running=st.integers(1, 4),
    k=st.integers(1, 3),
    steps=st.integers(1, 3),
)
def test_all_get_to_the_end_in_a_pool_that_just_holds_the_largest(
    sizes: list[tuple[int, int]], surplus: int, max_running: int, k: int, steps: int
) -> None:
    """No slot runs out in the middle, no request is left waiting for ever, and the words are plain greedy's."""
    spec = SpecConfig(topk=k, num_steps=steps, num_draft_tokens=min(5, 1 + k + (steps - 1) * k * k))
    target = ScriptedModel(random_logits(VOCAB), VOCAB)
    draft = ScriptedModel(agreeing_now_and_then(random_logits(VOCAB), random_logits(VOCAB, 5)), VOCAB)
    prompts = [[(i + p) % VOCAB for p in range(n)] for i, (n, _) in enumerate(sizes)]
    params = [SamplingParams(max_new_tokens=budget) for _, budget in sizes]
    longest = max(n + budget - 1 for n, budget in sizes)
    largest = max(spec.draft_end(longest), spec.tree_end(longest))
    engine = Engine(target, draft, spec, kv_slots=largest + surplus, max_running=max_running)
    generations, _ = generate_watched(engine, prompts, params)
    assert_same_output(Engine(target).generate(prompts, params), generations)


# --- ending early -------------------------------------------------------------------------------------------------


def test_aborting_one_that_waits() -> None:
    engine = engine_of(max_running=1)
    first, second = request_of(engine, 0), request_of(engine, 1)
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    engine.scheduler.step()
    engine.scheduler.abort(second)
    assert second.finish_reason == "abort"
    assert not engine.scheduler.waiting
    assert running(engine) == [0]
    engine.check()
    engine.scheduler.abort(first)
    assert_all_free(engine)


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_aborting_one_that_runs_does_not_disturb_the_others(leaves: int, rounds: int) -> None:
    engine = engine_of()
    prompts = ragged_prompts(3, 7, VOCAB)
    alone = [engine_of().generate([prompt], SamplingParams(max_new_tokens=30))[0].token_ids for prompt in prompts]
    params = SamplingParams(max_new_tokens=30)
    requests = [Request(i, prompt, params, frozenset(), engine.max_context) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.scheduler.add(request)
    for _ in range(1 + rounds):
        engine.scheduler.step()
    engine.scheduler.abort(requests[leaves])
    engine.check()
    assert leaves not in running(engine)
    while running(engine):
        engine.scheduler.step()
        engine.check()
    for i, request in enumerate(requests):
        if i == leaves:
            assert request.finish_reason == "abort"
            assert request.output_ids == alone[i][: len(request.output_ids)]
        else:
            assert request.output_ids == alone[i]
    assert_all_free(engine)


def test_aborting_one_that_has_finished_changes_nothing() -> None:
    engine = engine_of()
    request = request_of(engine, budget=1)
    engine.scheduler.add(request)
    engine.scheduler.step()
    for _ in range(2):
        engine.scheduler.abort(request)
    assert request.finish_reason == "length"
    assert_all_free(engine)


def test_a_finished_request_holds_nothing() -> None:
    engine = engine_of()
    request, other = request_of(engine, 0, budget=1), request_of(engine, 1)
    engine.scheduler.add(request)
    engine.scheduler.add(other)
    engine.scheduler.step()
    assert (request.row, request.kv_len) == (0, 0)
    assert engine.allocator.available() == engine.allocator.size - other.kv_len
    engine.check()


def test_a_step_that_fails_ends_everybody_running_or_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(max_running=2)
    requests = [request_of(engine, index) for index in range(4)]
    for request in requests:
        engine.scheduler.add(request)
    engine.scheduler.step()
    with monkeypatch.context() as patch:
        patch.setattr("refspec.spec.tree.build_tree", lambda *args, **keywords: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.scheduler.step()
    assert [request.finish_reason for request in requests] == ["abort"] * 4
    assert_all_free(engine)


@pytest.mark.parametrize("fault", ["slot lost", "slot held twice", "slot never taken"])
def test_check_finds_what_does_not_add_up(fault: str) -> None:
    engine = engine_of(kv_slots=40)
    first, second = request_of(engine, 0, budget=3), request_of(engine, 1, budget=3)
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    engine.scheduler.step()
    table = engine.table.req_to_token
    if fault == "slot lost":
        engine.allocator.alloc(1)
    elif fault == "slot held twice":
        table[second.row, 0] = table[first.row, 0]
    else:
        second.kv_len += 1
    with pytest.raises(IntegrityError, match="slot"):
        engine.check()


def test_check_finds_a_row_of_the_table_that_got_lost() -> None:
    engine = engine_of()
    engine.table.alloc()
    with pytest.raises(IntegrityError, match="row"):
        engine.check()


# --- found by tests/serving_model.py ------------------------------------------------------------------------------


@pytest.mark.parametrize("retraction", ["newest", "largest", "least_output"])
def test_a_round_follows_every_retraction(retraction: str) -> None:
    """The one that decodes outgrows the pool while another's prompt is half read. Were it retracted, being the largest,
    nobody would be left to decode, and the step would do nothing.
    """
    engine = scripted_engine(
        random_logits(VOCAB), VOCAB, None, kv_slots=12, max_running=2, chunk_size=1, retraction=retraction
    )
    params = SamplingParams(max_new_tokens=7)
    requests = [engine.add_request(prompt, params) for prompt in ([1, 2, 3, 4], [5, 6, 7, 8, 9, 10])]
    while any(request.finish_reason is None for request in requests):
        before = sum(engine.stats.forwards.values()), engine.stats.rounds, engine.stats.retractions
        engine.step()
        engine.check()
        assert sum(engine.stats.forwards.values()) > before[0]
        assert engine.stats.rounds > before[1] or engine.stats.retractions == before[2]
    assert engine.stats.retractions > 0
    alone = [engine.generate([request.prompt_ids], params)[0].token_ids for request in requests]
    assert [request.output_ids for request in requests] == alone
