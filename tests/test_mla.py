"""MLA in the absorbed form says what heads with keys and values of their own say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from pool_models import dsa, llama, mla
from reference import rms_norm, softmax_attention

from refspec.models.mla import MLAttention
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
POSITIONS = torch.arange(len(TEXT)).double()
CAUSAL = torch.ones(len(TEXT), len(TEXT), dtype=torch.bool).tril()


def by_runner(model: Any) -> torch.Tensor:
    """Hidden states of the text, read in two parts."""
    runner = ModelRunner(model, len(TEXT), torch.device("cpu"), Counter())
    slots, row, outs = torch.arange(len(TEXT)).flip(0) + 1, torch.tensor([0]), []
    for start, end in ((0, 9), (9, len(TEXT))):
        part = causal_batch(torch.tensor(TEXT[start:end]), slots[start:end], [end - start], slots[None], row, [start])
        outs.append(runner.forward(part, "test").hidden_states)
    return torch.cat(outs)


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x (n, heads, dim): each pair of neighbours turned by its row's angle."""
    dim = x.shape[-1]
    angles = POSITIONS[:, None, None] * theta ** (-torch.arange(0, dim, 2).double() / dim)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack(
        [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], dim=-1
    ).flatten(-2)


def selected_by(attention: Any, query_latent: torch.Tensor, x: torch.Tensor, config: Any) -> torch.Tensor:
    """bool (n, n): the topk of each row's causal columns, score by score."""
    indexer, rope = attention.indexer, config.qk_rope_head_dim
    q = (query_latent @ indexer.wq_b.weight.T).view(len(x), indexer.heads, -1)
    k = torch.nn.functional.layer_norm(
        x @ indexer.wk.weight.T, (indexer.dim,), indexer.k_norm.weight, indexer.k_norm.bias
    )[:, None]
    q, k = (torch.cat([turned(t[..., :rope], config.rope_theta), t[..., rope:]], dim=-1) for t in (q, k))
    weights = x @ indexer.weights_proj.weight.T
    seen = torch.zeros_like(CAUSAL)
    for row in range(len(x)):
        scores = [float((weights[row] * (q[row] @ k[column, 0]).clamp(min=0)).sum()) for column in range(row + 1)]
        best = sorted(range(row + 1), key=lambda column: (-scores[column], column))[: config.index_topk]
        seen[row, best] = True
    return seen


def written_out(model: Any) -> torch.Tensor:
    """Hidden states of the text, with keys and values for every head."""
    config = model.config
    heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    x = model.embed_tokens.weight[TEXT]
    for layer in model.layers:
        a: MLAttention = layer.self_attn
        y = rms_norm(x, layer.input_layernorm.weight, config.rms_norm_eps)
        q_input = y
        if config.q_lora_rank:
            q_input = rms_norm(y @ a.q_a_proj.weight.T, a.q_a_layernorm.weight, config.rms_norm_eps)
        q = (q_input @ a.q_proj.weight.T).view(len(TEXT), heads, -1)
        q = torch.cat([q[..., :nope], turned(q[..., nope:], config.rope_theta)], dim=-1)
        latent, k_rope = (y @ a.kv_a_proj.weight.T).tensor_split([rank], dim=-1)
        latent = rms_norm(latent, a.kv_a_layernorm.weight, config.rms_norm_eps)
        k_rope = turned(k_rope[:, None], config.rope_theta).expand(-1, heads, -1)
        keys = torch.cat([torch.stack([latent @ w.T for w in a.k_b_proj], dim=1), k_rope], dim=-1)
        values = torch.stack([latent @ w.T for w in a.v_b_proj], dim=1)
        seen = selected_by(a, q_input, y, config) if hasattr(a, "indexer") else CAUSAL
        x = x + softmax_attention(q, keys, values, seen).flatten(1) @ a.o_proj.weight.T
        y = rms_norm(x, layer.post_attention_layernorm.weight, config.rms_norm_eps)
        gate, up = (y @ layer.mlp.gate_up_proj.weight.T).chunk(2, dim=-1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ layer.mlp.down_proj.weight.T
    return rms_norm(x, model.norm.weight, config.rms_norm_eps)


@pytest.mark.parametrize("q_lora_rank", [None, 7])
def test_absorbed_as_written_out(q_lora_rank: int | None) -> None:
    model = mla(q_lora_rank=q_lora_rank)
    torch.testing.assert_close(by_runner(model), written_out(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("topk", [1, 4])
def test_sparse_as_written_out(topk: int) -> None:
    model = dsa(index_topk=topk)
    torch.testing.assert_close(by_runner(model), written_out(model), rtol=1e-9, atol=1e-9)


def test_with_few_tokens_sparse_attention_attends_all() -> None:
    sparse, dense = dsa(index_topk=len(TEXT)), mla(q_lora_rank=12)
    dense.load_state_dict({name: x for name, x in sparse.state_dict().items() if "indexer" not in name})
    torch.testing.assert_close(by_runner(sparse), by_runner(dense), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(by_runner(dsa()), by_runner(dense))


def test_windows_as_written_out() -> None:
    windows = (3, None)

    def attend(layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        behind = POSITIONS[:, None] - POSITIONS
        return softmax_attention(q, k, v, CAUSAL & (behind < (windows[layer_id] or len(TEXT))))

    model = llama(windows=windows)
    expected = model(torch.tensor(TEXT), POSITIONS.long(), attend)
    torch.testing.assert_close(by_runner(model), expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(by_runner(llama()), expected)


@pytest.mark.parametrize(
    ("make", "changed", "message"),
    [
        (mla, {"qk_rope_head_dim": 3}, "qk_rope_head_dim must be even"),
        (dsa, {"q_lora_rank": None}, "q_lora_rank is None"),
        (dsa, {"index_head_dim": 2}, "index_head_dim is 2"),
        (llama, {"windows": (3,)}, "windows has 1 entries for 2 layers"),
        (llama, {"windows": (3, 0)}, "must attend at least 1 position"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_sizes_that_do_not_fit_are_refused(make: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changed)


def test_the_same_seed_gives_the_same_model() -> None:
    assert torch.equal(by_runner(mla(seed=3)), by_runner(mla(seed=3)))
    assert not torch.equal(by_runner(mla(seed=3)), by_runner(mla(seed=4)))
