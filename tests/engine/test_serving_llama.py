"""Over real attention: cold or cached, whole or in chunks, retracted or not, in pages or not, a request says the same,
and its drafts are worth the same. In float64, where no two logits of these models come near a tie; what lies in the
caches agrees to 1e-9.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from backends import needs_interpreter
from builders import assert_same_output, random_head, random_llama, transparent_pair
from kv_contents import cached, prefilled, worker_of
from pairwise import pairwise
from serving import Visit, serve

from refspec import Engine, Generation, SamplingParams, SpecConfig
from refspec.models.eagle import EagleHead
from refspec.models.llama import LlamaForCausalLM
from refspec.requests.request import Request

CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
TREE = SpecConfig(topk=3, num_steps=3, num_draft_tokens=9, exact_branch_kv=True)
COLUMNS = replace(TREE, exact_branch_kv=False)
MIXES: list[dict[str, Any]] = [
    {"chunk_size": 4},
    {"prefix_cache": True},
    {"page_size": 4},
    {"page_size": 16, "chunk_size": 5, "prefix_cache": True},
    {"page_size": 4, "chunk_size": 1, "prefix_cache": True},
]


def name_of(mix: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in mix.items())


by_mix = pytest.mark.parametrize("mix", MIXES, ids=name_of)


def often_wrong_pair() -> tuple[LlamaForCausalLM, EagleHead]:
    target, head = transparent_pair()
    with torch.no_grad():
        head.fc.weight += 0.3 * torch.randn_like(head.fc.weight)
    return target, head


def unrelated_pair() -> tuple[LlamaForCausalLM, EagleHead]:
    target = random_llama()
    return target, random_head(target)


def visits() -> list[Visit]:
    """Prompts that begin alike, one that is another's beginning, and one of its own; they come one after the other."""
    shared = [0, *(1 + 5 * p % 19 for p in range(17))]
    prompts = [[*shared, 4, 9], shared[:11], [*shared, 4, 8, 2], [0, 7], [*shared, 4, 9]]
    budgets = [17, 20, 9, 14, 17]
    return [
        Visit(prompt, SamplingParams(max_new_tokens=budget), comes=4 * i)
        for i, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
    ]


def assert_caches_as_prefilled(engine: Engine, request: Request) -> None:
    """Of both models, for all that the request has in its caches."""
    worker, text = worker_of(engine), request.all_ids
    expected, hidden = prefilled(worker.target, text[: request.kv_len])
    torch.testing.assert_close(cached(worker.target, engine, request), expected, rtol=1e-9, atol=1e-9)
    expected, _ = prefilled(worker.draft_runner, text[1 : request.kv_len + 1], hidden)
    torch.testing.assert_close(cached(worker.draft_runner, engine, request), expected, rtol=1e-9, atol=1e-9)


PAIRS = {"knows": transparent_pair, "errs": often_wrong_pair, "knows nothing": unrelated_pair}


@functools.cache
def alone_without_pages(pair: str, way: SpecConfig) -> tuple[list[Generation], list[Generation]]:
    """What each visit gives plainly, and speculatively."""
    target, head = PAIRS[pair]()
    plain, speculative = Engine(target), Engine(target, head, way)
    return tuple(  # type: ignore[return-value]
        [engine.generate([visit.prompt], visit.params)[0] for visit in visits()] for engine in (plain, speculative)
    )


ROWS = pairwise({"pair": list(PAIRS), "way": [CHAIN, TREE, COLUMNS], "mix": range(len(MIXES))})


@pytest.mark.parametrize(
    "row",
    ROWS,
    ids=lambda row: " ".join(
        map(str, [row["pair"], row["way"].topk, row["way"].exact_branch_kv, name_of(MIXES[row["mix"]])])
    ),
)
def test_every_way_to_be_served_comes_to_the_same(row: dict[str, Any]) -> None:
    (target, head), spec, mix = PAIRS[row["pair"]](), row["way"], MIXES[row["mix"]]
    spec = replace(spec, page_size=mix.get("page_size", 1))
    engine = Engine(target, head, spec, kv_slots=512, **mix)

    def between(step: int) -> None:
        scheduler = engine.scheduler
        if step % 2 == 0:
            return
        for request in [*scheduler.running.requests, *([scheduler.chunked] if scheduler.chunked else [])]:
            assert_caches_as_prefilled(engine, request)
        due = [request for request in scheduler.running.requests if not request.retractions]
        if due:
            scheduler.retract(due[-1])

    came = visits()
    requests, _ = serve(engine, came, between)
    assert engine.stats.retractions >= len(requests) - 1
    assert (engine.stats.cached_tokens > 0) == mix.get("prefix_cache", False)
    served = [engine.result(request) for request in requests]
    plain, alone = alone_without_pages(row["pair"], row["way"])
    assert_same_output(plain, served)
    assert served == alone


@by_mix
def test_a_head_that_equals_its_target_is_always_right(mix: dict[str, Any]) -> None:
    target, head = transparent_pair()
    engine = Engine(target, head, replace(TREE, page_size=mix.get("page_size", 1)), kv_slots=160, **mix)
    _, watcher = serve(engine, visits())
    assert {len(request.accepted_rows) for request in watcher.requests} == {TREE.num_steps + 1}


@pytest.mark.parametrize("mix", MIXES[-2:], ids=name_of)
@pytest.mark.parametrize("sampler", ["target_only", "rejection", "block"])
def test_a_seed_means_one_output_over_real_attention(sampler: str, mix: dict[str, Any]) -> None:
    target, head = transparent_pair()
    spec = replace(CHAIN, sampler=sampler, page_size=mix["page_size"])
    engine = Engine(target, head, spec, kv_slots=512, **mix)
    came = [replace(visit, params=replace(visit.params, temperature=40.0, seed=i)) for i, visit in enumerate(visits())]

    def between(step: int) -> None:
        due = [request for request in engine.scheduler.running.requests if not request.retractions]
        if step % 2 and due:
            engine.scheduler.retract(due[0])

    requests, _ = serve(engine, came, between)
    assert engine.stats.retractions >= len(requests) - 1
    for visit, request in zip(came, requests, strict=True):
        (alone,) = Engine(target, head, replace(spec, page_size=1)).generate([visit.prompt], visit.params)
        assert engine.result(request) == alone


@needs_interpreter
def test_the_kernels_serve_the_same() -> None:
    """A tiny case in Triton's interpreter: pages, chunks, a cached prefix, a retraction, an abort."""
    target, head = transparent_pair()
    spec = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=2, exact_branch_kv=True)
    results = []
    for backend in ("torch", "triton"):
        engine = Engine(target, head, spec, kv_slots=48, prefix_cache=True, chunk_size=4, backend=backend)
        came = [
            Visit([0, 5, 3, 8, 1, 9], SamplingParams(max_new_tokens=6)),
            Visit([0, 5, 3, 8, 1, 2], SamplingParams(max_new_tokens=5), comes=4),
            Visit([0, 7], SamplingParams(max_new_tokens=9), comes=4, leaves=7),
        ]

        def between(step: int, engine: Engine = engine) -> None:
            if step == 5:
                engine.scheduler.retract(engine.scheduler.running.requests[0])

        requests, _ = serve(engine, came, between)
        assert engine.stats.retractions == 1
        assert engine.stats.cached_tokens > 0
        results.append([(r.output_ids, r.accept_lens, r.finish_reason) for r in requests])
    assert results[0] == results[1]
    assert [reason for _, _, reason in results[0]] == ["length", "length", "abort"]
    plain = Engine(target).generate([visit.prompt for visit in came[:2]], [visit.params for visit in came[:2]])
    assert [output for output, _, _ in results[0][:2]] == [generation.token_ids for generation in plain]
