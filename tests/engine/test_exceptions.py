"""Whatever fails in the middle of a step, the pool is sound afterwards, and the engine goes on as if it had not."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from builders import (
    agreeing_now_and_then,
    assert_all_free,
    ragged_prompts,
    random_logits,
)

import refspec.spec.commit
import refspec.spec.tree
import refspec.spec.verify
import refspec.workers.plain
from refspec import Engine, SamplingParams, SpecConfig
from refspec.engine.scheduler import Scheduler
from refspec.models.scripted import ScriptedModel
from refspec.runtime.runner import ModelRunner
from refspec.trace import Round

VOCAB = 11
SPEC = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6)
PROMPTS = ragged_prompts(3, 9, VOCAB)
PARAMS = [SamplingParams(max_new_tokens=n) for n in (30, 4, 25)]

Patch = pytest.MonkeyPatch


class Failure(RuntimeError):
    """What the tests throw."""


def engine_of(spec: SpecConfig | None = SPEC, **settings: int) -> Engine:
    target = ScriptedModel(random_logits(VOCAB), VOCAB)
    draft = ScriptedModel(agreeing_now_and_then(random_logits(VOCAB), random_logits(VOCAB, salt=5)), VOCAB)
    return Engine(target, draft if spec else None, spec, **settings)


def fail_at_call(patch: Patch, owner: object, name: str, count: int, error: type[BaseException]) -> None:
    """The function works, but for its count-th call."""
    original, calls = getattr(owner, name), 0

    def function(*args, **keywords):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == count:
            raise error("on purpose")
        return original(*args, **keywords)

    patch.setattr(owner, name, function)


def fail_in_forward(phase: str) -> Callable[[Patch, int, type[BaseException]], None]:
    """The model fails in the count-th forward of a phase: slots have been taken by then."""

    def fail(patch: Patch, count: int, error: type[BaseException]) -> None:
        original, calls = ModelRunner.forward, 0

        def forward(self, batch, phase, logits_rows=None):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += phase == wanted
            if phase == wanted and calls == count:
                raise error("on purpose")
            return original(self, batch, phase, logits_rows)

        patch.setattr(ModelRunner, "forward", forward)

    wanted = phase
    return fail


def fail_in(owner: object, name: str) -> Callable[[Patch, int, type[BaseException]], None]:
    return lambda patch, count, error: fail_at_call(patch, owner, name, count, error)


FAILURES = {
    "draft forward": fail_in_forward("draft"),
    "tree": fail_in(refspec.spec.tree, "build_tree"),
    "verify forward": fail_in_forward("target"),
    "walk": fail_in(refspec.spec.verify, "verify_tree_greedy"),
    "commit before some tokens": fail_in(refspec.spec.commit, "append_tokens"),
    "commit after the frees": fail_in(refspec.spec.commit, "assign_req_to_token"),
    "extend forward": fail_in_forward("extend"),
}


def assert_works_as_new(engine: Engine) -> None:
    """Same words, same number of rounds, nothing left behind."""
    assert_all_free(engine)
    fresh = engine_of(engine.spec).generate(PROMPTS, PARAMS)
    again = engine.generate(PROMPTS, PARAMS)
    assert [(g.token_ids, g.accept_lens, g.finish_reason) for g in again] == [
        (g.token_ids, g.accept_lens, g.finish_reason) for g in fresh
    ]
    assert_all_free(engine)


@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("phase", FAILURES)
def test_failure_in_a_round(phase: str, count: int, error: type[BaseException]) -> None:
    engine = engine_of()
    with pytest.MonkeyPatch.context() as patch:
        FAILURES[phase](patch, count, error)
        with pytest.raises(error, match="on purpose"):
            engine.generate(PROMPTS, PARAMS)
    assert_works_as_new(engine)


@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
@pytest.mark.parametrize("phase", FAILURES)
def test_failure_while_others_wait(phase: str, error: type[BaseException]) -> None:
    engine = engine_of(max_running=2)
    with pytest.MonkeyPatch.context() as patch:
        FAILURES[phase](patch, 2, error)
        with pytest.raises(error, match="on purpose"):
            engine.generate(PROMPTS, PARAMS)
    assert_works_as_new(engine)


@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("phase", ["prefill_target", "prefill_draft"])
def test_failure_in_prefill(phase: str, count: int, error: type[BaseException]) -> None:
    """The second prefill happens while another request runs."""
    engine = engine_of(max_running=2)
    with pytest.MonkeyPatch.context() as patch:
        fail_in_forward(phase)(patch, count, error)
        with pytest.raises(error, match="on purpose"):
            engine.generate(PROMPTS, PARAMS)
    assert_works_as_new(engine)


@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
@pytest.mark.parametrize("at_round", [0, 1, 5])
def test_failure_in_the_observer(at_round: int, error: type[BaseException]) -> None:
    engine = engine_of()

    def observer(round_: Round) -> None:
        engine.check()
        if round_.number == at_round:
            raise error("on purpose")

    with pytest.raises(error, match="on purpose"):
        engine.generate(PROMPTS, PARAMS, observer)
    assert_works_as_new(engine)


@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["forward", "assign_req_to_token", "append_tokens"])
def test_failure_in_plain_decoding(step: str, error: type[BaseException], monkeypatch: Patch) -> None:
    engine = engine_of(None)
    with pytest.MonkeyPatch.context() as patch:
        fail = fail_in_forward("target") if step == "forward" else fail_in(refspec.workers.plain, step)
        fail(patch, 2, error)
        with pytest.raises(error, match="on purpose"):
            engine.generate(PROMPTS, PARAMS)
    assert_works_as_new(engine)


@pytest.mark.parametrize("phase", FAILURES)
def test_failure_while_a_stream_is_read(phase: str) -> None:
    engine = engine_of()
    stream = engine.stream(PROMPTS[0], PARAMS[0])
    next(stream)
    with pytest.MonkeyPatch.context() as patch:
        FAILURES[phase](patch, 2, Failure)
        with pytest.raises(Failure):
            list(stream)
    assert list(stream) == []  # a generator that has raised is done
    assert_works_as_new(engine)


def test_stream_that_another_run_took_down_does_not_just_end() -> None:
    """A failing step ends every request. The reader of an open stream must not take that for the end of the text."""
    engine = engine_of()
    stream = engine.stream(PROMPTS[0], PARAMS[0])
    blocks = [next(stream)]
    with pytest.MonkeyPatch.context() as patch:
        FAILURES["draft forward"](patch, 1, Failure)
        with pytest.raises(Failure):
            engine.generate(PROMPTS[1:], PARAMS[1:])
    try:
        blocks += list(stream)
    except RuntimeError:
        return  # said loudly
    assert blocks[-1].finish_reason == "abort"


def test_failures_one_after_the_other_leak_nothing() -> None:
    """Many failures, each in another phase, in a pool with little room: a single lost slot would stop the engine."""
    longest = max(len(p) + q.max_new_tokens - 1 for p, q in zip(PROMPTS, PARAMS, strict=True))
    needed = max(SPEC.draft_end(longest), SPEC.tree_end(longest))
    engine = engine_of(kv_slots=needed)
    for phase, fail in list(FAILURES.items()) * 2:
        with pytest.MonkeyPatch.context() as patch:
            fail(patch, 2, Failure)
            with pytest.raises(Failure):
                engine.generate(PROMPTS, PARAMS)
        assert engine.allocator.available() == needed, phase
    assert_works_as_new(engine)


def test_counters_of_slots_add_up_after_a_failure() -> None:
    """What the allocator took and got back over its life is what it holds: nothing, once all is over."""
    engine = engine_of()
    with pytest.MonkeyPatch.context() as patch:
        FAILURES["commit after the frees"](patch, 2, Failure)
        with pytest.raises(Failure):
            engine.generate(PROMPTS, PARAMS)
    assert engine.allocator.taken == engine.allocator.returned


# --- an observer that does more than observe ----------------------------------------------------------------------


def refused_or_done(call: Callable[[], object]) -> None:
    """In the middle of a round the engine may refuse, with a RuntimeError; what it may not do is to break."""
    with contextlib.suppress(RuntimeError):
        call()


def test_observer_that_generates() -> None:
    engine = engine_of()
    refused_or_done(lambda: engine.generate(PROMPTS, PARAMS, lambda round_: engine.generate([[1]], PARAMS[:1])))
    assert_works_as_new(engine)


def test_observer_that_reads_a_stream() -> None:
    engine = engine_of()
    stream = engine.stream(PROMPTS[0], PARAMS[0])
    next(stream)
    refused_or_done(lambda: engine.generate(PROMPTS[1:], PARAMS[1:], lambda round_: next(stream, None)))
    stream.close()  # type: ignore[attr-defined]
    assert_works_as_new(engine)


def test_observer_that_closes_a_stream() -> None:
    engine = engine_of()
    stream = engine.stream(PROMPTS[0], PARAMS[0])
    next(stream)
    refused_or_done(lambda: engine.generate(PROMPTS[1:], PARAMS[1:], lambda round_: stream.close()))  # type: ignore[attr-defined]
    stream.close()  # type: ignore[attr-defined]
    assert_works_as_new(engine)


# --- streams that end early ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [None, SPEC], ids=["plain", "eagle"])
@pytest.mark.parametrize("blocks_read", [1, 2, 4])
def test_closing_a_stream_early(spec: SpecConfig | None, blocks_read: int) -> None:
    engine = engine_of(spec)
    stream = engine.stream(PROMPTS[0], PARAMS[0])
    for _ in range(blocks_read):
        assert next(stream).finish_reason is None
    assert engine.allocator.available() < engine.allocator.size
    stream.close()  # type: ignore[attr-defined]
    assert_works_as_new(engine)


def test_leaving_a_loop_over_a_stream() -> None:
    engine = engine_of()
    for _ in engine.stream(PROMPTS[0], PARAMS[0]):
        break
    assert_works_as_new(engine)


def test_stream_that_nobody_reads_holds_nothing() -> None:
    engine = engine_of()
    stream = engine.stream(PROMPTS[0], PARAMS[0])
    assert_all_free(engine)
    del stream
    assert_works_as_new(engine)


def test_stream_left_open_until_the_interpreter_exits() -> None:
    """What is left open is closed while modules are being taken down; that must not end in a crash."""
    script = """
from refspec import Engine, SamplingParams, SpecConfig
from refspec.engine.scheduler import Scheduler
from refspec.models.scripted import ScriptedModel

model = ScriptedModel(lambda context: [float(len(context) % 5 == token) for token in range(5)], 5)
stream = Engine(model, model, SpecConfig()).stream([1, 2], SamplingParams(max_new_tokens=30))
print(next(stream).token_ids)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[2]\n", "")


def test_closing_a_stream_while_another_is_open() -> None:
    """The one that stays says what it would have said alone."""
    engine = engine_of()
    (alone,) = engine_of().generate(PROMPTS[:1], PARAMS[:1])
    stays, leaves = engine.stream(PROMPTS[0], PARAMS[0]), engine.stream(PROMPTS[2], PARAMS[2])
    tokens = [*next(stays).token_ids]
    next(leaves)
    tokens += next(stays).token_ids
    leaves.close()  # type: ignore[attr-defined]
    engine.check()
    for block in stays:
        tokens += block.token_ids
        engine.check()
    assert tokens == alone.token_ids
    assert_works_as_new(engine)


def test_generating_while_a_stream_is_open() -> None:
    engine = engine_of()
    (alone,) = engine_of().generate(PROMPTS[:1], PARAMS[:1])
    stream = engine.stream(PROMPTS[0], PARAMS[0])
    tokens = [*next(stream).token_ids]
    beside = engine.generate(PROMPTS[1:], PARAMS[1:])
    engine.check()
    assert [g.token_ids for g in beside] == [g.token_ids for g in engine_of().generate(PROMPTS[1:], PARAMS[1:])]
    tokens += [token for block in stream for token in block.token_ids]
    assert tokens == alone.token_ids
    assert_works_as_new(engine)


def test_trace_of_a_run_beside_an_open_stream_tells_its_requests_apart() -> None:
    """TreeRequest.request says which prompt of the run; the stream's is none of them."""
    engine = engine_of()
    stream = engine.stream(PROMPTS[0], PARAMS[0])
    next(stream)
    seen: list[list[int]] = []
    engine.generate(PROMPTS[1:2], PARAMS[1:2], lambda round_: seen.append([r.request for r in round_.requests]))
    assert seen
    for requests in seen:
        assert len(set(requests)) == len(requests)
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("spec", [None, SPEC], ids=["plain", "eagle"])
def test_a_failing_steps_tokens_are_taken_back(spec: SpecConfig | None) -> None:
    """Whoever gets tokens, or even its end, in a step that fails, stands where it stood before it."""
    engine = engine_of(spec)
    params = [SamplingParams(max_new_tokens=budget, logprobs=1) for budget in (3, 30)]
    requests = [engine.add_request(prompt, p) for prompt, p in zip(PROMPTS, params, strict=False)]
    engine.step()
    with pytest.MonkeyPatch.context() as patch:
        fail_in(refspec.spec.commit if spec else refspec.workers.plain, "append_logprobs")(patch, 1, Failure)
        with pytest.raises(Failure):
            engine.step()
    for request in requests:
        result = engine.result(request)
        assert result.finish_reason == "abort"
        assert len(result.token_ids) == len(result.logprobs or ()) == 1 + sum(result.accept_lens) == 1
    assert_works_as_new(engine)


def test_an_interrupt_between_launch_and_look_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C may come where nothing is undone on the way: here just before the last round's results are looked at."""
    model = ScriptedModel(lambda context: [1.0, 0.0, 0.0], 3)
    engine = Engine(model, model, SpecConfig("eagle-v2", topk=1, num_steps=2, num_draft_tokens=3))
    requests = [engine.add_request([1, 2], SamplingParams(max_new_tokens=20)) for _ in range(3)]
    for _ in range(3):
        engine.step()

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_look_at", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.check()
    assert engine.allocator.available() == engine.allocator.size
    assert [request.finish_reason for request in requests] == ["abort"] * 3
    assert len(engine.generate([[1]], SamplingParams(max_new_tokens=5))[0].token_ids) == 5
