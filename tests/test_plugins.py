"""Algorithms from packages: that of tests/plugin_example works everywhere, and a broken one is told in a line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from builders import assert_same_output, generate_watched, hash_of, random_logits
from serving import assert_all_back
from typer.testing import CliRunner

import refspec
from refspec import Engine, SamplingParams, SpecConfig
from refspec.cli.main import app
from refspec.doctor import PROBES, examine
from refspec.models.scripted import ScriptedModel
from refspec.workers.registry import find_algorithm

EXAMPLE = Path(__file__).with_name("plugin_example")
PROJECT = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VOCAB = 11


def install(folder: Path, package: str, points: dict[str, str], modules: dict[str, str], summary: str = "") -> None:
    """What pip leaves behind: the modules, and a folder that says what the package is and offers."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    described = f"Summary: {summary}\n" if summary else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n{described}")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[refspec.algorithms]", *lines, ""]))
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that packages can be installed in, on the path of this process and of those that it starts."""
    folder = tmp_path / "site"
    monkeypatch.syspath_prepend(str(folder))
    source = str(Path(refspec.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, str(folder)]))
    for name in ("repeat_last", "other"):  # as an earlier test may have imported it
        sys.modules.pop(name, None)
    return folder


@pytest.fixture
def example(site: Path) -> Path:
    points = PROJECT["entry-points"]["refspec.algorithms"]
    module = (EXAMPLE / "repeat_last.py").read_text(encoding="utf-8")
    install(site, PROJECT["name"], points, {"repeat_last": module}, PROJECT["description"])
    return site


def loop_of(period: int) -> ScriptedModel:
    """It says what it said `period` tokens ago, but in one of six contexts something else."""
    other = random_logits(VOCAB, salt=3)

    def next_logits(context: list[int]) -> Sequence[float]:
        if len(context) < period or hash_of(context[-2:], 11) % 6 == 0:
            return other(context)
        return [8.0 * (token == context[-period]) + 0.01 * token for token in range(VOCAB)]

    return ScriptedModel(next_logits, VOCAB)


# --- the example ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("page_size", "prefix_cache", "chunk_size"), [(1, False, None), (4, True, 5)])
def test_the_examples_output_is_plain_decodings(
    page_size: int, prefix_cache: bool, chunk_size: int | None, temperature: float, example: Path
) -> None:
    """A pool that is too small for all at once, so that some are retracted, and read what they said again.

    A sampled output, too, is the same to the token: guesses that were looked up are not judged by coins of their own.
    """
    model = loop_of(5)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=temperature, seed=1)
    prompts = [[(p * p) % 7 for p in range(3 + 4 * i)] for i in range(5)]
    plain = Engine(model).generate(prompts, params)
    spec = find_algorithm("repeat-last").spec(page_size=page_size)
    assert spec == SpecConfig("repeat-last", topk=1, num_steps=4, num_draft_tokens=5, page_size=page_size)
    engine = Engine(
        model, spec=spec, kv_slots=120, page_size=page_size, prefix_cache=prefix_cache, chunk_size=chunk_size
    )
    outputs = engine.generate(prompts, params)
    assert_same_output(plain, outputs)
    assert_all_back(engine)
    assert engine.stats.retractions > 0
    assert engine.stats.accept_length > 1.5  # the text repeats itself, and the guesses find that
    assert 0 < engine.stats.accept_rate < 1


def test_the_examples_rounds_can_be_observed(example: Path) -> None:
    engine = Engine(loop_of(3), spec=find_algorithm("repeat-last").spec(num_steps=2))
    [output], watcher = generate_watched(engine, [[1, 2, 3, 1, 2]], SamplingParams(max_new_tokens=20))
    assert [len(request.committed) for request in watcher.requests] == output.accept_lens
    first = watcher.requests[0]
    assert [candidate.token for candidate in first.candidates] == [1, 2]  # after 2, 3 that was said once before


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (
            {},
            "topk is 4, but with algorithm repeat-last it must be 1 .* SpecConfig.*topk=1, num_steps=4, num_draft_tok",
        ),
        ({"topk": 1, "num_steps": 3, "num_draft_tokens": 3}, "num_draft_tokens is 3, .* it must be 4"),
        (
            {"topk": 1, "num_steps": 3, "num_draft_tokens": 4, "sampler": "block"},
            "sampler is 'block', .* it must be 'target_only'",
        ),
    ],
)
def test_a_config_that_the_example_cannot_work_with(changed: dict[str, object], complaint: str, example: Path) -> None:
    with pytest.raises(ValueError, match=complaint) as refusal:
        Engine(loop_of(3), spec=SpecConfig("repeat-last", **changed))  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


def test_generate_knows_the_example(example: Path) -> None:
    """In a process of its own, which finds the package as any would."""
    command = [sys.executable, "-m", "refspec", "generate", "def f(x):", "--max-new-tokens", "12", "--json"]
    done = subprocess.run([*command, "--algorithm", "repeat-last"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    config = printed["config"]
    assert [config[name] for name in ("topk", "num_steps", "num_draft_tokens", "draft")] == [1, 4, 5, None]
    assert printed["stats"]["rounds"] == len(printed["generations"][0]["accept_lens"]) > 0
    [plain] = Engine().generate(["def f(x):"], SamplingParams(max_new_tokens=12))
    assert printed["generations"][0]["token_ids"] == plain.token_ids


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_example_is_offered(example: Path) -> None:
    status, out, _ = run("generate", "--help")
    assert status == 0
    assert "repeat-last" in out
    assert PROJECT["description"] in " ".join(out.split())
    assert run("generate", "x", "--algorithm", "medusa")[2].endswith("repeat-last, none\n")
    assert PROBES["algorithms"]()["drafts"]["repeat-last"] is None  # what the doctor lists


@pytest.mark.parametrize(
    "option",
    ["--topk 1", "--draft-tokens 5", "--sampler target_only", "--threshold-acc 0.5", "--ngram-max-bfs-breadth 3"],
)
def test_options_that_the_example_ignores_are_refused(option: str, example: Path) -> None:
    status, out, err = run("generate", "x", "--algorithm", "repeat-last", *option.split())
    assert (status, out) == (2, "")
    assert (
        err
        == f"refspec: {option.split()[0]} is given, but algorithm repeat-last leaves no choice there: leave it out\n"
    )


def test_the_example_takes_no_draft(example: Path) -> None:
    status, _, err = run("generate", "x", "--algorithm", "repeat-last", "--draft", "tiny-eagle")
    assert status == 1
    assert err == "refspec: a draft model is given, but algorithm repeat-last needs none: leave it out\n"


# --- broken ones ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "module", "complaint"),
    [
        ("other:ALGORITHM", "import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("other:ALGORITHM", "raise RuntimeError('two\\nlines')", "cannot be loaded (RuntimeError: two)"),
        ("other:ALGORITHM", "def (", "cannot be loaded (SyntaxError: "),
        ("other:ALGORITHM", "", "cannot be loaded (AttributeError: "),
        ("other:ALGORITHM", "ALGORITHM = 'slow'", "which is no Algorithm of refspec.workers.registry but 'slow'"),
        (
            "other:ALGORITHM",
            "from refspec.workers.registry import Algorithm\nALGORITHM = Algorithm('fast', '', print)",
            "which is an Algorithm of another name, 'fast'",
        ),
        (
            "other:ALGORITHM",
            "from refspec.workers.registry import Algorithm\nALGORITHM = Algorithm('slow', '', print, fixed=('k',))",
            "which speaks of 'k', but SpecConfig has no such field",
        ),
        ("nowhere:ALGORITHM", "", "ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_a_broken_package_is_one_line(
    value: str, module: str, complaint: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "slow-drafts", {"slow": value}, {"other": module})
    status, out, err = run("generate", "x", "--algorithm", "slow")
    assert (status, out) == (1, "")
    assert err.startswith(f"refspec: algorithm 'slow' comes from {value} of the package slow-drafts, which ")
    assert complaint in err
    assert err.count("\n") == 1
    assert run("generate", "--help")[0] == 0  # nothing of it is imported for that
    with pytest.raises(ValueError, match="slow-drafts"):
        Engine(loop_of(3), spec=SpecConfig("slow"))


def test_a_package_that_builds_no_worker(site: Path) -> None:
    module = "from refspec.workers.registry import Algorithm\nALGORITHM = Algorithm('slow', '', lambda setup: 5)"
    install(site, "slow-drafts", {"slow": "other:ALGORITHM"}, {"other": module})
    status, out, err = run("generate", "x", "--algorithm", "slow")
    assert (status, out, err) == (1, "", "refspec: algorithm slow has built 5, which is no Worker\n")


def test_two_packages_with_one_name(example: Path) -> None:
    install(example, "another", {"repeat-last": "other:ALGORITHM"}, {"other": ""})
    status, _, err = run("generate", "x", "--algorithm", "repeat-last")
    assert status == 1
    assert "'repeat-last' is offered by" in err
    assert "another" in err
    assert PROJECT["name"] in err
    assert err.count("\n") == 1


def test_a_built_in_name_is_not_taken_over(site: Path) -> None:
    """The built-in one runs, and a line says so: in the engine, on the command line, and by the doctor."""
    install(site, "better-heads", {"eagle": "other:ALGORITHM"}, {"other": "raise SystemExit"})
    line = "algorithm 'eagle' is the built-in one: what better-heads offers under that name is not used"
    model = loop_of(3)
    assert Engine(model, model, SpecConfig()).notes == [line]
    status, _, err = run("generate", "x", "--max-new-tokens", "4")
    assert (status, err) == (0, f"refspec: {line}\n")
    status, out, err = run("generate", "x", "--max-new-tokens", "4", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["notes"] == [line]
    [check] = [check for check in examine() if check.name == "algorithms"]
    assert not check.ok
    assert check.found == line


def test_the_example_is_a_package(tmp_path: Path) -> None:
    """pip finds in it what the tests above have put in place by hand."""
    shutil.copytree(EXAMPLE, tmp_path / "source")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(tmp_path / "there")]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(tmp_path / "source")], check=True, timeout=120
    )
    [info] = (tmp_path / "there").glob("*.dist-info")
    points = PROJECT["entry-points"]["refspec.algorithms"]
    lines = (info / "entry_points.txt").read_text().splitlines()
    assert lines == ["[refspec.algorithms]", *(f"{name} = {value}" for name, value in points.items())]
    assert (tmp_path / "there" / "repeat_last.py").is_file()
