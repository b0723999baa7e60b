"""What a dispatcher asks of its arguments before it launches anything. The message names the argument.

Type, device, shape and layout cost nothing to look at, so they always are. Values must be fetched from the device
first, which makes the host wait for all that was launched before: on a GPU they are only looked at where that was
asked for, with `check_values()` or REFSPEC_CHECK_VALUES=1 in the environment. On a CPU they always are.
"""

from __future__ import annotations

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


def check_tensor(
    name: str,
    x: Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...] = torch.int64,
    device: torch.device | None = None,
    rows_may_lie_apart: bool = False,
) -> None:
    """x is of that dtype (or one of them), that shape (None: any size), on that device, and contiguous.

    rows_may_lie_apart: along its first dimension x may have any stride.
    Raises TypeError for what is no tensor and ValueError for the rest.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, it must be a tensor")
    if x.dtype is not dtype and (isinstance(dtype, torch.dtype) or x.dtype not in dtype):
        wanted = dtype if isinstance(dtype, torch.dtype) else " or ".join(map(str, dtype))
        raise ValueError(f"{name} is {x.dtype}, it must be {wanted}")
    if x.dim() != len(shape) or any(
        want is not None and want != size for want, size in zip(shape, x.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(x.shape)}, it must be ({wanted})")
    if device is not None and x.device != device:
        raise ValueError(f"{name} is on {x.device}, the other arguments are on {device}")
    if not (x[:1] if rows_may_lie_apart else x).is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}, it must be contiguous")


def check_size(name: str, value: int, at_least: int = 1, at_most: int | None = None) -> None:
    """A size or count is an int within these bounds. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, it must be an int")
    if value < at_least or (at_most is not None and value > at_most):
        bounds = f"at least {at_least}" + ("" if at_most is None else f" and at most {at_most}")
        raise ValueError(f"{name} is {value}, it must be {bounds}")


def check_bounds(name: str, x: Tensor, low: int, high: int) -> None:
    """low <= every entry of x < high; not looked at on a GPU unless asked for. Raises ValueError."""
    if x.numel() and values_are_checked(x.device):
        least, most = (int(value) for value in torch.aminmax(x))
        if least < low or most >= high:
            raise ValueError(f"{name} has entries from {least} to {most}, they must be from {low} to {high - 1}")


def values_are_checked(device: torch.device) -> bool:
    """May a dispatcher look at the values of tensors on that device?"""
    return device.type == "cpu" or _values.get()
