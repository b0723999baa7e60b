"""`refspec bench algorithms`: accept length, forwards and speed of every algorithm, in one table."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from refspec.cli.algorithm import PLAIN, algorithm_name
from refspec.cli.command_line import UsageError, shows_progress
from refspec.cli.generate import BACKENDS, announce_interpreter, one_of

SHAPE = {"topk": "k", "num_steps": "S", "num_draft_tokens": "N"}


def algorithms(
    algorithm: Annotated[
        list[str] | None,
        typer.Option(parser=algorithm_name, metavar="NAME", help="one to measure; may be given several times"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="tokens for each prompt")] = 128,
    prompts: Annotated[int, typer.Option(min=1, max=40, help="how many of the built-in prompts")] = 40,
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
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Every algorithm against plain decoding, prompt by prompt, on the shipped weights.

    Those whose weights are not there are named below the table. Exit status 1 if an output leaves the plain one
    elsewhere than at a near tie.
    """
    if algorithm and PLAIN in algorithm:
        raise UsageError("--algorithm none: plain decoding is always measured, leave it out")
    import torch

    from refspec.bench.algorithms import bench_algorithms
    from refspec.bench.prompts import load_prompts

    if threads is not None:
        torch.set_num_threads(threads)
    announce_interpreter(backend, as_json)
    with Progress(console=Console(stderr=True), transient=True, disable=not shows_progress(as_json)) as bar:
        task = bar.add_task("bench", total=None)
        report = bench_algorithms(
            names=algorithm,
            prompts=load_prompts()[:prompts],
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            device=device,
            backend=backend,
            graphs=graphs,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show(Console(highlight=False), report)
    if any(contestant["faults"] for contestant in report["contestants"]):
        raise typer.Exit(1)


def _show(console: Console, report: dict[str, Any]) -> None:
    measured = report["prompts"] - report["looping_prompts"]
    table = Table(
        title=f"shipped weights, {report['dtype']}, batch 1, {report['device']} ({report['threads']} threads)",
        caption=f"medians over {measured} prompts x {report['max_new_tokens']} tokens; "
        f"{report['looping_prompts']} more left out, since their output loops",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for column in ("", "", "accept", "target", "draft", "tokens/s", "x plain", "quartiles"):
        table.add_column(column, justify="right" if column else "left")
    for row in report["contestants"]:
        quartiles = row["ratio_quartiles"]
        table.add_row(
            row["name"],
            " ".join(f"{letter}{row[name]}" for name, letter in SHAPE.items() if name in row),
            f"{row['accept_length']:.2f}" if row["accept_length"] else "",
            f"{row['target_forwards_per_token']:.2f}",
            "" if row["name"] == "plain" else f"{row['draft_forwards_per_token']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio_to_plain']:.2f}",
            f"{quartiles[0]:.2f}-{quartiles[2]:.2f}" if quartiles else "",
        )
    console.print(table)
    for row in report["not_run"]:
        console.print(f"Not run: {row['name']} ({row['reason']})", markup=False, soft_wrap=True)
    differences = sum(row["rounding_differences"] for row in report["contestants"])
    faults = sum(row["faults"] for row in report["contestants"])
    console.print(
        "accept: tokens of a round, the bonus included; target, draft: forwards for each token of the rounds.\n"
        f"Outputs that leave the plain one at a near tie of its two best logits: {differences}; elsewhere: {faults}.",
        soft_wrap=True,
    )
