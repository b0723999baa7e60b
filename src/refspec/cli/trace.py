"""`refspec trace`: recorded runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from refspec.cli.command_line import CommandLine
from refspec.cli.render import round_views
from refspec.cli.viewer import show_rounds
from refspec.trace import Trace, TraceError

trace_app = typer.Typer(cls=CommandLine, help="Look at recorded runs.")


@trace_app.command()
def show(
    file: Annotated[Path, typer.Argument(help="What `refspec generate --trace` wrote.")],
    round_number: Annotated[int | None, typer.Option("--round", help="Print this round alone.")] = None,
    request: Annotated[int | None, typer.Option(help="Show this prompt's trees alone; the first is 0.")] = None,
) -> None:
    """Go through the rounds of a run, by key; where there is no terminal, print them all."""
    trace = Trace.load(file)
    console = Console(highlight=False)
    if not trace.rounds:
        typer.echo(f"{file} holds no round: the prefill's token was all that was asked for")
        return
    if request is not None and not 0 <= request < len(trace.outputs):
        raise TraceError(f"{file} has no request {request}, its last is {len(trace.outputs) - 1}")
    views = round_views(trace, request)
    if round_number is not None:
        views = [requests for requests in views if requests[0].round.number == round_number]
    if not views:
        numbers = [round_.number for round_ in trace.rounds]
        what = f"round {round_number}" if round_number is not None else "round"
        whose = "" if request is None else f" of request {request}"
        raise TraceError(f"{file} has no {what}{whose}, its rounds are {numbers[0]} to {numbers[-1]}")
    if round_number is None:
        show_rounds(console, views)
    else:
        for view in views[0]:
            console.print(view)


@trace_app.command()
def schema() -> None:
    """Print the JSON schema of a trace."""
    typer.echo(json.dumps(Trace.model_json_schema(), indent=2))
