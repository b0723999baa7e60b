"""EAGLE-3: a head that reads the target at three depths, and is asked for tokens, not for hidden states.

EAGLE's head imitates the target's last hidden state, and so is told only what that one says. EAGLE-3 is fed what the
target thought on a low, a middle and a high layer, put together by one product (`fc`), and learns from the tokens
alone. Its hidden state is then its own business: no loss ties it to the target's, and inside the draft loop it is fed
back as it is. Two more things follow. The head may answer over a vocabulary of its own, of the target's most frequent
tokens, with an output head of that size; a table leads back. And to hand three layers on, the target must be asked for
them: `FusedTarget` does that.

| what the head is fed | by whom | width |
|---|---|---|
| low, mid, high, final hidden states of the target | extend and prefill | 4H, of which it reads the first 3H |
| its own hidden state, before its last norm | the draft loop | H |

Source: EAGLE-3 (Li et al. 2025, section 3.1); SGLang: python/sglang/srt/models/llama_eagle3.py:LlamaForCausalLMEagle3
and models/llama.py:LlamaForCausalLM.set_eagle3_layers_to_capture @0.5.23
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from refspec.memory.kv_pool import PoolLayout
from refspec.models.llama import (
    Attend,
    LlamaAttention,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaMLP,
    RMSNorm,
    rope_rotations,
)

FEATURES = 3  # low, mid, high


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Which layers' inputs are the low, mid and high features, where nothing else is said.

    A layer's input is what the layer before it leaves. Source: SGLang, as above.
    """
    return 2, num_layers // 2, num_layers - 3


class FusedTarget(nn.Module):
    """A target that says more: its hidden states are (n, 4H), the three features and then the one it had before.

    Everything else is the target's own: weights, keys and values, logits, which read the last H of the 4H.

    feature_layers: the layers whose inputs are the features, counted from 0; num_hidden_layers is what the last one
    leaves. None: the default. Raises ValueError for others.
    """

    def __init__(self, target: LlamaForCausalLM, feature_layers: Sequence[int] | None = None) -> None:
        super().__init__()
        layers = target.config.num_hidden_layers
        chosen = tuple(default_feature_layers(layers) if feature_layers is None else feature_layers)
        if len(chosen) != FEATURES or not all(0 <= layer <= layers for layer in chosen):
            raise ValueError(
                f"feature_layers is {list(chosen)}, it must be {FEATURES} layers from 0 to {layers}, "
                "as many as the target has"
            )
        self.target, self.feature_layers = target, chosen
        self.config = replace(target.config, hidden_size=(FEATURES + 1) * target.config.hidden_size)

    @property
    def kv_layout(self) -> PoolLayout:
        return self.target.kv_layout

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, hidden_states: Tensor | None = None
    ) -> Tensor:
        """input_ids, positions: i64 (n,). Returns (n, 4H): low, mid, high, and the final, normed hidden states."""
        stream = list(self.target.residual_stream(input_ids, positions, attend))
        return torch.cat([*(stream[layer] for layer in self.feature_layers), self.target.norm(stream[-1])], dim=-1)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (n, 4H) -> (n, vocab_size)."""
        return self.target.logits(hidden_states[:, -self.target.config.hidden_size :])


@dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 checkpoint says of itself.

    layer: sizes of the one decoder layer; its hidden_size and vocab_size are the target's, its max_position_embeddings
        and the rest the head's own.
    draft_vocab_size: ids that the head can propose.
    feature_layers: as of FusedTarget; None: the default.

    Raises ValueError, naming the field, for sizes that make no sense.
    """

    layer: LlamaConfig
    draft_vocab_size: int
    feature_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.layer.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}, it must be from 1 to the target's vocab_size, "
                f"{self.layer.vocab_size}"
            )
        if self.layer.num_hidden_layers != 1:
            raise ValueError(f"num_hidden_layers is {self.layer.num_hidden_layers}: an EAGLE-3 head has one layer")

    @property
    def vocab_size(self) -> int:
        """Of the ids that the head is fed, and that are read off it in the end: the target's."""
        return self.layer.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def max_position_embeddings(self) -> int:
        return self.layer.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.layer.eos_token_ids


class Eagle3Head(nn.Module):
    """A draft model that shares the target's embedding, and has a norm and an output head of its own.

    d2t: i64 (draft_vocab_size), offsets: draft id i stands for the target's id i + d2t[i]. All zeros say that both
    vocabularies begin alike, which is what a head without a table has if the sizes are equal.
    """

    def __init__(self, config: Eagle3Config, target: LlamaForCausalLM) -> None:
        super().__init__()
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(config, name), getattr(target.config, name)
            if ours != theirs:
                raise ValueError(f"the EAGLE-3 head's {name} is {ours}, its target's is {theirs}: they must be equal")
        size, eps = config.hidden_size, config.layer.rms_norm_eps
        self.config = config
        self.fc = nn.Linear(FEATURES * size, size, bias=False)
        self.midlayer = Eagle3Layer(config.layer)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        # Kept out of the module tree: shared with the target, neither saved nor trained with the head.
        self.shared = (target.embed_tokens,)

    @property
    def kv_layout(self) -> PoolLayout:
        return self.config.layer.kv_layout(self.fc.weight.dtype)

    @property
    def draft_to_target(self) -> Tensor:
        """i64 (draft_vocab_size): the target's id that each of the head's stands for."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, hidden_states: Tensor) -> Tensor:
        """input_ids (of the target's vocabulary), positions: i64 (n,); hidden_states (n, 4H) or (n, H), see above.

        Returns hidden states (n, H), before the last norm: the next step's own norm is then the only one between two
        steps.
        """
        size = self.config.hidden_size
        embeds = self.shared[0](input_ids).to(self.fc.weight.dtype)  # the target may compute in another one
        hidden_states = hidden_states.to(embeds.dtype)
        if hidden_states.shape[1] != size:
            hidden_states = self.fc(hidden_states[:, : FEATURES * size])
        rotations = rope_rotations(positions, self.config.layer.head_dim, self.config.layer.rope_theta, embeds.dtype)
        return self.midlayer.forward(embeds, hidden_states, rotations, attend)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (n, H) -> (n, draft_vocab_size)."""
        return self.lm_head(self.norm(hidden_states))


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads two things side by side, the embedding and the hidden state, each normed.

    Only the hidden state is the residual: what the head knows of the token came in by attention.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = LlamaAttention(config, layer_id=0, input_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = LlamaMLP(config)

    def forward(self, embeds: Tensor, hidden_states: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """embeds, hidden_states (n, H) -> (n, H)."""
        both = torch.cat([self.input_layernorm.forward(embeds), self.hidden_norm.forward(hidden_states)], dim=-1)
        x = hidden_states + self.self_attn.forward(both, rotations, attend)
        return x + self.mlp.forward(self.post_attention_layernorm.forward(x))


def check_d2t(d2t: Tensor, target_vocab_size: int) -> None:
    """Raises ValueError for a table of offsets that leads out of the target's vocabulary, or twice to the same id."""
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    outside = ((ids < 0) | (ids >= target_vocab_size)).nonzero().flatten()
    if len(outside):
        i = int(outside[0])
        raise ValueError(
            f"d2t[{i}] is {int(d2t[i])}, which makes draft id {i} the target's id {int(ids[i])}: its vocabulary is "
            f"ids 0 to {target_vocab_size - 1}"
        )
    if len(ids.unique()) != len(ids):
        found, counts = ids.unique(return_counts=True)
        raise ValueError(f"d2t leads twice to the target's id {int(found[counts > 1][0])}: draft tokens would repeat")
