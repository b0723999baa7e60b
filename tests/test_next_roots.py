"""The next round's roots: each bonus, and how many tokens stand before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.kernels import next_roots
from refspec.kernels.next_roots import next_roots_torch, next_roots_triton


def i32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@both_backends
@settings(max_examples=40)
@given(
    requests=st.lists(st.tuples(st.integers(0, 50), st.permutations(range(5)), st.integers(1, 5)), max_size=4),
    width=st.integers(5, 6),
)
def test_as_found_request_by_request(backend: str, requests: list[tuple[int, list[int], int]], width: int) -> None:
    """Paths of any columns, in any order; D may be more than N, as where drafts are long and trees small."""
    predict = torch.randint(0, 1000, (5 * len(requests),), dtype=torch.int32)
    paths = [[5 * r + column for column in columns[:length]] for r, (_, columns, length) in enumerate(requests)]
    accept_index = i32([path + [-1] * (width - len(path)) for path in paths]).view(len(paths), width)
    accept_token_num = i32([len(path) - 1 for path in paths])
    seq_lens = torch.tensor([seq_len for seq_len, _, _ in requests], dtype=torch.int64)
    accept_lens, new_seq_lens, bonus = next_roots(predict, accept_index, accept_token_num, seq_lens, backend)
    assert (accept_lens.dtype, new_seq_lens.dtype, bonus.dtype) == (torch.int32, torch.int64, torch.int64)
    assert accept_lens.tolist() == [len(path) for path in paths]
    assert new_seq_lens.tolist() == [seq_len + len(path) for (seq_len, _, _), path in zip(requests, paths, strict=True)]
    assert bonus.tolist() == [int(predict[path[-1]]) for path in paths]


@pytest.mark.parametrize("b", [1, 5, 127, 128, 129, 300])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(b: int) -> None:
    rows = torch.arange(b, dtype=torch.int32)
    inputs = torch.arange(2 * b, dtype=torch.int32), torch.stack([2 * rows, 2 * rows + 1], 1), rows % 2, torch.arange(b)
    with guarded_outputs():
        ours = next_roots_triton(*map(among_nonsense, inputs))
    for one, other in zip(ours, next_roots_torch(*inputs), strict=True):
        assert torch.equal(one, other)


@both_backends
def test_TRI_05_lengths_beyond_32_bits(backend: str) -> None:
    _, seq_lens, _ = next_roots(i32([7, 8]), i32([[0, 1]]), i32([1]), torch.tensor([2**31 - 1]), backend)
    assert seq_lens.tolist() == [2**31 + 1]


GOOD: dict[str, Any] = {
    "predict": i32([7, 8, 9, 6]),
    "accept_index": i32([[0, 1], [2, -1]]),
    "accept_token_num": i32([1, 0]),
    "seq_lens": torch.tensor([3, 4]),
}


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"predict": torch.arange(4)}, "predict is torch.int64"),
        ({"accept_index": i32([[0, 1]])}, r"accept_token_num has shape \(2,\), it must be \(1\)"),
        ({"accept_token_num": i32([1, 1])}, "where accept_token_num says that a path ends, has entries from -1"),
        ({"accept_token_num": i32([2, 0])}, "accept_token_num has entries from 0 to 2"),
        ({"accept_index": i32([[0, 4], [2, -1]])}, "a path ends, has entries from 2 to 4"),
        ({"seq_lens": torch.tensor([3])}, "seq_lens has shape"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, wrong: dict[str, Any], message: str) -> None:
    next_roots(**GOOD, backend=backend)
    with pytest.raises(ValueError, match=message):
        next_roots(**GOOD | wrong, backend=backend)
