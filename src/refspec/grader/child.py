"""What a child of the nursery does with its short life: load one file, call one function, send back what came out.

Everything here runs beside the learner's code, which may change any of it. That does not matter: whatever is sent is
taken for what the function returned, and compared where this process cannot reach.

One line of JSON for each thing that happened:

    {"loaded": true}                                     or {"failed": {"kind", "message", "module", "line"}}
    {"case": 0, "value": ..., "inputs": {name: ...}}     or "raised": {...} in the place of the value
"""

from __future__ import annotations

import importlib.abc
import io
import math
import os
import signal
import sys
import types
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import decode_source
from typing import Any

import torch

from refspec.grader import wire
from refspec.grader.limits import Limits

if sys.platform != "win32":
    import resource

LONGEST_MESSAGE = 400
NO_REPLY = 70  # exit status of a child that could not send what it had


class Refused(ImportError):
    """The solution is not there to be imported."""


class _Refuser(importlib.abc.MetaPathFinder):
    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name in self.modules:
            raise Refused(f"{name} holds the solution", name=name)
        return None


def run(limits: Limits, user_tasks: int, job_fd: int, reply_fd: int, printed_fd: int) -> None:
    """Called in a fresh fork; never returns. The job comes from job_fd, to its end; see sandbox.Job.

    user_tasks: how many threads this user's processes have, about.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _take_streams(printed_fd, keep=(job_fd, reply_fd))
    apply_limits(limits, user_tasks)
    with os.fdopen(job_fd, "rb") as stream:
        job = wire.loads(stream.read())
    sys.dont_write_bytecode = True
    sys.argv = [job["path"]]
    sys.meta_path.insert(0, _Refuser(job["refuse"]))

    def send(message: dict[str, Any]) -> None:
        data = memoryview(wire.dumps(message))
        while data:
            data = data[os.write(reply_fd, data) :]

    status = NO_REPLY
    with suppress(OSError):  # the learner's code may have closed what this writes to
        function = _load(job, send)
        if function is not None:
            for number, inputs in enumerate(job["cases"]):
                _flush(job["mark"])
                send({"case": number, **_call(function, inputs, job["path"])})
        _flush()
        status = 0
    os._exit(status)  # without what the learner's code left for the end


def _flush(mark: str = "") -> None:
    """What was printed is out, and the mark behind it, by which the judge knows where the next call begins."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    with suppress(OSError):
        os.write(1, mark.encode("ascii"))


def apply_limits(limits: Limits, user_tasks: int) -> list[str]:
    """To this process and its children. Returns what does not hold here."""
    wanted = [
        ("no core dump", resource.RLIMIT_CORE, 0),
        ("CPU time", resource.RLIMIT_CPU, math.ceil(limits.seconds) + 1),
        ("size of files", resource.RLIMIT_FSIZE, limits.file_mb << 20),
    ]
    held = _held_bytes()
    if held is not None:
        wanted.append(("memory", resource.RLIMIT_AS, held + (limits.memory_mb << 20)))
    refused = [] if held is not None else ["memory"]
    if os.geteuid() == 0:
        refused.append("number of processes (this is root: they are counted instead)")
    else:
        # It counts all of the user's, and others may start some in the meantime.
        wanted.append(("number of processes", resource.RLIMIT_NPROC, user_tasks + 4 * limits.processes))
    for name, which, value in wanted:
        try:
            _, hard = resource.getrlimit(which)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))
        except (ValueError, OSError):
            refused.append(name)
    return refused


def _held_bytes() -> int | None:
    """What RLIMIT_AS counts, of this process, much of it merely mapped; None where the system does not say."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))
    except (OSError, StopIteration):
        return None


def _take_streams(printed_fd: int, keep: Sequence[int]) -> None:
    """Nothing to read, one pipe for what is printed, and no file open but those to keep."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, goal in ((null, 0), (printed_fd, 1), (printed_fd, 2)):
        os.dup2(source, goal)
    for fd in map(int, os.listdir("/dev/fd")):
        if fd > 2 and fd not in keep:
            with suppress(OSError):
                os.close(fd)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    for name in ("stdout", "stderr"):
        raw = io.FileIO(1, "w", closefd=False)
        stream = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
        setattr(sys, name, stream)


def _load(job: dict[str, Any], send: Any) -> Any:
    """The learner's function; None, and the reason sent, where there is none."""
    path, name = job["path"], job["function"]
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    try:
        # From the text itself: no compiled file is read or written.
        exec(compile(decode_source(job["source"].encode("latin-1")), path, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        send({"failed": _describe(error, path)})
        return None
    function = module.__dict__.get(name)
    if not callable(function):
        send({"failed": {"kind": wire.NO_FUNCTION, "message": "", "module": None, "line": None}})
        return None
    send({"loaded": True})
    return function


def _call(function: Any, inputs: dict[str, Any], path: str) -> dict[str, Any]:
    """What the function made of one case, and of its inputs."""
    given = {name: _input(value) for name, value in inputs.items()}
    try:
        answer = {"value": wire.encode(function(*given.values()))}
    except BaseException as error:
        answer = {"raised": _describe(error, path)}
    with suppress(BaseException):
        after = {name: wire.encode(value) for name, value in given.items()}
        return {**answer, "inputs": after}
    return {**answer, "inputs": {}}


def _input(data: Any) -> Any:
    value = wire.decode(data)
    return torch.from_numpy(value) if hasattr(value, "dtype") else value


def _describe(error: BaseException, path: str) -> dict[str, Any]:
    """kind: the exception's name, or REFUSED; the line is the last one in the learner's file."""
    line = None
    if isinstance(error, SyntaxError) and error.filename == path:
        line = error.lineno
    trace = error.__traceback__
    while trace is not None and not isinstance(error, SyntaxError):
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    message = ""
    with suppress(BaseException):
        message = (error.msg if isinstance(error, SyntaxError) else str(error))[:LONGEST_MESSAGE]
    module = error.name if isinstance(error, ImportError) and isinstance(error.name, str) else None
    kind = wire.REFUSED if isinstance(error, Refused) else type(error).__name__
    return {"kind": kind, "message": message, "module": module, "line": line if type(line) is int else None}
