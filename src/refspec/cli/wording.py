"""Words for numbers. Nothing else is imported for it, so that it costs nothing."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """The count and its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
