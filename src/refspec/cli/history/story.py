"""`refspec history story`: the instructive commits, one by one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refspec.cli.diff_colours import styled
from refspec.cli.history.commit_view import pr_link
from refspec.cli.history.options import CatalogueOnly, ClonePath, Json, Pager, source_json, source_of
from refspec.cli.history.output import paged, print_json, shown, wrapped
from refspec.history import catalogue
from refspec.history.catalogue import StoryCommit
from refspec.history.clone import HistoryError
from refspec.history.story import Commentary, Excerpt, commentary, diff_of, find_commit, lines_of, neighbours
from refspec.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 100  # columns that prose takes
ROOM_FOR_NAMES = 60  # columns of a terminal; below that, items stand below their names

Which = Annotated[
    str | None, typer.Argument(metavar="[N]", help="A commit of the story: its label, PR or hash; default: the list.")
]
FullDiff = Annotated[bool, typer.Option("--full-diff", help="The whole diff of the files that matter.")]


def story(
    which: Which = None,
    clone: ClonePath = None,
    catalogue_only: CatalogueOnly = False,
    full_diff: FullDiff = False,
    as_json: Json = False,
    pager: Pager = True,
) -> None:
    """The instructive commits: the list, or one with what to see in it and, where a clone has it, its diff."""
    if which is None:
        _list(as_json, pager)
        return
    commit = find_commit(which)
    source = source_of(clone, catalogue_only, as_json)
    diff: list[Excerpt] | None = None
    lacking = None
    if source.clone:
        try:
            diff = diff_of(source.clone, commit, whole=full_diff)
        except HistoryError as error:
            lacking = error
    if as_json:
        print_json(
            source_json(source)
            | _document(commit)
            | {"diff": None if diff is None else [asdict(part) for part in diff]}
        )
    else:
        with paged(pager) as out:
            _show(out, commit, diff)
            if diff is None and lacking is None and not catalogue_only:
                _prose(out, "No clone is at hand, so there is no diff: refspec history clone makes one.")
                out.print()
            _, after = neighbours(commit.label)
            _prose(out, f"Next: refspec history story {after.label}" if after else "That was the last of them.")
    if lacking:
        typer.echo(f"refspec: {printable(str(lacking))}", err=True)
        raise typer.Exit(1)


def _list(as_json: bool, pager: bool) -> None:
    commits = catalogue.story()
    if as_json:
        print_json([_document(commit) for commit in commits])
        return
    with paged(pager) as out:
        for commit in commits:
            out.print(_heading(commit), style="bold", soft_wrap=True)
            out.print(f"    {shown(commit.subject)}", no_wrap=True, overflow="ellipsis")
            _prose(out, commit.why, "    ")
        out.print()
        _prose(
            out,
            "Plus and minus are lines in the folder. R1 to R5 stand beside the story; 31 was found in the code. "
            "One of them: refspec history story 6",
        )


def _heading(commit: StoryCommit) -> str:
    plus, minus = lines_of(commit)
    return f"{commit.label:>2}  {commit.author_date}  {commit.hash[:10]}  #{commit.pr}  +{plus or 0} -{minus or 0}"


def _show(out: Console, commit: StoryCommit, diff: list[Excerpt] | None) -> None:
    told = commentary()[commit.label]
    out.print(f"{_heading(commit).strip()} in the folder", style="bold", soft_wrap=True)
    _prose(out, shown(commit.subject))
    out.print(pr_link(commit.pr), soft_wrap=True)
    out.print()
    for paragraph in told.paragraphs:
        _prose(out, paragraph)
        out.print()
    for look in told.looks:
        _item(out, "Look at", f"{look.path}: {', '.join(look.names)}")
    _items(out, told)
    out.print()
    for part in diff or ():
        _diff(out, part)


def _items(out: Console, told: Commentary) -> None:
    verdicts = {claim.id: claim for claim in catalogue.claims()}
    _item(out, "In refspec", ", ".join(told.modules))
    for name in told.claims:
        _item(out, f"Claim {name}", f"{verdicts[name].claim}: {verdicts[name].verdict}")
    _item(out, "Cases", ", ".join(told.cases))


def _diff(out: Console, part: Excerpt) -> None:
    for kept, (line, style) in zip(part.lines, styled(line or "" for line in part.lines), strict=True):
        if kept is None:
            out.print("...", style="dim")
        else:
            out.print(printable(line), style=style, soft_wrap=True)
    if part.left_out:
        _prose(out, f"({part.left_out} more lines of this file: --full-diff)")
    out.print()


def _item(out: Console, name: str, text: str) -> None:
    if not text:
        return
    if out.width >= ROOM_FOR_NAMES:
        _prose(out, text, f"{name + ':':<12}", " " * 12)
    else:
        out.print(f"{name}:")
        _prose(out, text, "  ")


def _prose(out: Console, text: str, first: str = "", others: str | None = None) -> None:
    """A paragraph, wrapped to the terminal; into a file or pipe, to WIDEST columns."""
    for line in wrapped(text, min(out.width, WIDEST), first, first if others is None else others):
        out.print(line, soft_wrap=True)


def _document(commit: StoryCommit) -> dict[str, Any]:
    plus, minus = lines_of(commit)
    before, after = neighbours(commit.label)
    return (
        asdict(commit)
        | {"lines_added": plus, "lines_deleted": minus}
        | asdict(commentary()[commit.label])
        | {"previous": before and before.label, "next": after and after.label}
    )
