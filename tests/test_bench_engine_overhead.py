"""The cost of a round outside the forwards does not grow with the context; and the measure would see it if it did."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tensor_bytes import TensorBytes
from typer.testing import CliRunner

from refspec.bench import host_overhead as bench
from refspec.bench.host_overhead import EngineOfStandIns, Series, TimedRunner, bench_host_overhead, measure_series
from refspec.cli import bench_host_overhead as command
from refspec.cli.main import app
from refspec.config import SpecConfig
from refspec.requests.request import Request, RunningBatch

CPU = torch.device("cpu")
CHAIN, TREE = (SpecConfig(topk=k, num_steps=3, num_draft_tokens=n) for k, n in ((1, 4), (4, 16)))
WAYS = [
    (None, 1),
    (None, 16),
    (CHAIN, 1),
    (TREE, 1),
    (SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=16), 16),
    (SpecConfig(topk=4, num_steps=3, num_draft_tokens=16, page_size=16), 16),
]
by_way = pytest.mark.parametrize(("spec", "page_size"), WAYS, ids=str)


def engine_of(context: int, batch: int, spec: SpecConfig | None, page_size: int, rounds: int = 8) -> EngineOfStandIns:
    engine = EngineOfStandIns(context, batch, rounds, spec, page_size, CPU, "torch")
    engine.begin(context, batch)
    return engine


def measured(contexts: Sequence[int], batches: Sequence[int], spec: SpecConfig | None = None, turns: int = 7) -> Series:
    return measure_series(contexts, batches, spec, 1, turns, CPU, "torch")


# --- what is measured ---------------------------------------------------------------------------------------------


@by_way
def test_requests_of_all_contexts_take_the_same_rounds(spec: SpecConfig | None, page_size: int) -> None:
    """Else a longer context would be compared with other rounds, and a difference say nothing."""
    accepted = []
    for context in (32, 512):
        engine = engine_of(context, 3, spec, page_size)
        for _ in range(8):
            engine.step()
        engine.check()
        assert len(engine.scheduler.running) == 3  # room and budget last for the rounds that were said
        accepted.append([request.accept_lens for request in engine.scheduler.running.requests])
    assert accepted[0] == accepted[1]
    if spec:  # drafts are accepted in part
        assert 1 < sum(map(sum, accepted[0])) / 24 < 1 + spec.num_steps


def test_parts_of_a_round_are_the_step_without_the_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of 20 ms each appear as such, in no part of the round."""
    forward = TimedRunner.forward

    def slow(self: TimedRunner, *args: Any) -> Any:
        clock = time.perf_counter
        started = clock()
        out = forward(self, *args)
        time.sleep(0.02)
        self.seconds[args[1]] += clock() - started
        return out

    engine = engine_of(32, 2, TREE, 1)
    engine.timed_round()
    monkeypatch.setattr(TimedRunner, "forward", lambda self, batch, phase, rows=None: slow(self, batch, phase, rows))
    parts, inside = engine.timed_round()
    assert set(parts) == {"draft", "tree", "verify", "commit", "extend", "scheduler"}
    assert inside >= 4 * 20  # two of the draft, the target's, the extend
    assert sum(parts.values()) < inside


def test_report_has_every_series_with_every_cell() -> None:
    told: list[tuple[int, int]] = []
    report = bench_host_overhead(
        (16, 48),
        (1, 2, 3),
        (1, 16),
        (None, (1, 2, 3)),
        turns=2,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(done, 4 * (bench.WARM_UP + 2)) for done in range(1, 4 * (bench.WARM_UP + 2) + 1)]
    assert (report["device"], report["backend"], report["turns"]) == ("cpu", "torch", 2)
    assert [(series["name"], series["page_size"]) for series in report["series"]] == [
        ("plain", 1),
        ("plain", 16),
        ("k1 S2 N3", 1),
        ("k1 S2 N3", 16),
    ]
    for series in report["series"]:
        cells = {(cell["context"], cell["batch"]): cell for cell in series["cells"]}
        assert list(cells) == [(context, batch) for context in (16, 48) for batch in (1, 2, 3)]
        for cell in cells.values():
            assert cell["milliseconds"] == pytest.approx(sum(cell["by_phase"].values()))
            assert cell["forwards"] > 0
        cost = {place: cell["milliseconds"] for place, cell in cells.items()}
        assert series["context_ratios"] == {b: cost[48, b] / cost[16, b] for b in (1, 2, 3)}
        assert series["batch_ratios"] == {c: cost[c, 3] / cost[c, 1] for c in (16, 48)}
        assert series["steepest"] == {
            c: pytest.approx(max(cost[c, 2] / cost[c, 1] / 2, cost[c, 3] / cost[c, 2] / 1.5)) for c in (16, 48)
        }


# --- what it would see --------------------------------------------------------------------------------------------


@pytest.fixture
def processor_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The clock of everything here, so that other programs on the machine make no difference."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    yield
    torch.set_num_threads(threads)


def every_round_also(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[list[Request]], float]) -> None:
    """Let the scheduler lose that much time in each step."""
    going_on = RunningBatch.going_on

    def slow(self: RunningBatch) -> list[int]:
        if all(request.output_ids for request in self.requests):
            until = time.thread_time() + seconds(self.requests)
            while time.thread_time() < until:
                pass
        return going_on(self)

    monkeypatch.setattr(RunningBatch, "going_on", slow)


@pytest.mark.usefixtures("processor_time")
@pytest.mark.parametrize("spec", [None, TREE], ids=["plain", "tree"])
def test_context_makes_no_difference_and_would_be_seen_if_it_did(
    spec: SpecConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = measured((64, 2048), (1, 2), spec)
    assert max(sound.context_ratios.values()) < 4
    every_round_also(monkeypatch, lambda requests: 2e-5 * sum(request.kv_len for request in requests))
    faulty = measured((64, 2048), (1, 2), spec, turns=2)
    assert min(faulty.context_ratios.values()) > 4


@pytest.mark.usefixtures("processor_time")
def test_batch_costs_no_more_than_its_share_and_would_be_seen_if_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = measured((64,), (2, 8, 32), TREE)
    assert sound.steepest[64] < 2  # a round of 4 times the batch takes less than 8 times as long
    every_round_also(monkeypatch, lambda requests: 2e-4 * len(requests) ** 2)
    faulty = measured((64,), (2, 8, 32), TREE, turns=2)
    assert faulty.steepest[64] > 2  # 4, but for what else a round costs


# --- without a clock ----------------------------------------------------------------------------------------------


@by_way
def test_a_round_makes_no_tensor_that_grows_with_the_context(spec: SpecConfig | None, page_size: int) -> None:
    made = []
    for context in (64, 2048):
        engine = engine_of(context, 3, spec, page_size)
        with TensorBytes() as tensors:
            for _ in range(8):
                engine.step()
        made.append(tensors.total)
    assert made[0] == made[1] > 0


@by_way
def test_a_round_makes_no_list_that_grows_with_the_context(spec: SpecConfig | None, page_size: int) -> None:
    """The most memory that Python takes for a round: a copy of the longer context's ids would be 40 KB."""
    peaks = []
    for context in (64, 5000):
        engine = engine_of(context, 1, spec, page_size)
        engine.step()
        tracemalloc.start()
        for _ in range(4):
            engine.step()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 20_000


# --- the command --------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    small = partial(bench_host_overhead, (16, 256), (1, 4), (1, 16), (None, (4, 3, 16)), turns=1)
    monkeypatch.setattr(bench, "bench_host_overhead", small)
    return CliRunner().invoke(app, ["bench", "engine", "--host-overhead", *arguments])


def test_command_prints_a_table_of_each_series(monkeypatch: pytest.MonkeyPatch) -> None:
    out = run(monkeypatch).stdout
    for words in ("plain, page 1", "k4 S3 N16, page 16", "256 / 16", "4 / 1", "steepest", "Context 256, batch 4"):
        assert words in out


def test_command_prints_one_json_document(monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(run(monkeypatch, "--json").stdout)
    assert [len(series["cells"]) for series in report["series"]] == [4] * 4


@pytest.mark.parametrize("option", ["--prompts 3", "--target tiny", "--vs-hf", "--max-new-tokens 5"])
def test_command_refuses_what_would_have_no_effect(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, *option.split())
    assert result.exit_code == 2
    assert f"{option.split()[0]} with --host-overhead" in result.stderr


def test_tables_of_the_full_measurement_fit_into_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    phases = ("draft", "tree", "verify", "commit", "extend", "scheduler")
    cells = [
        {"context": context, "batch": batch, "milliseconds": 88.88, "by_phase": dict.fromkeys(phases, 77.77)}
        for context in bench.CONTEXTS
        for batch in bench.BATCHES
    ]
    ratios = {
        "context_ratios": dict.fromkeys(bench.BATCHES, 9.99),
        "batch_ratios": dict.fromkeys(bench.CONTEXTS, 66.66),
        "steepest": dict.fromkeys(bench.CONTEXTS, 5.55),
    }
    one = {"name": "k4 S3 N16", "page_size": 16, "cells": cells, **ratios}
    command.show(
        {"device": "cpu", "backend": "torch", "threads": 64, "turns": 25, "torch": torch.__version__, "series": [one]}
    )
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count(" 88.88 ") == len(cells)
    assert out.count(" 77.77 ") == 2 * len(phases)
    rows = [line for line in out.splitlines() if "77.77" in line]
    assert ["k4 S3 N16, page 16" in row for row in rows] == [True, True]  # no cell takes two lines
