"""The round's rows of each request, and before them those that were kept: as listed row by row, and round by round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.kernels import append_boundary_rows, widened_extend_inputs
from refspec.kernels.widened_extend_inputs import widened_extend_inputs_torch, widened_extend_inputs_triton

REQUEST = st.tuples(st.integers(0, 9), st.integers(0, 4))  # committed, kept


def inputs_of(requests: list[tuple[int, int]], front: int, n: int, hidden_size: int) -> dict[str, Any]:
    """Requests in the rows of the table from the last one down."""
    b = len(requests)
    return {
        "seq_lens": torch.tensor([seq_len for seq_len, _ in requests], dtype=torch.int64),
        "predict": torch.randint(0, 1000, (b * n,), dtype=torch.int32),
        "hidden_states": torch.rand(b * n, hidden_size),
        "req_to_token": torch.randperm((b + 1) * 20).view(b + 1, 20) + 1,
        "req_pool_indices": torch.arange(b, 0, -1),
        "kept_tokens": torch.randint(1000, 2000, (b + 1, front)),
        "kept_hidden": torch.rand(b + 1, front, hidden_size),
        "kept_lens": torch.tensor([0, *(min(kept, front) for _, kept in reversed(requests))]),
        "num_draft_tokens": n,
    }


@both_backends
@settings(max_examples=30)
@given(
    requests=st.lists(REQUEST, max_size=3),
    front=st.integers(0, 4),
    n=st.integers(1, 5),
    hidden_size=st.sampled_from([1, 3, 33]),
)
def test_as_listed_row_by_row(
    backend: str, requests: list[tuple[int, int]], front: int, n: int, hidden_size: int
) -> None:
    given = inputs_of(requests, front, n, hidden_size)
    ids, hidden, positions, slots = widened_extend_inputs(**given, backend=backend)
    out = 0
    for r, (seq_len, kept) in enumerate(requests):
        row = given["req_pool_indices"][r]
        for j in range(front + n):
            position = seq_len - front + j
            if j < front and (front - j > kept or position < 0):
                expected: tuple[int, int, int] = (0, 0, 0)
                state = torch.zeros(hidden_size)
            else:
                old = j < front
                token = given["kept_tokens"][row, j] if old else given["predict"][r * n + j - front]
                state = given["kept_hidden"][row, j] if old else given["hidden_states"][r * n + j - front]
                expected = (int(token), position, int(given["req_to_token"][row, position]))
            assert (ids[out], positions[out], slots[out]) == expected
            assert torch.equal(hidden[out], state)
            out += 1
    assert len(ids) == len(hidden) == len(positions) == len(slots) == out


@both_backends
def test_what_is_read_again_is_the_committed_text(backend: str) -> None:
    """Round by round, with any number of accepted tokens, the rows in front of the new ones are the F newest of the
    text: each fed the token behind its position, and the hidden state at it.
    """
    front, n, text = 2, 3, list(range(100, 140))
    table = torch.arange(1, 51).view(1, 50)
    pool = torch.zeros(1, front).long(), torch.zeros(1, front, 1), torch.zeros(1).long()
    row, committed = torch.tensor([0]), 0
    for accepted in (5, 1, 3, 2, 1):  # first a prompt
        width = max(n, accepted)
        fed = torch.tensor([text[committed + c + 1] if c < accepted else -1 for c in range(width)], dtype=torch.int32)
        hidden = torch.arange(committed, committed + width).float().unsqueeze(1)
        if committed:
            ids, states, positions, slots = widened_extend_inputs(
                torch.tensor([committed]), fed, hidden, table, row, *pool, n, backend
            )
            count = front + accepted
            assert positions[:count].tolist() == list(range(committed - front, committed + accepted))
            assert ids[:count].tolist() == [text[p + 1] for p in positions[:count]]
            assert states[:count, 0].tolist() == positions[:count].tolist()
            assert torch.equal(slots, table[0, positions])
        ends = torch.tensor([accepted])
        append_boundary_rows(fed, hidden, ends, ends, row, *pool, backend)
        committed += accepted


@pytest.mark.parametrize(("b", "hidden_size"), [(1, 1), (3, 33), (2, 1100)])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(b: int, hidden_size: int) -> None:
    given = inputs_of([(5 * r, 2) for r in range(b)], 3, 4, hidden_size)
    n = given.pop("num_draft_tokens")
    with guarded_outputs():
        ours = widened_extend_inputs_triton(*map(among_nonsense, given.values()), n)
    for one, other in zip(ours, widened_extend_inputs_torch(*given.values(), n), strict=True):
        assert torch.equal(one, other)


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seq_lens": torch.tensor([5, 17])}, "seq_lens has entries from 5 to 17, they must be from 0 to 16"),
        ({"predict": torch.zeros(7).int()}, r"predict has shape \(7,\), it must be \(8\)"),
        ({"hidden_states": torch.zeros(8, 3)}, "kept_hidden has shape"),
        ({"req_pool_indices": torch.tensor([0, 3])}, "req_pool_indices has entries from 0 to 3"),
        ({"kept_lens": torch.tensor([0, 3, 1])}, "kept_lens has entries from 0 to 3"),
        ({"kept_hidden": torch.zeros(3, 2, 5).double()}, "kept_hidden is torch.float64"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, wrong: dict[str, Any], message: str) -> None:
    given = inputs_of([(5, 2), (1, 1)], 2, 4, 5)
    widened_extend_inputs(**given, backend=backend)
    with pytest.raises(ValueError, match=message):
        widened_extend_inputs(**given | wrong, backend=backend)
