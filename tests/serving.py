"""An engine driven step by step, as a server drives it: requests come and go at any step, and after each one the
engine checks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from builders import NextLogits, Watcher, assert_all_free, candidates_of, hash_of, naive_stop, tokenizer_of

from refspec import Engine, SamplingParams, SpecConfig
from refspec.requests.request import Request

VOCAB = 19
# Pieces of one letter and of two, so that a stop string may span tokens, and may begin or end inside one.
TOKENIZER = tokenizer_of(b"a b c d e ab ba ac ca bb cc dd de ed ec ce bd aa cab".split())


@dataclass(frozen=True)
class Visit:
    """One request, and when it comes."""

    prompt: list[int]
    params: SamplingParams
    comes: int = 0  # before this step
    leaves: int | None = None  # before this step it is aborted


def serve(
    engine: Engine, visits: Sequence[Visit], between: Callable[[int], None] = lambda step: None
) -> tuple[list[Request], Watcher]:
    """Take steps until all visits are over, with a check after each step, round and abort; then nothing may be held.

    `between` is called before each step, with its number.
    """
    watcher = Watcher(engine)
    requests: dict[int, Request] = {}
    step = 0
    while len(requests) < len(visits) or any(request.finish_reason is None for request in requests.values()):
        for i, visit in enumerate(visits):
            if visit.comes == step:
                requests[i] = engine.add_request(visit.prompt, visit.params)
            if visit.leaves == step:
                engine.abort(requests[i])
                engine.check()
        between(step)
        engine.step(watcher)
        engine.check()
        step += 1
        assert step < 20_000, "no end in sight"
    assert_all_back(engine)
    return [requests[i] for i in range(len(visits))], watcher


def step_until(engine: Engine, done: Callable[[], bool]) -> None:
    """Take steps until something has come about."""
    for _ in range(200):
        if done():
            return
        engine.step()
        engine.check()
    raise AssertionError("it does not come to that")


def assert_all_back(engine: Engine) -> None:
    """Nobody holds a slot or a row but the prefix cache, and that gives all of its slots back when it is asked to."""
    engine.check()
    cache = engine.scheduler.cache
    if cache:
        assert cache.protected_size == 0
        assert engine.allocator.available() + cache.evictable_size == engine.allocator.size
        cache.evict(cache.evictable_size)
    assert_all_free(engine)
    assert engine.scheduler.chunked is None


def foretold(next_logits: NextLogits, visit: Visit) -> tuple[list[int], str]:
    """What plain greedy must say, from the scripted function alone: output ids and finish reason."""
    params, output = visit.params, list[int]()
    while len(output) < params.max_new_tokens:
        logits = next_logits([*visit.prompt, *output])
        output.append(max(range(len(logits)), key=lambda token: (logits[token], -token)))
        if output[-1] in params.stop_token_ids:
            break
    stopped = output[-1] in params.stop_token_ids
    if params.stop:
        kept, _, matched = naive_stop(TOKENIZER.decode, output, params.stop)
        stopped = matched is not None or (stopped and kept == len(output))
        output = output[:kept]
    return output, "stop" if stopped else "length"


def assert_as_foretold(next_logits: NextLogits, visits: Sequence[Visit], requests: Sequence[Request]) -> None:
    """One that was aborted has said the beginning of it."""
    for visit, request in zip(visits, requests, strict=True):
        output, reason = foretold(next_logits, visit)
        if request.finish_reason == "abort" and visit.leaves is not None:
            assert request.output_ids == output[: len(request.output_ids)]
        else:
            assert (request.output_ids, request.finish_reason) == (output, reason)


def slots_for(spec: SpecConfig | None, page_size: int, kv_len: int) -> int:
    """Of a request with kv_len committed tokens, and of one round behind them."""
    return -(-end_of_round(spec, kv_len) // page_size) * page_size


def end_of_round(spec: SpecConfig | None, kv_len: int) -> int:
    """The position behind the last one that a round needs a slot for."""
    if spec is None:
        return kv_len + 1
    if spec.algorithm == "eagle-v2":
        return spec.round_end(kv_len)
    drafted_behind = kv_len + (spec.algorithm == "standalone")  # it reads the bonus first
    return max(spec.draft_end(drafted_behind), spec.tree_end(kv_len))


def slots_alone(spec: SpecConfig | None, page_size: int, visits: Sequence[Visit]) -> int:
    """The smallest pool in which each of the visits gets to its end when it is alone."""
    return max(
        slots_for(spec, page_size, len(visit.prompt) + n)
        for visit in visits
        for n in range(visit.params.max_new_tokens)
    )


def least_retracted_first(request: Request) -> tuple[int, ...]:
    """A retraction policy under which everybody has his turn."""
    return (-request.retractions, -request.arrival)


# --- mixes --------------------------------------------------------------------------------------------------------

# What may stand in a row of a pairwise sample; see `visits_of`, `spec_of` and `settings_of`.
FACTORS: dict[str, list[Any]] = {
    "algorithm": ["eagle", "eagle-v2"],
    "k": [1, 2, 4, 16],
    "S": [1, 2, 4],
    "exact": [False, True],
    "page": [1, 4, 16, 64],
    "chunk": [1, 3, 7, None],
    "cache": [False, True],
    "retraction": ["newest", "largest", "least_output", "everybody"],
    "retracted": ["when slots run out", "anyhow"],
    "pool": ["tight", "roomy"],
    "requests": [3, 7],
    "arrivals": ["together", "apart"],
    "prompts": ["alike", "unlike"],
    "ends": ["budget", "stop", "abort"],
}


def name_of(row: dict[str, Any]) -> str:
    return " ".join(f"{factor}={value}" for factor, value in row.items())


def spec_of(row: dict[str, Any], page: int | None = None, exact: bool | None = None) -> SpecConfig:
    """The row's, but for what is given."""
    pool = candidates_of(row["k"], row["S"])
    nodes = min(max(row["S"] + 1, (pool + row["S"]) // 2), 20)
    return SpecConfig(
        algorithm=row["algorithm"],
        topk=row["k"],
        num_steps=row["S"],
        num_draft_tokens=min(nodes, pool + 1),
        page_size=page or row["page"],
        exact_branch_kv=row["exact"] if exact is None else exact,
    )


def visits_of(row: dict[str, Any]) -> list[Visit]:
    """Prompts that end before, at and behind the end of a page, and outputs of up to 30 tokens.

    Prompts that are alike begin with the same ids, as far as their lengths go.
    """
    page, visits = row["page"], []
    for i in range(row["requests"]):
        length, text = (page + 9, 4, max(1, page - 4))[i % 3], i if row["prompts"] == "unlike" else 0
        prompt = [hash_of([p, text]) % VOCAB for p in range(length)]
        prompt += [hash_of([p, i, 5]) % VOCAB for p in range(1 + hash_of([i, 1]) % 7)]
        params = SamplingParams(max_new_tokens=1 + hash_of([i, 2]) % 24)
        if row["ends"] == "stop":
            stops = [("stop_token_ids", (i % VOCAB,)), ("stop", ("abb",)), ("stop", ("cd", "dde")), ("stop", "ec")]
            params = SamplingParams(max_new_tokens=24, **dict([stops[i % 4]]))  # type: ignore[arg-type]
        comes = 0 if row["arrivals"] == "together" else hash_of([i, 3]) % (2 * row["requests"])
        leaves = comes + hash_of([i, 4]) % 25 if row["ends"] == "abort" and i % 2 else None
        visits.append(Visit(prompt, params, comes, leaves))
    return visits


def settings_of(row: dict[str, Any], spec: SpecConfig | None, visits: Sequence[Visit]) -> dict[str, Any]:
    """Of the engine. A tight pool just holds the first round of the first three, or the last round of the largest."""
    alone = slots_alone(spec, row["page"], visits)
    first_three = sum(slots_for(spec, row["page"], len(visit.prompt)) for visit in visits[:3])
    known = row["retraction"] != "everybody"
    return {
        "kv_slots": max(alone, first_three) if row["pool"] == "tight" else alone * min(len(visits), 6),
        "page_size": row["page"],
        "chunk_size": row["chunk"],
        "prefix_cache": row["cache"],
        "retraction": row["retraction"] if known else "newest",
    }


def retractor(engine: Engine, row: dict[str, Any]) -> Callable[[int], None]:
    """What `serve` does between two steps: where requests are retracted anyhow, every third step takes the slots of one
    that still has two or more of its three lives.
    """

    def between(step: int) -> None:
        scheduler = engine.scheduler
        holders = [*scheduler.running.requests, *([scheduler.chunked] if scheduler.chunked else [])]
        candidates = [request for request in holders if request.retractions < 2]
        if row["retracted"] == "anyhow" and step % 3 == 2 and candidates:
            scheduler.retract(max(candidates, key=least_retracted_first))
            engine.check()

    return between


def prepared(engine: Engine, row: dict[str, Any]) -> Engine:
    """With a tokenizer, so that there are stop strings, and with the row's retraction policy."""
    engine.tokenizer = TOKENIZER
    if row["retraction"] == "everybody":
        engine.scheduler.retraction_policy = least_retracted_first
    return engine
