"""EAGLE-3 in the engine. The round is EAGLE's; here is what goes from the target to the head, and round the head."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from builders import Watcher, assert_same_output, llama_config, random_eagle3, random_llama
from kv_contents import prefilled, worker_of
from pairwise import pairwise
from torch import Tensor

from refspec import Engine, SamplingParams, SpecConfig
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner

IDS = (0, 2, 3, 5, 6, 8, 11, 12, 17, 22)  # that the head can propose
BEGINNING = [3, 1, 4, 1, 5, 9, 2, 6]
PROMPTS = [[*BEGINNING, 5], [*BEGINNING, 3, 5, 8], [7], [*BEGINNING[:6], 0, 0, 1]]
PARAMS = SamplingParams(max_new_tokens=12)
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"topk": 1, "num_steps": 3, "num_draft_tokens": 4},
    "tree": {"topk": 2, "num_steps": 3, "num_draft_tokens": 7, "exact_branch_kv": True},
}


def head_alone(target: ModelRunner, draft: ModelRunner, text: list[int], path: list[int]) -> Tensor:
    """What the head says behind a text and drafts: the text's rows on the target's features, each draft's on what the
    head gave for the row before it.
    """
    n = len(text) - 1 + len(path)
    runner, slots = ModelRunner(draft.model, n, torch.device("cpu"), Counter()), torch.arange(1, n + 1)

    def rows(ids: list[int], first: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        here = slots[first : first + len(ids)]
        table = slots[None], torch.tensor([0])
        out = runner.forward(causal_batch(torch.tensor(ids), here, [len(ids)], *table, [first], hidden), "alone")
        return out.logits[-1], out.hidden_states[-1:]

    logits, hidden = rows(text[1:], 0, prefilled(target, text[:-1])[1])
    for i, token in enumerate(path):
        logits, hidden = rows([token], len(text) - 1 + i, hidden)
    return logits


@pytest.mark.parametrize(
    "cell",
    pairwise(
        {
            "shape": [*SHAPES],
            "page": [1, 4],
            "slots": ["plenty", "scarce"],
            "cache": [False, True],
            "graphs": [False, True],
            "chunk": [None, 3],
        }
    ),
    ids=lambda cell: " ".join(map(str, cell.values())),
)
def test_drafts_are_what_the_head_says_alone(cell: dict[str, Any]) -> None:
    """Through pages, cached prefixes, chunks and retractions; and the output is plain decoding's."""
    target = random_llama(llama_config(num_hidden_layers=5))
    spec = SpecConfig("eagle3", **SHAPES[cell["shape"]], page_size=cell["page"])
    engine = Engine(
        target,
        random_eagle3(target, IDS),
        spec,
        kv_slots=64 if cell["slots"] == "scarce" else 512,
        prefix_cache=cell["cache"],
        chunk_size=cell["chunk"],
        graphs=cell["graphs"],
    )
    plain = Engine(target).generate(PROMPTS, PARAMS)
    for _ in range(1 + cell["cache"]):
        watcher = Watcher(engine)
        generations = engine.generate(PROMPTS, PARAMS, watcher)
        assert_same_output(plain, generations)
    assert (engine.stats.retractions > 0) == (cell["slots"] == "scarce")
    assert (engine.stats.cached_tokens > 0) == cell["cache"]
    worker = worker_of(engine)
    texts = [prompt + generation.token_ids for prompt, generation in zip(PROMPTS, generations, strict=True)]
    for request in watcher.requests:
        text, pool = texts[request.request][: request.seq_len + 1], request.candidates
        paths: dict[int, list[int]] = {-1: []}
        for i, candidate in enumerate(pool):
            paths[i] = [*paths[candidate.parent], candidate.token]
        for parent in {candidate.parent for candidate in pool}:
            best = head_alone(worker.target, worker.draft_runner, text, paths[parent]).topk(spec.topk).indices
            children = [candidate.token for candidate in pool if candidate.parent == parent]
            assert children == [IDS[i] for i in best.tolist()]
