"""Rows of the request table are handed out once, and row 0 never."""

from __future__ import annotations

import pytest
import torch

from refspec.memory.req_table import ReqTable


def table_of(rows: int) -> ReqTable:
    return ReqTable(rows, max_context=5, device=torch.device("cpu"))


def test_table_has_a_row_for_padding_beside_those_for_requests() -> None:
    table = table_of(3)
    assert table.req_to_token.shape == (4, 5)
    assert table.req_to_token.dtype == torch.int64
    assert [table.alloc() for _ in range(3)] == [1, 2, 3]


def test_freed_row_is_handed_out_again_after_the_others() -> None:
    table = table_of(3)
    first = table.alloc()
    table.free(first)
    assert [table.alloc() for _ in range(3)] == [2, 3, first]


def test_row_freed_twice_is_refused() -> None:
    table = table_of(2)
    row = table.alloc()
    table.free(row)
    with pytest.raises(ValueError, match=f"row {row} .* twice"):
        table.free(row)


@pytest.mark.parametrize("row", [0, -1, 3])
def test_row_that_no_request_can_own_is_refused(row: int) -> None:
    """Row 0 is the padding's: once handed out, padded rows would write into a request."""
    table = table_of(2)
    table.alloc()
    with pytest.raises(ValueError, match=f"row {row}"):
        table.free(row)
    assert table.free_rows == [2]
