"""The draft reads what was committed, one token ahead, and starts anew from its last row."""

from __future__ import annotations

import pytest
import torch
from builders import prefix_slots

from refspec import SamplingParams, SpecConfig
from refspec.contracts import CommitOutput, ForwardBatch, ForwardOutput, VerifyOutput
from refspec.requests.request import Request, RunningBatch
from refspec.runtime.rows import causal_batch, causal_mask, positions_from
from refspec.spec.extend import extend_after_verify

CPU = torch.device("cpu")
CONFIG = SpecConfig(topk=2, num_steps=3, num_draft_tokens=5)
N = CONFIG.num_draft_tokens


class StubDraft:
    """Logits of row i have their peak at i, the next lower at i + 1; its hidden state is -i."""

    draft_to_target: None = None

    def __init__(self) -> None:
        self.calls: list[tuple[ForwardBatch, str]] = []

    def forward(self, batch: ForwardBatch, phase: str, logits_rows: torch.Tensor) -> ForwardOutput:
        n = len(batch.input_ids)
        if n:
            self.calls.append((batch, phase))
        logits = torch.zeros(n, 40)
        for i in range(n):
            logits[i, i], logits[i, i + 1] = 9.0, 8.0
        return ForwardOutput(logits[logits_rows], -torch.arange(n, dtype=torch.float64)[:, None])


def scene(paths: list[list[int]], finished: set[int] = frozenset()) -> tuple[RunningBatch, VerifyOutput, CommitOutput]:  # type: ignore[assignment]
    """Committed paths of requests that had 4, 5, 6 ... tokens: the state after commit."""
    b = len(paths)
    table = torch.arange(20 * (b + 1)).view(b + 1, 20) + 1000
    requests = []
    for r, path in enumerate(paths):
        request = Request(r, [1] * (4 + r), SamplingParams(), frozenset(), 99, row=r + 1, kv_len=4 + r + len(path))
        request.finish_reason = "stop" if r in finished else None
        requests.append(request)
    rows = torch.arange(b * N)
    verified = VerifyOutput(
        out_slots=rows + 200,
        hidden_states=rows[:, None].double(),
        target_predict=rows + 500,
        predict=(rows + 500).int(),
        accept_index=torch.zeros(0),
        accept_token_num=torch.zeros(0),
        logits=torch.zeros(0),
        finite=torch.tensor(True),
    )
    kept = [[r * N + column for column in path] for r, path in enumerate(paths)]
    return (
        RunningBatch.of(requests, table),
        verified,
        CommitOutput([len(path) for path in paths], kept, torch.zeros(0)),
    )


def test_rows_are_the_committed_ones_one_token_ahead() -> None:
    """Request 0 committed columns 0 and 2, request 1 column 0, request 2 columns 0 1 4."""
    batch, verified, done = scene([[0, 2], [0], [0, 1, 4]])
    draft = StubDraft()
    going_on = extend_after_verify(batch, verified, done, draft, CONFIG)  # type: ignore[arg-type]
    ((call, phase),) = draft.calls
    rows = [0, 2, 5, 10, 11, 14]
    assert phase == "extend"
    assert call.input_ids.tolist() == [row + 500 for row in rows]  # what the target said after each
    assert call.hidden_states is not None
    assert call.hidden_states.flatten().tolist() == rows  # the target's, at each
    assert call.out_slots.tolist() == [row + 200 for row in rows]
    assert call.positions.tolist() == [4, 5, 5, 6, 7, 8]
    assert call.q_lens == [2, 1, 3]
    assert call.prefix_lens == [4, 5, 6]
    assert prefix_slots(call) == [[1000 + 20 * r + p for p in range(3 + r)] for r in (1, 2, 3)]
    assert call.tail_slots.tolist() == [[200, 202, 0], [205, 0, 0], [210, 211, 214]]
    assert call.tail_mask is not None
    assert call.tail_mask.tolist() == [[[True, False, False], [True, True, False], [True, True, True]]] * 3
    assert going_on is batch


def test_TREE_13_next_round_starts_from_the_last_committed_row() -> None:
    """Not from the last drafted one, and not from a padded one."""
    batch, verified, done = scene([[0, 2], [0], [0, 1, 4]])
    going_on = extend_after_verify(batch, verified, done, StubDraft(), CONFIG)  # type: ignore[arg-type]
    draft_input = going_on.draft_input
    assert draft_input is not None
    assert going_on.bonus_tokens.tolist() == [502, 505, 514]
    assert draft_input.topk_index.tolist() == [[1, 2], [2, 3], [5, 6]]
    assert draft_input.hidden_states.flatten().tolist() == [-1, -2, -5]
    assert draft_input.topk_p.dtype == torch.float32
    assert (draft_input.topk_p[:, 0] > draft_input.topk_p[:, 1]).all()


@pytest.mark.parametrize("finished", [{0}, {1}, {2}, {0, 2}], ids=str)
def test_SEQ_06_finished_requests_are_left_out_by_index(finished: set[int]) -> None:
    batch, verified, done = scene([[0, 2], [0], [0, 1, 4]], finished)
    draft = StubDraft()
    going_on = extend_after_verify(batch, verified, done, draft, CONFIG)  # type: ignore[arg-type]
    left = [r for r in range(3) if r not in finished]
    rows = [[0, 2], [5], [10, 11, 14]]
    assert [request.index for request in going_on.requests] == left
    assert draft.calls[0][0].input_ids.tolist() == [row + 500 for r in left for row in rows[r]]
    assert going_on.bonus_tokens.tolist() == [rows[r][-1] + 500 for r in left]
    assert going_on.rows.tolist() == [r + 1 for r in left]


def test_when_all_have_finished_there_is_no_forward() -> None:
    batch, verified, done = scene([[0, 2], [0]], {0, 1})
    draft = StubDraft()
    going_on = extend_after_verify(batch, verified, done, draft, CONFIG)  # type: ignore[arg-type]
    assert draft.calls == []
    assert len(going_on) == 0


def test_positions_from() -> None:
    assert positions_from([4, 0, 7], [2, 3, 0], CPU).tolist() == [4, 5, 0, 1, 2]
    assert positions_from([], [], CPU).dtype == torch.int64


def test_rows_are_padded_with_the_dummy_slot() -> None:
    table, none = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    batch = causal_batch(none.new_zeros(3), torch.tensor([9, 8, 7]), [1, 2], table, torch.tensor([1, 2]), [0, 0])
    assert batch.tail_slots.tolist() == [[9, 0], [8, 7]]
    assert causal_batch(none, none, [], table, none, []).tail_slots.shape == (0, 0)


def test_causal_mask_of_the_longest() -> None:
    assert causal_mask([1, 2], CPU).tolist() == [[[True, False], [True, True]]] * 2
    assert causal_mask([], CPU).shape == (0, 0, 0)
