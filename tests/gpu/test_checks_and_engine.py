"""What is refused before anything is launched; and the engine on compiled kernels."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from refspec import Engine, SamplingParams, SpecConfig, kernels
from refspec.cli.main import app
from refspec.engine.compare import first_difference
from refspec.kernels.checks import check_values

PROMPTS = ("def fib(n):\n", "class Stack:\n", "import os\n", "for line in open(path):\n")


def test_wrong_arguments_are_named_and_nothing_is_launched(device: torch.device, on_gpu: bool) -> None:
    table = torch.zeros(4, 16, dtype=torch.int64, device=device)
    rows = torch.tensor([1, 2], device=device)
    before = kernels.launches.copy()
    with pytest.raises(ValueError, match=r"seq_lens is torch\.int32"):
        kernels.assign_draft_cache_locs(table, rows, rows.int(), 2, 2, backend="triton")
    with pytest.raises(ValueError, match=r"req_to_token has strides"):
        kernels.assign_draft_cache_locs(table.T, rows, rows, 2, 2, backend="triton")
    with pytest.raises(ValueError, match=r"topk is 0"):
        kernels.assign_draft_cache_locs(table, rows, rows, 0, 2, backend="triton")
    if on_gpu:
        with pytest.raises(ValueError, match=r"seq_lens is on cpu"):
            kernels.assign_draft_cache_locs(table, rows, rows.cpu(), 2, 2, backend="triton")
    with check_values(), pytest.raises(ValueError, match=r"req_pool_indices has entries from 1 to 9"):
        kernels.assign_draft_cache_locs(table, torch.tensor([1, 9], device=device), rows, 2, 2, backend="triton")
    assert kernels.launches == before


@pytest.mark.parametrize(("k", "steps", "n"), [(1, 3, 4), (4, 3, 16)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_on_triton_puts_out_what_it_does_on_torch(
    dtype: str, k: int, steps: int, n: int, device: torch.device, on_gpu: bool
) -> None:
    """Token for token, but for near ties, in several requests at once."""
    spec = SpecConfig(topk=k, num_steps=steps, num_draft_tokens=n)
    params = SamplingParams(max_new_tokens=64 if on_gpu else 4, ignore_eos=True)
    engines = [Engine("tiny", spec=spec, device=device, dtype=dtype, backend=name) for name in ("torch", "triton")]
    ids = [engines[0].encode(prompt) for prompt in PROMPTS[: 4 if on_gpu else 1]]
    plain, ours = ([out.token_ids for out in engine.generate(ids, params)] for engine in engines)
    for engine in engines:
        engine.check()
    for prompt_ids, a, b in zip(ids, plain, ours, strict=True):
        difference = first_difference(engines[0], prompt_ids, a, b)
        assert difference is None or difference.is_rounding, difference


def test_bench_kernels(on_gpu: bool) -> None:
    if not on_gpu:
        pytest.skip("only a GPU can be timed")
    result = CliRunner().invoke(app, ["bench", "kernels", "verify_tree_greedy", "--repetitions", "3", "--json"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["copy_bandwidth"] > 1e10
    for timing in report["timings"]:
        assert all(math.isfinite(ratio) and ratio > 0 for ratio in (*timing["torch"], *timing["bound"]))
