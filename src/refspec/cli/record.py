"""A trace as a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from refspec.cli.whole_file import whole_file
from refspec.trace import Trace


@contextmanager
def trace_writer(file: Path | None) -> Iterator[Callable[[Trace], None]]:
    """A function that writes a trace to the file, if there is one; see whole_file."""
    if file is None:
        yield lambda trace: None
        return
    with whole_file(file, "the trace") as save:
        yield lambda trace: save(trace.save)
