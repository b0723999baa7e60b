"""From logits to a token when a request samples: the law, and the coins that decide by it.

The law. temperature divides the logits, and the softmax of that is the law; top_k, top_p and min_p, in this order, each
cut its tail off, and what stays is scaled up to 1 again. A request with temperature 0 is greedy: its law is a one-hot
at `greedy_choice`'s token. So greedy and sampled requests can share a batch, and a sampler of kernels/ needs to know
nothing of it: a coin cannot miss a probability of 1, nor hit one of 0. Whatever else is to change what a request may
say must change the logits before both are asked, `greedy_choice` and `BatchSampling.probabilities`.

The coins. A generator that is advanced by each draw would make a request's text depend on who else runs, and when. Here
a coin is a function of the request's seed, the position in the text at which the step that throws it begins, and what
it is thrown for. Every step begins further on than the one before, so no coin is thrown twice. Keyed by the position
that a draft was meant for, a coin would be thrown again after a rejection; under block verification, where the drafts
behind the accepted ones have had a say in how many are accepted, that would bend the law.

The function is SplitMix64's output, taken three times over: a seed has a stream of outputs, the one of a position seeds
a stream of its own, and of that, the one of a column is the coin. It is arithmetic on int64 tensors where they lie, for
the whole batch at once.

Source: Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators, figure 17 (the mixing function is
Stafford's variant 13); SGLang: python/sglang/srt/sampling/sampling_batch_info.py:SamplingBatchInfo @v0.5.5, and for the
seeds python/sglang/srt/layers/sampler.py:multinomial_with_seed @v0.5.5, whose coins too depend on seed and position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refspec.config import SamplingParams
from refspec.kernels.inverse_cdf import inverse_cdf
from refspec.memory.to_device import to_device

# What a coin is thrown for: the first of its columns.
FINAL = 0  # the token that the step draws from what the target's law has left
JUDGE = 1 << 20  # a node, or a draft: does it stand?
DRAFT = 2 << 20  # a draft: which token is it?

GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # as int64
STAFFORD_13 = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


@dataclass(frozen=True)
class BatchSampling:
    """How each request of a batch wants its tokens chosen. Row r is request r; the tensors are on its device."""

    all_greedy: bool
    any_filter: bool  # does any request set top_k, top_p or min_p?
    seeds: Tensor  # i64 (b)
    temperatures: Tensor  # f32 (b), 0 = greedy
    top_ks: Tensor  # i64 (b), 0 = all
    top_ps: Tensor  # f32 (b)
    min_ps: Tensor  # f32 (b)

    @staticmethod
    def of(params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> BatchSampling:
        """Of requests with these params, and with these seeds: the params' own are not read, as they may be None."""

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return to_device(values, dtype, device)

        return BatchSampling(
            all_greedy=all(p.temperature == 0 for p in params),
            any_filter=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
            seeds=to_device(list(seeds), torch.int64, device),
            temperatures=column([p.temperature for p in params], torch.float32),
            top_ks=column([min(p.top_k, 2**31) for p in params], torch.int64),
            top_ps=column([p.top_p for p in params], torch.float32),
            min_ps=column([p.min_p for p in params], torch.float32),
        )

    def probabilities(self, logits: Tensor, best: Tensor) -> Tensor:
        """logits (b·n, V), n rows for each request, and best i64 (b·n), their likeliest ids -> the law of each row.

        f32 (b·n, V). Rows of greedy requests are 1 at best and 0 elsewhere; a logit of -inf has probability 0. A row
        comes out the same, to the bit, whatever the other requests of the batch ask for.
        """
        one_hot = torch.zeros(logits.shape, device=logits.device).scatter_(1, best[:, None], 1.0)
        if self.all_greedy:
            return one_hot
        rows_each = len(logits) // len(self.seeds)
        temperature, top_k, top_p, min_p = (
            x.repeat_interleave(rows_each)[:, None] for x in (self.temperatures, self.top_ks, self.top_ps, self.min_ps)
        )
        # With the best logit at 0, no temperature overflows; -inf stays -inf.
        below_best = logits.float() - logits.gather(1, best[:, None]).float()
        float32 = torch.finfo(torch.float32)
        law = torch.softmax(below_best / temperature.clamp(float32.tiny, float32.max), dim=-1)
        if self.any_filter:
            law = filtered(law, top_k, top_p, min_p)
        return torch.where(temperature > 0, law, one_hot)

    def coins(self, positions: Tensor, purpose: int, columns: range) -> Tensor:
        """One coin for each request and column, f32 (b, columns) in [0, 1). positions i64 (b): where its step begins.

        positions may have more dimensions after the first, as the result has then. purpose: FINAL, JUDGE or DRAFT.
        Nothing waits for the device.
        """
        column = torch.arange(purpose + columns.start, purpose + columns.stop, device=positions.device)
        of_seed = splitmix64(self.seeds, 0).view(-1, *[1] * (positions.ndim - 1))
        bits = splitmix64(splitmix64(of_seed, positions)[..., None], column)
        return ((bits >> 40) & 0xFFFFFF).float() * 2**-24

    def next_tokens(self, logits: Tensor, best: Tensor, positions: Tensor) -> Tensor:
        """The token at `positions` (b) of each request, without speculation, i64 (b). logits (b, V), best i64 (b).

        Or at positions (b, n), each as if without speculation: then i64 (b·n) from (b·n, V) and (b·n). Nodes of a tree
        at one position share its coin. No two of them are on one path, and what is drawn behind the end of the path
        that comes true has no effect, so the coin can be thrown again.
        """
        if self.all_greedy:
            return best
        return draw(self.probabilities(logits, best), self.coins(positions, FINAL, range(1)).flatten())


def draw(probabilities: Tensor, coins: Tensor) -> Tensor:
    """One token from each row: probabilities f32 (n, V), coins f32 (n) -> i64 (n)."""
    return inverse_cdf(probabilities, probabilities, coins)


def filtered(law: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Keep, of each row of law f32 (n, V), the likeliest, and scale them up to a sum of 1.

    top_k i64 (n, 1): so many of them, 0: all. top_p f32 (n, 1): of these the fewest that hold this share of their sum.
    min_p f32 (n, 1): of these the ones with at least this share of the first one's probability. Ties go to the lower
    id. A row that sets none of the three stays as it is.

    Ranked by probability, each of the three keeps the ids up to some rank: the least of these ranks decides.
    """
    ranked, ids = law.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(law.shape[1], device=law.device)
    running = ranked.double().cumsum(-1)  # float64: in float32 the sum over a large vocabulary is too rough
    in_top_k = torch.where(top_k > 0, top_k, law.shape[1]).clamp(max=law.shape[1])
    before = running - ranked
    keep = rank < in_top_k
    keep &= (before < top_p * running.gather(1, in_top_k - 1)) | (top_p >= 1)
    keep &= ranked >= min_p * ranked[:, :1]
    keep |= rank == 0  # a top_p so small that float32 makes it 0
    total = running.gather(1, keep.sum(1, keepdim=True) - 1)
    kept = torch.zeros_like(law).scatter_(1, ids, (ranked / total).float().where(keep, 0.0))
    return torch.where((top_k > 0) | (top_p < 1) | (min_p > 0), kept, law)


def splitmix64(seeds: Tensor, index: Tensor | int) -> Tensor:
    """The index-th output (from 0) of SplitMix64 with these seeds: i64 tensors that broadcast, as their 64 bits."""
    x = seeds + (index + 1) * GOLDEN_GAMMA  # int64 wraps around
    for shift, factor in zip((30, 27), STAFFORD_13, strict=True):
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Of the 64 bits: zeros come in from the left, where int64 itself would repeat the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
