"""The chain's draft step: SGLang's two kernels of 0.5.23."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from refspec.kernels import draft_topk1
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any dtype; a padded head or not; few different logits or many; NaN and -inf here and there."""
    vocab = rng.choice([1, 5, 33, rng.randint(2, 1000), 5000])
    inputs = case(rng, rng.randint(1, size.batch), vocab)
    logits = inputs["logits"]
    for value, share in ((torch.nan, rng.choice([0.0, 0.1])), (-torch.inf, rng.choice([0.0, 0.5]))):
        logits[torch.rand(logits.shape) < share] = value
    return inputs


def edges() -> dict[str, Inputs]:
    """No rows; rows without a number, without a finite one; NaN beside -inf and beside very low numbers; ties."""
    rng = random.Random(0)
    low = torch.tensor([[torch.nan, -torch.inf, torch.nan], [torch.nan, -torch.inf, -3e38]])
    return {
        "no rows": case(rng, 0, 5),
        "NaN alone": with_logits(rng, torch.full((2, 5), torch.nan)),
        "-inf alone": with_logits(rng, torch.full((2, 3000), -torch.inf)),
        "+inf": with_logits(rng, torch.tensor([[1.0, torch.inf, torch.nan, torch.inf]])),
        "NaN and low numbers": with_logits(rng, low),
        "ties across tiles": with_logits(rng, torch.zeros(2, 20000)),
        "the last of a vocabulary": with_logits(rng, torch.arange(8193.0)[None]),
    }


def case(rng: random.Random, b: int, vocab: int) -> Inputs:
    """b rows of random logits."""
    torch.manual_seed(rng.randrange(2**31))
    dtype = rng.choice([torch.float16, torch.bfloat16, torch.float32])
    logits = torch.randn(b, vocab + rng.choice([0, 7])) * rng.choice([1, 100])
    return with_logits(rng, logits.round(decimals=rng.choice([0, 6])).to(dtype)[:, :vocab])


def with_logits(rng: random.Random, logits: Tensor) -> Inputs:
    """These logits, any positions, and a block to write to or none."""
    b, steps = len(logits), rng.randint(1, 6)
    return {
        "logits": logits,
        "positions": torch.randint(1000, (b,)),
        "draft_tokens": rng.choice([None, torch.full((b, steps), -1)]),
        "column": rng.randrange(steps),
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """What is returned, and what was changed in place."""
    topk_p, topk_index = draft_topk1(**inputs, backend=backend)
    return _outputs(inputs, topk_p, topk_index)


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by draft_topk1_postprocess."""
    topk1 = sources.module("kernels/ops/speculative/topk1.py")
    topk_p, topk_index = topk1.draft_topk1_postprocess(*inputs.values())
    return _outputs(inputs, topk_p, topk_index)


def _outputs(inputs: Inputs, topk_p: Tensor, topk_index: Tensor) -> Outputs:
    outputs = {"topk_p": topk_p, "topk_index": topk_index, "positions": inputs["positions"]}
    return outputs if inputs["draft_tokens"] is None else {**outputs, "draft_tokens": inputs["draft_tokens"]}


def no_nan_decides(inputs: Inputs) -> bool:
    """Is there no row in which NaN, as the -1e30 that SGLang reads it for, would beat or tie with the best number?"""
    x = inputs["logits"].float()
    best = torch.where(x.isnan(), -torch.inf, x).amax(1)
    return not bool((x.isnan().any(1) & ~x.isnan().all(1) & (best <= -1e30)).any())


OPERATION = Operation(
    name="draft_topk1",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/topk1.py:draft_topk1_postprocess @0.5.23",
    sglang_takes=no_nan_decides,
)
