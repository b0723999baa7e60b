"""The judge's side of the nursery: hand over a job, collect what comes back, survive whatever happens there.

What comes back is bytes from a process that a learner's code was in. They are bounded here and understood in
judge.py; nothing of them is trusted.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import IO, Any

import psutil

from refspec.grader import wire
from refspec.grader.limits import Limits

START_SECONDS = 120.0
GRACE_SECONDS = 4.0  # after its time limit a job is ended by the nursery; after this, nursery and all
CLOSE_SECONDS = 4.0
TOKEN = "REFSPEC_NURSERY"  # an environment variable by which all of a nursery's descendants are known
CHUNK = 1 << 16
LOOK_EVERY_SECONDS = 0.5
STOPPED_SECONDS = 2.0  # between two looks: then we were stopped ourselves (Ctrl-Z)
PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # and LC_*, OMP_*, GOMP_*
NEVER_CLOSED_OFF = ("network", "files", "other processes of the same user", "memory in files or of many processes")


class JudgeError(ValueError):
    """The judge itself cannot work here."""


@dataclass(frozen=True)
class Job:
    """One file, one function, and the inputs of its calls, in the order of its parameters."""

    path: str  # as it is named in messages
    source: bytes
    function: str
    refuse: tuple[str, ...]  # modules that cannot be imported
    cases: Sequence[dict[str, Any]]  # by parameter: int or numpy array
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)  # stands before what each call prints

    def line(self) -> bytes:
        """As the child reads it."""
        cases = [{name: wire.encode(value) for name, value in case.items()} for case in self.cases]
        source = self.source.decode("latin-1")
        message = {"path": self.path, "source": source, "function": self.function, "refuse": self.refuse}
        return wire.dumps({**message, "cases": cases, "mark": self.mark})


@dataclass(frozen=True)
class Outcome:
    """How a run ended, when everything that it had started was gone."""

    ending: str  # ended, timeout, processes, reply (too long), lost (the nursery is gone)
    status: int | None  # exit status, or minus the signal's number; None where it was ended from here
    reply: bytes
    printed: tuple[str, ...]  # while it was loaded, then by each call


class Sandbox:
    """A nursery, started in the background and again when it was lost."""

    def __init__(self) -> None:
        self.not_enforced: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to load torch there; does not wait. Raises JudgeError where there is no fork."""
        if self._process is not None and self._ready and self._process.poll() is not None:
            self.close(patience=0)  # somebody has ended it in the meantime
        if self._process is not None:
            return
        if not hasattr(os, "fork"):
            raise JudgeError("exercises are judged in forked processes, which this system does not have: use WSL")
        self._token = uuid.uuid4().hex
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        ours, theirs = socket.socketpair()
        package_folder = str(Path(__file__).parents[2])
        kept = {k: v for k, v in os.environ.items() if k in PASSED_ON or k.startswith(("LC_", "OMP_", "GOMP_"))}
        environment = {
            **kept,
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            "PYTHONPATH": os.pathsep.join([package_folder, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            TOKEN: self._token,
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "refspec.grader.nursery", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=environment,
                cwd="/",  # what a learner's file writes beside nothing does not land where the grader stands
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for us: we end it
            )
        self._control, self._ready = ours, False

    def run(self, work: Job, limits: Limits) -> Outcome:
        """One job from fork to end; once more where we were stopped in the middle of it. Raises JudgeError if the
        nursery does not start.
        """
        return self._run(work, limits) or self._run(work, limits) or Outcome("lost", None, b"", ())

    def _run(self, work: Job, limits: Limits) -> Outcome | None:
        """None where we were stopped, and so do not know whether the child was slow or we were."""
        self._wait_until_ready()
        with ExitStack() as stack:
            (job_read, job), (reply, reply_write), (printed, printed_write) = (_pipe(stack) for _ in range(3))
            theirs = [end.fileno() for end in (job_read, reply_write, printed_write)]
            with suppress(BrokenPipeError, ConnectionResetError):  # it shows below
                socket.send_fds(self._control, [json.dumps(asdict(limits)).encode() + b"\n"], theirs)
            for end in (job_read, reply_write, printed_write):
                end.close()
            for end in (job, reply, printed):
                os.set_blocking(end.fileno(), False)
            exchange = _Exchange(self._control, job, reply, printed, work, limits)
            outcome = exchange.outcome()
        if outcome.ending == "lost":
            self.close(patience=0)
        return None if exchange.was_stopped and outcome.ending in ("lost", "timeout") else outcome

    def close(self, patience: float = CLOSE_SECONDS) -> None:
        """The nursery and every process that came from it are gone afterwards."""
        process, self._process = self._process, None
        if process is None:
            return
        self._control.close()  # then it ends by itself, and its child with it
        try:
            status = process.wait(patience if self._ready else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        self._errors.close()
        if status != 0 and self._ready:
            _end_marked(self._token)

    def _wait_until_ready(self) -> None:
        self.start()
        if self._ready:
            return
        self._control.settimeout(START_SECONDS)
        try:
            line = self._control.makefile("rb", buffering=0).readline()
        except TimeoutError:
            line = b""
        if not line:
            self._errors.seek(0)
            last = self._errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            self.close()
            raise JudgeError(f"the judge's process did not start: {' '.join(last) or 'it said nothing'}")
        self._control.settimeout(None)
        self._ready = True
        self.not_enforced = (*json.loads(line)["not_enforced"], *NEVER_CLOSED_OFF)


class _Exchange:
    """Everything that goes to and comes from one child, none of it waiting for another."""

    def __init__(
        self, control: socket.socket, job: FileIO, reply: FileIO, printed: FileIO, work: Job, limits: Limits
    ) -> None:
        self.control, self.work, self.mark, self.limits = control, memoryview(work.line()), work.mark, limits
        self.selector = selectors.DefaultSelector()
        self.selector.register(job, selectors.EVENT_WRITE, self._write_job)
        self.selector.register(reply, selectors.EVENT_READ, self._read_reply)
        self.selector.register(printed, selectors.EVENT_READ, self._read_printed)
        self.selector.register(control, selectors.EVENT_READ, self._read_answer)
        self.job, self.reply_pipe, self.printed_pipe = job, reply, printed
        self.reply, self.printed, self.answer = bytearray(), bytearray(), bytearray()
        self.lost = self.too_long = self.was_stopped = False

    def outcome(self) -> Outcome:
        """Returns when the nursery has said how it went, or is lost."""
        deadline = time.monotonic() + self.limits.seconds + GRACE_SECONDS
        with self.selector:
            while not self.lost and not self.answer.endswith(b"\n"):
                before = time.monotonic()
                ready = self.selector.select(LOOK_EVERY_SECONDS)
                now = time.monotonic()
                self.was_stopped = self.was_stopped or now - before > STOPPED_SECONDS
                for key, _ in ready:
                    key.data()
                self.lost = self.lost or (now > deadline and not self.answer.endswith(b"\n"))
            # Nobody writes any more: what is in the pipes is all that will be.
            while self._read_reply() or self._read_printed():
                pass
        printed = tuple(self.printed.decode("utf-8", "replace").split(self.mark))
        if self.lost:
            return Outcome("lost", None, b"", printed)
        answer = json.loads(self.answer)
        return Outcome("reply" if self.too_long else answer["ending"], answer["status"], bytes(self.reply), printed)

    def _write_job(self) -> None:
        try:
            self.work = self.work[self.job.write(self.work) or 0 :]
        except BrokenPipeError:
            self.work = self.work[:0]
        if not self.work:
            self.selector.unregister(self.job)
            self.job.close()  # the child reads to the end

    def _read_reply(self) -> bool:
        data = self._read(self.reply_pipe)
        if not self.too_long:
            self.reply += data
            if len(self.reply) > self.limits.reply_mb << 20:
                self.too_long = True
                with suppress(BrokenPipeError, ConnectionResetError):
                    self.control.sendall(b"x")  # enough
        return bool(data)

    def _read_printed(self) -> bool:
        data = self._read(self.printed_pipe)
        self.printed += data[: (self.limits.all_printed_kb << 10) - len(self.printed)]
        return bool(data)

    def _read(self, pipe: FileIO) -> bytes:
        if pipe not in self.selector.get_map():
            return b""
        data = pipe.read(CHUNK)
        if data == b"":
            self.selector.unregister(pipe)
        return data or b""

    def _read_answer(self) -> None:
        try:
            data = self.control.recv(CHUNK)
        except ConnectionResetError:
            data = b""
        self.answer += data
        self.lost = self.lost or not data


def _pipe(stack: ExitStack) -> tuple[FileIO, FileIO]:
    """The end to read from and the end to write to; both closed with the stack."""
    reading, writing = os.pipe()
    return stack.enter_context(FileIO(reading, "rb")), stack.enter_context(FileIO(writing, "wb"))


def _end_marked(token: str) -> None:
    """End what a lost nursery can no longer end: every process whose environment has its token."""
    deadline = time.monotonic() + CLOSE_SECONDS
    ended: dict[int, psutil.Process] = {}
    while time.monotonic() < deadline:
        marked = [process for process in psutil.process_iter() if _has_token(process, token)]
        ended.update((process.pid, process) for process in marked)
        for process in marked:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        # One that is about to end has no environment any more.
        if not marked and not any(map(_runs, ended.values())):
            return
        time.sleep(0.01)


def _has_token(process: psutil.Process, token: str) -> bool:
    with suppress(psutil.Error):  # gone, a zombie, or another user's
        return process.environ().get(TOKEN) == token
    return False


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
