"""`refspec bench`: measurements as ratios, each taken side by side in one run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from refspec.cli.bench_algorithms import algorithms
from refspec.cli.bench_chain import chain
from refspec.cli.bench_history import history
from refspec.cli.bench_host_overhead import host_overhead
from refspec.cli.bench_kernels import kernels
from refspec.cli.command_line import CommandLine, UsageError, shows_progress
from refspec.cli.generate import BACKENDS, announce_interpreter, one_of

# Those of `engine` that mean something with --host-overhead, and itself.
OVERHEAD_OPTIONS = ("overhead", "device", "backend", "threads", "as_json")

bench_app = typer.Typer(cls=CommandLine, rich_markup_mode=None)
bench_app.command()(algorithms)
bench_app.command()(kernels)
bench_app.command()(chain)
bench_app.command()(history)


@bench_app.callback()
def _group() -> None:
    """Measure: ratios, side by side in one run."""


@bench_app.command()
def engine(
    ctx: typer.Context,
    max_new_tokens: Annotated[int, typer.Option(help="tokens for each prompt")] = 128,
    prompts: Annotated[int, typer.Option(min=1, max=40, help="how many of the built-in prompts")] = 40,
    target: Annotated[str, typer.Option(help="shipped name or model folder")] = "tiny",
    draft: Annotated[str | None, typer.Option(help="shipped name or model folder")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float64, bfloat16, float16")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    backend: Annotated[
        str, typer.Option(parser=one_of(*BACKENDS), metavar="|".join(BACKENDS), help="as of refspec generate")
    ] = BACKENDS[0],
    graphs: Annotated[
        bool | None,
        typer.Option("--graphs/--no-graphs", help="as of refspec generate", show_default="on a GPU with the kernels"),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch")] = None,
    exact_branch_kv: Annotated[bool, typer.Option(help="draft branches attend their true ancestors")] = False,
    vs_hf: Annotated[bool, typer.Option(help="also run transformers' generate on the same weights")] = False,
    overhead: Annotated[
        bool, typer.Option("--host-overhead", help="instead: rounds outside the forwards, by context and batch")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Plain decoding against EAGLE at several (k, S, N), prompt by prompt."""
    import torch

    from refspec.bench.engine import bench_engine
    from refspec.bench.prompts import load_prompts

    if overhead:
        _check_overhead_options(ctx)
    if threads is not None:
        torch.set_num_threads(threads)
    announce_interpreter(backend, as_json)
    if overhead:
        host_overhead(device, backend, as_json)
        return
    with Progress(console=Console(stderr=True), transient=True, disable=not shows_progress(as_json)) as bar:
        task = bar.add_task("bench", total=None)
        report = bench_engine(
            prompts=load_prompts()[:prompts],
            max_new_tokens=max_new_tokens,
            target=target,
            draft=draft,
            dtype=dtype,
            device=device,
            backend=backend,
            graphs=graphs,
            exact_branch_kv=exact_branch_kv,
            vs_hf=vs_hf,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    if any(contestant["faults"] for contestant in report["contestants"]):
        raise typer.Exit(1)


def _check_overhead_options(ctx: typer.Context) -> None:
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if source and source.name == "COMMANDLINE" and parameter.name not in OVERHEAD_OPTIONS:
            raise UsageError(
                f"{parameter.opts[0]} with --host-overhead, which runs stand-ins for the models: leave one of them out"
            )


def _show(report: dict[str, Any]) -> None:
    console = Console()
    measured = report["prompts"] - report["looping_prompts"]
    table = Table(
        title=f"{report['target']}, {report['dtype']}, batch 1, {report['device']} ({report['threads']} threads)",
        caption=f"medians over {measured} prompts x {report['max_new_tokens']} tokens; "
        f"{report['looping_prompts']} more left out, since their output loops",
    )
    for column in ("", "accept length", "tokens/s", "x plain", "quartiles", "ms per round"):
        table.add_column(column, justify="left" if column in ("", "ms per round") else "right")
    for row in report["contestants"]:
        quartiles = row["ratio_quartiles"]
        phases = {k: v for k, v in row["milliseconds_per_round"].items() if k != "prefill"}
        table.add_row(
            row["name"],
            f"{row['accept_length']:.2f}" if row["accept_length"] else "",
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio_to_plain']:.2f}",
            f"{quartiles[0]:.2f}-{quartiles[2]:.2f}" if quartiles else "",
            "  ".join(f"{phase} {value:.2f}" for phase, value in phases.items()),
        )
    console.print(table)
    differences = sum(row["rounding_differences"] for row in report["contestants"])
    faults = sum(row["faults"] for row in report["contestants"])
    console.print(
        f"Outputs that leave the plain one at a near tie of its two best logits: {differences}; elsewhere: {faults}."
    )
