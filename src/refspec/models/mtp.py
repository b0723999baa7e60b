"""MTP, or NextN: layers that a target was given to foresee its further tokens, and that draft for it.

A layer is fed the embedding of a token beside a hidden state, each normed, put together by one product (`eh_proj`);
then comes one decoder layer and a norm. Embedding and lm_head are the target's. Rows are one token ahead, as EAGLE's
are: row p holds token p + 1.

There may be several such layers, one for each token further ahead. They form a chain:

| row p of | is fed token | beside the hidden state of row p of | and foresees token |
|---|---|---|---|
| layer 0 | p + 1 | the target | p + 2 |
| layer i | p + 1 + i | layer i - 1 | p + 2 + i |

So layer i's row at p is at position p whatever i is, and the tokens move on by one from layer to layer. Within a text
that is known, all rows of layer i can be computed at once. At its end the tokens are the drafts: the last row of layer
i is fed what layer i - 1 said there.

Of these layers, `algorithm="mtp"` uses the first, over and over, as EAGLE does its head; `algorithm="multi-layer"` uses
each for one draft. For this every layer is a model of its own, with keys and values of its own.

SGLang's multi-layer worker keeps the target's hidden state at row p for every layer with some models (MiMo), and hands
on the layer's with others (Step3.5, GigaChat); DeepSeek trains, and publishes, the chain. Here it is the chain.

Source: DeepSeek-V3 (2024, section 2.2, multi-token prediction); SGLang: python/sglang/srt/models/deepseek_nextn.py,
python/sglang/srt/speculative/multi_layer_eagle_worker_v2.py:MultiLayerEagleDraftWorker.chain_mtp_hidden_states @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from refspec.memory.kv_pool import PoolLayout
from refspec.models.llama import Attend, LlamaConfig, LlamaForCausalLM, LlamaLayer, RMSNorm, rope_rotations


class MTPLayer(nn.Module):
    """One layer: a draft model that shares the target's embedding and lm_head.

    config: the layer's own sizes (num_hidden_layers is 1); hidden_size and vocab_size must equal the target's.
    """

    def __init__(self, config: LlamaConfig, target: LlamaForCausalLM) -> None:
        super().__init__()
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(config, name), getattr(target.config, name)
            if ours != theirs:
                raise ValueError(f"the MTP layer's {name} is {ours}, its target's is {theirs}: they must be equal")
        if config.num_hidden_layers != 1:
            raise ValueError(f"num_hidden_layers is {config.num_hidden_layers}: an MTP layer is one decoder layer")
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.decoder = LlamaLayer(config, layer_id=0)
        self.norm = RMSNorm(size, eps)
        # Kept out of the module tree: shared with the target, neither saved nor trained with the layer.
        self.shared = (target.embed_tokens, target.lm_head)

    @property
    def kv_layout(self) -> PoolLayout:
        return self.config.kv_layout(self.eh_proj.weight.dtype)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, hidden_states: Tensor) -> Tensor:
        """input_ids, positions i64 (n); hidden_states (n, hidden_size). Returns hidden states (n, hidden_size), normed.

        They are what lm_head reads, and what the next layer, or this one in its next step, is fed.
        """
        embeds = self.shared[0](input_ids)
        hidden_states = hidden_states.to(embeds.dtype)
        x = self.eh_proj(torch.cat([self.enorm.forward(embeds), self.hnorm.forward(hidden_states)], dim=-1))
        rotations = rope_rotations(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        return self.norm.forward(self.decoder.forward(x, rotations, attend))

    def logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (n, hidden_size) -> (n, vocab_size), through the target's lm_head."""
        return self.shared[1](hidden_states)


class MTPLayers(nn.Module):
    """All layers that a checkpoint has, in the order of the chain; each is served by a runner of its own."""

    def __init__(self, config: LlamaConfig, target: LlamaForCausalLM, count: int) -> None:
        super().__init__()
        if count < 1:
            raise ValueError(f"there must be at least 1 MTP layer, got {count}")
        self.config = config
        self.layers = nn.ModuleList(MTPLayer(config, target) for _ in range(count))

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, i: int) -> MTPLayer:
        layer = self.layers[i]
        assert isinstance(layer, MTPLayer)
        return layer
