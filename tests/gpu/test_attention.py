"""tree_attention, compiled, against float64."""

from __future__ import annotations

import pytest
import torch

from refspec import kernels

# Relative to outputs of about 1: a few units in the last place of the type that the weights are rounded to
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_verify_against_float64(dtype: torch.dtype, dim: int, device: torch.device, on_gpu: bool) -> None:
    """Three sequences of different length, with a random tree mask; four heads share a KV head."""
    lens, nodes, kv_heads, heads = ([700, 33, 5000], 16, 2, 8) if on_gpu else ([9, 4, 20], 4, 1, 4)
    slots = sum(lens) + 1
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(lens) * nodes, heads, dim, generator=generator).to(device, dtype)
    cache = torch.randn(slots, 2, kv_heads, dim, generator=generator).to(device, dtype)
    indptr = torch.tensor([0, *lens]).cumsum(0).to(device)
    indices = (torch.randperm(slots - 1, generator=generator) + 1).to(device)
    mask = torch.rand(len(lens), nodes, nodes, generator=generator) < 0.5
    mask |= torch.eye(nodes, dtype=torch.bool)
    mask = mask.flatten().to(device)
    arguments = (indptr, indices, mask, dim**-0.5)
    actual = kernels.tree_attention(q, cache[:, 0], cache[:, 1], *arguments, backend="triton")
    exact = kernels.tree_attention(q.double(), cache[:, 0].double(), cache[:, 1].double(), *arguments, backend="torch")
    assert actual.dtype is dtype
    worst = (actual.double() - exact).abs().max().item()
    assert worst < TOLERANCES[dtype]
