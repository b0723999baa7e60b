"""Is sampled output what the target says? Asked of a target whose law can be written down.

The target is a Markov chain over four tokens, so that the law of the first three tokens (the prefill's, and two of the
rounds') is known: 64 cells, one request for each seed. The draft is another chain.

Seeds count from 0 and were not chosen. A true sampler comes out at one in a thousand now and then, and here target_only
with k=1 does (3e-4 on 3000 seeds; 0.7 on two million, through the same coins and walk). So the bar for "plausible" is
1e-5, four orders above what counts as bent.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from builders import assert_all_free

from refspec import Engine, SamplingParams

SEEDS = 1200
PLAUSIBLE, BENT = 1e-5, 1e-9
TARGET = [[0.40, 0.30, 0.20, 0.10], [0.05, 0.15, 0.20, 0.60], [0.35, 0.15, 0.45, 0.05], [0.0, 0.7, 0.2, 0.1]]
DRAFT = [[0.10, 0.60, 0.20, 0.10], [0.30, 0.20, 0.20, 0.30], [0.50, 0.05, 0.15, 0.30], [0.3, 0.4, 0.1, 0.2]]
ROOT = 2

PLAIN_T1 = SamplingParams(max_new_tokens=3, temperature=1.0)
FILTERED = SamplingParams(max_new_tokens=3, temperature=1.5, top_k=3, top_p=0.9, min_p=0.2)


def markov(law: Sequence[Sequence[float]]) -> Callable[[list[int]], list[float]]:
    return lambda context: [math.log(p) if p else -math.inf for p in law[context[-1]]]


def law_of(row: Sequence[float], params: SamplingParams) -> list[float]:
    """What params make of a row, as their documentation says it."""
    weights = {token: p ** (1 / params.temperature) for token, p in enumerate(row) if p}
    ranking = sorted(weights, key=lambda token: -weights[token])[: params.top_k or None]
    total, passed, kept = sum(weights[t] for t in ranking), 0.0, []
    for token in ranking:
        if passed < params.top_p * total and weights[token] >= params.min_p * weights[ranking[0]]:
            kept.append(token)
        passed += weights[token]
    return [weights[t] / sum(weights[u] for u in kept) if t in kept else 0.0 for t in range(len(row))]


def plausibility(outputs: Sequence[tuple[int, ...]], params: SamplingParams) -> float:
    """How probable a chi-square at least as large as theirs is, if they are what the target says."""
    rows = [law_of(row, params) for row in TARGET]
    cells = {
        text: rows[ROOT][text[0]] * rows[text[0]][text[1]] * rows[text[1]][text[2]]
        for text in itertools.product(range(4), repeat=3)
    }
    counts = Counter(outputs)
    if any(cells[text] == 0 for text in counts):
        return 0.0
    rare = {text for text, p in cells.items() if 0 < p * len(outputs) < 5}  # joined to one cell
    expected = [p * len(outputs) for text, p in cells.items() if p and text not in rare]
    found = [counts[text] for text, p in cells.items() if p and text not in rare]
    if rare:
        expected.append(sum(cells[text] for text in rare) * len(outputs))
        found.append(sum(counts[text] for text in rare))
    assert min(expected) > 3
    chi_square = sum((x - e) ** 2 / e for x, e in zip(found, expected, strict=True))
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), torch.tensor(chi_square / 2)))


def sampled(engine: Engine, params: SamplingParams, seeds: int = SEEDS) -> list[tuple[int, ...]]:
    generations = engine.generate([[0, ROOT]] * seeds, [replace(params, seed=seed) for seed in range(seeds)])
    assert_all_free(engine)
    return [tuple(g.token_ids) for g in generations]
