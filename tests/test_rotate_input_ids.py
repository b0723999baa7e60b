"""Each row gets the id behind it, the last that counts a new token; nobody else's rows change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import both_backends, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.kernels import rotate_input_ids
from refspec.kernels.rotate_input_ids import rotate_input_ids_triton

WINDOW = st.tuples(st.integers(0, 9), st.integers(0, 8), st.integers(0, 2))  # rows, the last that counts, rows behind


@both_backends
@settings(max_examples=40)
@given(windows=st.lists(WINDOW, max_size=4))
def test_as_moved_row_by_row(backend: str, windows: list[tuple[int, int, int]]) -> None:
    starts, lens, last_rows, n = [], [], [], 0
    for length, last, behind in windows:
        starts.append(n)
        lens.append(length)
        last_rows.append(n + min(last, max(0, length - 1)))
        n += length + behind
    ids = torch.randint(0, 1000, (n,))
    expected = ids.tolist()
    for r, (start, length) in enumerate(zip(starts, lens, strict=True)):
        for row in range(start, start + length - 1):
            expected[row] = expected[row + 1]
        if length:
            expected[last_rows[r]] = 5000 + r
    new_tokens = torch.arange(5000, 5000 + len(starts))
    arguments = [torch.tensor(x, dtype=torch.int64) for x in (starts, lens)]
    rotate_input_ids(ids, *arguments, new_tokens, torch.tensor(last_rows, dtype=torch.int64), backend)
    assert ids.tolist() == expected


@both_backends
def test_three_layers_read_one_token_further_on_each(backend: str) -> None:
    """A round that accepted 41 and 42 of request 0 (N = 4, bonus 43) and none of request 1's. Each layer adds a guess;
    the rows behind those that count mean nothing.
    """
    ids = torch.tensor([41, 42, 43, 0, 90, 0, 0, 0])
    starts, lens, last_rows = torch.tensor([0, 4]), torch.tensor([4, 4]), torch.tensor([2, 4])
    fed = []
    for guesses in ([44, 91], [45, 92], [46, 93]):
        fed.append((ids[:3].tolist(), ids[4].item()))
        rotate_input_ids(ids, starts, lens, torch.tensor(guesses), last_rows, backend)
    assert fed == [([41, 42, 43], 90), ([42, 43, 44], 91), ([43, 44, 45], 92)]


@pytest.mark.parametrize("size", [1, 5, 1023, 1024, 1025, 3000])
@needs_interpreter
def test_TRI_02_nothing_beside_the_windows_is_touched(size: int) -> None:
    ids = torch.arange(3 * size)
    window = torch.tensor([size])
    rotate_input_ids_triton(ids, window, window, torch.tensor([-7]), 2 * window - 1)
    expected = torch.arange(3 * size)
    expected[size : 2 * size] += 1
    expected[2 * size - 1] = -7
    assert torch.equal(ids, expected)


GOOD: dict[str, Any] = {
    "input_ids": torch.arange(7),
    "starts": torch.tensor([0, 4]),
    "lens": torch.tensor([4, 3]),
    "new_tokens": torch.tensor([8, 9]),
    "last_rows": torch.tensor([3, 4]),
}


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"input_ids": torch.arange(7).int()}, "input_ids is torch.int32"),
        ({"lens": torch.tensor([4])}, r"lens has shape \(1,\), it must be \(2\)"),
        ({"lens": torch.tensor([4, 4])}, "starts . lens has entries from 4 to 8"),
        ({"lens": torch.tensor([5, 3])}, "the windows overlap"),
        ({"starts": torch.tensor([-1, 4])}, "starts has entries from -1"),
        ({"new_tokens": torch.tensor([8.0, 9.0])}, "new_tokens is torch.float32"),
        ({"last_rows": torch.tensor([4, 4])}, "last_rows names rows outside"),
        ({"last_rows": torch.tensor([3, 3])}, "last_rows names rows outside"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, wrong: dict[str, Any], message: str) -> None:
    good = {name: x.clone() for name, x in GOOD.items()}
    rotate_input_ids(**good, backend=backend)
    with pytest.raises(ValueError, match=message):
        rotate_input_ids(**good | wrong, backend=backend)
