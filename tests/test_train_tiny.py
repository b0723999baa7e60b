"""scripts/train_tiny.py: the parts on which the shipped weights' quality rests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from refspec.models.eagle import EagleHead
from refspec.models.llama import LlamaConfig, LlamaForCausalLM

SIZES = LlamaConfig(
    vocab_size=23, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def train_tiny() -> ModuleType:
    file = Path(__file__).parents[1] / "scripts" / "train_tiny.py"
    spec = importlib.util.spec_from_file_location("train_tiny", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attention_over(keys: list[Tensor], values: list[Tensor], query: Tensor) -> Tensor:
    """One row's attention, heads grouped, written out: query (heads, dim), each key and value (kv_heads, dim)."""
    groups = query.shape[0] // keys[0].shape[0]
    k = torch.stack(keys).repeat_interleave(groups, dim=1)  # (seen, heads, dim)
    v = torch.stack(values).repeat_interleave(groups, dim=1)
    weights = (torch.einsum("hd,shd->hs", query, k) * query.shape[1] ** -0.5).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, v)


def test_the_unrolled_head_computes_what_the_draft_loop_will(train_tiny: ModuleType) -> None:
    """Row r of level j = a chain of j drafts from the extend rows up to token r - j, row by row as it is served."""
    torch.manual_seed(0)
    head = EagleHead(SIZES, LlamaForCausalLM(SIZES)).double()
    head.shared[0].double()
    length, levels = 7, 4
    tokens = torch.randint(0, SIZES.vocab_size, (length,))
    states = torch.randn(length, SIZES.hidden_size, dtype=torch.float64)

    attend, fed, unrolled = train_tiny.UnrolledAttention(batch=1), states, []
    for _ in range(levels):
        unrolled.append(head(tokens, torch.arange(length), attend, fed))
        fed = torch.cat([torch.zeros_like(fed[:1]), unrolled[-1][:-1]])

    for row in range(length):
        for level in range(min(levels, row + 1)):
            kept: tuple[list[Tensor], list[Tensor]] = ([], [])

            def attend_so_far(layer_id: int, q: Tensor, k: Tensor, v: Tensor, kept: tuple = kept) -> Tensor:
                kept[0].append(k[0])
                kept[1].append(v[0])
                return attention_over(*kept, q[0])[None]

            guess = None
            for position in range(row + 1):
                is_draft = position > row - level
                hidden = guess if is_draft else states[position : position + 1]
                at = torch.tensor([position])
                guess = head(tokens[position : position + 1], at, attend_so_far, hidden)
            torch.testing.assert_close(unrolled[level][row], guess[0])


def test_only_what_was_said_before_counts_as_a_repeat(train_tiny: ModuleType) -> None:
    once, twice = list(range(10)), [*range(10), *range(10)]
    assert not train_tiny.repeats(np.array(once * 1), 0).any()
    flags = train_tiny.repeats(np.array(twice), 0)
    assert flags.tolist() == [False] * 17 + [True] * 3  # the 8th token of the second time is the first repeat
    assert not train_tiny.repeats(np.array(twice), 12).any(), "the prompt may be repeated once"


def test_a_stopped_training_takes_the_same_steps(
    train_tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_tiny, "draw_curves", lambda *args: None)

    def run(work: Path, stop_after: int | None) -> Tensor:
        work.mkdir(exist_ok=True)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 3, bias=False))

        def loss_at(step: int) -> Tensor:
            if step == stop_after:
                raise KeyboardInterrupt
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            return model(x).square().mean()

        train_tiny.train("toy", model, loss_at, lambda step: {}, steps=8, work=work, save_every=2)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    whole = run(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", 5)
    torch.testing.assert_close(run(tmp_path / "parts", None), whole, rtol=0, atol=0)


def test_muon_steps_are_orthogonal(train_tiny: ModuleType) -> None:
    torch.manual_seed(2)
    for shape in ((3, 8, 5), (3, 5, 8)):
        values = torch.linalg.svdvals(train_tiny.orthogonalise(torch.randn(shape)))
        assert ((values > 0.6) & (values < 1.3)).all(), values
