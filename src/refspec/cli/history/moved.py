"""`refspec history moved`: was this refactoring a pure move?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refspec.cli.diff_colours import styled
from refspec.cli.history.options import ClonePath, Json, Pager, repository_path, source_json, source_of
from refspec.cli.history.output import paged, print_indented, print_json, shown
from refspec.cli.wording import plural
from refspec.history.catalogue import DIRECTORY
from refspec.history.paths import readable
from refspec.history.sources import Source

if TYPE_CHECKING:
    from rich.console import Console

    from refspec.history.definitions import Definition
    from refspec.history.moved import Fate, Match, Refactoring, Single

TITLES: dict[Fate, str] = {
    "unchanged": "In place, the same tree, another text",
    "moved": "Moved, the same tree",
    "renamed": "Renamed, otherwise the same tree",
    "moved and changed": "Moved and changed",
    "changed": "Changed in place",
}
NOT_COMPARED = "Imports never count as changes, and a module's are not compared; files that do not differ are not read."


def moved(
    before: Annotated[str, typer.Argument(metavar="A", help="A revision, a pull request (#27607), a version (0.4.6).")],
    after: Annotated[str | None, typer.Argument(metavar="[B]", help="Another; without it, A and its parent.")] = None,
    path: Annotated[
        str, typer.Option("--path", metavar="P", help="Compare what is below P; . is the whole repository.")
    ] = DIRECTORY,
    diff: Annotated[bool, typer.Option("--diff", help="Show the sources' difference where a tree changed.")] = False,
    clone: ClonePath = None,
    as_json: Json = False,
    pager: Pager = True,
) -> None:
    """Was this refactoring a pure move? The syntax trees of functions, classes and assignments, before and after.

    moved 27607 compares a pull request's commit with its parent. Nothing of it is run. Exit status 1: a file could not
    be read.
    """
    from refspec.history.moved import LACKED, compare_revisions
    from refspec.history.revisions import commit_in, parent_of, titles

    path = repository_path(path)
    path = "" if path == "." else path
    source = source_of(clone, as_json=as_json)
    asked = source.needed("moved")
    new = commit_in(source, before if after is None else after)
    old = parent_of(asked, new) if after is None else commit_in(source, before)
    result = compare_revisions(asked, old, new, path)
    if as_json:
        print_json(_document(source, result, old, new, path, diff))
    else:
        with paged(pager) as out:
            _show(out, result, titles(asked, old, new), path, diff)
    if lacked := [file for file in result.unread if file.why == LACKED]:
        number, left = len({file.path for file in lacked}), sum(file.unknown for file in lacked)
        typer.echo(
            f"refspec: this clone lacks contents of {plural(number, 'Python file')} of {len(result.files)}, so "
            f"{plural(left, 'definition')} of the other revision may be unexplained{asked.remedy_for_contents()}",
            err=True,
        )
    for file in (file for file in result.unread if file.why != LACKED):
        unknown = f"; {file.unknown} definitions of the other revision stay unexplained" if file.unknown else ""
        typer.echo(f"refspec: {file.revision}: {shown(file.path)}: {shown(file.why)}{unknown}", err=True)
    if result.unread:
        raise typer.Exit(1)


def _show(out: Console, result: Refactoring, commits: Sequence[str], path: str, diff: bool) -> None:
    below = f"{path}/" if path else ""
    for title in commits:
        out.print(shown(title), style="bold")
    where = f"in {shown(path)}; paths below are told from there" if path else "in the whole repository"
    out.print(f"{plural(len(result.files), 'Python file')} {'differs' if len(result.files) == 1 else 'differ'} {where}")
    for fate, title in TITLES.items():
        matches = [m for m in result.of(fate) if m.differs or (fate != "unchanged" and not m.along)]
        folded = 0 if fate == "unchanged" else len(result.of(fate)) - len(matches)
        _show_matches(out, title, matches, folded, below, diff)
    _show_singles(out, "Vanished", result.vanished, below)
    _show_singles(out, "Appeared", result.appeared, below)
    out.print()
    out.print(", ".join(f"{number} {fate}" for fate, number in result.counts.items()))
    out.print(verdict(result), style="bold")
    if any(result.forgiven.values()):
        out.print(forgiven(result))
    out.print(NOT_COMPARED, style="dim")


def verdict(result: Refactoring) -> str:
    """The answer, in a sentence."""
    if result.is_pure_move is None:
        return "A pure move? Not known: files could not be read."
    if not result.is_pure_move:
        return f"Not a pure move: {', '.join(result.reasons)}."
    if not any(number for fate, number in result.counts.items() if fate != "unchanged"):
        return "Nothing moved, and no tree changed."
    texts = {kind: sum(kind in match.differs for match in result.matches) for kind in ("docstring", "imports")}
    but = " and ".join(f"{kind} of {plural(number, 'definition')}" for kind, number in texts.items() if number)
    return f"A pure move{', but for the ' + but if but else ''}."


def forgiven(result: Refactoring) -> str:
    """What the verdict does not count."""
    numbers = " and ".join(f"{number} {fate}" for fate, number in result.forgiven.items() if number)
    return f"Left out there: {numbers}, copies of assignments or statements. Copies of functions and classes count."


def _show_matches(out: Console, title: str, matches: Sequence[Match], folded: int, below: str, diff: bool) -> None:
    if not matches:
        return
    out.print()
    more = f" and {folded} in them" if folded else ""
    out.print(f"{title} ({len(matches)}{more})", style="bold")
    shown_for = None
    for match in sorted(matches, key=lambda match: (match.before.path, match.after.path)):
        pair = (match.before.path, match.after.path)
        if pair != shown_for:
            shown_for = pair
            print_indented(out, 2, " -> ".join(_unique(part.removeprefix(below) for part in pair)), "cyan")
        print_indented(out, 4, _match_line(match))
        if diff and match.similarity < 1:
            for line, style in styled(match.diff()):
                print_indented(out, 6, line.expandtabs(4), style)


def _match_line(match: Match) -> str:
    before, after = match.before, match.after
    notes = ["line " + " -> ".join(_unique(str(side.lines[0]) for side in (before, after)))]
    if match.similarity < 1:
        apart = " without what is defined in it" if before.kind == "class" else ""
        notes.append(f"{int(match.similarity * 100)}% alike{apart}")
    if match.bases:
        notes.append("bases " + " -> ".join(base or "none" for base in match.bases))
    if match.members and match.fate in ("moved", "renamed", "moved and changed"):
        notes.append(f"{plural(match.members, 'definition')} in it")
    if match.differs:
        is_one = len(match.differs) == 1 and not match.differs[0].endswith("s")
        notes.append(" and ".join(match.differs) + (" differs" if is_one else " differ"))
    return f"{_named(before, before.name if before.name == after.name else f'{before.name} -> {after.name}')}  " + (
        ", ".join(notes)
    )


def _show_singles(out: Console, title: str, singles: Sequence[Single], below: str) -> None:
    if not singles:
        return
    out.print()
    out.print(f"{title} ({len(singles)})", style="bold")
    shown_for = None
    for single in singles:
        definition = single.definition
        if definition.path != shown_for:
            shown_for = definition.path
            print_indented(out, 2, definition.path.removeprefix(below), "cyan")
        twin = f", a copy of {str(single.copy_of).removeprefix(below)}" if single.copy_of else ""
        twin += ", left out of the verdict" * single.is_forgiven
        print_indented(out, 4, f"{_named(definition, definition.name)}  line {definition.lines[0]}{twin}")


def _named(definition: Definition, name: str) -> str:
    return {"function": f"def {name}", "class": f"class {name}", "assignment": f"{name} =", "statement": name}[
        definition.kind
    ]


def _unique(parts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(parts))


def _document(source: Source, result: Refactoring, old: str, new: str, path: str, diff: bool) -> dict[str, Any]:
    return {
        **source_json(source),
        "before": old,
        "after": new,
        "path": path,
        "files": [readable(file) for file in result.files],
        "other_files": result.other_files,
        "pure_move": result.is_pure_move,
        "reasons": result.reasons,
        "counts": result.counts,
        "matches": [
            {
                "fate": match.fate,
                "before": _fact(match.before),
                "after": _fact(match.after),
                "similarity": round(match.similarity, 4),
                "differs": match.differs,
                "along": match.along,
                "bases": match.bases,
                **({"diff": list(match.diff())} if diff and match.similarity < 1 else {}),
            }
            for match in result.matches
            if match.fate != "unchanged" or match.differs
        ],
        "vanished": [_single(single) for single in result.vanished],
        "appeared": [_single(single) for single in result.appeared],
        "unread": [vars(file) | {"path": readable(file.path)} for file in result.unread],
    }


def _single(single: Single) -> dict[str, Any]:
    copy_of = _fact(single.copy_of) if single.copy_of else None
    return _fact(single.definition) | {"copy_of": copy_of, "forgiven": single.is_forgiven}


def _fact(definition: Definition) -> dict[str, Any]:
    return {
        "kind": definition.kind,
        "path": readable(definition.path),
        "name": definition.name,
        "lines": definition.lines,
    }
