"""Who reads and writes which cells of the request table, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from builders import (
    agreeing_now_and_then,
    random_logits,
)
from serving import VOCAB
from torch import Tensor

import refspec.spec.commit
import refspec.spec.draft
import refspec.workers.base
from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardBatch
from refspec.models.scripted import ScriptedModel
from refspec.runtime.runner import ModelRunner

SAID = random_logits(VOCAB)
TARGET = ScriptedModel(SAID, VOCAB)
DRAFT = ScriptedModel(agreeing_now_and_then(SAID, random_logits(VOCAB, salt=5)), VOCAB)
CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
TREE = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, exact_branch_kv=True)


@dataclass
class Access:
    """Of cells [start, end) of a row of the request table, in a step and a phase."""

    step: int
    phase: str
    write: bool
    row: int
    start: int
    end: int


class TableLog:
    """Keeps a log of the kernels and forwards that read or write the table."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.accesses: list[Access] = []
        self.step, self.phase = 0, ""
        original_phase = type(engine.scheduler.worker).phase
        log = self

        def phase(worker: Any, name: str) -> Any:
            log.phase = name
            return original_phase(worker, name)

        patch.setattr(type(engine.scheduler.worker), "phase", phase)
        for module in (refspec.spec.commit, refspec.spec.draft, refspec.workers.base):
            self._watch_writes(module, patch)
        if engine.allocator.page_size > 1:
            self._watch_draft_reads(patch)
        original_forward = ModelRunner.forward

        def forward(runner: ModelRunner, batch: ForwardBatch, *others: Any, **named: Any) -> Any:
            for row, length in zip(batch.rows.tolist(), batch.prefix_lens, strict=True):
                log.add(False, row, 0, length)
            return original_forward(runner, batch, *others, **named)

        patch.setattr(ModelRunner, "forward", forward)

    def add(self, write: bool, row: int, start: int, end: int) -> None:
        if end > start:
            self.accesses.append(Access(self.step, self.phase, write, row, start, end))

    def _watch_writes(self, module: Any, patch: pytest.MonkeyPatch) -> None:
        original = module.assign_req_to_token

        def assign(table: Tensor, rows: Tensor, start: Tensor, end: Tensor, slots: Tensor) -> None:
            for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
                self.add(True, row, first, last)
            original(table, rows, start, end, slots)

        patch.setattr(module, "assign_req_to_token", assign)

    def _watch_draft_reads(self, patch: pytest.MonkeyPatch) -> None:
        """Both kernels of the paged draft read the cells that the draft itself has just entered."""
        original = refspec.spec.draft.assign_draft_cache_locs

        def locs(table: Tensor, rows: Tensor, lens: Tensor, topk: int, steps: int, page: int) -> Tensor:
            spec = SpecConfig(topk=topk, num_steps=steps, num_draft_tokens=2, page_size=page)
            for row, length in zip(rows.tolist(), lens.tolist(), strict=True):
                self.add(False, row, length, spec.draft_end(length))
            return original(table, rows, lens, topk, steps, page)

        patch.setattr(refspec.spec.draft, "assign_draft_cache_locs", locs)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_MEM_16_nobody_reads_what_another_phase_left_behind_the_length(
    spec: SpecConfig, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, a finish, and a new request in the row that became free; cells are followed one by one."""
    spec = SpecConfig(**{**vars(spec), "page_size": page})
    engine = Engine(TARGET, DRAFT, spec, max_running=2)
    log = TableLog(engine, monkeypatch)
    short = engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=3))
    long = engine.add_request([4, 5, 6, 7, 8], SamplingParams(max_new_tokens=30))
    late = engine.add_request([9, 8, 7, 6, 5, 4, 3, 2], SamplingParams(max_new_tokens=12))
    rows: dict[int, dict[str, int]] = {}  # row -> owner -> the last step in which it had it
    owners = {"short": short, "long": long, "late": late}
    while any(request.finish_reason is None for request in owners.values()):
        before = {name: request.row for name, request in owners.items()}
        engine.step()
        for name, request in owners.items():
            if row := request.row or before[name]:
                rows.setdefault(row, {})[name] = log.step
        log.step += 1
    assert {tuple(owners) for owners in rows.values()} == {("short", "late"), ("long",)}

    last_of_short = next(owned["short"] for owned in rows.values() if "short" in owned)
    row_of_late = next(row for row, owned in rows.items() if "late" in owned)
    written_again = [a.step for a in log.accesses if a.row == row_of_late and a.write and a.phase == "prefill"]
    assert len(written_again) == 2
    assert written_again[1] > last_of_short

    committed = dict.fromkeys(rows, 0)  # the cells that hold committed tokens
    tentative: dict[tuple[int, int], str] = {}  # cells behind them -> the step and phase that wrote them last
    reads_behind = 0
    for access in log.accesses:
        mark = f"step {access.step}, {access.phase}"
        row = access.row
        if access.phase == "prefill" and access.write:
            assert access.start == 0
            committed[row] = access.end
            tentative = {cell: who for cell, who in tentative.items() if cell[0] != row}
        elif access.phase == "commit" and access.write:
            assert access.start == committed[row]
            committed[row] = access.end
        elif access.write:
            assert access.start == committed[row]  # nobody overwrites a committed cell
            tentative.update({(row, cell): mark for cell in range(access.start, access.end)})
        else:
            for cell in range(max(access.start, committed[row]), access.end):
                assert tentative[row, cell] == mark
                reads_behind += 1
    assert (reads_behind > 0) == (page > 1 and spec.topk > 1)
    assert 0 not in rows  # the row of the padding
