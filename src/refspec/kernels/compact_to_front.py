"""Bring the accepted rows of each request's block to its front, in order.

Row r·N + i of the answer is row accept_index[r, i] of x where there is one, and row r·N + i of x elsewhere. So what
a stage behind verification reads begins at the block's first row, however the accepted path ran through the tree.

Bytes moved: x once in and once out, and 4·D for each request.

Source: SGLang: python/sglang/srt/speculative/eagle_worker_common.py:_compact_accept_to_front @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_tensor, device_of, values_are_checked
from refspec.kernels.launches import count_launch

# Rows are moved, not calculated with: any type will do that has their bytes.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compact_to_front_torch(x: Tensor, accept_index: Tensor) -> Tensor:
    """The reference of `compact_to_front`."""
    b, d = accept_index.shape
    source = torch.arange(len(x), device=x.device).view(b, -1) if b else accept_index.long()
    source[:, :d] = torch.where(accept_index >= 0, accept_index, source[:, :d])
    return x[source.flatten()]


@triton.jit(do_not_specialize=["rows"])
def _compact_to_front_kernel(x, accept_index, out, rows, n, d, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (t, c) writes the c-th COLUMNS of the t-th ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = row // n
    place = row - r * n
    accepted = tl.load(accept_index + r.to(tl.int64) * d + place, (row < rows) & (place < d), other=-1)
    source = tl.where(accepted >= 0, accepted, row).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + source[:, None] * width + column[None, :], inside)
    tl.store(out + row.to(tl.int64)[:, None] * width + column[None, :], value, inside)


def compact_to_front_triton(x: Tensor, accept_index: Tensor) -> Tensor:
    """The kernel's launch."""
    out = torch.empty(*x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        b, d = accept_index.shape
        rows = len(x)
        flat, flat_out = (y.view(rows, -1).view(BITS[min(y.element_size(), 8)]) for y in (x, out))
        width = flat.shape[1]
        columns = min(triton.next_power_of_2(width), 1024)
        at_once = min(triton.next_power_of_2(rows), 1024 // columns)
        _compact_to_front_kernel[(triton.cdiv(rows, at_once), triton.cdiv(width, columns))](
            flat, accept_index, flat_out, rows, rows // b, d, width, ROWS=at_once, COLUMNS=columns, num_warps=4
        )
    return out


def compact_to_front(x: Tensor, accept_index: Tensor, backend: str = "auto") -> Tensor:
    """x (b*N, ...) of any dtype; accept_index i32 (b, D), D <= N: global rows of each request's path, root first,
    -1 padded.

    Returns a new tensor like x, each block's accepted rows in front, in order, its other rows as they were.
    Raises ValueError for other shapes or types, and, where values are checked, for a row outside its request's block
    and for a row behind padding.
    """
    run = choose(backend, device_of("x", x), compact_to_front_torch, compact_to_front_triton)
    check_tensor("accept_index", accept_index, (None, None), torch.int32, x.device)
    if not x.dim():
        raise ValueError("x has shape (), it must have rows")
    check_tensor("x", x, (None,) * x.dim(), x.dtype)
    check_paths(accept_index, "x", len(x))
    count_launch("compact_to_front")
    return run(x, accept_index)


def check_paths(accept_index: Tensor, name: str, rows: int) -> None:
    """accept_index i32 (b, D) names paths through b equal blocks of at least D rows, which `name` has so many of.

    Raises ValueError if not so; rows outside of a block and behind padding are found where values are checked.
    """
    b, d = accept_index.shape
    n = rows // b if b else 0
    if rows != b * n or (b and d > n):
        raise ValueError(
            f"{name} has {rows} rows, accept_index of shape ({b}, {d}) asks for {b} blocks of at least {d}"
        )
    if values_are_checked(accept_index.device):
        block = accept_index.new_tensor(range(b)).unsqueeze(1)
        if bool(((accept_index != -1) & ((accept_index < block * n) | (accept_index >= (block + 1) * n))).any()):
            raise ValueError(f"accept_index names rows outside of its request's {n}: {accept_index.tolist()}")
        if bool(((accept_index[:, :-1] == -1) & (accept_index[:, 1:] != -1)).any()):
            raise ValueError(f"accept_index has a row behind padding: {accept_index.tolist()}")
