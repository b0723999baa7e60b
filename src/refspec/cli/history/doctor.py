"""`refspec history doctor`: what a clone can and cannot answer, and what to do about the rest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from refspec.cli.history.options import ClonePath, Json, source_json, source_of
from refspec.cli.history.output import console, print_json, print_rows, shown
from refspec.cli.wording import size_of
from refspec.history.cloning import write_commit_graph
from refspec.history.inspection import FROM_THE_CATALOGUE, NEEDS, Examination, examine
from refspec.history.sources import HOW_TO_GET_ONE, Source

NO_GRAPH = "none; --write-commit-graph writes one, and log over the folder is several times faster"


def doctor(
    clone: ClonePath = None,
    write_graph: Annotated[
        bool,
        typer.Option("--write-commit-graph", help="Have git write a commit-graph into the clone, which speeds it up."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what the clone can and cannot answer, command by command, and what to do about the rest.

    Exit status 0 if everything can be answered in full; 1 if not. Nothing is written unless --write-commit-graph says
    so.
    """
    source = source_of(clone, as_json=as_json)
    written = write_commit_graph(source.needed("a commit-graph")) if write_graph else None
    seen = examine(source.clone) if source.clone else None
    if as_json:
        print_json(_document(source, seen, written))
    elif seen:
        _show(source, seen, written)
    else:
        out = console()
        out.print(f"{source.why[0].upper()}{source.why[1:]} ({HOW_TO_GET_ONE}).", soft_wrap=True)
        out.print(f"The catalogue answers {FROM_THE_CATALOGUE}.", soft_wrap=True)
    raise typer.Exit(0 if seen and seen.ok else 1)


def _show(source: Source, seen: Examination, written: int | None) -> None:
    assert source.clone
    out = console()
    yes, no = ("+", "x") if out.options.ascii_only else ("✓", "✗")
    out.print(shown(f"{source.clone.folder} ({source.why}), git {seen.git_version}"), style="bold", soft_wrap=True)
    if written is not None:
        out.print(f"Wrote a commit-graph of {size_of(written)}.", soft_wrap=True)
    out.print()
    rows = []
    for finding in seen.findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        rows.append((f"{yes if finding.ok else no} {finding.need}", finding.found + remedy))
    if seen.commit_graph is None:
        rows.append(("- commit-graph", NO_GRAPH))
    else:
        rows.append((f"{yes} commit-graph", size_of(seen.commit_graph)))
    print_rows(rows)
    out.print()
    out.print("What can be answered in full", style="bold", soft_wrap=True)
    lacks = [(command, ", ".join(seen.lacks(command))) for command in NEEDS]
    print_rows(
        (f"{no if lacking else yes} {command}", f"lacks {lacking}" if lacking else "") for command, lacking in lacks
    )


def _document(source: Source, seen: Examination | None, written: int | None) -> dict[str, Any]:
    return {
        **source_json(source),
        "ok": bool(seen and seen.ok),
        "needs": [asdict(finding) for finding in seen.findings] if seen else [],
        "commands": {
            name.split()[0]: {"ok": not seen.lacks(commands), "lacks": seen.lacks(commands)}
            for commands in NEEDS
            for name in commands.split(", ")
        }
        if seen
        else {},
        "git_version": seen.git_version if seen else None,
        "commit_graph_bytes": seen.commit_graph if seen else None,
        "written_commit_graph": written is not None,
    }
