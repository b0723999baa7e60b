"""Keeping the newest rows for a multi-layer draft's next extend: SGLang's kernel of 0.5.23."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from refspec.kernels import append_boundary_rows
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources

HIDDEN_TYPES = (torch.float32, torch.bfloat16)


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any number of new rows, of none to more than are kept; requests that begin and such that go on."""
    front = rng.randint(1, size.nodes)
    lens = [rng.randint(0, 2 * front) for _ in range(rng.randint(1, size.batch))]
    begin = rng.random() < 0.3
    return case(rng, lens, front, rng.randint(1, 4 * size.nodes), begin, rng.choice(HIDDEN_TYPES))


def edges() -> dict[str, Inputs]:
    """No requests; nothing new; as many as are kept; one kept; hidden states wider than a block of both kernels."""
    rng = random.Random(0)
    return {
        "no requests": case(rng, [], 3, 4),
        "nothing new": case(rng, [0, 0], 3, 4),
        "as many as are kept": case(rng, [3, 3], 3, 4),
        "a prompt": case(rng, [40, 1], 3, 4, begin=True),
        "one is kept": case(rng, [2, 0, 1], 1, 4),
        "wide": case(rng, [2, 5], 4, 2500, hidden_type=torch.bfloat16),
    }


def case(
    rng: random.Random,
    lens: list[int],
    front: int,
    hidden_size: int,
    begin: bool = False,
    hidden_type: torch.dtype = torch.float32,
) -> Inputs:
    """lens[r] new rows of request r, with others behind them; `begin`: nothing was kept before."""
    ends, n = [], 0
    for length in lens:
        ends.append(n + length)
        n += length + rng.randint(0, 2)
    rows = len(lens) + rng.randint(1, 2)
    return {
        "tokens": torch.tensor(rng.choices(range(10**5), k=n), dtype=rng.choice([torch.int32, torch.int64])),
        "hidden_states": numbers(rng, n, hidden_size).to(hidden_type),
        "ends": torch.tensor(ends, dtype=torch.int64),
        "lens": torch.tensor(lens, dtype=torch.int64),
        "rows": torch.tensor(rng.sample(range(rows), len(lens)), dtype=torch.int64),
        **pool_of_rows(rng, rows, front, hidden_size, hidden_type, 0 if begin else front),
    }


def pool_of_rows(
    rng: random.Random, rows: int, front: int, hidden_size: int, hidden_type: torch.dtype, most: int
) -> dict[str, Tensor]:
    """A pool of that many rows, of each of which up to `most` tokens count."""
    return {
        "kept_tokens": torch.tensor(rng.choices(range(10**5), k=rows * front), dtype=torch.int64).view(rows, front),
        "kept_hidden": numbers(rng, rows, front, hidden_size).to(hidden_type),
        "kept_lens": torch.tensor([rng.randint(0, most) for _ in range(rows)], dtype=torch.int64),
    }


def numbers(rng: random.Random, *shape: int) -> Tensor:
    """Any whole numbers, as floats; each type holds them exactly."""
    return torch.tensor(rng.choices(range(-100, 100), k=torch.Size(shape).numel()), dtype=torch.float32).view(shape)


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The pool afterwards."""
    append_boundary_rows(**inputs, backend=backend)
    return {name: inputs[name] for name in ("kept_tokens", "kept_hidden", "kept_lens")}


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by stash_append_boundary_state_triton, which is told whether requests begin, and counts in 32 bits."""
    module = sources.module("kernels/ops/speculative/multi_layer_eagle.py")
    kept_lens = inputs["kept_lens"].int()
    module.stash_append_boundary_state_triton(
        *(inputs[name] for name in ("tokens", "hidden_states", "ends", "lens", "rows", "kept_tokens", "kept_hidden")),
        kept_lens,
        set_valid=not inputs["kept_lens"].any(),
    )
    return {**{name: inputs[name] for name in ("kept_tokens", "kept_hidden")}, "kept_lens": kept_lens.long()}


OPERATION = Operation(
    name="append_boundary_rows",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/multi_layer_eagle.py:stash_append_boundary_state_triton @0.5.23",
)
