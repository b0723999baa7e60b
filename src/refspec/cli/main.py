"""`refspec`: the commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from refspec import __version__
from refspec.cli.algorithm import AlgorithmCommand
from refspec.cli.bench import bench_app
from refspec.cli.command_line import CommandLine
from refspec.cli.demo import demo
from refspec.cli.doctor import doctor
from refspec.cli.dp_demo import dp_demo
from refspec.cli.exercises import exercises, grade, hint, reset, start
from refspec.cli.generate import generate
from refspec.cli.oracle import oracle_app
from refspec.cli.quiz import quiz
from refspec.cli.serve_demo import serve_demo
from refspec.cli.site import site_app
from refspec.cli.trace import trace_app

app = typer.Typer(
    cls=CommandLine,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=AlgorithmCommand)(generate)
app.add_typer(trace_app, name="trace")
app.add_typer(bench_app, name="bench")
app.add_typer(oracle_app, name="oracle")
app.command()(demo)
app.command(cls=AlgorithmCommand)(serve_demo)
app.command()(dp_demo)
for command in (exercises, start, grade, hint, reset):
    app.command()(command)
app.command()(quiz)
app.add_typer(site_app, name="site")
app.command()(doctor)


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
