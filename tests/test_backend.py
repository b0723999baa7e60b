"""Which implementation a backend means, where."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from refspec import kernels
from refspec.kernels import backend
from refspec.kernels.backend import choose, resolve_backend, use_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is here and interprets, whatever is so in this process."""
    monkeypatch.setattr(backend, "TRITON_INSTALLED", True)
    monkeypatch.setattr(backend, "interpreting", lambda: True)


@pytest.mark.usefixtures("interprets")
def test_auto_is_the_reference_on_a_cpu_though_triton_interprets_there() -> None:
    assert resolve_backend("auto", CPU) == "torch"
    assert resolve_backend("triton", CPU) == "triton"


@pytest.mark.usefixtures("interprets")
def test_auto_is_the_kernel_on_a_gpu_if_triton_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_backend("auto", CUDA) == "torch"  # interpreted on a GPU, a kernel is only slow
    monkeypatch.setattr(backend, "interpreting", lambda: False)
    assert resolve_backend("auto", CUDA) == "triton"
    monkeypatch.setattr(backend, "TRITON_INSTALLED", False)
    assert resolve_backend("auto", CUDA) == "torch"


@pytest.mark.usefixtures("interprets")
def test_triton_on_a_cpu_without_the_interpreter_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "interpreting", lambda: False)
    with pytest.raises(ValueError, match=r"only in its interpreter: set TRITON_INTERPRET=1 before Python starts"):
        resolve_backend("triton", CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"which TRITON_INTERPRET=0 forbids: set TRITON_INTERPRET=1 before"):
        resolve_backend("triton", CPU)
    assert resolve_backend("triton", CUDA) == "triton"


@pytest.mark.usefixtures("interprets")
def test_use_backend_is_what_auto_stands_for_and_ends() -> None:
    with use_backend("triton"):
        assert resolve_backend("auto", CPU) == "triton"
        with use_backend("torch"):
            assert resolve_backend("auto", CPU) == "torch"
            assert resolve_backend("triton", CPU) == "triton"  # who names one gets it
        assert resolve_backend("auto", CPU) == "triton"
    assert resolve_backend("auto", CPU) == "torch"


def test_use_backend_ends_when_an_exception_leaves_it() -> None:
    with pytest.raises(KeyError), use_backend("triton"):
        raise KeyError
    assert resolve_backend("auto", CPU) == "torch"


@pytest.mark.parametrize("name", ["cuda", "", "Torch", None])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be one of: auto, torch, triton"):
        resolve_backend(name, CPU)
    with pytest.raises(ValueError, match="must be one of: auto, torch, triton"), use_backend(name):
        pass


@pytest.mark.usefixtures("interprets")
def test_choose_hands_out_the_implementation() -> None:
    assert choose("torch", CPU, torch_run=min, triton_run=max) is min
    assert choose("triton", CPU, torch_run=min, triton_run=max) is max


def without_triton(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a Python that has no Triton."""
    hide = "import sys; sys.modules['triton'] = None\n"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    return subprocess.run(
        [sys.executable, "-c", hide + code], capture_output=True, text=True, env=environment, timeout=60, check=False
    )


def test_without_triton_every_reference_runs_and_a_kernel_says_what_is_missing() -> None:
    code = """
import torch
from refspec import Engine, SamplingParams, SpecConfig
from refspec.kernels import stable_topk
engine = Engine("tiny", spec=SpecConfig(topk=2, num_steps=2, num_draft_tokens=4))
print(len(engine.generate(["def"], SamplingParams(max_new_tokens=4))[0].token_ids))
try:
    stable_topk(torch.rand(2, 3), 1, backend="triton")
except ValueError as error:
    print(error)
"""
    done = without_triton(code)
    assert done.stdout.splitlines() == [
        "4",
        "backend is 'triton', but Triton is not installed: pip install triton (Linux only)",
    ], done.stderr


# All tests of these say whom they ask. This file is not among them: it would start itself over and over.
OPERATIONS = [Path(__file__).with_name(f"test_{name}.py") for name in kernels.__all__ if name != "launches"]


@pytest.mark.parametrize(
    ("hide", "files"),
    [("", OPERATIONS), ("sys.modules['triton'] = None; ", OPERATIONS[-2:])],
    ids=["compiles", "absent"],
)
def test_tests_of_kernels_are_skipped_where_triton_does_not_interpret(hide: str, files: list[Path]) -> None:
    """As on a machine with a GPU, or on one without Triton."""
    code = f"import sys; {hide}import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    arguments = ["-q", "-k", "triton", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, *map(str, files)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    skipped = re.search(r"(\d+) skipped", done.stdout)
    assert skipped
    assert int(skipped[1]) > 10 * len(files)
