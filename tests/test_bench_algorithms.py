"""`refspec bench algorithms`: what it counts, and what it says of those that could not run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from refspec import Engine
from refspec.bench.algorithms import bench_algorithms
from refspec.bench.engine import Contestant, compete
from refspec.bench.prompts import load_prompts
from refspec.cli.main import app
from refspec.config import ALGORITHMS
from refspec.models import checkpoint
from refspec.workers.registry import BUILT_IN

CALM, LOOPING = load_prompts()[:2]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return bench_algorithms(prompts=[CALM, LOOPING], max_new_tokens=24)


def test_everybody_has_run(report: dict[str, Any]) -> None:
    assert report["not_run"] == []
    assert [row["name"] for row in report["contestants"]] == ["plain", *ALGORITHMS]
    assert (report["prompts"], report["looping_prompts"]) == (2, 1)
    for row in report["contestants"]:
        assert row["prompts"] == 1
        assert row["faults"] == 0
        assert row["tokens_per_second"] > 0


def test_forwards_are_for_each_token(report: dict[str, Any]) -> None:
    """One request: a round is one target forward, so tokens of a round and forwards of a token are each other's
    inverse, but for a round that was launched ahead at the end, and dropped. Plain decoding has one for each token, and
    only who has a draft model runs one.
    """
    plain, *others = report["contestants"]
    assert plain["ratio_to_plain"] == plain["target_forwards_per_token"] == 1
    assert plain["accept_length"] is None
    assert plain["draft_forwards_per_token"] == 0
    for row in others:
        rounds, forwards = 23 / row["accept_length"], 23 * row["target_forwards_per_token"]
        assert forwards - rounds == pytest.approx(round(forwards - rounds))
        assert 0 <= round(forwards - rounds) <= (row["name"] == "eagle-v2")
        assert (row["draft_forwards_per_token"] > 0) == (BUILT_IN[row["name"]].shipped_draft is not None)
        spec = BUILT_IN[row["name"]].spec()
        assert row["num_draft_tokens"] == spec.num_draft_tokens
    [eagle] = [row for row in others if row["name"] == "eagle"]
    # S - 1 forwards in each round's loop, and one extend, but for the last round, which nothing comes after.
    rounds = 23 * eagle["target_forwards_per_token"]
    assert 23 * eagle["draft_forwards_per_token"] == pytest.approx(3 * rounds - 1)


def run(*options: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", "algorithms", "--prompts", "1", "--max-new-tokens", "9", *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def test_weights_that_are_not_there_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkpoint.SHIPPED, "tiny-eagle", "gone")
    status, out, err = run("--algorithm", "ngram", "--algorithm", "eagle", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert [row["name"] for row in report["contestants"]] == ["plain", "ngram"]
    [missing] = report["not_run"]
    assert missing["name"] == "eagle"
    assert "gone" in missing["reason"]
    status, out, _ = run("--algorithm", "eagle")
    assert status == 0
    assert "\nNot run: eagle (" in out
    assert all(len(line) <= 80 for line in out.splitlines() if line.startswith(("plain", "eagle")))


def test_plain_decoding_cannot_be_asked_for() -> None:
    assert run("--algorithm", "none")[:2] == (2, "")


def test_an_output_of_its_own_is_a_fault() -> None:
    engine = Engine()
    plain = Contestant.of("plain", engine)

    def lie(prompt_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[int]]:
        tokens, rounds = plain.run(prompt_ids, max_new_tokens)
        return [(tokens[0] + 1) % engine.vocab_size, *tokens[1:]], rounds

    liar = Contestant("liar", lie)
    compete([plain, liar], engine, [CALM], 9, progress=lambda done, total: None)
    assert (plain.faults, liar.faults) == (0, 1)
