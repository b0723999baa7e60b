"""scripts/train_tiny.py: the parts on which the shipped weights' quality rests."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refspec.contracts import ForwardBatch
from refspec.models.checkpoint import SHIPPED_FOLDER, load_tokenizer
from refspec.models.eagle import EagleHead
from refspec.models.eagle3 import Eagle3Config, Eagle3Head, FusedTarget
from refspec.models.frozen_kv import FrozenKVAssistant
from refspec.models.llama import LlamaConfig, LlamaForCausalLM
from refspec.models.mtp import MTPLayers
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner

CPU = torch.device("cpu")

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


def draft_of(kind: str, target: LlamaForCausalLM) -> tuple[nn.Module, int]:
    """A draft model, and how wide the target's hidden states are that it is fed."""
    if kind == "eagle":
        return EagleHead(SIZES, target), SIZES.hidden_size
    if kind == "eagle3":
        return Eagle3Head(Eagle3Config(SIZES, 11), target), 4 * SIZES.hidden_size
    return MTPLayers(SIZES, target, 1)[0], SIZES.hidden_size


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_the_unrolled_head_computes_what_the_draft_loop_will(train_tiny: ModuleType, kind: str) -> None:
    """Row r of level j = a chain of j drafts from the extend rows up to token r - j, row by row as it is served."""
    torch.manual_seed(0)
    head, width = draft_of(kind, LlamaForCausalLM(SIZES).double())
    head.double()
    length, levels = 7, 4
    ids = torch.randint(0, SIZES.vocab_size, (1, length + 1))
    states = torch.randn(1, length + 1, width, dtype=torch.float64)
    unrolled = list(train_tiny.unrolled(head, ids, states, levels))

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
                hidden = guess if is_draft else states[0, position : position + 1]
                guess = head(ids[0, position + 1 : position + 2], torch.tensor([position]), attend_so_far, hidden)
            torch.testing.assert_close(unrolled[level][0, row], guess[0])


def test_the_chain_of_mtp_layers_is_the_one_that_is_served(train_tiny: ModuleType) -> None:
    """Two texts side by side are each what a runner of every layer gives for it alone."""
    torch.manual_seed(1)
    target = LlamaForCausalLM(SIZES)
    layers = MTPLayers(SIZES, target, 3)
    ids, first = torch.randint(0, SIZES.vocab_size, (2, 8)), torch.randn(2, 7, SIZES.hidden_size)
    said = list(train_tiny.chained(layers, ids, first))
    for text in range(2):
        fed = first[text]
        for i in (1, 2):
            rows = 7 - i
            runner, slots = ModelRunner(layers[i], 9, CPU, Counter()), torch.arange(1, rows + 1)
            batch = causal_batch(ids[text, 1 + i :], slots, [rows], slots[None], torch.tensor([0]), [0], fed[:rows])
            fed = runner.forward(batch, "extend").hidden_states
            torch.testing.assert_close(said[i - 1][text], fed)


def test_the_assistant_learns_over_what_it_will_be_served_over(train_tiny: ModuleType) -> None:
    """Row t of level j = step j of a round that begins with t + 1 tokens in the target's pool."""
    torch.manual_seed(2)
    target = LlamaForCausalLM(replace(SIZES, num_hidden_layers=2)).requires_grad_(False)
    assistant = FrozenKVAssistant(replace(target.config, num_hidden_layers=2), target, (1, 0))
    ids, rows, levels = torch.randint(0, SIZES.vocab_size, (2, 9)), 6, 3
    attend = train_tiny.KeptAttention(2, rows)
    states = target(ids.flatten(), train_tiny.positions_of(ids), attend).unflatten(0, (2, -1))
    said = list(train_tiny.from_frozen_kv(assistant, ids, states, attend, levels))

    slots, none = torch.arange(1, 10), torch.zeros(1, 0, dtype=torch.int64)
    for text in range(2):
        served = ModelRunner(target, 9, CPU, Counter())
        prompt = causal_batch(ids[text], slots, [9], slots[None], torch.tensor([0]), [0])
        hidden = served.forward(prompt, "prefill").hidden_states
        runner = ModelRunner(assistant, 9, CPU, Counter(), pool=served.pool)
        for t in range(rows):
            fed, position, row = hidden[t : t + 1], torch.tensor([t]), torch.tensor([0])
            for level in range(levels):
                token = ids[text, t + 1 + level : t + 2 + level]
                fed = runner.forward(
                    ForwardBatch(token, position, row, [1], slots[None], row, [t + 1], none, None, fed), "draft"
                ).hidden_states
                torch.testing.assert_close(said[level][text, t], fed[0])


def test_an_eagle3_head_can_say_what_the_eagle_head_knows(train_tiny: ModuleType, tmp_path: Path) -> None:
    """The start of its stage, on the shipped weights and this file's text: often right, before a single step."""
    tokenizer = load_tokenizer(SHIPPED_FOLDER / "target")
    assert tokenizer
    tokens = np.array(tokenizer.encode(Path(__file__).read_text()).ids, dtype=np.uint16)
    for name in ("train", "shipped_text"):
        np.save(tmp_path / f"{name}.npy", tokens)
    model = train_tiny.shipped_target()
    fused, head = FusedTarget(model, train_tiny.FEATURE_LAYERS), train_tiny.new_eagle3(model)
    scale = F.pad(train_tiny.feature_scale(fused, tmp_path), (0, 192), value=1.0)
    frequent = train_tiny.frequent_ids(tmp_path, 640)
    head.d2t.copy_(frequent - torch.arange(640))
    train_tiny.rebuild_eagle(head, fused, scale, tmp_path)
    assert torch.equal(head.draft_to_target, frequent)
    assert set(np.unique(tokens)) <= set(frequent.tolist())  # whatever the text says can be said

    ids = torch.from_numpy(tokens[:192].astype(np.int64))[None]
    with torch.no_grad():
        states = fused(ids[0], torch.arange(192), train_tiny.causal_attention(1))
        _, agreement = train_tiny.eagle3_loss(head, ids, states * scale, fused.logits(states), unroll=2)
    assert agreement[0] > 0.3


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
