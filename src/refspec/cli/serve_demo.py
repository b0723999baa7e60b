"""`refspec serve-demo`: a queue of prompts on a pool that is too small for all of them, as it happens."""

from __future__ import annotations

import json
import os
import select
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from refspec.cli.algorithm import algorithm_name, spec_of
from refspec.cli.command_line import UsageError, shows_progress
from refspec.cli.generate import (
    DRAFT_TOKENS_DEFAULT,
    DTYPES,
    RETRACTIONS,
    STEPS_DEFAULT,
    TOPK_DEFAULT,
    check_sampling_options,
    one_of,
    print_notes,
    read_prompt,
)
from refspec.cli.option_names import option_names
from refspec.cli.viewer import Screen, has_screen
from refspec.config import SamplingParams, SpecConfig

if TYPE_CHECKING:
    from refspec.cli.serve_run import Run

# Two families that begin alike, a long prompt among them, and a short one.
STORE = '''"""Keep small records in one file, and find them again by name."""

import json
import os


class StoreError(Exception):
    """The file of a store cannot be read."""


class Store:
    """Records by name, all in one file."""

    def __init__(self, filename):
        self.filename = filename
        self.records = {}

'''
READER = '''import io


class LineReader:
    """Read lines from a file object."""

    def __init__(self, fp):
        self.fp = fp

'''
TABLE = '''import csv
import sys


def read_table(filename, separator=","):
    """Return the rows of a file, each a list of its cells."""
    rows = []
    with open(filename, newline="") as fp:
        for row in csv.reader(fp, delimiter=separator):
            if row:
                rows.append(row)
    return rows


def main(args=None):
    table = read_table(args[0])
    for row in table:'''
PROMPTS = (
    STORE + "    def load(self):",
    READER + "    def readline(self):",
    TABLE,
    STORE + "    def save(self):",
    READER + "    def close(self):",
    STORE + "    def __len__(self):",
    "def is_prime(n):\n    if n < 2:\n        return False\n    for",
    STORE + '    def remove(self, name):\n        """Forget',
    READER + "    def __iter__(self):",
    STORE + "    def __contains__(self, name):",
)
# What the line below the screen says.
GOING = "space stop  q to the end"
RESTING = "space next step  g go by itself  q to the end"


def serve_demo(
    ctx: typer.Context,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Texts to continue, in place of the built-in ones."),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A file that is one prompt, as of refspec generate. May be given several times."
        ),
    ] = None,
    every: Annotated[
        int, typer.Option(min=0, metavar="N", help="A prompt arrives after so many steps; 0: all are there at once.")
    ] = 3,
    algorithm: Annotated[
        str,
        typer.Option(parser=algorithm_name, metavar="NAME", help="How to speculate: see below; none: token by token."),
    ] = SpecConfig.algorithm,
    topk: Annotated[
        int, typer.Option(metavar="K", help="Branches that the draft follows.", show_default=TOPK_DEFAULT)
    ] = SpecConfig.topk,
    steps: Annotated[
        int, typer.Option(metavar="S", help="Levels of the draft's tree.", show_default=STEPS_DEFAULT)
    ] = SpecConfig.num_steps,
    draft_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", help="Nodes that the target verifies, the root included.", show_default=DRAFT_TOKENS_DEFAULT
        ),
    ] = SpecConfig.num_draft_tokens,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Output tokens for each prompt, at most.")] = 48,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Sample, with the logits divided by this; 0: take the likeliest token.")
    ] = SamplingParams.temperature,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of all prompts, where tokens are sampled.", show_default="a new one"),
    ] = SamplingParams.seed,
    dtype: Annotated[
        str, typer.Option(parser=one_of(*DTYPES), metavar="|".join(DTYPES), help="Of weights and cache.")
    ] = DTYPES[0],
    kv_slots: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens that the KV pool holds.")] = 352,
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens in a page of the pool.")] = 1,
    prefix_cache: Annotated[
        bool, typer.Option(help="Keep what requests leave behind, for those that begin alike.")
    ] = True,
    chunk_size: Annotated[
        int, typer.Option(min=0, metavar="N", help="Prompt tokens that are read in one step; 0: any number.")
    ] = 48,
    retraction: Annotated[
        str,
        typer.Option(
            parser=one_of(*RETRACTIONS),
            metavar="|".join(RETRACTIONS),
            help="Who loses the slots when there are too few for the next round.",
        ),
    ] = RETRACTIONS[0],
    max_running: Annotated[int, typer.Option(min=1, metavar="N", help="Requests that run at one time.")] = 6,
    step: Annotated[bool, typer.Option("--step", help="Go on by key.")] = False,
    delay: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Between two steps on the screen.")] = 0.15,
    verify: Annotated[bool, typer.Option(help="At the end, compare with what each prompt gives alone.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Serve a queue of prompts from a small KV pool, and show who waits, reads, runs, and is retracted.

    On a terminal: a screen with the pool, the requests and what happens; space stops it and goes on, q skips to the
    end. Elsewhere: a line for each event.

    Exit status 0: each prompt got the tokens that it gets alone, but for rounding. Else 1.
    """
    check_sampling_options(ctx)
    if not delay >= 0:  # typer lets NaN pass
        raise UsageError(f"--delay is a number of seconds, 0 or more, not {delay}")
    if step and as_json:
        raise UsageError("--step waits for keys, --json prints nothing but JSON: leave one of them out")
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    if step and not has_screen(console):
        raise UsageError("--step waits for keys, and there is no terminal to press them on: leave it out")
    prompts = [*(prompt or []), *map(read_prompt, prompt_file or [])] or list(PROMPTS)
    spec = spec_of(ctx, algorithm, page_size)  # it matters which options were given, and ctx knows
    with option_names(UsageError):
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)

    quiet = not shows_progress(as_json)
    with option_names(UsageError), nullcontext() if quiet else errors.status("loading the models"):
        from refspec.cli.serve_run import Run, closing_lines
        from refspec.engine.engine import Engine
        from refspec.engine.watch import Watch

        engine = Engine(
            spec=spec,
            dtype=dtype,
            kv_slots=kv_slots,
            max_running=max_running,
            page_size=page_size,
            prefix_cache=prefix_cache,
            chunk_size=chunk_size or None,
            retraction=retraction,
        )
    print_notes(engine, as_json)
    with option_names(ValueError):
        run = Run(Watch(engine), prompts, params, every)
    if has_screen(console) and not as_json:
        _show_on_screen(console, run, by_key=step, delay=delay)
    for news in run.steps():
        if not as_json and not has_screen(console):
            for number, line in news:
                console.print(f"{number:>4} {line}", soft_wrap=True)
    engine.check()
    differences = None
    if verify:
        with nullcontext() if quiet else errors.status("decoding each prompt alone, to compare"):
            differences = run.differences()
    summary = run.summary(differences)
    if as_json:
        config = {
            **{name: getattr(spec, name, None) for name in ("algorithm", "topk", "num_steps", "num_draft_tokens")},
            "algorithm": algorithm,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
            "dtype": dtype,
            "kv_slots": kv_slots,
            "page_size": page_size,
            "prefix_cache": prefix_cache,
            "chunk_size": chunk_size or None,
            "retraction": retraction,
            "max_running": max_running,
            "every": every,
            "prompts": prompts,
        }
        events = [event.as_dict() for event in run.events]
        printed = {"config": config, "events": events, "requests": run.outcomes(), "summary": summary}
        typer.echo(json.dumps({**printed, "notes": engine.notes}))
    else:
        console.print()
        console.print(run.view())
        console.print()
        for line in closing_lines(summary, [outcome["name"] for outcome in run.outcomes()], kv_slots):
            console.print(line)
    raise typer.Exit(0 if summary["ok"] else 1)


def _show_on_screen(console: Console, run: Run, by_key: bool, delay: float) -> None:
    """Draw every step, until the run is over, or whoever watches has had enough."""
    rests = by_key
    if by_key and input_has_ended(sys.stdin.fileno()):
        return
    with Screen(console) as screen:
        for _ in run.steps():
            view = run.view(fills_screen=True)
            while True:
                screen.show(view, 0, RESTING if rests else GOING)
                key = screen.key() if rests else screen.key_within(delay)
                if key == "end":
                    rests = False
                elif key == "next" and not rests:
                    rests = True
                    continue
                elif key not in ("next", "quit", None):
                    continue
                break
            if key == "quit":
                return


def input_has_ended(keyboard: int) -> bool:
    """Did a terminal's input end before anybody asked for keys? Lines that were typed until now are thrown away.

    To be asked before there is a Screen: that makes the terminal forget what it has not given out, the end too.
    """
    while select.select([keyboard], [], [], 0)[0]:
        try:
            if not os.read(keyboard, 1 << 12):
                return True
        except OSError:  # the terminal is gone
            return True
    return False
