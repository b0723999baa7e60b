"""`refspec doctor`: what this machine can run, and what to do about what it cannot."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from refspec.cli.command_line import shows_progress
from refspec.doctor import Check, can_generate, examine


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Say what this machine can run, and how to mend the rest.

    Exit status 0 if `refspec generate` can run, on the CPU at least; 1 if not.
    """
    with Console(stderr=True).status("looking around") if shows_progress(as_json) else nullcontext():
        checks = examine()
    ok = can_generate(checks)
    if as_json:
        typer.echo(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}))
    else:
        _show(Console(highlight=False), checks)
    raise typer.Exit(0 if ok else 1)


def _show(console: Console, checks: list[Check]) -> None:
    ascii_only = console.options.ascii_only
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in checks:
        mark, style = ("+" if ascii_only else "✓", "green") if check.ok else ("-", "dim")
        if check.required and not check.ok:
            mark, style = "x" if ascii_only else "✗", "bold red"
        table.add_row(f"[{style}]{mark}[/]", check.name, escape(check.found))
        if not check.ok:
            table.add_row("", "", f"[dim]for {escape(check.needed_for)}[/]")
            if check.remedy:
                table.add_row("", "", f"[dim]to mend it:[/] {escape(check.remedy)}")
    console.print(table)
    console.print()
    if not can_generate(checks):
        first = next(check.name for check in checks if check.required and not check.ok)
        console.print(f"refspec generate cannot run yet; to be mended first: {first}", style="bold")
    else:
        console.print('refspec generate can run. To begin with:\n\n  refspec demo\n  refspec generate "def fib(n):"')
