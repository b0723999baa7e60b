"""The commands as their users meet them: what arrives, what is printed, and how it ends when something is wrong."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from builders import llama_config, random_head, random_llama, saved_head, saved_target
from rich.console import Console
from test_cli_trace import Terminal
from tokenizers import Tokenizer
from typer.testing import CliRunner

import refspec
from refspec import SamplingParams, SpecConfig
from refspec.cli import demo, generate, report
from refspec.cli.main import app
from refspec.engine import compare
from refspec.engine.engine import DTYPES
from refspec.engine.scheduler import RETRACTION_POLICIES
from refspec.models import checkpoint
from refspec.trace import Trace

SOURCE = str(Path(refspec.__file__).parents[1])
EOS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target and eagle, with random weights, a vocabulary of bytes, and a context of 512."""
    folder = tmp_path_factory.mktemp("models")
    target = random_llama(llama_config(vocab_size=256), dtype=torch.float32)
    saved_target(folder / "target", target, eos_token_id=EOS)
    saved_target(folder / "standalone", target)
    saved_head(folder / "eagle", random_head(target))
    return folder


@pytest.fixture
def models(folder: Path) -> list[str]:
    return ["--target", str(folder / "target"), "--draft", str(folder / "eagle")]


class Result:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    def json(self) -> Any:
        assert self.status == 0, self.err
        assert self.err == ""
        return json.loads(self.out)


def run(*args: str | Path, stdin: str | bytes | None = None) -> Result:
    """In this process, where torch is loaded already."""
    result = CliRunner().invoke(app, list(map(str, args)), input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Result(result.exit_code, result.stdout, result.stderr)


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "refspec", *map(str, args)]


def environment(**changed: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SOURCE, **changed}


# --- what is printed ------------------------------------------------------------------------------------------------


def test_json_is_one_document(models: list[str]) -> None:
    printed = run("generate", "def fib(n):", "x", *models, "--max-new-tokens", "9", "--json").json()
    assert list(printed) == ["generations", "stats", "config", "notes"]
    for generation in printed["generations"]:
        assert list(generation) == [
            "text",
            "token_ids",
            "finish_reason",
            "accept_lens",
            "matched_stop",
            "seed",
            "logprobs",
            "top_logprobs",
        ]
        assert len(generation["token_ids"]) == 1 + sum(generation["accept_lens"]) == 9
    stats = printed["stats"]
    assert stats["rounds"] == stats["target_forwards"] == max(len(g["accept_lens"]) for g in printed["generations"])
    assert stats["draft_forwards"] == 2 * stats["rounds"]
    assert stats["prefill_target_forwards"] == stats["prefill_draft_forwards"] == 1


def test_json_stays_json_in_an_ascii_locale(models: list[str]) -> None:
    prompt = "é ␣ 漢"
    shown = subprocess.run(
        command("generate", prompt, *models, "--max-new-tokens", "3", "--json"),
        env=environment(PYTHONIOENCODING="ascii"),
        capture_output=True,
        check=True,
    )
    assert json.loads(shown.stdout.decode("ascii"))["config"]["prompts"] == [prompt]


def test_text_tree_and_counts(models: list[str]) -> None:
    shown = run("generate", "def fib(n):", *models, "--max-new-tokens", "9", "--ignore-eos")
    assert shown.status == 0
    assert shown.err == ""  # no progress bar where there is no terminal
    assert shown.out.startswith("def fib(n):")
    for words in (
        "9 tokens, finish reason length",
        "row token",
        "★",
        "candidates",
        "prefill",
        "accept length",
        "bonus",
    ):
        assert words in shown.out
    assert "\x1b" not in shown.out


def test_text_of_a_plain_run(models: list[str]) -> None:
    shown = run("generate", "def fib(n):", *models[:2], "--algorithm", "none", "--max-new-tokens", "9", "--ignore-eos")
    assert shown.status == 0
    assert "9 tokens; 8 rounds at" in shown.out
    assert "row token" not in shown.out


def test_a_single_token_needs_no_round(models: list[str], tmp_path: Path) -> None:
    shown = run("generate", "x", *models, "--max-new-tokens", "1", "--watch", "--trace", tmp_path / "t.json")
    assert shown.status == 0
    assert "1 token; 0 rounds" in shown.out
    assert "no round" in run("trace", "show", tmp_path / "t.json").out


def test_long_lines_stay_whole(models: list[str]) -> None:
    prompt = "word " * 60
    assert run("generate", prompt, *models, "--max-new-tokens", "2").out.startswith(prompt)


def test_what_a_model_says_does_not_steer_the_terminal() -> None:
    from refspec.cli.report import printable

    assert printable("a\n\tb\x1b[2Jc\x07\x9bd\x7f") == "a\n\tb\\x1b[2Jc\\x07\\x9bd\\x7f"


# --- every option arrives (NGR-04) ------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_library(models: list[str]) -> None:
    config = run("generate", "x", *models, "--json").json()["config"]
    for name, value in {**asdict(SpecConfig()), **asdict(SamplingParams())}.items():
        assert config[name] == (list(value) if isinstance(value, tuple) else value)
    assert config["dtype"] == "float32"
    assert config["kv_slots"] == refspec.Engine(models[1], models[3], SpecConfig()).allocator.size
    defaults = inspect.signature(refspec.Engine).parameters
    for name in ("max_running", "prefix_cache", "chunk_size", "retraction"):
        assert config[name] == defaults[name].default


def test_every_option_arrives(models: list[str], tmp_path: Path) -> None:
    prompt_file, trace_file = tmp_path / "p.txt", tmp_path / "t.json"
    prompt_file.write_text("from a file", encoding="utf-8")
    given = {
        "prompt": ["first", "second"],
        "prompt_file": ["--prompt-file", str(prompt_file), "--prompt-file", "-"],
        "algorithm": ["--algorithm", "eagle"],
        "topk": ["--topk", "3"],
        "steps": ["--steps", "2"],
        "draft_tokens": ["--draft-tokens", "5"],
        "exact_branch_kv": ["--exact-branch-kv"],
        "max_new_tokens": ["--max-new-tokens", "11"],
        "ignore_eos": ["--ignore-eos"],
        "stop_token_id": ["--stop-token-id", "254", "--stop-token-id", "255"],
        "stop": ["--stop", "two words", "--stop", "\n;"],
        "include_stop_str": ["--include-stop-str"],
        "temperature": ["--temperature", "0.7"],
        "top_k": ["--top-k", "50"],
        "top_p": ["--top-p", "0.95"],
        "min_p": ["--min-p", "0.001"],
        "repetition_penalty": ["--repetition-penalty", "1.2"],
        "frequency_penalty": ["--frequency-penalty", "0.3"],
        "presence_penalty": ["--presence-penalty", "-0.1"],
        "exact_penalties": ["--no-exact-penalties"],
        "logit_bias": ["--logit-bias", "97=1.5", "--logit-bias", "98=-2"],
        "logprobs": ["--logprobs", "2"],
        "seed": ["--seed", "99"],
        "sampler": ["--sampler", "target_only"],  # the others want a chain: see below
        "threshold_single": ["--threshold-single", "0.9"],
        "threshold_acc": ["--threshold-acc", "0.8"],
        "target": models[:2],
        "draft": models[2:],
        "dtype": ["--dtype", "float64"],
        "device": ["--device", "cpu:0"],
        "backend": ["--backend", "torch"],  # what arrives of "triton" is told in tests/engine/test_backends.py
        "kv_slots": ["--kv-slots", "776"],
        "page_size": ["--page-size", "4"],
        "prefix_cache": ["--prefix-cache"],
        "chunk_size": ["--chunk-size", "5"],
        "retraction": ["--retraction", "largest"],
        "max_running": ["--max-running", "3"],
        "graphs": ["--graphs"],
        "trace": ["--trace", str(trace_file)],
        "as_json": ["--json"],
    }
    options = {option.name for option in typer.main.get_command(app).commands["generate"].params}  # type: ignore[attr-defined]
    ngram = {name: value for name, value in asdict(SpecConfig()).items() if name.startswith("ngram_")}
    elsewhere = {"watch", "json_schema", "adaptive_steps", *ngram}  # below, and in test_cli_algorithms
    assert options - {"help"} == {*given, *elsewhere}, "an option that this test does not know"

    words = [word for values in given.values() for word in values]
    printed = run("generate", *words, stdin="from stdin\n").json()
    assert printed["config"] == {
        "algorithm": "eagle",
        "topk": 3,
        "num_steps": 2,
        "num_draft_tokens": 5,
        "exact_branch_kv": True,
        "sampler": "target_only",
        "threshold_single": 0.9,
        "threshold_acc": 0.8,
        "exact_penalties": False,
        "adaptive_steps": [],
        **ngram,
        "max_new_tokens": 11,
        "ignore_eos": True,
        "stop_token_ids": [254, 255],
        "stop": ["two words", "\n;"],
        "include_stop_str_in_output": True,
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.1,
        "logit_bias": {"97": 1.5, "98": -2.0},
        "grammar": None,
        "logprobs": 2,
        "seed": 99,
        "target": models[1],
        "draft": models[3],
        "dtype": "float64",
        "device": "cpu:0",
        "backend": "torch",
        "kv_slots": 776,
        "page_size": 4,
        "prefix_cache": True,
        "chunk_size": 5,
        "retraction": "largest",
        "max_running": 3,
        "graphs": [1, 2, 3],
        "trace": str(trace_file),
        "prompts": ["first", "second", "from a file", "from stdin"],
    }
    # And what the engine did says so, too.
    rounds = Trace.load(trace_file).rounds
    assert printed["stats"]["draft_forwards"] == len(rounds) > 0  # S - 1 = 1 in each round
    for tree in rounds[0].requests:
        assert (len(tree.draft_slots), len(tree.draft_slots[0]), len(tree.verify_slots)) == (3, 2, 5)
    outputs = [generation["token_ids"] for generation in printed["generations"]]
    assert max(map(len, outputs)) == 11
    assert all(len(output) == 11 or output[-1] in (254, 255) for output in outputs)
    assert printed["stats"]["launches"]["tree_sampling_target_only"] > 0
    engine = refspec.Engine(
        models[1],
        models[3],
        SpecConfig(
            "eagle", 3, 2, 5, 4, exact_branch_kv=True, threshold_single=0.9, threshold_acc=0.8, exact_penalties=False
        ),
        dtype="float64",
        prefix_cache=True,
        chunk_size=5,
        max_running=3,
    )
    params = SamplingParams(
        max_new_tokens=11,
        stop_token_ids=(254, 255),
        ignore_eos=True,
        temperature=0.7,
        top_k=50,
        top_p=0.95,
        min_p=0.001,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=-0.1,
        logit_bias={97: 1.5, 98: -2.0},
        logprobs=2,
        seed=99,
    )
    expected = engine.generate(printed["config"]["prompts"], params)
    assert printed["generations"] == [json.loads(json.dumps(asdict(g))) for g in expected]
    # Of 31 prompt tokens, 5 are read in a step; and what is taken are pages.
    assert printed["stats"]["prefill_target_forwards"] >= 7
    assert printed["stats"]["slots_taken"]["prefill"] % 4 == 0


def test_every_option_arrives_of_pool_and_scheduler(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Watched(refspec.Engine):
        def __init__(self, *args: Any, **settings: Any) -> None:
            given.update(settings)
            super().__init__(*args, **settings)

    monkeypatch.setattr("refspec.engine.engine.Engine", Watched)
    options = "--kv-slots 96 --page-size 2 --prefix-cache --chunk-size 7 --retraction least_output --max-running 2"
    alike = ["the same and more", "the same and less", "the same again"]
    printed = run(
        "generate", *alike, *models, *options.split(), "--max-new-tokens", "30", "--ignore-eos", "--json"
    ).json()
    assert given == {
        "kv_slots": 96,
        "page_size": 2,
        "prefix_cache": True,
        "chunk_size": 7,
        "retraction": "least_output",
        "max_running": 2,
    }
    assert printed["stats"]["cached_tokens"] > 0
    for text, generation in zip(alike, printed["generations"], strict=True):
        alone = run("generate", text, *models, "--max-new-tokens", "30", "--ignore-eos", "--json").json()
        assert generation["token_ids"] == alone["generations"][0]["token_ids"]


def test_NGR_04_every_option_arrives_of_ngram(models: list[str], tmp_path: Path) -> None:
    """Unusual values of all of them, in the configuration, and in what the run did."""
    options = "--algorithm ngram --draft-tokens 6 --ngram-max-trie-depth 5 --ngram-max-bfs-breadth 1 "
    options += f"--ngram-match-type PROB --ngram-capacity 333 --page-size 2 --trace {tmp_path / 't.json'}"
    printed = run(
        "generate", "abcabcabc", *models[:2], *options.split(), "--max-new-tokens", "90", "--ignore-eos", "--json"
    ).json()
    config, stats = printed["config"], printed["stats"]
    assert (config["algorithm"], config["num_draft_tokens"], config["draft"]) == ("ngram", 6, None)
    assert (config["ngram_max_trie_depth"], config["ngram_max_bfs_breadth"]) == (5, 1)
    assert (config["ngram_match_type"], config["ngram_capacity"]) == ("PROB", 333)
    assert stats["target_forwards"] > 0
    assert stats["draft_forwards"] == stats["extend_forwards"] == 0
    trees = [tree for round_ in Trace.load(tmp_path / "t.json").rounds for tree in round_.requests]
    assert {len(tree.verify_slots) for tree in trees} == {6}
    assert any(tree.candidates for tree in trees)
    refused = run("generate", "x", *models, "--ngram-capacity", "333")
    assert "--ngram-capacity is given, but algorithm eagle leaves no choice there" in refused.err


def test_names_of_retraction_policies_are_the_engines() -> None:
    assert set(generate.RETRACTIONS) == set(RETRACTION_POLICIES)
    assert generate.RETRACTIONS[0] == inspect.signature(refspec.Engine).parameters["retraction"].default


@pytest.mark.parametrize(
    ("options", "status", "complaint"),
    [
        ("--page-size 3", 1, "--page-size is 3, which does not divide the pool of --kv-slots = 8192"),
        ("--page-size 0", 2, "--page-size must be at least 1, got 0"),
        ("--page-size 0 --algorithm none", 1, "--page-size must be at least 1, got 0"),
        ("--chunk-size 0", 1, "--chunk-size must be at least 1, got 0"),
        ("--max-running 0", 1, "--max-running must be at least 1, got 0"),
        ("--retraction oldest", 2, "'oldest' is not one of: newest, largest, least_output"),
    ],
)
def test_options_of_pool_and_scheduler_that_cannot_be(
    options: str, status: int, complaint: str, models: list[str]
) -> None:
    args = models[:2] if "none" in options else models
    refused = run("generate", "x", *args, *options.split())
    assert refused.status == status
    assert complaint in refused.err
    assert refused.err.count("\n") == 1


def test_a_pool_that_was_too_small_is_told(models: list[str]) -> None:
    args = ["generate", "x", *models, "--ignore-eos", "--max-new-tokens", "40"]
    shown = run(*args, "--kv-slots", "30")
    assert shown.status == 0
    assert "finish reason out_of_slots" in shown.out
    assert re.search(
        r"\nThe KV pool of 30 slots was too small for more of it, which takes \d+. Raise --kv-slots.\n", shown.out
    )
    assert "too small" not in run(*args).out


@pytest.mark.parametrize("sampler", ["rejection", "block"])
def test_every_option_arrives_samplers_of_a_chain(sampler: str, models: list[str]) -> None:
    chain = ["--topk", "1", "--steps", "2", "--draft-tokens", "3", "--sampler", sampler]
    printed = run("generate", "x", *models, *chain, "--temperature", "1", "--ignore-eos", "--json").json()
    assert printed["config"]["sampler"] == sampler
    assert printed["stats"]["launches"]["chain_rejection_sampling"] == printed["stats"]["rounds"] > 0


def test_a_seed_that_was_not_given_is_told(models: list[str]) -> None:
    sampled = ["generate", "x", *models, "--temperature", "1", "--max-new-tokens", "9", "--ignore-eos"]
    once = run(*sampled, "--json").json()["generations"][0]
    again = run(*sampled, "--json", "--seed", once["seed"]).json()["generations"][0]
    assert again == once
    assert f"finish reason length, seed {once['seed']};" in run(*sampled, "--seed", once["seed"]).out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--temperature", "-1"], "--temperature must be at least 0, got -1.0"),
        (["--top-p", "0"], "--top-p is 0"),
        (["--top-k", "-1"], "--top-k must be at least 0, got -1"),
        (["--min-p", "nan"], "--min-p must be from 0 to 1, got nan"),
        (["--repetition-penalty", "0"], "--repetition-penalty must be from 0.01 to 2, got 0.0"),
        (["--frequency-penalty", "nan"], "--frequency-penalty must be from -2 to 2, got nan"),
        (["--presence-penalty", "3"], "--presence-penalty must be from -2 to 2, got 3.0"),
        (["--logit-bias", "5"], "--logit-bias '5' is not of the form ID=B, a token id and a number"),
        (["--logit-bias", "a=1"], "--logit-bias 'a=1' is not of the form"),
        (["--logit-bias", "5=101"], "--logit-bias of id 5 must be from -100 to 100, got 101.0"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "--logit-bias names an id twice"),
        (["--logprobs", "-1"], "--logprobs must be at least 0, got -1"),
        (["--no-exact-penalties", "--algorithm", "none"], "--exact-penalties with --algorithm none"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--threshold-single", "2"], "--threshold-single must be from 0 to 1, got 2.0"),
        (["--top-p", "0.9"], "--top-p without --temperature: it is for sampling"),
        (["--seed", "0"], "--seed without --temperature"),
        (["--sampler", "block"], "it needs --topk=1 and --draft-tokens=--steps+1, got --topk=4, --steps=3"),
        (["--sampler", "block", "--algorithm", "none"], "--sampler with --algorithm none"),
    ],
    ids=" ".join,
)
def test_sampling_options_that_cannot_be(options: list[str], complaint: str, models: list[str]) -> None:
    refused = run("generate", "x", *models, *options)
    assert refused.status == 2
    assert complaint in refused.err
    assert refused.err.count("\n") == 1


def test_filters_at_a_temperature_of_0_are_greedy(models: list[str]) -> None:
    greedy = run("generate", "x", *models, "--json").json()["generations"]
    filtered = ["--temperature", "0", "--top-p", "0.1", "--top-k", "3", "--min-p", "0.5", "--seed", "4"]
    assert run("generate", "x", *models, *filtered, "--json").json()["generations"] == greedy


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--logit-bias", "256=1"], "--logit-bias of prompt 0 names id 256, but the vocabulary is ids 0 to 255"),
        (["--logprobs", "257"], "--logprobs is 257 for prompt 0, but the vocabulary has only 256 ids"),
    ],
    ids=" ".join,
)
def test_rules_that_the_model_cannot_follow(options: list[str], complaint: str, models: list[str]) -> None:
    refused = run("generate", "x", *models, *options)
    assert refused.status == 1
    assert refused.err == f"refspec: {complaint}\n"


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}


def test_a_json_schema_is_followed(models: list[str], tmp_path: Path) -> None:
    schema, trace = tmp_path / "s.json", tmp_path / "t.json"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    common = ["generate", "x", "y", *models, "--json-schema", schema, "--trace", trace]
    printed = run(*common, "--json").json()
    assert printed["config"]["grammar"] == SCHEMA
    for generation in printed["generations"]:
        assert json.loads(generation["text"])["n"] in (1, 22)
        assert (generation["finish_reason"], generation["matched_stop"]) == ("stop", None)
    assert json.loads(Trace.load(trace).config["grammar"]) == SCHEMA  # type: ignore[arg-type]
    plain = ["generate", "x", "y", *models[:2], "--json-schema", schema, "--algorithm", "none"]
    assert [g["text"] for g in run(*plain, "--json").json()["generations"]] == [
        g["text"] for g in printed["generations"]
    ]
    assert '{"n":' in run(*common).out


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[1]", "must be an object"),
        (b"true", "must be an object"),
        (b'{"type": "number\n', "is not JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"type": "nonsense"}', "cannot be followed with this tokenizer: Invalid type: nonsense"),
        (b'{"type": "integer", "minimum": 2, "maximum": 1}', "cannot be followed with this tokenizer: "),
        (None, "No such file"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_json_schemas_that_cannot_be(content: bytes | None, complaint: str, models: list[str], tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "s.json").write_bytes(content)
    refused = run("generate", "x", *models, "--json-schema", tmp_path / "s.json")
    assert refused.status == 1
    assert complaint in refused.err
    assert refused.err.count("\n") == 1
    assert refused.out == ""


def test_log_probabilities_are_shown(models: list[str]) -> None:
    common = ["generate", "x", *models, "--max-new-tokens", "60", "--ignore-eos"]
    shown = run(*common, "--logprobs", "1").out
    generation = run(*common, "--logprobs", "1", "--json").json()["generations"][0]
    assert len(generation["logprobs"]) == len(generation["top_logprobs"]) == 60
    table = shown[shown.index("log-probability") :]
    assert f"{generation['logprobs'][0]:.3f}" in table
    assert f"{generation['top_logprobs'][39][0][1]:.3f}" in table
    assert "and 20 tokens more" in table
    assert "likeliest" in table
    assert "likeliest" not in run(*common, "--logprobs", "0").out
    assert "log-probability" not in run(*common).out
    assert run(*common, "--json").json()["generations"][0]["logprobs"] is None


def test_algorithm_none_decodes_plainly(models: list[str]) -> None:
    printed = run("generate", "x", *models[:2], "--algorithm", "none", "--max-new-tokens", "5", "--json").json()
    assert printed["config"]["algorithm"] == "none"
    for name in ("topk", "num_steps", "num_draft_tokens", "exact_branch_kv", "sampler", "threshold_acc", "draft"):
        assert printed["config"][name] is None
    assert printed["stats"]["draft_forwards"] == 0


def test_stop_tokens_end_the_output(models: list[str]) -> None:
    first = run("generate", "x", *models, "--ignore-eos", "--json").json()["generations"][0]["token_ids"]
    stop = first[3]
    cut = run("generate", "x", *models, "--ignore-eos", "--stop-token-id", str(stop), "--json").json()["generations"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["token_ids"] == first[: first.index(stop) + 1]


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_the_output(include: bool, models: list[str], tmp_path: Path) -> None:
    """In the answer, on the screen and in the trace: nothing of what the block brought behind them."""
    common = ["generate", "q", *models, "--ignore-eos", "--max-new-tokens", "40"]
    whole = run(*common, "--json").json()["generations"][0]
    end = next(i for i in range(9, 40) if whole["token_ids"][i - 1] < 127 and whole["token_ids"][i] < 127)
    stop = bytes(whole["token_ids"][end - 1 : end + 1]).decode()
    options = ["--stop", stop, "--trace", tmp_path / "t.json", *["--include-stop-str"] * include]
    cut = run(*common, *options, "--json").json()["generations"][0]
    at = whole["text"].index(stop)
    assert cut["text"] == whole["text"][: at + len(stop) * include]
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert bytes(cut["token_ids"]).endswith(stop.encode())
    assert (cut["finish_reason"], cut["matched_stop"]) == ("stop", stop)

    trace = Trace.load(tmp_path / "t.json")
    assert [token for r in trace.rounds for token in r.requests[0].committed] == cut["token_ids"][1:]
    assert trace.rounds[-1].requests[0].finish_reason == "stop"
    shown = run(*common, *options)
    assert shown.out.startswith("q" + report.printable(cut["text"]) + "\n\n")
    assert f"finish reason stop at {stop!r}" in shown.out


@pytest.mark.parametrize(
    ("stop", "status", "words"),
    [
        ("", 2, "a stop string is empty"),
        ("\ufffd", 2, "no text"),
        ("<|endoftext|>", 1, "is a special token, which is not part of a text: give its id, 256, in --stop-token-id"),
    ],
)
def test_stop_strings_that_never_occur(stop: str, status: int, words: str, folder: Path, tmp_path: Path) -> None:
    target = shutil.copytree(folder / "target", tmp_path / "target")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(target / "tokenizer.json"))
    failed = run("generate", "x", "--target", target, "--draft", folder / "eagle", "--stop", stop)
    assert (failed.status, failed.out, failed.err.count("\n")) == (status, "", 1)
    assert failed.err.startswith("refspec: ")
    assert words in failed.err


def test_names_of_dtypes_are_the_engines() -> None:
    assert tuple(DTYPES) == generate.DTYPES


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b"one\ntwo", "one\ntwo"),
        (b"one\ntwo\n", "one\ntwo"),
        (b"one\ntwo\n\n", "one\ntwo\n"),
        (b"one\r\ntwo\r\n", "one\ntwo"),
        (b"\xef\xbb\xbfone", "one"),
        ("  é ".encode(), "  é "),
    ],
)
def test_a_prompt_file_is_one_prompt(content: bytes, prompt: str, models: list[str], tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(content)
    for given, stdin in ((tmp_path / "p", None), ("-", content)):
        printed = run("generate", "--prompt-file", given, *models, "--max-new-tokens", "1", "--json", stdin=stdin)
        assert printed.json()["config"]["prompts"] == [prompt]


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        ("generate", 2, 'no prompt: give at least one, as in refspec generate "def fib(n):"'),
        ("generate x --draft-tokens 99", 2, "--draft-tokens is 99, but --topk=4 and --steps=3 give 36 candidates"),
        ("generate x --draft-tokens 1", 2, "--draft-tokens must be at least 2"),
        ("generate x --topk 0", 2, "--topk must be at least 1"),
        ("generate x --topk 300 --draft-tokens 4", 1, "--topk is 300, but the vocabulary has only 256 ids"),
        ("generate x --steps nine", 2, "--steps"),
        ("generate x --max-new-tokens 0", 2, "--max-new-tokens must be at least 1"),
        ("generate x --stop-token-id -1", 2, "--stop-token-id must be at least 0"),
        ("generate x --algorithm medusa", 2, "'medusa' is not one of: eagle, "),
        ("generate x --dtype int8", 2, "'int8' is not one of: float32, float64, bfloat16, float16"),
        ("generate x --no-such-option", 2, "--no-such-option"),
        ("generate x --watch --json", 2, "leave one of them out"),
        ("generate x --device abacus", 1, "'abacus'"),
        ("generate x --kv-slots 0", 1, "--kv-slots must be at least 1"),
        ("generate x --kv-slots 3", 1, "raise --kv-slots"),
        ("generate x --kv-slots 999999999999999", 1, "--kv-slots is"),
        ("generate x --prompt-file no/such/file", 1, "no/such/file: No such file or directory"),
        ("generate x --prompt-file BINARY", 1, "is not UTF-8 text (byte 0)"),
        ("generate --prompt-file EMPTY", 1, "the prompt is empty"),
        ("generate --prompt-file LONG", 1, "600 tokens, but the model's context is 512"),
        ("generate x --trace no/such/folder/t.json", 1, "cannot write the trace no/such/folder/t.json: No such file"),
        ("generate x --trace .", 1, "cannot write the trace .: it is a folder"),
        (
            "generate x --target no/seed/top_k",
            1,
            "no model folder at no/seed/top_k: ",
        ),  # words of options, but the user's
        ("generate x --target no/such --trace no/such/t.json", 1, "the trace"),  # known before the models are loaded
        ("trace show no/such/file", 1, "no/such/file"),
        ("trace show BINARY", 1, "cannot read the trace"),
        ("trace show EMPTY", 1, "is no trace"),
        ("trace", 0, ""),
        ("bench", 0, ""),
        ("trace replay", 2, "No such command 'replay'"),
        ("fly", 2, "No such command 'fly'"),
    ],
)
def test_errors_are_one_line(
    args: str, status: int, words: str, models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("BINARY").write_bytes(b"\xff\xfe\x00")
    Path("EMPTY").write_bytes(b"")
    Path("LONG").write_text("x" * 600)
    failed = run(*args.split(), *(models if "generate" in args and "--target" not in args else []))
    assert failed.status == status
    if status:
        assert failed.out == ""
        assert failed.err.startswith("refspec: ")
        assert words in failed.err
        assert failed.err.count("\n") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["BINARY", "EMPTY", "LONG"]


@pytest.mark.parametrize(
    "option",
    ["--watch", "--trace t.json", "--topk 4", "--steps 3", "--draft-tokens 16", "--no-exact-branch-kv", "--draft d"],
)
def test_plain_decoding_takes_no_options_of_speculation(option: str, models: list[str]) -> None:
    failed = run("generate", "x", *models[:2], "--algorithm", "none", *option.split())
    assert failed.status == 2
    assert "with --algorithm none" in failed.err
    assert "exact-branch-kv" in failed.err or option.split()[0] in failed.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["--target", "huge"],
            "no model folder at huge: give a folder in the Hugging Face layout, or one of the shipped",
        ),
        (["--target", "TARGET"], "needs a draft model"),
        (["--target", "TARGET", "--draft", "TARGET"], "LlamaForCausalLMEagle is needed"),
        (["--target", "DRAFT", "--draft", "DRAFT"], "LlamaForCausalLM is needed"),
    ],
)
def test_models_that_do_not_fit(args: list[str], words: str, models: list[str]) -> None:
    names = {"TARGET": models[1], "DRAFT": models[3]}
    failed = run("generate", "x", *(names.get(arg, arg) for arg in args))
    assert failed.status == 1
    assert failed.out == ""
    assert failed.err.startswith("refspec: ")
    assert words in failed.err
    assert failed.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(models: list[str]) -> None:
    failed = run("generate", "x", *models, "--device", "cuda")
    assert failed.status == 1
    assert failed.err.startswith("refspec: device 'cuda' cannot be used here")


def test_faults_of_refspec_keep_their_traceback(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise IndexError("a fault")

    monkeypatch.setattr("refspec.engine.record.make_trace", fails)
    assert isinstance(CliRunner().invoke(app, ["generate", "x", *models]).exception, IndexError)


def test_ctrl_c(models: list[str]) -> None:
    running = subprocess.Popen(
        command("generate", "--prompt-file", "-", *models),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    assert running.stdin
    running.stdin.write("x" * (1 << 17))  # more than a pipe holds: from now on it reads, and waits for the rest
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=20)
    assert (running.returncode, out, err) == (130, "", "refspec: interrupted\n")


@pytest.mark.parametrize("call", [["-m", "refspec"], ["-c", "from refspec.__main__ import main; main()"]])
def test_ctrl_c_while_the_commands_are_loading(call: list[str], tmp_path: Path) -> None:
    """Called as a module, and as the console script calls it. A stand-in for typer is where it gets no further."""
    (tmp_path / "typer.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n")
    env = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), SOURCE]))
    done = subprocess.run([sys.executable, *call, "--help"], env=env, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "refspec: interrupted\n")


def test_ctrl_c_while_the_command_line_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("typer.core.TyperGroup.parse_args", interrupted)
    done = run("--help")
    assert (done.status, done.out, done.err.splitlines()) == (130, "", ["refspec: interrupted"])


def test_the_console_script_is_the_module() -> None:
    project = tomllib.loads((Path(SOURCE).parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"refspec": "refspec.__main__:main"}


def test_watching_a_run(models: list[str]) -> None:
    terminal = Terminal("generate", "ab", *models, "--max-new-tokens", "6", "--ignore-eos", "--watch")
    try:
        terminal.wait_for("round 0 ")
        terminal.send("g")
        last = terminal.wait_for("up/down")[0]
        terminal.send("q")
        assert terminal.end() == 0
    finally:
        terminal.close()
    after = terminal.output[terminal.output.rindex("\x1b[?1049l") :]
    assert "accept length" in after  # the rest of the report follows
    assert "row token" not in after
    assert last.startswith("round ")


def test_the_progress_bar_waits_then_counts(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = refspec.Engine(models[1], models[3], SpecConfig())
    console = Console(file=StringIO(), force_terminal=True, width=80)
    bar = generate.TokenProgress(engine, 64, console, disable=False)
    engine.stats.committed_tokens = 9
    assert list(bar.get_renderables()) == []
    monkeypatch.setattr(generate, "PATIENCE_SECONDS", -1)
    [shown] = bar.get_renderables()
    console.print(shown)
    assert "9 of at most 64 tokens" in re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())  # type: ignore[attr-defined]


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    for args in (("--help",), ("trace", "schema")):
        running = subprocess.Popen(
            command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(PYTHONUNBUFFERED="")
        )
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(20) == 1


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, tmp_path: Path) -> None:
    """Files that are opened later must not come to be what was closed."""
    (tmp_path / "walk_tree.py").write_text("def walk_tree(*args): return 1\n")
    line = f'"$0" -m refspec grade walk_tree --submission . {closed}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable], cwd=tmp_path, env=environment(), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, b"")
    assert (b"0 of 1 exercise passed" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))


# --- what needs no torch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args", [[], ["--help"], ["--version"], ["trace", "schema"], ["generate", "--help"], ["generate"]]
)
def test_answers_without_torch(args: list[str]) -> None:
    script = f"""
import sys
sys.modules["torch"] = None  # whoever imports it fails
sys.argv = ["refspec", *{args!r}]
from refspec.cli.main import app
app()
"""
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert done.returncode == (2 if args == ["generate"] else 0), done.stderr


def test_version_and_help() -> None:
    assert run("--version").out == f"refspec {refspec.__version__}\n"
    assert run().out == run("--help").out
    for name in ("generate", "demo", "doctor", "trace", "bench"):
        assert f"\n  {name} " in run().out
    assert all(len(line) <= 80 for line in run("generate", "--help").out.splitlines())


def test_schema_is_the_traces() -> None:
    assert json.loads(run("trace", "schema").out) == Trace.model_json_schema()


# --- traces ---------------------------------------------------------------------------------------------------------


def test_a_trace_comes_back(models: list[str], tmp_path: Path) -> None:
    file = tmp_path / "a trace.json"
    printed = run("generate", "ab", "cd", *models, "--max-new-tokens", "6", "--json", "--trace", file).json()
    trace = Trace.load(file)
    assert [list(output.token_ids) for output in trace.outputs] == [g["token_ids"] for g in printed["generations"]]
    assert [output.accept_lens for output in trace.outputs] == [g["accept_lens"] for g in printed["generations"]]
    assert [output.prompt_ids for output in trace.outputs] == [[97, 98], [99, 100]]
    assert len(trace.rounds) == printed["stats"]["rounds"]
    assert trace.config["topk"] == 4
    assert trace.vocabulary[97] == "a"
    seen = {c.token for r in trace.rounds for t in r.requests for c in t.candidates}
    assert seen <= set(trace.vocabulary)
    shown = run("trace", "show", file)
    assert shown.status == 0
    assert shown.out.count("row token") == 2 * len(trace.rounds)
    assert [path.name for path in tmp_path.iterdir()] == ["a trace.json"]


def test_the_tree_after_generating_is_the_traces(models: list[str], tmp_path: Path) -> None:
    """One renderer: what generate shows of a round is what trace show shows of it."""
    shown = run("generate", "ab", *models, "--max-new-tokens", "6", "--trace", tmp_path / "t.json").out
    tree = shown[shown.index("round ") : shown.index("phase ")].strip()
    assert tree in run("trace", "show", tmp_path / "t.json").out
    watched = run("generate", "ab", *models, "--max-new-tokens", "6", "--watch").out  # no terminal: all rounds
    assert run("trace", "show", tmp_path / "t.json").out in watched


def test_a_failing_run_leaves_the_old_trace(models: list[str], tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    assert run("generate", "ab", *models, "--max-new-tokens", "6", "--trace", file).status == 0
    file.chmod(0o640)
    before = file.read_bytes()
    assert run("generate", "ab", *models, "--kv-slots", "3", "--trace", file).status == 1
    assert file.read_bytes() == before
    assert run("generate", "ab", *models, "--max-new-tokens", "3", "--trace", file).status == 0
    assert file.read_bytes() != before
    assert file.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_a_full_disk_leaves_the_old_trace(models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_halfway(self: Trace, file: Path) -> None:
        file.write_text('{"half')
        raise OSError(28, "No space left on device", str(file))

    file = tmp_path / "t.json"
    file.write_text("good")
    monkeypatch.setattr(Trace, "save", fails_halfway)
    failed = run("generate", "ab", *models, "--max-new-tokens", "3", "--trace", file)
    assert failed.err == f"refspec: cannot write the trace {file}: No space left on device\n"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("t.json", "good")]


def test_links_and_devices_are_written_through(models: list[str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real.json")
    for file in (tmp_path / "link", Path("/dev/null")):
        assert run("generate", "ab", *models, "--max-new-tokens", "3", "--trace", file).status == 0
    assert (tmp_path / "link").is_symlink()
    assert Trace.load(tmp_path / "real.json").rounds
    assert Path("/dev/null").is_char_device()


# --- demo -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' models in the place of the shipped ones."""
    monkeypatch.setattr(checkpoint, "SHIPPED_FOLDER", folder)
    monkeypatch.setattr(demo, "NEW_TOKENS", 6)


@pytest.mark.usefixtures("shipped")
def test_demo() -> None:
    report = run("demo", "--json").json()
    assert report["ok"]
    assert [c["name"] for c in report["contestants"]] == ["plain", "EAGLE k1 S5 N6", "EAGLE k4 S3 N16"]
    for contestant in report["contestants"]:
        assert contestant["same_outputs"] == len(report["prompts"])
        assert contestant["forwards"]["prefill_target"] == len(report["prompts"])  # what warms up is not counted
        assert contestant["ratio_to_plain"] > 0
    shown = run("demo")
    assert shown.status == 0
    assert all(len(line.rstrip()) <= 80 for line in shown.out.splitlines())
    assert f"{len(report['prompts'])} of {len(report['prompts'])}" in shown.out


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize(("gap", "status", "words"), [(1e-6, 0, "rounding can do that"), (0.5, 1, "a fault")])
def test_demo_with_a_difference(gap: float, status: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare.Difference(index=3, gap=gap, gap_limit=1e-4, plain_token=1, spec_token=2)
    monkeypatch.setattr(compare, "first_difference", lambda *_: found)
    shown = run("demo")
    assert shown.status == status
    assert words in " ".join(shown.out.split())
    assert "0 of 8" in shown.out


@pytest.mark.usefixtures("shipped")
def test_shipped_names_are_the_defaults() -> None:
    config = run("generate", "x", "--max-new-tokens", "2", "--json").json()["config"]
    assert (config["target"], config["draft"]) == ("tiny", "tiny-eagle")


# --- a busy machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "own", "left"), [(0.1, None, None), (3.0, None, "1000"), (3.0, "7", "7")])
def test_threads_do_not_spin_on_a_busy_machine(
    load: float, own: str | None, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refspec.__main__ import wait_politely_where_others_work

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if own:
        monkeypatch.setenv("GOMP_SPINCOUNT", own)
    wait_politely_where_others_work()
    assert os.environ.get("GOMP_SPINCOUNT") == left


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_stdout_that_is_full_is_named() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "refspec", "--version"], stdout=full, stderr=subprocess.PIPE)
    said = b"refspec: cannot write to standard output, or to a temporary file: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)
