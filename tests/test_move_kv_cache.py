"""Rows move as if all were read before any is written, in every layer, whatever a row is made of."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from importlib import import_module
from itertools import groupby, permutations
from typing import Any

import pytest
import torch
from backends import both_backends, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import assert_rim_untouched, copy_of, pool_of

from refspec.kernels import move_kv_cache
from refspec.kernels.backend import TRITON_INSTALLED
from refspec.kernels.move_kv_cache import FEW, layer_table
from refspec.memory.kv_pool import KVLayout, MHATokenToKVPool
from refspec.oracle.pool import Pool

CPU = torch.device("cpu")
MODULE = import_module("refspec.kernels.move_kv_cache")  # the package has the function under this name
needs_triton = pytest.mark.skipif(not TRITON_INSTALLED, reason="Triton is not installed")


def column(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def assert_moved(pool: Pool, before: Pool, dst: list[int], src: list[int]) -> None:
    """Every row of every layer is what it should be, and what lies around the layers is what it was."""
    came_from = dict(zip(dst, src, strict=True))
    for layer, old in zip(pool.layers, before.layers, strict=True):
        for slot in range(len(layer)):
            assert torch.equal(layer[slot], old[came_from.get(slot, slot)]), slot
        assert_rim_untouched(layer)


@both_backends
@pytest.mark.parametrize("pairs", [*permutations([(21, 22), (22, 25)])], ids=str)
def test_PAGE_05_a_row_that_is_still_to_be_read_is_not_overwritten(
    backend: str, pairs: tuple[tuple[int, int], ...]
) -> None:
    """Slots 20..27, kept nodes 0, 2, 5: 22 -> 21 and 25 -> 22, in either order, keys and values of all layers."""
    pool = MHATokenToKVPool(KVLayout(3, 2, 4, torch.float32), size=30, device=CPU)
    pool.buffer.copy_(torch.arange(pool.buffer.numel()).view_as(pool.buffer))
    before = pool.buffer.clone()
    move_kv_cache(pool, column([dst for dst, _ in pairs]), column([src for _, src in pairs]), backend)
    for slot, node in [(20, 0), (21, 2), (22, 5)]:
        assert torch.equal(pool.buffer[:, slot], before[:, 20 + node])
    others = [slot for slot in range(31) if slot not in (21, 22)]
    assert torch.equal(pool.buffer[:, others], before[:, others])


@both_backends
def test_PAGE_07_any_kind_of_pool_moves_or_is_refused_before_anything_is_moved(backend: str) -> None:
    """Keys beside values, one latent row, a latent row and an index, layers that differ; then what cannot be moved:
    slots within heads, layers with slots of their own.
    """
    kinds = {
        "MHA": [torch.rand(6, 2, 3, 8), torch.rand(6, 2, 3, 8)],
        "MLA": [torch.rand(6, 1, 40).bfloat16()],
        "DSA": [torch.rand(6, 1, 40).bfloat16(), torch.randint(256, (6, 33)).to(torch.uint8)],
        "hybrid": [torch.rand(6, 2, 3, 8), torch.rand(6, 2, 1, 16)],
    }
    for name, layers in kinds.items():
        before = [layer.clone() for layer in layers]
        move_kv_cache(Pool(layers), column([1, 2]), column([2, 5]), backend)
        for layer, old in zip(layers, before, strict=True):
            assert torch.equal(layer, old[[0, 2, 5, 3, 4, 5]]), name
    by_head = torch.rand(3, 6, 8).transpose(0, 1)  # (slots, heads, dim), with a head's slots side by side
    own_slots = [torch.rand(6, 8), torch.rand(4, 8)]
    for layers, message in (
        ([torch.rand(6, 8), by_head], r"layers\[1\] has strides"),
        (own_slots, r"has shape \(4, 8\)"),
    ):
        before = [layer.clone() for layer in layers]
        with pytest.raises(ValueError, match=message):
            move_kv_cache(Pool(layers), column([1, 2]), column([2, 3]), backend)
        assert all(torch.equal(layer, old) for layer, old in zip(layers, before, strict=True))


@both_backends
@pytest.mark.parametrize("n", [2, 33, FEW, FEW + 1, 300])
def test_PAGE_05_a_whole_ring_of_rows(backend: str, n: int) -> None:
    """Every slot of the pool is read once and written once; both ways round."""
    for shift in (1, -1):
        pool = pool_of(n, 6, 1)
        before, dst = copy_of(pool), list(range(n))
        src = [(slot + shift) % n for slot in dst]
        move_kv_cache(pool, column(dst), column(src), backend)
        assert_moved(pool, before, dst, src)


@both_backends
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    slots=st.integers(1, 40),
    widths=st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 16, 33]), min_size=0, max_size=3),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]),
)
def test_any_moves_in_pools_of_any_layers(
    backend: str, seed: int, slots: int, widths: list[int], dtype: torch.dtype
) -> None:
    """Rows of any width, 0 among them, of any type; layers that differ in width; no layers; sources that repeat."""
    rng = random.Random(seed)
    pool = pool_of(slots, *widths, dtype=dtype)
    before = copy_of(pool)
    dst = rng.sample(range(slots), rng.randint(0, slots))
    src = rng.choices(range(slots), k=len(dst))
    move_kv_cache(pool, column(dst), column(src), backend)
    came_from = column([dict(zip(dst, src, strict=True)).get(slot, slot) for slot in range(slots)])
    for layer, old in zip(pool.layers, before.layers, strict=True):
        assert torch.equal(layer, old[came_from])


@both_backends
@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33])
@pytest.mark.parametrize("n", [8, FEW + 1])
def test_TRI_02_nothing_beside_the_buffers_is_touched(backend: str, size: int, n: int) -> None:
    """Rows of `size` numbers, first slot and last among them."""
    for dtype in (torch.uint8, torch.float32):  # units of 1 and of 4 bytes and more
        pool = pool_of(n, size, 4 * size, dtype=dtype)
        before = copy_of(pool)
        dst, src = [n - 1, 0, *range(1, n - 1)], [0, n - 1, *range(n - 2, 0, -1)]
        move_kv_cache(pool, column(dst), column(src), backend)
        assert_moved(pool, before, dst, src)


@both_backends
def test_a_row_wider_than_one_program_holds(backend: str) -> None:
    pool = pool_of(5, 5000, 3)
    before = copy_of(pool)
    move_kv_cache(pool, column([4, 0]), column([0, 4]), backend)
    assert_moved(pool, before, [4, 0], [0, 4])


@both_backends
def test_TRI_05_offsets_beyond_2_to_31_bytes(backend: str) -> None:
    """Slots a GiB apart; only their own few bytes are ever touched."""
    gib = 2**30
    layer = torch.empty(3 * gib + 16, dtype=torch.uint8).as_strided((4, 16), (gib, 1))
    for slot in range(4):
        layer[slot] = slot
    move_kv_cache(Pool([layer]), column([0, 3]), column([3, 1]), backend)
    assert layer[:, 0].tolist() == layer[:, 15].tolist() == [3, 1, 2, 1]


@both_backends
def test_SEQ_08_nothing_to_move_and_nowhere_to_move_it(backend: str) -> None:
    pool = pool_of(4, 3)
    before = copy_of(pool)
    move_kv_cache(pool, column([]), column([]), backend)
    assert_moved(pool, before, [], [])
    move_kv_cache(Pool([]), column([1]), column([2]), backend)
    move_kv_cache(pool_of(4, 0), column([1]), column([2]), backend)


@both_backends
@pytest.mark.parametrize("n", [3, FEW + 1])
def test_padded_moves_to_slot_0_may_repeat(backend: str, n: int) -> None:
    pool = pool_of(n + 1, 4)
    before = copy_of(pool)
    move_kv_cache(pool, column([1, *[0] * (n - 1)]), column([2, *[0] * (n - 1)]), backend)
    assert_moved(pool, before, [1], [2])


COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from refspec.kernels.move_kv_cache import _move_few_kernel
constants = {"UNIT": tl.int64, "ALIGN": 2, "N_UPPER": 16, "COLUMNS": 128}
signature = {"table": "*i64", "dst": "*i64", "src": "*i64", "n": "i32", **dict.fromkeys(constants, "constexpr")}
source = ASTSource(fn=_move_few_kernel, signature=signature, constexprs=constants)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"])
"""


@needs_triton
def test_PAGE_05_compiled_threads_wait_for_each_other_between_reading_and_writing() -> None:
    """The interpreter knows no threads, so no test that runs in it would miss the barrier."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ptx = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True, timeout=300
    ).stdout
    order = re.findall(r"ld\.global\.v2|bar\.sync|st\.global", ptx)
    assert [what for what, _ in groupby(order)] == ["ld.global.v2", "bar.sync", "st.global"]


@needs_interpreter
def test_one_table_for_a_pool_and_another_for_another() -> None:
    pool = pool_of(4, 8, 24)
    table = layer_table(pool)
    assert layer_table(pool).rows is table.rows
    assert table.rows[:, 1:].tolist() == [[4, 4, 0], [12, 12, 4]]  # units of 8 bytes
    assert layer_table(Pool(pool.layers[1:])).rows.tolist() == [[pool.layers[1].data_ptr(), 12, 12, 0]]


def test_layers_are_looked_at_once_and_forgotten_when_one_of_them_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever object bears them. A layer that takes the place of another makes another table."""
    looked_at: list[int] = []
    look = MODULE.check_layers
    monkeypatch.setattr(MODULE, "check_layers", lambda layers: looked_at.append(len(layers)) or look(layers))
    known = len(MODULE._tables)
    pool = pool_of(4, 8, 24)
    for same in (pool, pool, Pool(list(pool.layers))):
        move_kv_cache(same, column([1]), column([2]), backend="torch")
    assert looked_at == [2]
    pool.layers[1] = torch.zeros(5, 24)
    with pytest.raises(ValueError, match=r"pool.layers\[1\] has shape \(5, 24\)"):
        move_kv_cache(pool, column([1]), column([2]), backend="torch")
    del same
    assert len(MODULE._tables) == known


@both_backends
@pytest.mark.parametrize(
    ("dst", "src", "layers", "message"),
    [
        (column([4]), column([0]), [torch.zeros(4, 2)], "dst has entries from 4 to 4, they must be from 0 to 3"),
        (column([0]), column([-1]), [torch.zeros(4, 2)], "src has entries from -1"),
        (column([1, 2, 1]), column([3, 3, 3]), [torch.zeros(4, 2)], r"dst names slots more than once: \[1\]"),
        (column([1]).int(), column([2]), [torch.zeros(4, 2)], "dst is torch.int32"),
        (column([1]), column([2, 3]), [torch.zeros(4, 2)], "src has shape"),
        (torch.arange(4)[::2], column([2, 3]), [torch.zeros(4, 2)], "dst has strides"),
        (column([1]), column([2]), [torch.zeros(4, 2), torch.zeros(5, 2)], r"pool.layers\[1\] has shape \(5, 2\)"),
        (column([1]), column([2]), [torch.zeros(())], r"pool.layers\[0\] has shape \(\)"),
        (column([1]), column([2]), [torch.zeros(2, 4).t()], r"pool.layers\[0\] has strides"),
        (column([1]), column([2]), [torch.zeros(1, 2).expand(4, 2)], r"pool.layers\[0\] has strides"),
        (column([1]), column([2]), [torch.zeros(4, 2, device="meta")], r"pool.layers\[0\] is on meta"),
    ],
    ids=str,
)
def test_bad_arguments_are_named_and_nothing_moves(
    backend: str, dst: Any, src: Any, layers: list[torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        move_kv_cache(Pool(layers), dst, src, backend)
    assert not any(layer.any() for layer in layers if layer.device == CPU)
