"""Attention over paged slots, against sums written out in float64; what a row must not see it does not even touch."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refspec.kernels import build_tree, tree_attention

MODULE = importlib.import_module("refspec.kernels.tree_attention")  # the package has the function under this name
# Of outputs that are means of numbers of about 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def pool_of(slots: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Keys and values side by side, as in the KV pool, with large numbers before and behind."""
    return among_nonsense(torch.randn(slots, 2, kv_heads, dim).to(dtype))


def attend(q: Tensor, pool: Tensor, slots: list[list[int]], mask: Tensor, backend: str, scale: float = 0.3) -> Tensor:
    """tree_attention over the slots of each sequence."""
    flat = [slot for sequence in slots for slot in sequence]
    indptr = torch.tensor([0, *map(len, slots)]).cumsum(0)
    indices = among_nonsense(torch.tensor(flat, dtype=torch.int64))
    return tree_attention(q, pool[:, 0], pool[:, 1], indptr, indices, among_nonsense(mask.flatten()), scale, backend)


def written_out(q: Tensor, pool: Tensor, slots: list[list[int]], seen: list[list[list[bool]]], scale: float) -> Tensor:
    """Row by row, head by head, key by key. seen[g][i][c]: does row i of sequence g see key c?"""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // pool.shape[2]
    for g, rows in enumerate(seen):
        for i, sees in enumerate(rows):
            row, visible = g * len(rows) + i, [slot for slot, one in zip(slots[g], sees, strict=True) if one]
            for head in range(q.shape[1]):
                keys, values = pool[visible, :, head // group].double().unbind(1)
                scores = [float(scale * (key * q[row, head].double()).sum()) for key in keys]
                highest = max(scores, default=0.0)
                weights = [math.exp(score - highest) for score in scores]
                for weight, value in zip(weights, values, strict=True):
                    out[row, head] += weight / sum(weights) * value
    return out


def tail_seen(mask: Tensor, lens: list[int]) -> list[list[list[bool]]]:
    """mask (G, N, T): everything before the last T columns is seen."""
    tail = mask.shape[2]
    return [[[True] * (lens[g] - tail) + row for row in rows] for g, rows in enumerate(mask.tolist())]


def random_slots(lens: list[int], pool_size: int) -> list[list[int]]:
    return [list(part) for part in torch.randperm(pool_size)[: sum(lens)].split(lens)]


@both_backends
@settings(max_examples=12)
@given(
    extra=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    nodes=st.integers(1, 5),
    tail=st.integers(0, 20),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    dim=st.sampled_from([1, 6, 16, 80]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
def test_as_written_out(
    backend: str,
    extra: list[int],
    nodes: int,
    tail: int,
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Unequal lengths, any mask over any tail, rows that see nothing, grouped heads, odd dimensions, every type."""
    torch.manual_seed(seed)
    lens = [tail + n for n in extra]
    slots, pool = random_slots(lens, sum(lens) + 2), pool_of(sum(lens) + 2, kv_heads, dim, dtype)
    q = among_nonsense(torch.randn(len(lens) * nodes, kv_heads * group, dim).to(dtype))
    mask = torch.rand(len(lens), nodes, tail) < 0.5
    out = attend(q, pool, slots, mask, backend)
    assert out.dtype == dtype
    expected = written_out(q, pool, slots, tail_seen(mask, lens), 0.3)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@both_backends
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 200, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_head_dims(dim: int, dtype: torch.dtype, backend: str) -> None:
    slots, pool = random_slots([9, 21], 31), pool_of(31, 1, dim, dtype)
    q, mask = torch.randn(6, 2, dim).to(dtype), torch.rand(2, 3, 3) < 0.5
    out = attend(q, pool, slots, mask, backend, dim**-0.5)
    expected = written_out(q, pool, slots, tail_seen(mask, [9, 21]), dim**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33])
@both_backends
def test_TRI_02_sizes_beside_those_of_the_blocks(size: int, backend: str) -> None:
    """As nodes, tail, keys, heads and dimension; what lies around every buffer is neither read nor written."""
    slots, pool = random_slots([size, 2 * size], 3 * size), pool_of(3 * size, 1, size)
    q, mask = among_nonsense(torch.randn(2 * size, 2, size)), torch.rand(2, size, size) < 0.7
    with guarded_outputs():
        out = attend(q, pool, slots, mask, backend)
    expected = written_out(q, pool, slots, tail_seen(mask, [size, 2 * size]), 0.3)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)


@both_backends
def test_long_contexts_are_split_and_put_together(backend: str) -> None:
    """1100 keys beside 3: of the second sequence, and of its row that sees nothing, most parts are empty."""
    assert MODULE._parts(2, 1103 // 2, torch.device("cpu")) > 1
    lens = [1100, 3]
    slots, pool = random_slots(lens, 1103), pool_of(1103, 1, 16)
    mask = torch.tensor([[[1, 0, 1], [1, 1, 1]], [[0, 0, 0], [0, 1, 1]]]).bool()
    q = torch.randn(4, 1, 16)
    with guarded_outputs():
        out = attend(q, pool, slots, mask, backend)
    torch.testing.assert_close(out.double(), written_out(q, pool, slots, tail_seen(mask, lens), 0.3), rtol=0, atol=3e-6)
    assert not out[2].any()


def test_parts_fill_a_gpu_and_no_more() -> None:
    cpu, enough = torch.device("cpu"), 2 * MODULE.PROCESSORS_OF_INTERPRETER
    assert MODULE._parts(1, 10**6, cpu) == enough
    assert MODULE._parts(enough, 10**6, cpu) == 1
    assert MODULE._parts(10 * enough, 10**6, cpu) == 1
    assert MODULE._parts(1, 2 * MODULE.LEAST_KEYS_OF_A_PART, cpu) == 2
    assert MODULE._parts(1, 3, cpu) == 1


@both_backends
def test_room_for_longer_contexts_changes_nothing(backend: str) -> None:
    """As a CUDA graph needs it: a launch planned for 1200 keys, in several parts, serves any lengths up to there."""
    pool, q, mask = pool_of(700, 1, 16), torch.randn(4, 1, 16), torch.rand(2, 2, 2) < 0.7
    assert MODULE._parts(2, 1200, torch.device("cpu")) > 1
    for lens in ([2, 2], [650, 3], [17, 400]):
        slots = random_slots(lens, 700)
        flat = [slot for sequence in slots for slot in sequence]
        indptr, nobodys = torch.tensor([0, *lens]).cumsum(0), [-(10**9)] * (2400 - len(flat))
        out = tree_attention(
            q, pool[:, 0], pool[:, 1], indptr, torch.tensor(flat + nobodys), mask.flatten(), 0.3, backend, max_keys=1200
        )
        expected = written_out(q, pool, slots, tail_seen(mask, lens), 0.3)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)


@needs_interpreter
def test_with_room_the_launches_depend_on_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []

    class Watched:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return self.kernel[grid]

    for name in ("_attend_kernel", "_combine_kernel"):
        monkeypatch.setattr(MODULE, name, Watched(getattr(MODULE, name)))
    pool, q, seen = pool_of(900, 1, 16), torch.randn(1, 1, 16), torch.ones(1).bool()
    for max_keys, different in ((900, 1), (None, 2)):
        launched = []
        for length in (3, 600):
            grids.clear()
            room = 900 if max_keys else length
            indptr, indices = torch.tensor([0, length]), torch.arange(room)
            tree_attention(q, pool[:, 0], pool[:, 1], indptr, indices, seen, 0.3, "triton", max_keys=max_keys)
            launched.append(tuple(grids))
        assert len(set(launched)) == different


@both_backends
@pytest.mark.parametrize("mask_mode", ["full", "qlen"])
def test_masks_as_build_tree_gives_them(mask_mode: str, backend: str) -> None:
    """Two requests, k = 2, S = 2, N = 4: the root, its two children, and a child of the first."""
    parents, kept = torch.tensor([[-1, 0, 1]] * 2), torch.tensor([[0, 1, 2]] * 2)
    seq_lens = torch.tensor([3, 1])
    mask = build_tree(parents, kept, seq_lens, 2, 2, 4, mask_mode, backend="torch")[0]
    tree = [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, True, False, True],
    ]
    slots, pool, q = random_slots([7, 5], 12), pool_of(12, 1, 16), torch.randn(8, 1, 16)
    expected = written_out(q, pool, slots, [[[True] * 3 + row for row in tree], [[True, *row] for row in tree]], 0.3)
    torch.testing.assert_close(attend(q, pool, slots, mask, backend).double(), expected, rtol=0, atol=3e-6)


@both_backends
def test_a_mask_that_fits_both_readings_means_the_same(backend: str) -> None:
    """Two sequences of three keys, two rows each: T = 3 is a column for each key."""
    slots, pool, q = [[0, 1, 2], [3, 4, 5]], pool_of(6, 1, 16), torch.randn(4, 1, 16)
    mask = torch.rand(2, 2, 3) < 0.5
    expected = written_out(q, pool, slots, mask.tolist(), 0.3)
    torch.testing.assert_close(attend(q, pool, slots, mask, backend).double(), expected, rtol=0, atol=3e-6)


@both_backends
def test_branches_of_the_draft_as_rows_of_one_sequence(backend: str) -> None:
    """k branches: as k sequences of one row, each with its own slots, or as k rows that share the prefix."""
    pool, q = pool_of(8, 2, 16), torch.randn(3, 4, 16)
    apart = attend(q, pool, [[0, 1, 5], [0, 1, 6], [0, 1, 7]], torch.ones(3).bool(), backend)
    together = attend(q, pool, [[0, 1, 5, 6, 7]], torch.eye(3).bool(), backend)
    torch.testing.assert_close(apart, together)


@both_backends
def test_SEQ_02_rejected_rows_leave_the_attended_length(backend: str) -> None:
    """Scores 1 and 0, values 1 and 0, then two rejected rows of zeros: 0.7311, not 0.4754 as with phantoms."""
    pool = torch.zeros(4, 2, 1, 1)
    pool[0] = 1
    one = torch.ones(1, 1, 1)
    hidden = torch.tensor([True, True, False, False])
    assert attend(one, pool, [[0, 1, 2, 3]], hidden, backend, 1.0).item() == pytest.approx(0.731058578)
    assert attend(one, pool, [[0, 1]], torch.ones(1).bool(), backend, 1.0).item() == pytest.approx(0.731058578)


@both_backends
def test_VER_24_row_of_a_node_is_the_one_whose_query_is_the_node(backend: str) -> None:
    """Trees of 4 for 2 requests; the query of row r of request b points at the key whose value is 10b + r."""
    pool = torch.zeros(8, 2, 1, 16)
    numbers = torch.tensor([0.0, 1, 2, 3, 10, 11, 12, 13])
    pool[:, 0, 0, :8], pool[:, 1, 0, 0] = torch.eye(8), numbers
    q = torch.zeros(8, 1, 16)
    q[:, 0, :8] = 100 * torch.eye(8)
    out = attend(q, pool, [[3, 1, 0, 2], [4, 6, 7, 5]], torch.ones(32).bool(), backend, 1.0)
    assert out[:, 0, 0].tolist() == pytest.approx(numbers.tolist(), abs=1e-6)


@both_backends
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # numpy, about products that are masked out
@pytest.mark.parametrize("nothing", [math.nan, math.inf])
def test_MEM_14_what_nobody_sees_may_hold_anything(nothing: float, backend: str) -> None:
    """Keys and values that were never written: in slots of nobody, and in columns that no row sees."""
    pool = pool_of(40, 2, 16)
    slots = [list(range(1, 21)), list(range(21, 40))]
    mask = torch.rand(2, 3, 5) < 0.5
    mask[0, :, 2] = mask[1, :, 4] = False
    q = torch.randn(6, 2, 16)
    clean = attend(q, pool, slots, mask, backend)
    pool[[0, slots[0][17], slots[1][18]]] = nothing
    assert torch.equal(attend(q, pool, slots, mask, backend), clean)


@both_backends
def test_NaN_of_a_query_is_not_hushed_up(backend: str) -> None:
    q = torch.randn(2, 1, 16)
    q[1, 0, 3] = math.nan
    out = attend(q, pool_of(3, 1, 16), [[0], [1, 2]], torch.ones(2).bool(), backend)
    assert out.isnan().any(-1).flatten().tolist() == [False, True]


@both_backends
def test_queries_that_lie_apart(backend: str) -> None:
    """As they come out of one product for q, k and v."""
    wide, pool = torch.randn(3, 6, 16), pool_of(9, 2, 16)
    mask = torch.ones(3).bool()
    slots = [[0, 1, 2], [3], [4, 5]]
    out = attend(wide[:, :4], pool, slots, mask, backend)
    assert torch.equal(out, attend(wide[:, :4].contiguous(), pool, slots, mask, backend))
    assert out.is_contiguous()


@both_backends
@pytest.mark.parametrize(("sequences", "nodes"), [(0, 0), (2, 0)])
def test_no_rows(sequences: int, nodes: int, backend: str) -> None:
    out = attend(torch.zeros(0, 2, 16), pool_of(4, 1, 16), [[1]] * sequences, torch.zeros(0).bool(), backend)
    assert out.shape == (0, 2, 16)


@needs_interpreter
def test_TRI_05_slots_beyond_two_to_the_31st_element() -> None:
    """A pool of more than 2^31 elements, of which only the rows that are read have memory of their own."""
    dim, apart = 16, 2**29
    storage = torch.empty(5 * apart + dim, dtype=torch.float16)  # the system gives it pages as they are written
    pool = storage.as_strided((6, 1, dim), (apart, dim, 1))
    pool[[4, 5]] = torch.randn(2, 1, dim).half()
    arguments = (torch.tensor([0, 2]), torch.tensor([4, 5]), torch.ones(1).bool(), 0.3)
    q = torch.randn(1, 1, dim).half()
    near = pool[[4, 5]].contiguous()
    expected = tree_attention(q, near, near, torch.tensor([0, 2]), torch.tensor([0, 1]), *arguments[2:], "triton")
    assert torch.equal(tree_attention(q, pool, pool, *arguments, "triton"), expected)


GOOD = {
    "q": torch.zeros(4, 2, 16),
    "k_cache": torch.zeros(5, 1, 16),
    "v_cache": torch.zeros(5, 1, 16),
    "kv_indptr": torch.tensor([0, 2, 5]),
    "kv_indices": torch.arange(5),
    "tree_mask": torch.ones(8).bool(),
    "scale": 1.0,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(4, 2, 16).int()}, "q is torch.int32"),
        ({"q": torch.zeros(4, 16)}, "q has shape"),
        ({"q": torch.zeros(4, 16, 2).mT}, "q has strides"),
        ({"q": torch.zeros(5, 2, 16)}, "q has 5 rows and kv_indptr 3 entries"),
        ({"q": torch.zeros(4, 3, 16), "k_cache": torch.zeros(5, 2, 16), "v_cache": torch.zeros(5, 2, 16)}, "3 heads"),
        ({"k_cache": torch.zeros(5, 1, 8)}, "k_cache has shape"),
        ({"k_cache": torch.zeros(5, 1, 16).half()}, "k_cache is torch.float16, it must be torch.float32"),
        ({"v_cache": torch.zeros(4, 1, 16)}, "v_cache has shape"),
        ({"v_cache": torch.zeros(5, 1, 32)[..., ::2]}, "v_cache has strides"),
        ({"kv_indptr": torch.zeros(0).long()}, "q has 4 rows and kv_indptr 0 entries"),
        ({"kv_indptr": torch.tensor([0, 2, 4])}, "kv_indptr is"),
        ({"kv_indptr": torch.tensor([1, 2, 5])}, "kv_indptr is"),
        ({"kv_indptr": torch.tensor([0, 6, 5])}, "kv_indptr's differences"),
        ({"kv_indptr": torch.tensor([0, 1, 5])}, "kv_indptr's differences has entries from 1 to 4, .* from 2"),
        ({"kv_indices": torch.tensor([0, 1, 2, 3, 5])}, "kv_indices has entries from 0 to 5"),
        ({"kv_indices": torch.tensor([0, 1, -1, 3, 4])}, "kv_indices has entries from -1"),
        ({"kv_indices": torch.arange(5).int()}, "kv_indices is torch.int32"),
        ({"tree_mask": torch.ones(9).bool()}, "tree_mask has 9 entries"),
        ({"tree_mask": torch.ones(8).byte()}, "tree_mask is torch.uint8"),
        ({"max_keys": -1}, "max_keys is -1"),
        ({"max_keys": 3, "kv_indptr": torch.tensor([0, 2, 6])}, "it must lead from 0 to at most 5"),
        ({"max_keys": 3, "kv_indptr": torch.tensor([0, 2, 3])}, "kv_indptr's differences has entries from 1"),
        ({"max_keys": 3, "tree_mask": torch.ones(10).bool()}, "must have as many for each of the 4 rows$"),
    ],
)
def test_bad_arguments_are_named(changed: dict[str, Tensor], message: str) -> None:
    assert tree_attention(**GOOD).shape == (4, 2, 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        tree_attention(**GOOD | changed)  # type: ignore[arg-type]
