"""The kernels of test_interpreter_traps.py; run as a program, it prints what the compiler makes of some of them.

Each has the fault and, where CURED is true (or TO a wider type), its cure.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def sum_kernel(x, out, n, BLOCK: tl.constexpr, TO: tl.constexpr):
    """out = the sum of x[:n], added in the type TO."""
    i = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + i, i < n, other=0).to(TO)))


@triton.jit
def double_kernel(x, out, BLOCK: tl.constexpr, TO: tl.constexpr):
    """out = x + x, added in the type TO."""
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i).to(TO)
    tl.store(out + i, v + v)


@triton.jit
def mask_offset_kernel(out, n, context, CURED: tl.constexpr):
    """Where the mask of request program_id + 64 begins, if each has n rows of `context` columns."""
    r = tl.program_id(0) + 64
    if CURED:
        r = r.to(tl.int64)
    tl.store(out, r * n * context)


@triton.jit
def count_kernel(x, out, BLOCK: tl.constexpr, CURED: tl.constexpr):
    """out[i] = how many of x[:i+1] are positive."""
    i = tl.arange(0, BLOCK)
    hit = tl.load(x + i) > 0
    if CURED:
        hit = hit.to(tl.int32)
    tl.store(out + i, tl.cumsum(hit, 0))


@triton.jit
def twice_kernel(x, out, BLOCK: tl.constexpr, CURED: tl.constexpr):
    """out[i] = 2 where x[i] is positive, else 0."""
    i = tl.arange(0, BLOCK)
    hit = tl.load(x + i) > 0
    if CURED:
        hit = hit.to(tl.int32)
    tl.store(out + i, (hit + hit).to(tl.int32))


@triton.jit
def dot_kernel(a, b, out, SIZE: tl.constexpr, CURED: tl.constexpr):
    """out = a @ b, of SIZE x SIZE floats."""
    i = tl.arange(0, SIZE)
    place = i[:, None] * SIZE + i[None, :]
    if CURED:
        product = tl.dot(tl.load(a + place), tl.load(b + place), input_precision="ieee")
    else:
        product = tl.dot(tl.load(a + place), tl.load(b + place))
    tl.store(out + place, product)


@triton.jit
def loops_kernel(out, n):
    """out = how often a while, a for and a nested while with the bound n ran."""
    i = 0
    while i < n:
        i += 1
    tl.store(out, i)
    count = 0
    for _ in range(n):
        count += 1
    tl.store(out + 1, count)
    rounds = 0
    left = n
    while left > 0:
        inner = 0
        while inner < n:
            inner += 1
            rounds += 1
        left -= 1
    tl.store(out + 2, rounds)


@triton.jit
def shift_kernel(x, out, n, BLOCK: tl.constexpr):
    """out[i] = x[i+BLOCK], and 0 at the end. With out = x, a program reads what its neighbour writes."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i + BLOCK, i + BLOCK < n, other=0), i < n)


@triton.jit
def shift_back_kernel(x, out, n, BLOCK: tl.constexpr):
    """out[i+BLOCK] = x[i]: the same race in the other direction."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i + BLOCK, tl.load(x + i, i + BLOCK < n, other=0), i + BLOCK < n)


def compiled() -> dict[str, dict[str, str]]:
    """What the compiler makes of these launches for sm_80: Triton's own form and the assembly, by name."""
    from refspec.bench.compile_report import record_instead_of_launching

    launches = record_instead_of_launching()
    floats, ints, wide = torch.zeros(32, 32), torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int64)
    calls = {
        "dot": lambda: dot_kernel[(1,)](floats, floats, floats, SIZE=32, CURED=False),
        "dot cured": lambda: dot_kernel[(1,)](floats, floats, floats, SIZE=32, CURED=True),
        "count": lambda: count_kernel[(1,)](ints, ints, BLOCK=32, CURED=False),
        "count cured": lambda: count_kernel[(1,)](ints, ints, BLOCK=32, CURED=True),
        "twice": lambda: twice_kernel[(1,)](ints, ints, BLOCK=32, CURED=False),
        "twice cured": lambda: twice_kernel[(1,)](ints, ints, BLOCK=32, CURED=True),
        "sum": lambda: sum_kernel[(1,)](ints, wide, 32, BLOCK=32, TO=tl.int32),
        "sum cured": lambda: sum_kernel[(1,)](ints, wide, 32, BLOCK=32, TO=tl.int64),
        "mask offset": lambda: mask_offset_kernel[(1,)](wide, 64, 1_000_000, CURED=False),
        "mask offset cured": lambda: mask_offset_kernel[(1,)](wide, 64, 1_000_000, CURED=True),
        "half sum": lambda: sum_kernel[(1,)](floats.bfloat16(), floats, 32, BLOCK=32, TO=tl.bfloat16),
    }
    found = {}
    for name, call in calls.items():
        launches.made.clear()
        call()
        ((_, _, kernel),) = launches.made
        found[name] = {"ttir": kernel.asm["ttir"], "ptx": kernel.asm["ptx"]}
    return found


if __name__ == "__main__":
    json.dump(compiled(), sys.stdout)
