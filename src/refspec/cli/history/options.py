"""Options that commands of `refspec history` share, and what they come to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from refspec.cli.command_line import UsageError, shows_progress
from refspec.history.clone import HistoryError
from refspec.history.paths import path_in_repository
from refspec.history.sources import Source, find_source


def place(text: str) -> Path:
    """A folder that was named. An empty name, as of a variable that is not set, is not taken for the current one."""
    if not text:
        raise typer.BadParameter("an empty path; the current folder is .")
    return Path(text)


ClonePath = Annotated[
    Path | None,
    typer.Option(
        "--clone",
        metavar="PATH",
        parser=place,
        envvar="REFSPEC_SGLANG",
        show_envvar=True,
        help="A clone of SGLang; default: the one around the current folder, else refspec's own.",
    ),
]
CatalogueOnly = Annotated[bool, typer.Option("--catalogue", help="Ask the embedded catalogue, whatever clones exist.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")]
Pager = Annotated[bool, typer.Option("--pager/--no-pager", help="Page what is longer than the terminal ($PAGER).")]
Lang = Annotated[
    str | None, typer.Option("--lang", metavar="zh|en", help="Language; default: that of LC_ALL, LC_MESSAGES or LANG.")
]


def source_of(clone: Path | None, catalogue_only: bool = False, as_json: bool = False) -> Source:
    """What --clone and --catalogue come to. What was passed over on the way is told to who sits at a terminal."""
    if catalogue_only:  # it rules out the environment's clone as well
        return find_source(catalogue_only=True)
    variable = clone is not None and str(clone) == os.environ.get("REFSPEC_SGLANG")
    try:
        source = find_source(clone, why=f"named with {'REFSPEC_SGLANG' if variable else '--clone'}")
    except HistoryError as error:
        raise type(error)(f"{error}; REFSPEC_SGLANG names it" if variable else str(error)) from None
    if shows_progress(as_json):
        for complaint in source.ignored:
            typer.echo(f"refspec: passed over: {complaint}", err=True)
    return source


def repository_path(path: str) -> str:
    """What --path comes to, as git has it. Raises UsageError for a path that leads out of the repository."""
    try:
        return path_in_repository(path)
    except HistoryError as error:
        raise UsageError(f"--path: {error}") from None


def source_json(source: Source) -> dict[str, str | None]:
    """What answered, for --json: the clone's folder, or null where the catalogue did; and why that one."""
    return {"clone": str(source.clone.folder) if source.clone else None, "why": source.why}


def language(chosen: str | None) -> Literal["en", "zh"]:
    """What --lang comes to. Raises UsageError for a language that is not spoken here."""
    if chosen not in (None, "zh", "en"):
        raise UsageError(f"--lang takes zh or en, not '{chosen}'")
    said = chosen or next(filter(None, (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return "zh" if said.startswith("zh") else "en"
