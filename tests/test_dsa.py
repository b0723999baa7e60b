"""A choice that is made once for a draft loop: whose it is, what is stored all the same, and that it ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import assert_same_output
from kv_contents import worker_of
from pool_models import draft_of, target_of

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import CommitOutput, ForwardBatch, ForwardOutput, VerifyOutput
from refspec.memory.kv_pool import DSALayout, DSATokenToKVPool
from refspec.requests.request import Request, RunningBatch
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner, PoolAttention
from refspec.spec.extend import extend_after_verify, extend_all_rows

CPU, F64 = torch.device("cpu"), torch.float64
SPEC = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8], [5], [1, 6, 1, 8, 0, 3]]
PARAMS = [SamplingParams(max_new_tokens=n) for n in (14, 5, 9, 12)]


class Picker:
    """The row of id t chooses the positions t and t + 10."""

    config = SimpleNamespace(vocab_size=16, hidden_size=16, max_position_embeddings=99, eos_token_ids=())
    kv_layout = DSALayout(num_layers=1, latent_dim=2, rope_dim=2, index_dim=16, dtype=F64)

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Any, hidden_states: torch.Tensor | None
    ) -> torch.Tensor:
        q = (F.one_hot(ids, 16) + F.one_hot(ids + 10, 16)).double()[:, None]
        attend.select(0, q, F.one_hot(positions, 16).double(), torch.ones(len(ids), 1, dtype=F64), topk=2, keep=True)
        return torch.zeros(len(ids), 16, dtype=F64)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


@pytest.mark.parametrize("algorithm", ["eagle", "eagle-v2"])
def test_PAGE_08_the_carried_choice_is_that_of_the_newest_kept_row(algorithm: str) -> None:
    """4 rows a request, that of row r would choose {r, r + 10}. Kept are rows 0 and 1 of one, row 0 of the other.

    v1's draft reads the kept rows alone, as many as there are; v2's reads all four of everybody.
    """
    runner = ModelRunner(Picker(), 60, CPU, Counter())  # type: ignore[arg-type]
    config = SpecConfig(algorithm, topk=1, num_steps=3, num_draft_tokens=4)
    table, rows, kept_lens = torch.randperm(60).view(3, 20) + 1, torch.tensor([1, 2]), [2, 1]
    ids = torch.zeros(20, dtype=torch.int64)
    runner.forward(causal_batch(ids, table[rows, :10].flatten(), [10, 10], table, rows, [0, 0]), "prefill_draft")
    requests = [Request(r, [0] * 10, SamplingParams(), frozenset(), 99, row=1 + r, kv_len=10) for r in range(2)]
    verified = VerifyOutput(
        out_slots=table[rows, 10:14].flatten(),
        hidden_states=torch.zeros(8, 16, dtype=F64),
        target_predict=torch.zeros(0),
        predict=torch.tensor([0, 1, 2, 3] * 2).int(),
        accept_index=torch.zeros(0),
        accept_token_num=torch.zeros(0),
        logits=torch.zeros(0),
        finite=torch.tensor(True),
    )
    if algorithm == "eagle":
        for request, kept in zip(requests, kept_lens, strict=True):
            request.kv_len += kept
        done = CommitOutput(kept_lens, [[0, 1], [4]], torch.zeros(0))
        batch = extend_after_verify(RunningBatch.of(requests, table), verified, done, runner, config)
    else:
        batch = RunningBatch.of(requests, table)
        extend_all_rows(batch, verified, torch.tensor(kept_lens).int(), runner, config)
    assert batch.draft_input is not None
    assert batch.draft_input.selection is not None
    carried = batch.draft_input.selection[:, 0].tolist()
    positions = [{table[row].tolist().index(slot) for slot in of} for row, of in zip((1, 2), carried, strict=True)]
    assert positions == [{1, 11}, {0, 10}]
    assert [max(of) < 10 + kept for of, kept in zip(positions, kept_lens, strict=True)] == [True, True]


def test_a_carried_choice_is_attended_beside_the_tail() -> None:
    """Of the committed tokens those that were carried, of the tail what the mask shows; 0 stands for none."""
    pool = Picker.kv_layout.make_pool(20, CPU)
    table, tail = torch.tensor([[11, 12, 13, 14], [15, 16, 0, 0]]), torch.tensor([[1, 2], [3, 4]])
    batch = ForwardBatch(
        input_ids=torch.zeros(2, dtype=torch.int64),
        positions=torch.tensor([5, 3]),
        out_slots=torch.tensor([2, 4]),
        q_lens=[1, 1],
        req_to_token=table,
        rows=torch.tensor([0, 1]),
        prefix_lens=[4, 2],
        tail_slots=tail,
        tail_mask=torch.tensor([[[True, True]], [[False, True]]]),
        selection=torch.tensor([[[13, 11]], [[16, 0]]]),
    )
    nothing = torch.zeros(2, 1, 16, dtype=F64)
    selected = PoolAttention(batch, pool).select(0, nothing, nothing[:, 0] + 1, torch.zeros(2, 1).double(), topk=2)
    assert selected.int().tolist() == [[[1, 0, 1, 0, 1, 1]], [[0, 1, 0, 0, 0, 1]]]
    assert pool.layers[-1].any(1).nonzero().flatten().tolist() == [2, 4]  # and the new tokens' keys are stored


class Watch:
    """Looks at the draft's forwards of an engine: who carries a choice, whose it is, and what is stored."""

    def __init__(self, patch: pytest.MonkeyPatch, engine: Engine, fail_at: int = 0) -> None:
        runner, original = worker_of(engine).draft_runner, ModelRunner.forward
        pool = runner.pool
        assert isinstance(pool, DSATokenToKVPool)
        self.loop_forwards = 0
        chosen: dict[int, torch.Tensor] = {}  # by row of the request table, by the draft's newest extend

        def forward(self_: ModelRunner, batch: ForwardBatch, phase: str, *others: Any) -> ForwardOutput:
            if self_ is not runner:
                assert batch.selection is None
                return original(self_, batch, phase, *others)
            for layer in pool.index_layers:
                layer[batch.out_slots] = torch.nan
            if phase == "draft":
                self.loop_forwards += 1
                if self.loop_forwards == fail_at:
                    raise RuntimeError("in the draft loop")
                assert batch.selection is not None
                assert torch.equal(batch.selection, torch.stack([chosen[row] for row in batch.rows.tolist()]))
            else:
                assert batch.selection is None
            out = original(self_, batch, phase, *others)
            for layer in pool.index_layers:
                assert layer[batch.out_slots].isfinite().all()
            if phase != "draft" and batch.q_lens:
                assert out.selection is not None
                assert out.selection.shape == (len(batch.q_lens), 2, 4)
                chosen.update(zip(batch.rows.tolist(), out.selection, strict=True))
            return out

        patch.setattr(ModelRunner, "forward", forward)


def sharing_engine(spec: SpecConfig = SPEC) -> Engine:
    """Two of four requests at a time: batches shrink and grow."""
    return Engine(target_of("dsa"), draft_of("dsa", "sharing"), spec, max_running=2)


@pytest.mark.parametrize("shape", [{}, {"topk": 1, "num_draft_tokens": 4}], ids=["tree", "chain"])
@pytest.mark.parametrize("algorithm", ["eagle", "eagle-v2"])
def test_PAGE_09_a_reused_choice_is_the_drafts_own_and_every_step_stores_its_index_key(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, shape: dict[str, int]
) -> None:
    """Also where a chain takes the short cut."""
    engine = sharing_engine(replace(SPEC, algorithm=algorithm, **shape))
    plain = Engine(target_of("dsa")).generate(PROMPTS, PARAMS)
    watch = Watch(monkeypatch, engine)
    assert_same_output(plain, engine.generate(PROMPTS, PARAMS))
    assert watch.loop_forwards == engine.stats.draft_forwards >= (SPEC.num_steps - 1) * engine.stats.rounds > 0


@pytest.mark.parametrize("fail_at", [1, 2, 5])
def test_PAGE_09_nothing_is_carried_beyond_a_loop_that_failed(monkeypatch: pytest.MonkeyPatch, fail_at: int) -> None:
    engine, anew = sharing_engine(), sharing_engine().generate(PROMPTS, PARAMS)
    with monkeypatch.context() as patch:
        Watch(patch, engine, fail_at)
        with pytest.raises(RuntimeError, match="in the draft loop"):
            engine.generate(PROMPTS, PARAMS)
    engine.check()
    Watch(monkeypatch, engine)
    again = engine.generate(PROMPTS, PARAMS)
    assert_same_output(anew, again)
    assert [generation.accept_lens for generation in again] == [generation.accept_lens for generation in anew]
