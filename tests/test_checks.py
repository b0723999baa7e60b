"""What a dispatcher asks of its arguments, and when it may look at their values."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from refspec.kernels.checks import (
    check_bounds,
    check_flag,
    check_number,
    check_size,
    check_tensor,
    check_values,
    values_are_checked,
)

CUDA = torch.device("cuda", 0)


def test_a_tensor_as_asked_for_passes() -> None:
    check_tensor("x", torch.zeros(2, 3), (2, None), torch.float32, torch.device("cpu"))
    check_tensor("x", torch.zeros(0, 3, dtype=torch.int32), (None, 3), (torch.int32, torch.int64))
    check_tensor("x", torch.tensor(1), ())


@pytest.mark.parametrize(
    ("x", "shape", "dtype", "message"),
    [
        (torch.zeros(2), (2,), torch.int64, "x is torch.float32, it must be torch.int64"),
        (torch.zeros(2), (2,), (torch.int32, torch.int64), "x is torch.float32, it must be torch.int32 or torch.int64"),
        (torch.zeros(2), (3,), torch.float32, r"x has shape \(2,\), it must be \(3\)"),
        (torch.zeros(2), (2, None), torch.float32, r"x has shape \(2,\), it must be \(2, any\)"),
        (torch.zeros(4, 3).T, (3, 4), torch.float32, r"x has strides \(1, 3\), it must be contiguous"),
        (torch.zeros(4, device="meta"), (4,), torch.float32, "x is on meta, the other arguments are on cpu"),
    ],
)
def test_another_one_is_named(x: torch.Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tensor("x", x, shape, dtype, torch.device("cpu"))


def test_what_is_no_tensor_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="slots is list, it must be a tensor"):
        check_tensor("slots", [1, 2], (2,))


def test_sizes() -> None:
    check_size("topk", 1)
    check_size("n", 0, at_least=0, at_most=0)
    with pytest.raises(ValueError, match="topk is 0, it must be at least 1"):
        check_size("topk", 0)
    with pytest.raises(ValueError, match="n is -1, it must be at least 0 and at most 32"):
        check_size("n", -1, at_least=0, at_most=32)
    for wrong in (1.0, True, None, torch.tensor(1)):
        with pytest.raises(TypeError, match=r"topk is .*, it must be an int"):
            check_size("topk", wrong)


def test_numbers_and_flags() -> None:
    check_number("scale", 0.5)
    check_number("threshold", 1, 0, 1)
    check_flag("reuse_coin", False)
    for value in (1.5, float("nan")):
        with pytest.raises(ValueError, match=r"threshold is .*, it must be from 0 to 1"):
            check_number("threshold", value, 0, 1)
    for wrong in ("x", None, True, 1j, torch.tensor(0.5)):
        with pytest.raises(TypeError, match=r"scale is .*, it must be a number"):
            check_number("scale", wrong)
    for wrong in ("no", 0, None, torch.tensor(True)):
        with pytest.raises(TypeError, match=r"reuse_coin is .*, it must be a bool"):
            check_flag("reuse_coin", wrong)


def test_rows_may_lie_apart_but_not_overlap() -> None:
    check_tensor("x", torch.zeros(3, 8)[:, :5], (3, 5), torch.float32, rows_may_lie_apart=True)
    for overlapping in (torch.zeros(1, 5).expand(3, 5), torch.zeros(9).as_strided((3, 5), (2, 1))):
        with pytest.raises(ValueError, match="each row must be contiguous and apart from others"):
            check_tensor("x", overlapping, (3, 5), torch.float32, rows_may_lie_apart=True)


def test_a_view_that_stands_for_other_numbers_is_named() -> None:
    for view in (torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2, dtype=torch.complex64).conj().imag):
        with pytest.raises(ValueError, match="x is a view that stands for other numbers"):
            check_tensor("x", view, (2,), (torch.complex64, torch.float32))


def test_bounds_name_the_extremes() -> None:
    check_bounds("slots", torch.tensor([0, 7]), 0, 8)
    check_bounds("slots", torch.tensor([], dtype=torch.int64), 0, 0)
    for entries in ([0, 8], [-1, 3]):
        with pytest.raises(ValueError, match=f"slots has entries from {min(entries)} to {max(entries)}.* from 0 to 7"):
            check_bounds("slots", torch.tensor(entries), 0, 8)


def test_values_on_a_gpu_are_looked_at_only_where_asked_for() -> None:
    assert values_are_checked(torch.device("cpu"))
    assert not values_are_checked(CUDA)
    with check_values():
        assert values_are_checked(CUDA)
        with check_values(False):
            assert not values_are_checked(CUDA)
    assert not values_are_checked(CUDA)


@pytest.mark.parametrize(("setting", "checked"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_can_ask_for_it(setting: str | None, checked: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "REFSPEC_CHECK_VALUES"}
    if setting is not None:
        environment["REFSPEC_CHECK_VALUES"] = setting
    code = "import torch; from refspec.kernels.checks import values_are_checked as f; print(f(torch.device('cuda')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == str(checked)
