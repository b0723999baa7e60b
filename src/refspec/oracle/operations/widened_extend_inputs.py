"""A multi-layer draft's extend, with the rows that were kept in front: SGLang's two kernels of 0.5.23."""

from __future__ import annotations

import random

import torch

from refspec.kernels import widened_extend_inputs
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.operations.append_boundary_rows import HIDDEN_TYPES, numbers, pool_of_rows
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any lengths, shorter than what is kept among them; any number of kept rows."""
    front, n = rng.randint(1, size.nodes), rng.randint(1, size.nodes)
    seq_lens = [rng.randint(0, 4 * size.nodes) for _ in range(rng.randint(1, size.batch))]
    return case(rng, seq_lens, front, n, rng.randint(1, 4 * size.nodes), rng.choice(HIDDEN_TYPES))


def edges() -> dict[str, Inputs]:
    """No requests; nothing committed; less than is kept; hidden states wider than a block of both kernels."""
    rng = random.Random(0)
    return {
        "no requests": case(rng, [], 2, 3, 4),
        "nothing committed": case(rng, [0, 0], 2, 3, 4),
        "less than is kept": case(rng, [1, 2, 3, 4], 3, 4, 5),
        "one row each": case(rng, [5, 9], 1, 1, 1),
        "wide": case(rng, [5, 9], 3, 4, 2500, torch.bfloat16),
    }


def case(
    rng: random.Random,
    seq_lens: list[int],
    front: int,
    n: int,
    hidden_size: int,
    hidden_type: torch.dtype = torch.float32,
) -> Inputs:
    """Requests of these lengths; every entry of the table is different, and so could be told apart."""
    b, width = len(seq_lens), max(seq_lens, default=0) + n + rng.randint(0, 2)
    rows = b + rng.randint(1, 2)
    return {
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int64),
        "predict": torch.tensor(rng.choices(range(10**5), k=b * n), dtype=torch.int32),
        "hidden_states": numbers(rng, b * n, hidden_size).to(hidden_type),
        "req_to_token": torch.tensor(rng.sample(range(1, 10**6), rows * width)).view(rows, width),
        "req_pool_indices": torch.tensor(rng.sample(range(rows), b), dtype=torch.int64),
        **pool_of_rows(rng, rows, front, hidden_size, hidden_type, front),
        "num_draft_tokens": n,
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """All four."""
    names = ("input_ids", "hidden_states", "positions", "slots")
    return dict(zip(names, widened_extend_inputs(**inputs, backend=backend), strict=True))


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by fill_widened_draft_extend_inputs_triton and compute_widened_draft_extend_locs_positions_triton."""
    module = sources.module("kernels/ops/speculative/multi_layer_eagle.py")
    seq_lens, hidden_states, n = inputs["seq_lens"], inputs["hidden_states"], inputs["num_draft_tokens"]
    rows, kept_lens, front = inputs["req_pool_indices"], inputs["kept_lens"].int(), inputs["kept_tokens"].shape[1]
    total = len(seq_lens) * (front + n)
    input_ids = seq_lens.new_empty(total)
    hidden = hidden_states.new_empty(total, hidden_states.shape[1])
    kept = inputs["kept_tokens"], inputs["kept_hidden"], kept_lens
    module.fill_widened_draft_extend_inputs_triton(
        input_ids, hidden, inputs["predict"], hidden_states, *kept, seq_lens, rows, draft_token_num=n
    )
    slots, positions = module.compute_widened_draft_extend_locs_positions_triton(
        seq_lens, rows, inputs["req_to_token"], kept_lens, n, front, num_warmup_tokens=0
    )
    return {"input_ids": input_ids, "hidden_states": hidden, "positions": positions, "slots": slots}


OPERATION = Operation(
    name="widened_extend_inputs",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source=(
        "kernels/ops/speculative/multi_layer_eagle.py:fill_widened_draft_extend_inputs_triton, "
        "compute_widened_draft_extend_locs_positions_triton @0.5.23"
    ),
)
