"""Every dispatcher counts its launches, and refuses a backend that is not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from refspec import kernels

NONE = torch.zeros(0, dtype=torch.int64)
NONE_BY_TWO = torch.zeros(0, 2, dtype=torch.int64)

CALLS: dict[str, Callable[..., object]] = {
    "assign_req_to_token": lambda **b: kernels.assign_req_to_token(
        torch.zeros(2, 4).long(), NONE, NONE, NONE, NONE, **b
    ),
    "build_tree": lambda **b: kernels.build_tree(NONE_BY_TWO, torch.zeros(0, 1).long(), NONE, 1, 2, 2, **b),
    "stable_topk": lambda **b: kernels.stable_topk(torch.rand(2, 3), 2, **b),
    "verify_tree_greedy": lambda **b: kernels.verify_tree_greedy(*[NONE_BY_TWO] * 5, 1, **b),
}


def test_every_operation_of_the_package_is_tried_here() -> None:
    assert set(CALLS) | {"launches"} == set(kernels.__all__)


@pytest.mark.parametrize("operation", CALLS)
def test_a_call_counts_as_one_launch_even_for_no_rows(operation: str) -> None:
    before = kernels.launches.copy()
    CALLS[operation]()
    CALLS[operation](backend="torch")
    assert kernels.launches - before == {operation: 2}


@pytest.mark.parametrize("operation", CALLS)
def test_unknown_backend_is_refused_and_not_counted(operation: str) -> None:
    before = kernels.launches.copy()
    with pytest.raises(ValueError, match=r"backend is 'cuda-graphs'"):
        CALLS[operation](backend="cuda-graphs")
    assert kernels.launches == before
