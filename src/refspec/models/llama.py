"""A LLaMA-style decoder, written so that one forward serves training, prefill, decode and tree verify.

The model never sees a cache. Rows arrive flat, each with a token id and a position; every attention layer
hands its queries, keys and values to an `attend` callable and gets the attended values back. Who may attend
to whom, and where keys and values are kept, is that callable's business: `runtime/runner.py` passes one that
works on the KV pool, `scripts/train_tiny.py` one that is plain causal attention.

Source: LLaMA (Touvron et al. 2023, section 2.2); RoPE (Su et al. 2021, section 3.2.2);
SGLang: python/sglang/srt/models/llama.py:LlamaForCausalLM @v0.5.5
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refspec.memory.kv_pool import KVLayout, PoolLayout, SWALayout

# attend(layer_id, q (n, heads, dim), k (n, kv_heads, dim), v (n, kv_heads, dim)) -> (n, heads, dim)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LlamaConfig:
    """The fields of a Hugging Face `config.json` that this architecture reads. Sizes count elements.

    windows: for each layer how many positions it attends, its own the last of them, or None for all; () for all layers.
        The files that `checkpoint.py` reads know no such thing: these are for models that are made here.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not (self.rope_theta > 0 and self.rms_norm_eps >= 0):
            raise ValueError(
                f"rope_theta must be above 0 and rms_norm_eps at least 0, got {self.rope_theta}, {self.rms_norm_eps}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.windows and len(self.windows) != self.num_hidden_layers:
            raise ValueError(f"windows has {len(self.windows)} entries for {self.num_hidden_layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows is {self.windows}: a layer must attend at least 1 position")

    def kv_layout(self, dtype: torch.dtype) -> PoolLayout:
        """The layers' windows are a matter of the pool, which `attend` asks for them."""
        if self.windows:
            return SWALayout(self.windows, self.num_key_value_heads, self.head_dim, dtype)
        return KVLayout(self.num_hidden_layers, self.num_key_value_heads, self.head_dim, dtype)


def rope_rotations(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """One unit complex number per row and pair of head dimensions.

    Computed, not looked up: a table would have an end, and draft positions may run past the context.
    positions: i64 (n,). Returns complex64, or complex128 for a float64 model, (n, 1, head_dim / 2).
    """
    real = torch.float64 if dtype == torch.float64 else torch.float32
    angles = positions.to(real)[:, None, None] * _rope_frequencies(head_dim, theta, real, positions.device)
    return torch.polar(torch.ones_like(angles), angles)


@functools.cache
def _rope_frequencies(head_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians per position of each pair of dimensions: (head_dim / 2)."""
    return theta ** -(torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim)


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Turn each pair of neighbouring dimensions of x (n, heads, dim) by its row's angle.

    Hugging Face pairs dimension i with i + dim/2; `checkpoint.py` reorders the rows of q and k when it
    loads, so that a pair sits side by side and one complex product does the work. Scores do not change:
    queries and keys are permuted alike.
    """
    pairs = torch.view_as_complex(x.to(rotations.real.dtype).view(*x.shape[:2], -1, 2))
    return torch.view_as_real(pairs * rotations).view(x.shape).to(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean of its squares + eps), times a weight for each dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LlamaAttention(nn.Module):
    """Queries, keys and values by one product; q and k turned by their position; the rest is `attend`'s.

    input_size: of the rows that it reads; None: the hidden size, which is what it gives back in any case.
    """

    def __init__(self, config: LlamaConfig, layer_id: int, input_size: int | None = None) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv_proj = nn.Linear(input_size or config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        qkv = F.linear(x, self.qkv_proj.weight).view(len(x), -1, self.dim)
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(qk, rotations).split([self.heads, self.kv_heads], dim=1)
        return F.linear(attend(self.layer_id, q, k, v).flatten(1), self.o_proj.weight)


class MLPSizes(Protocol):
    """The part of a model's configuration that its MLPs read."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


class LlamaMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: MLPSizes) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up_proj.weight).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj.weight)


class LlamaLayer(nn.Module):
    """Attention and MLP, each added to the residual stream.

    The parts are called by their `forward`, and products made on their weights: for one row, and decoding is made of
    such, what torch does when a module is *called* takes as long as some of the products.

    input_norm=False leaves the first norm out: an EAGLE head's layer reads what `fc` gives it as it is.
    """

    def __init__(self, config: LlamaConfig, layer_id: int, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if input_norm else nn.Identity()
        self.self_attn = LlamaAttention(config, layer_id)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn.forward(self.input_layernorm.forward(x), rotations, attend)
        return x + self.mlp.forward(self.post_attention_layernorm.forward(x))


def embedding(vocab_size: int, hidden_size: int) -> nn.Embedding:
    """nn.Embedding(vocab_size, hidden_size). On the meta device, where there is nothing to draw, it draws nothing:
    torch has no kernel for that, and imports its whole compiler instead, which takes a second.
    """
    weight = torch.empty(vocab_size, hidden_size)
    if not weight.is_meta:
        nn.init.normal_(weight)
    return nn.Embedding.from_pretrained(weight, freeze=False)


class LlamaForCausalLM(nn.Module):
    """The target model, and the standalone draft model."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def kv_layout(self) -> PoolLayout:
        return self.config.kv_layout(self.lm_head.weight.dtype)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, hidden_states: Tensor | None = None
    ) -> Tensor:
        """input_ids, positions: i64 (n,). Returns the final, normed hidden states (n, hidden_size).

        They are what `lm_head` reads, and what an EAGLE head is fed. This model itself is fed no hidden states.
        """
        for x in self.residual_stream(input_ids, positions, attend):
            last = x
        return self.norm(last)

    def residual_stream(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Iterator[Tensor]:
        """What each layer is given, in order, and then what the last one leaves: L + 1 times (n, hidden_size)."""
        x = self.embed_tokens(input_ids)
        yield x
        rotations = rope_rotations(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer.forward(x, rotations, attend)
            yield x

    def logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (n, hidden_size) -> (n, vocab_size), in the model's dtype."""
        return self.lm_head(hidden_states)
