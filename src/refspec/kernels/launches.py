"""Counts what the dispatchers launch, by operation, as it happens. A GPU launch costs host time even for no rows."""

from __future__ import annotations

from collections import Counter

launches: Counter[str] = Counter()


def count_launch(operation: str) -> None:
    """One more launch of `operation`, the name of its dispatcher."""
    launches[operation] += 1
