"""How commits are read, named and told, on the screen and as JSON, whichever command tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refspec.cli.history.output import shown
from refspec.history import catalogue
from refspec.history.catalogue import DIRECTORY, REPOSITORY, Commit, FileChange
from refspec.history.clone import LacksError
from refspec.history.sources import Source


def pr_link(number: int) -> str:
    """Where the pull request is read."""
    return f"{REPOSITORY}/pull/{number}"


def commit_json(commit: Commit) -> dict[str, Any]:
    """What is known of a commit, for --json."""
    return {
        "hash": commit.hash,
        "author_date": commit.author_date,
        "committer_date": commit.committer_date,
        "pr": commit.pr,
        "url": pr_link(commit.pr) if commit.pr else None,
        "subject": commit.subject,
        "lines_added": commit.lines_added,
        "lines_deleted": commit.lines_deleted,
        "boundary": commit.boundary,
        "files": [_change_json(change) for change in commit.changes],
        "moved_across_the_border": [_change_json(change) for change in commit.crossings],
    }


def _change_json(change: FileChange) -> dict[str, str | None]:
    return {"status": change.status, "path": change.path, "old_path": change.old_path}


def read(source: Source, path: str = DIRECTORY) -> Sequence[Commit]:
    """The commits that touch `path`, the oldest first, from the clone or else the catalogue."""
    if source.clone is None:
        return catalogue.commits()
    from refspec.history.commits import read_commits

    try:
        return read_commits(source.clone, path)
    except LacksError as error:
        instead = "; --catalogue asks the embedded catalogue" if path == DIRECTORY else ""
        raise LacksError(f"{error}{instead}") from None


def title(commit: Commit) -> str:
    """Its title, fit to be printed, without the number of the pull request behind it, which stands elsewhere.

    In front of it, if so: that the commit is the boundary of a shallow clone.
    """
    return "(boundary) " * commit.boundary + shown(commit.subject.removesuffix(f"(#{commit.pr})").rstrip())
