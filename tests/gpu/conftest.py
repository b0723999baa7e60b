"""Tests that need a GPU. REFSPEC_GPU_TESTS_ON=cpu runs their bodies in Triton's interpreter, at small sizes: that says
whether the tests themselves are sound, and nothing about a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from refspec.kernels.backend import TRITON_INSTALLED, interpreting


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tests run."""
    name = os.environ.get("REFSPEC_GPU_TESTS_ON", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    if not TRITON_INSTALLED:
        pytest.skip("Triton is not installed")
    if name == "cuda" and interpreting():
        pytest.skip("TRITON_INTERPRET is set: nothing would be compiled")
    return torch.device(name)


@pytest.fixture(scope="session")
def on_gpu(device: torch.device) -> bool:
    """Is it a GPU, and may things be large?"""
    return device.type == "cuda"
