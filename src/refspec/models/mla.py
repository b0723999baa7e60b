"""A decoder with multi-head latent attention (MLA), as DeepSeek's are: small, and with random weights.

Instead of keys and values for every head, the cache holds one row a token: a latent, from which all heads' keys and
values could be made, and a rotary key that they share. A key is W_k · latent beside the rotary key, a value is
W_v · latent.

Nobody makes them. q · (W_k · latent) is (W_kᵀ · q) · latent: so each head's query is brought into the latent's space,
the *absorbed* form, and attention runs over the rows as they are cached, with one KV head, whose values are the front
of its keys. Its answer, a mixture of latents, is made a mixture of values by W_v. Prefill could do better with keys and
values made once, since it reads each of them many times, and SGLang does so; here every forward is absorbed.

There are no trained weights for it: it is a model to try the pool with, and `random_weights` fills it.

Source: DeepSeek-V2 (DeepSeek-AI 2024, section 2.1); SGLang: python/sglang/srt/models/deepseek_v2.py:
DeepseekV2AttentionMLA @0.5.23
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from refspec.memory.kv_pool import MLALayout, PoolLayout
from refspec.models.llama import LlamaMLP, RMSNorm, embedding, rope_rotations, rotate


class LatentAttention(Protocol):
    """The part of runtime.runner's attentions that is used here."""

    def __call__(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q (n, heads, width), k (n, 1, width), v the front of k -> (n, heads, width of v)."""


@dataclass(frozen=True)
class MLAConfig:
    """Sizes count elements, and are called as in DeepSeek's config.json.

    q_lora_rank: queries come from a latent of their own, of so many; None: straight from the hidden state.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even for rotary embeddings, got {self.qk_rope_head_dim}")

    def kv_layout(self, dtype: torch.dtype) -> PoolLayout:
        return MLALayout(self.num_hidden_layers, self.kv_lora_rank, self.qk_rope_head_dim, dtype)


class MLAttention(nn.Module):
    """Multi-head latent attention in the absorbed form."""

    def __init__(self, config: MLAConfig, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.config = layer_id, config
        size, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        nope, rope, values = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        if config.q_lora_rank is not None:
            self.q_a_proj = nn.Linear(size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_proj = nn.Linear(config.q_lora_rank or size, heads * (nope + rope), bias=False)
        self.kv_a_proj = nn.Linear(size, rank + rope, bias=False)
        self.kv_a_layernorm = RMSNorm(rank, config.rms_norm_eps)
        self.k_b_proj = nn.Parameter(torch.empty(heads, nope, rank))
        self.v_b_proj = nn.Parameter(torch.empty(heads, values, rank))
        self.o_proj = nn.Linear(heads * values, size, bias=False)
        self.scale = float(nope + rope) ** -0.5

    def forward(self, x: Tensor, rotations: Tensor, attend: LatentAttention) -> Tensor:
        """x (n, hidden_size) -> (n, hidden_size)."""
        q, k, v = self.absorbed(self.query_input(x), x, rotations)
        return self.output(attend(self.layer_id, q, k, v, scale=self.scale))

    def query_input(self, x: Tensor) -> Tensor:
        """What queries are made of: their latent (n, q_lora_rank), or x itself."""
        return x if self.config.q_lora_rank is None else self.q_a_layernorm(self.q_a_proj(x))

    def absorbed(self, query_input: Tensor, x: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (n, heads, rank + rope), keys (n, 1, rank + rope) and values (n, 1, rank), the front of the keys."""
        config = self.config
        q = self.q_proj(query_input).view(len(x), config.num_attention_heads, -1)
        q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.kv_a_proj(x).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)[:, None]
        k = torch.cat([latent, rotate(k_rope[:, None].contiguous(), rotations)], dim=-1)
        q_latent = torch.einsum("nhd,hdr->nhr", q_nope, self.k_b_proj)
        return torch.cat([q_latent, rotate(q_rope.contiguous(), rotations)], dim=-1), k, latent

    def output(self, mixtures: Tensor) -> Tensor:
        """Mixtures of latents (n, heads, rank) -> (n, hidden_size)."""
        return self.o_proj(torch.einsum("nhr,hvr->nhv", mixtures, self.v_b_proj).flatten(1))


class MLALayer(nn.Module):
    """Attention and MLP, each added to the residual stream. attention: an MLAttention, or one that derives from it."""

    def __init__(self, config: MLAConfig, attention: MLAttention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, rotations: Tensor, attend: LatentAttention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotations, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class MLAForCausalLM(nn.Module):
    """A target model over an MLATokenToKVPool."""

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MLALayer(config, self.attention(i)) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def attention(self, layer_id: int) -> MLAttention:
        """That of a layer."""
        return MLAttention(self.config, layer_id)

    @property
    def kv_layout(self) -> PoolLayout:
        return self.config.kv_layout(self.lm_head.weight.dtype)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: LatentAttention, hidden_states: Tensor | None = None
    ) -> Tensor:
        """input_ids, positions i64 (n) -> the final, normed hidden states (n, hidden_size). It is fed none itself."""
        x = self.embed_tokens(input_ids)
        rotations = rope_rotations(positions, self.config.qk_rope_head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, rotations, attend)
        return self.norm(x)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(n, hidden_size) -> (n, vocab_size)."""
        return self.lm_head(hidden_states)


def random_weights(model: nn.Module, seed: int) -> None:
    """In place: matrices that keep the size of what they multiply, and norms that are not all ones, always the same for
    a seed. Afterwards the model is ready for inference.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    model.requires_grad_(False).eval()
