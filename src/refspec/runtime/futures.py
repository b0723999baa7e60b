"""What the device has been told to compute, and when the host may look at it.

A launch returns before its work is done. To look at a result, `.tolist()` or `if tensor:`, makes the host wait until it
is, and until everything launched before it is; in the meantime it launches nothing, and then the device has nothing to
do. So a worker that wants both busy does not look. It leaves results on the device for the next launch to read, which
needs no waiting, since the device takes launches in order. And it has what the host must know copied behind its back:

1. `Futures(values)` starts the copies, on a stream of their own that waits for the values and for nothing that is
   launched later;
2. the host launches something else;
3. `wait()` returns when the copies have arrived, and only from then on may they be read.

On a CPU everything is computed at once, and a read that comes too early would be right by chance. So it is an error
there as well: whoever forgets to wait finds out without a GPU.

Source: SGLang: python/sglang/srt/managers/overlap_utils.py:FutureMap and
python/sglang/srt/managers/scheduler.py:Scheduler.event_loop_overlap @0.5.23
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class ReadTooEarly(RuntimeError):
    """The host has read a result before it waited for it: a fault of the engine, not of its user."""


class Futures:
    """Tensors by name, all on one device, on their way to the host."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._arrived = False
        self._event: torch.cuda.Event | None = None
        device = next(iter(values.values())).device
        if device.type != "cuda":
            # Copies, since the device may go on to write over what it has computed.
            self._host = {name: value.clone() for name, value in values.items()}
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._host = {}
            for name, value in values.items():
                pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                self._host[name] = pinned.copy_(value, non_blocking=True)
                value.record_stream(stream)  # its memory is not given to others before the copy is made
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def wait(self) -> None:
        """Until all have arrived."""
        if self._event:
            self._event.synchronize()
        self._arrived = True

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, on the host. Raises ReadTooEarly before `wait`."""
        if not self._arrived:
            raise ReadTooEarly(f"{name} was read before the host waited for it")
        return self._host[name]
