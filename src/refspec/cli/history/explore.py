"""`refspec history explore`."""

from __future__ import annotations

import codecs
import functools
import os
import sys
from dataclasses import asdict
from typing import Any

import typer

from refspec.cli.history.commit_view import commit_json, read
from refspec.cli.history.options import CatalogueOnly, ClonePath, Json, source_json, source_of
from refspec.cli.history.output import print_json
from refspec.history import catalogue
from refspec.history.clone import HistoryError


def explore(clone: ClonePath = None, catalogue_only: CatalogueOnly = False, as_json: Json = False) -> None:
    """Walk commits, files, story, releases and months on a full screen, with keys or the mouse. Needs no clone.

    1 to 5 choose a list, / searches, d shows the diff, Tab goes from the list to the text and back, q quits. With
    --json: what its lists hold.
    """
    source = source_of(clone, catalogue_only, as_json)
    if not as_json and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise HistoryError("explore needs a terminal: refspec history log prints the commits, explore --json all lists")
    if not as_json and os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        raise HistoryError("explore needs a terminal that takes text anywhere, and TERM says that this one does not")

    from refspec.cli.history.explorer import Explorer

    commits = read(source)
    if as_json:
        print_json(
            {
                **source_json(source),
                "commits": [commit_json(commit) for commit in reversed(commits)],
                "story": [asdict(commit) for commit in catalogue.story()],
                "releases": [asdict(release) for release in catalogue.releases() if release.files],
            }
        )
        return
    _take_any_byte()
    explorer = Explorer(source, commits)
    explorer.run()
    raise typer.Exit(explorer.return_code or 0)


def _take_any_byte() -> None:
    """Has textual take a replacement mark for a byte that is not UTF-8, as a key of another encoding; else it ends."""
    if sys.platform != "win32":
        from textual.drivers import linux_driver

        driver: Any = linux_driver
        driver.getincrementaldecoder = lambda name: functools.partial(codecs.getincrementaldecoder(name), "replace")
