"""The draft-extend's rows, one for each accepted token: their positions, and where each request's bonus is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.kernels import ragged_extend_inputs
from refspec.kernels.ragged_extend_inputs import ragged_extend_inputs_torch, ragged_extend_inputs_triton


@both_backends
@settings(max_examples=40)
@given(
    requests=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6)), max_size=4),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_as_listed_request_by_request(backend: str, requests: list[tuple[int, int]], dtype: torch.dtype) -> None:
    tokens = [[100 * r + i for i in range(accepted)] for r, (_, accepted) in enumerate(requests)]
    positions, last_rows, bonus_tokens = ragged_extend_inputs(
        torch.tensor([before + accepted for before, accepted in requests], dtype=torch.int64),
        torch.tensor([accepted for _, accepted in requests], dtype=torch.int32),
        torch.tensor([token for row in tokens for token in row], dtype=dtype),
        backend,
    )
    assert {x.dtype for x in (positions, last_rows, bonus_tokens)} == {torch.int64}
    assert positions.tolist() == [before + i for before, accepted in requests for i in range(accepted)]
    assert last_rows.tolist() == [sum(map(len, tokens[: r + 1])) - 1 for r in range(len(tokens))]
    assert bonus_tokens.tolist() == [row[-1] for row in tokens]


@both_backends
def test_SEQ_06_kept_requests_and_one_that_joins(backend: str) -> None:
    """Bonus tokens 10, 20, 30 with 1, 2, 3 accepted: rows 0 and 2 stay, then a row 40 with 4 joins."""
    keep = torch.tensor([0, 2])
    lens, accepted = torch.tensor([5, 9, 9])[keep], torch.tensor([1, 2, 3], dtype=torch.int32)[keep]
    blocks = [[10], [19, 20], [28, 29, 30]]
    tokens = torch.tensor([token for r in keep.tolist() for token in blocks[r]])
    assert ragged_extend_inputs(lens, accepted, tokens, backend)[2].tolist() == [10, 30]
    lens, accepted = torch.cat([lens, torch.tensor([4])]), torch.cat([accepted, torch.tensor([4]).int()])
    tokens = torch.cat([tokens, torch.tensor([37, 38, 39, 40])])
    positions, last_rows, bonus_tokens = ragged_extend_inputs(lens, accepted, tokens, backend)
    assert accepted.tolist() == [1, 3, 4]
    assert positions.tolist() == [4, 6, 7, 8, 0, 1, 2, 3]
    assert last_rows.tolist() == [0, 3, 7]
    assert bonus_tokens.tolist() == [10, 30, 40]


@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33, 64, 65, 200])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int) -> None:
    """`size` tokens of a request, 64 of which are one block; and `size` requests."""
    for accepted in ([size, 1, size], [1 + r % 3 for r in range(size)]):
        accept_lens = torch.tensor(accepted, dtype=torch.int32)
        inputs = 10 + accept_lens.long(), accept_lens, torch.arange(sum(accepted), dtype=torch.int32)
        with guarded_outputs():
            ours = ragged_extend_inputs_triton(*[among_nonsense(x) for x in inputs])
        for one, other in zip(ours, ragged_extend_inputs_torch(*inputs), strict=True):
            assert torch.equal(one, other)


@needs_interpreter
def test_TRI_05_lengths_add_up_in_64_bits() -> None:
    """64 lengths of 2^27, as i32, in buffers for 10 tokens: every last row is right, and nothing else is written."""
    accept_lens = torch.full((64,), 2**27, dtype=torch.int32)
    with guarded_outputs():
        positions, last_rows, _ = ragged_extend_inputs_triton(
            accept_lens.long() + 3, accept_lens, torch.arange(10, dtype=torch.int32)
        )
    assert positions.tolist() == list(range(3, 13))
    assert last_rows.tolist() == [(r + 1) * 2**27 - 1 for r in range(64)]
    assert last_rows[-1] + 1 == 8589934592


@both_backends
def test_SEQ_08_no_requests(backend: str) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for output in ragged_extend_inputs(none, none.int(), none.int(), backend):
        assert (output.shape, output.dtype) == ((0,), torch.int64)


GOOD: dict[str, Any] = {
    "seq_lens": torch.tensor([5, 2]),
    "accept_lens": torch.tensor([3, 2], dtype=torch.int32),
    "accept_tokens": torch.arange(5, dtype=torch.int32),
}


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seq_lens": torch.tensor([5.0, 2.0])}, "seq_lens is torch.float32"),
        ({"seq_lens": torch.tensor([5, 1])}, "seq_lens - accept_lens has entries from -1"),
        ({"accept_lens": torch.tensor([3, 2])}, "accept_lens is torch.int64, it must be torch.int32"),
        ({"accept_lens": torch.tensor([5], dtype=torch.int32)}, "accept_lens has shape"),
        ({"accept_lens": torch.tensor([5, 0], dtype=torch.int32)}, "accept_lens has entries from 0"),
        ({"accept_tokens": torch.arange(6, dtype=torch.int32)}, "accept_tokens has 6 entries, accept_lens ask for 5"),
        ({"accept_tokens": torch.arange(10, dtype=torch.int32)[::2]}, "accept_tokens has strides"),
        ({"accept_tokens": torch.zeros(5)}, "accept_tokens is torch.float32"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, wrong: dict[str, Any], message: str) -> None:
    ragged_extend_inputs(**GOOD, backend=backend)
    with pytest.raises(ValueError, match=message):
        ragged_extend_inputs(**GOOD | wrong, backend=backend)
