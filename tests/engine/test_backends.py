"""The engine on Triton's kernels, attention among them, says token for token what it says on their references.

In the interpreter, where there is no GPU. Runs are short: it takes a tenth of a second for each attention.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import needs_interpreter
from builders import (
    agreeing_now_and_then,
    assert_all_free,
    assert_same_output,
    generate_watched,
    llama_config,
    random_head,
    random_llama,
    random_logits,
    saved_head,
    saved_target,
    transparent_pair,
)
from typer.testing import CliRunner

from refspec import Engine, SamplingParams, SpecConfig
from refspec.__main__ import interpret_kernels_where_no_gpu_is
from refspec.bench import engine as bench
from refspec.cli.main import app
from refspec.engine import engine as engine_module
from refspec.engine.compare import first_difference
from refspec.kernels import backend as backends
from refspec.models.scripted import ScriptedModel

SPECS = {
    "plain": None,
    "chain": SpecConfig(topk=1, num_steps=2, num_draft_tokens=3),
    "tree": SpecConfig(topk=4, num_steps=2, num_draft_tokens=7),
    "exact tree": SpecConfig(topk=4, num_steps=3, num_draft_tokens=7, exact_branch_kv=True),
    "chain that overlaps": SpecConfig("eagle-v2", topk=1, num_steps=2, num_draft_tokens=3),
    "tree that overlaps": SpecConfig("eagle-v2", topk=4, num_steps=2, num_draft_tokens=7),
}
PROMPTS = [[0, 3, 4, 5], [0, 9]]  # of unequal length: rows are padded, and outputs must not notice
VOCAB = 11


def pair(dtype: torch.dtype) -> tuple[Any, Any]:
    target, head = transparent_pair()
    return target.to(dtype), head.to(dtype)


@needs_interpreter
@pytest.mark.parametrize("shape", SPECS)
def test_weights(shape: str) -> None:
    """float64 and a draft that guesses right: whole paths are accepted, through masks, positions and slots."""
    target, head = transparent_pair()
    spec, params = SPECS[shape], SamplingParams(max_new_tokens=7)
    on_torch = Engine(target, head if spec else None, spec, backend="torch").generate(PROMPTS, params)
    engine = Engine(target, head if spec else None, spec, backend="triton")
    on_triton, watcher = generate_watched(engine, PROMPTS, params)
    assert_same_output(on_torch, on_triton)
    assert [g.accept_lens for g in on_triton] == [g.accept_lens for g in on_torch]
    layers = target.config.num_hidden_layers
    assert engine.stats.launches["tree_attention"] == layers * sum(engine.stats.forwards.values())
    assert spec is None or max(len(tree.accepted_rows) for tree in watcher.requests) > 1


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_other_types(dtype: torch.dtype) -> None:
    target, head = pair(dtype)
    params = SamplingParams(max_new_tokens=5)
    on_torch, on_triton = (
        Engine(target, head, SPECS["tree"], backend=backend).generate(PROMPTS, params)
        for backend in ("torch", "triton")
    )
    assert_same_output(on_torch, on_triton)


@needs_interpreter
@pytest.mark.parametrize("shape", SPECS)
def test_scripted_models(shape: str) -> None:
    """They have no attention; trees, walks and slots go through kernels all the same."""
    target = ScriptedModel(random_logits(VOCAB), VOCAB)
    draft = ScriptedModel(agreeing_now_and_then(random_logits(VOCAB), random_logits(VOCAB, salt=5)), VOCAB)
    spec, params = SPECS[shape], SamplingParams(max_new_tokens=9)
    outputs = []
    for backend in ("torch", "triton"):
        engine = Engine(target, draft if spec else None, spec, backend=backend)
        generations, _ = generate_watched(engine, PROMPTS, params)
        outputs.append(generations)
    assert_same_output(*outputs)


@needs_interpreter
def test_streams_take_turns_with_another_engine() -> None:
    """The backend holds for a step, not for as long as a stream is open."""
    target, head = transparent_pair()
    params = SamplingParams(max_new_tokens=6)
    on_torch, on_triton = (Engine(target, head, SPECS["chain"], backend=name) for name in ("torch", "triton"))
    (expected,) = on_torch.generate(PROMPTS[:1], params)
    before = on_torch.stats.launches["tree_attention"], backends.resolve_backend("auto", torch.device("cpu"))
    streams = [engine.stream(PROMPTS[0], params) for engine in (on_triton, on_torch)]
    tokens: list[list[int]] = [[], []]
    for blocks in zip(*streams, strict=True):
        for told, block in zip(tokens, blocks, strict=True):
            told += block.token_ids
        assert backends.resolve_backend("auto", torch.device("cpu")) == before[1]
    assert tokens == [expected.token_ids] * 2
    assert on_torch.stats.launches["tree_attention"] == before[0] == 0
    assert on_triton.stats.launches["tree_attention"] > 0
    assert_all_free(on_triton)


@needs_interpreter
def test_compare_asks_on_the_engines_own_backend() -> None:
    target, _ = transparent_pair()
    engine = Engine(target, backend="triton")
    before = backends_launches()
    difference = first_difference(engine, PROMPTS[1], [1, 2], [1, 3])
    assert difference is not None
    assert difference.index == 1
    assert backends_launches() > before


def backends_launches() -> int:
    from refspec.kernels import launches

    return launches["tree_attention"]


# --- which one --------------------------------------------------------------------------------------------------------


def test_auto_is_the_references_on_a_cpu_and_what_is_asked_for_otherwise() -> None:
    model = ScriptedModel(random_logits(VOCAB), VOCAB)
    assert Engine(model).backend == Engine(model, backend="torch").backend == "torch"
    with backends.use_backend("triton" if backends.interpreting() else "torch"):
        assert Engine(model).backend == backends.resolve_backend("auto", torch.device("cpu"))
        assert Engine(model, backend="torch").backend == "torch"


@pytest.mark.parametrize(
    ("missing", "message"), [("interpreter", "TRITON_INTERPRET=1"), ("triton", "Triton is not installed")]
)
def test_a_backend_that_cannot_run_is_refused_at_once(
    missing: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "interpreting", lambda: False)
    monkeypatch.setattr(backends, "TRITON_INSTALLED", missing != "triton")
    monkeypatch.setattr(engine_module, "load_target", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match=message):
        Engine("tiny", device="cpu", backend="triton")
    with pytest.raises(ValueError, match="backend is 'cuda', it must be one of: auto, torch, triton"):
        Engine("tiny", device="cpu", backend="cuda")


# --- the command line -------------------------------------------------------------------------------------------------


@needs_interpreter
def test_NGR_04_generate_runs_on_the_backend_that_was_asked_for(tmp_path: Path) -> None:
    target = random_llama(llama_config(vocab_size=256, num_hidden_layers=1), dtype=torch.float32)
    models = [saved_target(tmp_path / "target", target), saved_head(tmp_path / "eagle", random_head(target))]
    args = ["generate", "x", "--target", str(models[0]), "--draft", str(models[1]), "--max-new-tokens", "4", "--json"]
    documents = []
    for backend in ("torch", "triton"):
        done = CliRunner().invoke(app, [*args, "--device", "cpu", "--backend", backend])
        assert done.exit_code == 0, done.output
        assert done.stderr == ""
        documents.append(json.loads(done.stdout))
    assert [document["config"]["backend"] for document in documents] == ["torch", "triton"]
    assert ["tree_attention" in document["stats"]["launches"] for document in documents] == [False, True]
    assert documents[0]["generations"] == documents[1]["generations"]
    args.remove("--json")
    args[args.index("--max-new-tokens") + 1] = "1"  # what is said does not depend on it
    for backend, said in (
        ("torch", ""),
        ("triton", "Triton's interpreter runs the kernels here: a round takes seconds.\n"),
    ):
        assert CliRunner().invoke(app, [*args, "--device", "cpu", "--backend", backend]).stderr == said


@pytest.mark.parametrize("command", [["demo"], ["bench", "engine", "--prompts", "1"]])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_NGR_04_the_backend_arrives(command: list[str], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first engine that the command makes; that is as far as it gets."""
    asked_for: list[str] = []

    def refuse(*_: object, backend: str = "auto", **__: object) -> None:
        asked_for.append(backend)
        raise ValueError("far enough")

    monkeypatch.setattr(engine_module, "Engine", refuse)
    monkeypatch.setattr(bench, "Engine", refuse)
    done = CliRunner().invoke(app, [*command, "--backend", backend])
    assert (done.exit_code, asked_for) == (1, [backend])
    assert ("a round takes seconds" in done.stderr) == (backend == "triton" and backends.interpreting())


@pytest.mark.parametrize("command", [["generate", "x"], ["demo"], ["bench", "engine"]])
def test_an_unknown_backend_is_a_usage_error(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--backend", "cuda"])
    assert done.exit_code == 2
    assert "'cuda' is not one of: auto, torch, triton" in done.stderr


class Driver:
    """NVIDIA's, as far as we ask it."""

    def __init__(self, status: int, gpus: int) -> None:
        self.status, self.gpus = status, gpus

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.gpus
        return 0


@pytest.mark.parametrize(
    ("driver", "own", "left"),
    [
        (None, None, "1"),
        (Driver(100, 0), None, "1"),  # CUDA_ERROR_NO_DEVICE: none, or CUDA_VISIBLE_DEVICES hides them
        (Driver(0, 0), None, "1"),
        (Driver(0, 2), None, None),
        (None, "0", "0"),
        (Driver(0, 2), "1", "1"),
    ],
)
def test_kernels_are_interpreted_where_no_gpu_is(
    driver: Driver | None, own: str | None, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if own is not None:
        monkeypatch.setenv("TRITON_INTERPRET", own)
    interpret_kernels_where_no_gpu_is()
    assert os.environ.get("TRITON_INTERPRET") == left


def python(code: Sequence[str], **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", "\n".join(code)]
    return subprocess.run(command, env=env | environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(not backends.TRITON_INSTALLED, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_decides_before_triton_is_imported_and_the_library_leaves_it_alone() -> None:
    told = python(
        [
            "import sys",
            "from refspec import __main__ as command",
            "import refspec.cli.main",
            "assert 'triton' not in sys.modules and 'torch' not in sys.modules",
            "sys.argv = ['refspec', '--version']",
            "try: command.main()",
            "except SystemExit: pass",
            "from refspec.kernels.backend import interpreting",
            "print(interpreting())",
        ]
    )
    assert told.splitlines()[-1] == "True"
    library = [
        "import refspec.engine.engine",
        "from refspec.kernels.backend import interpreting",
        "print(interpreting())",
    ]
    assert python(library) == "False"
