"""The draft-extend's rows, N for each request whatever it accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.kernels import padded_extend_inputs
from refspec.kernels.padded_extend_inputs import padded_extend_inputs_torch, padded_extend_inputs_triton


@both_backends
@settings(max_examples=40)
@given(requests=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=4), n=st.integers(1, 9))
def test_as_listed_request_by_request(backend: str, requests: list[tuple[int, int]], n: int) -> None:
    requests = [(seq_len, min(accepted, n)) for seq_len, accepted in requests]
    predict = torch.randint(0, 1000, (len(requests) * n,), dtype=torch.int32)
    positions, input_ids, last_rows = padded_extend_inputs(
        torch.tensor([seq_len for seq_len, _ in requests], dtype=torch.int64),
        torch.tensor([accepted for _, accepted in requests], dtype=torch.int32),
        predict,
        n,
        backend,
    )
    assert {x.dtype for x in (positions, input_ids, last_rows)} == {torch.int64}
    assert positions.tolist() == [seq_len + column for seq_len, _ in requests for column in range(n)]
    assert input_ids.tolist() == predict.tolist()
    assert last_rows.tolist() == [r * n + accepted - 1 for r, (_, accepted) in enumerate(requests)]


@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33, 300])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int) -> None:
    """`size` rows of a request, and `size` requests."""
    for b, n in [(3, size), (size, 5)]:
        inputs = torch.arange(b), 1 + torch.arange(b, dtype=torch.int32) % n, torch.arange(b * n, dtype=torch.int32)
        with guarded_outputs():
            ours = padded_extend_inputs_triton(*[among_nonsense(x) for x in inputs], n)
        for one, other in zip(ours, padded_extend_inputs_torch(*inputs, n), strict=True):
            assert torch.equal(one, other)


@both_backends
def test_PAGE_08_what_is_carried_on_comes_from_no_rejected_row(backend: str) -> None:
    """Four rows a request, of which the first two are kept; row r would carry r and r + 10."""
    indices = torch.tensor([[row, row + 10] for row in range(4)])
    for accepted, carried in ((2, [1, 11]), (1, [0, 10]), (4, [3, 13])):
        accept_lens = torch.tensor([accepted], dtype=torch.int32)
        _, _, last_rows = padded_extend_inputs(torch.tensor([9]), accept_lens, torch.zeros(4).int(), 4, backend)
        assert indices[last_rows].tolist() == [carried]


@both_backends
def test_TRI_05_positions_beyond_32_bits(backend: str) -> None:
    inputs = torch.tensor([2**31 - 1, 2**40]), torch.tensor([1, 2], dtype=torch.int32), torch.zeros(4).int()
    positions, _, _ = padded_extend_inputs(*inputs, 2, backend)
    assert positions.tolist() == [2**31 - 1, 2**31, 2**40, 2**40 + 1]


@both_backends
def test_SEQ_08_no_requests(backend: str) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for output in padded_extend_inputs(none, none.int(), none.int(), 4, backend):
        assert (output.shape, output.dtype) == ((0,), torch.int64)


GOOD: dict[str, Any] = {
    "seq_lens": torch.tensor([5, 2]),
    "accept_lens": torch.tensor([3, 1], dtype=torch.int32),
    "predict": torch.arange(6, dtype=torch.int32),
    "num_draft_tokens": 3,
}


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seq_lens": torch.tensor([5, 2]).int()}, "seq_lens is torch.int32"),
        ({"seq_lens": torch.tensor([5, -2])}, "seq_lens has entries from -2"),
        ({"accept_lens": torch.tensor([3, 1])}, "accept_lens is torch.int64"),
        ({"accept_lens": torch.tensor([4, 1], dtype=torch.int32)}, "accept_lens has entries from 1 to 4"),
        ({"accept_lens": torch.tensor([3, 0], dtype=torch.int32)}, "accept_lens has entries from 0"),
        ({"predict": torch.arange(6)}, "predict is torch.int64"),
        ({"predict": torch.arange(5, dtype=torch.int32)}, r"predict has shape \(5,\), it must be \(6\)"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, wrong: dict[str, Any], message: str) -> None:
    padded_extend_inputs(**GOOD, backend=backend)
    with pytest.raises(ValueError, match=message):
        padded_extend_inputs(**GOOD | wrong, backend=backend)
