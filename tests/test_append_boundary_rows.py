"""A pool that holds the newest rows of each request, whatever number of them comes at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from refspec.kernels import append_boundary_rows
from refspec.kernels.append_boundary_rows import append_boundary_rows_torch, append_boundary_rows_triton


@both_backends
@settings(max_examples=25)
@given(
    front=st.integers(1, 5),
    rounds=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    hidden_size=st.sampled_from([1, 3, 8]),
)
def test_the_newest_of_all_that_came(backend: str, front: int, rounds: list[tuple[int, int]], hidden_size: int) -> None:
    """Two requests in rows 2 and 0 of the pool; row 1 is another's."""
    kept_tokens = torch.full((3, front), -1)
    kept_hidden, kept_lens = torch.full((3, front, hidden_size), -1.0), torch.tensor([0, front, 0])
    rows, history = torch.tensor([2, 0]), ([], [])  # type: tuple[torch.Tensor, tuple[list[int], list[int]]]
    for lens in rounds:
        segments = [torch.randint(0, 1000, (n,)).tolist() for n in lens]
        for past, segment in zip(history, segments, strict=True):
            past.extend(segment)
        tokens = torch.tensor([*segments[0], 5555, *segments[1], 5555], dtype=torch.int32)  # 5555 is nobody's
        hidden = tokens.float().unsqueeze(1) + torch.arange(hidden_size) / 10
        ends = torch.tensor([lens[0], lens[0] + 1 + lens[1]])
        append_boundary_rows(
            tokens, hidden, ends, torch.tensor(lens), rows, kept_tokens, kept_hidden, kept_lens, backend
        )
    for row, past in zip(rows.tolist(), history, strict=True):
        count = min(front, len(past))
        assert kept_lens[row] == count
        newest = torch.tensor(past[len(past) - count :])
        assert kept_tokens[row, front - count :].tolist() == newest.tolist()
        expected = newest.float().unsqueeze(1) + torch.arange(hidden_size) / 10
        assert torch.equal(kept_hidden[row, front - count :], expected)
    assert (kept_tokens[1] == -1).all()
    assert (kept_hidden[1] == -1).all()
    assert kept_lens[1] == front


@pytest.mark.parametrize(("front", "hidden_size"), [(1, 1), (3, 33), (5, 700), (33, 70)])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(front: int, hidden_size: int) -> None:
    pool = torch.arange(2 * front).view(2, front), torch.rand(2, front, hidden_size), torch.tensor([front, 0])
    ours, theirs = [among_nonsense(x) for x in pool], [x.clone() for x in pool]
    new = torch.arange(7), torch.rand(7, hidden_size), torch.tensor([3, 7]), torch.tensor([2, 4]), torch.tensor([1, 0])
    rims = [x.untyped_storage().tolist() for x in ours]
    append_boundary_rows_triton(*[among_nonsense(x) for x in new], *ours)
    append_boundary_rows_torch(*new, *theirs)
    for one, other, rim in zip(ours, theirs, rims, strict=True):
        assert torch.equal(one, other)
        now = one.untyped_storage().tolist()
        assert (now[:64], now[-64:]) == (rim[:64], rim[-64:])


def good() -> dict[str, Any]:
    return {
        "tokens": torch.arange(5),
        "hidden_states": torch.zeros(5, 4),
        "ends": torch.tensor([2, 5]),
        "lens": torch.tensor([2, 3]),
        "rows": torch.tensor([1, 0]),
        "kept_tokens": torch.zeros(3, 2).long(),
        "kept_hidden": torch.zeros(3, 2, 4),
        "kept_lens": torch.tensor([0, 1, 2]),
    }


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": torch.zeros(5)}, "tokens is torch.float32"),
        ({"hidden_states": torch.zeros(4, 4)}, "hidden_states has shape"),
        ({"ends": torch.tensor([2, 6])}, "ends has entries from 2 to 6"),
        ({"lens": torch.tensor([3, 3])}, "ends - lens has entries from -1"),
        ({"rows": torch.tensor([1, 1])}, "rows names rows more than once"),
        ({"rows": torch.tensor([1, 3])}, "rows has entries from 1 to 3"),
        ({"kept_hidden": torch.zeros(3, 2, 5)}, "kept_hidden has shape"),
        ({"kept_hidden": torch.zeros(3, 2, 4).bfloat16()}, "kept_hidden is torch.bfloat16"),
        ({"kept_lens": torch.tensor([0, 1, 3])}, "kept_lens has entries from 0 to 3"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, wrong: dict[str, Any], message: str) -> None:
    append_boundary_rows(**good(), backend=backend)
    with pytest.raises(ValueError, match=message):
        append_boundary_rows(**good() | wrong, backend=backend)


@both_backends
def test_a_draft_of_one_layer_keeps_nothing(backend: str) -> None:
    nothing = good() | {"kept_tokens": torch.zeros(3, 0).long(), "kept_hidden": torch.zeros(3, 0, 4)}
    append_boundary_rows(**nothing | {"kept_lens": torch.zeros(3).long()}, backend=backend)
