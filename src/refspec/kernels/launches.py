"""Counts the dispatchers' calls, by operation, as they happen.

A call counts as one launch, whoever runs it and however many kernels that takes: one for most, two for some, none for
no rows. A call that was refused does not count.
"""

from __future__ import annotations

from collections import Counter

launches: Counter[str] = Counter()


def count_launch(operation: str) -> None:
    """One more call of `operation`, the name of its dispatcher."""
    launches[operation] += 1
