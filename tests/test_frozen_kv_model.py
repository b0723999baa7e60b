"""The frozen-KV assistant: what it computes over the target's cache, and that it leaves no trace there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from builders import llama_config, random_assistant, random_llama
from reference import rms_norm, softmax_attention

from refspec.contracts import ForwardBatch
from refspec.kernels.backend import use_backend
from refspec.models.frozen_kv import FrozenKVAssistant
from refspec.models.llama import LlamaForCausalLM, rope_rotations, rotate
from refspec.runtime.graphs import GraphRunner
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner

CPU = torch.device("cpu")
LENS, SLOTS = [9, 4], torch.randperm(40, generator=torch.Generator().manual_seed(0)) + 1


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return random_llama()


@pytest.fixture(scope="module")
def served(target: LlamaForCausalLM) -> ModelRunner:
    """The target, which has read two texts, of 9 and of 4 tokens."""
    runner = ModelRunner(target, 40, CPU, Counter())
    ids = torch.arange(sum(LENS)) % 23
    runner.forward(causal_batch(ids, SLOTS[: sum(LENS)], LENS, table(), torch.tensor([1, 2]), [0, 0]), "prefill")
    return runner


def table() -> torch.Tensor:
    rows = torch.zeros(3, 12, dtype=torch.int64)
    rows[1, :9], rows[2, :4] = SLOTS[:9], SLOTS[9:13]
    return rows


def step(rows: int, req_to_token: torch.Tensor) -> ForwardBatch:
    """A draft step of `rows` branches for each request: all at the position of its newest cached token."""
    torch.manual_seed(rows)
    n, none = 2 * rows, torch.zeros(2, 0, dtype=torch.int64)
    return ForwardBatch(
        input_ids=torch.randint(0, 23, (n,)),
        positions=torch.tensor(LENS).repeat_interleave(rows) - 1,
        out_slots=torch.zeros(n, dtype=torch.int64),
        q_lens=[rows] * 2,
        req_to_token=req_to_token,
        rows=torch.tensor([1, 2]),
        prefix_lens=LENS,
        tail_slots=none,
        tail_mask=None,
        hidden_states=torch.randn(n, 24, dtype=torch.float64),
    )


def written_out(assistant: FrozenKVAssistant, served: ModelRunner, batch: ForwardBatch) -> torch.Tensor:
    """The assistant's hidden states, row by row, from the target's keys and values as they lie in the pool."""
    w, eps = dict(assistant.named_parameters()), assistant.config.rms_norm_eps
    assert batch.hidden_states is not None
    out = []
    for row, hidden in enumerate(batch.hidden_states):
        request = row // batch.q_lens[0]
        slots = table()[1 + request, : LENS[request]]
        e = rms_norm(assistant.shared[0].weight[batch.input_ids[row]][None], w["enorm.weight"], eps)
        x = torch.cat([e, rms_norm(hidden[None], w["hnorm.weight"], eps)], dim=1) @ w["pre_projection.weight"].T
        for i, layer in enumerate(assistant.target_layers):
            y = rms_norm(x, w[f"layers.{i}.input_layernorm.weight"], eps)
            q = (y @ w[f"layers.{i}.q_proj.weight"].T).view(1, 4, 6)
            q = rotate(q, rope_rotations(torch.tensor([LENS[request] - 1]), 6, 10000.0, torch.float64))
            keys, values = served.pool.buffer[layer, slots].unbind(1)
            attended = softmax_attention(q, keys, values, torch.ones(1, len(slots), dtype=torch.bool))
            x = x + attended.flatten(1) @ w[f"layers.{i}.o_proj.weight"].T
            y = rms_norm(x, w[f"layers.{i}.post_attention_layernorm.weight"], eps)
            gate, up = (y @ w[f"layers.{i}.mlp.gate_up_proj.weight"].T).chunk(2, dim=1)
            x = x + (F.silu(gate) * up) @ w[f"layers.{i}.mlp.down_proj.weight"].T
        out.append(rms_norm(x, w["norm.weight"], eps)[0])
    return torch.stack(out)


@pytest.mark.parametrize("layers", [(0, 1), (1,), (1, 1, 0)])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_queries_over_the_targets_cache(
    target: LlamaForCausalLM, served: ModelRunner, layers: tuple[int, ...], rows: int, backend: str
) -> None:
    """Two requests of unequal length, branches side by side, any choice of the target's layers."""
    assistant = random_assistant(target, layers)
    batch = step(rows, table())
    runner = ModelRunner(assistant, 40, CPU, Counter(), pool=served.pool)
    with use_backend(backend):
        out = runner.forward(batch, "draft")
    expected = written_out(assistant, served, batch)
    torch.testing.assert_close(out.hidden_states, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.logits, expected @ target.lm_head.weight.T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["torch", "triton", "graph"])
def test_SEQ_15_five_steps_write_nothing(target: LlamaForCausalLM, served: ModelRunner, kind: str) -> None:
    """Every pool, the dummy slot included, is what it was; the steps differ in ids and hidden states alone."""
    assistant, before, rows = random_assistant(target), served.pool.buffer.clone(), table()
    runner = ModelRunner(assistant, 40, CPU, Counter(), pool=served.pool)
    replays: Counter[str] = Counter()
    if kind == "graph":
        runner = GraphRunner(
            assistant, 40, CPU, Counter(), None, 1, rows, (4,), {"draft": 2}, replays, Counter(), served.pool
        )
    batch = step(2, rows)
    hidden = written_out(assistant, served, batch)
    for _ in range(5):
        with use_backend("triton" if kind == "triton" else "torch"):
            out = runner.forward(batch, "draft")
        torch.testing.assert_close(out.hidden_states, hidden, rtol=1e-9, atol=1e-9)
        batch = replace(batch, input_ids=out.logits.argmax(-1), hidden_states=out.hidden_states.clone())
        hidden = written_out(assistant, served, batch)
    assert torch.equal(served.pool.buffer, before)
    assert replays["draft"] == (5 if kind == "graph" else 0)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_key_value_heads", "head_dim", "rope_theta"])
def test_assistant_of_another_size_is_refused(target: LlamaForCausalLM, field: str) -> None:
    """Keys of another size cannot be measured against, keys that were turned otherwise must not be."""
    config = llama_config(**{field: 4})
    with pytest.raises(ValueError, match=rf"{field} is 4, its target's is {getattr(target.config, field)}"):
        FrozenKVAssistant(config, target, (0, 1))


@pytest.mark.parametrize("layers", [(0,), (0, 2), (-1, 0), (0, 1, 1)])
def test_layers_that_the_target_does_not_have(target: LlamaForCausalLM, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="target_layers is "):
        FrozenKVAssistant(llama_config(), target, layers)
