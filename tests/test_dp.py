"""Ranks in step: as threads, where every collective of every rank is looked at, and as processes, as users run them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import psutil
import pytest
import torch
from builders import assert_all_free, hash_of, llama_config, random_head, random_llama
from dp_engines import FATAL, VOCAB, scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import command, environment, run

from refspec import Engine, Generation, SamplingParams, SpecConfig
from refspec.contracts import ForwardMode
from refspec.engine import dp, ranks
from refspec.engine.compare import Difference
from refspec.engine.dp import Gather, LostPeers, Peers, Place, SharedHead, Step, generate_in_step, in_step
from refspec.engine.ranks import Hang, RankFailed, RankReport, run_ranks
from refspec.models.scripted import ScriptedModel

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
SPEC = SpecConfig(topk=2, num_steps=3, num_draft_tokens=7)
SHAPES = [None, SpecConfig(topk=1, num_steps=1, num_draft_tokens=2), SPEC, replace(SPEC, page_size=4)]
by_shape = pytest.mark.parametrize(
    "spec", SHAPES, ids=lambda s: f"k={s.topk} S={s.num_steps} page={s.page_size}" if s else "plain"
)


# --- ranks as threads -------------------------------------------------------------------------------------------------


class Meeting:
    """A collective of threads. It fails if they come with tensors that do not fit, or do not all come."""

    def __init__(self, size: int, patience: float) -> None:
        self.brought: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = Barrier(size, timeout=patience)

    def of(self, rank: int) -> Gather:
        def gather(mine: torch.Tensor) -> list[torch.Tensor]:
            self.brought[rank] = mine
            self.barrier.wait()
            theirs = list(self.brought)
            self.barrier.wait()
            assert len({(tensor.shape, tensor.dtype) for tensor in theirs}) == 1
            return theirs

        return gather


@dataclass
class Run:
    generations: list[list[Generation]]
    places: list[list[Place]]  # of each rank, the collectives in its order
    steps: list[list[Step]]


def in_threads(
    engines: Sequence[Engine],
    prompts: Sequence[list[list[int]]],
    params: Sequence[list[SamplingParams]],
    skip_idle: bool = False,
    patience: float = 30,
) -> Run:
    """Raises BrokenBarrierError if they hang."""
    size = len(engines)
    agreement, layers = Meeting(size, patience), Meeting(size, patience)
    ran = Run([], [[] for _ in engines], [[] for _ in engines])

    def serve(rank: int) -> list[Generation]:
        def report(event: str, place: Place) -> None:
            if event == "waits":
                ran.places[rank].append(place)

        peers = Peers(rank, size, agreement.of(rank), layers.of(rank), report, skip_idle)
        return generate_in_step(engines[rank], peers, prompts[rank], params[rank], ran.steps[rank].append)

    with ThreadPoolExecutor(size) as pool:
        ran.generations = list(pool.map(serve, range(size)))
    return ran


def prompts_of(counts: Sequence[int]) -> list[list[list[int]]]:
    return [
        [[hash_of([rank, i, p]) % VOCAB for p in range(1 + (rank + 2 * i) % 4)] for i in range(count)]
        for rank, count in enumerate(counts)
    ]


def budgets_of(*budgets: Sequence[int]) -> list[list[SamplingParams]]:
    return [[SamplingParams(max_new_tokens=n) for n in theirs] for theirs in budgets]


def assert_in_step(ran: Run) -> None:
    """All ranks have come to the same collectives, in the same order, and know the same of every step."""
    for places, steps in zip(ran.places, ran.steps, strict=True):
        assert places == ran.places[0]
        assert steps == ran.steps[0]


def served(
    spec: SpecConfig | None, prompts: Sequence[list[list[int]]], params: Sequence[list[SamplingParams]], **more: int
) -> tuple[Run, list[Engine]]:
    """In step, with the outputs of each rank alone, and nothing held afterwards."""
    engines = [scripted("cpu", spec, **more) for _ in prompts]
    alone = [engine.generate(theirs, budgets) for engine, theirs, budgets in zip(engines, prompts, params, strict=True)]
    ran = in_threads(engines, prompts, params)
    assert_in_step(ran)
    assert ran.generations == alone  # texts, tokens, reasons, and accept lengths: the draft saw the same, too
    for engine in engines:
        assert_all_free(engine)
    return ran, engines


@by_shape
def test_ranks_with_no_one_and_many_requests(spec: SpecConfig | None) -> None:
    ran, _ = served(spec, prompts_of([0, 1, 5]), budgets_of([], [9], [12, 3, 7, 12, 1]), max_running=2)
    steps = ran.steps[0]
    assert all(step.batch_sizes[0] == 0 for step in steps)
    assert sum(step.mode is EXTEND and step.batch_sizes[1] > 0 for step in steps) == 1
    assert sum(step.mode is EXTEND and step.batch_sizes[2] > 0 for step in steps) > 2
    assert {step.mode for step in steps} == {EXTEND, DECODE}


def test_spec_v2_in_step() -> None:
    """The ranks agree on each step before it, so none launches a round ahead. What was launched before is looked at."""
    spec, prompts, params = replace(SPEC, algorithm="eagle-v2"), prompts_of([0, 2, 1]), budgets_of([], [9, 4], [6])
    _, engines = served(spec, prompts, params, max_running=3)
    stream = engines[1].stream([3, 1], SamplingParams(max_new_tokens=40))
    said = next(stream).token_ids + next(stream).token_ids
    assert engines[1].scheduler.in_flight
    dropped = engines[1].stats.dropped_request_rounds
    alone = [scripted("cpu", spec).generate(theirs, budgets) for theirs, budgets in zip(prompts, params, strict=True)]
    assert in_threads(engines, prompts, params).generations == alone
    assert engines[1].stats.dropped_request_rounds == dropped
    said += [token for block in stream for token in block.token_ids]
    (expected,) = scripted("cpu", spec).generate([[3, 1]], SamplingParams(max_new_tokens=40))
    assert said == expected.token_ids
    for engine in engines:
        assert_all_free(engine)


@settings(max_examples=25)
@given(st.data())
def test_any_mix_stays_in_step(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(SHAPES))
    counts = data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=4))
    params = budgets_of(*(data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)) for n in counts))
    served(spec, prompts_of(counts), params, max_running=data.draw(st.integers(1, 3)))


@by_shape
def test_SEQ_08_a_rank_without_requests_goes_through_every_phase(spec: SpecConfig | None) -> None:
    """It joins in all that the others do, and nothing of its own changes: no forward, no round, no slot, no key."""
    prompts, params = prompts_of([0, 2]), budgets_of([], [8, 5])
    engines = [scripted("cpu", spec), scripted("cpu", spec)]
    idle = engines[0]
    idle.generate([[1, 2]], SamplingParams(max_new_tokens=4))  # so that counters and pool are not all zero
    pool, free = idle.scheduler.worker.target.pool.buffer.clone(), idle.allocator.free_slots.clone()
    forwards, rounds, requests = idle.stats.forwards.copy(), idle.stats.rounds, idle.stats.request_rounds
    ran = in_threads(engines, prompts, params)
    assert_in_step(ran)
    phases = {place.phase for place in ran.places[0]}
    assert phases == {"agreement", "prefill_target", "target"} | (
        {"prefill_draft", "extend"} | ({"draft"} if spec.num_steps > 1 else set()) if spec else set()
    )
    assert (idle.stats.forwards, idle.stats.rounds, idle.stats.request_rounds) == (forwards, rounds, requests)
    assert torch.equal(idle.scheduler.worker.target.pool.buffer, pool)
    assert torch.equal(idle.allocator.free_slots, free)
    assert_all_free(idle)


@by_shape
def test_collectives_of_a_step(spec: SpecConfig | None) -> None:
    """As the table in the module's docstring counts them."""
    ran, _ = served(spec, prompts_of([1, 3]), budgets_of([11], [6, 1, 9]), max_running=2)
    forwards = {EXTEND: 2, DECODE: spec.num_steps + 1} if spec else {EXTEND: 1, DECODE: 1}
    for number, step in enumerate(ran.steps[0], start=1):
        first, *places = [place for place in ran.places[0] if place.step == number]
        assert (first.phase, first.what, first.forward) == ("agreement", "modes", 0)
        assert sorted({place.forward for place in places}) == list(range(1, forwards[step.mode] + 1))
        for forward in range(1, forwards[step.mode] + 1):
            what = [place.what for place in places if place.forward == forward]
            assert what in (["counts", "rows", "logits"], ["counts"])
            if what == ["counts"]:  # only where all have finished can a forward have no rows at all
                assert forward == forwards[step.mode]
    assert [place.what for place in ran.places[0] if place.step == len(ran.steps[0]) + 1] == ["modes"]


def test_a_rank_whose_requests_have_all_finished_joins_the_extend_of_the_others() -> None:
    ran, engines = served(SPEC, prompts_of([1, 1]), budgets_of([4], [40]))
    last = max(number for number, step in enumerate(ran.steps[0], start=1) if step.batch_sizes[0])
    assert ran.steps[0][last - 1].mode is DECODE
    assert [place.what for place in ran.places[0] if (place.step, place.phase) == (last, "extend")] == [
        "counts",
        "rows",
        "logits",
    ]
    assert engines[0].stats.forwards["extend"] < engines[1].stats.forwards["extend"]


def test_a_rank_pauses_while_another_prefills() -> None:
    ran, _ = served(SPEC, prompts_of([1, 2]), budgets_of([40], [2, 9]), max_running=1)
    sizes = [(step.mode, step.batch_sizes) for step in ran.steps[0]]
    assert sizes[0] == (EXTEND, (1, 1))
    pause = sizes.index((EXTEND, (0, 1)))
    assert sizes[pause - 1] == (DECODE, (1, 1))
    assert sizes[pause + 1] == (DECODE, (1, 1))


CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
SAMPLERS = {"plain": None, "target_only": SPEC} | {s: replace(CHAIN, sampler=s) for s in ("rejection", "block")}


@pytest.mark.parametrize("spec", SAMPLERS.values(), ids=SAMPLERS)
def test_ranks_that_sample(spec: SpecConfig | None) -> None:
    """Greedy requests on one rank, sampled ones on another, both on a third, none on a fourth."""
    budgets = [[9, 4], [12, 7, 3], [6, 14], []]
    params = [
        [
            SamplingParams(max_new_tokens=n, temperature=t, top_p=0.9, seed=n)
            for n, t in zip(theirs, temperatures, strict=True)
        ]
        for theirs, temperatures in zip(budgets, ([0, 0], [1.0, 0.7, 30.0], [0, 1.0], []), strict=True)
    ]
    served(spec, prompts_of([2, 3, 2, 0]), params, max_running=2)


def test_requests_that_come_later_are_served() -> None:
    """Between two steps, while the other rank's run: nothing has to be known when the ranks start."""
    prompts, params = prompts_of([1, 2]), budgets_of([30], [4, 4])
    engines = [scripted("cpu", SPEC) for _ in prompts]
    agreement, layers = Meeting(2, 30), Meeting(2, 30)
    alone = [engine.generate(theirs, own) for engine, theirs, own in zip(engines, prompts, params, strict=True)]

    def one_by_one(rank: int) -> list[Generation]:
        done = []
        with in_step(engines[rank], Peers(rank, 2, agreement.of(rank), layers.of(rank))) as joint:
            for prompt, own in zip(prompts[rank], params[rank], strict=True):
                if done:
                    assert joint.join_others()
                done += engines[rank].generate([prompt], own)
            while joint.join_others():
                pass
        return done

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one_by_one, range(2))) == alone


@pytest.mark.parametrize(
    ("counts", "budgets", "hangs"),
    [
        ([0, 1], [[], [5]], True),
        ([1, 1], [[2], [30]], True),  # the first finishes in a round from which the other goes on: one extend too few
        ([1, 1], [[1], [30]], True),
        ([1, 1], [[1], [1]], False),  # neither is ever without rows when the other has some
    ],
)
def test_a_rank_that_skips_collectives_without_rows(counts: list[int], budgets: list[list[int]], hangs: bool) -> None:
    engines = [scripted("cpu", SPEC) for _ in counts]
    prompts, params = prompts_of(counts), budgets_of(*budgets)
    if hangs:
        with pytest.raises(BrokenBarrierError):
            in_threads(engines, prompts, params, skip_idle=True, patience=0.5)
    else:
        in_threads(engines, prompts, params, skip_idle=True)


def test_an_engine_is_its_own_again_afterwards() -> None:
    engine = scripted("cpu", SPEC)
    worker = engine.scheduler.worker
    with in_step(engine, Peers(0, 1, lambda mine: [mine], lambda mine: [mine])):
        assert engine.scheduler.worker is not worker
    with pytest.raises(ValueError, match="vocabulary"):
        generate_in_step(engine, Peers(0, 1, lambda mine: [mine], lambda mine: [mine]), [[VOCAB]])
    assert engine.scheduler.worker is worker
    assert worker.target.shared_head is worker.draft_runner.shared_head is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(("vocab_size", "counts"), [(23, [2, 0, 3]), (2, [0, 0, 1]), (24, [1, 1, 1]), (5, [0, 0, 0])])
@pytest.mark.parametrize("model", ["llama", "head", "scripted"])
def test_a_shared_head_says_what_the_models_own_says(vocab_size: int, counts: list[int], model: str) -> None:
    """Vocabularies that the ranks do not divide, or that have fewer ids than there are ranks."""
    llama = random_llama(llama_config(vocab_size=vocab_size))
    whole = {
        "llama": llama,
        "head": random_head(llama),
        "scripted": ScriptedModel(lambda context: [0.0] * vocab_size, vocab_size),
    }[model]
    meeting = Meeting(3, 10)
    heads = [SharedHead(whole, Peers(r, 3, meeting.of(r), meeting.of(r))) for r in range(3)]  # type: ignore[arg-type]
    rows = [torch.randn(count, whole.config.hidden_size, dtype=torch.float64) for count in counts]
    with ThreadPoolExecutor(3) as pool:
        logits = list(pool.map(lambda rank: heads[rank](rows[rank], "test"), range(3)))
    for mine, theirs in zip(logits, rows, strict=True):
        torch.testing.assert_close(mine, whole.logits(theirs), rtol=1e-12, atol=1e-12)


# --- what a hang is told by -------------------------------------------------------------------------------------------


def test_who_waits_where_and_for_whom() -> None:
    agreement = Place(9, 3, 0, "agreement", "modes")
    extend = Place(9, 2, 4, "extend", "counts")
    hang = Hang(5, [agreement, extend, extend, None], [True, True, False, False], [[extend], [], [], []])
    assert hang.explain() == [
        "No rank has moved for 5 s.",
        "Rank 0 waits at its collective 9, the agreement on step 3, for ranks 1, 2 and 3.",
        "Rank 1 waits at its collective 9, the counts of the extend forward of step 2, for ranks 0, 2 and 3.",
        "Rank 2 is busy: it was last at its collective 9, the counts of the extend forward of step 2.",
        "Rank 3 has come to no collective yet.",
        "Rank 0 had no rows in the extend forward of step 2, and stayed away from the collective that rank 1 waits at.",
    ]


# --- ranks as processes -----------------------------------------------------------------------------------------------


@pytest.fixture
def nobody_left() -> Iterator[None]:
    yield
    assert ranks_below(psutil.Process()) == []


def ranks_below(process: psutil.Process) -> list[psutil.Process]:
    """They are forked from a child of it."""
    return [rank for child in process.children() for rank in child.children()]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.usefixtures("nobody_left")
def test_dp_demo_on_the_shipped_weights() -> None:
    report = run("dp-demo", "--max-new-tokens", "8", "--json").json()
    assert report["ok"]
    assert report["requests"] == [row["requests"] for row in report["ranks"]] == [0, 1, 5]
    assert report["hang"] is None
    assert len({row["collectives"] for row in report["ranks"]}) == 1
    for row in report["ranks"]:
        assert row["same_outputs"] == row["requests"] or all(found["is_rounding"] for found in row["differences"])
        assert row["tokens"] == sum(len(generation["token_ids"]) for generation in row["generations"])
        assert row["rounds"] + row["idle_rounds"] + row["prefills"] + row["idle_prefills"] == len(report["steps"])
    assert [row["rounds"] > 0 for row in report["ranks"]] == [False, True, True]
    assert [row["idle_rounds"] > 0 for row in report["ranks"]] == [True, True, False]
    assert report["ranks"][2]["prefills"] > 1


@pytest.mark.usefixtures("nobody_left")
def test_dp_demo_shows_the_hang() -> None:
    shown = run("dp-demo", "--requests", "0,1", "--skip-idle", "--timeout", "1")
    assert shown.status == 1
    assert shown.err == ""
    told = " ".join(shown.out.split())
    assert "No rank has moved for 1 s." in told
    assert "Rank 0 waits at its collective 2, the agreement on step 2, for rank 1." in told
    assert "Rank 1 waits at its collective 2, the counts of the prefill_target forward of step 1, for rank 0." in told
    assert "Rank 0 had no rows in the prefill_target forward of step 1, and stayed away" in told
    assert all(len(line.rstrip()) <= 80 for line in shown.out.splitlines())


@pytest.mark.usefixtures("nobody_left")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "rank 1 has failed, and with it the run: RuntimeError: the script has a hole"),
        ("kill", "rank 1 has failed, and with it the run: its process has ended with signal 9"),
    ],
)
def test_a_rank_that_fails_ends_the_run(fault: str, words: str) -> None:
    make_engine = partial(scripted, spec=SPEC, fault=fault)
    started = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_ranks(make_engine, [[[1, 2]], [[FATAL]]], budgets_of([500], [500]), timeout=60)
    assert str(failed.value).startswith(words)
    assert time.monotonic() - started < 50  # it is told at once, not when the others' patience ends
    notes = "".join(getattr(failed.value, "__notes__", []))
    assert ("the script has a hole" in notes) is (fault == "raise")


def test_a_rank_that_nobody_joins_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dp, "ALL_RANKS_START_SECONDS", 0.5)
    with pytest.raises(LostPeers, match=r"not all ranks were there within 0\.5 s"), dp.connected(0, 2, tmp_path, 1):
        pass


@pytest.mark.usefixtures("nobody_left")
def test_scripted_ranks_as_processes() -> None:
    prompts, params = prompts_of([2, 0]), budgets_of([9, 4], [])
    reports = run_ranks(partial(scripted, spec=SPEC), prompts, params, timeout=30)
    assert not isinstance(reports, Hang)
    assert [report.differences for report in reports] == [{}, {}]
    assert reports[0].generations == scripted("cpu", SPEC).generate(prompts[0], params[0])
    assert reports[0].steps == reports[1].steps
    assert reports[0].collectives == reports[1].collectives


@pytest.mark.parametrize("ending", ["ctrl-c", "killed"])
def test_no_rank_outlives_the_run(ending: str, tmp_path: Path) -> None:
    """While the ranks hang. Ctrl-C goes to all of a terminal's processes; a killed one can no longer end the others."""
    running = subprocess.Popen(
        command("dp-demo", "--requests", "0,1", "--skip-idle", "--timeout", "60" if ending == "ctrl-c" else "0.5"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(TMPDIR=str(tmp_path)),  # a killed one leaves its folder, too
        text=True,
        start_new_session=True,
    )
    process = psutil.Process(running.pid)
    assert wait_for(lambda: len(ranks_below(process)) == 2, 60)
    theirs = ranks_below(process)
    if ending == "ctrl-c":
        time.sleep(1)  # somewhere in what they do
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=30)
        assert (running.returncode, out, err) == (130, "", "refspec: interrupted\n")
    else:
        running.kill()
    assert wait_for(lambda: not any(rank.is_running() for rank in theirs), 60)
    running.communicate(timeout=30)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_no_rank_outlives_a_run_that_ends_while_it_starts(number: int, status: int, tmp_path: Path) -> None:
    """The first start takes as long as torch takes to load. A rank of which nobody knew yet would wait for the others
    for two minutes.
    """
    running = subprocess.Popen(
        command("dp-demo"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(TMPDIR=str(tmp_path)),
        text=True,
        start_new_session=True,
    )
    process = psutil.Process(running.pid)
    assert wait_for(lambda: len(process.children()) == 2, 60)  # one to fork from, and multiprocessing's tracker
    time.sleep(0.5)  # somewhere in its import of torch
    os.killpg(running.pid, number) if number == signal.SIGINT else running.send_signal(number)
    out, err = running.communicate(timeout=30)  # to the end of both: whoever is left would hold them open
    assert (running.returncode, out, err) == (status, "", "refspec: interrupted\n" if number == signal.SIGINT else "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--ranks", "3", "--requests", "1,2"], "--requests 1,2 is for 2 ranks, --ranks says 3"),
        (["--requests", "4"], "--requests 4 is for 1 rank, there may be 2 to 8"),
        (["--requests", "1,-2"], "it must be a whole number for each rank, as in 0,1,5"),
        (["--requests", ""], "it must be a whole number for each rank"),
        (["--requests", "1,1000"], "and below 1000"),
        (["--requests", f"1,{'9' * 5000}"], "and below 1000"),
        (["--ranks", "1"], "--ranks"),
        (["--timeout", "0"], "--timeout is 0, it must be between 0.1 and 3600 seconds"),
        (["--timeout", "nan"], "--timeout is nan"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
    ],
)
def test_errors_are_one_line(args: list[str], words: str) -> None:
    failed = run("dp-demo", *args)
    assert failed.status == 2
    assert failed.out == ""
    assert len(failed.err.splitlines()) == 1
    assert words in failed.err


def test_a_hang_is_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    extend, agreement = Place(9, 2, 4, "extend", "counts"), Place(9, 3, 0, "agreement", "modes")
    hang = Hang(2.5, [agreement, extend], [True, True], [[extend], []])
    monkeypatch.setattr(ranks, "run_ranks", lambda *_: hang)
    failed = run("dp-demo", "--ranks", "2", "--json")
    assert failed.status == 1
    report = json.loads(failed.out)
    assert not report["ok"]
    assert report["hang"]["explanation"] == hang.explain()
    assert report["hang"]["places"][1] == {
        "collective": 9,
        "step": 2,
        "forward": 4,
        "phase": "extend",
        "what": "counts",
    }
    assert report["hang"]["waiting"] == [True, True]
    assert (report["ranks"], report["steps"]) == ([], None)


STEPS = [Step(EXTEND, (0, 1)), Step(DECODE, (0, 1))]
FAR = Difference(index=3, gap=0.5, gap_limit=1e-4, plain_token=1, spec_token=2)
DONE = [Generation("", [1, 2], "length", [1])]


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ([RankReport([], {}, STEPS, 16), RankReport(DONE, {}, STEPS, 17)], "not take the same number of collectives"),
        ([RankReport([], {}, STEPS, 16), RankReport(DONE, {0: FAR}, STEPS, 16)], "that is a fault: please report it"),
    ],
)
def test_dp_demo_says_what_is_wrong(reports: list[RankReport], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "run_ranks", lambda *_: reports)
    shown = run("dp-demo", "--requests", "0,1")
    assert shown.status == 1
    assert words in " ".join(shown.out.split())
    assert [line for line in shown.out.splitlines() if line.startswith("rank ")][1:3] == ["rank 0  ..", "rank 1  PD"]


@pytest.mark.parametrize(("size", "columns"), [(3, 40), (8, 80)])
def test_the_table_of_the_ranks_fits(size: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Step(EXTEND, (1,) * size), *[Step(DECODE, (1,) * size)] * 999]
    monkeypatch.setattr(ranks, "run_ranks", lambda *_: [RankReport(DONE, {}, steps, 12999)] * size)
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run("dp-demo", "--ranks", str(size)).out
    assert "…" not in shown
    table = {line[:15].strip(): line[15:].split() for line in shown.splitlines()}
    assert table["same as alone"] == ["1"] * size
    assert table["idle prefills"] == table["idle rounds"] == ["0"] * size
    assert table["rounds"] == ["999"] * size
    assert table["collectives"] == ["12999"] * size


def test_slow_ranks_are_told_from_a_fault_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = Hang(0.1, [Place(9, 3, 0, "agreement", "modes")] * 2, [False, False], [[], []])
    monkeypatch.setattr(ranks, "run_ranks", lambda *_: hang)
    assert "raise --timeout" in run("dp-demo", "--ranks", "2").out
    assert "raise --timeout" not in run("dp-demo", "--ranks", "2", "--skip-idle").out
