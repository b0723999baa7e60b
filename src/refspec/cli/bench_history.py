"""`refspec bench history`: what the explorer adds to git and to Python's start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from refspec.cli.command_line import shows_progress


def history(
    clone: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            envvar="REFSPEC_SGLANG",
            show_envvar=True,
            help="A full clone of SGLang; without one, the catalogue's first screen alone.",
        ),
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Times that each command runs.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Commands of refspec history against the git commands that answer the same, plus Python's start."""
    from refspec.bench.history import bench_history

    with Progress(console=Console(stderr=True), transient=True, disable=not shows_progress(as_json)) as bar:
        task = bar.add_task("bench", total=None)
        report = bench_history(clone, turns, lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report)


def show(report: dict[str, Any]) -> None:
    """One row for each command, and below what it was held against."""
    console = Console(highlight=False)
    table = Table(
        caption=f"medians of {report['turns']} turns, taken side by side; ratio: the command / its floor; bound: the "
        "ratio up to which it keeps its promise"
    )
    for column in ("command", "ms", "floor, ms", "ratio", "bound", "git processes"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for standing in report["standings"]:
        table.add_row(
            standing["name"],
            f"{standing['ms']:.0f}",
            f"{standing['floor_ms']:.0f}",
            f"{standing['ratio']:.2f}",
            f"{standing['bound']:.1f}",
            "-" if standing["git_processes"] is None else str(standing["git_processes"]),
        )
    console.print(table)
    for standing in report["standings"]:
        console.print(f"Floor of {standing['name']}: {'; '.join(standing['floor'])}", soft_wrap=True, markup=False)
