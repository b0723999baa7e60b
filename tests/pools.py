"""KV pools and buffers for tests of what moves their rows."""

from __future__ import annotations

import torch
from backends import MARGIN, NONSENSE, among_nonsense
from torch import Tensor

from refspec.oracle.pool import Pool


def copy_of(pool: Pool) -> Pool:
    """A pool of its own memory, with the same content."""
    return Pool([layer.clone() for layer in pool.layers])


def pool_of(slots: int, *widths: int, dtype: torch.dtype = torch.float32) -> Pool:
    """A layer for each width, of numbers at random, each between bytes that no one may touch."""
    return Pool([among_nonsense(torch.randint(0, 256, (slots, width)).to(dtype)) for width in widths])


def assert_rim_untouched(x: Tensor) -> None:
    """What `among_nonsense` put around x is still there."""
    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    assert (whole[:MARGIN] == NONSENSE).all()
    assert (whole[-MARGIN:] == NONSENSE).all()
    assert len(whole) == x.nbytes + 2 * MARGIN
