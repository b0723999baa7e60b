"""Moving rows of the KV cache: SGLang's kernel of 0.5.23, on as many rows as one call of it can hold."""

from __future__ import annotations

import random

import torch

from refspec.kernels import move_kv_cache
from refspec.kernels.backend import triton
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.pool import Pool, layers_of
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any slots, overlapping or not, of layers with rows of any number of bytes."""
    slots = rng.randint(2, 8 * size.nodes)
    widths = [rng.choice([1, 3, 8, 16, 24, 40, 160, 1032]) for _ in range(rng.randint(1, 3))]
    return case(rng, slots, rng.randint(0, min(slots, 4 * size.nodes)), widths)


def edges() -> dict[str, Inputs]:
    """Nothing to move; one row; the whole pool; more rows than registers hold; many of one byte."""
    rng = random.Random(0)
    return {
        "nothing to move": case(rng, 4, 0, [16]),
        "one row": case(rng, 4, 1, [16, 8]),
        "the whole pool": case(rng, 64, 64, [48, 48]),
        "128 rows": case(rng, 130, 128, [40]),
        "129 rows": case(rng, 130, 129, [40]),
        "many rows": case(rng, 1000, 700, [7, 64]),
        "wider than a tile": case(rng, 9, 9, [20000]),
    }


def case(rng: random.Random, slots: int, n: int, widths: list[int]) -> Inputs:
    """n moves among that many slots, no target twice; a layer for each width in bytes."""
    layers = {
        f"layer_{i}": torch.tensor(list(rng.randbytes(slots * width)), dtype=torch.uint8).view(slots, width)
        for i, width in enumerate(widths)
    }
    return {
        **layers,
        "dst": torch.tensor(rng.sample(range(slots), n), dtype=torch.int64),
        "src": torch.tensor(rng.choices(range(slots), k=n), dtype=torch.int64),
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The layers afterwards."""
    layers = layers_of(inputs)
    move_kv_cache(Pool(list(layers.values())), inputs["dst"], inputs["src"], backend=backend)
    return layers


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by copy_all_layer_kv_cache_tiled."""
    layers, n = layers_of(inputs), len(inputs["dst"])
    kernel = sources.module("kernels/ops/kvcache/cache_move.py").copy_all_layer_kv_cache_tiled
    device = inputs["dst"].device
    widest = max(layer.shape[1] for layer in layers.values())
    kernel[(len(layers), triton.cdiv(widest, 128))](
        torch.tensor([layer.data_ptr() for layer in layers.values()], device=device),
        torch.tensor([layer.stride(0) for layer in layers.values()], device=device),
        inputs["dst"],
        inputs["src"],
        n,
        triton.next_power_of_2(n),
        128,
    )
    return layers


OPERATION = Operation(
    name="move_kv_cache",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/kvcache/cache_move.py:copy_all_layer_kv_cache_tiled @0.5.23",
    sglang_takes=lambda inputs: 0 < len(inputs["dst"]) <= 256,  # its caller cuts longer ones into parts
)
