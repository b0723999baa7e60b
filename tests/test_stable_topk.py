"""The k largest, in one order on every device: by value, then by place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refspec.kernels import stable_topk

SMALLEST = 2.0**-149  # the smallest subnormal of float32


def by_sorting(row: list[float], k: int) -> tuple[list[float], list[int]]:
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    return [row[i] for i in order], order


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
def test_ties_zeros_and_subnormals(row: list[float], k: int, indices: list[int]) -> None:
    values, found = stable_topk(torch.tensor([row]), k)
    assert found.tolist() == [indices]
    assert torch.equal(values, torch.tensor([row])[:, indices])


probabilities = st.sampled_from([0.0, SMALLEST, 1e-40, 1e-20, 0.25, 0.5, 1.0]) | st.floats(0, 1, width=32)


@given(rows=st.lists(st.lists(probabilities, min_size=9, max_size=9), min_size=1, max_size=3), k=st.integers(1, 9))
def test_as_by_sorting(rows: list[list[float]], k: int) -> None:
    values, indices = stable_topk(torch.tensor(rows), k)
    expected = [by_sorting(row, k) for row in torch.tensor(rows).tolist()]
    assert indices.tolist() == [order for _, order in expected]
    assert values.tolist() == [best for best, _ in expected]


@pytest.mark.parametrize("k", [1, 2, 300])
def test_many_equal_values_keep_their_order(k: int) -> None:
    """torch.topk shuffles ties of long rows."""
    _, indices = stable_topk(torch.full((2, 1000), 0.125), k)
    assert indices.tolist() == [list(range(k))] * 2


@pytest.mark.parametrize("k", [1, 2])
def test_shape_and_dtype(k: int) -> None:
    values, indices = stable_topk(torch.rand(3, 4, 5), k)
    assert values.shape == indices.shape == (3, 4, k)
    assert (values.dtype, indices.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("k", [1, 2])
def test_no_rows(k: int) -> None:
    values, indices = stable_topk(torch.zeros(0, 5), k)
    assert values.shape == indices.shape == (0, k)


@pytest.mark.parametrize("k", [1, 3])
def test_rows_that_do_not_lie_side_by_side(k: int) -> None:
    """A transposed view, as slices of larger tensors come."""
    wide = torch.rand(6, 4)
    values, indices = stable_topk(wide.t(), k)
    expected = stable_topk(wide.t().contiguous(), k)
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])
