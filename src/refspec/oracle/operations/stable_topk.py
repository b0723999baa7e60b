"""The k largest: no kernel of SGLang promises an order for ties, so ours are compared with each other."""

from __future__ import annotations

import random

import torch

from refspec.kernels import stable_topk
from refspec.oracle.operation import Inputs, Operation, Outputs, Size


def draw(rng: random.Random, size: Size) -> Inputs:
    """Rows of any length; as often as not with few different values, so that most of them tie."""
    n = rng.choice([rng.randint(1, 2 * size.nodes), rng.randint(1, 300), 5000])
    k = rng.randint(1, min(n, size.nodes))
    return case(rng, rng.randint(1, size.batch), n, k)


def edges() -> dict[str, Inputs]:
    """No rows, whole rows, the most candidates, and rows of a tile or more."""
    rng = random.Random(0)
    return {
        "no rows": case(rng, 0, 5, 2),
        "one entry": case(rng, 2, 1, 1),
        "all of a row": case(rng, 2, 33, 33),
        "all equal": {"values": torch.full((2, 300), 0.25), "k": 63},
        "264 candidates": case(rng, 2, 264, 63),
        "the longest that is short": case(rng, 1, 512, 10),
        "one tile": case(rng, 1, 2048, 10),
        "one tile and one entry": case(rng, 2, 2049, 10),
        "a vocabulary": case(rng, 1, 32000, 8),
        "subnormals": {"values": torch.tensor([[0.0, 2.0**-149, 0.0, 2.0**-148]]), "k": 4},
    }


def case(rng: random.Random, b: int, n: int, k: int) -> Inputs:
    """b rows of n values that take 4, 50 or any number of different values."""
    torch.manual_seed(rng.randrange(2**31))
    different = rng.choice([4, 50, None])
    values = torch.rand(b, n) if different is None else torch.randint(different, (b, n)) / different
    return {"values": values, "k": k}


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The values and their indices."""
    values, indices = stable_topk(**inputs, backend=backend)
    return {"values": values, "indices": indices}


OPERATION = Operation(name="stable_topk", draw=draw, edges=edges, ours=ours)
