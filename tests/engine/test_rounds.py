"""What a round costs and what it holds, phase by phase, as the counters and the trace tell it."""

from __future__ import annotations

import itertools

import pytest
import torch
from builders import (
    agreeing_now_and_then,
    assert_all_free,
    candidates_of,
    generate_watched,
    ragged_prompts,
    random_head,
    random_llama,
    random_logits,
    scripted_engine,
)

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardMode
from refspec.kernels import launches
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import RunningBatch
from refspec.trace import Round, TreeRequest

VOCAB = 11
SHAPES = [
    SpecConfig(topk=k, num_steps=steps, num_draft_tokens=n)
    for k, steps, n in [(1, 1, 2), (1, 5, 6), (1, 5, 3), (2, 1, 3), (2, 3, 11), (4, 3, 16), (8, 2, 5)]
]
by_shape = pytest.mark.parametrize("spec", SHAPES, ids=lambda s: f"k={s.topk} S={s.num_steps} N={s.num_draft_tokens}")


def engine_of(spec: SpecConfig, **settings: object) -> Engine:
    """A draft that is right now and then, so that rounds accept all kinds of paths."""
    target = ScriptedModel(random_logits(VOCAB), VOCAB)
    draft = ScriptedModel(agreeing_now_and_then(random_logits(VOCAB), random_logits(VOCAB, salt=5)), VOCAB)
    return Engine(target, draft, spec, **settings)  # type: ignore[arg-type]


def watched_rounds(spec: SpecConfig, batch: int) -> list[Round]:
    budgets = [SamplingParams(max_new_tokens=n) for n in (17, 5, 11)[:batch]]
    _, watcher = generate_watched(engine_of(spec), ragged_prompts(batch, 9, VOCAB), budgets)
    assert len(watcher.rounds) > 2
    return watcher.rounds


def goes_on(request: TreeRequest) -> bool:
    return request.finish_reason is None


@by_shape
@pytest.mark.parametrize("batch", [1, 3])
def test_forwards_of_a_round(spec: SpecConfig, batch: int) -> None:
    """One of the target, S - 1 of the draft's loop, and one extend unless all have finished: S of the draft at most."""
    for round_ in watched_rounds(spec, batch):
        expected = {"target": 1, "draft": spec.num_steps - 1, "extend": int(any(map(goes_on, round_.requests)))}
        assert {name: round_.forwards.get(name, 0) for name in expected} == expected
        assert set(round_.forwards) <= set(expected)


@by_shape
@pytest.mark.parametrize("batch", [1, 3])
def test_the_last_round_has_no_extend(spec: SpecConfig, batch: int) -> None:
    assert "extend" not in watched_rounds(spec, batch)[-1].forwards


@by_shape
def test_candidates_of_a_round(spec: SpecConfig) -> None:
    """k from the first level and k² from every further one; N - 1 of them are kept."""
    for request in (request for round_ in watched_rounds(spec, 3) for request in round_.requests):
        assert len(request.candidates) == candidates_of(spec.topk, spec.num_steps)
        assert len(request.kept) == spec.num_draft_tokens - 1
        assert request.kept == sorted(set(request.kept))


@by_shape
@pytest.mark.parametrize("batch", [1, 3])
def test_draft_slots_are_all_back_before_verify_takes_its_own(spec: SpecConfig, batch: int) -> None:
    for round_ in watched_rounds(spec, batch):
        b = len(round_.requests)
        for request in round_.requests:
            assert len(request.draft_slots) == spec.topk
            assert all(len(branch) == spec.num_steps for branch in request.draft_slots)
            assert len(request.verify_slots) == spec.num_draft_tokens
        reserved = [slot for request in round_.requests for branch in request.draft_slots for slot in branch]
        assert len(set(reserved)) == len(reserved)
        assert round_.slots_taken == {"draft": b * spec.topk * spec.num_steps, "verify": b * spec.num_draft_tokens}
        assert round_.slots_returned.get("draft") == b * spec.topk * spec.num_steps


@by_shape
@pytest.mark.parametrize("batch", [1, 3])
def test_after_commit_only_the_accepted_are_held(spec: SpecConfig, batch: int) -> None:
    for round_ in watched_rounds(spec, batch):
        committed = sum(len(request.committed) for request in round_.requests)
        taken, returned = sum(round_.slots_taken.values()), sum(round_.slots_returned.values())
        assert taken - returned == committed  # the slots of finished requests go back after the round
        assert set(round_.slots_returned) <= {"draft", "commit"}
        for request in round_.requests:
            assert request.kept_slots == [
                request.verify_slots[row] for row in request.accepted_rows[: len(request.committed)]
            ]


@by_shape
def test_verify_and_draft_slots_are_nobody_elses(spec: SpecConfig) -> None:
    """No slot of a round is the dummy, or holds a committed token of any request."""
    held: dict[int, list[int]] = {}
    engine = engine_of(spec)

    def observer(round_: Round) -> None:
        for request in round_.requests:
            used = {slot for branch in request.draft_slots for slot in branch} | set(request.verify_slots)
            assert 0 not in used
            for slots in held.values():
                assert not used & set(slots)
        for request in round_.requests:
            held.setdefault(request.request, []).extend(request.kept_slots)
            if request.finish_reason:
                del held[request.request]

    engine.generate(ragged_prompts(3, 9, VOCAB), [SamplingParams(max_new_tokens=n) for n in (17, 5, 11)], observer)
    assert held == {}


@by_shape
def test_lengths_and_positions_follow_from_what_was_accepted(spec: SpecConfig) -> None:
    """Committed tokens grow by each round's, and the root of the next round sits right behind them."""
    prompts = ragged_prompts(3, 9, VOCAB)
    length = {r: len(prompt) for r, prompt in enumerate(prompts)}
    for round_ in watched_rounds(spec, 3):
        for request in round_.requests:
            assert request.seq_len == request.positions[0] == length[request.request]
            assert max(request.positions) <= request.seq_len + spec.num_steps
            length[request.request] += len(request.committed)


@by_shape
def test_counters_of_a_run_are_the_sums_of_its_rounds(spec: SpecConfig) -> None:
    engine = engine_of(spec)
    generations, watcher = generate_watched(engine, ragged_prompts(3, 9, VOCAB), SamplingParams(max_new_tokens=17))
    stats, rounds = engine.stats, watcher.rounds
    request_rounds = sum(len(round_.requests) for round_ in rounds)
    assert [round_.number for round_ in rounds] == list(range(stats.rounds))
    for name in ("target", "draft", "extend"):
        assert stats.forwards[name] == sum(round_.forwards.get(name, 0) for round_ in rounds)
    assert stats.forwards["prefill_target"] == stats.forwards["prefill_draft"] == 1
    assert stats.request_rounds == request_rounds
    assert stats.drafted_levels == request_rounds * spec.num_steps
    assert stats.candidates == request_rounds * candidates_of(spec.topk, spec.num_steps)
    assert stats.committed_tokens == sum(len(g.token_ids) - 1 for g in generations)
    assert stats.committed_tokens == sum(sum(g.accept_lens) for g in generations)
    operations = set(itertools.chain.from_iterable(round_.launches for round_ in rounds))
    for operation in operations:
        in_rounds = sum(round_.launches.get(operation, 0) for round_ in rounds)
        assert stats.launches[operation] >= in_rounds > 0  # prefill launches some, too


@by_shape
def test_launches_of_a_round(spec: SpecConfig) -> None:
    """One tree, one walk, one entry into the table; the k best of S - 1 draft forwards, of S - 1 later levels, of the
    pool, and of the extend. On a chain of which all is kept: the best of S - 1 draft forwards, and of the extend; its
    tree is made once.
    """
    for round_ in watched_rounds(spec, 3):
        expected = {"verify_tree_greedy": 1, "assign_req_to_token": 1}
        if (spec.topk, spec.num_draft_tokens) == (1, spec.num_steps + 1):
            expected |= {"draft_topk1": spec.num_steps - 1, "stable_topk": 1, "build_chain_tree": round_.number == 0}
        else:
            expected |= {"build_tree": 1, "stable_topk": 2 * (spec.num_steps - 1) + 1 + 1}
        assert round_.launches == {operation: count for operation, count in expected.items() if count}


def test_plain_decoding_costs_one_forward_for_each_token_after_the_first() -> None:
    engine = scripted_engine(random_logits(VOCAB), VOCAB, None)
    (generation,) = engine.generate([[1, 2]], SamplingParams(max_new_tokens=9))
    assert len(generation.token_ids) == 9
    assert engine.stats.forwards == {"prefill_target": 1, "target": 8}
    assert engine.stats.slots_taken == {"prefill": 2, "decode": 8}
    assert generation.accept_lens == [1] * 8
    assert_all_free(engine)


@pytest.mark.parametrize("spec", [None, *SHAPES], ids=str)
def test_batch_that_ends_at_prefill_has_no_round(spec: SpecConfig | None) -> None:
    engine = engine_of(spec) if spec else scripted_engine(random_logits(VOCAB), VOCAB, None)
    generations = engine.generate([[1], [2, 3]], SamplingParams(max_new_tokens=1))
    assert [len(g.token_ids) for g in generations] == [1, 1]
    assert [g.accept_lens for g in generations] == [[], []]
    assert engine.stats.rounds == 0
    assert engine.stats.forwards["target"] == engine.stats.forwards["draft"] == engine.stats.forwards["extend"] == 0
    assert_all_free(engine)


# --- idle ---------------------------------------------------------------------------------------------------------


@by_shape
def test_SEQ_08_idle_batch_passes_through_every_phase(spec: SpecConfig) -> None:
    """Zero rows through draft, tree, verify, commit, extend: right shapes, no forward, no slot, no round counted."""
    target = random_llama()
    engine = Engine(target, random_head(target), spec)
    worker = engine.scheduler.worker
    engine.generate([[1, 2]], SamplingParams(max_new_tokens=3))  # so that counters and pools are not all zero
    forwards, rounds = engine.stats.forwards.copy(), engine.stats.rounds
    pools = [worker.target.pool.buffer.clone(), worker.draft_runner.pool.buffer.clone()]  # type: ignore[attr-defined]
    free, launched = engine.allocator.free_slots.clone(), launches.copy()

    idle = worker.forward(RunningBatch.of([], engine.table.req_to_token), ForwardMode.IDLE)

    assert len(idle) == 0
    assert (idle.rows.shape, idle.seq_lens.shape, idle.bonus_tokens.shape) == ((0,), (0,), (0,))
    assert {idle.rows.dtype, idle.seq_lens.dtype, idle.bonus_tokens.dtype} == {torch.int64}
    draft_input = idle.draft_input
    assert draft_input is not None
    assert draft_input.topk_p.shape == draft_input.topk_index.shape == (0, spec.topk)
    assert (draft_input.topk_p.dtype, draft_input.topk_index.dtype) == (torch.float32, torch.int64)
    assert draft_input.hidden_states.shape == (0, target.config.hidden_size)
    assert draft_input.hidden_states.dtype == torch.float64

    assert (engine.stats.forwards, engine.stats.rounds) == (forwards, rounds)
    assert torch.equal(engine.allocator.free_slots, free)
    assert torch.equal(worker.target.pool.buffer, pools[0])
    assert torch.equal(worker.draft_runner.pool.buffer, pools[1])  # type: ignore[attr-defined]
    # The operations are launched all the same: a rank with requests launches them too, and they must meet.
    expected = {"verify_tree_greedy", "assign_req_to_token", "stable_topk"}
    if (spec.topk, spec.num_draft_tokens) != (1, spec.num_steps + 1):
        expected |= {"build_tree"}
    elif spec.num_steps > 1:
        expected |= {"draft_topk1"}
    assert expected <= set(launches - launched)
    assert_all_free(engine)


@by_shape
def test_SEQ_08_idle_batch_again_and_again(spec: SpecConfig) -> None:
    """An idle rank idles round after round on the batch that it got back, and can take requests afterwards."""
    engine = engine_of(spec)
    before = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=9))
    batch = RunningBatch.of([], engine.table.req_to_token)
    for _ in range(3):
        batch = engine.scheduler.worker.forward(batch, ForwardMode.IDLE)
    after = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=9))
    assert [(g.token_ids, g.accept_lens) for g in after] == [(g.token_ids, g.accept_lens) for g in before]


def test_SEQ_08_idle_plain_batch() -> None:
    engine = scripted_engine(random_logits(VOCAB), VOCAB, None)
    idle = engine.scheduler.worker.forward(RunningBatch.of([], engine.table.req_to_token), ForwardMode.IDLE)
    assert len(idle) == 0
    assert engine.stats.forwards == {}
    assert_all_free(engine)


def test_SEQ_08_round_of_an_idle_rank_is_no_round_to_observe() -> None:
    engine = engine_of(SHAPES[4])
    seen: list[Round] = []
    engine.scheduler.worker.forward(RunningBatch.of([], engine.table.req_to_token), ForwardMode.IDLE, seen.append)
    assert seen == []
    assert engine.stats.rounds == 0
    assert sum(engine.stats.slots_taken.values()) == sum(engine.stats.slots_returned.values()) == 0
