"""The draft's slots: SGLang's kernel of 0.5.23 where branch follows branch, its kernel for attention where they have
pages of their own.
"""

from __future__ import annotations

import torch

from refspec.kernels import assign_draft_cache_locs
from refspec.oracle.draft_layout import draw_layout, layouts
from refspec.oracle.operation import Inputs, Operation, Outputs
from refspec.oracle.operations.draft_kv_indices import all_steps
from refspec.oracle.sources import Sources


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The slots."""
    return {"slots": assign_draft_cache_locs(**inputs, backend=backend)}


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """By assign_draft_cache_locs_contiguous. With pages, SGLang takes the slots out of the table by torch code in the
    middle of a method; what its attention then reads for the last step, behind the committed tokens, is the same.
    """
    table, lens, topk, steps = (inputs[name] for name in ("req_to_token", "seq_lens", "topk", "num_steps"))
    b = len(lens)
    slots = lens.new_empty(b * topk * steps)
    if inputs["page_size"] == 1 or topk == 1:
        kernel = sources.module("kernels/ops/speculative/cache_locs.py").assign_draft_cache_locs_contiguous
        kernel[(b,)](inputs["req_pool_indices"], table, lens, slots, table.shape[1], topk, steps)
    else:
        kv_indptr, kv_indices = all_steps(sources, inputs)
        ends = kv_indptr[steps - 1, 1:]
        last = torch.arange(-steps, 0, device=lens.device)
        slots = kv_indices[steps - 1][ends.unsqueeze(1) + last].flatten()
    return {"slots": slots}


OPERATION = Operation(
    name="assign_draft_cache_locs",
    draw=draw_layout,
    edges=layouts,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/cache_locs.py:assign_draft_cache_locs_contiguous, "
    "generate_draft_decode_kv_indices @0.5.23",
    sglang_takes=lambda inputs: len(inputs["seq_lens"]) > 0,  # a grid of no programs is refused
)
