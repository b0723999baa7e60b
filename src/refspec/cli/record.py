"""A trace as a file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from refspec.trace import Trace


@contextmanager
def trace_writer(file: Path | None) -> Iterator[Callable[[Trace], None]]:
    """A function that writes a trace to the file. What was in the file stays there until a whole trace is written.

    Raises ValueError at once, not after a long run, if the file cannot be written.
    """
    if file is None:
        yield lambda trace: None
        return
    final = file.resolve()
    if final.is_dir():
        raise ValueError(f"cannot write the trace {file}: it is a folder")
    in_place = final.exists() and not final.is_file()  # a pipe or a device must not be replaced
    beside = final if in_place else final.with_name(f".{final.name}.{os.getpid()}")

    def save(trace: Trace) -> None:
        with _write_errors(file):
            trace.save(beside)
            if not in_place:
                if final.exists():
                    shutil.copymode(final, beside)
                beside.replace(final)

    if not in_place:
        with _write_errors(file):
            beside.open("x").close()
            beside.unlink()
    try:
        yield save
    finally:
        if not in_place:
            beside.unlink(missing_ok=True)


@contextmanager
def _write_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write the trace {file}: {error.strerror}") from None
