"""Reading slots from the request table: SGLang's kernel of 0.5.23."""

from __future__ import annotations

import random

import torch

from refspec.kernels import assign_extend_cache_locs
from refspec.kernels.backend import triton
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Requests in any rows, parts of any length (0 included) at any place."""
    width = rng.choice([size.nodes, 2 * size.nodes, 8 * size.nodes])
    lens = [
        rng.choice([0, rng.randint(0, size.nodes), rng.randint(0, width)]) for _ in range(rng.randint(1, size.batch))
    ]
    return case(rng, lens, width)


def edges() -> dict[str, Inputs]:
    """No requests; nothing to read; a whole row; parts longer than one block of either kernel."""
    rng = random.Random(0)
    return {
        "no requests": case(rng, [], 4),
        "nothing to read": case(rng, [0, 0], 4),
        "a whole row": case(rng, [7], 7),
        "longer than a block": case(rng, [300, 0, 33, 257, 513], 600),
    }


def case(rng: random.Random, lens: list[int], width: int) -> Inputs:
    """lens[r] slots of request r, somewhere in a row of that width; every entry of the table is different."""
    rows = len(lens) + rng.randint(1, 2)
    starts = [rng.randint(0, width - length) for length in lens]
    return {
        "req_to_token": torch.tensor(rng.sample(range(1, 10**6), rows * width)).view(rows, width),
        "req_pool_indices": torch.tensor(rng.sample(range(rows), len(lens)), dtype=torch.int64),
        "start": torch.tensor(starts, dtype=torch.int64),
        "end": torch.tensor([s + n for s, n in zip(starts, lens, strict=True)], dtype=torch.int64),
        "total": sum(lens),
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The slots."""
    return {"slots": assign_extend_cache_locs(**inputs, backend=backend)}


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by assign_extend_cache_locs."""
    kernel = sources.module("kernels/ops/speculative/cache_locs.py").assign_extend_cache_locs
    table, b = inputs["req_to_token"], len(inputs["start"])
    slots = table.new_empty(inputs["total"])
    kernel[(b,)](
        inputs["req_pool_indices"],
        table,
        inputs["start"],
        inputs["end"],
        slots,
        table.shape[1],
        triton.next_power_of_2(b),
    )
    return {"slots": slots}


OPERATION = Operation(
    name="assign_extend_cache_locs",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/cache_locs.py:assign_extend_cache_locs @0.5.23",
    sglang_takes=lambda inputs: len(inputs["start"]) > 0,  # a grid of no programs is refused
)
