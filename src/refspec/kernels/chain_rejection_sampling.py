"""Rejection sampling along a chain: the draft sampled, and the target corrects.

Here the drafted tokens were drawn from the draft's law q, and q is known. Two rules keep the target's law p exactly:

Classic: draft i stands if coin_i · q(token) < p(token), each after the one before. Where one falls, the token is drawn
from what p has more than q, max(p - q, 0). Where all stand, one more is drawn from p's last row.

Block: the drafts are judged together. With h_0 = 1 and h_i = min(h_{i-1} · p(token_i) / q(token_i), 1), and with
left_i = sum over the vocabulary of max(h_i · p - q, 0) in the row after draft i, the first i drafts stand if
coin_i < left_i / (left_i + 1 - h_i); for all S of them, if coin_S < h_S. The longest prefix that stands is accepted,
and the token after it is drawn from max(h_i · p - q, 0). On average this accepts at least as many as the classic rule.

q must be the law that the drafts were drawn from. A draft that always takes its best token has a one-hot q, whatever
its softmax says: with p = .5 .5, a softmax of .9 .1 and token 0 always drafted, the softmax as q would put out
.556 .444.

p = q leaves nothing over; then every draft stands, and nothing is divided by 0. If rounding rejects all the same and
nothing is left, the token is drawn from p. An entry of q that is no probability (NaN, negative, above 1) counts as 0
in what is left, and its token cannot be accepted. So it is with a NaN of p, but for draws from p itself, for which rows
of p must be numbers.

Bytes moved for each request, classic: 8·V for the rows p and q where the chain ends (4·V behind the last draft, where
there is no q), one tile of them again, and 24·S for the judgement. Block: 4·V where all drafts stand; else 8·V for the
first row and for each i < S with coin_i < h_i, 8·V·S at most.

Source: Leviathan et al. 2023, algorithm 1; Sun et al. 2024 (arXiv 2403.10444), algorithm 2; SGLang:
python/sglang/kernels/ops/speculative/reject_sampling.py:chain_speculative_sampling_triton @0.5.23
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_flag, check_size, check_tensor, device_of
from refspec.kernels.inverse_cdf import check_coins, find_tile, first_beyond, inverse_cdf
from refspec.kernels.launches import count_launch
from refspec.kernels.verify_tree_greedy import Walk


def chain_rejection_sampling_torch(
    candidates: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    block_verification: bool = False,
) -> Walk:
    """The reference of `chain_rejection_sampling`. Single tokens are judged in float32, sums are in float64."""
    b, n = candidates.shape
    every, column = torch.arange(b, device=candidates.device), torch.arange(n, device=candidates.device)
    drafts = candidates[:, 1:, None]
    p, q = target_probs[:, :-1].gather(2, drafts).squeeze(2), draft_probs.gather(2, drafts).squeeze(2)
    could_be_drafted = (q > 0) & (q <= 1)

    if block_verification:
        accepted, scale = _longest_block(target_probs, draft_probs, p, q.where(could_be_drafted, torch.inf), coins)
    else:
        stands = could_be_drafted & (coins * q < p)
        accepted, scale = stands.long().cumprod(1).sum(1), torch.ones_like(final_coins)

    row = target_probs[every, accepted].double()
    q_row = F.pad(draft_probs, (0, 0, 0, 1))[every, accepted]  # after the last draft nothing is taken off
    rest = _positive(scale[:, None] * row - _as_probability(q_row))
    drawn = inverse_cdf(rest, row, final_coins)

    before = column < accepted[:, None]
    predict = torch.where(before, candidates.roll(-1, dims=1), 0)
    predict[every, accepted] = drawn
    accept_index = torch.where(column <= accepted[:, None], every[:, None] * n + column, -1)
    return predict.flatten().int(), accept_index.int(), accepted.int()


def _longest_block(
    target_probs: Tensor, draft_probs: Tensor, p: Tensor, q: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor]:
    """How many drafts stand together, i64 (b), and their h, f32 (b). p, q (b, S): of the drafted tokens."""
    b, s = p.shape
    h = torch.ones(b, s + 1, device=p.device)
    for i in range(s):
        h[:, i + 1] = (h[:, i] * p[:, i] / q[:, i]).clamp(max=1)
    # left[:, i]: in the row after draft i. The last row has no q, and its h is the rule itself.
    left = _positive(h[:, 1:-1, None].double() * target_probs[:, 1:-1] - _as_probability(draft_probs[:, 1:])).sum(2)
    inner = h[:, 1:-1]
    rule = torch.cat([torch.where(inner < 1, left / (left + 1 - inner), 1), h[:, -1:]], 1)[:, :s]
    # If rows sum to 1, the rule is never above h. SGLang asks for both, and so differs for rows that do not.
    stands = (coins < h[:, 1:]) & (coins < rule)
    accepted = (F.pad(stands, (1, 0)) * torch.arange(s + 1, device=p.device)).amax(1)
    return accepted, h.gather(1, accepted[:, None]).squeeze(1)


def _as_probability(q: Tensor) -> Tensor:
    """f64, with 0 for what is no probability."""
    return torch.where((q >= 0) & (q <= 1), q, 0.0).double()


def _positive(x: Tensor) -> Tensor:
    """x, with 0 for what is not above it, NaN included."""
    return torch.where(x > 0, x, 0.0)


@triton.jit
def _first_rejected(candidates, target_probs, draft_probs, coins, r, s, vocab, S_UPPER: tl.constexpr):
    """Classic: how many drafts of request r stand. All are judged at once, and the first that falls counts."""
    i = tl.arange(0, S_UPPER)
    token = tl.load(candidates + r * (s + 1) + 1 + i, i < s, other=0)
    p = tl.load(target_probs + (r * (s + 1) + i) * vocab + token, i < s, other=0.0)
    q = tl.load(draft_probs + (r * s + i) * vocab + token, i < s, other=0.0)
    coin = tl.load(coins + r * s + i, i < s, other=0.0)
    stands = (q > 0) & (q <= 1) & (coin * q < p)
    return tl.min(tl.where(stands, s, i), 0)


@triton.jit
def _next_h(h, candidates, target_probs, draft_probs, r, i, s, vocab):
    """Block: h_{i+1} from h_i."""
    token = tl.load(candidates + r * (s + 1) + i + 1)
    p = tl.load(target_probs + (r * (s + 1) + i) * vocab + token)
    q = tl.load(draft_probs + (r * s + i) * vocab + token)
    could_be_drafted = (q > 0) & (q <= 1)
    ratio = tl.div_rn(h * p, tl.where(could_be_drafted, q, 1.0))
    return tl.where(could_be_drafted, tl.where(ratio >= 1.0, 1.0, ratio), 0.0)  # NaN stays, and accepts nothing


@triton.jit
def _row_and_rest(target_probs, draft_probs, scale, r, i, s, vocab, tile, BLOCK: tl.constexpr):
    """A tile of the target's row after i drafts, and what is left of it when the draft's is taken off."""
    token = tile * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(target_probs + (r * (s + 1) + i) * vocab + token, token < vocab, other=0.0)
    q = tl.load(draft_probs + (r * s + i) * vocab + token, (token < vocab) & (i < s), other=0.0)
    q = tl.where((q >= 0) & (q <= 1), q, 0.0)
    rest = scale * row - q
    return row, tl.where(rest > 0, rest, 0.0)


@triton.jit
def _sum_kernel(
    candidates,
    target_probs,
    draft_probs,
    coins,
    sums,
    s,
    vocab,
    BLOCK_VERIFICATION: tl.constexpr,
    S_UPPER: tl.constexpr,  # s, rounded up to a power of two, at least 1
    BLOCK: tl.constexpr,
):
    """Program (r, i, t) sums the t-th tile of what is left after i drafts, and of the whole row.

    sums (b, rows, 2, tiles). Classic: there is one row, where the chain ends. Block: there are S + 1; those that cannot
    be asked for are left out: because coin_i >= h_i, or because all S drafts stand and only the last row counts.
    """
    r, tile = tl.program_id(0).to(tl.int64), tl.program_id(2)
    rows, tiles = tl.num_programs(1), tl.num_programs(2)
    scale = tl.full([], 1.0, tl.float32)
    if BLOCK_VERIFICATION:
        i = tl.program_id(1)
        for j in range(i):
            scale = _next_h(scale, candidates, target_probs, draft_probs, r, j, s, vocab)
        if tl.load(coins + r * s + i - 1, i > 0, other=0.0) >= scale:
            return
        h = scale
        for j in range(i, s):
            h = _next_h(h, candidates, target_probs, draft_probs, r, j, s, vocab)
        if tl.load(coins + r * s + s - 1, i < s, other=1.0) < h:
            return
    else:
        i = _first_rejected(candidates, target_probs, draft_probs, coins, r, s, vocab, S_UPPER)
    row, rest = _row_and_rest(target_probs, draft_probs, scale, r, i, s, vocab, tile, BLOCK)
    out = sums + (r * rows + tl.program_id(1)) * 2 * tiles + tile
    tl.store(out, tl.sum(rest, 0))
    tl.store(out + tiles, tl.sum(row, 0))


@triton.jit
def _judge_and_draw_kernel(
    candidates,
    target_probs,
    draft_probs,
    coins,
    final_coins,
    sums,
    predict,
    accept_index,
    accept_token_num,
    s,
    vocab,
    tiles,
    BLOCK_VERIFICATION: tl.constexpr,
    S_UPPER: tl.constexpr,
    N_UPPER: tl.constexpr,  # s + 1, rounded up to a power of two
    T_UPPER: tl.constexpr,  # tiles, rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """Program r decides how many of request r's drafts are accepted, draws the token after them, writes all down."""
    r = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, T_UPPER)
    scale = tl.full([], 1.0, tl.float32)
    if BLOCK_VERIFICATION:
        accepted = tl.full([], 0, tl.int32)
        h = tl.full([], 1.0, tl.float32)
        for i in range(1, s + 1):
            h = _next_h(h, candidates, target_probs, draft_probs, r, i - 1, s, vocab)
            coin = tl.load(coins + r * s + i - 1)
            if coin < h:
                rule = h
                if (i < s) & (h < 1.0):  # where all drafts stand nobody has summed this, and it will not matter
                    left = tl.sum(tl.load(sums + (r * (s + 1) + i) * 2 * tiles + lanes, lanes < tiles, other=0.0), 0)
                    rule = tl.div_rn(left, left + (1.0 - h))
                if coin < rule:
                    accepted = i
                    scale = h
        mine = sums + (r * (s + 1) + accepted) * 2 * tiles
    else:
        accepted = _first_rejected(candidates, target_probs, draft_probs, coins, r, s, vocab, S_UPPER)
        mine = sums + r * 2 * tiles

    rest_sums = tl.load(mine + lanes, lanes < tiles, other=0.0)
    row_sums = tl.load(mine + tiles + lanes, lanes < tiles, other=0.0)
    is_left, tile, before, threshold = find_tile(rest_sums, row_sums, tl.load(final_coins + r), T_UPPER)
    row, rest = _row_and_rest(target_probs, draft_probs, scale, r, accepted, s, vocab, tile, BLOCK)
    drawn = tile * BLOCK + first_beyond(tl.where(is_left, rest, row), before, threshold, BLOCK)

    column = tl.arange(0, N_UPPER)
    first = r * (s + 1)
    token = tl.load(candidates + first + 1 + column, column < accepted, other=0).to(tl.int32)
    tl.store(predict + first + column, tl.where(column == accepted, drawn, token), column <= s)
    tl.store(accept_index + first + column, tl.where(column <= accepted, first + column, -1).to(tl.int32), column <= s)
    tl.store(accept_token_num + r, accepted)


def chain_rejection_sampling_triton(
    candidates: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    block_verification: bool = False,
) -> Walk:
    """The kernels' launches: sum what may be left, then judge and draw."""
    (b, n, vocab), device = target_probs.shape, target_probs.device
    s = n - 1
    predict = torch.empty(b * n, dtype=torch.int32, device=device)
    accept_index = torch.empty(b, n, dtype=torch.int32, device=device)
    accept_token_num = torch.empty(b, dtype=torch.int32, device=device)
    if not b:
        return predict, accept_index, accept_token_num
    block = min(triton.next_power_of_2(vocab), 2048)
    tiles = triton.cdiv(vocab, block)
    rows = n if block_verification else 1
    sums = torch.empty(b, rows, 2, tiles, device=device)
    shared = {
        "BLOCK_VERIFICATION": block_verification,
        "S_UPPER": triton.next_power_of_2(max(s, 1)),
        "BLOCK": block,
        "num_warps": 4,
    }
    _sum_kernel[(b, rows, tiles)](candidates, target_probs, draft_probs, coins, sums, s, vocab, **shared)
    _judge_and_draw_kernel[(b,)](
        candidates,
        target_probs,
        draft_probs,
        coins,
        final_coins,
        sums,
        predict,
        accept_index,
        accept_token_num,
        s,
        vocab,
        tiles,
        N_UPPER=triton.next_power_of_2(n),
        T_UPPER=triton.next_power_of_2(tiles),
        **shared,
    )
    return predict, accept_index, accept_token_num


def chain_rejection_sampling(
    candidates: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    block_verification: bool = False,
    backend: str = "auto",
) -> Walk:
    """candidates i64 (b, N = S+1), column 0 the root, each of the others drawn from the row before it of draft_probs
    f32 (b, S, V); target_probs f32 (b, N, V): the target's law after each column; coins f32 (b, S) and final_coins
    f32 (b), all in [0, 1).

    Returns (predict i32 (b*N): the token after each accepted column, the last one drawn, 0 elsewhere; accept_index i32
    (b, N): global rows r*N + column of what was accepted, root first, -1 padded; accept_token_num i32 (b): the drawn
    token excluded). Raises ValueError for other shapes or types, and, where values are checked, for tokens or coins
    out of range.
    """
    run = choose(
        backend,
        device_of("target_probs", target_probs),
        chain_rejection_sampling_torch,
        chain_rejection_sampling_triton,
    )
    device = target_probs.device
    check_tensor("target_probs", target_probs, (None, None, None), torch.float32)
    b, n, vocab = target_probs.shape
    check_size("the number of columns in target_probs", n)
    check_size("the vocabulary of target_probs", vocab)
    check_tensor("candidates", candidates, (b, n), device=device)
    check_tensor("draft_probs", draft_probs, (b, n - 1, vocab), torch.float32, device)
    check_tensor("coins", coins, (b, n - 1), torch.float32, device)
    check_tensor("final_coins", final_coins, (b,), torch.float32, device)
    check_bounds("candidates", candidates, 0, vocab)
    check_flag("block_verification", block_verification)
    check_coins("coins", coins)
    check_coins("final_coins", final_coins)
    count_launch("chain_rejection_sampling")
    return run(candidates, target_probs, draft_probs, coins, final_coins, block_verification)
