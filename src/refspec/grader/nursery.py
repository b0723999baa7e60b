"""The process that learners' code is forked from: `python -m refspec.grader.nursery FD`.

It has imported torch once, so that a run costs a fork and not an import, and it holds no solution, no expected value
and no input. FD is a socket to sandbox.py. For each job it gets a line of limits and three file descriptors, forks,
watches the child, and ends it together with all that the child has started; only then does it say how it went.

    -> {"seconds": 5.0, ...}  with the descriptors: the job, the reply, what is printed
    -> x                     enough: end the job
    <- {"ending": "ended" | "timeout" | "processes" | "cancelled", "status": ...}

Whatever a child starts stays a descendant of this process, also when it makes a session of its own or its parent
ends: on Linux orphans come back to the nearest "subreaper". Elsewhere an orphan that left its process group is out of
reach; the first message says so. When the socket closes, everything here ends.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import psutil
import torch

from refspec.grader import child
from refspec.grader.limits import Limits

PAUSE_SECONDS = 0.002
COUNT_EVERY_SECONDS = 0.05
SWEEP_SECONDS = 3.0
PR_SET_CHILD_SUBREAPER = 36
ENOUGH = b"x"


def main(control: socket.socket) -> None:
    """Serve jobs until the other side closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # no thread may be there when we fork
    user_tasks = _count_user_tasks()
    unenforced = _probe_limits(user_tasks)
    if not _adopt_orphans():
        unenforced.append("end of processes that leave their group")
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that holds an object
    _send(control, {"not_enforced": unenforced})
    while True:
        line, fds, _, _ = socket.recv_fds(control, 4096, 3)
        if not line:
            return
        if fds:  # without them it is an "enough" that came too late
            _send(control, _serve(control, Limits(**json.loads(line.lstrip(ENOUGH))), user_tasks, fds))


def _serve(control: socket.socket, limits: Limits, user_tasks: int, fds: list[int]) -> dict[str, Any]:
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            child.run(limits, user_tasks, *fds)
        except BaseException:
            traceback.print_exc()  # a fault of ours
        finally:
            os._exit(child.NO_REPLY)
    for fd in fds:
        os.close(fd)
    ending, status, counted = "ended", None, started
    while status is None:
        done, found = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(found)
            break
        now = time.monotonic()
        if now - started > limits.seconds:
            ending = "timeout"
            break
        if now - counted > COUNT_EVERY_SECONDS:
            counted = now
            if len(psutil.Process().children(recursive=True)) > limits.processes:
                ending = "processes"
                break
        if select.select([control], [], [], PAUSE_SECONDS)[0]:
            control.recv(len(ENOUGH))
            ending = "cancelled"
            break
    if status == -signal.SIGXCPU:
        ending = "timeout"
    _end_descendants(pid)
    return {"ending": ending, "status": status}


def _end_descendants(group: int) -> None:
    """None of them is left afterwards, unless they have outrun us for SWEEP_SECONDS."""
    deadline = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # no child, and so no descendant
        alive = psutil.Process().children(recursive=True)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none of them forks while others are ended
            for process in alive:
                with suppress(psutil.Error):
                    process.send_signal(number)
        time.sleep(PAUSE_SECONDS)


def _adopt_orphans() -> bool:
    if sys.platform != "linux":
        return False
    with suppress(OSError, AttributeError):
        return ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    return False


def _probe_limits(user_tasks: int) -> list[str]:
    """Which limits do not hold here: set them in a child, and there ask for more memory than they allow."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            limits = Limits()
            refused = child.apply_limits(limits, user_tasks)
            with suppress(MemoryError):
                bytearray((limits.memory_mb + 64) << 20)
                refused.append("memory")
            os.write(writing, json.dumps(sorted(set(refused))).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else [f"limits ({', '.join(asdict(Limits()))})"]


def _count_user_tasks() -> int:
    """Threads of all processes of this user, which is what the limit of processes counts."""
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid():
                count += process.num_threads()
    return count


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):
        control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
