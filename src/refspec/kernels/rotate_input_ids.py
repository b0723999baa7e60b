"""Feed the next layer of a multi-layer draft: every row gets the id of the row behind it, the last one a new token.

Layer i of such a draft guesses the token i + 1 places ahead, so its row for a position is fed the token one place
further on than layer i - 1's was. All rows but the last know theirs, for it is the next row's; the last one is fed what
layer i - 1 has just guessed. A window may be longer than what counts in it: the last row that counts then lies before
its end, and what stands behind it is moved too and means nothing.

Bytes moved: 16 for each row that is moved, 40 for each request.

Source: SGLang: python/sglang/kernels/ops/speculative/multi_layer_eagle.py:rotate_input_ids @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_tensor, device_of, values_are_checked
from refspec.kernels.launches import count_launch


def rotate_input_ids_torch(
    input_ids: Tensor, starts: Tensor, lens: Tensor, new_tokens: Tensor, last_rows: Tensor
) -> None:
    """The reference of `rotate_input_ids`."""
    moved = (lens - 1).clamp(min=0)
    before = moved.cumsum(0) - moved
    row = torch.arange(int(moved.sum()), device=lens.device) + (starts - before).repeat_interleave(moved)
    input_ids[row] = input_ids[row + 1]
    some = lens > 0
    input_ids[last_rows[some]] = new_tokens[some]


@triton.jit
def _rotate_input_ids_kernel(input_ids, starts, lens, new_tokens, last_rows, BLOCK: tl.constexpr):
    """Program r does request r, block after block. The barrier: what a thread reads, its neighbour overwrites."""
    r = tl.program_id(0)
    start, length = tl.load(starts + r), tl.load(lens + r)
    last = tl.load(last_rows + r) - start
    new_token = tl.load(new_tokens + r)
    for first in range(0, length, BLOCK):
        row = first + tl.arange(0, BLOCK)
        ids = tl.load(input_ids + start + row + 1, row + 1 < length)
        tl.debug_barrier()
        ids = tl.where(row == last, new_token, ids)
        tl.store(input_ids + start + row, ids, (row + 1 < length) | ((row < length) & (row == last)))


def rotate_input_ids_triton(
    input_ids: Tensor, starts: Tensor, lens: Tensor, new_tokens: Tensor, last_rows: Tensor
) -> None:
    """The kernel's launch."""
    if len(starts):
        _rotate_input_ids_kernel[(len(starts),)](
            input_ids, starts, lens, new_tokens, last_rows, BLOCK=1024, num_warps=4
        )


def rotate_input_ids(
    input_ids: Tensor, starts: Tensor, lens: Tensor, new_tokens: Tensor, last_rows: Tensor, backend: str = "auto"
) -> None:
    """In place: in input_ids[starts[r] : starts[r] + lens[r]] each row but the last gets the id behind it; then row
    last_rows[r] gets new_tokens[r]. A request without rows is left alone.

    input_ids i64 (n); starts, lens, new_tokens, last_rows i64 (b). The windows do not overlap, and last_rows[r], a row
    of input_ids, lies within its request's.
    Raises ValueError for other shapes or types, and, where values are checked, for windows that are not like that.
    """
    run = choose(backend, device_of("input_ids", input_ids), rotate_input_ids_torch, rotate_input_ids_triton)
    check_tensor("input_ids", input_ids, (None,))
    check_tensor("starts", starts, (None,), device=input_ids.device)
    check_tensor("lens", lens, starts.shape, device=input_ids.device)
    check_tensor("new_tokens", new_tokens, starts.shape, device=input_ids.device)
    check_tensor("last_rows", last_rows, starts.shape, device=input_ids.device)
    check_bounds("starts", starts, 0, len(input_ids) + 1)
    check_bounds("lens", lens, 0, len(input_ids) + 1)
    if values_are_checked(lens.device):
        some, ends = lens > 0, starts + lens
        check_bounds("starts + lens", ends, 0, len(input_ids) + 1)
        first, order = starts[some].sort()
        if bool((ends[some][order][:-1] > first[1:]).any()):
            raise ValueError(f"the windows overlap: starts {starts.tolist()}, lens {lens.tolist()}")
        if bool((some & ((last_rows < starts) | (last_rows >= ends))).any()):
            raise ValueError(f"last_rows names rows outside of the windows: {last_rows.tolist()}")
    count_launch("rotate_input_ids")
    run(input_ids, starts, lens, new_tokens, last_rows)
