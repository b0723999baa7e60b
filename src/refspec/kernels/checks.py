"""What a dispatcher asks of its arguments before it launches anything. The message names the argument.

Type, device, shape and layout cost nothing to look at, so they always are. Values must be fetched from the device
first, which makes the host wait for all that was launched before: on a GPU they are only looked at where that was
asked for, with `check_values()` or REFSPEC_CHECK_VALUES=1 in the environment. On a CPU they always are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_values: ContextVar[bool] = ContextVar(
    "values are checked on GPUs too", default=os.environ.get("REFSPEC_CHECK_VALUES", "") not in ("", "0")
)


@contextmanager
def check_values(on: bool = True) -> Iterator[None]:
    """Inside, values are checked on a GPU too, at the price of a synchronisation for each."""
    token = _values.set(on)
    try:
        yield
    finally:
        _values.reset(token)


def device_of(name: str, x: Tensor) -> torch.device:
    """Where x is. Raises TypeError for what is no tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, it must be a tensor")
    return x.device


def check_tensor(
    name: str,
    x: Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...] = torch.int64,
    device: torch.device | None = None,
    rows_may_lie_apart: bool = False,
) -> None:
    """x is of that dtype (or one of them), that shape (None: any size), on that device, and contiguous.

    rows_may_lie_apart: along its first dimension x may have a larger stride.
    Raises TypeError for what is no tensor and ValueError for the rest.
    """
    on = device_of(name, x)
    if x.dtype is not dtype and (isinstance(dtype, torch.dtype) or x.dtype not in dtype):
        wanted = dtype if isinstance(dtype, torch.dtype) else " or ".join(map(str, dtype))
        raise ValueError(f"{name} is {x.dtype}, it must be {wanted}")
    if x.dim() != len(shape) or any(
        want is not None and want != size for want, size in zip(shape, x.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(x.shape)}, it must be ({wanted})")
    if device is not None and on != device:
        raise ValueError(f"{name} is on {on}, the other arguments are on {device}")
    if x.is_conj() or x.is_neg():
        raise ValueError(f"{name} is a view that stands for other numbers: resolve_conj() or resolve_neg() makes them")
    if rows_may_lie_apart and len(x) > 1:
        row = x[0]
        if not row.is_contiguous() or x.stride(0) < row.numel():
            raise ValueError(f"{name} has strides {x.stride()}, each row must be contiguous and apart from others")
    elif not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}, it must be contiguous")


def check_size(name: str, value: int, at_least: int = 1, at_most: int | None = None) -> None:
    """A size or count is an int within these bounds. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, it must be an int")
    if value < at_least or (at_most is not None and value > at_most):
        bounds = f"at least {at_least}" + ("" if at_most is None else f" and at most {at_most}")
        raise ValueError(f"{name} is {value}, it must be {bounds}")


def check_number(name: str, value: float, at_least: float = -math.inf, at_most: float = math.inf) -> None:
    """A number is an int or a float within these bounds, and not NaN. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}, it must be a number")
    if not at_least <= value <= at_most:
        raise ValueError(f"{name} is {value}, it must be from {at_least} to {at_most}")


def check_flag(name: str, value: bool) -> None:
    """A flag is a bool. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, it must be a bool")


def check_bounds(name: str, x: Tensor, low: int, high: int) -> None:
    """low <= every entry of x < high; not looked at on a GPU unless asked for. Raises ValueError."""
    if x.numel() and values_are_checked(x.device):
        least, most = x.min().item(), x.max().item()  # on a CPU three times as fast as aminmax
        if least < low or most >= high:
            raise ValueError(f"{name} has entries from {least} to {most}, they must be from {low} to {high - 1}")


def check_sum(name: str, value: int, of: str, x: Tensor) -> None:
    """value is the sum of x; not looked at on a GPU unless asked for. Raises ValueError."""
    if values_are_checked(x.device) and x.sum().item() != value:
        raise ValueError(f"{name} is {value}, {of} add up to {x.sum().item()}")


def values_are_checked(device: torch.device) -> bool:
    """May a dispatcher look at the values of tensors on that device?"""
    return device.type == "cpu" or _values.get()
