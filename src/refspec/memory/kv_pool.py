"""Where a model keeps what it will read again of each token: one row per slot and layer.

Target and draft each have a pool of their own, of their own shape, over the *same* slot numbers: a token's slot holds
its rows in both. What a row is depends on the model's attention, and its `kv_layout` says so:

| layout      | pool             | a row of one layer                                                  |
|-------------|------------------|---------------------------------------------------------------------|
| `KVLayout`  | MHATokenToKVPool | keys and values of every KV head                                    |
| `MLALayout` | MLATokenToKVPool | a compressed latent and a rotary key, once for all heads            |
| `DSALayout` | DSATokenToKVPool | the same, and beside it the key by which the indexer finds the token |
| `SWALayout` | SWAKVPool        | as KVLayout, in a sub-pool for full layers and one for sliding ones |

Whatever is a slot's own is one of its pool's `layers`, and `move` takes all of them along. So a kind of pool cannot
have half of a row moved, or crash at the first accepted branch for want of a move.

Source: SGLang: python/sglang/srt/mem_cache/memory_pool.py:MHATokenToKVPool, MLATokenToKVPool, DSATokenToKVPool
(move_kv_cache is its move), python/sglang/srt/mem_cache/swa_memory_pool.py:SWAKVPool @0.5.23
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from refspec.kernels.move_kv_cache import move_kv_cache
from refspec.kernels.tree_attention import MOST_DIM


class PoolLayout(Protocol):
    """What a model keeps for each token: one of the four layouts below."""

    @property
    def dtype(self) -> torch.dtype: ...
    def make_pool(self, size: int, device: torch.device, page_size: int = 1) -> TokenToKVPool:
        """A pool of `size` slots, and a dummy page in front."""


class TokenToKVPool(ABC):
    """What runner and kernels ask of a pool. Slots are numbered from 0; the first page_size of them are the dummy page,
    and padding is written to slot 0. All rows are zero at first, so that a column that a mask hides is at least a
    number.

    layers: all that the pool holds, in parts of (size + page_size, ...). What moves slots moves all of them.
    paged: whether `tree_attention` can read the rows where they are. Else they are gathered.
    """

    layers: Sequence[Tensor]
    paged = True

    @abstractmethod
    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """slots (n); k (n, kv_heads, width), v (n, kv_heads, width of values)."""

    @abstractmethod
    def read(self, layer_id: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """slots (b, L) -> keys (b, kv_heads, L, width) and values (b, kv_heads, L, width of values)."""

    @abstractmethod
    def in_place(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Keys and values of every slot, views of equal shape (size + page_size, kv_heads, width). Where values are
        narrower than keys, they are the front of these rows.
        """

    def window(self, layer_id: int) -> int | None:
        """How many positions a row of that layer sees, its own the last of them; None: all."""
        return None

    def move(self, dst: Tensor, src: Tensor) -> None:
        """dst, src i64 (n), which may overlap: slot dst[i] gets what slot src[i] held before the call, in every layer.

        Raises ValueError, where values are checked, for slots that the pool lacks: see `move_kv_cache`.
        """
        move_kv_cache(self, dst, src)


@dataclass(frozen=True)
class KVLayout:
    """Keys and values of each of the KV heads, in every layer."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def make_pool(self, size: int, device: torch.device, page_size: int = 1) -> MHATokenToKVPool:
        return MHATokenToKVPool(self, size, device, page_size)


class MHATokenToKVPool(TokenToKVPool):
    """Keys and values of multi-head attention.

    buffer: (num_layers, size + page_size, 2, kv_heads, head_dim). Keys and values of a slot lie side by side: one write
    and one gather serve both.
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

    def in_place(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Two views (slots, kv_heads, head_dim)."""
        k, v = self.layers[layer_id].unbind(1)
        return k, v


@dataclass(frozen=True)
class MLALayout:
    """A latent and a rotary key, in every layer. SGLang's names: kv_lora_rank and qk_rope_head_dim."""

    num_layers: int
    latent_dim: int
    rope_dim: int
    dtype: torch.dtype

    def make_pool(self, size: int, device: torch.device, page_size: int = 1) -> MLATokenToKVPool:
        return MLATokenToKVPool(self, size, device, page_size)


class MLATokenToKVPool(TokenToKVPool):
    """What multi-head latent attention reads: all heads the same row, whole as their key, its front as their value.

    rows: (num_layers, size + page_size, 1, latent_dim + rope_dim), the latent first.

    `tree_attention` takes keys and values of one width, 256 at most: it is given the whole row as both, and the rest of
    its answer is cut off. Wider rows (DeepSeek's have 576 numbers) are gathered.
    """

    def __init__(self, layout: MLALayout, size: int, device: torch.device, page_size: int = 1) -> None:
        self.latent_dim = layout.latent_dim
        width = layout.latent_dim + layout.rope_dim
        self.rows = torch.zeros(layout.num_layers, size + page_size, 1, width, dtype=layout.dtype, device=device)
        self.layers = self.rows.unbind(0)
        self.paged = width <= MOST_DIM

    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """slots (n); k (n, 1, latent_dim + rope_dim). v is the front of k, and not looked at."""
        self.layers[layer_id].index_copy_(0, slots, k)

    def read(self, layer_id: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """slots (b, L) -> (b, 1, L, latent_dim + rope_dim), and of it the first latent_dim numbers."""
        rows = self.layers[layer_id].index_select(0, slots.flatten()).view(len(slots), 1, slots.shape[1], -1)
        return rows, rows[..., : self.latent_dim]

    def in_place(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Twice (slots, 1, latent_dim + rope_dim)."""
        return self.layers[layer_id], self.layers[layer_id]


@dataclass(frozen=True)
class DSALayout:
    """As MLALayout, and an index key of index_dim numbers in every layer."""

    num_layers: int
    latent_dim: int
    rope_dim: int
    index_dim: int
    dtype: torch.dtype

    def make_pool(self, size: int, device: torch.device, page_size: int = 1) -> DSATokenToKVPool:
        return DSATokenToKVPool(self, size, device, page_size)


class DSATokenToKVPool(MLATokenToKVPool):
    """What DeepSeek sparse attention reads: MLA's rows, and the index keys by which it chooses among them.

    index_keys: (num_layers, size + page_size, index_dim).

    SGLang keeps index keys in 8 bits with a scale for each, in pages of 64, and none for layers that take over the
    choice of the layer before; here they are numbers like the others, and every layer has its own.
    """

    def __init__(self, layout: DSALayout, size: int, device: torch.device, page_size: int = 1) -> None:
        super().__init__(
            MLALayout(layout.num_layers, layout.latent_dim, layout.rope_dim, layout.dtype), size, device, page_size
        )
        shape = (layout.num_layers, size + page_size, layout.index_dim)
        self.index_keys = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.index_layers = self.index_keys.unbind(0)
        self.layers = [*self.layers, *self.index_layers]
        self.paged = False  # each row reads other tokens

    def write_index(self, layer_id: int, slots: Tensor, keys: Tensor) -> None:
        """slots (n); keys (n, index_dim)."""
        self.index_layers[layer_id].index_copy_(0, slots, keys)

    def read_index(self, layer_id: int, slots: Tensor) -> Tensor:
        """slots (b, L) -> (b, L, index_dim)."""
        return self.index_layers[layer_id].index_select(0, slots.flatten()).view(*slots.shape, -1)


@dataclass(frozen=True)
class SWALayout:
    """Keys and values of each KV head; windows: for each layer how many positions it sees, None for all of them."""

    windows: tuple[int | None, ...]
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def make_pool(self, size: int, device: torch.device, page_size: int = 1) -> SWAKVPool:
        return SWAKVPool(self, size, device, page_size)


class SWAKVPool(TokenToKVPool):
    """Layers that see everything in one sub-pool, layers with a sliding window in another. Either may have no layers:
    a draft of a single layer leaves one of them empty.

    full, sliding: the sub-pools, over the same slot numbers.
    positions: i64 (size + page_size, 1), where the token of each slot stands in its text. A window is a matter of
    positions, and the columns of a tree, or of a draft's branches, do not follow one another by position. The positions
    move with their slots.

    SGLang makes the sliding sub-pool smaller, with slot numbers of its own, and frees what every window has left
    behind; a table leads from one numbering to the other. Here a token keeps its slot in both as long as it lives:
    nothing is saved, and nothing has to be translated.
    """

    def __init__(self, layout: SWALayout, size: int, device: torch.device, page_size: int = 1) -> None:
        self.windows = layout.windows

        def sub_pool(layers: list[int]) -> MHATokenToKVPool:
            return KVLayout(len(layers), layout.kv_heads, layout.head_dim, layout.dtype).make_pool(
                size, device, page_size
            )

        full = [layer for layer, window in enumerate(layout.windows) if window is None]
        sliding = [layer for layer, window in enumerate(layout.windows) if window is not None]
        self.full, self.sliding = sub_pool(full), sub_pool(sliding)
        self.home = {layer: (self.full, place) for place, layer in enumerate(full)}
        self.home |= {layer: (self.sliding, place) for place, layer in enumerate(sliding)}
        self.positions = torch.zeros(size + page_size, 1, dtype=torch.int64, device=device)
        self.layers = [*self.full.layers, *self.sliding.layers, self.positions]
        self.paged = not sliding  # to `tree_attention` all committed tokens are visible

    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """slots (n); k, v (n, kv_heads, head_dim)."""
        pool, place = self.home[layer_id]
        pool.write(place, slots, k, v)

    def read(self, layer_id: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """slots (b, L) -> keys and values, each (b, kv_heads, L, head_dim)."""
        pool, place = self.home[layer_id]
        return pool.read(place, slots)

    def in_place(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Two views (slots, kv_heads, head_dim)."""
        pool, place = self.home[layer_id]
        return pool.in_place(place)

    def window(self, layer_id: int) -> int | None:
        return self.windows[layer_id]

    def write_positions(self, slots: Tensor, positions: Tensor) -> None:
        """slots, positions i64 (n)."""
        self.positions.index_copy_(0, slots, positions[:, None])
