"""`refspec oracle`: SGLang's own kernels beside ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from refspec.cli.command_line import CommandLine, UsageError, shows_progress
from refspec.cli.table import fits
from refspec.oracle import wheel

if TYPE_CHECKING:
    from refspec.oracle.check import Count, Difference, Failure, OperationReport

oracle_app = typer.Typer(cls=CommandLine, help="Compare our kernels with SGLang's own.", rich_markup_mode=None)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")]

SHOWN = 10  # differences and failures of one operation; all of them are in the JSON document
LARGEST_SEED = 2**32 - 1
# Opinions, as columns, and what the numbers under them are.
HEADINGS = {
    "torch": "torch\nCPU",
    "triton-interpret": "triton\nCPU",
    "triton-gpu": "triton\nGPU",
    "sglang-interpret": "sglang\nCPU",
    "sglang-gpu": "sglang\nGPU",
    "sgl_kernel": "sgl_kernel\nGPU",
}
HEADING_LEGEND = "cases that the opinion answered; for triton and sglang, CPU is Triton's interpreter; -: not run"
LEGEND = {
    "differ": "cases in which two opinions disagree",
    "borderline": "cases in which they disagree where rounding decides, which are counted apart",
    "not asked": "cases that SGLang's code does not claim to handle",
}


@oracle_app.command()
def fetch(
    wheels: Annotated[
        list[Path] | None,
        typer.Option("--wheel", metavar="FILE", help="Take this wheel instead of downloading; may be given twice."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Download SGLang's published wheels (40 MB), check them by hash, and keep their kernel files in the cache.

    What is there already is left as it is. REFSPEC_CACHE names another folder for it.
    """
    if Path() in (wheels or []):  # what an empty name comes to
        raise UsageError("--wheel needs the name of a wheel's file")
    with _bytes_progress(as_json) as progress:
        states = wheel.take(wheels, progress) if wheels else wheel.fetch(progress)
    _show_states(states, as_json)


@oracle_app.command()
def status(as_json: Json = False) -> None:
    """Say which wheels are there. Exit status 0 if all are, and each file in them is what it should be; 1 if not."""
    states = wheel.states()
    _show_states(states, as_json)
    raise typer.Exit(0 if all(state.status == "ready" for state in states) else 1)


@oracle_app.command()
def check(
    operation: Annotated[str | None, typer.Argument(metavar="OP", help="One operation; default: all.")] = None,
    cases: Annotated[int, typer.Option(min=0, help="Small cases of each; from 2000 on, 20 large ones too.")] = 100,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Another seed draws other cases.")] = 0,
    case: Annotated[str | None, typer.Option(metavar="LABEL", help="Only this case of OP; shows its inputs.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Cases at a time; default: 2, or 1 on one core.")] = None,
    as_json: Json = False,
) -> None:
    """Compare all opinions on an operation: our references, our kernels, SGLang's kernels.

    Exit status 1 if two opinions differ, if one fails, or if there were no two to compare. Where SGLang's wheels are
    not there, ours are still compared with each other, and the report says that SGLang's did not run.
    """
    if case is not None and operation is None:
        raise UsageError("--case names a case of one operation: refspec oracle check OP --case LABEL")
    from refspec.kernels.backend import TRITON_INSTALLED
    from refspec.oracle.check import Cases, Jury, UnknownName, module_of, operation_names
    from refspec.oracle.check import check as compare

    if not TRITON_INSTALLED:
        raise ValueError("Triton is not installed, so there is nothing to compare (`refspec doctor` says what to do)")
    names = [operation] if operation is not None else operation_names()
    try:
        drawn = [Cases(module, seed) for module in map(module_of, names)]
        inputs = drawn[0].inputs(case) if case is not None else {}
    except UnknownName as error:
        raise UsageError(str(error)) from None
    if case is not None and not as_json:
        _show_inputs(case, inputs)
    labels = [operation_cases.labels(cases) if case is None else [case] for operation_cases in drawn]
    states = wheel.states()
    folders = {state.version: state.folder / "sglang" for state in states if state.status == "ready"}
    damaged = {state.version: state.detail for state in states if state.status == "damaged"}
    reports = []
    with _cases_progress(as_json) as bar:
        task = bar.add_task("starting", total=sum(map(len, labels)))
        with Jury(folders, jobs, damaged) as jury:
            for operation_cases, its_labels in zip(drawn, labels, strict=True):
                bar.update(task, description=operation_cases.operation.name)
                reports.append(compare(operation_cases, its_labels, jury, partial(bar.advance, task)))
    ok = all(report.ok for report in reports)
    if as_json:
        document = {
            "ok": ok,
            "seed": seed,
            "wheels": [_state_document(state) for state in states],
            "operations": [{"ok": report.ok, **asdict(report)} for report in reports],
        }
        typer.echo(json.dumps(document))
    else:
        _show_reports(Console(highlight=False), reports)
    raise typer.Exit(0 if ok else 1)


# --- wheels -----------------------------------------------------------------------------------------------------------


@contextmanager
def _bytes_progress(as_json: bool) -> Iterator[wheel.Progress]:
    """What the wheel module reports to, drawn as a bar on stderr where somebody looks at it."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shows_progress(as_json)) as bar:
        task = bar.add_task("SGLang", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _state_document(state: wheel.WheelState) -> dict[str, str | None]:
    return {
        "version": state.version,
        "status": state.status,
        "folder": str(state.folder),
        "detail": state.detail,
        "remedy": state.remedy,
    }


def _show_states(states: list[wheel.WheelState], as_json: bool) -> None:
    if as_json:
        ok = all(state.status == "ready" for state in states)
        typer.echo(json.dumps({"ok": ok, "wheels": [_state_document(state) for state in states]}))
        return
    for state in states:
        what = f"SGLang {state.version}: {state.status}" + (f" ({state.detail})" if state.detail else "")
        typer.echo(f"{what}, {state.folder}" if state.status != "absent" else what)
    if any(state.remedy for state in states):
        typer.echo("to mend it: refspec oracle fetch")


# --- reports ----------------------------------------------------------------------------------------------------------


def _show_inputs(label: str, inputs: dict[str, object]) -> None:
    typer.echo(f"case {label}:")
    for name, value in inputs.items():
        typer.echo(f"  {name} = {value}")
    typer.echo("")


def _cases_progress(as_json: bool) -> Progress:
    """A bar on stderr, where somebody looks at it: the operation, and how many of all cases are done."""
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TextColumn("cases"))
    console = Console(stderr=True)
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not shows_progress(as_json))


def _show_reports(console: Console, reports: list[OperationReport]) -> None:
    """One row for each operation; below it, what differed, what failed, and what did not run. On a terminal that is
    too narrow for the rows, each of them as lines.
    """
    ran = [name for name in HEADINGS if any(name in report.opinions for report in reports)]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("operation", no_wrap=True, vertical="bottom")
    for heading in ("cases", *(HEADINGS[name] for name in ran), "differ", "borderline", "not\nasked"):
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for report in reports:
        table.add_row(
            report.operation,
            str(report.cases),
            *(_cell(report.opinions.get(name)) for name in ran),
            *_outcome(report).values(),
        )
    if fits(console, table):
        console.print(table)
        console.print(f"\ntorch, triton, sglang: {HEADING_LEGEND}", style="dim")
    else:
        for report in reports:
            _show_as_lines(console, report)
        console.print()
    for word, meaning in LEGEND.items():
        console.print(f"{word}: {meaning}", style="dim")
    console.print()
    for report in reports:
        _show_faults(console, report)
    _show_not_run(console, reports)


def _show_as_lines(console: Console, report: OperationReport) -> None:
    answered = ", ".join(f"{name} {_cell(count)}" for name, count in report.opinions.items())
    outcome = ", ".join(f"{word} {cell}" for word, cell in _outcome(report).items())
    console.print(f"[bold]{report.operation}[/]: {report.cases} cases")
    for line in (f"answered: {answered}", outcome):
        console.print(Padding(line.replace("\n", " "), (0, 0, 0, 2), expand=False))


def _outcome(report: OperationReport) -> dict[str, str]:
    """The last cells of an operation's row, under the words of LEGEND."""
    return {
        "differ": f"[bold red]{report.differing_cases}[/]" if report.differences else "0",
        "borderline": str(report.differing_borderline_cases),
        "not asked": str(max((count.not_asked for count in report.opinions.values()), default=0)),
    }


def _cell(count: Count | None) -> str:
    """In how many cases an opinion answered; of how many, on a line of its own, if it failed in some."""
    if count is None:
        return "-"
    asked = count.answered + count.failed
    return f"[bold red]{count.answered}\nof {asked}[/]" if count.failed else str(count.answered)


def _show_faults(console: Console, report: OperationReport) -> None:
    found: list[Difference | Failure] = [*report.differences, *report.failures]
    for fault in found[:SHOWN]:
        console.print(f"{report.operation}, {escape(fault.sentence)}\n  {escape(fault.reproduce)}", soft_wrap=True)
    if len(found) > SHOWN:
        console.print(f"{report.operation}: {len(found) - SHOWN} more, which --json lists")
    if len(report.opinions) < 2:
        console.print(f"{report.operation}: fewer than two opinions could run, so nothing was compared")


def _show_not_run(console: Console, reports: list[OperationReport]) -> None:
    """Reasons, each with the opinions and operations that it holds for."""
    concerned: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        for opinion, reason in report.not_run.items():
            concerned.setdefault((reason, opinion), []).append(report.operation)
    grouped: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (reason, opinion), names in concerned.items():
        grouped.setdefault((reason, tuple(names)), []).append(opinion)
    for (reason, of_them), opinions in grouped.items():
        where = "" if len(of_them) == len(reports) else f" for {', '.join(of_them)}"
        console.print(f"not run: {', '.join(opinions)}{where}: {escape(reason)}", soft_wrap=True)
