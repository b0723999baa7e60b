"""`refspec history overview`, and `refspec history` alone: the first screen."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import asdict

from refspec.cli.history.options import CatalogueOnly, ClonePath, Json, source_json, source_of
from refspec.cli.history.output import ascii_only, bar, print_json, shown
from refspec.history import catalogue

NEXT = (
    ("refspec history story", "the instructive commits, one by one"),
    ("refspec history log", "all commits; --help lists its filters"),
    ("refspec history dir --releases", "how the folder grew"),
    ("refspec history claims", "what is said of this code, and what is true of it"),
    ("refspec history explore", "all of it on a full screen"),
)


def overview(clone: ClonePath = None, catalogue_only: CatalogueOnly = False, as_json: Json = False) -> None:
    """What there is to see: the folder's commits by quarter, and where to go on. Needs no clone."""
    source = source_of(clone, catalogue_only, as_json)
    commits, releases, reach = catalogue.commits(), catalogue.releases(), catalogue.reach()
    quarters = Counter(_quarter(commit.author_date) for commit in commits)
    if as_json:
        print_json(
            {
                "directory": catalogue.DIRECTORY,
                "commits": len(commits),
                "commits_by_quarter": dict(sorted(quarters.items())),
                "releases": len(releases),
                "story": len(catalogue.story()),
                "claims": len(catalogue.claims()),
                "reach": asdict(reach),
                **source_json(source),
            }
        )
        return
    # Plain text, and no rich for it: this is the first that a reader sees, and it should be there at once.
    print(f"SGLang's {catalogue.DIRECTORY}")
    print(f"{len(commits)} commits on the main line from {commits[0].author_date[:10]} to {reach.date}\n")
    widest = max(quarters.values())
    room = shutil.get_terminal_size().columns - len("  2026 Q2   227  ")
    for quarter, number in sorted(quarters.items()):
        print(f"  {quarter}  {number:4}  {bar(round(number / widest * max(1, min(40, room))), ascii_only())}")
    print()
    for command, purpose in NEXT:
        print(f"  {command:31} {purpose}")
    print()
    if source.clone:
        print(shown(f"Clone: {source.clone.folder} ({source.why}); main line: {source.clone.main.name}"))
    else:
        print("No clone at hand, so the catalogue answers: refspec history clone makes one.")


def _quarter(date: str) -> str:
    return f"{date[:4]} Q{(int(date[5:7]) + 2) // 3}"
