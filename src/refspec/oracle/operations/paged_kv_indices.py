"""What the rows of a forward attend to: SGLang's kernel of 0.5.23, with a table that has the tail entered already."""

from __future__ import annotations

import random

import torch

from refspec.kernels import paged_kv_indices
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Requests in any rows, of any length, with a tail of any width; often more room than that takes."""
    longest = rng.choice([2, size.nodes, 8 * size.nodes])
    lens = [rng.randint(0, longest) for _ in range(rng.randint(1, size.batch))]
    return case(rng, lens, rng.randint(0, size.nodes), rng.choice([0, rng.randint(1, 50)]))


def edges() -> dict[str, Inputs]:
    """No requests; no committed tokens; no tail; several blocks; several blocks of room that nobody needs."""
    rng = random.Random(0)
    return {
        "no requests": case(rng, [], 3, 4),
        "nothing committed": case(rng, [0, 0], 3, 0),
        "no tail": case(rng, [5, 0, 9], 0, 0),
        "nothing at all": case(rng, [0], 0, 0),
        "longer than a block": case(rng, [600, 0, 1025], 16, 0),
        "room for a longer context": case(rng, [7, 3], 4, 2000),
    }


def case(rng: random.Random, lens: list[int], tail: int, spare: int) -> Inputs:
    """A table and tails in which every slot is different; the table has room for the tails."""
    rows, width, tails = len(lens) + rng.randint(1, 2), max(lens, default=0) + tail, len(lens) * tail
    slots = torch.tensor(rng.sample(range(1, 10**6), rows * width + tails), dtype=torch.int64)
    return {
        "req_to_token": slots[tails:].view(rows, width),
        "req_pool_indices": torch.tensor(rng.sample(range(rows), len(lens)), dtype=torch.int64),
        "prefix_lens": torch.tensor(lens, dtype=torch.int64),
        "tail_slots": slots[:tails].view(len(lens), tail),
        "room": sum(lens) + tails + spare,
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """Both arrays; of the second what the first leads to."""
    kv_indptr, kv_indices = paged_kv_indices(**inputs, backend=backend)
    return {"kv_indptr": kv_indptr, "kv_indices": kv_indices[: int(kv_indptr[-1])]}


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The tails entered in the table, the beginnings summed up, then create_flashinfer_kv_indices_triton."""
    kernel = sources.module("kernels/ops/attention/kv_indices.py").create_flashinfer_kv_indices_triton
    table, lens, tails = inputs["req_to_token"].clone(), inputs["prefix_lens"], inputs["tail_slots"]
    for row, length, tail in zip(inputs["req_pool_indices"].tolist(), lens.tolist(), tails, strict=True):
        table[row, length : length + len(tail)] = tail
    whole = lens + tails.shape[1]
    kv_indptr = torch.cat([lens.new_zeros(1), whole.cumsum(0)])
    kv_indices = lens.new_zeros(max(1, int(kv_indptr[-1])))
    kernel[(len(lens),)](table, inputs["req_pool_indices"], whole, kv_indptr, None, kv_indices, table.stride(0))
    return {"kv_indptr": kv_indptr, "kv_indices": kv_indices[: int(kv_indptr[-1])]}


OPERATION = Operation(
    name="paged_kv_indices",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/attention/kv_indices.py:create_flashinfer_kv_indices_triton @0.5.23",
    sglang_takes=lambda inputs: len(inputs["prefix_lens"]) > 0,  # a grid of no programs is refused
)
