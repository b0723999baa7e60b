"""Move what the KV cache holds at some slots to other slots, in every layer.

The two sets may overlap: compaction moves 22 -> 21 and 25 -> 22. So every source is read before any target is written,
in one of two ways. Few rows fit into registers: one program per layer and byte range reads its part of all of them,
waits for all of its threads, and writes. More rows go through a scratch buffer of their size, in two launches.

Bytes moved: each row that moves once in and once out (twice for more than FEW rows), and 16 for each pair of slots.

Source: SGLang: python/sglang/kernels/ops/kvcache/cache_move.py:copy_all_layer_kv_cache_tiled @0.5.23. It too reads all
before it writes, but without a barrier between the threads that do so, and calls for more than 128 or 256 rows are
cut into parts that know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple, Protocol
from weakref import finalize

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton, triton_type
from refspec.kernels.checks import check_bounds, check_tensor, device_of, values_are_checked
from refspec.kernels.compact_to_front import BITS
from refspec.kernels.launches import count_launch

FEW = 128  # rows that one program holds in registers: with 16 units of 8 bytes of each, 32 registers a thread
TILE = 2048  # units that one program holds


class KVPool(Protocol):
    """What is asked of a pool: its buffers."""

    @property
    def layers(self) -> Sequence[Tensor]:
        """One tensor (slots, ...) for each layer or part of one, all with as many slots, each slot's row contiguous.
        Shapes and types may differ; there may be none. A layer stays where it is as long as it lives.
        """
        ...


class LayerTable(NamedTuple):
    """A pool's layers as a kernel sees them: rows of integers of one size, which it need not know the meaning of.

    rows: i64 (layers, 4), on the pool's device, for each layer its address in bytes and, in units: from slot to slot,
    the width of a row, and the widths of all layers before it. align: units that all of these are multiples of.
    """

    slots: int
    rows: Tensor
    unit: torch.dtype
    align: int
    widest: int
    total_width: int


_tables: dict[tuple[int, ...], LayerTable] = {}  # by the identities of the layers, as long as all of these live


def layer_table(pool: KVPool) -> LayerTable:
    """The table of a pool with at least one layer, made when these layers are first seen.

    Units are as large as all rows allow, of 1 to 8 bytes. It stays where it is as long as the layers do, so a captured
    graph may hold its address; but the first call copies from the host, and must not be captured.
    Raises TypeError or ValueError if pool.layers are not as `KVPool` says.
    """
    identities = tuple(map(id, pool.layers))
    table = _tables.get(identities)
    if table is None:
        check_layers(pool.layers)
        table = _tables[identities] = _table_of(pool.layers)
        for layer in pool.layers:
            finalize(layer, _tables.pop, identities, None)
    return table


def _table_of(layers: Sequence[Tensor]) -> LayerTable:
    """The table of layers that were checked."""
    in_bytes = [(x.data_ptr(), x.stride(0) * x.element_size(), x[:1].nbytes) for x in layers]
    aligned = gcd(16, *(number for layer in in_bytes for number in layer))  # 16 bytes: the widest load
    size = min(aligned, 8)
    rows, before = [], 0
    for address, stride, width in in_bytes:
        rows.append([address, stride // size, width // size, before])
        before += width // size
    widest = max(width for _, _, width, _ in rows)
    on_device = torch.tensor(rows, device=layers[0].device)
    return LayerTable(len(layers[0]), on_device, BITS[size], aligned // size, widest, before)


def check_layers(layers: Sequence[Tensor]) -> None:
    """Raises TypeError or ValueError if these are not layers as `KVPool` says, or not all on one device."""
    for i, layer in enumerate(layers):
        name = f"pool.layers[{i}]"
        if not isinstance(layer, Tensor):
            raise TypeError(f"{name} is {type(layer).__name__}, it must be a tensor")
        if layer.device != layers[0].device:
            raise ValueError(f"{name} is on {layer.device}, pool.layers[0] is on {layers[0].device}")
        if layer.shape[:1] != layers[0].shape[:1] or not layer.dim():
            raise ValueError(f"{name} has shape {tuple(layer.shape)}, all layers must have as many slots")
        if not layer[:1].is_contiguous() or (len(layer) > 1 and layer.stride(0) < layer[0].numel()):
            raise ValueError(f"{name} has strides {layer.stride()}, each slot must be contiguous and apart from others")


def check_pool(pool: KVPool, device: torch.device) -> int:
    """Raises TypeError or ValueError if pool.layers are not as `KVPool` says, or not on that device. Returns the number
    of slots, 0 where there are no layers. The layers are looked at once, not at every call.
    """
    if not isinstance(layers := getattr(pool, "layers", None), Sequence):
        raise TypeError(f"pool is {type(pool).__name__}, it must have a sequence of tensors as its layers")
    if not layers:
        return 0
    table = layer_table(pool)
    if table.rows.device != device:
        raise ValueError(f"pool.layers[0] is on {table.rows.device}, the other arguments are on {device}")
    return table.slots


def move_kv_cache_torch(pool: KVPool, dst: Tensor, src: Tensor) -> None:
    """The reference of `move_kv_cache`."""
    for layer in pool.layers:
        layer[dst] = layer[src]  # the right side is a copy


@triton.jit
def load_layer(table, i, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """Entry i of a LayerTable: where the layer begins, from slot to slot, a row's width, the widths before it."""
    entry = table + i * 4
    base = tl.load(entry).to(tl.pointer_type(UNIT))
    return (
        tl.multiple_of(base, ALIGN * (UNIT.primitive_bitwidth // 8)),
        tl.multiple_of(tl.load(entry + 1), ALIGN),
        tl.multiple_of(tl.load(entry + 2), ALIGN),
        tl.multiple_of(tl.load(entry + 3), ALIGN),
    )


@triton.jit(do_not_specialize=["n"])
def _move_few_kernel(
    table, dst, src, n, UNIT: tl.constexpr, ALIGN: tl.constexpr, N_UPPER: tl.constexpr, COLUMNS: tl.constexpr
):
    """Program (c, i) moves the c-th COLUMNS of all rows of layer i."""
    base, stride, width, _ = load_layer(table, tl.program_id(1), UNIT, ALIGN)
    row = tl.arange(0, N_UPPER)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < n)[:, None] & (column < width)[None, :]
    source = tl.load(src + row, row < n, other=0)
    target = tl.load(dst + row, row < n, other=0)
    value = tl.load(base + source[:, None] * stride + column[None, :], inside)
    tl.debug_barrier()  # one thread's target is another one's source
    tl.store(base + target[:, None] * stride + column[None, :], value, inside)


@triton.jit(do_not_specialize=["n"])
def _copy_rows_kernel(
    table,
    slots,
    scratch,
    n,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    TO_POOL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (t, c, i) copies COLUMNS of ROWS rows of layer i from the pool to scratch, or from there to the pool."""
    base, stride, width, before = load_layer(table, tl.program_id(2), UNIT, ALIGN)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < n)[:, None] & (column < width)[None, :]
    slot = tl.load(slots + row, row < n, other=0)
    in_pool = base + slot[:, None] * stride + column[None, :]
    in_scratch = scratch + before * n + row[:, None] * width + column[None, :]
    if TO_POOL:
        tl.store(in_pool, tl.load(in_scratch, inside), inside)
    else:
        tl.store(in_scratch, tl.load(in_pool, inside), inside)


def move_kv_cache_triton(pool: KVPool, dst: Tensor, src: Tensor) -> None:
    """The kernels' launches."""
    n = len(dst)
    if not (n and pool.layers):
        return
    table = layer_table(pool)
    if not table.widest:
        return
    layers, columns = len(pool.layers), triton.next_power_of_2(table.widest)
    kinds: dict[str, Any] = {"UNIT": triton_type(table.unit), "ALIGN": table.align, "num_warps": 4}
    if n <= FEW:
        n_upper = triton.next_power_of_2(n)
        columns = min(columns, TILE // n_upper)
        _move_few_kernel[(triton.cdiv(table.widest, columns), layers)](
            table.rows, dst, src, n, N_UPPER=n_upper, COLUMNS=columns, **kinds
        )
    else:
        columns = min(columns, 512)
        rows = TILE // columns
        scratch = torch.empty(n * table.total_width, dtype=table.unit, device=dst.device)
        grid = (triton.cdiv(n, rows), triton.cdiv(table.widest, columns), layers)
        kinds |= {"ROWS": rows, "COLUMNS": columns}
        _copy_rows_kernel[grid](table.rows, src, scratch, n, TO_POOL=False, **kinds)
        _copy_rows_kernel[grid](table.rows, dst, scratch, n, TO_POOL=True, **kinds)


def move_kv_cache(pool: KVPool, dst: Tensor, src: Tensor, backend: str = "auto") -> None:
    """In place, in every layer: slot dst[i] gets what slot src[i] held before the call; the others stay.

    dst, src i64 (n), in any order and overlapping; no slot comes twice in dst but slot 0, of which nobody asks what it
    then holds. Raises ValueError for other shapes or types, and, where values are checked, for a slot that the pool
    lacks and for a target that comes twice.
    """
    run = choose(backend, device_of("dst", dst), move_kv_cache_torch, move_kv_cache_triton)
    check_tensor("dst", dst, (None,))
    check_tensor("src", src, dst.shape, device=dst.device)
    slots = check_pool(pool, dst.device)
    if pool.layers:
        check_bounds("dst", dst, 0, slots)
        check_bounds("src", src, 0, slots)
    if values_are_checked(dst.device):
        targets, times = dst[dst != 0].unique(return_counts=True)
        if len(twice := targets[times > 1]):
            raise ValueError(f"dst names slots more than once: {twice.tolist()}")
    count_launch("move_kv_cache")
    run(pool, dst, src)
