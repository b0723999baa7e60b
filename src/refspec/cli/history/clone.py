"""`refspec history clone`: get a clone of SGLang, go on with one, or bring one up to date."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from refspec.cli.command_line import UsageError, shows_progress
from refspec.cli.history.options import Json, place
from refspec.cli.history.output import console, print_json, shown
from refspec.cli.wording import size_of
from refspec.history.catalogue import DIRECTORY, REPOSITORY
from refspec.history.sources import own_clone


def clone(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", parser=place, help="Where; default: refspec's cache folder.", show_default=False
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="URL|PATH", help=f"The repository to clone; default: {REPOSITORY}."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="With the contents of all files, at all commits.")] = False,
    contents: Annotated[
        bool, typer.Option("--contents/--no-contents", help="With those that commands ask for; above all the folder's.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Make a clone of SGLang, go on with one that was interrupted, or bring one up to date. Uses the network.

    Without --full it takes about 40 MB: all commits and lists of files, and of contents those of the
    folder at all commits, what commits of the story changed, and what claims look at besides.
    """
    if full and not contents:
        raise UsageError("--full and --no-contents rule each other out")
    from refspec.history.cloning import make_clone

    where = folder if folder is not None else own_clone()
    try:
        with _progress() if shows_progress(as_json) else nullcontext() as tell:
            made = make_clone(where, source, full=full, contents=contents, tell=tell)
    except KeyboardInterrupt:
        typer.echo("refspec: interrupted; the same command, run again, goes on from here", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(asdict(made) | {"folder": str(made.folder), "notes": list(made.notes)})
        return
    out = console()
    has = {
        "all": "the contents of all files",
        "folder": f"the contents of {DIRECTORY} and few others",
        "none": f"no contents of files ({made.missing} that commands ask for are missing)",
    }[made.contents]
    out.print(shown(f"{made.folder}: a clone of {made.source}, {size_of(made.size)}"), soft_wrap=True)
    out.print(
        shown(f"{made.commits} commits, {made.main_line} at {made.commit[:10]}; {made.tags} tags; {has}"),
        soft_wrap=True,
    )
    for note in made.notes:
        out.print(shown(note), soft_wrap=True)
    if folder is not None and made.folder != own_clone().resolve():
        out.print(shown(f"Commands find it with --clone {folder}, or with REFSPEC_SGLANG."), soft_wrap=True)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """On stderr, one line that says what happens, as long as it does."""
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as status:
        yield lambda line: status.update(Text(shown(line), no_wrap=True, overflow="ellipsis"))
