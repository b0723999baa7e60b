"""Bringing accepted rows to the front of each block: SGLang does it in torch code, so there is no oracle in Triton."""

from __future__ import annotations

import random

import torch

from refspec.kernels import compact_to_front
from refspec.oracle.operation import Inputs, Operation, Outputs, Size


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any paths of at least the root, through blocks of any size, rows of any type and shape."""
    n = rng.randint(1, size.nodes)
    paths = [[0, *sorted(rng.sample(range(1, n), rng.randint(0, n - 1)))] for _ in range(rng.randint(1, size.batch))]
    shape = rng.choice([(), (1,), (3,), (2, 5), (size.nodes, 4)])
    return case(rng, paths, n, shape, rng.choice([torch.int32, torch.float32, torch.bfloat16, torch.bool]))


def edges() -> dict[str, Inputs]:
    """No requests; the root alone; everything accepted; a row wider than a tile."""
    rng = random.Random(0)
    return {
        "no requests": case(rng, [], 4, (3,), torch.float32),
        "blocks of one": case(rng, [[0], [0]], 1, (), torch.int32),
        "everything accepted": case(rng, [list(range(8))] * 2, 8, (5,), torch.float32),
        "the last row alone": case(rng, [[7], [0]], 8, (), torch.int64),
        "a wide row": case(rng, [[0, 3], [0, 1, 2]], 4, (1500,), torch.bfloat16),
    }


def case(rng: random.Random, paths: list[list[int]], n: int, shape: tuple[int, ...], dtype: torch.dtype) -> Inputs:
    """One path, as columns of its block, for each request."""
    longest = max(map(len, paths), default=1)
    width = rng.randint(longest, n) if paths else 1
    index = [[r * n + c for c in path] + [-1] * (width - len(path)) for r, path in enumerate(paths)]
    total = len(paths) * n
    numbers = torch.tensor(rng.choices(range(-100, 100), k=total * torch.Size(shape).numel()))
    return {
        "x": numbers.view(total, *shape).to(dtype),
        "accept_index": torch.tensor(index, dtype=torch.int32).view(len(paths), width),
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The compacted rows."""
    return {"x": compact_to_front(**inputs, backend=backend)}


OPERATION = Operation(name="compact_to_front", draw=draw, edges=edges, ours=ours)
