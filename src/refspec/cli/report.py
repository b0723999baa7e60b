"""What a terminal shows of a run beside its rounds: the text, block by block, and the counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from refspec.cli.render import RoundView
from refspec.cli.wording import plural

# One after the other, so that one sees which tokens came together; without colours, bold and plain are left.
BLOCK_STYLES = ("bold cyan", "cyan")
# The forwards that a phase is made of, by their names in Stats.
FORWARDS = {
    "prefill": ("prefill_target", "prefill_draft"),
    "draft": ("draft",),
    "verify": ("target",),
    "extend": ("extend",),
    "decode": ("target",),
}


def print_text(console: Console, prompt: str, blocks: Sequence[str]) -> None:
    """The prompt, then the output, as it would stand in a file: nothing is wrapped or cut."""
    text = Text(printable(prompt), style="dim")
    for i, block in enumerate(blocks):
        text.append(printable(block), style=f"not dim {BLOCK_STYLES[i % 2]}")
    console.print(text, soft_wrap=True)


def printable(text: str) -> str:
    """What a model makes up must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def most_telling(views: Sequence[Sequence[RoundView]]) -> RoundView:
    """The round with the longest accepted path, the last of them; one that the end cut only if there is no other."""
    return max(
        (view for requests in views for view in requests),
        key=lambda view: (not view.was_cut, len(view.tree.accepted_rows), view.round.number),
    )


def counts_table(stats: dict[str, Any]) -> Table:
    """Forwards, slots and host time by phase. stats: Stats.as_dict()."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("phase")
    for heading in ("forwards", "slots taken", "returned", "seconds"):
        table.add_column(heading, justify="right")
    for phase, seconds in stats["seconds"].items():
        forwards = [stats[f"{name}_forwards"] for name in FORWARDS.get(phase, ())]
        table.add_row(
            phase,
            " + ".join(str(count) for count in forwards if count),
            str(stats["slots_taken"].get(phase) or ""),
            str(stats["slots_returned"].get(phase) or ""),
            f"{seconds:.3f}",
        )
    return table


def summary(stats: dict[str, Any], new_tokens: int) -> str:
    """The closing lines: how many tokens came in how many rounds, and how fast; what the scheduler and graphs did."""
    line = f"{plural(new_tokens, 'token')}; {plural(stats['rounds'], 'round')}"
    if stats["candidates"]:
        line += f" with accept length {stats['accept_length']:.2f} (bonus included)"
    seconds = sum(seconds for phase, seconds in stats["seconds"].items() if phase != "prefill")
    if seconds:
        line += f" at {stats['committed_tokens'] / seconds:.1f} tokens/s"
    replays = sum(stats["graph_replays"].values())
    more = (
        (stats["retractions"], plural(stats["retractions"], "retraction")),
        (stats["cached_tokens"], f"{plural(stats['cached_tokens'], 'token')} found in the prefix cache"),
        (replays, f"{plural(replays, 'forward')} replayed from graphs"),
    )
    told = ", ".join(words for count, words in more if count)
    return f"{line}\n{told}" if told else line
