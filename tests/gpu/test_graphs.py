"""Decoding by CUDA graphs, against decoding without.

On a CPU the bodies run over the stand-in for graphs, in the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from refspec import Engine, Generation, SamplingParams, SpecConfig
from refspec.engine.compare import first_difference
from refspec.models.scripted import ScriptedModel
from refspec.runtime.graphs import CaptureFailed, CudaGraph, GraphRunner

PROMPTS = ("def fib(n):\n", "class Stack:\n", "import os\n", "for line in open(path):\n", "try:\n", "with open(")
SHAPES = [
    None,
    SpecConfig(topk=1, num_steps=3, num_draft_tokens=4),
    SpecConfig(topk=4, num_steps=3, num_draft_tokens=16),
]


class AsksTheHost:
    """A model object that leaves all to a scripted one."""

    def __init__(self) -> None:
        self.model = ScriptedModel(lambda context: [0.0, 1.0, 0.0], 3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        return self.model(*arguments)


def engine_on(
    device: torch.device, spec: SpecConfig | None, graphs: bool | Sequence[int], **settings: object
) -> Engine:
    return Engine("tiny", spec=spec, device=device, backend="triton", graphs=graphs, **settings)  # type: ignore[arg-type]


def assert_same_but_for_near_ties(
    engine: Engine, prompts: Sequence[list[int]], one: Sequence[Generation], other: Sequence[Generation]
) -> None:
    for prompt_ids, a, b in zip(prompts, one, other, strict=True):
        difference = first_difference(engine, prompt_ids, a.token_ids, b.token_ids)
        assert difference is None or difference.is_rounding, difference


@pytest.mark.parametrize("spec", SHAPES, ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output_is_that_without_graphs(dtype: str, spec: SpecConfig | None, device: torch.device, on_gpu: bool) -> None:
    """Six requests, at most four at a time and of different lengths: all buckets are used, replayed and padded."""
    count, longest = (6, 60) if on_gpu else (1, 3)
    params = [SamplingParams(max_new_tokens=longest - 7 * i, ignore_eos=True) for i in range(count)]
    eager, graphed = (
        engine_on(device, spec, graphs, dtype=dtype, max_running=4) for graphs in (False, (1, 2, 4) if on_gpu else (1,))
    )
    ids = [eager.encode(prompt) for prompt in PROMPTS[:count]]
    without, replayed = eager.generate(ids, params), graphed.generate(ids, params)
    graphed.check()
    assert_same_but_for_near_ties(eager, ids, without, replayed)
    assert graphed.stats.graph_replays["target"] == graphed.stats.target_forwards > 0
    assert not graphed.stats.graph_fallbacks
    assert graphed.stats.launches["tree_attention"] > 0
    if on_gpu:
        runner = graphed.scheduler.worker.target
        assert isinstance(runner, GraphRunner)
        assert all(isinstance(graph, CudaGraph) for graph in runner.graphs.values())


def test_SEQ_10_four_requests_then_one_in_float64(device: torch.device, on_gpu: bool) -> None:
    """Captured for four: when three have ended, the fourth says what it says alone."""
    lens = [4, 4, 4, 40] if on_gpu else [2, 3]
    engine = engine_on(device, SHAPES[2], (4,), dtype="float64")
    ids = [engine.encode(prompt) for prompt in PROMPTS[: len(lens)]]
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lens]
    together = engine.generate(ids, params)
    alone = engine_on(device, SHAPES[2], False, dtype="float64").generate(ids[-1:], params[-1:])
    assert together[-1].token_ids == alone[0].token_ids
    assert together[-1].accept_lens == alone[0].accept_lens


def test_SEQ_12_a_batch_beyond_the_largest_bucket(device: torch.device, on_gpu: bool) -> None:
    count, new = (6, 24) if on_gpu else (2, 2)
    engine = engine_on(device, SHAPES[1], (1,), dtype="float64")
    ids = [engine.encode(prompt) for prompt in PROMPTS[:count]]
    together = engine.generate(ids, SamplingParams(max_new_tokens=new, ignore_eos=True))
    assert engine.stats.graph_fallbacks["target"] > 0
    for prompt_ids, one in zip(ids, together, strict=True):
        (alone,) = engine.generate([prompt_ids], SamplingParams(max_new_tokens=new, ignore_eos=True))
        assert alone.token_ids == one.token_ids


def test_a_long_context_after_a_short_one(device: torch.device, on_gpu: bool) -> None:
    """One graph for both: how long a sequence is, it reads when it runs."""
    engine, eager = (engine_on(device, SHAPES[0], graphs, dtype="float64") for graphs in ((1,), False))
    for length in (3, 400) if on_gpu else (3, 5):
        ids = [[5 + i % 50 for i in range(length)]]
        params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        assert engine.generate(ids, params)[0].token_ids == eager.generate(ids, params)[0].token_ids
    runner = engine.scheduler.worker.target
    assert isinstance(runner, GraphRunner)
    assert len(runner.graphs) == 1


def test_what_cannot_be_captured_is_one_clear_line(device: torch.device, on_gpu: bool) -> None:
    """This one asks the host for every word, and does not say so."""
    if not on_gpu:
        pytest.skip("nothing is captured on a CPU")
    model = AsksTheHost()
    engine = Engine(model, device=device, backend="triton", graphs=True)
    with pytest.raises(CaptureFailed, match="the target forward of a batch of 1 could not be captured as a CUDA graph"):
        engine.generate([[1]], SamplingParams(max_new_tokens=4))
    engine.check()
    assert Engine(model, device=device, backend="triton", graphs=False).generate([[1]])[0].token_ids[0] == 1


def test_a_scripted_model_cannot_be_captured(device: torch.device, on_gpu: bool) -> None:
    if not on_gpu:
        pytest.skip("nothing is captured on a CPU")
    model = ScriptedModel(lambda context: [0.0, 1.0, 0.0], 3)
    for graphs in (True, [1, 4]):
        with pytest.raises(ValueError, match="graphs on a GPU cannot hold a scripted model"):
            Engine(model, device=device, graphs=graphs)
    assert Engine(model, device=device).graphs == ()


def test_graphs_are_on_where_kernels_run_on_a_gpu(device: torch.device, on_gpu: bool) -> None:
    assert bool(Engine("tiny", device=device).graphs) == on_gpu
    if on_gpu:
        with pytest.raises(ValueError, match="graphs on a GPU need the backend triton"):
            Engine("tiny", device=device, backend="torch", graphs=True)
        assert Engine("tiny", device=device, backend="torch").graphs == ()
