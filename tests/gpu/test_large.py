"""Places beyond 2^31: where 32 bits would wrap on a GPU and write somewhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from refspec import kernels

FAR = 1 << 31  # the first place that an i32 cannot name


def needs_memory(device: torch.device, needed: int) -> None:
    """Skip if the GPU has not so many bytes free."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        if free < needed:
            pytest.skip(f"needs {needed >> 30} GiB of GPU memory, {free >> 30} are free")


@pytest.fixture
def cache(device: torch.device) -> torch.Tensor:
    """bfloat16 (slots, 2, 8, 128), in which the last thousand slots lie beyond 2^31 elements. Zero but for those."""
    needs_memory(device, 3 * FAR)
    cache = torch.zeros(FAR // 2048 + 1000, 2, 8, 128, dtype=torch.bfloat16, device=device)
    cache[-1000:] = torch.randn(1000, 2, 8, 128).to(device, torch.bfloat16)
    return cache


@pytest.mark.parametrize("n", [3, 300])
def test_move_kv_cache(cache: torch.Tensor, device: torch.device, n: int) -> None:
    """From far slots to near ones and back, by both of its ways."""
    last = len(cache) - 1
    near, far = torch.arange(1, n + 1, device=device), last - torch.arange(n, device=device)
    expected = cache[far].clone()
    pool = SimpleNamespace(layers=[cache])
    kernels.move_kv_cache(pool, near, far, backend="triton")
    assert torch.equal(cache[near], expected)
    assert torch.equal(cache[far], expected)
    kernels.move_kv_cache(pool, far, near.flip(0), backend="triton")
    assert torch.equal(cache[far], expected.flip(0))
    assert not cache[n + 1 : n + 1000].any()


def test_tree_attention(cache: torch.Tensor, device: torch.device) -> None:
    """One sequence whose keys lie in far slots; the same ones copied to near slots answer the same."""
    length, nodes = 200, 8
    q = torch.randn(nodes, 32, 128).to(device, torch.bfloat16)
    mask = torch.ones(nodes * nodes, dtype=torch.bool, device=device)
    indptr = torch.tensor([0, length], device=device)
    near = torch.arange(1, length + 1, device=device)
    far = len(cache) - near
    cache[near] = cache[far]
    k_cache, v_cache = cache[:, 0], cache[:, 1]
    answers = [
        kernels.tree_attention(q, k_cache, v_cache, indptr, slots, mask, 128**-0.5, backend="triton")
        for slots in (near, far)
    ]
    assert answers[0].abs().max() > 0
    assert torch.equal(answers[0], answers[1])


def test_full_mask_of_build_tree(device: torch.device, on_gpu: bool) -> None:
    """64 requests of 64 nodes; on a GPU with contexts so long that the last rows lie beyond 2^31."""
    b, n = (64, 64) if on_gpu else (2, 8)
    context = FAR // (b * n) + 1000 if on_gpu else 30
    needs_memory(device, 2 * b * n * context)
    seq_lens = torch.full((b,), context, device=device)
    parents = torch.zeros(b, 0, dtype=torch.int64, device=device)  # one step: every node hangs under the root
    kept = torch.arange(n - 1, device=device).repeat(b, 1)
    arguments = (parents, kept, seq_lens, n - 1, 1, n)
    full = kernels.build_tree(*arguments, mask_mode="full", backend="triton")
    qlen = kernels.build_tree(*arguments, mask_mode="qlen", backend="torch")
    assert full[0].numel() == b * n * (context + n)
    assert full[0].numel() > FAR or not on_gpu
    for r in (0, b - 1):
        rows = full[0].view(b, n, context + n)[r]
        assert rows[:, :context].all()
        assert torch.equal(rows[:, context:], qlen[0].view(b, n, n)[r])
    for ours, reference in zip(full[1:], qlen[1:], strict=True):
        assert torch.equal(ours, reference)
