"""Drawing a token with one coin: the first token whose running sum exceeds coin · total.

Both samplers end in this draw. Weights need not sum to 1. Each token owns the half-open interval from the sum before
it to its own: a token of weight 0 owns nothing, whatever the coin. On paper a coin below 1 always finds an owner; in
float32 the running sum and the total may disagree in their last bits, and a coin near 1 may find none. Then the last
token that weighs anything is meant (SGLang takes the last of the vocabulary, which may weigh nothing).

Long rows are summed in tiles by one kernel, a program for each; a second kernel finds the tile, then the token in it.
Both steps are `first_beyond`.

Source: Devroye 1986, Non-Uniform Random Variate Generation, section III.2 (inversion by sequential search).
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import tl, triton
from refspec.kernels.checks import values_are_checked


def inverse_cdf(rest: Tensor, row: Tensor, coins: Tensor) -> Tensor:
    """One token for each row, i64 (b), drawn from `rest`, or from `row` where nothing of it is left.

    rest, row: (b, V), no entry negative; coins f32 (b). A row without any weight gives 0. Sums are in float64.
    """
    weights = torch.where(rest.sum(1, keepdim=True) > 0, rest, row).double()
    running = weights.cumsum(1)
    owner = (running > coins.double()[:, None] * running[:, -1:]) & (weights > 0)
    first = owner.int().argmax(1)
    last = ((weights > 0) * torch.arange(weights.shape[1], device=weights.device)).amax(1)
    return torch.where(owner.any(1), first, last)


@triton.jit
def first_beyond(weights, before, threshold, SIZE: tl.constexpr):
    """The first lane with a weight whose running sum, from `before` on, exceeds threshold; else the last with one."""
    lanes = tl.arange(0, SIZE)
    running = before + tl.cumsum(weights, 0)
    first = tl.min(tl.where((running > threshold) & (weights > 0), lanes, SIZE), 0)
    last = tl.max(tl.where(weights > 0, lanes, 0), 0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def find_tile(rest_sums, row_sums, coin, TILES: tl.constexpr):
    """From the tiles' sums: is anything left; the tile; the sum before it; the threshold to exceed."""
    total = tl.sum(rest_sums, 0)
    is_left = total > 0
    if not is_left:
        rest_sums = row_sums
        total = tl.sum(row_sums, 0)
    threshold = coin * total
    tile = first_beyond(rest_sums, 0.0, threshold, TILES)
    before = tl.sum(tl.where(tl.arange(0, TILES) < tile, rest_sums, 0.0), 0)
    return is_left, tile, before, threshold


def check_coins(name: str, coins: Tensor) -> None:
    """0 <= every coin < 1; not looked at on a GPU unless asked for. Raises ValueError."""
    if values_are_checked(coins.device) and not bool(((coins >= 0) & (coins < 1)).all()):
        raise ValueError(f"{name} has entries outside of [0, 1)")
