"""Evicting whole pages only: SGLang's kernel of 0.4.6."""

from __future__ import annotations

import random

import torch

from refspec.kernels import align_evict_mask_to_page_size
from refspec.kernels.backend import triton
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any lengths, any number of kept rows from the root alone to all."""
    n, b = rng.randint(1, size.nodes), rng.randint(1, size.batch)
    kept = [rng.randint(1, n) for _ in range(b)]
    return case([rng.randint(0, 8 * size.nodes) for _ in range(b)], kept, n, rng.choice([1, 2, 4, 16]))


def edges() -> dict[str, Inputs]:
    """No requests; nothing committed; nothing kept; pages larger than all; the cases of the reports."""
    return {
        "no requests": case([], [], 4, 4),
        "nothing committed": case([0, 0], [1, 4], 4, 4),
        "nothing kept": case([6, 8], [0, 0], 4, 4),
        "nothing committed, nothing kept": case([0], [0], 4, 4),
        "everything kept": case([5], [8], 8, 4),
        "a page larger than all": case([3, 70], [1, 2], 8, 1024),
        "pages of one": case([5, 6], [2, 1], 8, 1),
        "MEM-07": case([6], [1], 4, 4),
        "PAGE-04": case([10, 10], [3, 2], 8, 4),
        "PAGE-04 (c)": case([7], [1], 4, 4),
    }


def case(lens: list[int], kept: list[int], n: int, page_size: int) -> Inputs:
    """kept[r] of request r's n rows are kept, the first."""
    mask = [[column >= k for column in range(n)] for k in kept]
    return {
        "seq_lens": torch.tensor(lens, dtype=torch.int64),
        "evict_mask": torch.tensor(mask, dtype=torch.bool).view(len(lens), n),
        "page_size": page_size,
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The mask afterwards."""
    align_evict_mask_to_page_size(**inputs, backend=backend)
    return {"evict_mask": inputs["evict_mask"]}


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by align_evict_mask_to_page_size."""
    functions = sources.jit_functions("srt/speculative/eagle_utils.py", "0.4.6")
    mask = inputs["evict_mask"]
    b, n = mask.shape
    functions.align_evict_mask_to_page_size[(b,)](
        inputs["seq_lens"], mask, inputs["page_size"], n, triton.next_power_of_2(n)
    )
    return {"evict_mask": mask}


def sglang_takes(inputs: Inputs) -> bool:
    """A grid of no programs is refused; and where neither committed nor kept tokens are, it divides -1."""
    kept_until = inputs["seq_lens"] + (~inputs["evict_mask"]).sum(dim=1)
    return len(kept_until) > 0 and bool((kept_until > 0).all())


OPERATION = Operation(
    name="align_evict_mask_to_page_size",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="srt/speculative/eagle_utils.py:align_evict_mask_to_page_size @0.4.6",
    sglang_takes=sglang_takes,
)
