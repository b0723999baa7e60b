"""Links out of a mask: SGLang's kernel for n-gram drafts of 0.5.23, and its CUDA."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from refspec.kernels import links_from_mask
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Trees of any shape, in any order in which parents come before their children."""
    n = rng.randint(1, size.nodes)
    # How far back a parent may stand: 1 makes a chain.
    reach = rng.choice([1, 2, n])
    return case(
        [
            [-1, *(rng.randint(max(0, node - reach), node - 1) for node in range(1, n))]
            for _ in range(rng.randint(1, size.batch))
        ]
    )


def edges() -> dict[str, Inputs]:
    """The root alone; the smallest trees; stars and chains; sizes beside powers of two."""
    sizes = (5, 7, 8, 9, 33)
    return {
        "the root alone": case([[-1], [-1]]),
        "N = 2": case([[-1, 0]]),
        "a chain and a star": case([[-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0]]),
        "siblings far apart": case([[-1, 0, 1, 1, 2, 0, 5, 0]]),
        **{f"a chain of {n}": case([[-1, *range(n - 1)]]) for n in sizes},
        **{f"a star of {n}": case([[-1] + [0] * (n - 1)]) for n in sizes},
    }


def case(parents: list[list[int]]) -> Inputs:
    """`parents[r][c]`: the column of the parent of request r's column c, an earlier one; -1 for the root."""
    n = len(parents[0])
    mask = torch.eye(n, dtype=torch.bool).repeat(len(parents), 1, 1)
    for r, row in enumerate(parents):
        for node, parent in enumerate(row[1:], start=1):
            mask[r, node] |= mask[r, parent]
    return {"qlen_mask": mask}


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The three links."""
    index, child, sibling = links_from_mask(**inputs, backend=backend)
    return {"retrieve_index": index, "retrieve_next_token": child, "retrieve_next_sibling": sibling}


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by reconstruct_indices_from_tree_mask_triton."""
    file = sources.module("kernels/ops/speculative/reconstruct_tree.py")
    return _reconstructed(file.reconstruct_indices_from_tree_mask_triton, inputs)


def _reconstructed(reconstruct: Callable[..., None], inputs: Inputs) -> Outputs:
    """What SGLang's function says, be it Triton or CUDA. It also gives positions, which are
    left out here.
    """
    mask = inputs["qlen_mask"]
    b, n, _ = mask.shape
    seq_lens, positions = mask.new_zeros(b, dtype=torch.int64), mask.new_empty(b * n, dtype=torch.int64)
    index, child, sibling = (mask.new_empty(b, n, dtype=torch.int64) for _ in range(3))
    reconstruct(mask.flatten(), seq_lens, positions, index, child, sibling, b, n)
    return {"retrieve_index": index, "retrieve_next_token": child, "retrieve_next_sibling": sibling}


OPERATION = Operation(
    name="links_from_mask",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/reconstruct_tree.py:reconstruct_indices_from_tree_mask_triton @0.5.23",
    sgl_kernel=_reconstructed,
    sgl_kernel_function="reconstruct_indices_from_tree_mask",
)
