"""Entering slots into the request table: SGLang's kernel of 0.5.23."""

from __future__ import annotations

import random

import torch

from refspec.kernels import assign_req_to_token
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
    """No requests; nothing to enter; a whole row; parts longer than one block of either kernel."""
    rng = random.Random(0)
    return {
        "no requests": case(rng, [], 4),
        "nothing to enter": case(rng, [0, 0], 4),
        "a whole row": case(rng, [7], 7),
        "longer than a block": case(rng, [300, 0, 33, 257], 300),
    }


def case(rng: random.Random, lens: list[int], width: int) -> Inputs:
    """lens[r] slots for request r, somewhere in a row of that width."""
    rows = len(lens) + rng.randint(1, 2)
    starts = [rng.randint(0, width - length) for length in lens]
    return {
        "req_to_token": torch.full((rows, width), -1),
        "req_pool_indices": torch.tensor(rng.sample(range(rows), len(lens)), dtype=torch.int64),
        "start": torch.tensor(starts, dtype=torch.int64),
        "end": torch.tensor([s + n for s, n in zip(starts, lens, strict=True)], dtype=torch.int64),
        "slots": torch.tensor(rng.sample(range(1, 10**6), sum(lens)), dtype=torch.int64),
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The table afterwards."""
    assign_req_to_token(**inputs, backend=backend)
    return {"req_to_token": inputs["req_to_token"]}


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by assign_req_to_token_pool."""
    kernel = sources.jit_functions("srt/mem_cache/allocation.py", "0.5.23").assign_req_to_token_pool
    table, b = inputs["req_to_token"], len(inputs["start"])
    kernel[(b,)](
        inputs["req_pool_indices"],
        table,
        inputs["start"],
        inputs["end"],
        inputs["slots"],
        table.shape[1],
        triton.next_power_of_2(b),
    )
    return {"req_to_token": table}


OPERATION = Operation(
    name="assign_req_to_token",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="srt/mem_cache/allocation.py:assign_req_to_token_pool @0.5.23",
    sglang_takes=lambda inputs: len(inputs["start"]) > 0,  # a grid of no programs is refused
)
