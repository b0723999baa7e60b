"""A process for one opinion, which takes inputs and gives answers, one case after the other.

Both go through pipes as what torch.save writes, each with its length before it, and are read as plain data only. If
the process dies or hangs, that is the opinion's failure on this one case: the next case finds a new process.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from refspec.oracle.operation import Outputs
from refspec.oracle.opinions import OPINIONS, Opinion, answer
from refspec.oracle.sources import Sources

START_SECONDS = 300  # until a process has loaded torch and Triton
ANSWER_SECONDS = 1800  # until it has answered: the largest cases take minutes in the interpreter
LENGTH_BYTES = 8


class OpinionError(Exception):
    """An opinion has no answer; the message says why."""


class Child:
    """The process of one opinion. It is started when it is first needed, and again when it has died.

    One thread may ask at a time; `stop` may be called from any. exports: once the process is ready, the names in
    sgl_kernel, if that is whom it asks.
    """

    def __init__(self, opinion: Opinion, folders: Mapping[str, Path]) -> None:
        """folders: SGLang's wheels, as for `Sources`."""
        self.opinion = opinion
        self.exports: list[str] = []
        self._folders = {version: str(folder) for version, folder in folders.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - what the process printed
        self._stopped = False
        self._starting = threading.Lock()

    def launch(self) -> None:
        """Start a process; `await_ready` is next. Raises OpinionError after `stop`."""
        package_folder = str(Path(__file__).parents[2])
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
        environment.pop("TRITON_INTERPRET", None)
        if self.opinion.interprets:
            environment["TRITON_INTERPRET"] = "1"
        self._said.truncate(0)
        with self._starting:
            if self._stopped:
                raise OpinionError("the check was stopped")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "refspec.oracle.process", self.opinion.name, json.dumps(self._folders)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,  # Ctrl-C is for the process that was typed to, which ends this one
            )

    def await_ready(self) -> None:
        """Wait until the process can answer. Raises OpinionError, with the reason, if it cannot."""
        reply = self._reply(START_SECONDS)
        if "error" in reply:
            self._end()
            raise OpinionError(reply["error"])
        self.exports = reply["exports"]

    def ask(self, module: str, inputs: bytes) -> Outputs:
        """The opinion's answer for the operation that `module` calls OPERATION. inputs: as `packed`.

        Raises OpinionError if its code raises, or if the process dies or gives no answer in time.
        """
        if self._process is None:
            self.launch()
            self.await_ready()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has gone: the reply, which does not come, says how
            _send(self._process.stdin, packed({"module": module}))
            _send(self._process.stdin, inputs)
        reply = self._reply(ANSWER_SECONDS)
        if "error" in reply:
            raise OpinionError(reply["error"])
        return reply["outputs"]

    def stop(self) -> None:
        """Kill the process, whatever it is doing, and let no other be started. Who waits for an answer gets none."""
        with self._starting:
            self._stopped = True
            if (process := self._process) is not None:
                process.kill()

    def close(self) -> None:
        """Stop, and clear up. Nobody may be asking."""
        self.stop()
        if self._process is not None:
            self._end()
        self._said.close()

    def _reply(self, seconds: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        alarm = threading.Timer(seconds, self._process.kill)
        alarm.start()
        try:
            message = _receive(self._process.stdout)
            late = not alarm.is_alive()
        finally:
            alarm.cancel()
        if message is not None:
            return unpacked(message)
        ending = self._end()
        raise OpinionError(f"no answer within {seconds:.0f} seconds" if late else ending)

    def _end(self) -> str:
        """End the process, clear up behind it, and say what its end was like."""
        process = self._process
        assert process is not None
        process.kill()
        status = process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # it may hold something that nobody takes any more
                pipe.close()
        self._process = None
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        last_words = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"its process ended {how}" + (f": {last_words[:200]}" if last_words else "")


def packed(message: object) -> bytes:
    """Tensors and plain values as bytes."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getvalue()


def unpacked(message: bytes) -> Any:
    """What was packed, in memory of its own. Nothing but tensors and plain values is accepted."""
    return torch.load(io.BytesIO(message), weights_only=True)


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(LENGTH_BYTES, "big") + message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """The next message; None if the other side has gone before it was complete."""
    head = pipe.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "big")
    message = pipe.read(length)
    return message if len(message) == length else None


# --- in the child -----------------------------------------------------------------------------------------------------


def main() -> None:
    """What the process runs: say that it is ready, or why not; then answer until nobody asks any more."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel or a library prints must not get among the replies
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    opinion = OPINIONS[sys.argv[1]]
    sources = Sources({version: Path(folder) for version, folder in json.loads(sys.argv[2]).items()})
    torch.set_num_threads(1)
    exports: list[str] = []
    try:
        if opinion.on_gpu:
            torch.zeros(1, device="cuda")
        if opinion.code == "sgl_kernel":
            exports = dir(importlib.import_module("sgl_kernel"))
    except Exception as error:
        _send(replies, packed({"error": _in_a_line(error)}))
        return
    _send(replies, packed({"exports": exports}))
    while (request := _receive(sys.stdin.buffer)) is not None:
        message = _receive(sys.stdin.buffer)
        if message is None:
            return
        try:
            operation = importlib.import_module(unpacked(request)["module"]).OPERATION
            reply: dict[str, Any] = {"outputs": answer(opinion, operation, sources, unpacked(message))}
        except Exception as error:
            reply = {"error": _in_a_line(error)}
        _send(replies, packed(reply))


def _end_with(parent: int) -> None:
    """A parent that was killed ends nobody; without it, a case of minutes would be worked out for no one."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _in_a_line(error: Exception) -> str:
    """What went wrong, and where. Triton's interpreter wraps an error within a kernel: the cause is what counts."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    where = ""
    if frames := traceback.extract_tb(cause.__traceback__):
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}{where}"


if __name__ == "__main__":
    main()
