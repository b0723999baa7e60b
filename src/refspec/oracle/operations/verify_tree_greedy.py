"""The greedy walk: SGLang's Triton kernel of 0.5.23, and its CUDA, which is what it runs on NVIDIA cards."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from refspec.kernels import verify_tree_greedy
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources

Parents = list[list[int]]


def draw(rng: random.Random, size: Size) -> Inputs:
    """Trees of any shape and numbering, few different tokens (so that siblings share some), and a target that often
    agrees. num_steps may be less than the tree's depth, or more.
    """
    n = rng.randint(1, size.nodes)
    reach = rng.choice([1, 2, n])
    parents = [
        [-1, *(rng.randint(max(0, node - reach), node - 1) for node in range(1, n))]
        for _ in range(rng.randint(1, size.batch))
    ]
    return case(rng, parents, rng.randint(0, n), tokens=rng.choice([1, 2, 4, 1000]), shuffled=rng.random() < 0.5)


def edges() -> dict[str, Inputs]:
    """The root alone; no step allowed; the smallest tree; the first, a middle or no sibling fits, or several do; a
    chain accepted whole, and one deeper than the steps.
    """
    rng = random.Random(0)
    chain = [-1, *range(7)]
    return {
        "the root alone": case(rng, [[-1], [-1]], 0, 1),
        "the root alone, steps left": case(rng, [[-1]], 3, 1),
        "no step allowed": case(rng, [[-1, 0, 1]], 0, 1),
        "N = 2": case(rng, [[-1, 0], [-1, 0]], 1, 2),
        "siblings with one token": case(rng, [[-1, 0, 0, 0, 1, 2, 3]], 2, 1),
        "a chain accepted whole": case(rng, [chain], 7, 1),
        "a chain deeper than the steps": case(rng, [chain], 3, 1),
        "more steps than nodes": case(rng, [chain, chain], 12, 1),
        "a star": case(rng, [[-1] + [0] * 8] * 3, 1, 4),
        "a star, nothing fits": case(rng, [[-1] + [0] * 8], 1, 10**6),
    }


def case(rng: random.Random, parents: Parents, num_steps: int, tokens: int, shuffled: bool = False) -> Inputs:
    """`parents[r][c]`: the column of the parent of request r's column c; -1 for the root. So many different tokens.

    shuffled: the columns but the root are numbered anew, so that children may stand before their parents.
    """
    b, n = len(parents), len(parents[0])
    child, sibling = torch.full((b, n), -1), torch.full((b, n), -1)
    for r, row in enumerate(parents):
        name = [0, *(rng.sample(range(1, n), n - 1) if shuffled else range(1, n))]
        for node in range(n - 1, 0, -1):
            sibling[r, name[node]] = child[r, name[row[node]]]
            child[r, name[row[node]]] = name[node]

    def some_tokens() -> torch.Tensor:
        return torch.tensor([[rng.randrange(tokens) for _ in range(n)] for _ in range(b)], dtype=torch.int64)

    return {
        "candidates": some_tokens(),
        "retrieve_index": torch.arange(b * n).view(b, n),
        "retrieve_next_token": child,
        "retrieve_next_sibling": sibling,
        "target_predict": some_tokens(),
        "num_steps": num_steps,
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """All three."""
    predict, accept_index, accept_token_num = verify_tree_greedy(**inputs, backend=backend)
    return {"predict": predict, "accept_index": accept_index, "accept_token_num": accept_token_num}


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by verify_tree_greedy_triton."""
    return _verified(sources.module("kernels/ops/speculative/spec_tree.py").verify_tree_greedy_triton, inputs)


def _verified(verify: Callable[..., None], inputs: Inputs) -> Outputs:
    """What SGLang's function says, be it Triton or CUDA, in buffers as SGLang's caller fills them."""
    candidates = inputs["candidates"]
    b, n = candidates.shape
    predict = candidates.new_zeros(b * n, dtype=torch.int32)
    accept_index = candidates.new_full((b, inputs["num_steps"] + 1), -1, dtype=torch.int32)
    accept_token_num = candidates.new_empty(b, dtype=torch.int32)
    verify(
        predict,
        accept_index,
        accept_token_num,
        candidates,
        inputs["retrieve_index"],
        inputs["retrieve_next_token"],
        inputs["retrieve_next_sibling"],
        inputs["target_predict"],
    )
    return {"predict": predict, "accept_index": accept_index, "accept_token_num": accept_token_num}


OPERATION = Operation(
    name="verify_tree_greedy",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/spec_tree.py:verify_tree_greedy_triton @0.5.23",
    sgl_kernel=_verified,
    sgl_kernel_function="verify_tree_greedy",
)
