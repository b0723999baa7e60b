"""Who runs an operation: its PyTorch reference or its Triton kernel.

| backend  | on CUDA tensors                     | on CPU tensors                          |
|----------|-------------------------------------|-----------------------------------------|
| "torch"  | the reference                       | the reference                           |
| "triton" | the kernel, compiled                | the kernel, in Triton's interpreter     |
| "auto"   | the kernel where Triton is there    | the reference                           |

Triton decides when it is first imported whether it compiles or interprets: TRITON_INTERPRET=1 must be set by then.
One process cannot do both. Triton's wheels are for Linux; elsewhere the references run, and kernels cannot.

Triton compiles a kernel anew for an integer that is 1, or a multiple of 16, for what the compiler can make of it. For
strides, and sizes that one server never changes, that is welcome. What changes from call to call (batches, steps,
totals) is named in `do_not_specialize`, or a server would stop to compile in the middle of its work. Beyond 2^31 such
an integer is still handed over in 64 bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, cast

import torch

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Absent:
        """Lets files with kernels be imported; nothing in it can run."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *_: Any, **__: Any) -> Any:
            return self

    triton = tl = _Absent()
    TRITON_INSTALLED = False
else:
    TRITON_INSTALLED = True

__all__ = [
    "BACKENDS",
    "TRITON_INSTALLED",
    "check_backend",
    "choose",
    "interpreting",
    "resolve_backend",
    "tl",
    "triton",
    "triton_type",
    "use_backend",
]

BACKENDS = ("auto", "torch", "triton")
Run = TypeVar("Run", bound=Callable[..., Any])

_auto: ContextVar[str] = ContextVar("what `auto` stands for", default="auto")


def interpreting() -> bool:
    """Does Triton interpret in this process, and so run kernels on CPU tensors?"""
    return TRITON_INSTALLED and bool(triton.knobs.runtime.interpret)


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Inside, "auto" stands for `backend`. Raises ValueError for a name that is none."""
    check_backend(backend)
    token = _auto.set(backend)
    try:
        yield
    finally:
        _auto.reset(token)


def check_backend(backend: str) -> None:
    """Raises ValueError for a backend that does not exist."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, it must be one of: {', '.join(BACKENDS)}")


def resolve_backend(backend: str, device: torch.device) -> str:
    """ "torch" or "triton", for tensors on `device`.

    Raises ValueError for a name that is none, or if Triton is asked for and cannot run there.
    """
    check_backend(backend)
    if backend == "auto":
        backend = _auto.get()
    if backend == "auto":
        return "triton" if device.type == "cuda" and TRITON_INSTALLED and not interpreting() else "torch"
    if backend == "triton":
        if not TRITON_INSTALLED:
            raise ValueError("backend is 'triton', but Triton is not installed: pip install triton (Linux only)")
        if device.type != "cuda" and not interpreting():
            setting = os.environ.get("TRITON_INTERPRET", "1")
            hindrance = f", which TRITON_INTERPRET={setting} forbids" if setting != "1" else ""
            raise ValueError(
                f"backend is 'triton', but on {device.type} tensors Triton runs only in its interpreter{hindrance}: "
                "set TRITON_INTERPRET=1 before Python starts"
            )
    return backend


def triton_type(dtype: torch.dtype) -> Any:
    """The same type, as a kernel's argument."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def choose(backend: str, device: torch.device, torch_run: Run, triton_run: Run) -> Run:
    """The implementation that `backend` means for tensors on `device`. Raises as `resolve_backend` does.

    Triton launches on the current GPU, wherever the tensors are. So its implementation runs with theirs as the current.
    """
    if resolve_backend(backend, device) == "torch":
        return torch_run
    return cast(Run, partial(_run_on, device, triton_run)) if device.type == "cuda" else triton_run


def _run_on(device: torch.device, run: Callable[..., Any], *arguments: Any) -> Any:
    """run(*arguments), with `device` as the current GPU."""
    with torch.cuda.device(device):
        return run(*arguments)
