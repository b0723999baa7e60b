"""Keys and values go to their slots and come back from there, layer by layer."""

from __future__ import annotations

import pytest
import torch

from refspec.memory.kv_pool import KVLayout, MHATokenToKVPool

LAYOUT = KVLayout(num_layers=2, kv_heads=3, head_dim=4, dtype=torch.float64)


def pool_of(size: int, page_size: int = 1) -> MHATokenToKVPool:
    return MHATokenToKVPool(LAYOUT, size, torch.device("cpu"), page_size)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, LAYOUT.kv_heads, LAYOUT.head_dim, dtype=torch.float64)


@pytest.mark.parametrize("page_size", [1, 4])
def test_MEM_12_buffer_has_a_dummy_page_beside_the_slots(page_size: int) -> None:
    assert pool_of(8, page_size).buffer.shape == (2, 8 + page_size, 2, 3, 4)


def test_MEM_12_padded_rows_write_to_slot_0_only() -> None:
    pool = pool_of(8)
    pool.write(1, torch.tensor([0, 0, 0]), rows(3), rows(3))
    assert not pool.buffer[:, 1:].any()
    assert pool.buffer[1, 0].all()


def test_what_is_written_is_read_back() -> None:
    pool, k, v = pool_of(8), rows(4), rows(4)
    pool.write(1, torch.tensor([7, 2, 8, 5]), k, v)
    keys, values = pool.read(1, torch.tensor([[2, 7], [5, 8]]))
    assert keys.shape == values.shape == (2, 3, 2, 4)
    assert torch.equal(keys.transpose(1, 2), torch.stack([k[[1, 0]], k[[3, 2]]]))
    assert torch.equal(values.transpose(1, 2), torch.stack([v[[1, 0]], v[[3, 2]]]))


def test_writing_touches_no_other_slot_and_no_other_layer() -> None:
    pool = pool_of(8)
    pool.write(0, torch.tensor([3]), rows(1), rows(1))
    touched = pool.buffer.flatten(2).any(-1).nonzero().tolist()
    assert touched == [[0, 3]]


def test_writing_again_replaces() -> None:
    pool, k, v = pool_of(8), rows(1), rows(1)
    pool.write(0, torch.tensor([3]), rows(1), rows(1))
    pool.write(0, torch.tensor([3]), k, v)
    keys, values = pool.read(0, torch.tensor([[3]]))
    assert torch.equal(keys[0, :, 0], k[0])
    assert torch.equal(values[0, :, 0], v[0])


def test_unwritten_slots_are_numbers() -> None:
    """A column that a mask hides still takes part in the product."""
    assert torch.isfinite(pool_of(8).buffer).all()


def test_reading_no_columns() -> None:
    keys, values = pool_of(8).read(0, torch.zeros(2, 0, dtype=torch.int64))
    assert keys.shape == values.shape == (2, 3, 0, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_pool_keeps_the_models_dtype(dtype: torch.dtype) -> None:
    pool = MHATokenToKVPool(KVLayout(1, 1, 2, dtype), 4, torch.device("cpu"))
    assert pool.buffer.dtype == dtype
