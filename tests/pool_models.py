"""Small models with random weights, in float64, for every kind of KV pool, and drafts for them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from builders import llama_config, random_head
from torch import nn

from refspec.models.dsa import DSAConfig, DSAForCausalLM
from refspec.models.llama import LlamaForCausalLM
from refspec.models.mla import MLAConfig, MLAForCausalLM, random_weights

VOCAB = 17
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
WINDOWS = {"swa": (5, None), "swa, none full": (3, 5), "swa, none slides": (None, None)}
KINDS = ("mha", "mla", "dsa", *WINDOWS)


def llama(seed: int = 0, **changed: Any) -> LlamaForCausalLM:
    model = LlamaForCausalLM(llama_config(vocab_size=VOCAB, **changed)).double()
    random_weights(model, seed)
    return model


def mla(seed: int = 0, **changed: Any) -> MLAForCausalLM:
    model = MLAForCausalLM(MLAConfig(**{**SIZES, **changed})).double()
    random_weights(model, seed)
    return model


def dsa(seed: int = 0, **changed: Any) -> DSAForCausalLM:
    """It attends 4 tokens, so that every text of some length needs a choice."""
    sizes = {**SIZES, "q_lora_rank": 12, "index_head_dim": 6, "index_n_heads": 3, "index_topk": 4}
    model = DSAForCausalLM(DSAConfig(**{**sizes, **changed})).double()
    random_weights(model, seed)
    return model


@functools.cache
def target_of(kind: str) -> Any:
    """The model of a kind, always the same."""
    if kind in ("mla", "dsa"):
        return mla() if kind == "mla" else dsa()
    return llama(windows=WINDOWS.get(kind, ()))


class Ahead(nn.Module):
    """A model as its own draft, over a pool of its own kind. Its rows are one token ahead, as an EAGLE draft's are, and
    it looks at no hidden states: so it knows all of the text but the first token, and is right now and then.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config, self.kv_layout, self.logits = model, model.config, model.kv_layout, model.logits
        self.recurrent_state = getattr(model, "recurrent_state", False)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Any, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        return self.model(input_ids, positions, attend)


def draft_of(kind: str, draft: str) -> Any:
    """The draft model "same": the target itself, ahead. "head": an EAGLE head that knows nothing, over keys and values,
    for a target with windows in a pool without sliding layers. "sharing": a DSA model that chooses once for a loop.
    """
    target = target_of(kind)
    if draft == "head":
        return random_head(target, windows=(None,) if kind in WINDOWS else ())
    return Ahead(dsa(index_share_for_draft=True) if draft == "sharing" else target)
