"""What parity needs to know of one operation: how inputs are drawn, who answers, and how answers are compared.

Each file of `oracle/operations/` describes one operation of `refspec.kernels` and calls its description OPERATION.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from refspec.oracle.sources import Sources

Inputs = dict[str, Any]  # tensors (on the CPU when drawn) and plain numbers, by argument name
Outputs = dict[str, Tensor]  # by the names of section "Returns" of the dispatcher's docstring


@dataclass(frozen=True)
class Size:
    """How large a case may be: most requests, and most nodes of a tree (rows, columns, moves: whatever it has)."""

    batch: int
    nodes: int


SMALL = Size(batch=3, nodes=8)  # milliseconds in the interpreter
MEDIUM = Size(batch=4, nodes=24)  # seconds
LARGE = Size(batch=33, nodes=64)  # up to minutes, for kernels that are serial in a request


@dataclass(frozen=True)
class Operation:
    """One operation of refspec.kernels.

    draw: a random case of about that size. edges: the cases that random draws would hardly hit, by a label.
    ours: run our operation, with that backend, on inputs that it may change; the answer, as named tensors. What the
        operation changes in place belongs to the answer.
    sglang: the same from SGLang's own code; None where there is no oracle that runs in Triton.
    sglang_source: file:function @version of it. sglang_takes: may it be asked? False for edge cases that its code does
        not claim to handle; the report counts them.
    tolerances: (relative, absolute) by output name, for floats; outputs without one must be equal.
    borderline: does this case depend on rounding (a coin on a border)? Then a difference is counted apart.
    sgl_kernel: the same from a function of the compiled package sgl_kernel, on a GPU, where it is installed; None where
        the package has none for it. It is handed the function. sgl_kernel_function: its name there.
        sgl_kernel_takes: may it be asked?
    """

    name: str
    draw: Callable[[random.Random, Size], Inputs]
    edges: Callable[[], Mapping[str, Inputs]]
    ours: Callable[[Inputs, str], Outputs]
    sglang: Callable[[Sources, Inputs], Outputs] | None = None
    sglang_source: str = ""
    sglang_takes: Callable[[Inputs], bool] = field(default=lambda _: True)
    tolerances: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    borderline: Callable[[Inputs], bool] = field(default=lambda _: False)
    sgl_kernel: Callable[[Callable[..., None], Inputs], Outputs] | None = None
    sgl_kernel_function: str = ""
    sgl_kernel_takes: Callable[[Inputs], bool] = field(default=lambda _: True)
