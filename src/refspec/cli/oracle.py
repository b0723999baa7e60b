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
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from refspec.cli.command_line import CommandLine, UsageError, shows_progress
from refspec.oracle import wheel

if TYPE_CHECKING:
    from refspec.oracle.check import Count, Difference, Failure, OperationReport

oracle_app = typer.Typer(cls=CommandLine, help="Compare our kernels with SGLang's own.", rich_markup_mode=None)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")]

SHOWN = 10  # differences and failures of one operation; all of them are in the JSON document


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
    seed: Annotated[int, typer.Option(help="Another seed draws other cases.")] = 0,
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
    from refspec.oracle.check import Cases, Jury, module_of, operation_names
    from refspec.oracle.check import check as compare

    if not TRITON_INSTALLED:
        raise ValueError("Triton is not installed, so there is nothing to compare (`refspec doctor` says what to do)")
    names = [operation] if operation is not None else operation_names()
    drawn = [Cases(module, seed) for module in map(module_of, names)]
    if case is not None:
        inputs = drawn[0].inputs(case)
        if not as_json:
            _show_inputs(case, inputs)
    states = wheel.states()
    folders = {state.version: state.folder / "sglang" for state in states if state.status == "ready"}
    reports = []
    with (
        Progress(console=Console(stderr=True), transient=True, disable=not shows_progress(as_json)) as bar,
        Jury(folders, jobs) as jury,
    ):
        for operation_cases in drawn:
            labels = operation_cases.labels(cases) if case is None else [case]
            task = bar.add_task(operation_cases.operation.name, total=len(labels))
            reports.append(compare(operation_cases, labels, jury, partial(bar.advance, task)))
            bar.remove_task(task)
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


def _show_reports(console: Console, reports: list[OperationReport]) -> None:
    """One row for each operation; below it, what differed, what failed, and what did not run."""
    ran = [name for name in _opinions(reports) if any(name in report.opinions for report in reports)]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("operation", no_wrap=True, vertical="bottom")
    headers = (name.replace("-interpret", "\ninter-\npret").replace("-gpu", "\ngpu") for name in ran)
    for name in ("cases", *headers, "differ", "border-\nline", "not\nasked"):
        table.add_column(name, justify="right", vertical="bottom")
    for report in reports:
        counts = [report.opinions.get(name) for name in ran]
        table.add_row(
            report.operation,
            str(report.cases),
            *map(_cell, counts),
            f"[bold red]{report.differing_cases}[/]" if report.differences else "0",
            str(report.differing_borderline_cases),
            str(max((count.not_asked for count in counts if count), default=0)),
        )
    console.print(table)
    for report in reports:
        _show_faults(console, report)
    _show_not_run(console, reports)


def _opinions(reports: list[OperationReport]) -> list[str]:
    return list(dict.fromkeys(name for report in reports for name in (*report.opinions, *report.not_run)))


def _cell(count: Count | None) -> str:
    """In how many cases an opinion answered; of how many, if it failed in some."""
    if count is None:
        return "not run"
    asked = count.answered + count.failed
    return f"[bold red]{count.answered}/{asked}[/]" if count.failed else str(count.answered)


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
