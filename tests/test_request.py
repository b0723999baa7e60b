"""Batches lose and gain requests; every field follows, by index and never by count."""

from __future__ import annotations

import pytest
import torch

from refspec import SamplingParams
from refspec.contracts import DraftInput
from refspec.requests.request import Request, RunningBatch

TABLE = torch.arange(70).view(7, 10)


def request_of(index: int, prompt_len: int = 3, **fields: int) -> Request:
    return Request(index, [1] * prompt_len, SamplingParams(), frozenset(), 100, row=index + 1, **fields)


def batch_of(numbers: list[int], draft: bool = True, drawn: bool = True) -> RunningBatch:
    """Request n, in every field, is told by its number."""
    requests = [request_of(n, kv_len=n + 2, seed=n) for n in numbers]
    for request in requests:
        request.accept_lens = [request.index + 1]
    batch = RunningBatch.of(requests, TABLE)
    column = torch.tensor(numbers)
    batch.bonus_tokens = 10 * (column + 1)
    if draft:
        batch.draft_input = DraftInput(
            column[:, None].float() / 10,
            10 * (column[:, None] + 1),
            column[:, None].double().expand(-1, 4),
            column[:, None].float().expand(-1, 3) if drawn else None,
        )
    return batch


def numbers_in(batch: RunningBatch) -> list[list[int]]:
    """The requests' numbers, as each field tells them."""
    told = [
        [request.index for request in batch.requests],
        [row - 1 for row in batch.rows.tolist()],
        [length - 2 for length in batch.seq_lens.tolist()],
        [length - 2 for length in batch.prefix_lens],
        [token // 10 - 1 for token in batch.bonus_tokens.tolist()],
    ]
    if batch.draft_input is not None:
        told += [
            [round(p * 10) for p in batch.draft_input.topk_p[:, 0].tolist()],
            [token // 10 - 1 for token in batch.draft_input.topk_index[:, 0].tolist()],
            [int(x) for x in batch.draft_input.hidden_states[:, 0].tolist()],
        ]
        if batch.draft_input.draft_probs is not None:
            told.append([int(x) for x in batch.draft_input.draft_probs[:, 2].tolist()])
    told.append(batch.sampling.seeds.tolist())
    return told


def assert_holds(batch: RunningBatch, numbers: list[int]) -> None:
    assert numbers_in(batch) == [numbers] * len(numbers_in(batch))
    assert len(batch) == len(numbers)


def test_SEQ_06_keep_then_merge() -> None:
    """Top tokens 10, 20, 30 with accept lengths 1, 2, 3; keep rows 0 and 2, then merge a row 40 / 4."""
    kept = batch_of([0, 1, 2]).keep([0, 2])
    assert kept.bonus_tokens.tolist() == [10, 30]
    merged = kept.merge(batch_of([3]))
    assert merged.bonus_tokens.tolist() == [10, 30, 40]
    assert [request.accept_lens for request in merged.requests] == [[1], [3], [4]]
    assert_holds(merged, [0, 2, 3])


@pytest.mark.parametrize("draft", [True, False], ids=["eagle", "plain"])
@pytest.mark.parametrize("rows", [[], [0], [3], [1, 2], [0, 3], [2, 0], [0, 1, 2, 3], [3, 2, 1, 0]], ids=str)
def test_SEQ_06_any_rows_in_any_order(rows: list[int], draft: bool) -> None:
    kept = batch_of([0, 1, 2, 3], draft).keep(rows)
    assert_holds(kept, rows)
    assert (kept.draft_input is not None) == draft


@pytest.mark.parametrize("draft", [True, False], ids=["eagle", "plain"])
@pytest.mark.parametrize(("ours", "theirs"), [([0], [1, 2]), ([3, 1], [0]), ([], [2]), ([1], [])], ids=str)
def test_SEQ_06_merge_puts_the_others_behind(ours: list[int], theirs: list[int], draft: bool) -> None:
    assert_holds(batch_of(ours, draft).merge(batch_of(theirs, draft)), ours + theirs)


def test_drafts_that_were_not_drawn_have_no_law_to_follow_them() -> None:
    merged = batch_of([0, 1, 2], drawn=False).keep([2, 0]).merge(batch_of([3], drawn=False))
    assert merged.draft_input is not None
    assert merged.draft_input.draft_probs is None
    assert_holds(merged, [2, 0, 3])


def test_keeping_leaves_the_whole_batch_as_it_was() -> None:
    whole = batch_of([0, 1, 2])
    whole.keep([1]).seq_lens += 100
    assert_holds(whole, [0, 1, 2])


def test_going_on_are_those_without_a_reason_to_end() -> None:
    batch = batch_of([0, 1, 2])
    batch.requests[1].finish_reason = "stop"
    assert batch.going_on() == [0, 2]


def test_batch_of_nobody() -> None:
    batch = RunningBatch.of([], TABLE)
    assert batch.prefix_lens == []
    assert batch.rows.dtype == batch.seq_lens.dtype == batch.bonus_tokens.dtype == torch.int64
    assert batch.going_on() == []


def test_what_a_request_has_to_read() -> None:
    """First its prompt; after a retraction its output too, but for the newest token, which is pending."""
    request = Request(0, [1, 2, 3], SamplingParams(), frozenset(), 100)
    assert (request.read_ids, request.unread_len) == ([1, 2, 3], 3)
    request.kv_len = 2
    assert request.unread_len == 1
    request.kv_len, request.output_ids = 3, [7]
    assert (request.read_ids, request.unread_len) == ([1, 2, 3], 0)
    request.kv_len, request.output_ids = 5, [7, 8, 9]
    assert (request.all_ids, request.unread_len) == ([1, 2, 3, 7, 8, 9], 0)
    request.forget_slots()
    assert (request.read_ids, request.unread_len) == ([1, 2, 3, 7, 8], 5)
