"""What checks share: facts about a commit, figures and lists in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone

from refspec.history.claims.checking import Part
from refspec.history.claims.evidence import Change, CommitFacts, commit, definitions, on_main
from refspec.history.clone import Clone

CHINA = timezone(timedelta(hours=8))  # whoever took the notes read the clock there


def day(facts: CommitFacts) -> str:
    """The author's day."""
    return facts.author_date[:10]


def committed(facts: CommitFacts) -> str:
    """The committer's day."""
    return facts.committer_date[:10]


def moment(facts: CommitFacts) -> datetime:
    """When it was committed."""
    return datetime.fromisoformat(facts.committer_date)


def listed(values: Iterable[object], none: str = "none") -> str:
    """Values, one behind another; or what is said where there are none."""
    return ", ".join(map(str, values)) or none


def merged(clone: Clone, revision: str, when: str) -> Part:
    """Was it committed then, read at +0800, and on the main line?"""
    facts = commit(clone, revision)
    there = moment(facts).astimezone(CHINA).strftime("%Y-%m-%d %H:%M")
    return Part(
        f"merged on {when}, as clocks at +0800 have it",
        there == when and on_main(clone, revision),
        f"{revision} was committed at {facts.committer_date}, which is {there} +0800",
    )


def is_pull_request(clone: Clone, revision: str, number: int) -> Part:
    """Is the commit that of the pull request, and on the main line?"""
    facts = commit(clone, revision)
    return Part(
        f"#{number} is on the main line",
        facts.pr == number and on_main(clone, revision),
        f"{revision}, {facts.committer_date[:16].replace('T', ' ')}: {facts.subject}",
    )


def when_defined(clone: Clone, path: str, name: str, *revisions: str) -> str:
    """At each of the revisions, the line at which a file defines the name."""
    said = []
    for revision in revisions:
        found = definitions(clone, revision, path).get(name)
        said.append(f"{'L' + str(found.first) if found else 'not there'} @ {revision}")
    return f"{name}: {', '.join(said)}"


def figures(one: Change) -> str:
    """Lines added and removed."""
    return f"+{len(one.added)}/-{len(one.removed)}"


def net(diffs: Sequence[Change]) -> int:
    """Lines added, less those removed."""
    return sum(len(one.added) - len(one.removed) for one in diffs)


def at_lines(numbers: Sequence[int]) -> str:
    """Numbers of lines."""
    return ", ".join(f"L{number}" for number in numbers)
