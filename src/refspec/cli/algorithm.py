"""--algorithm, of every command that has it: what may be chosen, what help says of it, and the config that comes of it.

All of it is read off the registry, so an algorithm that is added there, or by an installed package, is here too.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from refspec.cli.command_line import UsageError
from refspec.cli.option_names import option_names
from refspec.config import ALGORITHMS, SpecConfig, algorithm_entry_points

PLAIN = "none"
# Options, and the fields of SpecConfig that they set.
SPEC_FIELDS = {
    "topk": "topk",
    "steps": "num_steps",
    "draft_tokens": "num_draft_tokens",
    "exact_branch_kv": "exact_branch_kv",
    "sampler": "sampler",
    "threshold_single": "threshold_single",
    "threshold_acc": "threshold_acc",
    "exact_penalties": "exact_penalties",
    "adaptive_steps": "adaptive_steps",
    "ngram_max_trie_depth": "ngram_max_trie_depth",
    "ngram_max_bfs_breadth": "ngram_max_bfs_breadth",
    "ngram_match_type": "ngram_match_type",
    "ngram_capacity": "ngram_capacity",
}


def algorithm_name(value: str) -> str:
    """The parser of --algorithm. No package is imported for it, and no torch."""
    if value != PLAIN and value not in ALGORITHMS and value not in algorithm_entry_points():
        choices = ", ".join((*ALGORITHMS, *algorithm_entry_points(), PLAIN))
        raise typer.BadParameter(f"{value!r} is not one of: {choices}")
    return value


def steps_list(value: str) -> tuple[int, ...]:
    """The parser of --adaptive-steps."""
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not of the form S,S,..., numbers of steps in ascending order") from None


class AlgorithmCommand(TyperCommand):
    """A command whose help ends with the algorithms that there are."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Algorithms"):
            formatter.write_dl([*ALGORITHMS.items(), *_from_packages(), (PLAIN, "one token for each target forward")])


def _from_packages() -> list[tuple[str, str]]:
    """Names, and what their packages say of themselves."""
    found = []
    for name, entry in algorithm_entry_points().items():
        summary = entry.dist.metadata.json.get("summary") if entry.dist else None
        found.append((name, f"{summary or entry.value} (installed)"))
    return found


def given_options(ctx: typer.Context) -> dict[str, Any]:
    """The parameters that are on the command line, and their values."""
    return {
        name: value
        for name, value in ctx.params.items()
        if (source := ctx.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }


def spec_of(ctx: typer.Context, algorithm: str, page_size: int) -> SpecConfig | None:
    """The config that the command line asks for; what it leaves open is as suits the algorithm. None: decode plainly.

    Raises UsageError for options that cannot be, and ValueError for an algorithm of a package that is broken.
    """
    given = given_options(ctx)
    if algorithm == PLAIN:
        for name in (*SPEC_FIELDS, "draft"):
            if name in given:
                raise UsageError(
                    f"{option_of(ctx, name)} with --algorithm none: it is for speculation, leave one of them out"
                )
        return None
    from refspec.workers.registry import find_algorithm

    fields = {field: given[name] for name, field in SPEC_FIELDS.items() if name in given}
    chosen = find_algorithm(algorithm)
    with option_names(UsageError):
        return chosen.spec(**fields, page_size=page_size)


def option_of(ctx: typer.Context, name: str) -> str:
    """How a parameter is written on the command line."""
    return next(parameter.opts[0] for parameter in ctx.command.params if parameter.name == name)
