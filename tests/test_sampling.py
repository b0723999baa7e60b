"""The law that a request samples from, and the coins that decide: each row for itself, whatever its batch."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from refspec import SamplingParams
from refspec.requests.sampling import DRAFT, FINAL, JUDGE, BatchSampling, draw, filtered, splitmix64

CPU = torch.device("cpu")


def sampling_of(*params: SamplingParams, seeds: list[int] | None = None) -> BatchSampling:
    return BatchSampling.of(params, seeds if seeds is not None else [p.seed or 0 for p in params], CPU)


def law_of(logits: list[list[float]], *params: SamplingParams) -> Tensor:
    x = torch.tensor(logits)
    return sampling_of(*params).probabilities(x, x.max(dim=-1).indices)


# --- the law ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("greedy_row", [0, 3000])
def test_VER_10_greedy_and_sampled_rows_in_one_batch(greedy_row: int) -> None:
    """T = 0 over logits 0 5 1 among 3000 requests of T = 1 over logits 0 0 0, in front of them or behind."""
    params = [SamplingParams(temperature=1.0)] * 3001
    params[greedy_row] = SamplingParams(temperature=0.0)
    logits = torch.zeros(3001, 3)
    logits[greedy_row] = torch.tensor([0.0, 5.0, 1.0])
    sampling = sampling_of(*params, seeds=list(range(3001)))
    best = logits.max(dim=-1).indices
    law = sampling.probabilities(logits, best)
    assert law.isfinite().all()
    assert law[greedy_row].tolist() == [0, 1, 0]
    tokens = sampling.next_tokens(logits, best, torch.full((3001,), 7))
    assert tokens[greedy_row] == 1
    others = torch.cat([tokens[:greedy_row], tokens[greedy_row + 1 :]])
    for count in torch.bincount(others, minlength=3).tolist():
        assert count == pytest.approx(1000, abs=80)  # three standard deviations


@pytest.mark.parametrize("logits", [[-math.inf, 2.0, 1.0], [-math.inf, 2.0, -math.inf]], ids=str)
def test_VER_11_masked_logits_of_a_greedy_row(logits: list[float]) -> None:
    law = law_of([logits, [1.0, 0.0, -math.inf]], SamplingParams(), SamplingParams(temperature=1.0))
    assert law[0].tolist() == [0, 1, 0]
    assert law[1].tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0])
    assert law[1, 2] == 0


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-3, 1.0, 1e3, 1e40, 1e308])
def test_VER_11_masked_logits_at_any_temperature(temperature: float) -> None:
    law = law_of([[-math.inf, 2.0, 1.0], [100.0, -100.0, -math.inf]], *[SamplingParams(temperature=temperature)] * 2)
    assert law.isfinite().all()
    assert law.sum(1).tolist() == pytest.approx([1, 1])
    assert law[0, 0] == law[1, 2] == 0
    if temperature <= 1e-3:
        assert law.tolist() == [[0, 1, 0], [1, 0, 0]]
    if temperature >= 1e40:
        assert law[0, 1:].tolist() == law[1, :2].tolist() == [0.5, 0.5]


def test_VER_13_a_sampled_request_is_not_decoded_greedily() -> None:
    logits = torch.zeros(200, 2)
    sampling = sampling_of(*[SamplingParams(temperature=1.0)] * 200, seeds=list(range(200)))
    tokens = sampling.next_tokens(logits, torch.zeros(200, dtype=torch.int64), torch.full((200,), 3))
    assert 80 <= int(tokens.sum()) <= 120


def test_VER_02_greedy_rows_of_a_mixed_batch_break_ties_alike() -> None:
    assert law_of([[1, 3, 3, 2], [0, 0, 0, 0]], SamplingParams(), SamplingParams(temperature=1.0))[0].tolist() == [
        0,
        1,
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("params", "law"),
    [
        (SamplingParams(temperature=1.0), [0.6, 0.39, 0.01]),
        (SamplingParams(temperature=1.0, min_p=0.5), [0.6 / 0.99, 0.39 / 0.99, 0]),
        (SamplingParams(temperature=1.0, min_p=0.66), [1, 0, 0]),
        (SamplingParams(temperature=1.0, min_p=1.0), [1, 0, 0]),
        (SamplingParams(temperature=1.0, top_k=1), [1, 0, 0]),
        (SamplingParams(temperature=1.0, top_k=2), [0.6 / 0.99, 0.39 / 0.99, 0]),
        (SamplingParams(temperature=1.0, top_k=10**30), [0.6, 0.39, 0.01]),
        (SamplingParams(temperature=1.0, top_p=0.59), [1, 0, 0]),
        (SamplingParams(temperature=1.0, top_p=0.61), [0.6 / 0.99, 0.39 / 0.99, 0]),
        (SamplingParams(temperature=1.0, top_p=1e-300), [1, 0, 0]),
        (SamplingParams(temperature=1.0, top_k=2, top_p=0.605), [1, 0, 0]),  # .6 of the .99 that top_k left is .606
        (SamplingParams(temperature=0.5), [0.36 / 0.5122, 0.1521 / 0.5122, 0.0001 / 0.5122]),
        (SamplingParams(temperature=0.5, top_p=0.7), [1, 0, 0]),  # of the law that the temperature made
    ],
    ids=str,
)
def test_the_law_by_its_numbers(params: SamplingParams, law: list[float]) -> None:
    logits = [math.log(p) for p in (0.6, 0.39, 0.01)]
    assert law_of([logits], params)[0].tolist() == pytest.approx(law, abs=1e-6)
    reverse = [logits[2], logits[0], logits[1]]
    assert law_of([reverse], params)[0].tolist() == pytest.approx([law[2], law[0], law[1]], abs=1e-6)


def slow_filter(law: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """One token after the other, from the likeliest."""
    ranking = sorted(range(len(law)), key=lambda token: (-law[token], token))[: top_k or None]
    total, passed, kept = math.fsum(law[token] for token in ranking), 0.0, []
    for token in ranking:
        if kept and (passed >= top_p * total or law[token] < min_p * law[ranking[0]]):
            break
        kept.append(token)
        passed += law[token]
    share = math.fsum(law[token] for token in kept)
    return [law[token] / share if token in kept else 0.0 for token in range(len(law))]


def test_filters_keep_what_a_walk_down_the_ranking_keeps() -> None:
    """Rows of sixteenths, exact in float32, full of ties and of borders that are met."""
    chance = random.Random(4)
    rows, settings = [], []
    for _ in range(2000):
        cuts = sorted(chance.choice(range(17)) for _ in range(5))
        rows.append([(b - a) / 16 for a, b in zip([0, *cuts], [*cuts, 16], strict=True)])
        settings.append(
            (chance.choice([0, 1, 2, 3, 6, 99]), chance.choice([0.25, 0.5, 0.75, 1]), chance.choice([0, 0.25, 0.5, 1]))
        )
    law = torch.tensor(rows)
    columns = [torch.tensor(column)[:, None] for column in zip(*settings, strict=True)]
    kept = filtered(law, columns[0], columns[1].float(), columns[2].float())
    expected = torch.tensor([slow_filter(row, *setting) for row, setting in zip(rows, settings, strict=True)])
    assert torch.equal(kept > 0, expected > 0)
    assert torch.allclose(kept, expected, rtol=1e-6, atol=0)


def test_filters_over_a_large_vocabulary() -> None:
    """100 000 almost equal probabilities: half of them are half of the law."""
    law = torch.full((1, 100_000), 1e-5)
    kept = filtered(law, torch.tensor([[0]]), torch.tensor([[0.5]]), torch.tensor([[0.0]]))
    assert int((kept > 0).sum()) == pytest.approx(50_000, abs=1)
    assert int(kept.nonzero()[-1, 1]) == int((kept > 0).sum()) - 1  # ties to the lower ids


def test_a_row_does_not_depend_on_what_others_ask_for() -> None:
    """To the bit: a filter elsewhere in the batch does not rescale a row that has none."""
    torch.manual_seed(2)
    params = [
        SamplingParams(temperature=0.8),
        SamplingParams(),
        SamplingParams(temperature=1.3, top_k=7),
        SamplingParams(temperature=0.6, top_p=0.8, min_p=0.01),
    ]
    logits = torch.randn(4, 3, 1000) * 4  # three rows for each request
    best = logits.max(dim=-1).indices
    together = sampling_of(*params).probabilities(logits.flatten(0, 1), best.flatten()).view(4, 3, 1000)
    for r, param in enumerate(params):
        assert torch.equal(sampling_of(param).probabilities(logits[r], best[r]), together[r])


def test_nobody_has_a_law() -> None:
    law = sampling_of().probabilities(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert (law.shape, law.dtype) == ((0, 5), torch.float32)


def test_a_token_without_probability_is_never_drawn() -> None:
    law = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 3)
    assert draw(law, torch.tensor([0.0, 0.5, 1 - 2**-24])).tolist() == [1, 3, 3]


# --- the coins ----------------------------------------------------------------------------------------------------


def reference_splitmix64(state: int, count: int) -> list[int]:
    """As the paper writes it: a state that is advanced."""
    outputs, mask = [], 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    return outputs


def test_splitmix64_is_splitmix64() -> None:
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert reference_splitmix64(1234567, 5) == known
    seeds = [0, 1, 1234567, 2**63 - 1]
    ours = splitmix64(torch.tensor(seeds)[:, None], torch.arange(300))
    for seed, row in zip(seeds, ours.tolist(), strict=True):
        assert [x % 2**64 for x in row] == reference_splitmix64(seed, 300)


def test_a_coin_is_a_function_of_seed_position_and_purpose() -> None:
    seeds, positions = [3, 2**63 - 1, 3, 0], [5, 5, 0, 8000]
    sampling = sampling_of(*[SamplingParams(temperature=1.0)] * 4, seeds=seeds)
    for purpose, columns in ((FINAL, range(1)), (JUDGE, range(6)), (DRAFT, range(2, 4))):
        coins = sampling.coins(torch.tensor(positions), purpose, columns)
        assert (coins.dtype, coins.shape) == (torch.float32, (4, len(columns)))
        for r, row in enumerate(coins.tolist()):
            of_seed = reference_splitmix64(seeds[r], 1)[0]
            of_position = reference_splitmix64(of_seed, positions[r] + 1)[-1]
            for column, coin in zip(columns, row, strict=True):
                state = (of_position + (purpose + column) * 0x9E3779B97F4A7C15) % 2**64
                assert coin == (reference_splitmix64(state, 1)[0] >> 40) / 2**24


def test_coins_do_not_depend_on_the_batch() -> None:
    seeds, positions = list(range(50)), torch.arange(50) * 3
    params = [SamplingParams(temperature=1.0)] * 50
    together = sampling_of(*params, seeds=seeds).coins(positions, JUDGE, range(8))
    for r in (0, 17, 49):
        alone = sampling_of(params[r], seeds=[seeds[r]])
        assert torch.equal(alone.coins(positions[r : r + 1], JUDGE, range(8))[0], together[r])
        assert torch.equal(alone.coins(positions[r : r + 1], JUDGE, range(5, 6))[0, 0], together[r, 5])


def test_purposes_do_not_overlap() -> None:
    """A tree or chain would need a million columns."""
    assert FINAL + 1 <= JUDGE
    assert JUDGE + 2**20 <= DRAFT


def plausibility(counts: Tensor) -> float:
    """How probable a chi-square at least as large as this one is, if all cells are equally likely."""
    expected = counts.sum() / counts.numel()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2), chi_square / 2))


def coin_cube() -> Tensor:
    """Coins of neighbouring seeds, positions and columns: (64, 64, 64)."""
    seeds = torch.arange(64).repeat_interleave(64)
    sampling = sampling_of(*[SamplingParams(temperature=1.0)] * 4096, seeds=seeds.tolist())
    return sampling.coins(torch.arange(64).repeat(64), JUDGE, range(64)).view(64, 64, 64)


def test_coins_are_uniform() -> None:
    coins = coin_cube()
    assert 0 <= float(coins.min()) < 1e-4
    assert 1 - 1e-4 < float(coins.max()) < 1
    assert plausibility(torch.histc(coins, 1000, 0, 1)) > 1e-3
    low_bits = (coins * 2**24).long() % 256
    assert plausibility(torch.bincount(low_bits.flatten(), minlength=256)) > 1e-3


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seed", "position", "column"])
@pytest.mark.parametrize("distance", [1, 2, 7])
def test_neighbouring_coins_know_nothing_of_each_other(axis: int, distance: int) -> None:
    """All pairs of 32 by 32 intervals are equally frequent; so are the sums of a line of 64 coins."""
    coins = coin_cube().movedim(axis, 0)
    pairs = (coins[:-distance] * 32).long() * 32 + (coins[distance:] * 32).long()
    assert plausibility(torch.bincount(pairs.flatten(), minlength=1024)) > 1e-3
    sums = (coins.sum(0) - 32) / math.sqrt(64 / 12)
    assert float(sums.mean()) == pytest.approx(0, abs=0.06)  # 4096 lines
    assert float(sums.std()) == pytest.approx(1, abs=0.05)


def test_the_uniformity_tests_would_see_a_poor_generator() -> None:
    poor = (torch.arange(64**3) * 0x9E3779B97F4A7C15 >> 40 & 0xFFFFFF).float() / 2**24  # the sequence without mixing
    assert plausibility(torch.histc(poor, 1000, 0, 1)) > 0.999999  # far too even
    pairs = (poor[:-1] * 32).long() * 32 + (poor[1:] * 32).long()
    assert plausibility(torch.bincount(pairs, minlength=1024)) < 1e-9
