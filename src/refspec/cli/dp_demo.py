"""`refspec dp-demo`: data-parallel ranks with unequal work that stay in step, or hang when one does not join in."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from refspec.cli.command_line import UsageError, shows_progress
from refspec.cli.demo import PROMPTS
from refspec.cli.option_names import option_names
from refspec.cli.wording import plural
from refspec.config import SamplingParams, SpecConfig

if TYPE_CHECKING:
    from refspec.engine.ranks import Hang, RankReport

REQUESTS = (0, 1, 5, 2)  # of ranks 0, 1, ..., where --requests does not say
MOST_RANKS = 8
MAX_RUNNING = 2  # on one rank: so some requests are still to be read when others decode
SPEC = SpecConfig()
LETTERS = {"extend": "P", "decode": "D"}
TABLE = {  # what a line is called, and the key of its numbers
    "requests": "requests",
    "tokens": "tokens",
    "same as alone": "same_outputs",
    "prefills": "prefills",
    "idle prefills": "idle_prefills",
    "rounds": "rounds",
    "idle rounds": "idle_rounds",
    "collectives": "collectives",
}


def dp_demo(
    ranks: Annotated[
        int | None,
        typer.Option(min=2, max=MOST_RANKS, metavar="N", help="Processes.", show_default="as --requests has, else 3"),
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Prompts for each rank, 0 for some.", show_default="0,1,5"),
    ] = None,
    skip_idle: Annotated[
        bool,
        typer.Option(
            "--skip-idle", help="Bring a fault back: a rank without rows does not join in, and the run hangs."
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="If no rank moves for so long, they hang.")] = 5.0,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Output tokens of a prompt, at most; every other gets half of it.")
    ] = 24,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Serve prompts on data-parallel ranks that have to meet in every forward.

    Each rank is a process with its own requests; the output head is spread over all of them. Where there is a GPU for
    each rank they run on GPUs, else on the CPU.

    Exit status 0: all ranks got to the end, by the same number of collectives, with the tokens that each gives alone.
    Else 1: so a hang is a 1, with --skip-idle too.
    """
    counts = _requests_by_rank(ranks, requests)
    if not 0.1 <= timeout <= 3600:
        raise UsageError(f"--timeout is {timeout:g}, it must be between 0.1 and 3600 seconds")
    with option_names(UsageError):
        whole = SamplingParams(max_new_tokens=max_new_tokens)
    half = SamplingParams(max_new_tokens=(max_new_tokens + 1) // 2)
    # One prompt after the other, so that no two ranks have the same; and on one rank some end before others.
    given = cycle(PROMPTS)
    prompts = [list(islice(given, count)) for count in counts]
    params = [list(islice(cycle([whole, half]), count)) for count in counts]

    errors = Console(stderr=True, highlight=False)
    with (
        errors.status(f"{len(counts)} ranks start, serve, and compare") if shows_progress(as_json) else nullcontext(),
        option_names(ValueError),
    ):
        from refspec.engine.dp import device_of
        from refspec.engine.engine import Engine
        from refspec.engine.ranks import Hang, run_ranks

        device = device_of(0, len(counts)).type
        make_engine = partial(Engine, spec=SPEC, max_running=MAX_RUNNING)
        outcome = run_ranks(make_engine, prompts, params, timeout, skip_idle)
    hang, reports = (outcome, []) if isinstance(outcome, Hang) else (None, outcome)
    report: dict[str, Any] = {
        "requests": counts,
        "skip_idle": skip_idle,
        "timeout": timeout,
        "max_new_tokens": max_new_tokens,
        "spec": asdict(SPEC),
        "max_running": MAX_RUNNING,
        "device": device,
        "collectives_by": "nccl" if device == "cuda" else "gloo",
        "ok": hang is None and _all_well(reports),
        "hang": hang and _hang_as_dict(hang),
        "steps": [{"mode": step.mode.value, "batch_sizes": step.batch_sizes} for step in reports[0].steps]
        if reports
        else None,
        "ranks": [_rank_as_dict(rank, theirs) for rank, theirs in enumerate(reports)],
    }
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _show(Console(highlight=False), report)
    raise typer.Exit(0 if report["ok"] else 1)


def _requests_by_rank(ranks: int | None, requests: str | None) -> list[int]:
    if requests is None:
        defaults = [REQUESTS[rank % len(REQUESTS)] for rank in range(MOST_RANKS)]
        return defaults[: ranks or 3]
    parts = requests.split(",")
    if not all(re.fullmatch("[0-9]{1,3}", part.strip()) for part in parts):
        raise UsageError(
            f"--requests is {requests!r}, it must be a whole number for each rank, as in 0,1,5, and below 1000"
        )
    counts = [int(part) for part in parts]
    if ranks is not None and len(counts) != ranks:
        raise UsageError(f"--requests {requests} is for {plural(len(counts), 'rank')}, --ranks says {ranks}")
    if not 2 <= len(counts) <= MOST_RANKS:
        raise UsageError(f"--requests {requests} is for {plural(len(counts), 'rank')}, there may be 2 to {MOST_RANKS}")
    return counts


def _all_well(reports: list[RankReport]) -> bool:
    same_way = len({(report.collectives, tuple(report.steps)) for report in reports}) == 1
    return same_way and all(found.is_rounding for report in reports for found in report.differences.values())


def _rank_as_dict(rank: int, report: RankReport) -> dict[str, Any]:
    from refspec.contracts import ForwardMode

    return {
        "rank": rank,
        "requests": len(report.generations),
        "tokens": sum(len(generation.token_ids) for generation in report.generations),
        "prefills": report.count(rank, ForwardMode.EXTEND, idle=False),
        "idle_prefills": report.count(rank, ForwardMode.EXTEND, idle=True),
        "rounds": report.count(rank, ForwardMode.DECODE, idle=False),
        "idle_rounds": report.count(rank, ForwardMode.DECODE, idle=True),
        "collectives": report.collectives,
        "same_outputs": len(report.generations) - len(report.differences),
        "differences": [
            {"prompt": prompt, **asdict(found), "is_rounding": found.is_rounding}
            for prompt, found in report.differences.items()
        ],
        "generations": [asdict(generation) for generation in report.generations],
    }


def _hang_as_dict(hang: Hang) -> dict[str, Any]:
    return {
        "explanation": hang.explain(),
        "places": [place and asdict(place) for place in hang.places],
        "waiting": hang.waiting,
        "skipped": [[asdict(place) for place in places] for places in hang.skipped],
    }


def _show(console: Console, report: dict[str, Any]) -> None:
    where = "a GPU each, NCCL" if report["device"] == "cuda" else "on the CPU, gloo"
    console.print(
        f"{len(report['requests'])} ranks ({where}), each with up to {MAX_RUNNING} requests at a time; "
        f"EAGLE k{SPEC.topk} S{SPEC.num_steps} N{SPEC.num_draft_tokens}\n"
    )
    if report["hang"]:
        for line in report["hang"]["explanation"]:
            console.print(line)
        console.print("All were ended.")
        if not report["skip_idle"]:
            console.print("Here no rank stays away on purpose. If they were only slow, raise --timeout.")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column("rank", style="dim")
    for row in report["ranks"]:
        table.add_column(str(row["rank"]), justify="right", no_wrap=True)
    for label, name in TABLE.items():
        table.add_row(label, *(str(row[name]) for row in report["ranks"]))
    console.print(table)
    console.print()
    _show_steps(console, report)
    for row in report["ranks"]:
        for found in row["differences"]:
            verdict = "rounding can do that" if found["is_rounding"] else "that is a fault: please report it"
            console.print(
                f"rank {row['rank']}, prompt {found['prompt']}: leaves the output of the rank alone at token "
                f"{found['index']}, where its two best logits lie {found['gap']:.1e} apart (limit "
                f"{found['gap_limit']:.0e}): {verdict}"
            )
    if report["ok"] and report["skip_idle"]:
        console.print("No rank was without rows when another had some, so there was nothing to skip.")
    elif report["ok"]:
        console.print("To see what happens when a rank does not join in: refspec dp-demo --skip-idle")
    elif len({row["collectives"] for row in report["ranks"]}) > 1:
        console.print("The ranks did not take the same number of collectives.", style="bold")
    else:
        console.print("The outputs differ.", style="bold")


def _show_steps(console: Console, report: dict[str, Any]) -> None:
    """A line for each rank, a letter for each step: P and D with requests of its own, . without."""
    width = max(1, min(console.width, 80) - len("rank 0  "))
    steps = report["steps"]
    for start in range(0, len(steps), width):
        for rank in range(len(report["ranks"])):
            letters = (
                LETTERS[step["mode"]] if step["batch_sizes"][rank] else "." for step in steps[start : start + width]
            )
            console.print(f"rank {rank}  {''.join(letters)}")
        console.print()
    console.print(
        "step by step: P reads prompts, D decodes, . has nothing for the step and goes through it with no rows\n",
        style="dim",
    )
