"""`refspec`: the commands, put together."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from refspec import __version__
from refspec.cli.command_line import CommandLine, LateCommands

# In the order in which help lists them, and where each is.
COMMANDS = {
    "generate": ("refspec.cli.generate:generate", "refspec.cli.algorithm:AlgorithmCommand"),
    "demo": ("refspec.cli.demo:demo",),
    "serve-demo": ("refspec.cli.serve_demo:serve_demo", "refspec.cli.algorithm:AlgorithmCommand"),
    "dp-demo": ("refspec.cli.dp_demo:dp_demo",),
    "trace": ("refspec.cli.trace:trace_app",),
    "bench": ("refspec.cli.bench:bench_app",),
    "oracle": ("refspec.cli.oracle:oracle_app",),
    "exercises": ("refspec.cli.exercises:exercises",),
    "start": ("refspec.cli.exercises:start",),
    "grade": ("refspec.cli.exercises:grade",),
    "hint": ("refspec.cli.exercises:hint",),
    "reset": ("refspec.cli.exercises:reset",),
    "quiz": ("refspec.cli.quiz:quiz",),
    "history": ("refspec.cli.history.app:history_app",),
    "site": ("refspec.cli.site:site_app",),
    "doctor": ("refspec.cli.doctor:doctor",),
}


class _AllCommands(CommandLine):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LateCommands(COMMANDS)  # type: ignore[assignment] # typer only reads it


app = typer.Typer(
    cls=_AllCommands,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"refspec {__version__}")
        raise typer.Exit


@app.callback()
def refspec(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """EAGLE speculative decoding in a small serving engine, made to be read.

    To begin with:  refspec generate "def fib(n):"
    """
