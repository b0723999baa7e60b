"""Words for numbers. Nothing else is imported for it, so that it costs nothing."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """The count and its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_of(number: int) -> str:
    """A number of bytes: in MB, with a decimal below ten, or in kB."""
    if number < 1e6:
        return f"{number / 1e3:.0f} kB"
    return f"{number / 1e6:.{0 if number >= 1e7 else 1}f} MB"
