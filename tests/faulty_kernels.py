"""Launches that test_compile.py puts in the place of a real one, each with a fault."""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _hoarding_kernel(x, out, SIZE: tl.constexpr):
    """SIZE numbers that one warp must hold all at once: far more than it has registers."""
    i = tl.arange(0, SIZE)
    v = tl.load(x + i)
    tl.store(out + i, v * tl.sum(v))


@triton.jit
def _odd_kernel(x):
    """A range that is no power of two."""
    tl.store(x + tl.arange(0, 3), 0)


def spills(*_: Any) -> None:
    x = torch.zeros(16384)
    _hoarding_kernel[(1,)](x, x, SIZE=16384, num_warps=1)


def is_refused(*_: Any) -> None:
    _odd_kernel[(1,)](torch.zeros(3))


def ends_early(*_: Any) -> None:
    print("out of registers", file=sys.stderr)
    sys.stderr.flush()
    raise SystemExit(3)
