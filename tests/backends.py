"""Both implementations of an operation, and buffers that show what a kernel does beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from refspec.kernels.backend import interpreting

MARGIN = 64  # bytes on each side
KNOWN, NONSENSE = 0xA5, 0x5A

needs_interpreter = pytest.mark.skipif(
    not interpreting(), reason="Triton runs on CPU tensors only in its interpreter: set TRITON_INTERPRET=1"
)
both_backends = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_interpreter)])


@contextmanager
def guarded_outputs() -> Iterator[None]:
    """Inside, torch.empty and torch.ones hand out the middle of a larger buffer; in the end its rim must be as it was.

    What torch.empty hands out holds known bytes too, so an entry that nobody writes is a wrong one.
    """
    buffers: list[Tensor] = []

    def buffer(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        buffers.append(torch.full((torch.Size(size).numel() * dtype.itemsize + 2 * MARGIN,), KNOWN, dtype=torch.uint8))
        return buffers[-1][MARGIN:-MARGIN].view(dtype).view(size)

    def empty(*size: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
        assert device.type == "cpu"
        return buffer(size, dtype)

    def ones(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return empty(*size, dtype=dtype, device=device).fill_(1)

    with patch.object(torch, "empty", empty), patch.object(torch, "ones", ones):
        yield
    assert buffers
    for whole in buffers:
        assert (whole[:MARGIN] == KNOWN).all()
        assert (whole[-MARGIN:] == KNOWN).all()


def among_nonsense(x: Tensor) -> Tensor:
    """x in the middle of a larger buffer: who reads beside it reads very large numbers."""
    raw = x.contiguous().view(-1).view(torch.uint8)
    whole = torch.full((raw.numel() + 2 * MARGIN,), NONSENSE, dtype=torch.uint8)
    middle = whole[MARGIN:-MARGIN]
    middle.copy_(raw)
    return middle.view(x.dtype).view(x.shape)
