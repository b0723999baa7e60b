"""What lies in an engine's KV pools, and what a forward over the whole text would have put there."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from refspec import Engine
from refspec.requests.request import Request
from refspec.runtime.rows import causal_batch
from refspec.runtime.runner import ModelRunner
from refspec.workers.eagle_v1 import EagleWorkerV1


def worker_of(engine: Engine) -> EagleWorkerV1:
    worker = engine.scheduler.worker
    assert isinstance(worker, EagleWorkerV1)
    return worker


def cached(runner: ModelRunner, engine: Engine, request: Request) -> torch.Tensor:
    """What the runner's pool holds for the request: (layers, kv_len, 2, kv_heads, head_dim)."""
    slots = engine.table.req_to_token[request.row, : request.kv_len]
    return runner.pool.buffer[:, slots]


def prefilled(
    runner: ModelRunner, ids: list[int], hidden_states: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Pool and hidden states after one forward over ids in a pool of its own."""
    fresh = ModelRunner(runner.model, len(ids), torch.device("cpu"), Counter())
    slots = torch.arange(1, len(ids) + 1)
    out = fresh.forward(
        causal_batch(torch.tensor(ids), slots, [len(ids)], slots[None], torch.tensor([0]), [0], hidden_states),
        phase="fresh",
    )
    return fresh.pool.buffer[:, 1:], out.hidden_states


def poison(engine: Engine) -> None:
    """Every slot but the dummy holds NaN in both pools, as memory does that was never written, or held an overflow."""
    for runner in worker_of(engine).runners:
        runner.pool.buffer[:, 1:] = torch.nan


def record_logits(patch: pytest.MonkeyPatch) -> list[bool]:
    finite: list[bool] = []
    original = ModelRunner.forward

    def forward(self, batch, phase, logits_rows=None):  # type: ignore[no-untyped-def]
        out = original(self, batch, phase, logits_rows)
        finite.append(bool(torch.isfinite(out.logits).all() and torch.isfinite(out.hidden_states).all()))
        return out

    patch.setattr(ModelRunner, "forward", forward)
    return finite
