"""The engine decodes over every kind of pool, and speculation changes nothing but the number of rounds."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from builders import Watcher, assert_same_output, generate_watched
from kv_contents import worker_of
from pairwise import pairwise
from pool_models import KINDS, draft_of, llama, target_of

from refspec import Engine, Generation, SamplingParams, SpecConfig
from refspec.memory.kv_pool import SWAKVPool, SWALayout
from refspec.requests.request import Request
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner
from refspec.trace import Round

SHAPES = {
    "chain": {"topk": 1, "num_steps": 3, "num_draft_tokens": 4},
    "tree": {"topk": 2, "num_steps": 3, "num_draft_tokens": 7, "exact_branch_kv": True},
    "wide": {"topk": 4, "num_steps": 2, "num_draft_tokens": 9},
}
CELLS = [
    *pairwise(
        {
            "kind": KINDS,
            "draft": ["same", "head"],
            "shape": [*SHAPES],
            "page": [1, 4],
            "slots": ["plenty", "scarce"],
            "cache": [False, True],
            "algorithm": ["eagle", "eagle-v2"],
        }
    ),
    *(
        {
            "kind": "dsa",
            "draft": "sharing",
            "shape": shape,
            "page": page,
            "slots": slots,
            "cache": cache,
            "algorithm": v,
        }
        for shape, page, slots, cache, v in (
            ("chain", 4, "plenty", True, "eagle-v2"),
            ("tree", 4, "scarce", False, "eagle"),
            ("tree", 1, "plenty", True, "eagle-v2"),
            ("wide", 1, "scarce", True, "eagle"),
        )
    ),
]
BEGINNING = [3, 1, 4, 1, 5, 9, 2, 6]
PROMPTS = [[*BEGINNING, 5], [*BEGINNING, 3, 5, 8], [7], [*BEGINNING[:6], 0, 0, 1]]
PARAMS = SamplingParams(max_new_tokens=12)


@functools.cache
def plainly(kind: str) -> list[Generation]:
    """What a target says without speculation."""
    return Engine(target_of(kind)).generate(PROMPTS, PARAMS)


def rows_of(runner: ModelRunner, slots: torch.Tensor) -> list[torch.Tensor]:
    """What the pool holds at the slots: keys and values, latents, index keys, positions; layer by layer."""
    return [layer[slots] for layer in runner.pool.layers]


def assert_as_recomputed(engine: Engine, request: Request) -> None:
    """In both pools, the committed tokens' rows are those that one forward over the whole text writes."""
    worker = worker_of(engine)
    slots = engine.table.req_to_token[request.row, : request.kv_len]
    hidden = None
    for runner, ids in ((worker.target, request.all_ids), (worker.draft_runner, request.all_ids[1:])):
        ids = ids[: request.kv_len]
        fresh = ModelRunner(runner.model, len(ids), torch.device("cpu"), Counter())
        order = torch.arange(1, len(ids) + 1)
        text = causal_batch(torch.tensor(ids), order, [len(ids)], order[None], torch.tensor([0]), [0], hidden)
        hidden = fresh.forward(text, "fresh").hidden_states
        torch.testing.assert_close(rows_of(runner, slots), rows_of(fresh, order), rtol=1e-9, atol=1e-9)
        if request.finish_reason is not None:  # the draft does not read the newest tokens of one that has finished
            return


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: " ".join(map(str, cell.values())))
def test_PAGE_07_speculation_on_every_pool_says_what_plain_decoding_says(cell: dict[str, Any]) -> None:
    """Through trees and chains, pages, prefix hits and retractions; and what is committed is as recomputed."""
    spec = SpecConfig(cell["algorithm"], **SHAPES[cell["shape"]], page_size=cell["page"])
    target = target_of(cell["kind"])
    engine = Engine(
        target,
        draft_of(cell["kind"], cell["draft"]),
        spec,
        prefix_cache=cell["cache"],
        kv_slots=64 if cell["slots"] == "scarce" else 512,
    )

    def observer(round_: Round) -> None:
        engine.check()
        if engine.stats.rounds % 4 == 0:
            for request in engine.scheduler.running.requests:
                assert_as_recomputed(engine, request)

    for _ in range(1 + cell["cache"]):
        assert_same_output(plainly(cell["kind"]), engine.generate(PROMPTS, PARAMS, observer))
    assert (engine.stats.retractions > 0) == (cell["slots"] == "scarce")
    assert (engine.stats.cached_tokens > 0) == cell["cache"]
    if cell["draft"] != "head":
        assert engine.stats.accept_length > 1.2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "page"), [("chain", 1), ("tree", 4)])
def test_PAGE_07_drafts_are_what_the_draft_model_says_alone(kind: str, shape: str, page: int) -> None:
    """Output shows no fault of the draft loop, since verification repairs it: so the drafts themselves are compared."""
    spec = SpecConfig(**SHAPES[shape], page_size=page)
    engine = Engine(target_of(kind), draft_of(kind, "same"), spec)
    generations, watcher = generate_watched(engine, PROMPTS, SamplingParams(max_new_tokens=9))
    assert [g.token_ids for g in generations] == [g.token_ids[:9] for g in plainly(kind)]
    texts = [prompt + generation.token_ids for prompt, generation in zip(PROMPTS, generations, strict=True)]
    contexts, children = [], []
    for request in watcher.requests:
        known, pool = texts[request.request][1 : request.seq_len + 1], request.candidates
        paths = {-1: known}
        for i, candidate in enumerate(pool):
            paths[i] = [*paths[candidate.parent], candidate.token]
        for parent in {candidate.parent for candidate in pool}:
            contexts.append(paths[parent])
            children.append([candidate.token for candidate in pool if candidate.parent == parent])
    asked = SamplingParams(max_new_tokens=1, logprobs=spec.topk, ignore_eos=True)
    said = Engine(target_of(kind)).generate(contexts, asked)
    assert len(contexts) > 20
    assert children == [[token for token, _ in generation.top_logprobs[0]] for generation in said]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "page"), [("chain", 4), ("tree", 1), ("wide", 4)])
def test_a_standalone_draft_that_is_its_target_is_always_right(kind: str, shape: str, page: int) -> None:
    """The invariant of draft quality, on every pool and over prefix hits: whole paths are accepted."""
    spec = replace(SpecConfig("standalone", **SHAPES[shape], page_size=page), exact_branch_kv=True)
    model = copy.deepcopy(target_of(kind))
    model.lm_head.weight *= 100  # sure of itself: the likeliest path is in every beam
    engine = Engine(model, model, spec, prefix_cache=True)
    plain = Engine(model).generate(PROMPTS, PARAMS)
    for _ in range(2):
        watcher = Watcher(engine)
        assert_same_output(plain, engine.generate(PROMPTS, PARAMS, watcher))
        assert {len(request.accepted_rows) for request in watcher.requests} == {spec.num_steps + 1}
    assert engine.stats.cached_tokens > 0


def test_PAGE_07_a_pool_that_cannot_be_moved_is_refused_before_any_request() -> None:
    """Of a layer with fewer slots than the others, as somebody's own kind of pool may have."""

    class Short(SWAKVPool):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.layers = [*self.layers, torch.zeros(3, 1)]

    model = llama()
    layout = SimpleNamespace(
        dtype=torch.float64, make_pool=lambda *args: Short(SWALayout((None, None), 2, 6, torch.float64), *args)
    )
    with patch.object(type(model), "kv_layout", layout), pytest.raises(ValueError, match=r"pool.layers\[3\] has shape"):
        Engine(model, draft_of("mha", "same"), SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, page_size=4))


def test_one_sub_pool_is_empty_where_no_layer_slides_or_all_do() -> None:
    sizes = {}
    for kind in ("swa", "swa, none full", "swa, none slides"):
        worker = worker_of(Engine(target_of(kind), draft_of(kind, "head"), SpecConfig()))
        for name, pool in (("target", worker.target.pool), ("draft", worker.draft_runner.pool)):
            assert isinstance(pool, SWAKVPool)
            sizes[kind, name] = len(pool.full.layers), len(pool.sliding.layers)
    assert sizes == {
        ("swa", "target"): (1, 1),
        ("swa, none full", "target"): (0, 2),
        ("swa, none slides", "target"): (2, 0),
        **{(kind, "draft"): (1, 0) for kind in ("swa", "swa, none full", "swa, none slides")},
    }


@pytest.mark.parametrize("kind", ["mla", "dsa", "swa"])
def test_graphs_are_replayed_over_pools_that_are_paged_and_passed_over_elsewhere(kind: str) -> None:
    spec = SpecConfig(**SHAPES["tree"])
    engine = Engine(target_of(kind), draft_of(kind, "same"), spec, graphs=True)
    assert_same_output(plainly(kind), engine.generate(PROMPTS, PARAMS))
    counts = engine.stats.graph_replays, engine.stats.graph_fallbacks
    replayed, passed_over = counts if kind == "mla" else counts[::-1]
    assert set(replayed) == {"target", "draft", "extend"}
    assert not passed_over


def test_a_choice_that_is_shared_is_another_than_one_made_anew() -> None:
    """Else the cells above would prove little about it."""
    drafted = []
    for draft in ("same", "sharing"):
        engine = Engine(target_of("dsa"), draft_of("dsa", draft), SpecConfig(**SHAPES["chain"]))
        requests = generate_watched(engine, PROMPTS, PARAMS)[1].requests
        drafted.append([candidate.token for request in requests for candidate in request.candidates])
    assert drafted[0] != drafted[1]
