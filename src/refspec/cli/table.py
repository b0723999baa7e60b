"""Tables on narrow terminals: where a word would be cut, lines tell the same."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

UNBOUNDED = 10_000  # columns, more than any table here takes


def fits(console: Console, table: Table) -> bool:
    """Does the terminal have room for the table with every word whole?"""
    options = console.options.update(width=UNBOUNDED)
    return Measurement.get(console, options, table).minimum <= console.width
