"""Read the same rows of several buffers, in one launch.

What a round hands to the next lies in one buffer for each kind of thing: the bonus, the best k and their
probabilities, the hidden state, each request in its own row. The next round's batch has the requests in another order,
and some are gone; so it gathers its rows, and a launch for each buffer would cost more than the bytes do.

Bytes moved: each row in and out, and 8 for its index.

Source: SGLang: python/sglang/kernels/ops/speculative/gather_spec_extras.py:gather_spec_extras @0.5.23
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_tensor, device_of
from refspec.kernels.compact_to_front import BITS
from refspec.kernels.launches import count_launch


def gather_rows_torch(index: Tensor, buffers: Sequence[Tensor]) -> list[Tensor]:
    """The reference of `gather_rows`."""
    return [x[index] for x in buffers]


@triton.jit
def _gather_rows_kernel(index, buffers, outs, widths, BLOCK: tl.constexpr):
    """Program (i, t) copies the t-th BLOCK numbers of row index[i] of every buffer, where it has as many."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(index + i)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for x in tl.static_range(len(buffers)):
        inside = column < widths[x]
        tl.store(outs[x] + i * widths[x] + column, tl.load(buffers[x] + row * widths[x] + column, inside), inside)


def gather_rows_triton(index: Tensor, buffers: Sequence[Tensor]) -> list[Tensor]:
    """The kernel's launch."""
    m = len(index)
    outs = [torch.empty(m, *x.shape[1:], dtype=x.dtype, device=x.device) for x in buffers]
    filled = [(_as_bits(x), _as_bits(out)) for x, out in zip(buffers, outs, strict=True) if out.numel()]
    if filled:
        widths = tuple(out.shape[1] for _, out in filled)
        block = min(triton.next_power_of_2(max(widths)), 1024)
        _gather_rows_kernel[(m, triton.cdiv(max(widths), block))](
            index, tuple(x for x, _ in filled), tuple(out for _, out in filled), widths, BLOCK=block, num_warps=4
        )
    return outs


def _as_bits(x: Tensor) -> Tensor:
    """x (R, ...), which is not empty, as rows of integers."""
    return x.view(len(x), -1).view(BITS[min(x.element_size(), 8)])


def gather_rows(index: Tensor, buffers: Sequence[Tensor], backend: str = "auto") -> list[Tensor]:
    """index i64 (m), in any order, also twice the same; buffers, at least one, each (R, ...) with its own type and row.

    Returns for each buffer its rows index[i], (m, ...).
    Raises ValueError for other shapes or types, and, where values are checked, for a row that a buffer lacks.
    """
    run = choose(backend, device_of("index", index), gather_rows_torch, gather_rows_triton)
    check_tensor("index", index, (None,))
    for i, x in enumerate(buffers):
        device_of(f"buffers[{i}]", x)
        if not x.dim():
            raise ValueError(f"buffers[{i}] has shape (), it must have rows")
        check_tensor(f"buffers[{i}]", x, (None,) * x.dim(), x.dtype, index.device)
    if not buffers:
        raise ValueError("buffers is empty, there is nothing to gather")
    check_bounds("index", index, 0, min(map(len, buffers)))
    count_launch("gather_rows")
    return run(index, buffers)
