"""What each kernel becomes when it is compiled for a GPU, on a machine that has none.

The interpreter accepts code that the compiler refuses, and says nothing about registers. Triton compiles for a GPU that
is not there if a driver tells it which one to compile for. So a child process, without TRITON_INTERPRET, puts a
stand-in in the driver's place, makes the launches of `kernel_cases`, and stops each once it is compiled: what is
compiled is what a launch with those arguments would run, specialisation on alignment and on 1 included.

Registers and memory are what `cuobjdump`, which Triton's package brings, reads from the machine code.
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from refspec.bench.kernel_cases import kernel_cases, run_case
from refspec.kernels import backend

TARGETS = (80, 90)  # compute capabilities: sm_80 is the A100, sm_90 the H100 and H200

# Kernels that may spill, or keep an array in local memory, with the reason.
SPILLS_EXPLAINED: dict[str, str] = {}


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled for one GPU. Memory is in bytes: stack, local and spills for a thread, shared for a program.

    Where stack or local is not zero, something lives in memory that was meant for a register: spills say how much of
    that ptxas stored and loaded for want of registers; the rest are arrays that are indexed by a variable.
    """

    operation: str
    kernel: str
    cases: tuple[str, ...]  # those that launch it, by label
    constants: str  # the constexpr arguments, which are part of the code
    target: int
    num_warps: int
    registers: int
    shared: int
    stack: int
    local: int
    spill_stores: int
    spill_loads: int

    @property
    def spills(self) -> bool:
        return bool(self.stack or self.local or self.spill_stores or self.spill_loads)

    @property
    def explanation(self) -> str | None:
        """Why it may spill; None: nothing says that it may."""
        return SPILLS_EXPLAINED.get(self.kernel)


@dataclass(frozen=True)
class Refused:
    """A case whose launch the compiler refuses."""

    operation: str
    case: str
    target: int
    error: str


def compile_report(
    operations: Sequence[str],
    targets: Sequence[int] = TARGETS,
    processes: int = 2,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[list[Compiled], list[Refused]]:
    """Compile the kernels of these operations, in so many child processes; progress is told how many are done.

    Returns them by operation, in the order given. Raises ValueError where Triton or its cuobjdump is missing, and
    ChildProcessError if a child ends early.
    """
    if not backend.TRITON_INSTALLED:
        raise ValueError("nothing can be compiled: Triton is not installed (pip install triton; Linux only)")
    _cuobjdump()
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for operation in sorted(operations, key=lambda operation: operation != "tree_attention"):  # takes longest by far
        waiting.put(operation)
    found: dict[str, tuple[list[Compiled], list[Refused]]] = {}

    def work() -> None:
        with _Child(targets) as child:
            while True:
                try:
                    operation = waiting.get_nowait()
                except queue.Empty:
                    return
                found[operation] = child.compile(operation)
                progress(len(found))

    with ThreadPoolExecutor(processes) as pool:
        futures = [pool.submit(work) for _ in range(min(processes, len(operations)))]
        try:
            for future in futures:
                future.result()
        finally:
            while not waiting.empty():  # after a failure or Ctrl-C nothing more is begun
                waiting.get()
    return (
        [kernel for operation in operations for kernel in found[operation][0]],
        [refused for operation in operations for refused in found[operation][1]],
    )


_CHILD = "import sys; from refspec.bench.compile_report import serve; serve([int(a) for a in sys.argv[1:]])"


class _Child:
    """A process that compiles: it reads the names of operations, one a line, and answers each with a line of JSON."""

    def __init__(self, targets: Sequence[int]) -> None:
        package_folder = str(Path(__file__).parents[2])
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # No empty entry: it would stand for the current folder, and a learner's torch.py there.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
        self.errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 # closed in __exit__
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, *map(str, targets)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
        )

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # between two operations it holds nothing that could be lost
        self.process.communicate()
        self.errors.close()

    def compile(self, operation: str) -> tuple[list[Compiled], list[Refused]]:
        assert self.process.stdin
        assert self.process.stdout
        try:
            print(operation, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            answer = ""
        else:
            answer = self.process.stdout.readline()
        if not answer:
            status = self.process.wait()
            self.errors.seek(0)
            last = (self.errors.read().strip().splitlines() or ["it said nothing"])[-1]
            raise ChildProcessError(f"the process that compiles {operation} ended with status {status}: {last}")
        document = json.loads(answer)
        return (
            [Compiled(**{**entry, "cases": tuple(entry["cases"])}) for entry in document["compiled"]],
            [Refused(**entry) for entry in document["refused"]],
        )


def serve(targets: Sequence[int]) -> None:
    """The child's work, until stdin ends. What Triton prints goes to stderr: stdout holds the answers alone."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    launches = record_instead_of_launching()
    for line in sys.stdin:
        compiled, refused = _compile_operation(line.strip(), targets, launches)
        document = {"compiled": [asdict(c) for c in compiled], "refused": [asdict(r) for r in refused]}
        print(json.dumps(document), file=answers, flush=True)


class StandInDriver:
    """In the place of Triton's driver. The number of the device is the capability of the GPU that it stands for, so
    that Triton, which keeps what it compiled for each device, keeps those apart.
    """

    def __init__(self) -> None:
        self.capability = TARGETS[0]

    def get_current_device(self) -> int:
        return self.capability

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@dataclass
class Launches:
    """What was compiled since the list was last emptied: (kernel's name, constexpr arguments, compiled kernel)."""

    driver: StandInDriver
    made: list[tuple[str, str, Any]]


def record_instead_of_launching() -> Launches:
    """From here on a launch compiles its kernel, and ends there."""
    import triton
    from triton.runtime.jit import JITFunction

    launches = Launches(StandInDriver(), [])
    triton.runtime.driver.set_active(launches.driver)
    compile_only = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
        names = [parameter.name for parameter in self.params]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        constants = [f"{p.name}={_shown(values[p.name])}" for p in self.params if p.is_constexpr and p.name in values]
        launches.made.append((self.fn.__name__.strip("_"), " ".join(constants), kernel))
        return kernel

    JITFunction.run = run
    backend.interpreting = lambda: True  # what dispatchers ask before they launch anything on a CPU's tensors
    return launches


def _shown(value: Any) -> str:
    """A constexpr argument as the report names it: a kernel or a type by its name."""
    return str(getattr(value, "__name__", value)).strip("_")


def _compile_operation(
    operation: str, targets: Sequence[int], launches: Launches
) -> tuple[list[Compiled], list[Refused]]:
    """Every kernel that the cases of an operation launch, each once for every target."""
    compiled: dict[tuple[int, str], Compiled] = {}
    refused = []
    for case in kernel_cases(operation, torch.device("cpu")):
        for target in targets:
            launches.driver.capability = target
            launches.made.clear()
            try:
                run_case(operation, case, "triton")
            except Exception as error:  # the compiler raises many kinds; all of them mean that it refused
                refused.append(Refused(operation, case.label, target, f"{type(error).__name__}: {error}"))
            for name, constants, kernel in launches.made:
                known = compiled.get((target, kernel.hash))
                if known is None:
                    compiled[target, kernel.hash] = Compiled(
                        operation=operation,
                        kernel=name,
                        cases=(case.label,),
                        constants=constants,
                        target=target,
                        num_warps=kernel.metadata.num_warps,
                        **_resources(kernel, target),
                    )
                elif case.label not in known.cases:
                    compiled[target, kernel.hash] = replace(known, cases=(*known.cases, case.label))
    return list(compiled.values()), refused


def _resources(kernel: Any, target: int) -> dict[str, int]:
    """Registers, memory and spills of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder, "kernel.cubin")
        code.write_bytes(kernel.asm["cubin"])
        dump = subprocess.run(
            [_cuobjdump(), "-res-usage", str(code)], capture_output=True, text=True, check=True
        ).stdout
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", dump))
        stack, local = int(usage["STACK"]), int(usage["LOCAL"])
        stores, loads = _spills(kernel.asm["ptx"], target, Path(folder)) if stack or local else (0, 0)
    return {
        "registers": int(usage["REG"]),
        "shared": kernel.metadata.shared,
        "stack": stack,
        "local": local,
        "spill_stores": stores,
        "spill_loads": loads,
    }


def _spills(ptx: str, target: int, folder: Path) -> tuple[int, int]:
    """Bytes that a thread stores and loads for want of registers: ptxas says so itself when it is asked to talk."""
    import triton

    source = folder / "kernel.ptx"
    source.write_text(ptx, encoding="utf-8")
    architecture = f"sm_{target}a" if target >= 90 else f"sm_{target}"
    ptxas = triton.knobs.nvidia.ptxas.path
    said = subprocess.run(
        [ptxas, "-v", f"--gpu-name={architecture}", str(source), "-o", str(folder / "again.cubin")],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _cuobjdump() -> str:
    """The path of the tool that reads machine code. Raises ValueError if Triton's package lacks it."""
    import triton

    try:
        return triton.knobs.nvidia.cuobjdump.path
    except RuntimeError:
        raise ValueError(
            "Triton's package has no cuobjdump, which reads registers and spills: reinstall Triton, or name one in "
            "TRITON_CUOBJDUMP_PATH"
        ) from None
