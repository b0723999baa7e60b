"""`refspec bench engine --host-overhead`: what a round costs outside the forwards, as contexts and batches grow."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from refspec.cli.command_line import shows_progress

PHASES = ("draft", "tree", "verify", "commit", "extend", "scheduler")


def host_overhead(device: str | None, backend: str, as_json: bool) -> None:
    """Measure and print. Raises ValueError for a device or backend that cannot be used."""
    from refspec.bench.host_overhead import bench_host_overhead

    with Progress(console=Console(stderr=True), transient=True, disable=not shows_progress(as_json)) as bar:
        task = bar.add_task("bench", total=None)
        report = bench_host_overhead(
            device=device, backend=backend, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report)


def show(report: dict[str, Any]) -> None:
    """A table for each series, then the parts of the rounds at the longest context."""
    console = Console(highlight=False)
    console.print(
        f"Host time of a round outside the forwards, in milliseconds: {report['device']}, backend {report['backend']}, "
        f"torch's CPU threads: {report['threads']}. Each part of a round is the median of {report['turns']} turns.\n"
        "steepest: from one batch to the next, how much the time grew / how much the batch did. 1 is linear growth."
    )
    for series in report["series"]:
        console.print(_grid(series))
    for batch in _ends(report["series"][0], "batch"):
        console.print(_parts(report["series"], batch))


def _grid(series: dict[str, Any]) -> Table:
    """A row for each batch, a column for each context."""
    milliseconds = {(cell["context"], cell["batch"]): cell["milliseconds"] for cell in series["cells"]}
    contexts, batches = ({place[i]: 0 for place in milliseconds} for i in (0, 1))
    first, last = _ends(series, "context")
    fewest, most = _ends(series, "batch")
    table = Table(title=_name(series), title_justify="left")
    for column in ("batch", *map(str, contexts), f"{last} / {first}"):
        table.add_column(column, justify="right")
    for batch in batches:
        row = [f"{milliseconds[context, batch]:.2f}" for context in contexts]
        table.add_row(str(batch), *row, f"{series['context_ratios'][batch]:.2f}")
    table.add_section()
    table.add_row(f"{most} / {fewest}", *(f"{ratio:.2f}" for ratio in series["batch_ratios"].values()))
    table.add_row("steepest", *(f"{ratio:.2f}" for ratio in series["steepest"].values()))
    return table


def _parts(all_series: list[dict[str, Any]], batch: int) -> Table:
    """A row for each series: where the time of a round goes."""
    context = _ends(all_series[0], "context")[1]
    cells = [
        next(cell for cell in series["cells"] if (cell["context"], cell["batch"]) == (context, batch))
        for series in all_series
    ]
    table = Table(
        title=f"Context {context}, batch {batch}",
        title_justify="left",
        caption="Plain decoding's step is under verify.",
    )
    table.add_column("")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    for series, cell in zip(all_series, cells, strict=True):
        parts = {"verify": cell["by_phase"].get("decode"), **cell["by_phase"]}
        table.add_row(_name(series), *(f"{parts[phase]:.2f}" if phase in parts else "" for phase in PHASES))
    return table


def _ends(series: dict[str, Any], axis: str) -> tuple[int, int]:
    """The least and the largest context or batch."""
    values = [cell[axis] for cell in series["cells"]]
    return min(values), max(values)


def _name(series: dict[str, Any]) -> str:
    return f"{series['name']}, page {series['page_size']}"
