"""The draft-extend's inputs, a row for each accepted token: SGLang's kernel of 0.4.6."""

from __future__ import annotations

import random

import torch

from refspec.kernels import ragged_extend_inputs
from refspec.kernels.backend import triton
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any lengths, any number of accepted tokens from one on."""
    return case(rng, [rng.randint(1, size.nodes) for _ in range(rng.randint(1, size.batch))])


def edges() -> dict[str, Inputs]:
    """No requests; the bonus alone; everything that is committed is new; more than one block."""
    rng = random.Random(0)
    return {
        "no requests": case(rng, []),
        "the bonus alone": case(rng, [1, 1]),
        "nothing before": case(rng, [3, 2], before=0),
        "longer than a block": case(rng, [64, 65, 1, 200]),
    }


def case(rng: random.Random, accept_lens: list[int], before: int = 1000) -> Inputs:
    """accept_lens[r] tokens of request r, behind at most that many others."""
    return {
        "seq_lens": torch.tensor([n + rng.randint(0, before) for n in accept_lens], dtype=torch.int64),
        "accept_lens": torch.tensor(accept_lens, dtype=torch.int32),
        "accept_tokens": torch.tensor(rng.choices(range(10**5), k=sum(accept_lens)), dtype=torch.int32),
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """All three."""
    positions, last_rows, bonus_tokens = ragged_extend_inputs(**inputs, backend=backend)
    return {"positions": positions, "last_rows": last_rows, "bonus_tokens": bonus_tokens}


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """Positions and bonus tokens by create_extend_spec_info, in their types; it gives no last rows."""
    kernel = sources.jit_functions("srt/speculative/eagle_utils.py", "0.4.6").create_extend_spec_info
    accept_lens, tokens = inputs["accept_lens"], inputs["accept_tokens"]
    positions = torch.empty_like(tokens, dtype=torch.int64)
    bonus_tokens = torch.empty_like(accept_lens, dtype=torch.int64)
    kernel[(len(accept_lens),)](
        tokens,
        inputs["seq_lens"],
        accept_lens,
        accept_lens.cumsum(0),
        positions,
        bonus_tokens,
        triton.next_power_of_2(int(accept_lens.max())),
    )
    return {"positions": positions, "bonus_tokens": bonus_tokens}


OPERATION = Operation(
    name="ragged_extend_inputs",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="srt/speculative/eagle_utils.py:create_extend_spec_info @0.4.6",
    sglang_takes=lambda inputs: len(inputs["seq_lens"]) > 0,  # a grid of no programs is refused
)
