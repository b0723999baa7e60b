"""Which KV rows compaction moves: SGLang's kernels of 0.5.23 for targets and for sources."""

from __future__ import annotations

import random

import torch

from refspec.kernels import compaction_moves
from refspec.kernels.backend import triton
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.operations.next_roots import accept_index_of, draw_path
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any paths of at least the root, through blocks of any size."""
    n = rng.randint(1, size.nodes)
    return case(rng, [draw_path(rng, n) for _ in range(rng.randint(1, size.batch))], n)


def edges() -> dict[str, Inputs]:
    """No requests; the root alone; everything accepted; a path of the last columns; more than one program."""
    rng = random.Random(0)
    return {
        "no requests": case(rng, [], 4),
        "the root alone": case(rng, [[0], [0]], 4),
        "everything accepted": case(rng, [list(range(8))] * 2, 8),
        "the last columns": case(rng, [[0, 6, 7], [0, 7]], 8),
        "many requests": case(rng, [draw_path(rng, 6) for _ in range(70)], 6),
    }


def case(rng: random.Random, paths: list[list[int]], n: int) -> Inputs:
    """One path for each request; every slot is different."""
    return {
        "accept_index": accept_index_of(rng, paths, n),
        "out_slots": torch.tensor(rng.sample(range(1, 10**6), len(paths) * n), dtype=torch.int64),
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """Both ends of the moves."""
    dst, src = compaction_moves(**inputs, backend=backend)
    return {"dst": dst, "src": src}


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by fill_front_out_cache_loc_func and fill_accept_out_cache_loc. They leave no room between the requests'
    moves; here these are put where ours are.
    """
    accept_index, slots = inputs["accept_index"], inputs["out_slots"]
    accepted = accept_index.flatten() >= 0
    dst, src = (slots.new_zeros(len(accepted)) for _ in range(2))
    lens = accepted.view(accept_index.shape).sum(1)
    sources.module("kernels/ops/speculative/cache_locs.py").fill_front_out_cache_loc_func(lens, slots, dst)
    upper = triton.next_power_of_2(len(accepted))
    eagle = sources.module("kernels/ops/speculative/eagle.py")
    eagle.fill_accept_out_cache_loc[(len(accepted),)](accept_index, slots, src, upper)
    return {name: _apart(x, accepted) for name, x in (("dst", dst), ("src", src))}


def _apart(moves: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """The moves in front, each where a node was accepted; what else there is, of which nothing may be, behind."""
    apart, total = torch.zeros_like(moves), int(accepted.sum())
    apart[accepted], apart[~accepted] = moves[:total], moves[total:]
    return apart


OPERATION = Operation(
    name="compaction_moves",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source=(
        "kernels/ops/speculative/eagle.py:fill_accept_out_cache_loc, "
        "cache_locs.py:fill_front_out_cache_loc_func @0.5.23"
    ),
    sglang_takes=lambda inputs: len(inputs["accept_index"]) > 0,  # a grid of no programs is refused
)
