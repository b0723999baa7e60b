"""DeepSeek sparse attention (DSA): MLA, but each row attends only the tokens that an indexer picks for it.

The indexer is a small attention of its own. It has one key a token, cached beside MLA's row, and a few heads of
queries; a token's score is the sum over heads of w · relu(q · key), where w is the row's own weight for the head. The
index_topk best of all that the row may see are attended, and nothing else. While there are no more than that, all are,
and the model is MLA.

**In a draft loop** the choice can be made once: the draft's row of the newest committed token, in the extend, chooses,
and the loop's rows attend those tokens and the loop's own. `index_share_for_draft` says so (SGLang:
index_share_for_mtp_iteration). Three things are easily got wrong, and here are matters of where things stand:

- The carried choice comes from the newest *kept* row: it leaves the extend with the draft's first guesses, which are
  that row's (`ForwardOutput.selection`).
- Whoever reuses a choice still stores the index key of its own token: storing comes first, in `select`.
- The choice travels in the batch of the loop's forwards (`ForwardBatch.selection`), not in a flag of the model or the
  runner that somebody would have to take back.

Source: DeepSeek-V3.2-Exp (DeepSeek-AI 2025, section 2.1); SGLang:
python/sglang/srt/layers/attention/dsa/dsa_indexer.py:Indexer,
python/sglang/srt/layers/attention/index_topk_share.py:IndexTopKShareState @0.5.23
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from refspec.memory.kv_pool import DSALayout, PoolLayout
from refspec.models.llama import rotate
from refspec.models.mla import LatentAttention, MLAConfig, MLAForCausalLM, MLAttention


class SparseAttention(LatentAttention, Protocol):
    """The part of runtime.runner.PoolAttention that is used here."""

    def __call__(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, scale: float, selected: Tensor | None = None
    ) -> Tensor:
        """As LatentAttention's, of what was selected."""

    def select(self, layer_id: int, q: Tensor, k: Tensor, weights: Tensor, topk: int, keep: bool = False) -> Tensor:
        """q (n, heads, dim), k (n, dim), weights (n, heads): store k, choose topk columns for each row."""


@dataclass(frozen=True)
class DSAConfig(MLAConfig):
    """Of an MLA model with latent queries, and of its indexer.

    index_topk: tokens that a row attends. index_share_for_draft: as a draft, it chooses in the extend for the whole
        loop.
    """

    index_n_heads: int = 2
    index_head_dim: int = 8
    index_topk: int = 8
    index_share_for_draft: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.q_lora_rank is None:
            raise ValueError("q_lora_rank is None, but an indexer reads the queries' latent: give its size")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim is {self.index_head_dim}, it must have room for the {self.qk_rope_head_dim} rotary "
                "numbers of qk_rope_head_dim"
            )

    def kv_layout(self, dtype: torch.dtype) -> PoolLayout:
        return DSALayout(self.num_hidden_layers, self.kv_lora_rank, self.qk_rope_head_dim, self.index_head_dim, dtype)


class Indexer(nn.Module):
    """Makes index queries, the index key, and the heads' weights of each row."""

    def __init__(self, config: DSAConfig) -> None:
        super().__init__()
        assert config.q_lora_rank is not None
        self.heads, self.dim, self.rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.dim, bias=False)
        self.k_norm = nn.LayerNorm(self.dim)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    def forward(self, query_latent: Tensor, x: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query_latent (n, q_lora_rank), x (n, hidden_size) -> q (n, heads, dim), k (n, dim), weights (n, heads).

        The first qk_rope_head_dim numbers of queries and keys are turned by their position.
        """
        q = self.wq_b(query_latent).view(len(x), self.heads, self.dim)
        k = self.k_norm(self.wk(x))[:, None]
        weights = self.weights_proj(x) * (self.heads * self.dim) ** -0.5
        return self._turned(q, rotations), self._turned(k, rotations)[:, 0], weights

    def _turned(self, x: Tensor, rotations: Tensor) -> Tensor:
        turning, still = x.split([self.rope, self.dim - self.rope], dim=-1)
        return torch.cat([rotate(turning.contiguous(), rotations), still], dim=-1)


class DSAttention(MLAttention):
    """MLA over what the indexer selects."""

    def __init__(self, config: DSAConfig, layer_id: int) -> None:
        super().__init__(config, layer_id)
        self.topk, self.keep = config.index_topk, config.index_share_for_draft
        self.indexer = Indexer(config)

    def forward(self, x: Tensor, rotations: Tensor, attend: SparseAttention) -> Tensor:  # type: ignore[override]
        """x (n, hidden_size) -> (n, hidden_size)."""
        query_latent = self.query_input(x)
        index_q, index_k, weights = self.indexer(query_latent, x, rotations)
        selected = attend.select(self.layer_id, index_q, index_k, weights, self.topk, keep=self.keep)
        q, k, v = self.absorbed(query_latent, x, rotations)
        return self.output(attend(self.layer_id, q, k, v, scale=self.scale, selected=selected))


class DSAForCausalLM(MLAForCausalLM):
    """A target model over a DSATokenToKVPool."""

    config: DSAConfig

    def attention(self, layer_id: int) -> MLAttention:
        """That of a layer."""
        return DSAttention(self.config, layer_id)
