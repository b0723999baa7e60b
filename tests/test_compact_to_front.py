"""Accepted rows come to the front of their block, in order; the other rows stay as they were."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.kernels import compact_to_front
from refspec.kernels.compact_to_front import compact_to_front_torch, compact_to_front_triton


def indices(values: list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@both_backends
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    b=st.integers(0, 3),
    n=st.integers(1, 9),
    shape=st.sampled_from([(), (1,), (3,), (2, 5), (0,), (33,)]),
    dtype=st.sampled_from([torch.int32, torch.int64, torch.bool, torch.bfloat16, torch.float64, torch.complex128]),
)
def test_as_moved_row_by_row(
    backend: str, seed: int, b: int, n: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Any rows of a block in any order, up to all of them."""
    rng = random.Random(seed)
    x = torch.randint(0, 100, (b * n, *shape)).to(dtype)
    d = rng.randint(1, n)
    paths = [rng.sample(range(r * n, (r + 1) * n), rng.randint(0, d)) for r in range(b)]
    accept_index = indices([path + [-1] * (d - len(path)) for path in paths]).view(b, d)
    before = x.clone()
    expected = x.clone()
    for r, path in enumerate(paths):
        for place, row in enumerate(path):
            expected[r * n + place] = x[row]
    ours = compact_to_front(x, accept_index, backend)
    assert ours.dtype == dtype
    assert torch.equal(ours, expected)
    assert torch.equal(x, before)


@both_backends
def test_a_path_through_a_tree_and_one_that_stops_at_the_root(backend: str) -> None:
    predict = torch.tensor([70, 0, 71, 0, 0, 72, 80, 0, 0, 0, 0, 0], dtype=torch.int32)
    ours = compact_to_front(predict, indices([[0, 2, 5], [6, -1, -1]]), backend)
    assert ours.tolist() == [70, 71, 72, 0, 0, 72, 80, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33, 1100])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int) -> None:
    """Blocks of `size` numbers, blocks of rows of `size` numbers, `size` blocks of one row."""
    for x, accept_index in [
        (torch.arange(2 * size), indices([[size - 1], [size]])),
        (torch.arange(6 * size).view(6, size), indices([[2, 1, 0], [5, -1, -1]])),
        (torch.arange(size, dtype=torch.int32), torch.arange(size, dtype=torch.int32).unsqueeze(1)),
    ]:
        with guarded_outputs():
            ours = compact_to_front_triton(among_nonsense(x), among_nonsense(accept_index))
        assert torch.equal(ours, compact_to_front_torch(x, accept_index))


@both_backends
@pytest.mark.parametrize("shape", [(0,), (0, 7)])
def test_SEQ_08_no_requests(backend: str, shape: tuple[int, ...]) -> None:
    ours = compact_to_front(torch.zeros(shape), torch.zeros(0, 4, dtype=torch.int32), backend)
    assert (ours.shape, ours.dtype) == (shape, torch.float32)


GOOD: dict[str, Any] = {"x": torch.zeros(8, 2), "accept_index": indices([[0, 2], [4, -1]])}


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": torch.zeros(())}, r"x has shape \(\)"),
        ({"x": torch.zeros(7, 2)}, r"x has 7 rows, accept_index of shape \(2, 2\) asks for 2 blocks"),
        ({"x": torch.zeros(2, 2)}, "x has 2 rows"),
        ({"x": torch.zeros(2, 8).t()}, "x has strides"),
        ({"accept_index": torch.tensor([[0, 2], [4, -1]])}, "accept_index is torch.int64"),
        ({"accept_index": indices([[0, 2]])[0]}, "accept_index has shape"),
        ({"accept_index": indices([[0, 4], [5, -1]])}, "accept_index names rows outside"),
        ({"accept_index": indices([[0, 2], [8, -1]])}, "accept_index names rows outside"),
        ({"accept_index": indices([[0, -2], [4, -1]])}, "accept_index names rows outside"),
        ({"accept_index": indices([[-1, 2], [4, -1]])}, "accept_index has a row behind padding"),
        ({"x": torch.zeros(8, 2, device="meta")}, "accept_index is on cpu"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, wrong: dict[str, Any], message: str) -> None:
    compact_to_front(**GOOD, backend=backend)
    with pytest.raises(ValueError, match=message):
        compact_to_front(**GOOD | wrong, backend=backend)
