"""Every algorithm on a GPU, against plain decoding; and that a launch of spec v2 waits for nothing.

On a CPU the bodies run in the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from refspec import Engine, SamplingParams, SpecConfig
from refspec.engine.compare import first_difference
from refspec.workers.eagle_v2 import EagleWorkerV2
from refspec.workers.registry import BUILT_IN

PROMPTS = ["def fib(n):\n", "class Stack:\n", "import os\n", "for line in open(path):\n"]


@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_output_is_plain_decodings(algorithm: str, device: torch.device, on_gpu: bool) -> None:
    count, longest = (4, 48) if on_gpu else (1, 3)
    params = SamplingParams(max_new_tokens=longest, ignore_eos=True)
    plain = Engine("tiny", device=device, backend="triton", graphs=False)
    engine = Engine("tiny", spec=BUILT_IN[algorithm].spec(), device=device, backend="triton", graphs=False)
    ids = [plain.encode(prompt) for prompt in PROMPTS[:count]]
    for prompt, expected, found in zip(ids, plain.generate(ids, params), engine.generate(ids, params), strict=True):
        difference = first_difference(plain, prompt, expected.token_ids, found.token_ids)
        assert difference is None or difference.is_rounding, difference
    engine.check()
    assert engine.allocator.available() == engine.allocator.size


@contextmanager
def nothing_waits(on_gpu: bool) -> Iterator[None]:
    """Inside, torch raises where the host would wait for the GPU."""
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("topk", [1, 4])
def test_a_launch_waits_for_nothing(
    topk: int, device: torch.device, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second launch on: the first one makes what is made once, and nothing is in flight before it."""
    steps = 3 if on_gpu else 1
    spec = SpecConfig("eagle-v2", topk=topk, num_steps=steps, num_draft_tokens=steps + 1)
    engine = Engine("tiny", spec=spec, device=device, backend="triton", graphs=False)
    launch, launches = EagleWorkerV2.launch, list[int]()

    def watched(self: EagleWorkerV2, *arguments: Any) -> Any:
        launches.append(len(launches))
        with nothing_waits(on_gpu and len(launches) > 2):
            return launch(self, *arguments)

    monkeypatch.setattr(EagleWorkerV2, "launch", watched)
    engine.generate(PROMPTS[: 3 if on_gpu else 1], SamplingParams(max_new_tokens=40 if on_gpu else 3, ignore_eos=True))
    assert len(launches) > 1
    engine.check()
