"""MTP layers against the equations of DeepSeek-V3, alone and in their chain."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from builders import llama_config, random_llama, random_mtp
from reference import mtp_layer
from safetensors.torch import load_file

from refspec.models.checkpoint import save_checkpoint
from refspec.models.mtp import MTPLayer, MTPLayers
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def run(layer: MTPLayer, ids: list[int], hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    runner = ModelRunner(layer, 64, torch.device("cpu"), Counter())
    slots = torch.arange(1, len(ids) + 1)
    out = runner.forward(
        causal_batch(torch.tensor(ids), slots, [len(ids)], slots[None], torch.tensor([0]), [0], hidden_states), "test"
    )
    return out.hidden_states, out.logits


def test_layers_in_their_chain_are_the_papers(tmp_path: Path) -> None:
    """Row p of layer i is fed token p + 1 + i beside what layer i - 1 gave at row p: tokens move on, rows do not."""
    target = random_llama()
    layers = random_mtp(target, count=3)
    save_checkpoint(layers, tmp_path, dtype=torch.float64)
    weights, raw = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    theirs = ours = torch.randn(len(IDS), 24, dtype=torch.float64)
    for i in range(len(layers)):
        tokens, rows = IDS[1 + i :], len(IDS) - 1 - i
        embeds = target.embed_tokens(torch.tensor(tokens))
        theirs, (ours, logits) = mtp_layer(weights, raw, i, embeds, theirs[:rows]), run(layers[i], tokens, ours[:rows])
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(logits, theirs @ target.lm_head.weight.T, rtol=1e-9, atol=1e-9)


def test_each_layer_is_a_model_of_its_own() -> None:
    """It has one layer of keys and values; embedding and lm_head are the target's own modules, and in no state dict."""
    target = random_llama()
    layers = random_mtp(target)
    assert len(layers) == 3
    assert layers[1].kv_layout.num_layers == 1
    assert all(layers[i].shared == (target.embed_tokens, target.lm_head) for i in range(3))
    assert not any("embed" in name or "lm_head" in name for name in layers.state_dict())


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size"])
def test_layer_of_another_size_is_refused(field: str) -> None:
    target = random_llama()
    with pytest.raises(ValueError, match=f"{field} is 8, its target's is {getattr(target.config, field)}"):
        MTPLayer(llama_config(num_hidden_layers=1, **{field: 8}), target)


def test_no_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 MTP layer, got 0"):
        MTPLayers(llama_config(num_hidden_layers=1), random_llama(), 0)
