"""The law at 40 000 seeds: `propose`, `sample_walk` and the coins as the workers use them, over models that are tables.

tests/engine/test_sampled_output.py asks the same of whole engines, and can afford a few thousand seeds.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from refspec import SamplingParams, SpecConfig
from refspec.contracts import VerifyInput
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import Request, RunningBatch
from refspec.requests.sampling import DRAFT, FINAL, JUDGE, BatchSampling
from refspec.runtime.runner import ModelRunner
from refspec.spec.draft import propose
from refspec.spec.verify import sample_walk

ROWS, VOCAB, ROOT, PROMPT_LEN, LENGTH = 40_000, 4, 2, 2, 3
TARGET = torch.tensor(
    [[0.40, 0.30, 0.20, 0.10], [0.05, 0.15, 0.20, 0.60], [0.35, 0.15, 0.45, 0.05], [0.0, 0.7, 0.2, 0.1]]
)
DRAFT_LAW = torch.tensor(
    [[0.10, 0.60, 0.20, 0.10], [0.30, 0.20, 0.20, 0.30], [0.50, 0.05, 0.15, 0.30], [0.3, 0.4, 0.1, 0.2]]
)
CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
REJECTION, BLOCK = replace(CHAIN, sampler="rejection"), replace(CHAIN, sampler="block")
WAYS = {"plain": None, "target_only": CHAIN, "rejection": REJECTION, "block": BLOCK}
PLAIN = SamplingParams(temperature=1.0)
WHOLE_VOCABULARY = ModelRunner(ScriptedModel(lambda context: [], VOCAB), 1, torch.device("cpu"), Counter())
DRAWN = pytest.mark.parametrize("spec", [REJECTION, BLOCK], ids=["rejection", "block"])


def batch_of(params: SamplingParams) -> RunningBatch:
    """One request for each seed, from 0."""
    requests = [Request(r, [0, ROOT], params, frozenset(), 99, seed=r) for r in range(ROWS)]
    batch = RunningBatch.of(requests, torch.zeros(1, 1, dtype=torch.int64))
    batch.seq_lens = torch.full((ROWS,), PROMPT_LEN)
    return batch


@functools.cache
def exact(spec: SpecConfig) -> tuple[Tensor, float]:
    """What `tokens_of` gives at T = 1, with nothing changed."""
    return tokens_of(spec, PLAIN)


def tokens_of(
    spec: SpecConfig | None, params: SamplingParams, change: Callable[[Tensor], Tensor] = lambda laws: laws
) -> tuple[Tensor, float]:
    """The first three tokens of each request, and how many drafts the first round accepted on average.

    change: what is done to the drafts' laws before they are judged by them.
    """
    batch, every = batch_of(params), torch.arange(ROWS)
    logits = TARGET.log()[torch.full((ROWS,), ROOT)]
    newest = batch.sampling.next_tokens(logits, logits.max(-1).indices, batch.seq_lens)
    out = torch.full((ROWS, LENGTH), -1)
    out[:, 0] = newest
    lens = torch.ones(ROWS, dtype=torch.int64)
    accepted_at_first: float | None = None
    while bool((lens < LENGTH).any()):
        committed, accepted = _step(spec, batch, newest, change)
        if accepted_at_first is None:
            accepted_at_first = float(accepted.float().mean())
        for column in range(committed.shape[1]):
            rows = ((lens < LENGTH) & (column <= accepted)).nonzero().flatten()
            out[rows, lens[rows]] = committed[rows, column]
            lens[rows] += 1
        newest = committed[every, accepted]
        batch.seq_lens = batch.seq_lens + accepted + 1
    assert accepted_at_first is not None
    return out, accepted_at_first


def _step(
    spec: SpecConfig | None, batch: RunningBatch, newest: Tensor, change: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Tokens (b, up to N) of which the first accepted (b) + 1 count."""
    if spec is None:
        logits = TARGET.log()[newest]
        drawn = batch.sampling.next_tokens(logits, logits.max(-1).indices, batch.seq_lens + 1)
        return drawn[:, None], torch.zeros_like(drawn)
    n, columns, laws = spec.num_draft_tokens, [newest], []
    for level in range(spec.num_steps):
        _, tokens, law = propose(batch, DRAFT_LAW.log()[columns[-1]], level, spec, WHOLE_VOCABULARY)
        columns.append(tokens[:, 0])
        laws += [] if law is None else [law]
    draft_token = torch.stack(columns, dim=1)
    first_child = torch.tensor([*range(1, n), -1]).repeat(ROWS, 1)
    logits = TARGET.log()[draft_token.flatten()]
    tree = VerifyInput(
        draft_token.flatten(),
        positions=torch.zeros(0),
        tree_mask=torch.zeros(0),
        top_scores_index=torch.zeros(0),
        retrieve_index=torch.arange(ROWS * n).view(ROWS, n),
        retrieve_next_token=first_child,
        retrieve_next_sibling=torch.full((ROWS, n), -1),
        draft_probs=change(torch.stack(laws, dim=1)) if laws else None,
    )
    law = batch.sampling.probabilities(logits, logits.max(-1).indices)
    predict, _, accepted = sample_walk(batch, tree, law, spec)
    return predict.view(ROWS, n).long(), accepted.long()


def plausibility(tokens: Tensor, rows: Tensor) -> float:
    """How probable a chi-square at least as large as theirs is, if `rows` (V, V) is the law from token to token."""
    law = (rows[ROOT, :, None, None] * rows[:, :, None] * rows[None]).flatten().double()
    counts = torch.bincount(tokens @ torch.tensor([VOCAB**2, VOCAB, 1]), minlength=VOCAB**3)
    possible = law > 0
    if bool(counts[~possible].any()):
        return 0.0
    expected = law[possible] * len(tokens)
    assert float(expected.min()) > 5
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc((possible.sum().double() - 1) / 2, chi_square / 2))


@pytest.mark.parametrize("spec", WAYS.values(), ids=WAYS)
def test_the_law_is_the_targets(spec: SpecConfig | None) -> None:
    tokens, _ = exact(spec) if spec else tokens_of(spec, PLAIN)
    assert plausibility(tokens, TARGET) > 1e-3


@pytest.mark.parametrize("spec", WAYS.values(), ids=WAYS)
def test_the_law_is_the_targets_under_temperature_and_top_k(spec: SpecConfig | None) -> None:
    law = TARGET.double() ** (1 / 1.5)
    law[law < law.sort(descending=True).values[:, 2:3]] = 0
    law /= law.sum(1, keepdim=True)
    assert plausibility(tokens_of(spec, SamplingParams(temperature=1.5, top_k=3))[0], law) > 1e-3


@pytest.mark.parametrize(
    "thresholds", [{"threshold_single": 0.1}, {"threshold_single": 0.0}, {"threshold_acc": 0.3}, {"threshold_acc": 0.0}]
)
def test_thresholds_bend_the_law_and_accept_more(thresholds: dict[str, float]) -> None:
    tokens, accepted = tokens_of(replace(CHAIN, **thresholds), PLAIN)
    assert plausibility(tokens, TARGET) < 1e-9
    assert accepted > exact(CHAIN)[1] + 0.03
    steps = set(itertools.chain.from_iterable(zip(*(c.tolist() for c in pair), strict=True) for pair in _steps(tokens)))
    assert (3, 1) in steps
    assert (3, 0) not in steps  # of probability 0


def _steps(tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(tokens[:, place], tokens[:, place + 1]) for place in range(LENGTH - 1)]


@DRAWN
@pytest.mark.parametrize(
    "change",
    [
        lambda laws: laws.roll(1, 0),
        lambda laws: laws.roll(1, 1),
        lambda laws: (laws.log() / 0.8).softmax(-1),
        lambda laws: torch.nn.functional.one_hot(laws.argmax(-1), VOCAB).float(),
    ],
    ids=["of another request", "of another level", "of another temperature", "of a draft that takes its best"],
)
def test_VER_22_a_law_that_was_not_drawn_from_bends_the_output(
    change: Callable[[Tensor], Tensor], spec: SpecConfig
) -> None:
    assert plausibility(tokens_of(spec, PLAIN, change)[0], TARGET) < 1e-9


def test_block_verification_accepts_more() -> None:
    assert exact(BLOCK)[1] > exact(REJECTION)[1] + 0.005


@pytest.mark.parametrize(("spec", "bends"), [(REJECTION, False), (BLOCK, True)], ids=["rejection", "block"])
def test_why_coins_are_keyed_by_where_the_round_begins(
    spec: SpecConfig, bends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keyed by the position that a draft is meant for, its coin is thrown again when it was rejected.

    The classic rule never looks behind the first rejected draft, so the coins there are as good as new. The block rule
    does look at them.
    """
    original = BatchSampling.coins

    def coins(self: BatchSampling, positions: Tensor, purpose: int, columns: range) -> Tensor:
        if purpose == FINAL:
            return original(self, positions, purpose, columns)
        assert purpose in (JUDGE, DRAFT)
        return torch.cat([original(self, positions + column, purpose, range(1)) for column in columns], dim=1)

    monkeypatch.setattr(BatchSampling, "coins", coins)
    found = plausibility(tokens_of(spec, PLAIN)[0], TARGET)
    assert found < 1e-9 if bends else found > 1e-3
