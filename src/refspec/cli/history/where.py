"""`refspec history where`: which clone answers, why that one, and what it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from refspec.cli.history.options import CatalogueOnly, ClonePath, Json, source_json
from refspec.cli.history.output import print_json, print_rows
from refspec.cli.wording import plural
from refspec.history import catalogue
from refspec.history.clone import Clone
from refspec.history.inspection import CloneKind, MainLineSeen, kind_of
from refspec.history.sources import HOW_TO_GET_ONE, Source, find_source


def where(clone: ClonePath = None, catalogue_only: CatalogueOnly = False, as_json: Json = False) -> None:
    """Say which clone is used and why, what kind it is, and how it compares with the catalogue."""
    source = find_source(clone, catalogue_only=catalogue_only)
    kind = kind_of(source.clone) if source.clone else None
    if as_json:
        print_json(_document(source, kind))
        return
    rows = []
    if source.clone and kind:
        rows += [("Clone", f"{source.clone.folder} ({source.why})"), ("Git folder", str(source.clone.git_dir))]
        if kind.is_linked:
            rows.append(("belongs to", str(source.clone.common_dir)))
        rows += [("CloneKind", _kind(source.clone, kind)), ("HEAD", _head(kind)), ("Main line", _main(kind.main))]
    else:
        rows.append(("Clone", f"{source.why} ({HOW_TO_GET_ONE})"))
    rows.append(("Catalogue", _catalogue(kind.main if kind else None)))
    for other in source.passed_over:
        named = str(other.folder) in other.reason
        rows.append(("Passed over", other.reason if named else f"{other.folder}: {other.reason}"))
    print_rows(rows)


def _kind(clone: Clone, kind: CloneKind) -> str:
    said = ["bare" if kind.is_bare else "with a work tree"]
    if kind.is_linked:
        said = ["a linked work tree"]
    if kind.is_submodule:
        said.append("a submodule")
    if kind.is_shallow:
        said.append(f"shallow (history is cut off at {plural(len(clone.boundary), 'commit')})")
    if kind.filter:
        said.append(f"partial (--filter={kind.filter})")
    if kind.object_format != "sha1":
        said.append(kind.object_format)
    return ", ".join(said)


def _head(kind: CloneKind) -> str:
    if kind.head.branch is None:
        return f"detached at {kind.head.commit[:10]}" if kind.head.commit else "detached, at nothing that is there"
    name = kind.head.branch.removeprefix("refs/heads/")
    return f"{name} at {kind.head.commit[:10]}" if kind.head.commit else f"{name}, which has no commit yet"


def _main(main: MainLineSeen | None) -> str:
    return f"{main.name} at {main.commit[:10]} of {main.date}" if main else "there is no commit"


def _catalogue(main: MainLineSeen | None) -> str:
    reach = catalogue.reach()
    said = f"reaches to {reach.commit[:10]} of {reach.date}"
    if main is None:
        return said
    if main.ahead is None or main.behind is None:
        return f"{said}, which the clone has not"
    if main.ahead and main.behind:
        return f"{said}; since they parted, that has {main.behind} commits and the clone's main line {main.ahead}"
    if main.ahead:
        return f"{said}; the clone has {main.ahead} commits more"
    return f"{said}; the clone's main line lacks {main.behind} of them" if main.behind else f"{said}, as the clone does"


def _document(source: Source, kind: CloneKind | None) -> dict[str, Any]:
    clone = source.clone
    return {
        **source_json(source),
        "git_dir": str(clone.git_dir) if clone else None,
        "common_dir": str(clone.common_dir) if clone else None,
        "kind": asdict(kind) if kind else None,
        "boundary": sorted(clone.boundary) if clone else [],
        "catalogue": asdict(catalogue.reach()),
        "passed_over": [asdict(other) | {"folder": str(other.folder)} for other in source.passed_over],
    }
