"""Who can answer for an operation, what each of them needs, and why it cannot answer here.

| opinion            | whose code                          | runs on                        |
|--------------------|-------------------------------------|--------------------------------|
| `torch`            | our reference                       | the CPU                        |
| `triton-interpret` | our kernel                          | the CPU, Triton's interpreter  |
| `triton-gpu`       | our kernel, compiled                | a GPU                          |
| `sglang-interpret` | SGLang's Triton kernel              | the CPU, Triton's interpreter  |
| `sglang-gpu`       | SGLang's Triton kernel, compiled    | a GPU                          |
| `sgl_kernel`       | SGLang's CUDA, an installed package | a GPU                          |

One process cannot both interpret and compile. So, and because a kernel that writes out of bounds takes its process
with it, or what its neighbours keep there, each opinion has a process of its own (process.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from refspec.kernels.backend import TRITON_INSTALLED
from refspec.oracle.operation import Inputs, Operation, Outputs
from refspec.oracle.sources import Sources


@dataclass(frozen=True)
class Opinion:
    """One way to answer. code: whose it is."""

    name: str
    code: Literal["torch", "triton", "sglang", "sgl_kernel"]
    interprets: bool = False
    on_gpu: bool = False


OPINIONS = {
    opinion.name: opinion
    for opinion in (
        Opinion("torch", "torch"),
        Opinion("triton-interpret", "triton", interprets=True),
        Opinion("triton-gpu", "triton", on_gpu=True),
        Opinion("sglang-interpret", "sglang", interprets=True),
        Opinion("sglang-gpu", "sglang", on_gpu=True),
        Opinion("sgl_kernel", "sgl_kernel", on_gpu=True),
    )
}


def why_not_here(opinion: Opinion) -> str | None:
    """Why this machine cannot run the opinion, whatever the operation; None if it can, as far as one sees from here."""
    if opinion.code in ("triton", "sglang") and not TRITON_INSTALLED:
        return "Triton is not installed"
    if opinion.on_gpu and not torch.cuda.is_available():
        return "no GPU that torch can use"
    if opinion.code == "sgl_kernel" and importlib.util.find_spec("sgl_kernel") is None:
        return "sgl_kernel is not installed"
    return None


def why_not_for(
    opinion: Opinion,
    operation: Operation,
    versions: Collection[str],
    sgl_kernel_functions: Collection[str] = (),
    damaged: Mapping[str, str] | None = None,
) -> str | None:
    """Why the opinion has no say about this operation; None if it has. versions: SGLang's wheels that are ready.
    sgl_kernel_functions: what the installed package exports. damaged: what is wrong with wheels, by version.
    """
    if opinion.code == "sgl_kernel":
        if operation.sgl_kernel is None:
            return "not compared with sgl_kernel"
        if operation.sgl_kernel_function not in sgl_kernel_functions:
            return f"the installed sgl_kernel has no {operation.sgl_kernel_function}"
    if opinion.code == "sglang":
        if operation.sglang is None:
            return "SGLang has no Triton kernel for it"
        if missing := [version for version in versions_named(operation.sglang_source) if version not in versions]:
            faults = [
                f"; {version} is damaged: {why}" for version, why in (damaged or {}).items() if version in missing
            ]
            return f"the wheel of SGLang {' and '.join(missing)} is not ready: refspec oracle fetch{''.join(faults)}"
    return None


def versions_named(sglang_source: str) -> list[str]:
    """The wheels that an operation's oracle needs, from the "@version" of its source."""
    return sorted(set(re.findall(r"@(\d[\d.]*\d)", sglang_source)))


def answer(opinion: Opinion, operation: Operation, sources: Sources, inputs: Inputs) -> Outputs:
    """What the opinion says; inputs may be changed by it. Inputs come and outputs go on the CPU, whoever answers.

    Raises whatever the code behind it raises.
    """
    if opinion.on_gpu:
        inputs = moved(inputs, "cuda")
    if opinion.code == "sgl_kernel":
        assert operation.sgl_kernel is not None
        function = getattr(importlib.import_module("sgl_kernel"), operation.sgl_kernel_function)
        outputs = operation.sgl_kernel(function, inputs)
    elif opinion.code == "sglang":
        assert operation.sglang is not None
        outputs = operation.sglang(sources, inputs)
    else:
        outputs = operation.ours(inputs, opinion.code)
    return moved(outputs, "cpu")


def moved(value: Any, device: torch.device | str) -> Any:
    """Tensors, also those in lists, tuples and dicts, moved; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    return value
