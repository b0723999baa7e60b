"""`refspec bench chain`: both paths take the same rounds, and what is counted is what they differ in."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from refspec.bench import chain as bench
from refspec.bench.chain import PATHS, bench_chain, count_operations, engine_of
from refspec.bench.host_overhead import WARM_UP
from refspec.cli.main import app

CPU = torch.device("cpu")


@pytest.mark.parametrize(("steps", "batch"), [(1, 3), (5, 1), (5, 3)])
def test_both_paths_take_the_same_rounds(steps: int, batch: int) -> None:
    engines = [engine_of(steps, batch, path, 2, CPU, "torch") for path in PATHS]
    for engine in engines:
        for _ in range(WARM_UP + 3):  # as many as there is room for
            engine.step()
        assert len(engine.scheduler.running) == batch
    general, fast = engines
    accepted = [[request.accept_lens for request in engine.scheduler.running.requests] for engine in engines]
    assert accepted[0] == accepted[1]
    assert max(map(max, accepted[0])) > 1
    assert (general.stats.chain_rounds, fast.stats.chain_rounds) == (0, fast.stats.rounds)


def test_report() -> None:
    told: list[tuple[int, int]] = []
    report = bench_chain((1, 3), (1, 2), turns=2, backend="torch", progress=lambda *done: told.append(done))
    assert told == [(done, WARM_UP + 2) for done in range(1, WARM_UP + 3)]
    savings = report["savings"]
    assert [(saving["steps"], saving["batch"]) for saving in savings] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    for saving in savings:
        calls, operations = saving["kernel_calls"], saving["torch_operations"]
        assert calls["general"] - calls["fast"] == saving["steps"] + 1
        assert operations["general"] > operations["fast"] > 0
        for milliseconds, ratio in (("milliseconds", "ratio"), ("round_milliseconds", "round_ratio")):
            general, fast = (saving[milliseconds][path] for path in PATHS)
            assert saving[ratio] == fast / general > 0
        assert saving["round_milliseconds"]["fast"] > saving["milliseconds"]["fast"]


def test_operations_are_those_of_one_round() -> None:
    engine = engine_of(3, 1, "fast", 4, CPU, "torch")
    engine.step()
    counts = [count_operations(engine) for _ in range(3)]
    assert len({calls for calls, _ in counts}) == 1
    assert max(count for _, count in counts) < 1.2 * min(count for _, count in counts)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr(bench, "bench_chain", partial(bench_chain, (1, 3), (1,)))
    return CliRunner().invoke(app, ["bench", "chain", "--turns", "1", *arguments])


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = run(monkeypatch).stdout
    assert "general path > short cut: cpu, backend torch" in out
    assert "9 > 5" in out
    assert max(map(len, out.splitlines())) <= 80
    report = json.loads(run(monkeypatch, "--json").stdout)
    assert [saving["kernel_calls"] for saving in report["savings"]] == [
        {"general": 5, "fast": 3},
        {"general": 9, "fast": 5},
    ]
