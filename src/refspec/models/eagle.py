"""The EAGLE head: one decoder layer that guesses the target's next hidden state.

For the row of token p it is fed the embedding of token p beside the target's hidden state of token p-1,
and answers with a guess at the hidden state of token p, from which the *target's* lm_head reads token p+1.
When no target hidden state is at hand (inside the draft loop) its own guess takes that place. Embedding and
lm_head are the target's own modules, so the head adds little but `fc` and a layer.

Source: EAGLE (Li et al. 2024, section 4.1); EAGLE-2 (Li et al. 2024) changes the tree, not the head;
SGLang: python/sglang/srt/models/llama_eagle.py:LlamaForCausalLMEagle @v0.5.5
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from refspec.memory.kv_pool import PoolLayout
from refspec.models.llama import Attend, LlamaConfig, LlamaForCausalLM, LlamaLayer, rope_rotations


class EagleHead(nn.Module):
    """A draft model that shares the target's embedding and lm_head.

    config: the head's own sizes; hidden_size and vocab_size must equal the target's.
    """

    def __init__(self, config: LlamaConfig, target: LlamaForCausalLM) -> None:
        super().__init__()
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(config, name), getattr(target.config, name)
            if ours != theirs:
                raise ValueError(f"the EAGLE head's {name} is {ours}, its target's is {theirs}: they must be equal")
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(LlamaLayer(config, i, input_norm=i > 0) for i in range(config.num_hidden_layers))
        # Kept out of the module tree: shared with the target, neither saved nor trained with the head.
        self.shared = (target.embed_tokens, target.lm_head)

    @property
    def kv_layout(self) -> PoolLayout:
        return self.config.kv_layout(self.fc.weight.dtype)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, hidden_states: Tensor) -> Tensor:
        """input_ids, positions: i64 (n,); hidden_states (n, hidden_size): those of the tokens before.

        Returns the guessed hidden states (n, hidden_size). There is no final norm: the target's hidden
        states, which they imitate, are already normed.
        """
        embed_tokens, _ = self.shared
        embeds = embed_tokens(input_ids)
        x = self.fc(torch.cat([embeds, hidden_states.to(embeds.dtype)], dim=-1))
        rotations = rope_rotations(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer.forward(x, rotations, attend)
        return x

    def logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (n, hidden_size) -> (n, vocab_size), through the target's lm_head."""
        return self.shared[1](hidden_states)
