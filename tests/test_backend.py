"""Which implementation a backend means, where."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from refspec.kernels import backend
from refspec.kernels.backend import choose, resolve_backend, use_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_auto_is_the_reference_on_a_cpu_though_triton_interprets_here() -> None:
    assert backend.interpreting()
    assert resolve_backend("auto", CPU) == "torch"
    assert resolve_backend("triton", CPU) == "triton"


def test_auto_is_the_kernel_on_a_gpu_if_triton_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_backend("auto", CUDA) == "torch"  # this process interprets, which on a GPU is only slow
    monkeypatch.setattr(backend, "interpreting", lambda: False)
    assert resolve_backend("auto", CUDA) == "triton"
    monkeypatch.setattr(backend, "TRITON_INSTALLED", False)
    assert resolve_backend("auto", CUDA) == "torch"


def test_triton_on_a_cpu_without_the_interpreter_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "interpreting", lambda: False)
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 before Python starts"):
        resolve_backend("triton", CPU)
    assert resolve_backend("triton", CUDA) == "triton"


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


def test_choose_hands_out_the_implementation() -> None:
    assert choose("torch", CPU, torch=min, triton=max) is min
    assert choose("triton", CPU, torch=min, triton=max) is max


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
