"""--algorithm, for whatever is registered: its options arrive, its defaults suit it, what it ignores is refused.

The weights are the shipped ones, as they are for whoever tries an algorithm.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from refspec import Engine, SamplingParams, SpecConfig
from refspec.cli.algorithm import SPEC_FIELDS
from refspec.cli.main import app
from refspec.config import ALGORITHMS
from refspec.workers.registry import BUILT_IN, Algorithm

PROMPT = "def is_prime(n):\n"
# A value for each option of speculation that is nobody's default, and what is written for it.
UNUSUAL: dict[str, tuple[Any, list[str]]] = {
    "topk": (3, ["--topk", "3"]),
    "steps": (2, ["--steps", "2"]),
    "draft_tokens": (5, ["--draft-tokens", "5"]),
    "exact_branch_kv": (True, ["--exact-branch-kv"]),
    "sampler": ("block", ["--sampler", "block"]),
    "threshold_single": (0.9, ["--threshold-single", "0.9"]),
    "threshold_acc": (0.8, ["--threshold-acc", "0.8"]),
    "exact_penalties": (False, ["--no-exact-penalties"]),
    "adaptive_steps": ((1, 2), ["--adaptive-steps", "1,2"]),
    "ngram_max_trie_depth": (7, ["--ngram-max-trie-depth", "7"]),
    "ngram_max_bfs_breadth": (3, ["--ngram-max-bfs-breadth", "3"]),
    "ngram_match_type": ("PROB", ["--ngram-match-type", "PROB"]),
    "ngram_capacity": (5000, ["--ngram-capacity", "5000"]),
}


def run(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(args))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def generate(*options: str) -> Any:
    status, out, err = run("generate", PROMPT, "--max-new-tokens", "12", "--json", *options)
    assert (status, err) == (0, "")
    return json.loads(out)


@pytest.fixture(scope="module")
def plain() -> list[int]:
    [generation] = Engine().generate([PROMPT], SamplingParams(max_new_tokens=12))
    return generation.token_ids


def leaves_open(algorithm: Algorithm, option: str) -> bool:
    try:
        algorithm.spec(**{SPEC_FIELDS[option]: UNUSUAL[option][0]})
    except ValueError as error:
        return "leaves no choice" not in str(error)
    return True


def test_every_option_is_known_here() -> None:
    assert set(UNUSUAL) == set(SPEC_FIELDS)
    for option, (value, _) in UNUSUAL.items():
        assert value not in [getattr(algorithm.spec(), SPEC_FIELDS[option]) for algorithm in BUILT_IN.values()]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_NGR_04_unusual_options_arrive_and_the_drafter_runs(name: str, plain: list[int]) -> None:
    algorithm = BUILT_IN[name]
    # Those that want a chain come below.
    given = [option for option in UNUSUAL if leaves_open(algorithm, option)]
    given = [option for option in given if option not in ("sampler", "adaptive_steps")]
    printed = generate("--algorithm", name, *(word for option in given for word in UNUSUAL[option][1]))
    expected = algorithm.spec(**{SPEC_FIELDS[option]: UNUSUAL[option][0] for option in given})
    for field in set(SPEC_FIELDS.values()) - {"adaptive_steps"}:
        assert printed["config"][field] == getattr(expected, field)
    for option in given:
        assert printed["config"][SPEC_FIELDS[option]] == UNUSUAL[option][0]
    stats, [generation] = printed["stats"], printed["generations"]
    assert generation["token_ids"] == plain
    assert stats["rounds"] == len(generation["accept_lens"]) > 0
    assert stats["target_forwards"] - stats["rounds"] in (0, 1)  # one that was launched ahead comes to nothing
    assert stats["candidates"] > 0
    assert (stats["draft_forwards"] + stats["extend_forwards"] > 0) == (algorithm.shipped_draft is not None)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_NGR_04_options_of_chains_arrive(name: str) -> None:
    """Sampled by block verification; greedily with steps that change."""
    if not leaves_open(BUILT_IN[name], "sampler"):
        return  # refused: see below
    topk = ["--topk", "1"] if leaves_open(BUILT_IN[name], "topk") else []
    printed = generate("--algorithm", name, "--sampler", "block", "--temperature", "0.8", "--steps", "2", *topk)
    config = printed["config"]
    assert [config[field] for field in ("sampler", "topk", "num_steps", "num_draft_tokens")] == ["block", 1, 2, 3]
    assert printed["stats"]["draft_forwards"] + printed["stats"]["extend_forwards"] > 0
    if BUILT_IN[name].adaptive:
        config = generate("--algorithm", name, "--adaptive-steps", "1,2,4")["config"]
        assert [config[field] for field in ("topk", "num_steps", "num_draft_tokens")] == [1, 4, 5]
        assert config["adaptive_steps"] == [1, 2, 4]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_options_an_algorithm_has_what_suits_it(name: str, plain: list[int]) -> None:
    """As a library too: the config that `spec` gives is one that the engine takes."""
    printed, expected = generate("--algorithm", name), BUILT_IN[name].spec()
    assert printed["config"]["algorithm"] == name
    for field in SPEC_FIELDS.values():
        value = getattr(expected, field)
        assert printed["config"][field] == (list(value) if isinstance(value, tuple) else value)
    assert printed["config"]["draft"] == BUILT_IN[name].shipped_draft
    assert printed["generations"][0]["token_ids"] == plain


@pytest.mark.parametrize("name", ALGORITHMS)
def test_options_that_an_algorithm_ignores_are_refused(name: str) -> None:
    algorithm = BUILT_IN[name]
    ignored = [option for option in UNUSUAL if not leaves_open(algorithm, option)]
    assert ignored  # there are n-gram's own, and those of a draft
    for option in ignored:
        status, out, err = run("generate", PROMPT, "--algorithm", name, *UNUSUAL[option][1])
        assert (status, out) == (2, "")
        assert err == (
            f"refspec: {UNUSUAL[option][1][0]} is given, but algorithm {name} leaves no choice there: leave it out\n"
        )


@pytest.mark.parametrize("option", [*UNUSUAL, "draft"])
def test_plain_decoding_ignores_none_of_them_either(option: str) -> None:
    words = UNUSUAL[option][1] if option in UNUSUAL else ["--draft", "tiny-eagle"]
    status, out, err = run("generate", PROMPT, "--algorithm", "none", *words)
    assert (status, out) == (2, "")
    assert err.endswith(" with --algorithm none: it is for speculation, leave one of them out\n")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_draft_may_be_named(name: str, plain: list[int]) -> None:
    draft = BUILT_IN[name].shipped_draft
    if draft:
        printed = generate("--algorithm", name, "--draft", draft)
        assert printed["config"]["draft"] == draft
        assert printed["generations"][0]["token_ids"] == plain
    status, out, err = run("generate", PROMPT, "--algorithm", name, "--draft", "no/such/folder")
    assert (status, out) == (1, "")
    assert ("no/such/folder" if draft else f"algorithm {name} needs none: leave it out") in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ([], (4, 3, 16)),
        (["--topk", "1"], (1, 3, 4)),
        (["--topk", "1", "--steps", "5"], (1, 5, 6)),
        (["--topk", "1", "--steps", "5", "--draft-tokens", "3"], (1, 5, 3)),
        (["--topk", "2", "--steps", "2"], (2, 2, 7)),
        (["--steps", "1"], (4, 1, 5)),
        (["--topk", "8", "--steps", "5"], (8, 5, 16)),
    ],
)
def test_a_tree_has_as_many_nodes_as_there_are(options: list[str], shape: tuple[int, int, int]) -> None:
    config = generate(*options)["config"]
    assert (config["topk"], config["num_steps"], config["num_draft_tokens"]) == shape


def test_notes_are_told_in_the_words_of_options() -> None:
    options = ["--topk", "1", "--draft-tokens", "2", "--exact-branch-kv", "--max-new-tokens", "4"]
    status, _, err = run("generate", PROMPT, *options)
    assert status == 0
    exact, cut = err.splitlines()
    assert exact.startswith("refspec: --exact-branch-kv changes nothing with --topk=1: ")
    assert cut.startswith("refspec: --draft-tokens is 2, so that no more than 1 of a chain's 3 tokens can be accepted")
    status, out, err = run("generate", PROMPT, *options, "--json")
    assert (status, err) == (0, "")
    assert [note.split()[0] for note in json.loads(out)["notes"]] == ["exact_branch_kv", "num_draft_tokens"]


@pytest.mark.parametrize("name", [*ALGORITHMS, "none"])
def test_serve_demo_serves_by_any(name: str) -> None:
    options = ["--max-new-tokens", "6", "--algorithm", name, "--every", "1", "--dtype", "float64", "--json"]
    status, out, err = run("serve-demo", PROMPT, "import os\n", *options)
    assert (status, err) == (0, "")
    printed = json.loads(out)
    assert printed["config"]["algorithm"] == name
    assert printed["summary"]["same_outputs"] == 2
    if name != "none":
        assert printed["config"]["num_draft_tokens"] == BUILT_IN[name].spec().num_draft_tokens


def test_help_says_what_each_is() -> None:
    for command in ("generate", "serve-demo"):
        status, out, _ = run(command, "--help")
        assert status == 0
        assert all(len(line) <= 80 for line in out.splitlines())
        listed = " ".join(out.partition("\nAlgorithms:\n")[2].split())
        for name, summary in ALGORITHMS.items():
            assert f"{name} {summary}" in listed
            assert BUILT_IN[name].summary == summary


def test_defaults_that_are_in_nobodys_way() -> None:
    """A default that SpecConfig has as well would be a second copy of it; a fixed field must be one."""
    own = SpecConfig()
    for algorithm in BUILT_IN.values():
        assert all(getattr(own, field) != value for field, value in algorithm.defaults.items())
        assert all(hasattr(own, field) for field in algorithm.fixed)
