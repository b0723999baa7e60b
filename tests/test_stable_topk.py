"""The k largest, in one order on every device: by value, then by place."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import assert_rim_untouched

from refspec.kernels import stable_topk
from refspec.kernels.stable_topk import stable_topk_triton
from refspec.oracle.operation import SMALL
from refspec.oracle.operations.stable_topk import OPERATION, edges

SMALLEST = 2.0**-149  # the smallest subnormal of float32


def by_sorting(row: list[float], k: int) -> tuple[list[float], list[int]]:
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    return [row[i] for i in order], order


@both_backends
@pytest.mark.parametrize(
    ("row", "k", "indices"),
    [
        ([0.1, 0.5, 0.4], 2, [1, 2]),
        ([0.5, 0.5, 0.5], 2, [0, 1]),
        ([0.2, 0.5, 0.5, 0.2], 3, [1, 2, 0]),
        ([0.0, 0.0, 0.0], 3, [0, 1, 2]),
        ([0.0, SMALLEST, 0.0, 2 * SMALLEST], 4, [3, 1, 0, 2]),
        ([1.0, 1.0 - 2**-24, 1.0], 3, [0, 2, 1]),
        ([float("inf"), 3e38, float("inf")], 2, [0, 2]),
        ([7.0], 1, [0]),
    ],
)
def test_ties_zeros_and_subnormals(row: list[float], k: int, indices: list[int], backend: str) -> None:
    values, found = stable_topk(torch.tensor([row]), k, backend)
    assert found.tolist() == [indices]
    assert torch.equal(values, torch.tensor([row])[:, indices])


probabilities = st.sampled_from([0.0, SMALLEST, 1e-40, 1e-20, 0.25, 0.5, 1.0]) | st.floats(0, 1, width=32)


@both_backends
@settings(max_examples=50)
@given(rows=st.lists(st.lists(probabilities, min_size=9, max_size=9), min_size=1, max_size=3), k=st.integers(1, 9))
def test_as_by_sorting(backend: str, rows: list[list[float]], k: int) -> None:
    values, indices = stable_topk(torch.tensor(rows), k, backend)
    expected = [by_sorting(row, k) for row in torch.tensor(rows).tolist()]
    assert indices.tolist() == [order for _, order in expected]
    assert values.tolist() == [best for best, _ in expected]


@both_backends
@pytest.mark.parametrize("k", [1, 2, 300])
def test_many_equal_values_keep_their_order(k: int, backend: str) -> None:
    """torch.topk shuffles ties of long rows."""
    _, indices = stable_topk(torch.full((2, 1000), 0.125), k, backend)
    assert indices.tolist() == [list(range(k))] * 2


@both_backends
@pytest.mark.parametrize("k", [1, 2])
def test_shape_and_dtype(k: int, backend: str) -> None:
    values, indices = stable_topk(torch.rand(3, 4, 5), k, backend)
    assert values.shape == indices.shape == (3, 4, k)
    assert (values.dtype, indices.dtype) == (torch.float32, torch.int64)


@both_backends
@pytest.mark.parametrize("k", [1, 2])
def test_no_rows(k: int, backend: str) -> None:
    values, indices = stable_topk(torch.zeros(0, 5), k, backend)
    assert values.shape == indices.shape == (0, k)


@both_backends
@pytest.mark.parametrize("k", [1, 3])
def test_rows_that_do_not_lie_side_by_side(k: int, backend: str) -> None:
    """A transposed view, as slices of larger tensors come."""
    wide = torch.rand(6, 4)
    values, indices = stable_topk(wide.t(), k, backend)
    expected = stable_topk(wide.t().contiguous(), k)
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])


@needs_interpreter
@pytest.mark.parametrize("k", [1, 3, 8, 11, 30])
def test_long_rows_in_tiles(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 and a last one of 6: ties across tiles, and more taken than a tile holds."""
    for size in ("SHORT", "TILE"):
        monkeypatch.setattr(sys.modules["refspec.kernels.stable_topk"], size, 8)
    values = torch.randint(6, (3, 30)) / 8
    found, expected = stable_topk(values, k, "triton"), stable_topk(values, k, "torch")
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@needs_interpreter
@pytest.mark.parametrize("tile", [8, 512])
@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33])
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of `size` entries that rise, so that the last one comes first; in tiles of 8, and at once."""
    for name in ("SHORT", "TILE"):
        monkeypatch.setattr(sys.modules["refspec.kernels.stable_topk"], name, tile)
    for k in {1, min(size, 3), size}:
        values = among_nonsense(torch.arange(3.0 * size).view(3, size))
        with guarded_outputs():
            found, indices = stable_topk_triton(values, k)
        assert indices.tolist() == [list(range(size - 1, size - 1 - k, -1))] * 3
        assert torch.equal(found, values.gather(1, indices))
        assert_rim_untouched(values)


@needs_interpreter
@pytest.mark.parametrize("label", edges())
def test_edges(label: str) -> None:
    outputs, expected = (OPERATION.ours(edges()[label], backend) for backend in ("triton", "torch"))
    for name, x in outputs.items():
        assert torch.equal(x, expected[name]), name


@needs_interpreter
def test_triton_as_torch() -> None:
    rng = random.Random(0)
    for _ in range(15):
        inputs = OPERATION.draw(rng, SMALL)
        outputs, expected = (OPERATION.ours(inputs, backend) for backend in ("triton", "torch"))
        for name, x in outputs.items():
            assert torch.equal(x, expected[name]), name


@both_backends
@pytest.mark.parametrize(
    ("values", "k", "message"),
    [
        (torch.rand(2, 5).double(), 1, r"values is torch\.float64 of shape \(2, 5\)"),
        (torch.tensor(1.0), 1, r"values is torch\.float32 of shape \(\)"),
        (torch.rand(2, 5), 0, r"k is 0"),
        (torch.rand(2, 5), 6, r"k is 6, it must be at least 1 and at most 5"),
        (torch.tensor([[0.5, -0.1]]), 1, r"values has entries that are negative"),
        (torch.tensor([[0.5, -0.0]]), 1, r"values has entries that are negative"),
        (torch.tensor([[0.5, float("nan")]]), 1, r"values has entries .* or NaN"),
    ],
)
def test_arguments_are_checked(values: torch.Tensor, k: int, message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message):
        stable_topk(values, k, backend)
