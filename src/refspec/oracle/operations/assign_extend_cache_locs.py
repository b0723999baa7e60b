"""Reading slots from the request table: SGLang's kernel of 0.5.23, and the one it has for parts of one length."""

from __future__ import annotations

import random

import torch

from refspec.kernels import assign_extend_cache_locs
from refspec.kernels.backend import triton
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Requests in any rows, parts at any place: of any length (0 included), or all of one."""
    width, b = rng.choice([size.nodes, 2 * size.nodes, 8 * size.nodes]), rng.randint(1, size.batch)
    if rng.random() < 0.3:
        return case(rng, [rng.randint(1, width)] * b, width)
    return case(rng, [rng.choice([0, rng.randint(0, size.nodes), rng.randint(0, width)]) for _ in range(b)], width)


def edges() -> dict[str, Inputs]:
    """No requests; nothing to read; a whole row; parts longer than one block of each kernel."""
    rng = random.Random(0)
    return {
        "no requests": case(rng, [], 4),
        "nothing to read": case(rng, [0, 0], 4),
        "a whole row": case(rng, [7], 7),
        "longer than a block": case(rng, [300, 0, 33, 257, 513], 600),
        "all longer than a block": case(rng, [65, 65, 65], 100),
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
    """The same by assign_extend_cache_locs, or, for parts of one length, by assign_extend_cache_locs_uniform."""
    module = sources.module("kernels/ops/speculative/cache_locs.py")
    table, b = inputs["req_to_token"], len(inputs["start"])
    lens = set((inputs["end"] - inputs["start"]).tolist())
    if len(lens) == 1 and 0 not in lens:
        arguments = inputs["req_pool_indices"], table, inputs["start"], b, lens.pop(), table.device
        return {"slots": module.assign_extend_cache_locs_uniform_func(*arguments)}
    slots = table.new_empty(inputs["total"])
    module.assign_extend_cache_locs[(b,)](
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
    sglang_source=(
        "kernels/ops/speculative/cache_locs.py:assign_extend_cache_locs, assign_extend_cache_locs_uniform @0.5.23"
    ),
    sglang_takes=lambda inputs: len(inputs["start"]) > 0,  # a grid of no programs is refused
)
