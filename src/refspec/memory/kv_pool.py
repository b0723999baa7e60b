"""Where keys and values are kept: one row per slot and layer.

Target and draft each have a pool of their own, of their own shape, over the *same* slot numbers: a token's slot
holds its keys and values in both.

Source: SGLang: python/sglang/srt/mem_cache/memory_pool.py:MHATokenToKVPool @v0.4.6
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVLayout:
    """What a model keeps for each token."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class MHATokenToKVPool:
    """Keys and values of multi-head attention.

    buffer: (num_layers, size + page_size, 2, kv_heads, head_dim), zero at first, so that a column that a mask
    hides is at least a number. The page_size extra rows are the dummy page that holds slot 0. Keys and values of
    a slot lie side by side: one write and one gather serve both.
    """

    def __init__(self, layout: KVLayout, size: int, device: torch.device, page_size: int = 1) -> None:
        shape = (layout.num_layers, size + page_size, 2, layout.kv_heads, layout.head_dim)
        self.buffer = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.layers = self.buffer.unbind(0)  # views

    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """slots (n); k, v (n, kv_heads, head_dim)."""
        self.layers[layer_id].index_copy_(0, slots, torch.stack([k, v], dim=1))

    def read(self, layer_id: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """slots (b, L) -> keys and values, each (b, kv_heads, L, head_dim)."""
        kv = self.layers[layer_id].index_select(0, slots.flatten()).view(*slots.shape, 2, *self.buffer.shape[3:])
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        return k, v
