"""Trees that are chains: SGLang's kernel for them of 0.5.23, which makes masks of the nodes alone."""

from __future__ import annotations

import random

import torch

from refspec.kernels import build_chain_tree
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources

OUTPUTS = ("tree_mask", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")


def draw(rng: random.Random, size: Size) -> Inputs:
    """Chains of any length after any context; half of the masks are such as SGLang's kernel makes."""
    n = rng.randint(1, size.nodes)
    modes = ["qlen", "qlen", "full", "packed"] if n <= 32 else ["qlen", "full"]
    seq_lens = [rng.choice([0, rng.randint(1, 4 * size.nodes)]) for _ in range(rng.randint(1, size.batch))]
    return case(seq_lens, n, rng.choice(modes))


def edges() -> dict[str, Inputs]:
    """No requests; the root alone; the shortest chain; nothing before the chain."""
    return {
        "no requests": case([], 3, "qlen"),
        "the root alone": case([4, 0], 1, "qlen"),
        "N = 2": case([4, 9], 2, "qlen"),
        "nothing before it": case([0, 0, 0], 4, "qlen"),
        "one more than a power of two": case([5], 33, "qlen"),
        "nothing before it, full": case([0, 0, 0], 4, "full"),
        "packed in four bytes": case([5, 6], 17, "packed"),
    }


def case(seq_lens: list[int], n: int, mask_mode: str) -> Inputs:
    """Chains of n nodes."""
    return {
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int64),
        "num_draft_tokens": n,
        "mask_mode": mask_mode,
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """All five."""
    return dict(zip(OUTPUTS, build_chain_tree(**inputs, backend=backend), strict=True))


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by build_chain_tree, which also moves tokens: any will do."""
    seq_lens, n = inputs["seq_lens"], inputs["num_draft_tokens"]
    tokens = seq_lens.new_zeros(len(seq_lens), n)
    module = sources.module("kernels/ops/speculative/eagle.py")
    return dict(zip(OUTPUTS, module.build_chain_tree(tokens[:, 0], tokens[:, 1:], seq_lens)[:5], strict=True))


OPERATION = Operation(
    name="build_chain_tree",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/eagle.py:build_chain_tree @0.5.23",
    sglang_takes=lambda inputs: inputs["mask_mode"] == "qlen",
)
