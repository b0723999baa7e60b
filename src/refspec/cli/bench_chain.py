"""`refspec bench chain`: what the short cut for k = 1 saves of a round, beside the general path."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from refspec.cli.command_line import shows_progress
from refspec.cli.generate import BACKENDS, announce_interpreter, one_of


def chain(
    turns: Annotated[int, typer.Option(min=1, help="rounds that each engine takes")] = 40,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    backend: Annotated[
        str, typer.Option(parser=one_of(*BACKENDS), metavar="|".join(BACKENDS), help="as of refspec generate")
    ] = BACKENDS[0],
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Rounds of chains (k = 1) by the short cut against the general path: calls, operations and the host's time."""
    import torch

    from refspec.bench.chain import bench_chain

    if threads is not None:
        torch.set_num_threads(threads)
    announce_interpreter(backend, as_json)
    with Progress(console=Console(stderr=True), transient=True, disable=not shows_progress(as_json)) as bar:
        task = bar.add_task("bench", total=None)
        report = bench_chain(
            turns=turns,
            device=device,
            backend=backend,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report)


def show(report: dict[str, Any]) -> None:
    """One row for each number of steps and batch."""
    console = Console(highlight=False)
    console.print(
        f"A round of a chain, general path > short cut: {report['device']}, backend {report['backend']}, torch's CPU "
        f"threads: {report['threads']}."
    )
    table = Table(
        caption=f"ms: host time outside the forwards, of drafting and making the tree; medians of {report['turns']} "
        "turns, taken side by side. ratio: short cut / general path. round: the same of whole rounds."
    )
    for column in ("S", "batch", "kernel calls", "torch operations", "ms", "ratio", "round"):
        table.add_column(column, justify="right")
    for saving in report["savings"]:
        table.add_row(
            str(saving["steps"]),
            str(saving["batch"]),
            *(f"{saving[name]['general']} > {saving[name]['fast']}" for name in ("kernel_calls", "torch_operations")),
            f"{saving['milliseconds']['general']:.2f} > {saving['milliseconds']['fast']:.2f}",
            f"{saving['ratio']:.2f}",
            f"{saving['round_ratio']:.2f}",
        )
    console.print(table)
