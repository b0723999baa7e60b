"""Rejection sampling along a chain, classic and block: SGLang's kernel of 0.5.23."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from refspec.kernels import chain_rejection_sampling
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.operations.tree_sampling_target_only import draw_one, near, random_rows
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any length of chain; the draft's law is another one, near the target's, the same, or one-hot."""
    steps = rng.randint(1, size.nodes - 1)
    vocab = rng.choice([2, 5, 33, rng.randint(2, 1000)])
    return case(rng, rng.randint(1, size.batch), steps, vocab, rng.choice(["other", "near", "same", "one-hot"]))


def edges() -> dict[str, Inputs]:
    """No requests, no drafts, one draft, one token, a long vocabulary, coins of 0; a q that is no probability."""
    rng = random.Random(0)
    zero_coins = case(rng, 2, 3, 5, "near")
    zero_coins["coins"].zero_()
    zero_coins["final_coins"].zero_()
    broken = case(rng, 3, 2, 5, "near")
    broken["draft_probs"][:, :, 1] = torch.tensor([torch.nan, -1.0, torch.inf])[:, None]
    broken["block_verification"] = False  # SGLang's block rule sums such entries as they are
    return {
        "no requests": case(rng, 0, 2, 5, "near"),
        "no drafts": case(rng, 2, 0, 5, "near"),
        "one draft": case(rng, 2, 1, 5, "other"),
        "one token": case(rng, 2, 2, 1, "same"),
        "the same law": case(rng, 3, 7, 1000, "same"),
        "a long vocabulary, classic": {**case(rng, 2, 4, 5000, "near"), "block_verification": False},
        "a long vocabulary, block": {**case(rng, 2, 4, 5000, "near"), "block_verification": True},
        "coins of 0": zero_coins,
        "no probabilities": broken,
    }


def case(rng: random.Random, b: int, steps: int, vocab: int, kind: str) -> Inputs:
    """b chains of that many drafts, drawn from a draft's law of that kind."""
    torch.manual_seed(rng.randrange(2**31))
    target = random_rows(b, steps + 1, vocab)
    if kind == "same":
        draft = target[:, :-1].clone()
    elif kind == "near":
        draft = (target[:, :-1] * torch.rand(b, steps, vocab).add(0.5)) + 1e-9
        draft = draft / draft.sum(-1, keepdim=True)
    else:
        draft = random_rows(b, steps, vocab)
    if kind == "one-hot":
        draft = torch.zeros_like(draft).scatter_(2, draft.argmax(2, keepdim=True), 1.0)
    candidates = torch.zeros(b, steps + 1, dtype=torch.int64)
    if b and steps:
        candidates[:, 1:] = torch.multinomial(draft.flatten(0, 1), 1).view(b, steps)
    return {
        "candidates": candidates,
        "target_probs": target,
        "draft_probs": draft,
        "coins": torch.rand(b, steps),
        "final_coins": torch.rand(b),
        "block_verification": rng.random() < 0.5,
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The three results, by name."""
    return _outputs(*chain_rejection_sampling(**inputs, backend=backend))


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by chain_speculative_sampling_triton."""
    sampling = sources.module("kernels/ops/speculative/reject_sampling.py")
    candidates = inputs["candidates"]
    b, n = candidates.shape
    predict = candidates.new_zeros(b * n, dtype=torch.int32)
    accept_index = candidates.new_full((b, n), -1, dtype=torch.int32)
    accept_token_num = candidates.new_zeros(b, dtype=torch.int32)
    sampling.chain_speculative_sampling_triton(
        predict,
        accept_index,
        accept_token_num,
        candidates,
        torch.arange(b * n, device=candidates.device).view(b, n),
        None,  # the links of a tree are not looked at
        None,
        inputs["coins"],
        inputs["final_coins"],
        inputs["target_probs"],
        inputs["draft_probs"],
        1.0,  # nor are thresholds
        1.0,
        True,
        block_verification=inputs["block_verification"],
    )
    return _outputs(predict, accept_index, accept_token_num)


def _outputs(predict: Tensor, accept_index: Tensor, accept_token_num: Tensor) -> Outputs:
    return {"predict": predict, "accept_index": accept_index, "accept_token_num": accept_token_num}


def in_float64(inputs: Inputs) -> tuple[Outputs, bool]:
    """The answer, one request and one draft after the other; and did a coin come near a border on the way?"""
    b, n = inputs["candidates"].shape
    predict, accept_index, accept_token_num = [0] * (b * n), [[-1] * n for _ in range(b)], [0] * b
    border = False
    for r in range(b):
        tokens, p, q = (inputs[name][r].double() for name in ("candidates", "target_probs", "draft_probs"))
        ids, coins = [int(token) for token in tokens], inputs["coins"][r].tolist()
        q = torch.where((q >= 0) & (q <= 1), q, 0.0)
        accepted, h, scale = 0, 1.0, 1.0
        for i in range(1, n):
            p_i, q_i = float(p[i - 1, ids[i]]), float(q[i - 1, ids[i]])
            if not inputs["block_verification"]:
                border |= q_i > 0 and near(coins[i - 1] * q_i, p_i)
                if not coins[i - 1] * q_i < p_i or q_i == 0:
                    break
                accepted = i
                continue
            h = min(h * p_i / q_i, 1.0) if q_i > 0 else 0.0
            rule = h
            if i < n - 1 and 0 < h < 1:
                left = float((h * p[i] - q[i]).clamp(min=0).sum())
                rule = left / (left + 1 - h)
            border |= near(coins[i - 1], rule)
            if coins[i - 1] < rule:
                accepted, scale = i, h
        rest = (scale * p[accepted] - q[accepted]).clamp(min=0) if accepted < n - 1 else p[accepted]
        token, near_border = draw_one(rest, p[accepted], float(inputs["final_coins"][r]))
        border |= near_border
        for column in range(accepted):
            predict[r * n + column] = ids[column + 1]
        predict[r * n + accepted] = token
        accept_index[r][: accepted + 1] = range(r * n, r * n + accepted + 1)
        accept_token_num[r] = accepted
    i32 = torch.int32
    outputs = _outputs(
        torch.tensor(predict, dtype=i32),
        torch.tensor(accept_index, dtype=i32).view(b, n),
        torch.tensor(accept_token_num, dtype=i32),
    )
    return outputs, border


OPERATION = Operation(
    name="chain_rejection_sampling",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/reject_sampling.py:chain_speculative_sampling_triton @0.5.23",
    sglang_takes=lambda inputs: len(inputs["candidates"]) > 0,  # a grid of no programs is refused
    borderline=lambda inputs: in_float64(inputs)[1],
)
