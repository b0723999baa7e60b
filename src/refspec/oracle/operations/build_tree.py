"""Linking the kept candidates to a tree: SGLang's Triton kernel of 0.5.23, for the two masks that it makes, and its
CUDA, which makes packed masks too.

On NVIDIA cards SGLang runs the CUDA; the Triton kernel is for other devices.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from refspec.kernels import build_tree
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources
from refspec.spec.draft import select_top_k_tokens
from refspec.spec.tree import organize_draft_results

OUTPUTS = ("tree_mask", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
SGLANG_MODES = {"full": 0, "qlen": 1, "packed": 2}
TRITON_MODES = ("full", "qlen")


def draw(rng: random.Random, size: Size) -> Inputs:
    """Trees as the draft loop and the ranking leave them, of any shape that has so many nodes."""
    topk, num_steps = rng.randint(1, 8), rng.randint(1, 6)
    most = min(size.nodes, candidates_of(topk, num_steps) + 1)
    n = rng.choice([most, rng.randint(2, most)])
    seq_lens = [rng.choice([0, rng.randint(1, 4 * size.nodes)]) for _ in range(rng.randint(1, size.batch))]
    modes = ["full", "full", "qlen", "qlen"] + ["packed"] * (n <= 32)  # SGLang's Triton kernel makes the first two
    return case(rng, topk, num_steps, n, seq_lens, rng.choice(modes))


def edges() -> dict[str, Inputs]:
    """In both masks that SGLang's kernel makes: one step, whose parent list has width 0; the smallest trees; every
    candidate kept; chains, whole and cut; nothing before the tree; and no score above another.
    """
    rng = random.Random(0)
    shapes = {
        "one step": (3, 1, 3, [4, 0]),
        "one step, all kept": (4, 1, 5, [7]),
        "N = 2": (2, 3, 2, [1, 5]),
        "N = pool + 1": (2, 2, 7, [3]),
        "k = 1, N = S + 1": (1, 4, 5, [2, 9]),
        "k = 1, a chain cut short": (1, 4, 3, [2, 9]),
        "one step, k = 1": (1, 1, 2, [6]),
        "nothing before the tree": (2, 3, 6, [0, 0]),
    }
    cases = {f"{label}, {mode}": case(rng, *shape, mode) for label, shape in shapes.items() for mode in TRITON_MODES}
    cases |= {f"equal scores, {mode}": case(rng, 3, 3, 8, [5], mode, scores=[0.5]) for mode in TRITON_MODES}
    cases["no requests"] = case(rng, 2, 2, 4, [], "qlen")
    return cases | {f"packed, N = {n}": case(rng, 4, 3, n, [3, 0], "packed") for n in (8, 9, 16, 17, 32)}


def candidates_of(topk: int, num_steps: int) -> int:
    """The size of the pool."""
    return topk + (num_steps - 1) * topk**2


def case(
    rng: random.Random,
    topk: int,
    num_steps: int,
    n: int,
    seq_lens: list[int],
    mask_mode: str,
    scores: list[float] | None = None,
) -> Inputs:
    """A draft with probabilities out of `scores` (without them: any, many tie, some are 0), ranked and cut to N."""
    b = len(seq_lens)
    hidden, path_scores = torch.zeros(b, 1), torch.zeros(b, topk)
    levels = []
    for level in range(num_steps):
        rows = b if level == 0 else b * topk
        drawn = [
            sorted((rng.choice(scores or [0.0, 0.25, 0.5, 1.0, rng.random()]) for _ in range(topk)), reverse=True)
            for _ in range(rows)
        ]
        topk_p = torch.tensor(drawn, dtype=torch.float32).view(rows, topk)
        topk_index = torch.zeros(rows, topk, dtype=torch.int64)
        _, hidden, path_scores, tree_info = select_top_k_tokens(level, topk_p, topk_index, hidden, path_scores, topk)
        levels.append(tree_info)
    score_list, token_list, parents_list = (list(column) for column in zip(*levels, strict=True))
    parent_list, top_scores_index, _ = organize_draft_results(score_list, token_list, parents_list, n)
    return {
        "parent_list": parent_list,
        "top_scores_index": top_scores_index,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int64),
        "topk": topk,
        "num_steps": num_steps,
        "num_draft_tokens": n,
        "mask_mode": mask_mode,
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """All five."""
    return dict(zip(OUTPUTS, build_tree(**inputs, backend=backend), strict=True))


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by sgl_build_tree_kernel_triton."""
    return _built(sources.module("kernels/ops/speculative/spec_tree.py").sgl_build_tree_kernel_triton, inputs)


def _built(build: Callable[..., None], inputs: Inputs) -> Outputs:
    """What SGLang's function says, be it Triton or CUDA, in buffers as SGLang's caller fills them."""
    seq_lens, n, mode = inputs["seq_lens"], inputs["num_draft_tokens"], inputs["mask_mode"]
    b = len(seq_lens)
    tree_mask = _mask(seq_lens, n, mode)
    positions = seq_lens.new_empty(b * n)
    links = [seq_lens.new_full((b, n), -1) for _ in range(3)]
    build(
        inputs["parent_list"],
        inputs["top_scores_index"],
        seq_lens,
        tree_mask,
        positions,
        *links,
        inputs["topk"],
        inputs["num_steps"],
        n,
        SGLANG_MODES[mode],
    )
    if mode == "packed":
        tree_mask = tree_mask.view(torch.uint8)
    return dict(zip(OUTPUTS, (tree_mask, positions, *links), strict=True))


def _mask(seq_lens: Tensor, n: int, mode: str) -> Tensor:
    """All seen, or no bit set."""
    b = len(seq_lens)
    if mode == "packed":
        word = torch.uint8 if n <= 8 else torch.uint16 if n <= 16 else torch.uint32
        return seq_lens.new_zeros(b * n, dtype=word)
    prefix = int(seq_lens.sum()) if mode == "full" else 0
    return seq_lens.new_ones(n * (prefix + b * n), dtype=torch.bool)


OPERATION = Operation(
    name="build_tree",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/spec_tree.py:sgl_build_tree_kernel_triton @0.5.23",
    # A grid of no programs is refused.
    sglang_takes=lambda inputs: inputs["mask_mode"] in TRITON_MODES and len(inputs["seq_lens"]) > 0,
    sgl_kernel=_built,
    sgl_kernel_function="build_tree_kernel_efficient",
    sgl_kernel_takes=lambda inputs: len(inputs["seq_lens"]) > 0,
)
