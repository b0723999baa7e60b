"""What one run of a learner's code may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Of the child and all that it starts."""

    seconds: float = 5.0
    memory_mb: int = 1024  # of each process, beyond what the nursery has
    file_mb: int = 16  # the largest file that may be written
    reply_mb: int = 2  # right replies have tenths of that
    printed_kb: int = 64  # of one call, as it is shown
    all_printed_kb: int = 1024  # more is read and thrown away
    processes: int = 64
