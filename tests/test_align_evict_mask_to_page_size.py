"""What is freed are whole pages: none that a committed or kept token lies in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, needs_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import assert_rim_untouched

from refspec.kernels import align_evict_mask_to_page_size
from refspec.kernels.align_evict_mask_to_page_size import (
    align_evict_mask_to_page_size_torch,
    align_evict_mask_to_page_size_triton,
)


def mask_of(kept: list[int], n: int) -> torch.Tensor:
    return torch.tensor([[column >= k for column in range(n)] for k in kept], dtype=torch.bool).view(len(kept), n)


@both_backends
@settings(max_examples=60)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=4),
    n=st.integers(1, 9),
    page_size=st.sampled_from([1, 2, 3, 4, 16, 64]),
)
def test_PAGE_04_no_page_is_shared_by_a_kept_and_an_evicted_token(
    backend: str, requests: list[tuple[int, int]], n: int, page_size: int
) -> None:
    """And no more is kept than that takes; committed tokens count as kept."""
    lens, kept = [seq_len for seq_len, _ in requests], [min(k, n) for _, k in requests]
    mask = mask_of(kept, n)
    align_evict_mask_to_page_size(torch.tensor(lens, dtype=torch.int64), mask, page_size, backend)
    for seq_len, k, row in zip(lens, kept, mask.tolist(), strict=True):
        pages_in_use = {position // page_size for position in range(seq_len + k)}
        for column, evicted in enumerate(row):
            assert evicted == ((seq_len + column) // page_size not in pages_in_use)


@both_backends
@pytest.mark.parametrize(
    ("seq_len", "n", "kept", "freed", "keep_up_to"),
    [(10, 8, 3, 2, 16), (10, 8, 2, 6, 12), (7, 4, 1, 3, 8)],
    ids=["a", "b", "c"],
)
def test_PAGE_04_the_three_cases(backend: str, seq_len: int, n: int, kept: int, freed: int, keep_up_to: int) -> None:
    mask = mask_of([kept], n)
    align_evict_mask_to_page_size(torch.tensor([seq_len]), mask, 4, backend)
    assert int(mask.sum()) == freed
    assert [seq_len + c for c in range(n) if mask[0, c]] == list(range(keep_up_to, seq_len + n))


@both_backends
def test_MEM_07_the_page_that_the_last_committed_token_shares_stays(backend: str) -> None:
    """Page 4, length 6, verify slots at 6..9, the root kept: 8 and 9 are freed, 7 is not."""
    mask = mask_of([1], 4)
    align_evict_mask_to_page_size(torch.tensor([6]), mask, 4, backend)
    assert mask.tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int) -> None:
    """`size` rows of a request, and `size` requests."""
    for lens, mask in [
        (torch.tensor([6, 0, 11]), mask_of([1, 0, size], size)),
        (torch.arange(size), mask_of([r % 6 for r in range(size)], 5)),
    ]:
        expected, guarded = mask.clone(), among_nonsense(mask)
        align_evict_mask_to_page_size_torch(lens, expected, 4)
        align_evict_mask_to_page_size_triton(among_nonsense(lens), guarded, 4)
        assert torch.equal(guarded, expected)
        assert_rim_untouched(guarded)


@both_backends
def test_TRI_05_lengths_beyond_32_bits(backend: str) -> None:
    mask = mask_of([1], 4)
    align_evict_mask_to_page_size(torch.tensor([2**40 + 2]), mask, 4, backend)
    assert mask.tolist() == [[False, False, True, True]]


@both_backends
@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)])
def test_SEQ_08_no_requests_and_no_rows(backend: str, shape: tuple[int, int]) -> None:
    mask = torch.zeros(shape, dtype=torch.bool)
    align_evict_mask_to_page_size(torch.zeros(shape[0], dtype=torch.int64), mask, 4, backend)
    assert mask.shape == shape


GOOD: dict[str, Any] = {"seq_lens": torch.tensor([6]), "page_size": 4}


@both_backends
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seq_lens": torch.tensor([6]).int()}, "seq_lens is torch.int32"),
        ({"seq_lens": torch.tensor([-1])}, "seq_lens has entries from -1"),
        ({"evict_mask": mask_of([1, 1], 4)}, r"evict_mask has shape \(2, 4\), it must be \(1, any\)"),
        ({"evict_mask": mask_of([1], 4).int()}, "evict_mask is torch.int32"),
        ({"evict_mask": mask_of([1], 8)[:, ::2]}, "evict_mask has strides"),
        ({"evict_mask": torch.tensor([[False, True, False, True]])}, "evict_mask keeps a row behind an evicted one"),
        ({"page_size": 0}, "page_size is 0"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, wrong: dict[str, Any], message: str) -> None:
    good = GOOD | {"evict_mask": mask_of([1], 4)}
    align_evict_mask_to_page_size(**good, backend=backend)
    with pytest.raises(ValueError, match=message):
        align_evict_mask_to_page_size(**good | wrong, backend=backend)
