"""The frozen-KV assistant: a draft model without keys and values, which reads the target's.

What the target thought of every committed token stands in its cache already. The assistant has layers with queries
only: each attends the keys and values that a layer of the target's left there. So it needs no pool, no prefill, no
extend, and there is nothing to give back after its loop: it writes nothing at all.

It is fed the embedding of a token beside a hidden state: first the bonus token's beside the target's hidden state of
the last committed token, after that each draft's beside the hidden state that the assistant gave for it. Drafts leave
no keys. What a step knows of the ones before it is in the hidden state alone.

**Positions.** Every step of a round, the first and all others, is at the position of the newest token in the target's
cache, seq_len - 1, and sees the seq_len committed tokens. The position only turns queries, and the keys that they are
measured against end there; it does not count drafts.

Embedding and lm_head are the target's. SGLang's assistant (Gemma 4) has a width of its own, with a product that leads
back to the target's, and its own output head; here the widths are equal, and neither is needed.

Source: SGLang: python/sglang/srt/models/gemma4_mtp.py:Gemma4AssistantForCausalLM,
python/sglang/srt/speculative/frozen_kv_mtp_worker_v2.py and frozen_kv_mtp_utils.py:set_frozen_kv_positions @0.5.23
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refspec.memory.kv_pool import PoolLayout
from refspec.models.llama import LlamaConfig, LlamaForCausalLM, LlamaMLP, RMSNorm, rope_rotations, rotate


class ReadOnlyAttention(Protocol):
    """The part of runtime.runner's attentions that is used here."""

    def read_only(self, layer_id: int, q: Tensor) -> Tensor:
        """q (n, heads, dim) over what the target's layer layer_id has cached -> (n, heads, dim)."""


class FrozenKVAssistant(nn.Module):
    """A draft model over the target's own cache. It is to be served by a runner over the target's pool.

    config: its own sizes; hidden_size, vocab_size, num_key_value_heads, head_dim and rope_theta, by which keys were
        turned, must equal the target's.
    target_layers: for each of its layers, the target's layer whose keys and values it attends, counted from 0.
    Raises ValueError for what does not fit.
    """

    def __init__(self, config: LlamaConfig, target: LlamaForCausalLM, target_layers: Sequence[int]) -> None:
        super().__init__()
        for name in ("hidden_size", "vocab_size", "num_key_value_heads", "head_dim", "rope_theta"):
            ours, theirs = getattr(config, name), getattr(target.config, name)
            if ours != theirs:
                raise ValueError(f"the assistant's {name} is {ours}, its target's is {theirs}: they must be equal")
        layers = target.config.num_hidden_layers
        if len(target_layers) != config.num_hidden_layers or not all(0 <= layer < layers for layer in target_layers):
            raise ValueError(
                f"target_layers is {list(target_layers)}, it must name a layer of the target, 0 to {layers - 1}, for "
                f"each of the assistant's {config.num_hidden_layers}"
            )
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.target_layers = config, tuple(target_layers)
        self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.pre_projection = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(QueryLayer(config, layer) for layer in target_layers)
        self.norm = RMSNorm(size, eps)
        # Kept out of the module tree: shared with the target, neither saved nor trained with the assistant.
        self.shared = (target.embed_tokens, target.lm_head)
        self._target_config = target.config

    @property
    def kv_layout(self) -> PoolLayout:
        """The target's: it is the target's pool that the assistant is served over."""
        return self._target_config.kv_layout(self.pre_projection.weight.dtype)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: ReadOnlyAttention, hidden_states: Tensor) -> Tensor:
        """input_ids, positions i64 (n); hidden_states (n, hidden_size). Returns hidden states (n, hidden_size), normed.

        They are what lm_head reads, and what the next step is fed.
        """
        embeds = self.shared[0](input_ids)
        hidden_states = hidden_states.to(embeds.dtype)
        x = self.pre_projection(torch.cat([self.enorm.forward(embeds), self.hnorm.forward(hidden_states)], dim=-1))
        rotations = rope_rotations(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer.forward(x, rotations, attend)
        return self.norm.forward(x)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (n, hidden_size) -> (n, vocab_size), through the target's lm_head."""
        return self.shared[1](hidden_states)


class QueryLayer(nn.Module):
    """A decoder layer that has queries, and looks them up in the cache of the target's layer target_layer."""

    def __init__(self, config: LlamaConfig, target_layer: int) -> None:
        super().__init__()
        self.target_layer, self.heads, self.dim = target_layer, config.num_attention_heads, config.head_dim
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, rotations: Tensor, attend: ReadOnlyAttention) -> Tensor:
        """x (n, hidden_size) -> (n, hidden_size)."""
        q = F.linear(self.input_layernorm.forward(x), self.q_proj.weight).view(len(x), self.heads, self.dim)
        seen = attend.read_only(self.target_layer, rotate(q, rotations))
        x = x + F.linear(seen.flatten(1), self.o_proj.weight)
        return x + self.mlp.forward(self.post_attention_layernorm.forward(x))
