"""The same rows of several buffers: SGLang's kernel of 0.5.23, which takes three buffers or four."""

from __future__ import annotations

import random

import torch

from refspec.kernels import gather_rows
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources

TYPES = (torch.int32, torch.int64, torch.float32, torch.bfloat16)


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any rows, also twice the same, of three or four buffers with rows of any shape."""
    shapes: list[tuple[int, ...]] = [rng.choice([(), (1,), (4,), (2, 3), (size.nodes,)]) for _ in range(3)]
    if rng.random() < 0.7:
        shapes.append((rng.randint(1, 8 * size.nodes),))
    return case(rng, rng.randint(1, 2 * size.batch), rng.randint(0, size.batch), shapes)


def edges() -> dict[str, Inputs]:
    """No rows; one number each; a row wider than a block of either kernel; more buffers, and fewer."""
    rng = random.Random(0)
    return {
        "no rows": case(rng, 3, 0, [(), (2,), (2,), (5,)]),
        "one number each": case(rng, 3, 2, [(), (), ()]),
        "a wide row": case(rng, 3, 2, [(), (4,), (4,), (2500,)]),
        "one buffer": case(rng, 3, 2, [(7,)]),
        "six buffers": case(rng, 3, 2, [(), (1,), (2,), (3,), (4,), (5,)]),
    }


def case(rng: random.Random, rows: int, m: int, shapes: list[tuple[int, ...]]) -> Inputs:
    """m rows of buffers with so many, of any types."""
    buffers = {
        f"buffer_{i}": torch.tensor(rng.choices(range(-100, 100), k=rows * torch.Size(shape).numel()))
        .view(rows, *shape)
        .to(rng.choice(TYPES))
        for i, shape in enumerate(shapes)
    }
    return {"index": torch.tensor(rng.choices(range(rows), k=m), dtype=torch.int64), **buffers}


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The rows of each buffer."""
    buffers = [x for name, x in inputs.items() if name != "index"]
    return _named(gather_rows(inputs["index"], buffers, backend=backend))


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by gather_spec_extras."""
    index, *buffers = inputs.values()
    module = sources.module("kernels/ops/speculative/gather_spec_extras.py")
    gathered = module.gather_spec_extras(index, *buffers, *[None] * (4 - len(buffers)))
    return _named(gathered[: len(buffers)])


def _named(gathered: list[torch.Tensor]) -> Outputs:
    return {f"buffer_{i}": x for i, x in enumerate(gathered)}


OPERATION = Operation(
    name="gather_rows",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/gather_spec_extras.py:gather_spec_extras @0.5.23",
    sglang_takes=lambda inputs: len(inputs) in (4, 5),
)
