"""The EAGLE-3 head and the target that feeds it, against the paper's equations; and the head's own vocabulary."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from builders import llama_config, random_eagle3, random_llama
from kv_contents import cached, prefilled
from reference import eagle3_head, llama
from safetensors.torch import load_file

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import DraftInput, ForwardBatch
from refspec.memory.allocator import SlotAllocator
from refspec.models.checkpoint import save_checkpoint
from refspec.models.eagle3 import Eagle3Config, Eagle3Head, FusedTarget, check_d2t, default_feature_layers
from refspec.models.llama import LlamaForCausalLM
from refspec.requests.request import Request, RunningBatch
from refspec.runtime.graphs import GraphRunner
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner, ServedModel
from refspec.spec.draft import draft, propose
from refspec.workers.base import Stats
from refspec.workers.eagle_v1 import EagleWorkerV1

CPU = torch.device("cpu")
IDS = [3, 1, 4, 1, 5, 9]
TABLE = torch.tensor([2, 4, 4, 8])  # offsets: draft ids 0 to 3 are the target's 2, 5, 6, 11


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return random_llama(llama_config(num_hidden_layers=5))


def rows_of(ids: list[int], hidden_states: torch.Tensor | None = None) -> ForwardBatch:
    slots = torch.arange(1, len(ids) + 1)
    return causal_batch(torch.tensor(ids), slots, [len(ids)], slots[None], torch.tensor([0]), [0], hidden_states)


def runner_of(model: ServedModel, vocab_size: int | None = None) -> ModelRunner:
    return ModelRunner(model, 64, CPU, Counter(), vocab_size)


# --- the models ---------------------------------------------------------------------------------------------------


def test_features_are_what_the_layers_before_them_leave(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """A target cut off behind its first layers, and without the last norm, leaves the feature of the layer after."""
    save_checkpoint(target, tmp_path, dtype=torch.float64)
    weights, raw = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    fused = FusedTarget(target, (1, 4, 5))
    out = runner_of(fused).forward(rows_of(IDS), "test")
    assert out.hidden_states.shape == (6, fused.config.hidden_size) == (6, 4 * 24)
    *features, final = out.hidden_states.chunk(4, dim=1)
    for layers, feature in zip((1, 4, 5), features, strict=True):
        cut = LlamaForCausalLM(llama_config(num_hidden_layers=layers)).double()
        cut.load_state_dict({n: p for n, p in target.state_dict().items() if n in cut.state_dict()})
        cut.norm = torch.nn.Identity()  # type: ignore[assignment]
        torch.testing.assert_close(feature, runner_of(cut).forward(rows_of(IDS), "test").hidden_states)
    hidden, logits = llama(weights, raw, IDS)
    torch.testing.assert_close(final, hidden, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.logits, logits, rtol=1e-9, atol=1e-9)


def test_a_fused_target_is_the_target_in_all_else(target: LlamaForCausalLM) -> None:
    fused = FusedTarget(target)
    assert fused.kv_layout == target.kv_layout
    assert fused.feature_layers == default_feature_layers(5) == (2, 2, 2)
    assert default_feature_layers(32) == (2, 16, 29)  # as SGLang has it for LLaMA 8B
    for name in ("vocab_size", "max_position_embeddings", "eos_token_ids"):
        assert getattr(fused.config, name) == getattr(target.config, name)


@pytest.mark.parametrize("layers", [(0, 1), (0, 1, 2, 3), (-1, 1, 2), (1, 2, 6)])
def test_features_that_the_target_does_not_have_are_refused(target: LlamaForCausalLM, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="feature_layers is "):
        FusedTarget(target, layers)


@pytest.mark.parametrize("width", [1, 4])
def test_what_it_says_is_the_papers(target: LlamaForCausalLM, width: int, tmp_path: Path) -> None:
    """Fed by the target (4H wide, the last H unread) or by itself (H); handed on is what comes before the last norm."""
    head = random_eagle3(target)
    save_checkpoint(head, tmp_path, dtype=torch.float64)
    fed = torch.randn(6, width * 24, dtype=torch.float64)
    hidden, logits = eagle3_head(
        load_file(tmp_path / "model.safetensors"), vars(head.config.layer), target.embed_tokens(torch.tensor(IDS)), fed
    )
    out = runner_of(head).forward(rows_of(IDS, fed), "test")
    torch.testing.assert_close(out.hidden_states, hidden, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.logits, logits, rtol=1e-9, atol=1e-9)
    if width == 4:
        fed[:, -24:] = torch.nan
        assert runner_of(head).forward(rows_of(IDS, fed), "test").logits.isfinite().all()


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size"])
def test_head_of_another_size_is_refused(target: LlamaForCausalLM, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 8, its target's is {getattr(target.config, field)}"):
        Eagle3Head(Eagle3Config(llama_config(num_hidden_layers=1, **{field: 8}), 4), target)


# --- its own vocabulary -------------------------------------------------------------------------------------------


def test_TREE_08_the_table_holds_offsets(target: LlamaForCausalLM) -> None:
    head = random_eagle3(target)
    assert torch.equal(head.d2t, TABLE)
    assert head.draft_to_target.tolist() == [2, 5, 6, 11]
    head.d2t = torch.zeros(4, dtype=torch.int64)
    assert head.draft_to_target.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [0, -1, 24])
def test_TREE_10_draft_vocabularies_that_make_no_sense(size: int) -> None:
    with pytest.raises(
        ValueError, match=f"draft_vocab_size is {size}, it must be from 1 to the target's vocab_size, 23"
    ):
        Eagle3Config(llama_config(num_hidden_layers=1), size)


@pytest.mark.parametrize(
    ("d2t", "complaint"),
    [
        ([2, 4, 4, 20], r"d2t\[3\] is 20, .* id 23"),
        ([-1, 0, 0, 0], r"d2t\[0\] is -1"),
        ([1, 0, 0, 0], "leads twice to"),
    ],
)
def test_TREE_10_tables_that_lead_astray(d2t: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_d2t(torch.tensor(d2t), 23)


def test_TREE_10_more_branches_than_the_draft_has_ids(target: LlamaForCausalLM) -> None:
    config = SpecConfig(topk=8, num_steps=2, num_draft_tokens=9)
    runners = runner_of(FusedTarget(target)), runner_of(random_eagle3(target))
    with pytest.raises(ValueError, match="topk is 8, but the draft can propose only 4 ids"):
        EagleWorkerV1(*runners, SlotAllocator(64, CPU, 1), Stats(), config)


def test_ids_that_are_never_proposed_have_no_column(target: LlamaForCausalLM) -> None:
    """The tokenizer ends at id 6, which is the head's third: its last two columns mean nothing."""
    runner = runner_of(random_eagle3(target), vocab_size=6)
    assert runner.choices == 2
    assert runner.draft_to_target is not None
    assert runner.draft_to_target.tolist() == [2, 5]
    fed = torch.randn(6, 24, dtype=torch.float64)
    whole = runner_of(runner.model).forward(rows_of(IDS, fed), "test").logits
    torch.testing.assert_close(runner.forward(rows_of(IDS, fed), "test").logits, whole[:, :2])


def batch_of(params: SamplingParams, seeds: int = 1) -> RunningBatch:
    requests = [Request(r, [0, 7], params, frozenset(), 64, seed=r) for r in range(seeds)]
    batch = RunningBatch.of(requests, torch.zeros(1, 64, dtype=torch.int64))
    batch.seq_lens = torch.full((seeds,), 2)
    return batch


def test_the_likeliest_are_mapped_once(target: LlamaForCausalLM) -> None:
    runner = runner_of(random_eagle3(target))
    config = SpecConfig(topk=2, num_steps=1, num_draft_tokens=3)
    topk_p, topk_index, law = propose(
        batch_of(SamplingParams()), torch.tensor([[0.0, 3.0, 1.0, 5.0]]), 0, config, runner
    )
    assert topk_index.tolist() == [[11, 5]]
    torch.testing.assert_close(topk_p, torch.tensor([[0.0, 3, 1, 5]]).softmax(-1)[:, [3, 1]])
    assert law is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drawn_law_is_one_over_the_targets_vocabulary(target: LlamaForCausalLM, temperature: float) -> None:
    runner = runner_of(random_eagle3(target))
    config = SpecConfig(topk=1, num_steps=1, num_draft_tokens=2, sampler="rejection")
    logits = torch.tensor([[0.0, 1.0, 0.5, 1.5]]).expand(400, -1)
    p, tokens, law = propose(batch_of(SamplingParams(temperature=temperature), 400), logits, 0, config, runner)
    assert law is not None
    expected = torch.zeros(23)
    expected[[2, 5, 6, 11]] = logits[0].softmax(-1) if temperature else torch.tensor([0.0, 0, 0, 1])
    torch.testing.assert_close(law, expected.expand(400, -1))
    torch.testing.assert_close(p, law.gather(1, tokens))
    shares = tokens.flatten().bincount(minlength=23) / 400
    assert (shares - expected).abs().max() < 0.1


@pytest.mark.parametrize("graphs", [False, True])
def test_TREE_09_the_mapped_id_is_what_goes_on(
    target: LlamaForCausalLM, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1 picks draft id 3: the embedding looked up in step 2 is id 11, the pool of candidates holds 11."""
    head = random_eagle3(target)
    monkeypatch.setattr(
        Eagle3Head,
        "logits",
        lambda self, hidden: torch.tensor([[0.0, 1, 2, 9]], dtype=hidden.dtype).repeat(len(hidden), 1),
    )
    looked_up: list[list[int]] = []
    embedding = target.embed_tokens
    monkeypatch.setattr(head, "shared", (lambda ids: (looked_up.append(ids.tolist()), embedding(ids))[1],))
    table = torch.zeros(2, 64, dtype=torch.int64)
    table[1] = torch.arange(64)
    runner: ModelRunner = runner_of(head)
    if graphs:
        counts = Counter[str](), Counter[str]()
        runner = GraphRunner(head, 64, CPU, Counter(), None, 1, table, (1,), {"draft": 1}, *counts)
    allocator = SlotAllocator(64, CPU, 1)
    slots = allocator.alloc(3)
    request = Request(0, [0, 7, 8], SamplingParams(), frozenset(), 64, seed=0)
    batch = RunningBatch.of([request], table)
    batch.rows, batch.seq_lens = torch.tensor([1]), torch.tensor([3])
    table[1, :3] = slots
    config = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
    logits = head.logits(torch.zeros(1, 24, dtype=torch.float64))
    p, index, _ = propose(batch, logits, 0, config, runner)
    batch.draft_input = DraftInput(p, index, torch.randn(1, 24, dtype=torch.float64))
    candidates = draft(batch, runner, allocator, config)
    assert looked_up == [[11], [11]]
    assert [tokens.tolist() for tokens in candidates.token_list] == [[[11]], [[11]], [[11]]]


def test_SEQ_05_a_head_in_another_dtype_than_its_target() -> None:
    """Target hidden 8 in bf16: the head, in fp32, is fed 4 x 8, and its own 8; a fresh request joins."""
    target = random_llama(llama_config(hidden_size=8, num_hidden_layers=3), dtype=torch.bfloat16)
    head = random_eagle3(target, ids=range(23)).float()
    engine = Engine(target, head, SpecConfig("eagle3", topk=2, num_steps=3, num_draft_tokens=6))
    first = engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=30))
    engine.step()
    engine.step()
    second = engine.add_request([4, 5, 6, 7], SamplingParams(max_new_tokens=30))
    engine.step()
    running = engine.scheduler.running
    assert running.requests == [first, second]
    assert running.draft_input is not None
    assert running.draft_input.hidden_states.dtype == torch.float32
    assert running.draft_input.hidden_states.shape == (2, 8)
    target_runner, runner = engine.scheduler.worker.runners
    for request in (first, second):
        text = request.all_ids[: request.kv_len + 1]
        _, fed = prefilled(target_runner, text[:-1])
        assert (fed.shape[1], fed.dtype) == (32, torch.bfloat16)
        expected, _ = prefilled(runner, text[1:], fed.float())
        torch.testing.assert_close(cached(runner, engine, request), expected, rtol=1e-2, atol=1e-2)
