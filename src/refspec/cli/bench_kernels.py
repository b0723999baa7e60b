"""`refspec bench kernels`: how fast the kernels are on this GPU, and what they compile to without one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from refspec.cli.command_line import UsageError, shows_progress
from refspec.cli.table import fits

if TYPE_CHECKING:
    from refspec.bench.compile_report import Compiled, Refused
    from refspec.bench.kernels import KernelReport


def kernels(
    operations: Annotated[
        list[str] | None, typer.Argument(metavar="OP", help="operations, as in refspec.kernels; default: all")
    ] = None,
    compile_report: Annotated[
        bool, typer.Option("--compile-report", help="compile for sm_80 and sm_90 instead; needs no GPU")
    ] = False,
    repetitions: Annotated[int, typer.Option(min=2, help="how often each case is timed")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Time each kernel against its reference, SGLang's kernel and the memory's speed; or compile them all.

    With --compile-report, exit status 1 if the compiler refuses a kernel, or if one spills and nothing says why.
    """
    from refspec.bench.kernel_cases import CASES

    chosen = list(dict.fromkeys(operations or CASES))
    for name in chosen:
        if name not in CASES:
            raise UsageError(f"no operation is called {name!r}; there are: {', '.join(CASES)}")
    if compile_report:
        _compile(chosen, as_json)
    else:
        _time(chosen, repetitions, as_json)


def _time(operations: list[str], repetitions: int, as_json: bool) -> None:
    from refspec.bench.kernels import bench_kernels
    from refspec.oracle.sources import Sources
    from refspec.oracle.wheel import folders

    with Progress(console=Console(stderr=True), transient=True, disable=not shows_progress(as_json)) as bar:
        task = bar.add_task("", total=None)
        report = bench_kernels(
            operations, Sources(folders()), repetitions, lambda case: bar.update(task, description=escape(case))
        )
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _show_timings(report)


def _show_timings(report: KernelReport) -> None:
    console = Console()
    console.print(
        f"{report.device}, torch {report.torch}, Triton {report.triton}; a copy moves "
        f"{report.copy_bandwidth / 1e9:.0f} GB/s. Medians of {report.repetitions} ratios, each taken side by side."
    )
    table = Table(caption="torch/, sglang/: their time / ours. /bound: ours / what its bytes take at that speed.")
    table.add_column("")
    for column in ("µs", "torch/", "sglang/", "/bound"):
        table.add_column(column, justify="right")
    last = ""
    for timing in report.timings:
        if timing.operation != last:
            table.add_row(f"[bold]{timing.operation}[/]")
            last = timing.operation
        table.add_row(
            f" {timing.case}",
            f"{timing.microseconds:.1f}",
            f"{timing.torch[0]:.1f}",
            f"{timing.sglang[0]:.2f}" if timing.sglang else "",
            f"{timing.bound[0]:.2f}",
        )
    console.print(table)
    notes: dict[str, list[str]] = {}
    for timing in report.timings:
        if timing.sglang_note and timing.operation not in notes.setdefault(timing.sglang_note, []):
            notes[timing.sglang_note].append(timing.operation)
    for note, names in notes.items():
        console.print(f"Not timed against SGLang, since {escape(note)}: {', '.join(names)}.")


def _compile(operations: list[str], as_json: bool) -> None:
    from refspec.bench.compile_report import compile_report

    columns = (TextColumn("compiled"), BarColumn(20), MofNCompleteColumn(), TextColumn("operations"))
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not shows_progress(as_json),
    ) as bar:
        task = bar.add_task("", total=len(operations))
        compiled, refused = compile_report(operations, progress=lambda done: bar.update(task, completed=done))
    if as_json:
        print(json.dumps(_document(compiled, refused), indent=2))
    else:
        _show_compiled(compiled)
        for failure in refused:
            what = f"{failure.operation} {failure.case}, sm_{failure.target}"
            Console(soft_wrap=True).print(f"refused: {what}: {failure.error}", markup=False)
    if refused or any(kernel.spills and not kernel.explanation for kernel in compiled):
        raise typer.Exit(1)


def _document(compiled: list[Compiled], refused: list[Refused]) -> dict[str, Any]:
    return {
        "kernels": [{**asdict(kernel), "explanation": kernel.explanation} for kernel in compiled],
        "refused": [asdict(failure) for failure in refused],
    }


def _show_compiled(compiled: list[Compiled]) -> None:
    """A row for each kernel and set of constants. Triton compiles one again where an argument is 1, or is a multiple
    of 16: these variants share the row. On a terminal that is too narrow for the rows, each of them as lines.
    """
    targets = sorted({kernel.target for kernel in compiled})
    together: dict[tuple[str, str, str], list[Compiled]] = {}
    for kernel in compiled:
        together.setdefault((kernel.operation, kernel.kernel, kernel.constants), []).append(kernel)
    columns = ("warps", *(f"sm_{target}" for target in targets), "shared", "spilled")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("kernel, constants")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    lines: list[RenderableType] = []
    last = ""
    for (operation, name, constants), kinds in together.items():
        if operation != last:
            table.add_row(f"[bold]{operation}[/]")
            lines.append(f"[bold]{operation}[/]")
            last = operation
        title = f"{escape(name)} {escape(constants)}"
        numbers = (
            _range(kind.num_warps for kind in kinds),
            *(_range(kind.registers for kind in kinds if kind.target == target) for target in targets),
            _range(kind.shared for kind in kinds),
            _range(kind.stack + kind.local for kind in kinds),
        )
        table.add_row(Padding(title, (0, 0, 0, 2)), *numbers)
        told = ", ".join(f"{column} {number}" for column, number in zip(columns, numbers, strict=True))
        lines += [Padding(title, (0, 0, 0, 2), expand=False), Padding(told, (0, 0, 0, 4), expand=False)]
    console = Console(highlight=False)
    for renderable in [table] if fits(console, table) else lines:
        console.print(renderable)
    console.print(
        f"\n{', '.join(columns[1:-2])}: registers of a thread, compiled for that GPU; shared: bytes of shared memory "
        "of a program; spilled: bytes of a thread that are in memory, not in registers\n",
        style="dim",
    )
    spilling = {kernel.kernel: kernel.explanation for kernel in compiled if kernel.spills}
    for name, explanation in spilling.items():
        console.print(f"{name} spills: {explanation or 'nothing says why that would be right'}", markup=False)


def _range(values: Iterable[int]) -> str:
    """One number, or the least and the largest; nothing for none."""
    known = sorted(set(values))
    return "-".join(str(value) for value in known if value in (known[0], known[-1]))
