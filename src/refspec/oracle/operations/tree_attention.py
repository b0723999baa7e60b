"""Attention of tree nodes over the paged cache: SGLang's own takes other arguments, so the opinions are both ours."""

from __future__ import annotations

import random

import torch

from refspec.kernels import tree_attention
from refspec.oracle.operation import Inputs, Operation, Outputs, Size


def draw(rng: random.Random, size: Size) -> Inputs:
    """Trees, branches and single rows; both forms of the mask, of which some rows see nothing; any type and heads."""
    nodes = rng.choice([1, rng.randint(1, size.nodes)])
    full = rng.random() < 0.5
    tail = rng.choice([nodes, rng.randint(0, 2 * size.nodes)])
    least = 0 if full else tail
    lens = [rng.randint(least, least + rng.choice([3, 8 * size.nodes])) for _ in range(rng.randint(1, size.batch))]
    kv_heads = rng.randint(1, 3)
    return case(
        rng,
        lens,
        nodes,
        None if full else tail,
        heads=kv_heads * rng.randint(1, 4),
        kv_heads=kv_heads,
        dim=rng.choice([16, 64, 80, 96, 128, rng.randint(1, 256)]),
        dtype=rng.choice([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    )


def edges() -> dict[str, Inputs]:
    """No sequences; no keys; keys without a mask; a context in several parts; a tail longer than a block."""
    rng = random.Random(0)
    return {
        "no sequences": case(rng, [], 4, 4),
        "no keys": case(rng, [0, 0], 3, 0),
        "one row sees everything": case(rng, [5, 1], 1, 0),
        "several parts": case(rng, [1500, 3], 3, 3, heads=2),
        "a tail longer than a block": case(rng, [100, 130], 2, 90),
        "all tail": case(rng, [6, 6], 6, 6, heads=4, kv_heads=2),
    }


def case(
    rng: random.Random,
    lens: list[int],
    nodes: int,
    tail: int | None,
    heads: int = 1,
    kv_heads: int = 1,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Sequences of these lengths, `nodes` rows each, on slots in any order. tail=None: a mask with a column per key."""
    torch_rng = torch.Generator().manual_seed(rng.randrange(2**31))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch_rng, dtype=torch.float64).to(dtype)

    total, rows = sum(lens), len(lens) * nodes
    pool = normal(total + rng.randint(1, 3), 2, kv_heads, dim)  # side by side, as the engine keeps them
    columns = nodes * total if tail is None else rows * tail
    return {
        "q": normal(rows, heads, dim),
        "k_cache": pool[:, 0],
        "v_cache": pool[:, 1],
        "kv_indptr": torch.tensor([0, *lens]).cumsum(0),
        "kv_indices": torch.tensor(rng.sample(range(len(pool)), total), dtype=torch.int64),
        "tree_mask": torch.rand(columns, generator=torch_rng) < 0.5,
        "scale": dim**-0.5,
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """What the rows read, under a name that tells its type: how far answers may lie apart depends on it."""
    out = tree_attention(**inputs, backend=backend)
    return {f"out {str(out.dtype).removeprefix('torch.')}": out}


OPERATION = Operation(
    name="tree_attention",
    draw=draw,
    edges=edges,
    ours=ours,
    # A few roundings of numbers of about 1: 2^-23, and 2^-10 or 2^-7 for each weight and the output.
    tolerances={
        "out float64": (1e-12, 1e-12),
        "out float32": (1e-5, 1e-5),
        "out float16": (4e-3, 4e-3),
        "out bfloat16": (3e-2, 3e-2),
    },
)
