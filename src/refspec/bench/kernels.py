"""`refspec bench kernels`: each kernel against its reference, against SGLang's, and against the memory's speed.

A GPU's clock drifts, so nothing is compared across time: in each repetition every contestant runs once, in an order
that turns, and what is reported is the median of the repetitions' ratios. Before each call a buffer larger than the
GPU's cache is written. That empties the cache, and keeps the GPU busy while the host queues the call: what the events
around it measure is then the GPU's time, not the host's, unless the call itself makes the host wait, as references do.

The bound is the time in which the bytes that an operation must move can be moved, at the speed at which this GPU copied
a buffer in the same repetition. Small operations are far from it: a launch alone takes microseconds.

SGLang's time is that of its kernel's launches alone, repeated as its code made them for these inputs. What its Python
does around them (buffers, other operations) is left out, so its real time is not shorter.
"""

from __future__ import annotations

import importlib
import pkgutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from refspec.bench.kernel_cases import Case, kernel_cases, run_case
from refspec.kernels import backend
from refspec.oracle import operations as described
from refspec.oracle.operation import Inputs, Operation
from refspec.oracle.opinions import OPINIONS, why_not_for
from refspec.oracle.sources import Sources

REPETITIONS = 30
COPIED = 256 << 20  # bytes of the buffer that is copied, read and written once each
FLUSHED = 1 << 30  # bytes written before each call

Call = Callable[[], object]
Timer = Callable[[Call], float]  # seconds that a call takes


@dataclass(frozen=True)
class Timing:
    """One case. Ratios are medians over the repetitions, with the first and third quartile."""

    operation: str
    case: str
    bytes: int
    microseconds: float  # of our kernel, median
    torch: tuple[float, float, float]  # the reference's time / our kernel's
    sglang: tuple[float, float, float] | None  # SGLang's time / our kernel's
    sglang_note: str  # why there is none; empty where there is one
    bound: tuple[float, float, float]  # our kernel's time / the least that its bytes take


@dataclass(frozen=True)
class KernelReport:
    """What was measured on one GPU in one run."""

    device: str
    torch: str
    triton: str
    copy_bandwidth: float  # bytes read and written in a second, median
    repetitions: int
    timings: list[Timing]


def bench_kernels(
    operations: Sequence[str],
    sources: Sources,
    repetitions: int = REPETITIONS,
    progress: Callable[[str], None] = lambda case: None,
) -> KernelReport:
    """Time all cases of these operations on the current GPU. progress is told of each before it begins.

    Raises ValueError where there is no GPU, or where Triton is missing or interprets.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "no GPU that torch can use: timings of Triton's interpreter mean nothing (`refspec bench kernels "
            "--compile-report` needs no GPU, and shows what the kernels compile to)"
        )
    if not backend.TRITON_INSTALLED or backend.interpreting():
        raise ValueError("kernels can only be timed where Triton is installed and TRITON_INTERPRET is not set")
    device = torch.device("cuda")
    timer = gpu_timer(device)
    here, there = (torch.zeros(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    timings, seconds_to_copy = [], []
    for operation in operations:
        for case in kernel_cases(operation, device):
            progress(f"{operation} {case.label}")
            timing, copies = time_case(operation, case, timer, lambda: there.copy_(here), sources, repetitions)
            timings.append(timing)
            seconds_to_copy += copies
    return KernelReport(
        device=torch.cuda.get_device_name(device),
        torch=torch.__version__,
        triton=backend.triton.__version__,
        copy_bandwidth=2 * COPIED / statistics.median(seconds_to_copy),
        repetitions=repetitions,
        timings=timings,
    )


def gpu_timer(device: torch.device) -> Timer:
    """Seconds between two events on the GPU, before and after the call, with an empty cache."""
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=device)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(call: Call) -> float:
        flushed.zero_()
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    return seconds


def time_case(
    operation: str, case: Case, timer: Timer, copy: Call, sources: Sources, repetitions: int
) -> tuple[Timing, list[float]]:
    """Time one case. copy copies COPIED bytes. Returns the timing, and the seconds that each copy took."""
    calls: dict[str, Call] = {
        "copy": copy,
        "triton": lambda: run_case(operation, case, "triton"),
        "torch": lambda: run_case(operation, case, "torch"),
    }
    sglang = sglang_launches(operation, case, sources)
    if callable(sglang):
        calls["sglang"] = sglang
    for call in calls.values():
        call()  # compile, and load libraries
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions):
        for turn in range(len(names)):
            name = names[(repetition + turn) % len(names)]
            seconds[name].append(timer(calls[name]))
    least = [case.bytes * copied / (2 * COPIED) for copied in seconds["copy"]]
    timing = Timing(
        operation=operation,
        case=case.label,
        bytes=case.bytes,
        microseconds=1e6 * statistics.median(seconds["triton"]),
        torch=_ratios(seconds["torch"], seconds["triton"]),
        sglang=_ratios(seconds["sglang"], seconds["triton"]) if callable(sglang) else None,
        sglang_note="" if callable(sglang) else sglang,
        bound=_ratios(seconds["triton"], least),
    )
    return timing, seconds["copy"]


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and third quartile of the ratios."""
    first, median, third = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return median, first, third


def sglang_launches(operation: str, case: Case, sources: Sources) -> Call | str:
    """SGLang's launches for this case, ready to be made again and again; or why there are none."""
    if operation not in {module.name for module in pkgutil.iter_modules(described.__path__)}:
        return "parity does not know the operation"
    described_operation: Operation = importlib.import_module(f"{described.__name__}.{operation}").OPERATION
    if why := why_not_for(OPINIONS["sglang-gpu"], described_operation, sources.folders):
        return why
    assert described_operation.sglang
    ask, inputs = described_operation.sglang, _parity_inputs(case)
    try:
        if not described_operation.sglang_takes(inputs):
            return "SGLang's code does not take it"
        launches = _recorded(lambda: ask(sources, inputs))
    except Exception as error:  # it is other people's code, which was not made for this call
        return f"SGLang's code raised {type(error).__name__}"
    return (lambda: [launch() for launch in launches]) if launches else "SGLang's code launched no Triton kernel"


def _parity_inputs(case: Case) -> Inputs:
    """The case's arguments as parity names them: each buffer; and of a pool, each layer as rows of bytes."""
    inputs = dict(case.arguments)
    pool, buffers = inputs.pop("pool", None), inputs.pop("buffers", ())
    layers = {f"layer_{i}": layer.flatten(1).view(torch.uint8) for i, layer in enumerate(pool.layers if pool else ())}
    return layers | inputs | {f"buffer_{i}": x for i, x in enumerate(buffers)}


def _recorded(call: Call) -> list[Call]:
    """The launches of Triton kernels that a call makes, which can be made again on the same tensors."""
    from triton.runtime.jit import JITFunction

    launches: list[Call] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(lambda: launch(self, *args, **kwargs))
        return launch(self, *args, **kwargs)

    with patch.object(JITFunction, "run", run):
        call()
    return launches
