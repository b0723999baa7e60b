"""What each branch attends to: SGLang's kernel of 0.5.23, which answers for all steps at once."""

from __future__ import annotations

import random

from torch import Tensor

from refspec.kernels import draft_kv_indices
from refspec.kernels.backend import triton
from refspec.oracle.draft_layout import draw_layout, layouts
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any layout, any of its steps."""
    inputs = draw_layout(rng, size)
    return inputs | {"step": rng.randrange(inputs["num_steps"])}


def edges() -> dict[str, Inputs]:
    """The edges of the layout, at their last step."""
    return {label: inputs | {"step": inputs["num_steps"] - 1} for label, inputs in layouts().items()}


def ours(inputs: Inputs, backend: str) -> Outputs:
    """Both arrays."""
    kv_indptr, kv_indices = draft_kv_indices(**inputs, backend=backend)
    return {"kv_indptr": kv_indptr, "kv_indices": kv_indices}


def all_steps(sources: Sources, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """By generate_draft_decode_kv_indices: (kv_indptr (S, b*k+1), kv_indices (S, enough for the last step))."""
    kernel = sources.module("kernels/ops/speculative/cache_locs.py").generate_draft_decode_kv_indices
    table, lens, topk, steps = (inputs[name] for name in ("req_to_token", "seq_lens", "topk", "num_steps"))
    b = len(lens)
    kv_indptr = lens.new_zeros(steps, b * topk + 1)
    kv_indices = lens.new_zeros(steps, topk * (int(lens.sum()) + b * steps))
    kernel[(steps, b, topk)](
        inputs["req_pool_indices"],
        table,
        lens,
        kv_indices,
        kv_indptr,
        lens.repeat_interleave(topk),
        table.shape[1],
        kv_indices.shape[1],
        kv_indptr.shape[1],
        triton.next_power_of_2(b),
        triton.next_power_of_2(steps),
        triton.next_power_of_2(b * topk),
        inputs["page_size"],
    )
    return kv_indptr, kv_indices


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The step that was asked for."""
    kv_indptr, kv_indices = (both[inputs["step"]] for both in all_steps(sources, inputs))
    return {"kv_indptr": kv_indptr, "kv_indices": kv_indices[: int(kv_indptr[-1])]}


OPERATION = Operation(
    name="draft_kv_indices",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/cache_locs.py:generate_draft_decode_kv_indices @0.5.23",
    sglang_takes=lambda inputs: len(inputs["seq_lens"]) > 0,  # a grid of no programs is refused
)
