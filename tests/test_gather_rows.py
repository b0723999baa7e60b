"""The same rows of buffers of any types and widths, as indexing gives them."""

from __future__ import annotations

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.kernels import gather_rows
from refspec.kernels.gather_rows import gather_rows_triton

BUFFER = st.tuples(
    st.sampled_from([(), (1,), (3,), (2, 5), (0,), (1030,)]),
    st.sampled_from([torch.int32, torch.int64, torch.bool, torch.bfloat16, torch.float64, torch.complex128]),
)


@both_backends
@settings(max_examples=30)
@given(index=st.lists(st.integers(0, 4), max_size=4), buffers=st.lists(BUFFER, min_size=1, max_size=6))
def test_as_indexed(backend: str, index: list[int], buffers: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    tensors = [torch.randint(0, 100, (5, *shape)).to(dtype) for shape, dtype in buffers]
    gathered = gather_rows(torch.tensor(index, dtype=torch.int64), tensors, backend)
    assert len(gathered) == len(tensors)
    for x, got in zip(tensors, gathered, strict=True):
        assert torch.equal(got, x[index])
        assert got.dtype == x.dtype


@pytest.mark.parametrize("width", [1, 5, 1023, 1024, 1025])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(width: int) -> None:
    index, buffers = torch.tensor([2, 0]), [torch.arange(3), torch.rand(3, width), torch.rand(3, 2)]
    with guarded_outputs():
        ours = gather_rows_triton(among_nonsense(index), [among_nonsense(x) for x in buffers])
    for one, x in zip(ours, buffers, strict=True):
        assert torch.equal(one, x[index])


@both_backends
def test_bad_arguments_are_named(backend: str) -> None:
    index, x = torch.tensor([0, 2]), torch.zeros(3, 4)
    gather_rows(index, [x], backend)
    for wrong, message in (
        ((index, []), "buffers is empty"),
        ((index, [x, torch.zeros(2, 4)]), "index has entries from 0 to 2, they must be from 0 to 1"),
        ((index, [x, x.T]), r"buffers\[1\] has strides"),
        ((index, [torch.tensor(1.0)]), r"buffers\[0\] has shape \(\)"),
        ((index.int(), [x]), "index is torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            gather_rows(*wrong, backend)
    with pytest.raises(TypeError, match=r"buffers\[1\] is NoneType"):
        gather_rows(index, [x, None], backend)  # type: ignore[list-item]
