"""Sampled output has the target's law, whatever drafts and however drafts are judged; and a seed means one output.

tests/test_sample_walk.py asks the same of more seeds, and of samplers that are bent on purpose.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from builders import (
    agreeing_now_and_then,
    generate_watched,
    ragged_prompts,
    random_head,
    random_llama,
    random_logits,
    scripted_engine,
    transparent_pair,
)
from markov import BENT, DRAFT, FILTERED, PLAIN_T1, PLAUSIBLE, TARGET, law_of, markov, plausibility, sampled

from refspec import Engine, Generation, SamplingParams, SpecConfig
from refspec.contracts import DraftInput, ForwardMode
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import RunningBatch
from refspec.requests.sampling import BatchSampling

AT_ONCE = 100  # who is admitted is weighed against all who run: few at a time cost least
CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
TREE = SpecConfig(topk=2, num_steps=2, num_draft_tokens=6, exact_branch_kv=True)
NGRAM = SpecConfig(algorithm="ngram", num_draft_tokens=6)
REJECTION, BLOCK = replace(CHAIN, sampler="rejection"), replace(CHAIN, sampler="block")
WAYS: dict[str, SpecConfig | None] = {
    "plain": None,
    "target_only k=1": CHAIN,
    "target_only k=2": TREE,
    "rejection": REJECTION,
    "block": BLOCK,
    "v2": replace(TREE, algorithm="eagle-v2"),
}
EACH_WAY = pytest.mark.parametrize("spec", WAYS.values(), ids=WAYS)
SPECULATIVE = pytest.mark.parametrize("spec", list(WAYS.values())[1:], ids=list(WAYS)[1:])
DRAWN = pytest.mark.parametrize("spec", [REJECTION, BLOCK], ids=["rejection", "block"])


def engine_of(spec: SpecConfig | None, **settings: int) -> Engine:
    target, draft = ScriptedModel(markov(TARGET), 4), ScriptedModel(markov(DRAFT), 4)
    draft = None if spec in (None, NGRAM) else draft
    return Engine(target, draft, spec, max_running=AT_ONCE, kv_slots=20 * AT_ONCE, **settings)


# --- the law ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [PLAIN_T1, FILTERED], ids=["T=1", "T=1.5, top-k, top-p, min-p"])
@pytest.mark.parametrize("spec", [*WAYS.values(), NGRAM], ids=[*WAYS, "ngram"])
def test_output_has_the_law_of_the_target(spec: SpecConfig | None, params: SamplingParams) -> None:
    engine = engine_of(spec)
    assert plausibility(sampled(engine, params), params) > PLAUSIBLE
    if spec:
        assert 1.05 < engine.stats.accept_length < 3  # drafts were accepted, and others were not


def test_the_laws_of_other_params_are_told_apart() -> None:
    """The filters of FILTERED all matter: without one of them the same outputs are implausible."""
    outputs = sampled(engine_of(None), FILTERED)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        without = replace(FILTERED, **{name: getattr(SamplingParams(temperature=1.0), name)})
        if any(law_of(row, without) != law_of(row, FILTERED) for row in TARGET):
            assert plausibility(outputs, without) < BENT


@pytest.mark.parametrize("threshold", ["threshold_single", "threshold_acc"])
def test_thresholds_bend_the_law_and_accept_more(threshold: str) -> None:
    engine = engine_of(replace(TREE, **{threshold: 0.1}))
    outputs = sampled(engine, PLAIN_T1)
    assert plausibility(outputs, PLAIN_T1) < BENT
    assert engine.stats.accept_length > 1.7  # exact: 1.3
    assert not any((3, 0) in itertools.pairwise(text) for text in outputs)  # the only pair of probability 0


@pytest.mark.parametrize("params", [PLAIN_T1, replace(FILTERED, seed=5)], ids=["T=1", "filtered"])
@DRAWN
def test_VER_22_a_draft_that_equals_its_target_is_never_rejected(spec: SpecConfig, params: SamplingParams) -> None:
    """Three requests with different prompts, of which one finishes early, and a fourth that comes in its place."""
    engine = scripted_engine(random_logits(7), 7, spec, max_running=3)
    each = [replace(params, max_new_tokens=n) for n in (41, 6, 60, 25)]
    generations, watcher = generate_watched(engine, ragged_prompts(4, 9, 7), each)
    assert [r.accepted_rows for r in watcher.requests if len(r.accepted_rows) != spec.num_steps + 1] == []
    for generation in generations:
        assert set(generation.accept_lens[:-1]) <= {spec.num_steps + 1}
    greedy = engine.generate(ragged_prompts(4, 9, 7), [replace(p, temperature=0.0) for p in each])
    assert [g.token_ids for g in greedy] != [g.token_ids for g in generations]


@DRAWN
def test_VER_08_the_drafts_are_drawn_from_the_law_that_judges_them(spec: SpecConfig) -> None:
    """Target .5 .5, draft .9 .1: the output has .5 .5, and a draft stands with sum(min(p, q)) = .6."""
    spec = replace(spec, num_steps=1, num_draft_tokens=2)
    target, draft = ScriptedModel(lambda _: [0.0, 0.0], 2), ScriptedModel(lambda _: [math.log(9), 0.0], 2)
    engine = Engine(target, draft, spec, max_running=AT_ONCE, kv_slots=20 * AT_ONCE)
    generations = engine.generate([[0]] * 2000, [replace(PLAIN_T1, seed=seed) for seed in range(2000)])
    for place in range(3):
        assert sum(g.token_ids[place] for g in generations) == pytest.approx(1000, abs=70)
    first_rounds = [g.accept_lens[0] - 1 for g in generations]
    assert sum(first_rounds) == pytest.approx(1200, abs=70)


@SPECULATIVE
def test_VER_14_min_p_holds_at_every_position(spec: SpecConfig) -> None:
    """p = .6 .39 .01 everywhere, min_p .5; the draft says 2, then 0, and so on."""

    def draft(context: list[int]) -> list[float]:
        return [9.0, 0.0, 0.0] if context[-1] == 2 else [0.0, 0.0, 9.0]

    target = ScriptedModel(lambda _: [math.log(p) for p in (0.6, 0.39, 0.01)], 3)
    engine = Engine(target, ScriptedModel(draft, 3), spec, max_running=100, kv_slots=20_000)
    params = SamplingParams(max_new_tokens=16, temperature=1.0)
    for min_p in (0.5, 0.0):
        outputs = engine.generate([[0]] * 100, [replace(params, min_p=min_p, seed=seed) for seed in range(100)])
        shares = Counter(token for g in outputs for token in g.token_ids)
        assert (2 in shares) == (min_p == 0)
        assert shares[0] / 1600 == pytest.approx(0.6 / (0.99 if min_p else 1), abs=0.04)


# --- a seed means one output --------------------------------------------------------------------------------------

VOCAB = 11
MIX = [
    SamplingParams(max_new_tokens=12, temperature=1.0, seed=1),
    SamplingParams(max_new_tokens=5),
    SamplingParams(max_new_tokens=20, temperature=0.7, top_k=5, seed=2),
    SamplingParams(max_new_tokens=9, temperature=1.3, top_p=0.8, seed=2),
    SamplingParams(max_new_tokens=15, temperature=1.0, min_p=0.05, seed=3),
    SamplingParams(max_new_tokens=13),
]
PROMPTS = ragged_prompts(len(MIX), 9, VOCAB)


def mixed_engine(spec: SpecConfig | None, **settings: int) -> Engine:
    target = random_logits(VOCAB)
    draft = agreeing_now_and_then(target, random_logits(VOCAB, salt=5))
    return Engine(ScriptedModel(target, VOCAB), ScriptedModel(draft, VOCAB) if spec else None, spec, **settings)


@EACH_WAY
def test_the_same_seed_alone_and_among_others(spec: SpecConfig | None) -> None:
    engine = mixed_engine(spec)
    together = engine.generate(PROMPTS, MIX)
    assert engine.generate(PROMPTS, MIX) == together  # once more
    assert mixed_engine(spec, max_running=2).generate(PROMPTS, MIX) == together  # others wait, and join later
    assert mixed_engine(spec).generate(PROMPTS[::-1], MIX[::-1]) == together[::-1]  # in other rows
    for prompt, params, generation in zip(PROMPTS, MIX, together, strict=True):
        assert mixed_engine(spec).generate([prompt], [params]) == [generation]


@EACH_WAY
def test_streams_sample_what_generate_does(spec: SpecConfig | None) -> None:
    engine = mixed_engine(spec)
    expected = engine.generate(PROMPTS, MIX)
    streams = [engine.stream(prompt, params) for prompt, params in zip(PROMPTS, MIX, strict=True)]
    outputs: list[list[int]] = [[] for _ in streams]
    for blocks in itertools.zip_longest(*streams):  # in turn
        for output, block in zip(outputs, blocks, strict=True):
            output += block.token_ids if block else []
    assert outputs == [g.token_ids for g in expected]


@DRAWN
def test_the_same_seed_over_real_attention(spec: SpecConfig) -> None:
    target, head = transparent_pair()
    prompts = [[0, 5, 11], [0, 3, 9, 4, 2, 7], [0, 7]]
    params = [SamplingParams(max_new_tokens=20, temperature=40.0, seed=seed) for seed in range(3)]
    together = Engine(target, head, spec).generate(prompts, params)
    assert len({tuple(g.token_ids) for g in together}) == 3
    for prompt, param, generation in zip(prompts, params, together, strict=True):
        assert Engine(target, head, spec).generate([prompt], [param]) == [generation]


@EACH_WAY
def test_the_same_seed_over_a_llama_in_batches_of_any_company(spec: SpecConfig | None) -> None:
    """In float64, where other matrix shapes do not round a law to another float32: alone, in pairs, in other rows."""
    target = random_llama()
    head = random_head(target) if spec else None
    prompts = ragged_prompts(len(MIX), 9, target.config.vocab_size)
    engine = Engine(target, head, spec)
    together = engine.generate(prompts, MIX)
    assert Engine(target, head, spec, max_running=2).generate(prompts, MIX) == together
    for rows in ([5, 0], [4, 3, 2, 1], [2]):
        some = engine.generate([prompts[r] for r in rows], [MIX[r] for r in rows])
        assert some == [together[r] for r in rows]


def test_plain_sampling_over_real_attention_follows_the_coins() -> None:
    """Token by token: the law of a forward over the whole text, and the coin of its place."""
    model = random_llama()
    params = SamplingParams(max_new_tokens=12, temperature=0.9, top_k=9, seed=77)
    (generation,) = Engine(model).generate([[3, 1, 4]], params)
    text = [3, 1, 4]
    sampling = BatchSampling.of([params], [77], torch.device("cpu"))
    for token in generation.token_ids:
        engine = Engine(model)
        engine.generate([text], SamplingParams(max_new_tokens=1))  # its logits are read below, from the same forward
        logits = next_logits(engine, text)
        assert int(sampling.next_tokens(logits, logits.max(-1).indices, torch.tensor([len(text)]))) == token
        text.append(token)


def next_logits(engine: Engine, text: list[int]) -> torch.Tensor:
    from refspec.engine.compare import _next_logits

    return _next_logits(engine, text)[None]


@EACH_WAY
def test_no_coin_is_thrown_twice(spec: SpecConfig | None, monkeypatch: pytest.MonkeyPatch) -> None:
    thrown: Counter[tuple[int, int, int]] = Counter()
    original = BatchSampling.coins

    def coins(self, positions, purpose, columns):  # type: ignore[no-untyped-def]
        keys = zip(self.seeds.tolist(), positions.tolist(), strict=True)
        thrown.update((seed, position, purpose + column) for seed, position in keys for column in columns)
        return original(self, positions, purpose, columns)

    monkeypatch.setattr(BatchSampling, "coins", coins)
    params = [replace(p, temperature=1.0, seed=i) for i, p in enumerate(MIX)]
    mixed_engine(spec).generate(PROMPTS, params)
    assert len(thrown) >= sum(p.max_new_tokens for p in MIX)
    assert set(thrown.values()) == {1}


def test_without_a_seed_the_engine_picks_one_and_says_so() -> None:
    engine = mixed_engine(REJECTION)
    params = SamplingParams(max_new_tokens=30, temperature=1.0)
    once = engine.generate([PROMPTS[0]] * 3, params)
    assert len({g.seed for g in once}) == len({tuple(g.token_ids) for g in once}) == 3
    again = engine.generate([PROMPTS[0]] * 3, [replace(params, seed=g.seed) for g in once])
    assert again == once
    (greedy,) = engine.generate([PROMPTS[0]], SamplingParams(seed=5))
    assert greedy.seed is None


# --- greedy requests ----------------------------------------------------------------------------------------------


def greedy_of(generations: list[Generation]) -> list[list[int]]:
    return [g.token_ids for g, params in zip(generations, MIX, strict=True) if params.temperature == 0]


@pytest.mark.parametrize(
    "spec",
    [*WAYS.values(), replace(TREE, threshold_single=0.0, threshold_acc=0.0)],
    ids=[*WAYS, "thresholds 0"],
)
def test_VER_10_greedy_requests_among_sampled_ones_are_greedy(spec: SpecConfig | None) -> None:
    greedy = mixed_engine(None).generate(PROMPTS, [replace(p, temperature=0.0) for p in MIX])
    mixed, watcher = generate_watched(mixed_engine(spec), PROMPTS, MIX)
    assert greedy_of(mixed) == greedy_of(greedy)
    assert len({(len(r.requests)) for r in watcher.rounds}) > 1 or spec is None  # and batches shrank on the way


@DRAWN
def test_greedy_batches_are_the_same_along_a_drawn_chain(spec: SpecConfig) -> None:
    params = [replace(p, temperature=0.0) for p in MIX]
    drawn, chosen = mixed_engine(spec), mixed_engine(CHAIN)
    assert drawn.generate(PROMPTS, params) == chosen.generate(PROMPTS, params)
    for name in ("verify_tree_greedy", "chain_rejection_sampling", "tree_sampling_target_only"):
        assert drawn.stats.launches[name] == chosen.stats.launches[name]


@pytest.mark.parametrize(
    ("spec", "sampler"),
    [
        (CHAIN, "tree_sampling_target_only"),
        (TREE, "tree_sampling_target_only"),
        (REJECTION, "chain_rejection_sampling"),
        (BLOCK, "chain_rejection_sampling"),
    ],
)
def test_who_decides(spec: SpecConfig, sampler: str) -> None:
    """A single request that samples takes the whole batch to the sampler; without one there is no coin."""
    engine = mixed_engine(spec)
    engine.generate(PROMPTS[:2], [replace(MIX[0], max_new_tokens=5), MIX[5]])
    launches = engine.stats.launches
    assert launches[sampler] >= 1
    assert launches["verify_tree_greedy"] >= 1  # when the sampled one had left
    before = launches[sampler]
    engine.generate(PROMPTS, SamplingParams())
    assert engine.stats.launches[sampler] == before


# --- around it ----------------------------------------------------------------------------------------------------


@SPECULATIVE
def test_the_trace_tells_the_walk(spec: SpecConfig) -> None:
    """On the path, the target's choice is the token that was drawn: a child of that token is where the walk goes."""
    _, watcher = generate_watched(mixed_engine(spec), PROMPTS, [replace(p, temperature=1.0) for p in MIX])
    for tree in watcher.requests:
        tokens = [tree.bonus_token, *(tree.candidates[i].token for i in tree.kept)]
        said = [tree.target_predict[row] for row in tree.accepted_rows]
        assert said[:-1] == [tokens[row] for row in tree.accepted_rows[1:]]
        assert said[: len(tree.committed)] == tree.committed


@SPECULATIVE
def test_SEQ_08_a_rank_without_requests(spec: SpecConfig) -> None:
    """Zero rows through every phase; what it returns can be joined by requests that sample."""
    engine = mixed_engine(spec)
    worker, table = engine.scheduler.worker, engine.table.req_to_token
    idle = worker.forward(RunningBatch.of([], table), ForwardMode.IDLE)
    assert isinstance(idle.draft_input, DraftInput)
    probs = idle.draft_input.draft_probs
    assert (probs is not None) == spec.drafts_are_drawn
    assert probs is None or (probs.shape, probs.dtype) == ((0, VOCAB), torch.float32)
    engine.scheduler.running = idle
    assert engine.generate(PROMPTS, MIX) == mixed_engine(spec).generate(PROMPTS, MIX)


@EACH_WAY
def test_stops_and_budgets_hold_when_sampling(spec: SpecConfig | None) -> None:
    params = [replace(p, temperature=1.0, seed=i, max_new_tokens=40) for i, p in enumerate(MIX)]
    free = mixed_engine(spec).generate(PROMPTS, params)
    stopped, _ = generate_watched(mixed_engine(spec), PROMPTS, [replace(p, stop_token_ids=(4,)) for p in params])
    for whole, cut in zip(free, stopped, strict=True):
        stops = 4 in whole.token_ids
        end = whole.token_ids.index(4) + 1 if stops else 40
        assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:end], "stop" if stops else "length")
        assert 1 + sum(cut.accept_lens) == end
    assert sum(g.finish_reason == "stop" for g in stopped) > len(MIX) // 2
