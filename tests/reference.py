"""Slow references that are right at a glance, to judge the real thing by.

Trees are lists of nodes, beams are sorted by hand, a LLaMA is written as in its paper and with the weights as they lie
in the file. Nothing here is shared with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Node:
    """One candidate. Its place in the pool is its pool index."""

    token: int
    parent: int  # pool index, -1: the root
    score: np.float32


def best_first(nodes: Sequence[Node], among: Sequence[int]) -> list[int]:
    """Pool indices by score, then by place."""
    return sorted(among, key=lambda i: (-nodes[i].score, i))


def grow(children: Sequence[Sequence[Sequence[tuple[float, int]]]], topk: int) -> tuple[list[Node], list[list[int]]]:
    """The pool of one request, and the beam of each level as pool indices.

    children[level][branch]: the k (probability, token) pairs below that branch of the level's beam; one branch, the
    root, at level 0.
    """
    pool: list[Node] = []
    beams: list[list[int]] = []
    beam = [-1]
    for level in children:
        first = len(pool)
        for parent, below in zip(beam, level, strict=True):
            score = np.float32(1) if parent == -1 else pool[parent].score
            pool += [Node(token, parent, np.float32(p) * score) for p, token in below]
        beam = best_first(pool, range(first, len(pool)))[:topk]
        beams.append(beam)
    return pool, beams


@dataclass
class Tree:
    """What the target verifies, for one request. Column 0 is the root."""

    parents: list[int]  # column, -1: none
    positions: list[int]
    mask: list[list[bool]]  # [row][column]
    first_child: list[int]
    next_sibling: list[int]


def tree_of(parents: Sequence[int], seq_len: int) -> Tree:
    n = len(parents)

    def path(column: int) -> list[int]:
        return [] if column == -1 else [*path(parents[column]), column]

    children = [[c for c in range(n) if parents[c] == column] for column in range(-1, n)]
    siblings = {c: group for group in children for c in group}
    return Tree(
        parents=list(parents),
        positions=[seq_len + len(path(column)) - 1 for column in range(n)],
        mask=[[other in path(column) for other in range(n)] for column in range(n)],
        first_child=[min(children[column + 1], default=-1) for column in range(n)],
        next_sibling=[min((s for s in siblings[c] if s > c), default=-1) for c in range(n)],
    )


def tree_of_kept(pool: Sequence[Node], kept: Sequence[int], seq_len: int) -> Tree:
    column_of = {-1: 0, **{index: column for column, index in enumerate(kept, start=1)}}
    return tree_of([-1, *(column_of[pool[index].parent] for index in kept)], seq_len)


def walk(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> list[int]:
    """Columns of the accepted path, root first."""
    path = [0]
    while True:
        fits = [c for c in range(len(tokens)) if parents[c] == path[-1] and tokens[c] == choices[path[-1]]]
        if not fits:
            return path
        path.append(min(fits))


# --- models, with the weights as a file holds them ----------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate_half(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x (n, heads, dim): dimension i is paired with i + dim/2, as Hugging Face does."""
    half = x.shape[-1] // 2
    angles = positions[:, None].to(x) * theta ** (-torch.arange(half).to(x) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def softmax_attention(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """One row at a time: q (n, heads, dim), keys (m, kv_heads, dim), values (m, kv_heads, width), seen bool (n, m) ->
    (n, heads, width).
    """
    n, heads, dim = q.shape
    group = heads // keys.shape[1]
    out = q.new_zeros(n, heads, values.shape[-1])
    for row in range(n):
        columns = [c for c in range(len(keys)) if seen[row, c]]
        for head in range(heads):
            scores = torch.stack([q[row, head] @ keys[c, head // group] for c in columns]) / dim**0.5
            weights = scores.exp() / scores.exp().sum()
            out[row, head] = sum(w * values[c, head // group] for w, c in zip(weights, columns, strict=True))
    return out


def decoder_layer(
    x: Tensor, weights: Mapping[str, Tensor], layer: str, raw: Mapping[str, Any], positions: Tensor, input_norm: bool
) -> Tensor:
    """One layer over a whole text: every row attends the rows up to its own."""

    w, eps = {name: tensor.double() for name, tensor in weights.items()}, raw["rms_norm_eps"]
    y = rms_norm(x, w[f"{layer}.input_layernorm.weight"], eps) if input_norm else x
    x = x + self_attention(y, w, layer, raw, positions)
    return x + swiglu(rms_norm(x, w[f"{layer}.post_attention_layernorm.weight"], eps), w, layer)


def self_attention(
    y: Tensor, w: Mapping[str, Tensor], layer: str, raw: Mapping[str, Any], positions: Tensor | None = None
) -> Tensor:
    """Every row attends the rows up to its own; positions 0, 1, 2, ... unless given."""
    positions = torch.arange(len(y)) if positions is None else positions

    def heads(name: str, count: int) -> Tensor:
        return (y @ w[f"{layer}.self_attn.{name}_proj.weight"].T).unflatten(-1, (count, -1))

    theta, kv_heads = raw["rope_theta"], raw["num_key_value_heads"]
    q = rotate_half(heads("q", raw["num_attention_heads"]), positions, theta)
    k = rotate_half(heads("k", kv_heads), positions, theta)
    causal = torch.ones(len(y), len(y), dtype=torch.bool).tril()
    return softmax_attention(q, k, heads("v", kv_heads), causal).flatten(1) @ w[f"{layer}.self_attn.o_proj.weight"].T


def swiglu(y: Tensor, w: Mapping[str, Tensor], layer: str) -> Tensor:
    gate, up = y @ w[f"{layer}.mlp.gate_proj.weight"].T, y @ w[f"{layer}.mlp.up_proj.weight"].T
    return (gate / (1 + (-gate).exp()) * up) @ w[f"{layer}.mlp.down_proj.weight"].T


def llama(weights: Mapping[str, Tensor], raw: Mapping[str, Any], ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Hidden states (n, H) and logits (n, V) of a whole text, in float64."""
    x = weights["model.embed_tokens.weight"].double()[list(ids)]
    for layer in range(raw["num_hidden_layers"]):
        x = decoder_layer(x, weights, f"model.layers.{layer}", raw, torch.arange(len(ids)), input_norm=True)
    x = rms_norm(x, weights["model.norm.weight"].double(), raw["rms_norm_eps"])
    tied = raw.get("tie_word_embeddings", False)
    return x, x @ weights["model.embed_tokens.weight" if tied else "lm_head.weight"].double().T


def eagle_head(
    weights: Mapping[str, Tensor],
    raw: Mapping[str, Any],
    target: Mapping[str, Tensor],
    ids: Sequence[int],
    hidden_states: Tensor,
) -> tuple[Tensor, Tensor]:
    """Guessed hidden states and logits for rows of ids, each beside the hidden state of the token before it."""
    embeds = target["model.embed_tokens.weight"].double()[list(ids)]
    x = torch.cat([embeds, hidden_states.double()], dim=-1) @ weights["fc.weight"].double().T
    for layer in range(raw["num_hidden_layers"]):
        x = decoder_layer(x, weights, f"layers.{layer}", raw, torch.arange(len(ids)), input_norm=layer > 0)
    return x, x @ target["lm_head.weight"].double().T


def eagle3_head(
    weights: Mapping[str, Tensor], raw: Mapping[str, Any], embeds: Tensor, hidden_states: Tensor
) -> tuple[Tensor, Tensor]:
    """Hidden states before the last norm, and logits, for rows of embeddings, each beside what it is fed."""
    w, eps, size = {name: tensor.double() for name, tensor in weights.items()}, raw["rms_norm_eps"], embeds.shape[1]
    g = hidden_states.double()
    if g.shape[1] > size:
        low, mid, high, _ = g.chunk(4, dim=1)
        g = torch.cat([low, mid, high], dim=1) @ w["fc.weight"].T
    e = rms_norm(embeds.double(), w["midlayer.input_layernorm.weight"], eps)
    both = torch.cat([e, rms_norm(g, w["midlayer.hidden_norm.weight"], eps)], dim=1)
    x = g + self_attention(both, w, "midlayer", raw)
    y = rms_norm(x, w["midlayer.post_attention_layernorm.weight"], eps)
    x = x + swiglu(y, w, "midlayer")
    return x, rms_norm(x, w["norm.weight"], eps) @ w["lm_head.weight"].T


def mtp_layer(
    weights: Mapping[str, Tensor], raw: Mapping[str, Any], i: int, embeds: Tensor, hidden_states: Tensor
) -> Tensor:
    """Normed hidden states of MTP layer i, for rows of embeddings, each beside what it is fed."""
    w, eps, layer = (
        {name: tensor.double() for name, tensor in weights.items()},
        raw["rms_norm_eps"],
        f"model.layers.{i}",
    )
    e = rms_norm(embeds.double(), w[f"{layer}.enorm.weight"], eps)
    h = rms_norm(hidden_states.double(), w[f"{layer}.hnorm.weight"], eps)
    x = torch.cat([e, h], dim=1) @ w[f"{layer}.eh_proj.weight"].T
    x = decoder_layer(x, weights, layer, raw, torch.arange(len(x)), input_norm=True)
    return rms_norm(x, w[f"{layer}.shared_head.norm.weight"], eps)
