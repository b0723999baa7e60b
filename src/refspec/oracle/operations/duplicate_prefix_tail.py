"""Copies of the last, partly filled page: SGLang makes them in torch code, so there is no oracle in Triton."""

from __future__ import annotations

import random

import torch

from refspec.kernels import duplicate_prefix_tail
from refspec.oracle.draft_layout import draw_layout, layouts
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.pool import Pool, layers_of


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any layout, over layers with rows of any number of bytes."""
    return with_pool(rng, draw_layout(rng, size), [rng.choice([1, 16, 24]) for _ in range(rng.randint(1, 3))])


def edges() -> dict[str, Inputs]:
    """The edges of the layout; a tail longer than a block of rows; rows wider than a tile."""
    rng = random.Random(0)
    cases = {label: with_pool(rng, inputs, [16, 7]) for label, inputs in layouts().items()}
    return cases | {"wide rows": with_pool(rng, layouts()["PAGE-01"], [10000])}


def with_pool(rng: random.Random, inputs: Inputs, widths: list[int]) -> Inputs:
    """The layout's slots renumbered from 1 on, in any order, and a layer for each width in bytes."""
    table = inputs["req_to_token"]
    count = table.numel()
    inputs = inputs | {"req_to_token": torch.tensor(rng.sample(range(1, count + 1), count)).view_as(table)}
    for i, width in enumerate(widths):
        content = list(rng.randbytes((count + 1) * width))
        inputs[f"layer_{i}"] = torch.tensor(content, dtype=torch.uint8).view(count + 1, width)
    return inputs


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The layers afterwards."""
    layers = layers_of(inputs)
    rest = {name: value for name, value in inputs.items() if name not in layers}
    duplicate_prefix_tail(Pool(list(layers.values())), **rest, backend=backend)
    return layers


OPERATION = Operation(name="duplicate_prefix_tail", draw=draw, edges=edges, ours=ours)
