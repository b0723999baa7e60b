"""The LLaMA against one that is written as in the paper, in float64, over the weights as they lie in the file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from builders import llama_config, random_llama, saved_target
from reference import llama, rotate_half
from safetensors.torch import load_file

from refspec.contracts import ForwardBatch
from refspec.models.llama import LlamaForCausalLM, rope_rotations, rotate
from refspec.runtime.rows import causal_mask
from refspec.runtime.runner import ModelRunner

SIZES = [
    {},
    {"num_hidden_layers": 1, "num_key_value_heads": 4},
    {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 2},
    {"hidden_size": 25, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10},
    {"tie_word_embeddings": True, "vocab_size": 50},
    {"rms_norm_eps": 0.1, "rope_theta": 100.0, "intermediate_size": 1},
]
by_sizes = pytest.mark.parametrize("sizes", SIZES, ids=str)


def raw_config(model: LlamaForCausalLM) -> dict[str, object]:
    return dict(vars(model.config))


def run(model: LlamaForCausalLM, ids: list[int], cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits, read in pieces that end at the cuts: what came before is in the pool."""
    runner = ModelRunner(model, 64, torch.device("cpu"), Counter())
    slots = torch.arange(1, len(ids) + 1).flip(0)  # a slot's number says nothing about its position
    hidden, logits = [], []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        out = runner.forward(
            ForwardBatch(
                input_ids=torch.tensor(ids[start:end]),
                positions=torch.arange(start, end),
                out_slots=slots[start:end],
                q_lens=[end - start],
                req_to_token=slots[None],
                rows=torch.zeros(1, dtype=torch.int64),
                prefix_lens=[start],
                tail_slots=slots[None, start:end],
                tail_mask=causal_mask([end - start], slots.device),
            ),
            phase="test",
        )
        hidden.append(out.hidden_states)
        logits.append(out.logits)
    return torch.cat(hidden), torch.cat(logits)


@by_sizes
@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4, 5, 6, 7, 8], [4]], ids=["whole", "one by one", "in two"])
def test_hidden_states_and_logits_are_the_papers(sizes: dict[str, object], cuts: list[int], tmp_path: Path) -> None:
    """And so the rotary pairs of the file, which are others than the model's, are those of Hugging Face."""
    model = random_llama(llama_config(**sizes))
    weights = load_file(saved_target(tmp_path, model) / "model.safetensors")
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    hidden, logits = llama(weights, raw_config(model), ids)
    ours, our_logits = run(model, ids, cuts)
    torch.testing.assert_close(ours, hidden, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(our_logits, logits, rtol=1e-9, atol=1e-9)


def test_a_change_far_back_is_seen() -> None:
    """The reference above would be met by a model that looks at nothing but its own row, were it wrong alike."""
    model = random_llama()
    first, _ = run(model, [3, 1, 4, 1, 5], [])
    second, _ = run(model, [2, 1, 4, 1, 5], [])
    assert not torch.allclose(first[-1], second[-1])


def test_order_of_the_tokens_is_seen() -> None:
    model = random_llama()
    first, _ = run(model, [3, 1, 4, 5], [])
    second, _ = run(model, [1, 3, 4, 5], [])
    assert not torch.allclose(first[-1], second[-1])


@pytest.mark.parametrize("dim", [2, 4, 10])
def test_rotation_is_the_rotation_of_halves_on_permuted_dimensions(dim: int) -> None:
    x, positions = torch.randn(5, 3, dim, dtype=torch.float64), torch.tensor([0, 1, 7, 300, 4096])
    pairs = torch.arange(dim).view(2, -1).t().flatten()  # i and i + dim/2 side by side
    ours = rotate(x[..., pairs], rope_rotations(positions, dim, 10000.0, x.dtype))
    torch.testing.assert_close(ours, rotate_half(x, positions, 10000.0)[..., pairs])


def test_rotation_keeps_lengths_and_leaves_position_0_alone() -> None:
    x = torch.randn(4, 2, 6)
    turned = rotate(x, rope_rotations(torch.tensor([0, 1, 50, 9]), 6, 10000.0, x.dtype))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[0], x[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_is_kept_from_weights_to_logits(dtype: torch.dtype) -> None:
    hidden, logits = run(random_llama(dtype=dtype), [1, 2, 3], [2])
    assert hidden.dtype == logits.dtype == dtype
    assert torch.isfinite(logits).all()


def test_tied_embeddings_are_one_matrix() -> None:
    model = random_llama(llama_config(tie_word_embeddings=True))
    assert model.lm_head.weight is model.embed_tokens.weight


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, r"num_attention_heads \(4\).*num_key_value_heads \(3\)"),
        ({"head_dim": 5}, r"head_dim must be even .* got 5"),
        *(
            ({name: bad}, f"{name} must be at least 1, got {bad}")
            for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            for bad in (0, -3)
        ),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be at least 1"),
    ],
    ids=str,
)
def test_sizes_that_make_no_model_are_refused(sizes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        llama_config(**sizes)
