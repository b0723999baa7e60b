"""Sampling down the tree: which drafted path would the target have sampled?

The walk stands at a node and throws one coin for it. The node's children share the unit interval with the rest of the
vocabulary: each owns a piece as long as the target's probability of its token, in sibling order, and the coin says
whose it is. If it is a child's, that child is accepted and the walk goes on from there, with the child's coin. If it is
nobody's, the token is one of the others: their probabilities are drawn from with a coin of its own. So the token after
each node has exactly the target's law, whatever was drafted; the draft's probabilities are not needed.

Pieces are half-open: the coin c is child i's if (sum before i) <= c < (sum with i). So it is in
SGLang, which accepted at c <= sum before (@v0.5.5), and so a token of probability 0 when the coin was 0. Siblings must
hold different tokens, as a top-k gives them: a repeated one counts twice, here as in SGLang, and that bends the law.

threshold_acc < 1 stretches the children's pieces by 1 / threshold_acc, and threshold_single < 1 accepts any child of at
least that probability: longer accepted paths, and no longer the target's law. (Of threshold_single 0, SGLang still
excepts what has probability 0.)

Why the last draw needs a coin of its own: after a rejection, the coin is known to lie in the upper part of the unit
interval. With p = .4 .3 .2 .1 and token 0 drafted, a coin that rejects lies in [.4, 1). Used again (`reuse_coin=True`;
SGLang did so up to 0.4.7), it draws from .3 .2 .1 only from its 0.4-quantile upwards, and the law of the output is
.4 .1 .333 .167 instead of .4 .3 .2 .1: the rate of acceptance is right, and what replaces the rejected is not.

Bytes moved for each request: 4·V for the row where the walk ends, and one tile of it again; at most 32·N on the walk,
a chain of dependent reads. Every program of a request's tiles walks for itself: that takes no longer than one walk for
all of them would, and saves a launch.

Source: SGLang: python/sglang/kernels/jit/include/sgl_kernel/speculative/sampling.cuh:TreeSpeculativeSamplingTargetOnly
@0.5.23; SpecInfer (Miao et al. 2024, multi-step speculative sampling), whose draft law is here the drafted token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.config import MOST_NODES
from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import (
    check_bounds,
    check_flag,
    check_number,
    check_size,
    check_tensor,
    device_of,
    values_are_checked,
)
from refspec.kernels.inverse_cdf import check_coins, find_tile, first_beyond, inverse_cdf
from refspec.kernels.launches import count_launch
from refspec.kernels.verify_tree_greedy import Walk, check_retrieve_index


def tree_sampling_target_only_torch(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    num_steps: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    reuse_coin: bool = False,
) -> Walk:
    """The reference of `tree_sampling_target_only`: all requests walk at once, in float32; the draw is in float64."""
    (b, n, vocab), device = target_probs.shape, target_probs.device
    predict = torch.zeros(b * n, dtype=torch.int32, device=device)
    accept_index = torch.full((b, num_steps + 1), -1, dtype=torch.int32, device=device)
    accept_index[:, 0] = retrieve_index[:, 0]
    node = torch.zeros(b, dtype=torch.int64, device=device)  # the last accepted
    accepted = torch.zeros(b, dtype=torch.int64, device=device)
    passed = torch.zeros(b, device=device)  # the pieces of the children that were looked at, this one's included
    struck = torch.zeros(b, vocab, dtype=torch.bool, device=device)  # the tokens of node's rejected children
    # The child to look at, -1: the walk has ended.
    child = retrieve_next_token[:, 0].clone() if num_steps else torch.full_like(node, -1)

    while len(rows := (child != -1).nonzero().flatten()):
        here, at = node[rows], child[rows]
        token = candidates[rows, at]
        p = target_probs[rows, here, token]
        passed[rows] += p
        accept = (coins[rows, here] * threshold_acc < passed[rows]) | (p >= threshold_single)

        no = rows[~accept]
        struck[no, token[~accept]] = True
        child[no] = retrieve_next_sibling[no, at[~accept]]

        yes, at = rows[accept], at[accept]
        predict[retrieve_index[yes, here[accept]]] = token[accept].int()
        accepted[yes] += 1
        accept_index[yes, accepted[yes]] = retrieve_index[yes, at].int()
        node[yes], passed[yes], struck[yes] = at, 0.0, False
        child[yes] = torch.where(accepted[yes] < num_steps, retrieve_next_token[yes, at], -1)

    every = torch.arange(b, device=device)
    row = target_probs[every, node]
    final = coins[every, node] if reuse_coin else final_coins
    drawn = inverse_cdf(row.masked_fill(struck, 0.0), row, final)
    predict[retrieve_index[every, node]] = drawn.int()
    return predict, accept_index, accepted.int()


@triton.jit
def _row_and_rest(
    candidates, retrieve_next_token, retrieve_next_sibling, target_probs, first, node, tile, n, vocab, complete,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of the row of node, where the walk ended, and what is left of it.

    All children of node were rejected, unless the walk is complete: then none was looked at.
    """
    token = tile * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(target_probs + (first + node) * vocab + token, token < vocab, other=0.0)
    rest = row
    child = tl.load(retrieve_next_token + first + node)
    if complete:
        child = tl.full([], -1, tl.int64)
    looked_at = 0
    while (child != -1) & (looked_at < n):  # links in a ring end here
        looked_at += 1
        rest = tl.where(token == tl.load(candidates + first + child), 0.0, rest)
        child = tl.load(retrieve_next_sibling + first + child)
    return row, rest


@triton.jit
def _walk_kernel(
    candidates,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    target_probs,
    coins,
    predict,
    accept_index,
    accept_token_num,
    end,
    sums,
    n,
    vocab,
    num_steps,
    threshold_single,
    threshold_acc,
    N_UPPER: tl.constexpr,  # n and num_steps + 1, rounded up to powers of two
    D_UPPER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (r, t) walks down request r's tree and sums the t-th tile of the row where the walk ends.

    sums (b, 2, tiles): of what is left of the row, and of the whole row. Program (r, 0) writes down the walk.
    """
    r, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tiles = tl.num_programs(1)
    first = r * n
    columns, depths = tl.arange(0, N_UPPER), tl.arange(0, D_UPPER)
    chosen = tl.zeros([N_UPPER], tl.int32)
    path = tl.where(depths == 0, tl.load(retrieve_index + first), -1)

    node = tl.full([], 0, tl.int64)
    accepted = tl.full([], 0, tl.int32)
    passed = tl.full([], 0.0, tl.float32)
    coin = tl.load(coins + first)
    child = tl.full([], -1, tl.int64)
    if num_steps > 0:
        child = tl.load(retrieve_next_token + first)
    looked_at = 0
    while (child != -1) & (looked_at < n):  # links in a ring end here
        looked_at += 1
        token = tl.load(candidates + first + child)
        p = tl.load(target_probs + (first + node) * vocab + token)
        passed += p
        if (coin * threshold_acc < passed) | (p >= threshold_single):
            chosen = tl.where(columns == node, token.to(tl.int32), chosen)
            accepted += 1
            path = tl.where(depths == accepted, tl.load(retrieve_index + first + child), path)
            coin = tl.load(coins + first + child)
            node, passed = child, tl.full([], 0.0, tl.float32)
            child = tl.load(retrieve_next_token + first + child)
            if accepted == num_steps:
                child = tl.full([], -1, tl.int64)
        else:
            child = tl.load(retrieve_next_sibling + first + child)

    row, rest = _row_and_rest(
        candidates, retrieve_next_token, retrieve_next_sibling, target_probs, first, node, tile, n, vocab,
        accepted == num_steps, BLOCK,
    )  # fmt: skip
    tl.store(sums + r * 2 * tiles + tile, tl.sum(rest, 0))
    tl.store(sums + r * 2 * tiles + tiles + tile, tl.sum(row, 0))
    if tile == 0:
        rows = tl.load(retrieve_index + first + columns, columns < n, other=0)
        tl.store(predict + rows, chosen, columns < n)
        tl.store(accept_index + r * (num_steps + 1) + depths, path.to(tl.int32), depths <= num_steps)
        tl.store(accept_token_num + r, accepted)
        tl.store(end + r, node)


@triton.jit
def _draw_kernel(
    candidates,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    target_probs,
    coins,
    final_coins,
    predict,
    accept_token_num,
    end,
    sums,
    n,
    vocab,
    num_steps,
    tiles,
    REUSE_COIN: tl.constexpr,
    T_UPPER: tl.constexpr,  # tiles, rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """Program r draws request r's last token."""
    r = tl.program_id(0).to(tl.int64)
    first = r * n
    node = tl.load(end + r)
    if REUSE_COIN:
        coin = tl.load(coins + first + node)
    else:
        coin = tl.load(final_coins + r)
    lanes = tl.arange(0, T_UPPER)
    rest_sums = tl.load(sums + r * 2 * tiles + lanes, lanes < tiles, other=0.0)
    row_sums = tl.load(sums + r * 2 * tiles + tiles + lanes, lanes < tiles, other=0.0)
    is_left, tile, before, threshold = find_tile(rest_sums, row_sums, coin, T_UPPER)
    row, rest = _row_and_rest(
        candidates, retrieve_next_token, retrieve_next_sibling, target_probs, first, node, tile, n, vocab,
        tl.load(accept_token_num + r) == num_steps, BLOCK,
    )  # fmt: skip
    token = tile * BLOCK + first_beyond(tl.where(is_left, rest, row), before, threshold, BLOCK)
    tl.store(predict + tl.load(retrieve_index + first + node), token)


def tree_sampling_target_only_triton(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    num_steps: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    reuse_coin: bool = False,
) -> Walk:
    """The kernels' launches: walk and sum, then draw."""
    (b, n, vocab), device = target_probs.shape, target_probs.device
    predict = torch.empty(b * n, dtype=torch.int32, device=device)
    accept_index = torch.empty(b, num_steps + 1, dtype=torch.int32, device=device)
    accept_token_num = torch.empty(b, dtype=torch.int32, device=device)
    if not b:
        return predict, accept_index, accept_token_num
    block = min(triton.next_power_of_2(vocab), 2048)
    tiles = triton.cdiv(vocab, block)
    end = torch.empty(b, dtype=torch.int64, device=device)
    sums = torch.empty(b, 2, tiles, device=device)
    links = (candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_probs, coins)
    _walk_kernel[(b, tiles)](
        *links,
        predict,
        accept_index,
        accept_token_num,
        end,
        sums,
        n,
        vocab,
        num_steps,
        threshold_single,
        threshold_acc,
        N_UPPER=triton.next_power_of_2(n),
        D_UPPER=triton.next_power_of_2(num_steps + 1),
        BLOCK=block,
        num_warps=4,
    )
    _draw_kernel[(b,)](
        *links,
        final_coins,
        predict,
        accept_token_num,
        end,
        sums,
        n,
        vocab,
        num_steps,
        tiles,
        REUSE_COIN=reuse_coin,
        T_UPPER=triton.next_power_of_2(tiles),
        BLOCK=block,
        num_warps=4,
    )
    return predict, accept_index, accept_token_num


def tree_sampling_target_only(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    num_steps: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    reuse_coin: bool = False,
    backend: str = "auto",
) -> Walk:
    """candidates i64 (b, N), column 0 the root; links i64 (b, N) as `build_tree` gives them, leading to later columns;
    target_probs f32 (b, N, V): the target's law after each node; coins f32 (b, N), one for each node, and final_coins
    f32 (b), all in [0, 1). The rows of target_probs hold no NaN. At most num_steps (up to 511) drafts are accepted.

    Returns (predict i32 (b*N): the token after each accepted node, the last one drawn, 0 elsewhere; accept_index i32
    (b, num_steps+1): global rows of the accepted path, root first, -1 padded; accept_token_num i32 (b): the drawn
    token excluded). The draw is from the row where the walk ends without its rejected children, or from the whole row
    where nothing else is left. Raises ValueError for other shapes or types, for thresholds outside of [0, 1], and,
    where values are checked, for tokens, links or coins out of range.
    """
    run = choose(
        backend,
        device_of("target_probs", target_probs),
        tree_sampling_target_only_torch,
        tree_sampling_target_only_triton,
    )
    device = target_probs.device
    check_tensor("target_probs", target_probs, (None, None, None), torch.float32)
    b, n, vocab = target_probs.shape
    check_size("the number of nodes in target_probs", n)
    check_size("the vocabulary of target_probs", vocab)
    check_size("num_steps", num_steps, at_least=0, at_most=MOST_NODES - 1)
    links = {"retrieve_next_token": retrieve_next_token, "retrieve_next_sibling": retrieve_next_sibling}
    for name, x in {"candidates": candidates, "retrieve_index": retrieve_index, **links}.items():
        check_tensor(name, x, (b, n), device=device)
    check_tensor("coins", coins, (b, n), torch.float32, device)
    check_tensor("final_coins", final_coins, (b,), torch.float32, device)
    check_number("threshold_single", threshold_single, 0, 1)
    check_number("threshold_acc", threshold_acc, 0, 1)
    check_flag("reuse_coin", reuse_coin)
    check_bounds("candidates", candidates, 0, vocab)
    if values_are_checked(device):
        check_retrieve_index(retrieve_index)
    for name, x in links.items():
        check_bounds(name, x, -1, n)
        if values_are_checked(device) and bool(((x != -1) & (x <= torch.arange(n, device=device))).any()):
            raise ValueError(f"{name} leads back to its own or an earlier column, so that a walk might never end")
    check_coins("coins", coins)
    check_coins("final_coins", final_coins)
    count_launch("tree_sampling_target_only")
    return run(
        candidates,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        target_probs,
        coins,
        final_coins,
        num_steps,
        threshold_single,
        threshold_acc,
        reuse_coin,
    )
