"""Feeding the next layer of a multi-layer draft: SGLang's kernel of 0.5.23."""

from __future__ import annotations

import random

import torch

from refspec.kernels import rotate_input_ids
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Windows of any length, one behind the other; in half of the cases all of their rows count, as in a prefill."""
    lens = [rng.choice([0, 1, rng.randint(1, 4 * size.nodes)]) for _ in range(rng.randint(1, size.batch))]
    return case(rng, lens, all_count=rng.random() < 0.5)


def edges() -> dict[str, Inputs]:
    """No requests; windows of no rows and of one; longer than the blocks of both kernels."""
    rng = random.Random(0)
    return {
        "no requests": case(rng, [], True),
        "nothing to move": case(rng, [1, 0, 1], True),
        "one block of SGLang's and one more": case(rng, [8, 9, 10], True),
        "a long prompt": case(rng, [1024, 1025, 2050], True),
        "a long window": case(rng, [1030, 4100], False),
    }


def case(rng: random.Random, lens: list[int], all_count: bool) -> Inputs:
    """Windows of these lengths, and rows behind them that belong to nobody."""
    starts = [sum(lens[:r]) for r in range(len(lens))]
    counting = [n - 1 if all_count or n == 0 else rng.randrange(n) for n in lens]
    return {
        "input_ids": torch.tensor(rng.choices(range(10**5), k=sum(lens) + rng.randint(0, 3)), dtype=torch.int64),
        "starts": torch.tensor(starts, dtype=torch.int64),
        "lens": torch.tensor(lens, dtype=torch.int64),
        "new_tokens": torch.tensor(rng.choices(range(10**5, 10**6), k=len(lens)), dtype=torch.int64),
        "last_rows": torch.tensor([s + c for s, c in zip(starts, counting, strict=True)], dtype=torch.int64),
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The ids afterwards."""
    rotate_input_ids(**inputs, backend=backend)
    return {"input_ids": inputs["input_ids"]}


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by rotate_input_ids, which finds the last rows itself where nobody names them."""
    module = sources.module("kernels/ops/speculative/multi_layer_eagle.py")
    last_rows = inputs["last_rows"]
    if torch.equal(last_rows, inputs["starts"] + inputs["lens"] - 1):
        last_rows = None
    ids, new_tokens = inputs["input_ids"], inputs["new_tokens"].unsqueeze(1)
    return {"input_ids": module.rotate_input_ids(ids, inputs["starts"], inputs["lens"], new_tokens, last_rows)}


OPERATION = Operation(
    name="rotate_input_ids",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/multi_layer_eagle.py:rotate_input_ids @0.5.23",
    sglang_takes=lambda inputs: len(inputs["starts"]) > 0,  # a grid of no programs is refused
)
