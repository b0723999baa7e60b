"""The EAGLE head against one that is written as in the paper, and what it shares with its target."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from builders import llama_config, random_head, random_llama, saved_head, saved_target
from reference import eagle_head
from safetensors.torch import load_file

from refspec.models.eagle import EagleHead
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner


def run(head: EagleHead, ids: list[int], hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    runner = ModelRunner(head, 64, torch.device("cpu"), Counter())
    slots = torch.arange(1, len(ids) + 1)
    out = runner.forward(
        causal_batch(torch.tensor(ids), slots, [len(ids)], slots[None], torch.tensor([0]), [0], hidden_states),
        phase="test",
    )
    return out.hidden_states, out.logits


@pytest.mark.parametrize("layers", [1, 2])
def test_guesses_are_the_papers(layers: int, tmp_path: Path) -> None:
    """fc over embedding and hidden state, in this order; no norm before the first layer, none at the end."""
    target = random_llama()
    head = random_head(target, num_hidden_layers=layers)
    ids, fed = [3, 1, 4, 1, 5, 9], torch.randn(6, target.config.hidden_size, dtype=torch.float64)
    hidden, logits = eagle_head(
        load_file(saved_head(tmp_path / "head", head) / "model.safetensors"),
        vars(head.config),
        load_file(saved_target(tmp_path / "target", target) / "model.safetensors"),
        ids,
        fed,
    )
    ours, our_logits = run(head, ids, fed)
    torch.testing.assert_close(ours, hidden, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(our_logits, logits, rtol=1e-9, atol=1e-9)


def test_embedding_and_output_are_the_targets_own() -> None:
    target = random_llama()
    head = random_head(target)
    names = {name for name, _ in head.named_parameters()}
    assert not any("embed" in name or "lm_head" in name for name in names)
    before = run(head, [1, 2], torch.zeros(2, 24, dtype=torch.float64))[1]
    target.lm_head.weight.mul_(2)
    torch.testing.assert_close(run(head, [1, 2], torch.zeros(2, 24, dtype=torch.float64))[1], 2 * before)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size"])
def test_head_of_another_size_is_refused(field: str) -> None:
    target = random_llama()
    config = llama_config(**{field: 8})
    with pytest.raises(ValueError, match=f"{field} is 8, its target's is {getattr(target.config, field)}"):
        EagleHead(config, target)
