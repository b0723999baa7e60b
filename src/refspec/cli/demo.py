"""`refspec demo`: what speculation does, on a few prompts, in well under a minute."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from refspec.cli.command_line import shows_progress
from refspec.cli.generate import BACKENDS, announce_interpreter, one_of
from refspec.cli.wording import plural
from refspec.config import SamplingParams, SpecConfig

if TYPE_CHECKING:
    from refspec.engine.compare import Difference
    from refspec.engine.engine import Engine

# Beginnings of Python code. None ends in a space: the models' tokens begin with theirs.
PROMPTS = (
    "def read_config(path):",
    "class Stack:\n    def __init__(self):",
    "import json\nimport os\n\ndef load(filename):\n    with open(",
    "def is_prime(n):\n    if n < 2:\n        return False\n    for",
    "class Point:\n    def __repr__(self):\n        return",
    "try:\n    import threading\nexcept ImportError:",
    "def main(argv=None):\n    parser = argparse.ArgumentParser(",
    "for line in lines:\n    key, value = line.split(",
)
NEW_TOKENS = 64
BUSY = 1.6  # on an idle machine the fastest prompt is about 1.2 times as fast as the slowest
SPECS = {
    "plain": None,
    "EAGLE k1 S5 N6": SpecConfig(topk=1, num_steps=5, num_draft_tokens=6),
    "EAGLE k4 S3 N16": SpecConfig(topk=4, num_steps=3, num_draft_tokens=16),
}


@dataclass
class Contestant:
    """One way to decode, and what it did. Lists have an entry for each prompt."""

    name: str
    engine: Engine
    outputs: list[list[int]] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)  # of all prompts
    tokens_per_second: list[float] = field(default_factory=list)
    differences: dict[int, Difference] = field(default_factory=dict)  # from the plain output, by prompt

    def __post_init__(self) -> None:
        # The first forward of a process pays for much that later ones find done; it is no part of the comparison.
        self.engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=4))
        self.not_counted = self.engine.stats.forwards.copy()

    def decode(self, prompt: str) -> None:
        started = time.perf_counter()
        [generation] = self.engine.generate([prompt], SamplingParams(max_new_tokens=NEW_TOKENS))
        self.tokens_per_second.append(len(generation.token_ids) / (time.perf_counter() - started))
        self.outputs.append(generation.token_ids)
        self.accept_lens += generation.accept_lens

    @property
    def forwards(self) -> Counter[str]:
        return self.engine.stats.forwards - self.not_counted

    def report(self, plain: Contestant) -> dict[str, Any]:
        ratios = [mine / theirs for mine, theirs in zip(self.tokens_per_second, plain.tokens_per_second, strict=True)]
        return {
            "name": self.name,
            "spec": asdict(self.engine.spec) if self.engine.spec else None,
            "accept_length": statistics.fmean(self.accept_lens or [1]),
            "forwards": dict(self.forwards),
            "tokens_per_second": statistics.median(self.tokens_per_second),
            "ratio_to_plain": statistics.median(ratios),
            "same_outputs": len(self.outputs) - len(self.differences),
            "differences": [
                {"prompt": prompt, **asdict(found), "is_rounding": found.is_rounding}
                for prompt, found in self.differences.items()
            ],
        }


def demo(
    backend: Annotated[
        str,
        typer.Option(parser=one_of(*BACKENDS), metavar="|".join(BACKENDS), help="As of refspec generate."),
    ] = BACKENDS[0],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Decode built-in prompts plainly and with EAGLE, and compare.

    Exit status 1 if the tokens differ where rounding does not explain it.
    """
    console = Console(highlight=False)
    if not as_json:
        console.print(f"{plural(len(PROMPTS), 'prompt')} one by one, up to {NEW_TOKENS} tokens each, in three ways\n")
    with Progress(console=Console(stderr=True), transient=True, disable=not shows_progress(as_json)) as bar:
        task = bar.add_task("loading the models", total=len(PROMPTS))
        from refspec.engine.compare import first_difference
        from refspec.engine.engine import Engine

        announce_interpreter(backend, as_json)
        contestants = [Contestant(name, Engine(spec=spec, backend=backend)) for name, spec in SPECS.items()]
        plain, *speculative = contestants
        bar.update(task, description="decoding")
        for i, prompt in enumerate(PROMPTS):
            # A machine's speed drifts: they run one after the other, and each is first in turn.
            for j in range(len(contestants)):
                contestants[(i + j) % len(contestants)].decode(prompt)
            for other in speculative:
                found = first_difference(plain.engine, plain.engine.encode(prompt), plain.outputs[i], other.outputs[i])
                if found:
                    other.differences[i] = found
            bar.advance(task)
    report = {
        "prompts": PROMPTS,
        "max_new_tokens": NEW_TOKENS,
        "dtype": str(plain.engine.dtype).removeprefix("torch."),
        "device": str(plain.engine.device),
        "backend": plain.engine.backend,
        "plain_speeds_vary_by": max(plain.tokens_per_second) / min(plain.tokens_per_second),
        "ok": all(found.is_rounding for other in speculative for found in other.differences.values()),
        "contestants": [contestant.report(plain) for contestant in contestants],
    }
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _show(console, report)
    raise typer.Exit(0 if report["ok"] else 1)


def _show(console: Console, report: dict[str, Any]) -> None:
    prompts = len(report["prompts"])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("", "same\ntokens", "accept\nlength", "forwards\ntarget", "\ndraft", "\nextend"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_column("\ntokens/s", justify="right", no_wrap=True)
    table.add_column("times\nplain", justify="right", no_wrap=True)
    for row in report["contestants"]:
        table.add_row(
            row["name"],
            f"{row['same_outputs']} of {prompts}" if row["spec"] else "",
            f"{row['accept_length']:.2f}",
            *(str(row["forwards"].get(phase) or "") for phase in ("target", "draft", "extend")),
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio_to_plain']:.2f}",
        )
    console.print(table)
    console.print(
        f"accept length: tokens for each round, bonus included; speeds are medians, {report['dtype']} on "
        f"{report['device']}\n",
        style="dim",
    )
    spread = report["plain_speeds_vary_by"]
    if spread > BUSY:
        console.print(
            f"Something else was at work here: between prompts, plain decoding's speed varied {spread:.1f} times. The "
            "counts hold; to compare speeds, run it again.\n"
        )
    for row in report["contestants"]:
        for found in row["differences"]:
            verdict = "rounding can do that" if found["is_rounding"] else "that is a fault: please report it"
            console.print(
                f"{row['name']} leaves the plain output of prompt {found['prompt']} at token {found['index']}, where "
                f"the plain run's two best logits lie {found['gap']:.1e} apart (limit {found['gap_limit']:.0e}): "
                f"{verdict}"
            )
    if report["ok"]:
        console.print('See it happen, round by round: refspec generate "def fib(n):" --watch')
    else:
        console.print(
            "The outputs differ. To record what a run does: refspec generate PROMPT --trace FILE", style="bold"
        )
