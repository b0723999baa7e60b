"""What this machine can run, and what to do about what it cannot.

What may be broken is asked in a child process, answer by answer: a torch that brings Python down takes only the
child with it, and the answers before it stand.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from refspec.oracle import wheel
from refspec.oracle.wheel import WheelError

OLDEST_PYTHON = (3, 11)
CHILD_SECONDS = 120
# Those that the engine loads unless it is told otherwise.
REQUIRED_WEIGHTS = ("tiny", "tiny-eagle")


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    needed_for: str
    ok: bool
    found: str
    remedy: str | None = None  # one command or step; None where there is nothing to mend
    required: bool = False  # without it `refspec generate` does not run, not even on the CPU


def examine() -> list[Check]:
    """All checks, in the order in which one would mend things. Raises nothing, whatever is broken."""
    answers = _ask_child()
    return [
        _check_python(),
        _check_torch(answers["torch"]),
        *_check_weights(answers["weights"], answers["algorithms"]),
        _check_algorithms(answers["algorithms"]),
        _check_gpu(answers["gpu"], answers["torch"]),
        _check_triton(answers["triton"], answers["gpu"]),
        _check_oracle(),
    ]


def can_generate(checks: list[Check]) -> bool:
    """Is everything there that the main job needs?"""
    return all(check.ok for check in checks if check.required)


# --- the findings -----------------------------------------------------------------------------------------------------


def _check_python() -> Check:
    ok = sys.version_info >= OLDEST_PYTHON
    version, kind = platform.python_version(), platform.python_implementation()
    return Check(
        "Python",
        "everything",
        ok=ok,
        found=f"{version} ({kind}) on {platform.system()} {platform.machine()}",
        remedy=None if ok else f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer",
        required=True,
    )


def _check_torch(answer: dict[str, Any]) -> Check:
    check = partial(Check, "torch", "every model", required=True)
    if "error" in answer:
        remedy = "run scripts/start.sh, or: pip install --force-reinstall torch"
        return check(ok=False, found=answer["error"], remedy=remedy)
    build = f"CUDA {answer['cuda']}" if answer["cuda"] else f"ROCm {answer['hip']}" if answer["hip"] else "CPU"
    found = f"{answer['version']}, built for {build}; threads: {answer['threads']}, cores: {os.cpu_count()}"
    return check(ok=True, found=found)


def _check_weights(answer: dict[str, Any], algorithms: dict[str, Any]) -> list[Check]:
    if "error" in answer:
        answer = {name: {"error": "not looked at, since torch does not load"} for name in REQUIRED_WEIGHTS}
    checks = []
    for name, found in answer.items():
        required = name in REQUIRED_WEIGHTS
        users = [algorithm for algorithm, draft in algorithms.get("drafts", {}).items() if draft == name]
        needed_for = "generating without --target and --draft" if required else " and ".join(users) or "nothing so far"
        check = partial(Check, f"weights {name}", needed_for, required=required)
        if "error" in found:
            remedy = "reinstall refspec, or train them: python scripts/train_tiny.py"
            checks.append(check(ok=False, found=found["error"], remedy=remedy))
        else:
            size = f"{found['parameters'] / 1e6:.2f}M parameters, {found['megabytes']:.1f} MB"
            checks.append(check(ok=True, found=size))
    return checks


def _check_algorithms(answer: dict[str, Any]) -> Check:
    check = partial(Check, "algorithms", "those of installed packages; the built-in ones run")
    if "error" in answer:
        return check(ok=False, found=answer["error"], remedy="see to torch first")
    if answer["complaints"]:
        return check(ok=False, found="; ".join(answer["complaints"]), remedy="mend these packages, or remove them")
    return check(ok=True, found=", ".join(answer["drafts"]))


def _check_gpu(answer: dict[str, Any], torch: dict[str, Any]) -> Check:
    check = partial(Check, "GPU", "speed; without one everything runs on the CPU")
    if answer.get("devices"):
        return check(ok=True, found=", ".join(answer["devices"]))
    remedy = None
    if shutil.which("nvidia-smi") and "error" not in torch:
        if torch["cuda"]:
            remedy = "see what nvidia-smi says: the driver may be older than this torch needs"
        else:
            remedy = "install a torch built for CUDA: https://pytorch.org/get-started/locally/"
    return check(ok=False, found="none that torch can use", remedy=remedy)


def _check_triton(answer: dict[str, Any], gpu: dict[str, Any]) -> Check:
    check = partial(Check, "triton", "the Triton kernels; without it the PyTorch references run")
    if "error" not in answer:
        return check(ok=True, found=f"{answer['version']}; {_how_kernels_run(bool(gpu.get('devices')))}")
    if sys.platform == "linux":
        return check(ok=False, found=answer["error"], remedy="pip install triton")
    found = "not installed: its wheels are for Linux only"
    return check(ok=False, found=found, remedy="use a Linux container, or WSL on Windows")


def _how_kernels_run(gpu_is_there: bool) -> str:
    """In this process, if it imported Triton. Where no GPU is, refspec itself asks for the interpreter."""
    setting = os.environ.get("TRITON_INTERPRET", "")
    interprets = setting.lower() in ("1", "true", "on", "yes", "y")
    if gpu_is_there:
        return f"TRITON_INTERPRET={setting} has its kernels interpreted" if interprets else "its kernels run on the GPU"
    if interprets:
        return "without a GPU its kernels run in the interpreter"
    return f"its kernels cannot run: there is no GPU, and TRITON_INTERPRET={setting} forbids the interpreter"


def _check_oracle() -> Check:
    check = partial(Check, "SGLang oracle", "comparing our kernels with SGLang's own")
    try:
        states = wheel.states()
    except (WheelError, OSError) as error:
        return check(ok=False, found=str(error), remedy="set REFSPEC_CACHE to a folder for SGLang's wheels")
    found = ", ".join(f"{state.version} {state.status}" for state in states)
    faults = [f"; {state.version}: {state.detail}" for state in states if state.detail]
    remedies = [state.remedy for state in states if state.remedy]
    remedy = remedies[0] if remedies else None
    return check(ok=not remedies, found=f"wheels of SGLang: {found}{''.join(faults)}", remedy=remedy)


# --- the child --------------------------------------------------------------------------------------------------------


def _ask_child() -> dict[str, dict[str, Any]]:
    """The probes' answers by name; {"error": why} for each that has none."""
    package_folder = str(Path(__file__).parents[1])
    # No empty entry: it would stand for the current folder, and a learner's torch.py there.
    path = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-P", "-c", "from refspec.doctor import answer; answer()"]
    try:
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CHILD_SECONDS)
        output, ending = child.stdout, _ending(child.returncode)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        ending = f"no answer within {CHILD_SECONDS} seconds"
    except OSError as error:
        output, ending = "", f"cannot start {sys.executable}: {error.strerror}"
    answers: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        if line.startswith('{"probe"'):  # other lines: what a library saw fit to print
            found = json.loads(line)
            answers[found["probe"]] = found["answer"]
    return {name: answers.get(name, {"error": ending}) for name in PROBES}


def _ending(status: int) -> str:
    if status < 0:
        return f"Python was ended by {signal.Signals(-status).name} while it was loaded"
    return f"Python ended with status {status} while it was loaded"


def answer() -> None:
    """What the child runs: one line of JSON for each probe, as soon as it is known."""
    for name, probe in PROBES.items():
        try:
            found = probe()
        except ModuleNotFoundError as error:
            found = {"error": f"not installed (no module {error.name})"}
        except BaseException as error:
            found = {"error": f"does not load: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        print(json.dumps({"probe": name, "answer": found}), flush=True)


def _probe_torch() -> dict[str, Any]:
    import torch

    ones = torch.ones(8, 8)
    if float((ones @ ones).sum()) != 8**3:
        raise RuntimeError("a product of two matrices comes out wrong")
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
    }


def _probe_gpu() -> dict[str, Any]:
    import torch

    found = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(i)
        found.append(f"{device.name}, {device.total_memory / 2**30:.0f} GB, compute {device.major}.{device.minor}")
    return {"devices": found}


def _probe_triton() -> dict[str, Any]:
    import triton

    return {"version": triton.__version__}


def _probe_algorithms() -> dict[str, Any]:
    """Of all that load, the shipped drafts; and what is wrong with those that packages offer."""
    from refspec.config import ALGORITHMS, algorithm_entry_points
    from refspec.workers.registry import clash_with, find_algorithm

    drafts, complaints = {}, [clash for name in ALGORITHMS if (clash := clash_with(name))]
    for name in (*ALGORITHMS, *algorithm_entry_points()):
        try:
            drafts[name] = find_algorithm(name).shipped_draft
        except ValueError as error:
            complaints.append(str(error))
    return {"drafts": drafts, "complaints": complaints}


def _probe_weights() -> dict[str, Any]:
    """Configuration, tokenizer, and the tensors' sizes, which the files' heads tell."""
    from refspec.models.checkpoint import SHIPPED, SHIPPED_FOLDER

    return {name: _look_into(SHIPPED_FOLDER / folder) for name, folder in SHIPPED.items()}


def _look_into(folder: Path) -> dict[str, Any]:
    from math import prod

    from safetensors import SafetensorError, safe_open

    from refspec.models.checkpoint import TARGET_ARCHITECTURE, architecture_of, load_tokenizer, read_config

    if not folder.is_dir():
        return {"error": f"no folder {folder}"}
    try:
        architecture = architecture_of(folder)
        read_config(folder, architecture)
        if architecture == TARGET_ARCHITECTURE and load_tokenizer(folder) is None:
            return {"error": f"no tokenizer.json in {folder}"}
        file = folder / "model.safetensors"
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()  # safe_open is no mapping: it cannot be gone through itself
            parameters = sum(prod(tensors.get_slice(tensor).get_shape()) for tensor in names)
    except (ValueError, OSError, SafetensorError) as error:
        return {"error": str(error)}
    return {"parameters": parameters, "megabytes": file.stat().st_size / 1e6}


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": _probe_torch,
    "weights": _probe_weights,
    "algorithms": _probe_algorithms,
    "gpu": _probe_gpu,
    "triton": _probe_triton,
}
