"""What a request changes about the target's logits holds at every node of a tree, as if decoded token by token.

The rules are written down here once more, slowly: each token of an output is chosen by the logits after the text before
it, changed by what the output holds so far. The plain engine must say the same, and so must speculation. The drafts
follow the rules, now and then, so that paths of every length are accepted; in some tests they repeat themselves, which
the rules forbid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from builders import (
    agreeing_now_and_then,
    assert_all_free,
    assert_same_output,
    generate_watched,
    random_head,
    random_llama,
    random_logits,
    transparent_pair,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec import Engine, Generation, SamplingParams, SpecConfig
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import Request, RunningBatch

CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
TREE = SpecConfig(topk=4, num_steps=3, num_draft_tokens=16, exact_branch_kv=True)
BUSH = SpecConfig(topk=2, num_steps=2, num_draft_tokens=6, exact_branch_kv=True)
SHAPES = pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["k=1", "k=4"])
WAYS: dict[str, SpecConfig | None] = {
    "plain": None,
    "target_only k=1": CHAIN,
    "target_only k=2": BUSH,
    "rejection": replace(CHAIN, sampler="rejection"),
    "block": replace(CHAIN, sampler="block"),
}
EACH_WAY = pytest.mark.parametrize("spec", WAYS.values(), ids=WAYS)
SPECULATIVE = pytest.mark.parametrize("spec", list(WAYS.values())[1:], ids=list(WAYS)[1:])
VOCAB = 7

NextLogits = Callable[[list[int]], Sequence[float]]


# --- grammars -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Words:
    """A grammar: an automaton with a table. State 0 is the start; a state without a way on is an end."""

    ways: dict[int, dict[int, int]]  # state -> {token: the next state}

    def __post_init__(self) -> None:
        self.matchers: list[WordMatcher] = []

    def matcher(self) -> WordMatcher:
        self.matchers.append(WordMatcher(self.ways))
        return self.matchers[-1]


class WordMatcher:
    """Minds its manners: nothing is asked after the end, and nothing is taken back that was not there."""

    def __init__(self, ways: dict[int, dict[int, int]]) -> None:
        self.ways, self.states, self.tokens = ways, [0], list[int]()

    @property
    def finished(self) -> bool:
        return not self.ways.get(self.states[-1])

    def allow(self, row: torch.Tensor) -> None:
        assert not self.finished, "a mask is asked for after the end"
        assert row.dtype == torch.bool
        assert not row.any()
        row[list(self.ways[self.states[-1]])] = True

    def accept(self, token: int) -> bool:
        assert not self.finished, "a token comes after the end"
        state = self.ways[self.states[-1]].get(token)
        if state is None:
            return False
        self.states.append(state)
        self.tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.tokens)
        del self.states[-count:], self.tokens[-count:]


def spelling(*tokens: int) -> Words:
    """Just this text."""
    return Words({i: {token: i + 1} for i, token in enumerate(tokens)})


# 1 opens, 2 closes, to a depth of 3; 0 and 5 stand in between; it ends where all is closed.
BRACKETS = Words({0: {1: 1}, 1: {1: 2, 2: 9, 0: 1, 5: 1}, 2: {1: 3, 2: 1, 5: 2, 0: 2}, 3: {2: 2, 0: 3}, 9: {}})
# An even number of 3 between any others, without end.
EVEN = Words({0: {0: 0, 1: 0, 2: 0, 3: 1, 4: 0}, 1: {3: 0, 6: 1}})


# --- the rules, slowly --------------------------------------------------------------------------------------------


def by_the_rules(logits: Sequence[float], held: Sequence[int], output: Sequence[int], params: SamplingParams) -> list:
    """logits as params change them. held: the tokens that count for penalties; output: those that the grammar read."""
    changed = []
    for token, logit in enumerate(logits):
        times = held.count(token)
        if times:
            logit -= times * params.frequency_penalty + params.presence_penalty
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        changed.append(logit + params.logit_bias.get(token, 0))
    if params.grammar:
        matcher = WordMatcher(params.grammar.ways)  # type: ignore[attr-defined]
        assert all(map(matcher.accept, output))
        if not matcher.finished:
            allowed = matcher.ways[matcher.states[-1]]
            changed = [logit if token in allowed else -math.inf for token, logit in enumerate(changed)]
    return changed


def greedy_by_the_rules(next_logits: NextLogits, prompt: list[int], params: SamplingParams) -> list[int]:
    output: list[int] = []
    while len(output) < params.max_new_tokens:
        changed = by_the_rules(next_logits([*prompt, *output]), output, output, params)
        output.append(changed.index(max(changed)))
        if params.grammar:
            matcher = WordMatcher(params.grammar.ways)  # type: ignore[attr-defined]
            assert all(map(matcher.accept, output))
            if matcher.finished:
                break
    return output


def around_zero(salt: int = 0) -> NextLogits:
    """Logits of both signs: a repetition penalty treats them differently."""
    logits = random_logits(VOCAB, salt)
    return lambda context: [x - 2 for x in logits(context)]


def drafting_by_the_rules(target: NextLogits, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Any:
    """A draft that knows the target and what each request changes of it. Prompts are told by their first token.

    It is surer of itself than the target, so that its likeliest tokens are never crowded out of a tree.
    """
    of = {prompt[0]: (len(prompt), param) for prompt, param in zip(prompts, params, strict=True)}

    def next_logits(context: list[int]) -> Sequence[float]:
        start, param = of[context[0]]
        output = context[start:]
        logits = target(context)
        try:
            return [max(6 * x, -99.0) for x in by_the_rules(logits, output, output, param)]
        except AssertionError:  # off the grammar, where nobody will ever go
            return logits

    return next_logits


RULES = {
    "frequency": SamplingParams(frequency_penalty=0.8),
    "frequency < 0": SamplingParams(frequency_penalty=-0.7),
    "presence": SamplingParams(presence_penalty=1.5),
    "repetition": SamplingParams(repetition_penalty=1.9),
    "repetition < 1": SamplingParams(repetition_penalty=0.4),
    "bias": SamplingParams(logit_bias={0: 2.0, 3: -100.0, 5: 0.5}),
    "all": SamplingParams(
        frequency_penalty=0.4, presence_penalty=-0.3, repetition_penalty=1.3, logit_bias={1: 1.0, 2: -0.5}
    ),
    "brackets": SamplingParams(grammar=BRACKETS),
    "even": SamplingParams(grammar=EVEN),
    "grammar and penalties": SamplingParams(grammar=EVEN, frequency_penalty=0.8, logit_bias={3: 1.5}),
}
MIX = [
    SamplingParams(),
    *RULES.values(),
    SamplingParams(logprobs=2),
]


def prompts_for(count: int) -> list[list[int]]:
    """Told by their first token where there are not too many, of unequal lengths."""
    return [[i % VOCAB, *((3 * i + j * j) % VOCAB for j in range(i % 4))] for i in range(count)]


# --- penalties and biases -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RULES)
def test_the_plain_engine_follows_the_rules(kind: str) -> None:
    params = replace(RULES[kind], max_new_tokens=30)
    target = around_zero()
    (generation,) = Engine(ScriptedModel(target, VOCAB)).generate([[1, 2]], params)
    assert generation.token_ids == greedy_by_the_rules(target, [1, 2], params)
    assert generation.token_ids != greedy_by_the_rules(target, [1, 2], SamplingParams(max_new_tokens=30))


@pytest.mark.parametrize("kind", RULES)
@SHAPES
def test_VER_15_and_so_does_speculation(spec: SpecConfig, kind: str) -> None:
    params, prompt = replace(RULES[kind], max_new_tokens=40), [1, 2]
    target = around_zero()
    draft = drafting_by_the_rules(target, [prompt], [params])
    engine = Engine(ScriptedModel(target, VOCAB), ScriptedModel(draft, VOCAB), spec)
    (generation,), _ = generate_watched(engine, [prompt], params)
    assert generation.token_ids == greedy_by_the_rules(target, prompt, params)
    # A draft that follows the rules as well is right all along: penalties cost no accept length but through the draft.
    assert set(generation.accept_lens[:-1]) <= {spec.num_steps + 1}


CONSTANT = [3.0, 2.0, 1.5]


@pytest.mark.parametrize("draft", [[9, 0, 0], [0, 9, 0], [0, 0, 9], CONSTANT], ids=str)
@SPECULATIVE
def test_VER_15_constant_logits_and_a_draft_that_repeats_itself(spec: SpecConfig, draft: list[float]) -> None:
    params = SamplingParams(max_new_tokens=5, frequency_penalty=2.0)
    models = ScriptedModel(lambda _: CONSTANT, 3), ScriptedModel(lambda _: draft, 3)
    (plain,) = Engine(models[0]).generate([[0]], params)
    (exact,) = Engine(*models, spec).generate([[0]], params)
    assert exact.token_ids == plain.token_ids == [0, 1, 2, 0, 1]
    (relaxed,) = Engine(*models, replace(spec, exact_penalties=False)).generate([[0]], params)
    assert relaxed.token_ids[:2] == [0, 1]


def relaxed_by_the_rules(next_logits: NextLogits, prompt: list[int], params: SamplingParams, lens: list[int]) -> list:
    """As greedy_by_the_rules, but penalties count what was committed before the block that a token came in."""
    output: list[int] = []
    for length in [1, *lens]:
        before = list(output)
        for _ in range(length):
            changed = by_the_rules(next_logits([*prompt, *output]), before, output, params)
            output.append(changed.index(max(changed)))
    return output


@pytest.mark.parametrize("kind", RULES)
@SHAPES
def test_VER_15_relaxed_penalties_stand_still_within_a_block(spec: SpecConfig, kind: str) -> None:
    params, prompt = replace(RULES[kind], max_new_tokens=36), [1, 2]
    target = around_zero(3)
    draft = agreeing_now_and_then(target, around_zero(4))
    models = ScriptedModel(target, VOCAB), ScriptedModel(draft, VOCAB)
    (relaxed,), _ = generate_watched(Engine(*models, replace(spec, exact_penalties=False)), [prompt], params)
    assert relaxed.token_ids == relaxed_by_the_rules(target, prompt, params, relaxed.accept_lens)
    (exact,) = Engine(*models, spec).generate([prompt], params)
    assert exact.token_ids == greedy_by_the_rules(target, prompt, params)
    counts_matter = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1
    if not counts_matter:
        assert relaxed == exact


def test_VER_15_relaxed_and_exact_are_told_apart() -> None:
    """Otherwise the test above would prove little."""
    target = around_zero(3)
    models = ScriptedModel(target, VOCAB), ScriptedModel(target, VOCAB)
    params = SamplingParams(max_new_tokens=60, frequency_penalty=0.8)
    outputs = [
        Engine(*models, replace(CHAIN, exact_penalties=exact)).generate([[1, 2]], params)[0].token_ids
        for exact in (True, False)
    ]
    assert outputs[0] != outputs[1]


@st.composite
def rules(draw: st.DrawFn) -> SamplingParams:
    tenths = st.integers(-20, 20).map(lambda n: n / 10)
    return SamplingParams(
        max_new_tokens=draw(st.integers(1, 25)),
        frequency_penalty=draw(st.just(0.0) | tenths),
        presence_penalty=draw(st.just(0.0) | tenths),
        repetition_penalty=draw(st.just(1.0) | st.integers(1, 20).map(lambda n: n / 10)),
        logit_bias=draw(st.just({}) | st.dictionaries(st.integers(0, VOCAB - 1), tenths)),
        grammar=draw(st.sampled_from([None, None, BRACKETS, EVEN])),
    )


@st.composite
def trees(draw: st.DrawFn) -> SpecConfig:
    k, steps = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    return SpecConfig(
        topk=k,
        num_steps=steps,
        num_draft_tokens=draw(st.integers(2, min(k + (steps - 1) * k * k, 20) + 1)),
        exact_branch_kv=draw(st.booleans()),
    )


@settings(max_examples=40)
@given(
    params=st.lists(rules(), min_size=1, max_size=VOCAB),
    spec=trees(),
    salt=st.integers(0, 99),
    max_running=st.sampled_from([2, 32]),
)
def test_any_rules_in_any_batch(params: list[SamplingParams], spec: SpecConfig, salt: int, max_running: int) -> None:
    """Requests join and leave; what each says depends on itself alone."""
    target, prompts = around_zero(salt), prompts_for(len(params))
    draft = agreeing_now_and_then(drafting_by_the_rules(target, prompts, params), around_zero(salt + 1))
    expected = [greedy_by_the_rules(target, prompt, param) for prompt, param in zip(prompts, params, strict=True)]
    model = ScriptedModel(target, VOCAB)
    plain = Engine(model, max_running=max_running).generate(prompts, params)
    speculative, _ = generate_watched(
        Engine(model, ScriptedModel(draft, VOCAB), spec, max_running=max_running), prompts, params
    )
    assert [g.token_ids for g in plain] == expected
    assert_same_output(plain, speculative)


@SHAPES
def test_paths_of_every_length_are_accepted_under_rules(spec: SpecConfig) -> None:
    """As in test_output_invariant: without it the test above would prove little."""
    params = [replace(p, max_new_tokens=60) for p in list(RULES.values())[:7]]
    target, prompts = around_zero(), prompts_for(len(params))
    draft = agreeing_now_and_then(drafting_by_the_rules(target, prompts, params), around_zero(9))
    engine = Engine(ScriptedModel(target, VOCAB), ScriptedModel(draft, VOCAB), spec)
    _, watcher = generate_watched(engine, prompts, params)
    assert {len(request.accepted_rows) for request in watcher.requests} == {1, 2, 3, 4}


@EACH_WAY
def test_a_neighbours_rules_change_nothing(spec: SpecConfig | None) -> None:
    """With temperature, too: the same tokens by the same coins, and the same log-probabilities to the bit."""
    target = around_zero()
    models = ScriptedModel(target, VOCAB), ScriptedModel(around_zero(1), VOCAB) if spec else None
    params = [
        replace(p, max_new_tokens=6 + i, temperature=(0.0, 0.8)[i % 3 > 0], seed=i, logprobs=p.logprobs or 0)
        for i, p in enumerate(MIX)
    ]
    prompts = prompts_for(len(MIX))
    together = Engine(*models, spec).generate(prompts, params)
    for prompt, param, generation in zip(prompts, params, together, strict=True):
        assert Engine(*models, spec).generate([prompt], param) == [generation]
    assert Engine(*models, spec, max_running=3).generate(prompts, params) == together


@pytest.mark.parametrize(("page_size", "temperature"), [(1, 0.8), (4, 0.0)])
@EACH_WAY
def test_rules_outlive_retraction_chunks_and_shared_prefixes(
    spec: SpecConfig | None, page_size: int, temperature: float
) -> None:
    """A request that is read again goes on with its counts, its place in the grammar and its log-probabilities."""
    target = around_zero()
    draft = agreeing_now_and_then(target, around_zero(5))
    models = ScriptedModel(target, VOCAB), ScriptedModel(draft, VOCAB) if spec else None
    params = [
        replace(p, max_new_tokens=15 + i, temperature=temperature, seed=i, logprobs=i % 3) for i, p in enumerate(MIX)
    ]
    prompts = [[6, 5, 4, 3, 2, 1, *prompt] for prompt in prompts_for(len(MIX))]
    roomy = Engine(*models, spec).generate(prompts, params)
    paged = replace(spec, page_size=page_size) if spec else None
    engine = Engine(
        *models, paged, kv_slots=80, page_size=page_size, chunk_size=3, prefix_cache=True, retraction="largest"
    )
    tight = engine.generate(prompts, params)
    assert engine.stats.retractions > 0
    assert [replace(g, accept_lens=[]) for g in tight] == [replace(g, accept_lens=[]) for g in roomy]
    assert_logprobs(target, prompts, params, tight)
    if temperature == 0:
        expected = [greedy_by_the_rules(target, prompt, param) for prompt, param in zip(prompts, params, strict=True)]
        assert [g.token_ids for g in tight] == expected


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["k=1", "k=4"])
def test_rules_over_real_attention(spec: SpecConfig) -> None:
    target, head = transparent_pair()
    params = [
        SamplingParams(max_new_tokens=25, frequency_penalty=2.0),
        SamplingParams(max_new_tokens=25),
        SamplingParams(max_new_tokens=25, repetition_penalty=2.0, logit_bias={4: 100.0}),
        SamplingParams(max_new_tokens=25, grammar=BRACKETS, presence_penalty=1.0),
    ]
    prompts = [[0, 5, 11], [0, 3, 9, 4, 2, 7], [0, 7], [0, 2, 2]]
    plain = Engine(target).generate(prompts, params)
    speculative, watcher = generate_watched(Engine(target, head, spec), prompts, params)
    assert_same_output(plain, speculative)
    assert max(len(request.accepted_rows) for request in watcher.requests) > 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_numbers_are_widened_before_the_rules(dtype: torch.dtype) -> None:
    """Taken off in bfloat16, a penalty of 0.001 would vanish, and a tie remain."""
    target = random_llama(dtype=dtype)
    params = SamplingParams(max_new_tokens=20, frequency_penalty=0.001, logit_bias={3: 0.001})
    engine = Engine(target, random_head(target), CHAIN)
    engine.generate([[1, 2, 3]], params)
    batch = RunningBatch.of([Request(0, [1], params, frozenset(), 99, output_ids=[2])], torch.zeros(2, 9).long())
    logits = torch.full((1, 5), 10.0, dtype=dtype)
    assert batch.ruled(logits).argmax().item() == 3
    assert batch.ruled(logits).argmin().item() == 2


def test_nobody_pays_for_rules_that_nobody_has() -> None:
    requests = [Request(r, [1], SamplingParams(temperature=r), frozenset(), 99) for r in range(3)]
    batch = RunningBatch.of(requests, torch.zeros(9, 9).long())
    logits = torch.randn(3, 5)
    assert batch.rules is None
    assert batch.ruled(logits) is logits


def test_what_was_counted_once_is_not_counted_again() -> None:
    """In another batch, or after a pause, a request's counts go on from where they were."""
    params = SamplingParams(frequency_penalty=1.0)
    request = Request(0, [4, 4], params, frozenset(), 99, output_ids=[1, 1, 3])
    table, logits = torch.zeros(9, 9).long(), torch.zeros(1, 5)
    assert RunningBatch.of([request], table).ruled(logits).tolist() == [[0, -2, 0, -1, 0]]
    assert request.counted_tokens == 3
    request.output_ids[:3] = [0, 0, 0]  # no one looks at them any more
    request.output_ids += [3, 4]
    other = Request(1, [1], params, frozenset(), 99, output_ids=[2])
    plain = Request(2, [1], SamplingParams(), frozenset(), 99, output_ids=[2])
    joined = RunningBatch.of([plain, other, request], table)
    assert joined.ruled(logits.repeat(3, 1)).tolist() == [[0] * 5, [0, 0, -1, 0, 0], [0, -2, 0, -2, -1]]
    assert logits.tolist() == [[0.0] * 5]


# --- sampled ------------------------------------------------------------------------------------------------------

SEEDS, AT_ONCE = 600, 60
PLAUSIBLE, BENT = 1e-5, 1e-9  # as in test_sampled_output.py, and as there, seeds were not chosen
# Markov chains over four tokens: what the target, and the draft, say after each of them.
TARGET = [[0.40, 0.30, 0.20, 0.10], [0.05, 0.15, 0.20, 0.60], [0.35, 0.15, 0.45, 0.05], [0.0, 0.7, 0.2, 0.1]]
DRAFT = [[0.10, 0.60, 0.20, 0.10], [0.30, 0.20, 0.20, 0.30], [0.50, 0.05, 0.15, 0.30], [0.3, 0.4, 0.1, 0.2]]
ROOT = 2
BRIEF = Words({0: {0: 1, 2: 1, 3: 2}, 1: {1: 1, 3: 2, 2: 0}, 2: {1: 0, 2: 1, 0: 2}})
SAMPLED_RULES = {
    "penalties": SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.4),
    "bias": SamplingParams(logit_bias={0: -1.0, 3: 1.0}),
    "grammar": SamplingParams(grammar=BRIEF),
    "all": SamplingParams(grammar=BRIEF, frequency_penalty=-0.7, logit_bias={1: 0.5}, top_k=3),
}


def logs(row: Sequence[float]) -> list[float]:
    return [math.log(p) if p else -math.inf for p in row]


def sampled(spec: SpecConfig | None, params: SamplingParams) -> list[tuple[int, ...]]:
    target, draft = (ScriptedModel(lambda c, law=law: logs(law[c[-1]]), 4) for law in (TARGET, DRAFT))
    engine = Engine(target, draft if spec else None, spec, max_running=AT_ONCE, kv_slots=20 * AT_ONCE)
    outputs = []
    for first in range(0, SEEDS, AT_ONCE):
        seeds = range(first, first + AT_ONCE)
        generations = engine.generate([[0, ROOT]] * AT_ONCE, [replace(params, seed=seed) for seed in seeds])
        outputs += [tuple(g.token_ids) for g in generations]
    assert_all_free(engine)
    return outputs


def law_by_the_rules(text: Sequence[int], params: SamplingParams) -> float:
    """How probable three tokens are after ROOT."""
    probability, output = 1.0, list[int]()
    for token in text:
        row = TARGET[output[-1] if output else ROOT]
        changed = by_the_rules(logs(row), output, output, params)
        ranked = sorted(range(4), key=lambda t: -changed[t])[: params.top_k or None]
        if changed[token] == -math.inf or token not in ranked:
            return 0.0
        probability *= math.exp(changed[token]) / sum(math.exp(changed[t]) for t in ranked)
        output.append(token)
    return probability


def plausibility(outputs: Sequence[tuple[int, ...]], params: SamplingParams) -> float:
    cells = {text: law_by_the_rules(text, params) for text in itertools.product(range(4), repeat=3)}
    if any(cells[text] == 0 for text in outputs):
        return 0.0
    rare = {text for text, p in cells.items() if p * len(outputs) < 5}
    groups = [{text} for text in cells if text not in rare]
    if sum(cells[text] for text in rare) * len(outputs) > 3:
        groups.append(rare)
    expected = [sum(cells[text] for text in group) * len(outputs) for group in groups]
    found = [sum(text in group for text in outputs) for group in groups]
    chi_square = sum((x - e) ** 2 / e for x, e in zip(found, expected, strict=True))
    return float(torch.special.gammaincc(torch.tensor((len(groups) - 1) / 2), torch.tensor(chi_square / 2)))


@pytest.mark.parametrize("kind", SAMPLED_RULES)
@EACH_WAY
def test_sampled_output_has_the_law_that_the_rules_leave(spec: SpecConfig | None, kind: str) -> None:
    params = replace(SAMPLED_RULES[kind], temperature=1.0, max_new_tokens=3)
    outputs = sampled(spec, params)
    assert plausibility(outputs, params) > PLAUSIBLE
    for other, without in SAMPLED_RULES.items():
        if other != kind:
            assert plausibility(outputs, without) < BENT


def test_relaxed_penalties_bend_the_law() -> None:
    """So the test above would see it if exact ones were not."""
    params = replace(SAMPLED_RULES["penalties"], temperature=1.0, max_new_tokens=3)
    assert plausibility(sampled(replace(CHAIN, exact_penalties=False), params), params) < BENT


# --- grammars -----------------------------------------------------------------------------------------------------

A, B, C = 0, 1, 2


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("text", [[A], [A, B], [A, B, A], [A, B, B, A, A], [B, B, B, B, B, B]], ids=str)
def test_VER_19_a_grammar_that_ends_inside_the_block(text: list[int], k: int, steps: int) -> None:
    """The draft writes on behind the end; WordMatcher complains if it is asked there."""
    spec = SpecConfig(topk=k, num_steps=steps, num_draft_tokens=2 if k == steps == 1 else k + steps)
    grammar = spelling(*text)
    written = [C, *text, C, C, C, C]  # the prompt is one C
    draft = ScriptedModel(lambda c: [float(3 * (t == written[min(len(c), 8)])) for t in range(3)], 3)
    target = ScriptedModel(lambda _: [0.0, 0.0, 5.0], 3)
    for engine in (Engine(target), Engine(target, draft, spec)):
        (generation,) = engine.generate([[C]], SamplingParams(grammar=grammar, logprobs=0))
        assert generation.token_ids == text
        assert (generation.finish_reason, generation.matched_stop) == ("stop", None)
        assert len(generation.logprobs or []) == len(text)
        assert sum(generation.accept_lens) + 1 == len(text)
        assert_all_free(engine)
        assert grammar.matchers[-1].tokens == text  # where the output stands, and not a token further
        assert grammar.matchers[-1].finished
    assert generation.accept_lens[:1] in ([], [min(steps + 1, len(text) - 1)])  # the draft was right, and was believed


def test_VER_19_the_end_among_requests_that_go_on() -> None:
    params = [
        SamplingParams(max_new_tokens=20, grammar=spelling(A, B)),
        SamplingParams(max_new_tokens=20),
        SamplingParams(max_new_tokens=20, grammar=spelling(*[B, A] * 8)),
        SamplingParams(max_new_tokens=3, grammar=EVEN),
    ]
    prompts, target = prompts_for(4), around_zero()
    draft = drafting_by_the_rules(target, prompts, params)
    engine = Engine(ScriptedModel(target, VOCAB), ScriptedModel(draft, VOCAB), TREE)
    generations, _ = generate_watched(engine, prompts, params)
    assert [g.token_ids for g in generations] == [
        greedy_by_the_rules(target, prompt, param) for prompt, param in zip(prompts, params, strict=True)
    ]
    assert [g.finish_reason for g in generations] == ["stop", "length", "stop", "length"]


def test_a_stop_before_the_end_wins_and_the_end_over_the_budget() -> None:
    model = ScriptedModel(lambda _: [0.0, 0.0, 5.0], 3, eos_token_ids=[B])
    for engine in (Engine(model), Engine(model, model, CHAIN)):
        for text, ignore_eos, reason, matched, kept in (
            ([A, B, A], False, "stop", B, [A, B]),
            ([A, B, A], True, "stop", None, [A, B, A]),
            ([A, A, B], False, "stop", B, [A, A, B]),
            ([A, A, A, A], False, "length", None, [A, A, A]),
        ):
            params = SamplingParams(max_new_tokens=3, grammar=spelling(*text), ignore_eos=ignore_eos)
            (generation,) = engine.generate([[C]], params)
            assert generation.token_ids == kept
            assert (generation.finish_reason, generation.matched_stop) == (reason, matched)


def test_streams_follow_a_grammar_each() -> None:
    """Two streams share one grammar, taking turns: each has its own state in it."""
    target = around_zero()
    engine = Engine(ScriptedModel(target, VOCAB), ScriptedModel(target, VOCAB), TREE)
    params = SamplingParams(max_new_tokens=30, grammar=BRACKETS)
    blocks = list(zip(engine.stream([1], params), engine.stream([4, 2], params), strict=False))
    for place, prompt in enumerate(([1], [4, 2])):
        output = [token for pair in blocks for token in pair[place].token_ids]
        assert output == greedy_by_the_rules(target, prompt, params)[: len(output)]


@pytest.mark.parametrize("spec", [CHAIN, BUSH], ids=["k=1", "k=2"])
def test_a_grammar_without_a_way_on_says_so(spec: SpecConfig) -> None:
    """State 2 is no end, and allows nothing."""

    class Stuck(WordMatcher):
        @property
        def finished(self) -> bool:
            return False

        def allow(self, row: torch.Tensor) -> None:
            row[list(self.ways.get(self.states[-1], {}))] = True

        def accept(self, token: int) -> bool:
            return self.states[-1] in self.ways and super().accept(token)

    class StuckGrammar(Words):
        def matcher(self) -> WordMatcher:
            return Stuck(self.ways)

    model = ScriptedModel(lambda _: [2.0, 1.0, 0.0], 3)
    for engine in (Engine(model), Engine(model, model, spec)):
        stuck = SamplingParams(grammar=StuckGrammar({0: {A: 1}, 1: {B: 2}}), logprobs=0)
        ended, other = engine.generate([[C], [C]], [stuck, SamplingParams(max_new_tokens=5)])
        assert (ended.token_ids, ended.finish_reason, len(ended.logprobs or ())) == ([A, B], "dead_end", 2)
        assert 1 + sum(ended.accept_lens) == 2
        assert (other.token_ids, other.finish_reason) == ([A] * 5, "length")  # the neighbour goes on
        assert_all_free(engine)
        *_, last = engine.stream([C], stuck)
        assert last.finish_reason == "dead_end"
        assert engine.generate([[C]], SamplingParams(max_new_tokens=2))[0].token_ids == [A, A]


@pytest.mark.parametrize("spec", [None, CHAIN, BUSH], ids=["plain", "k=1", "k=2"])
def test_where_the_model_cannot_say_what_the_grammar_allows(spec: SpecConfig | None) -> None:
    """After a 1 comes a 2, which the model cannot say. On the way that is taken it is a dead end, on others nothing."""
    grammar = Words({0: {0: 1, 1: 2}, 1: {0: 1, 1: 2}, 2: {2: 0}})
    draft = ScriptedModel(lambda _: [0.0, 3.0, 2.0], 3) if spec else None
    params = SamplingParams(max_new_tokens=6, grammar=grammar)
    says_0, says_1 = (ScriptedModel(lambda _, p=p: [p, 1 - p, -math.inf], 3) for p in (1.0, 0.0))
    assert Engine(says_0, draft, spec).generate([[0]], params)[0].token_ids == [0] * 6
    (stuck,) = Engine(says_1, draft, spec).generate([[0]], params)
    assert (stuck.token_ids, stuck.finish_reason) == ([1], "dead_end")


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        (SamplingParams(logit_bias={3: 1.0}), "logit_bias of prompt 0 names id 3, but the vocabulary is ids 0 to 2"),
        (SamplingParams(logprobs=4), "logprobs is 4 for prompt 0, but the vocabulary has only 3 ids"),
        (SamplingParams(grammar=Words({})), "the grammar of prompt 0 allows no output"),
    ],
    ids=str,
)
def test_rules_that_cannot_be_followed_are_refused_before_anything_runs(params: SamplingParams, complaint: str) -> None:
    engine = Engine(ScriptedModel(lambda _: CONSTANT, 3))
    with pytest.raises(ValueError, match=complaint) as refusal:
        engine.generate([[0]], params)
    assert "\n" not in str(refusal.value)
    assert engine.stats.prefill_target_forwards == 0
    assert_all_free(engine)


# --- log-probabilities --------------------------------------------------------------------------------------------


@EACH_WAY
def test_VER_17_every_token_has_its_log_probability(spec: SpecConfig | None) -> None:
    target = ScriptedModel(lambda _: [0.0, math.log(2), math.log(4)], 3)
    draft = ScriptedModel(lambda c: [0.0, 1.0, 2.0] if len(c) % 3 else [3.0, 0.0, 0.0], 3)
    engine = Engine(target, draft if spec else None, spec)
    (generation,) = engine.generate([[0]], SamplingParams(max_new_tokens=5, logprobs=2))
    assert generation.token_ids == [2] * 5
    assert generation.logprobs == pytest.approx([math.log(4 / 7)] * 5)
    assert generation.top_logprobs is not None
    for likeliest in generation.top_logprobs:
        assert [token for token, _ in likeliest] == [2, 1]
        assert [value for _, value in likeliest] == pytest.approx([math.log(4 / 7), math.log(2 / 7)])
    (without,) = engine.generate([[0]], SamplingParams(max_new_tokens=5))
    assert (without.logprobs, without.top_logprobs) == (None, None)


def expected_logprobs(target: NextLogits, prompt: list[int], output: list[int]) -> list[list[float]]:
    return [
        torch.log_softmax(torch.tensor(target([*prompt, *output[:i]]), dtype=torch.float64), 0).tolist()
        for i in range(len(output))
    ]


def assert_logprobs(target: NextLogits, prompts: Any, params: Any, generations: Sequence[Generation]) -> None:
    """Of every token, by the text before it; nothing for those who do not ask."""
    for prompt, param, generation in zip(prompts, params, generations, strict=True):
        if param.logprobs is None:
            assert generation.logprobs is generation.top_logprobs is None
            continue
        rows = expected_logprobs(target, prompt, generation.token_ids)
        assert generation.logprobs == pytest.approx([r[t] for r, t in zip(rows, generation.token_ids, strict=True)])
        ranked = [sorted(range(VOCAB), key=lambda t: -row[t])[: param.logprobs] for row in rows]
        assert generation.top_logprobs is not None
        assert [[token for token, _ in best] for best in generation.top_logprobs] == ranked
        for row, best in zip(rows, generation.top_logprobs, strict=True):
            assert [value for _, value in best] == pytest.approx([row[token] for token, _ in best])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@EACH_WAY
def test_VER_17_log_probabilities_are_the_models_own(spec: SpecConfig | None, temperature: float) -> None:
    """Whatever rules there are, whoever else is in the batch, and wherever a stop cuts: no row of another token."""
    target = around_zero()
    draft = agreeing_now_and_then(target, around_zero(5))
    engine = Engine(ScriptedModel(target, VOCAB), ScriptedModel(draft, VOCAB) if spec else None, spec, max_running=5)
    params = [
        replace(
            p,
            max_new_tokens=5 + 2 * i,
            logprobs=(None, 0, 2, VOCAB)[i % 4],
            temperature=temperature,
            seed=i,
            stop_token_ids=(i % VOCAB,) if i % 3 == 0 else (),
        )
        for i, p in enumerate(MIX)
    ]
    prompts = prompts_for(len(params))
    generations = engine.generate(prompts, params)
    assert_logprobs(target, prompts, params, generations)
    assert {"stop", "length"} == {g.finish_reason for g in generations}


@SHAPES
def test_VER_17_what_a_stop_cuts_off_has_none(spec: SpecConfig) -> None:
    """The stop stands at every place of a block in turn; one stream's blocks hold what generate gives as a whole."""
    text = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    model = ScriptedModel(lambda c: [5.0 * (t == text[len(c) - 1]) + t / 10 for t in range(VOCAB)], VOCAB)
    for stop in (1, 2, 3, 4, 5, 6, 0):
        engine = Engine(model, model, spec)
        params = SamplingParams(max_new_tokens=10, stop_token_ids=(stop,), logprobs=1)
        (generation,) = engine.generate([[0]], params)
        assert generation.token_ids[-1] == stop
        assert_logprobs(model.next_logits, [[0]], [params], [generation])
        blocks = list(engine.stream([0], params))
        assert [t for block in blocks for t in block.token_ids] == generation.token_ids
        assert [x for block in blocks for x in block.logprobs or []] == generation.logprobs
        assert [x for block in blocks for x in block.top_logprobs or []] == generation.top_logprobs
        assert {(len(b.token_ids), len(b.logprobs or [])) for b in blocks} == {
            (len(b.token_ids), len(b.token_ids)) for b in blocks
        }


def test_equally_likely_ids_come_in_their_order() -> None:
    model = ScriptedModel(lambda _: [1.0, 2.0, 1.0, 2.0, 2.0], 5)
    (generation,) = Engine(model).generate([[0]], SamplingParams(max_new_tokens=1, logprobs=5))
    assert generation.top_logprobs is not None
    assert [token for token, _ in generation.top_logprobs[0]] == [1, 3, 4, 0, 2]
