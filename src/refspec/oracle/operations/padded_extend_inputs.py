"""The draft-extend's inputs, N rows for each request: SGLang's two kernels of 0.5.23."""

from __future__ import annotations

import random

import torch

from refspec.kernels import padded_extend_inputs
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any lengths, any number of accepted tokens from one to N."""
    return case(rng, rng.randint(1, size.batch), rng.randint(1, size.nodes))


def edges() -> dict[str, Inputs]:
    """No requests; one row each; more than one program of either kernel."""
    rng = random.Random(0)
    return {
        "no requests": case(rng, 0, 4),
        "one row each": case(rng, 3, 1),
        "many rows": case(rng, 3, 200),
        "many requests": case(rng, 150, 3),
    }


def case(rng: random.Random, b: int, n: int) -> Inputs:
    """b requests of n rows."""
    return {
        "seq_lens": torch.tensor([rng.choice([0, rng.randint(0, 10**6)]) for _ in range(b)], dtype=torch.int64),
        "accept_lens": torch.tensor([rng.randint(1, n) for _ in range(b)], dtype=torch.int32),
        "predict": torch.tensor(rng.choices(range(10**5), k=b * n), dtype=torch.int32),
        "num_draft_tokens": n,
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """All three."""
    positions, input_ids, last_rows = padded_extend_inputs(**inputs, backend=backend)
    return {"positions": positions, "input_ids": input_ids, "last_rows": last_rows}


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by prepare_draft_extend_layout and prepare_draft_extend_inputs."""
    file = sources.module("kernels/ops/speculative/eagle.py")
    n = inputs["num_draft_tokens"]
    _, last_rows, input_ids = file.prepare_draft_extend_inputs(inputs["accept_lens"], inputs["predict"], n)
    *_, (positions, _, _) = file.prepare_draft_extend_layout(inputs["seq_lens"], n, False)
    return {"positions": positions, "input_ids": input_ids, "last_rows": last_rows}


OPERATION = Operation(
    name="padded_extend_inputs",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/eagle.py:prepare_draft_extend_inputs, prepare_draft_extend_layout @0.5.23",
)
