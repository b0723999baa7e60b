"""Requests with room for their draft in the table: what the operations on draft slots are tried on."""

from __future__ import annotations

import random

import torch

from refspec.oracle.operation import Inputs, Size


def draw_layout(rng: random.Random, size: Size) -> Inputs:
    """Requests in any rows, of any length (0 included), with any page size."""
    page_size, topk = rng.choice([1, 1, 2, 4, 16]), rng.choice([1, 2, 3, min(size.nodes, 6)])
    longest = rng.choice([2, size.nodes, 8 * size.nodes])
    lens = [rng.randint(0, longest) for _ in range(rng.randint(1, size.batch))]
    return layout(rng, lens, topk, rng.randint(1, 5), page_size)


def layouts() -> dict[str, Inputs]:
    """The shapes that a draw would hardly hit."""
    rng = random.Random(0)
    return {
        "no requests": layout(rng, [], 2, 3, 4),
        "nothing committed": layout(rng, [0, 0], 2, 3, 4),
        "one branch, one step": layout(rng, [1, 8], 1, 1, 4),
        "one step, one branch, pages of one": layout(rng, [5], 1, 1, 1),
        "full pages": layout(rng, [16, 32], 3, 4, 16),
        "PAGE-01": layout(rng, [10], 2, 3, 4),
        "many branches, many steps": layout(rng, [9], 9, 8, 16),
        "longer than a block": layout(rng, [600, 0, 513], 2, 17, 4),
    }


def layout(rng: random.Random, lens: list[int], topk: int, num_steps: int, page_size: int) -> Inputs:
    """A table in which every entry is different, just wide enough for the draft of the longest request."""
    rows = len(lens) + rng.randint(1, 2)
    width = max(lens, default=0) // page_size * page_size + topk * (num_steps + 2 * page_size)
    return {
        "req_to_token": torch.tensor(rng.sample(range(1, 10**6), rows * width)).view(rows, width),
        "req_pool_indices": torch.tensor(rng.sample(range(rows), len(lens)), dtype=torch.int64),
        "seq_lens": torch.tensor(lens, dtype=torch.int64),
        "topk": topk,
        "num_steps": num_steps,
        "page_size": page_size,
    }
