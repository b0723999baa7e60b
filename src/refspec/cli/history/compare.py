"""`refspec history compare`: our function beside SGLang's."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from refspec.cli.history.options import ClonePath, Json, Pager, source_json, source_of
from refspec.cli.history.output import UNBOUNDED, paged, print_indented, print_json, shown
from refspec.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from refspec.history.compare import Beside, Function

COLUMN = 70  # columns that a source takes at least; two fit beside one another, or stand one after the other
BETWEEN = 3


def compare(
    operation: Annotated[
        str | None,
        typer.Argument(metavar="[OP]", help="An operation, or a function of it; without, all are listed."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="REV", help="A revision, a pull request, a version; default: the main line."),
    ] = None,
    kind: Annotated[
        Literal["python", "triton", "cuda"] | None,
        typer.Option("--kind", help="Which of SGLang's, where it has several; default: the one nearest to ours."),
    ] = None,
    clone: ClonePath = None,
    as_json: Json = False,
    pager: Pager = True,
) -> None:
    """Our function beside SGLang's at a revision, read from your clone.

    Without OP, the operations are listed, with where SGLang has them; that needs no clone.
    """
    if operation is None:
        _list(as_json, pager)
        return
    from refspec.history.compare import compare_at, operation_named
    from refspec.history.revisions import commit_in, titles

    operation = operation_named(operation)
    source = source_of(clone, as_json=as_json)
    asked = source.needed("compare")
    commit = commit_in(source, at) if at is not None else asked.main.commit
    found = compare_at(asked, operation, commit, kind)
    if as_json:
        print_json(source_json(source) | asdict(found))
        return
    (title,) = titles(asked, commit)
    with paged(pager) as out:
        _show(out, found, f"{at or asked.main.name}: {title}")


def _list(as_json: bool, pager: bool) -> None:
    from refspec.history.counterparts import counterparts

    if as_json:
        print_json([asdict(counterpart) for counterpart in counterparts()])
        return
    with paged(pager) as out:
        last = None
        for counterpart in counterparts():
            if counterpart.operation != last:
                last = counterpart.operation
                out.print(last, style="bold")
            place = next((p for p in counterpart.places if not p.until), counterpart.places[-1])
            until = f" until {place.until}" if place.until else ""
            print_indented(out, 2, f"refspec.{counterpart.ours}", "cyan")
            print_indented(out, 2, f"{counterpart.kind}: {place.path}:{place.function}, since {place.since}{until}")


def _show(out: Console, found: Beside, revision: str) -> None:
    heads = (f"ours: {found.ours.path}:{found.ours.line}", f"SGLang's: {found.theirs.path}:{found.theirs.line}")
    out.print(shown(f"{found.operation}, at {revision}"), style="bold")
    if not found.listed:
        out.print("It is not where the table of counterparts has it at any time; found by its name.", style="yellow")
    for kind, function in found.others:
        option = f" (--kind {kind})" if kind != found.kind else ""
        print_indented(out, 0, f"SGLang also has {kind}: {function}{option}", "dim")
    out.print()
    width = (out.width - BETWEEN) // 2
    if width >= COLUMN and out.width < UNBOUNDED:
        from rich.table import Table

        table = Table.grid(padding=(0, BETWEEN, 0, 0))
        for _ in heads:
            table.add_column(width=width)
        table.add_row(*heads, style="cyan")
        table.add_row(*(_source(out, function) for function in (found.ours, found.theirs)))
        out.print(table)
    else:
        for head, function in zip(heads, (found.ours, found.theirs), strict=True):
            print_indented(out, 0, head, "cyan")
            out.print(_source(out, function))
            out.print()


def _source(out: Console, function: Function) -> RenderableType:
    """Numbered and coloured; into a pipe or a file, numbered alone, since no width is known there."""
    from rich.syntax import Syntax
    from rich.text import Text

    text = printable(function.text.expandtabs(4))
    if out.width == UNBOUNDED:
        lines = enumerate(text.split("\n"), start=function.line)
        return Text("\n".join(f"{number:5} {line}".rstrip() for number, line in lines))
    lexer = "python" if function.path.endswith(".py") else "cuda"
    return Syntax(
        text,
        lexer,
        theme="ansi_dark",
        background_color="default",
        line_numbers=True,
        start_line=function.line,
        word_wrap=True,
    )
