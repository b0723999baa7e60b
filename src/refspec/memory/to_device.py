"""Numbers of the host, on their way to the device.

`torch.tensor(values, device="cuda")` waits for all that the device has been told to do, and then for the copy: spec v2
would wait for the last round before it launches the next. From pinned memory the copy is one more launch, behind the
others. Results that go the other way are runtime/futures.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[float] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of them, (n) or (rows, n), without waiting for the device."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
