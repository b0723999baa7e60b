"""A file that is written as a whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(file: Path, what: str) -> Iterator[Callable[[Callable[[Path], object]], None]]:
    """A function that has a file written, by a function that writes to the path that it is given. What was in the file
    stays there until all of it is written. A link is followed, and a pipe or a device written to as it is.

    Raises ValueError, which calls the file `what`: at once, not after a long run, if it cannot be written.
    """
    final = Path(os.path.realpath(file))  # unlike resolve(), it takes links that lead round
    if final.is_dir():
        raise ValueError(f"cannot write {what} {file}: it is a folder")
    in_place = final.exists() and not final.is_file()  # a pipe or a device must not be replaced
    beside = final if in_place else final.with_name(f".{final.name}.{os.getpid()}")

    def save(write: Callable[[Path], object]) -> None:
        with _write_errors(file, what):
            write(beside)
            if not in_place:
                if final.exists():
                    shutil.copymode(final, beside)
                beside.replace(final)

    if not in_place:
        with _write_errors(file, what):
            beside.open("x").close()
            beside.unlink()
    try:
        yield save
    finally:
        if not in_place:
            beside.unlink(missing_ok=True)


@contextmanager
def _write_errors(file: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {what} {file}: {error.strerror}") from None
