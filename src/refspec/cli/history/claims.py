"""`refspec history claims`: what is said of this code, and what a clone says to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refspec.cli.command_line import UsageError, shows_progress
from refspec.cli.history.options import CatalogueOnly, ClonePath, Json, Pager, source_json, source_of
from refspec.cli.history.output import paged, print_json, shown, wrapped
from refspec.cli.wording import plural
from refspec.history import catalogue
from refspec.history.catalogue import CLAIM_LETTERS, Claim
from refspec.history.claims.checking import CANNOT_SAY
from refspec.history.claims.verdicts import Verdict, verdicts
from refspec.history.sources import HOW_TO_GET_ONE, Source

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 100
_VERDICT = 13  # columns for a verdict where the terminal is not wide; longer ones take two lines
_COLOURS = {"true": "green", "false": "red", "imprecise": "yellow"}


def claims(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Claims to show in full: E7, T3.")] = None,
    source: Annotated[
        str | None, typer.Option("--source", metavar="WORD", help="Only of sources with this letter or word in them.")
    ] = None,
    verdict: Annotated[
        str | None, typer.Option("--verdict", metavar="WORD", help="Only those that are listed with this verdict.")
    ] = None,
    clone: ClonePath = None,
    catalogue_only: CatalogueOnly = False,
    as_json: Json = False,
    pager: Pager = True,
) -> None:
    """Statements about this code, each checked on the clone: the verdict that is listed and the one that is found.

    With IDs, each in full: its parts, what the clone shows of them, and the git commands that show it to you.
    The exit status is 1 if a verdict is found to be another, or cannot be found in this clone.
    """
    chosen = _chosen(ids or [], source, verdict)
    where = source_of(clone, catalogue_only, as_json)
    if where.clone and shows_progress(as_json):
        typer.echo(f"refspec: checking {len(chosen)} of {len(catalogue.claims())} claims", err=True)
    found = verdicts(where.clone, chosen)
    if as_json:
        print_json(_document(where, found))
    else:
        with paged(pager) as out:
            if ids:
                for one in found:
                    _show(out, where, one)
            else:
                _table(out, found)
            _sum_up(out, where, found, reasons=not ids)
    if not all(one.agrees for one in found if one.finding):
        raise typer.Exit(1)


def _chosen(ids: Sequence[str], source: str | None, verdict: str | None) -> list[Claim]:
    """The claims asked for. Raises UsageError for an ID, a source or a verdict that there is not."""
    known = {claim.id: claim for claim in catalogue.claims()}
    for name in ids:
        if name.upper() not in known:
            numbers = {letter: sum(id_.startswith(letter) for id_ in known) for letter in CLAIM_LETTERS.values()}
            there_are = ", ".join(f"{letter}1" + f" to {letter}{last}" * (last > 1) for letter, last in numbers.items())
            raise UsageError(f"no claim {name}: there are {there_are}")
    chosen = [known[name.upper()] for name in ids] or list(known.values())
    if source is not None:
        letter, word = source.upper(), source.lower()
        chosen = [
            claim
            for claim in chosen
            if (
                CLAIM_LETTERS[claim.source] == letter
                if letter in CLAIM_LETTERS.values()
                else word in claim.source.lower()
            )
        ]
    if verdict is not None:
        chosen = [claim for claim in chosen if claim.verdict == verdict.lower()]
    if not chosen:
        sources = "; ".join(f"{letter}: {name}" for name, letter in CLAIM_LETTERS.items())
        listed = ", ".join(sorted({claim.verdict for claim in known.values()}))
        raise UsageError(f"no such claim. Sources are {sources}. Verdicts are {listed}")
    return chosen


def _found(one: Verdict) -> str:
    if one.finding:
        return one.finding.verdict
    return "beyond git" if one.beyond_git else "not checked"


def _mark(out: Console, agrees: bool | None) -> str:
    marks = ("+", "x", "?") if out.options.ascii_only else ("✓", "✗", "?")
    return marks[2 if agrees is None else not agrees]


def _table(out: Console, found: Sequence[Verdict]) -> None:
    """A row for each claim; where the terminal is narrow, the claim stands below its verdicts."""
    from rich.text import Text

    columns = [one.claim.verdict for one in found], [_found(one) for one in found]
    room = _VERDICT if out.width < _WIDE else _WIDE
    listed, seen = (min(room, max(map(len, column))) for column in columns)
    beside = 5 + listed + 2 + seen + 4
    narrow = out.width < beside + 24
    if not narrow:
        out.print(f"{'':5}{'listed':{listed}}  {'found':{seen}}    claim", style="bold")
    for one in found:
        said, verdict = one.claim.verdict, _found(one)
        mark = _mark(out, one.agrees) if one.finding else " "
        if narrow:
            out.print(f"{one.claim.id:5}{said if one.agrees else f'{said}, {verdict}'} {mark}".rstrip(), soft_wrap=True)
            for line in _wrapped(out, one.claim.claim, 5):
                out.print(line, soft_wrap=True)
            continue
        cells = wrapped(said, listed), wrapped(verdict, seen), _wrapped(out, one.claim.claim, beside)
        for n, (left, right, text) in enumerate(zip_longest(*cells, fillvalue="")):
            row = Text("" if n else one.claim.id)
            row.pad_right(5 - len(row))
            row.append(f"{left:{listed}}  ", _COLOURS.get(said, ""))
            row.append(f"{right:{seen}} ", _COLOURS.get(verdict, ""))
            row.append(f"{' ' if n else mark}  {text.lstrip()}")
            row.rstrip()
            out.print(row, soft_wrap=True)


def _wrapped(out: Console, text: str, indent: int, hanging: int = 0) -> list[str]:
    """The lines of a text in what the console has of columns, the second and later ones indented further."""
    margin = " " * indent
    return wrapped(shown(text), out.width, margin, margin + " " * hanging, break_words=True)


def _show(out: Console, where: Source, one: Verdict) -> None:
    def say(text: str, indent: int = 0, hanging: int = 0, style: str = "") -> None:
        for line in _wrapped(out, text, indent, hanging):
            out.print(line, style=style, soft_wrap=True)

    say(f"{one.claim.id}, from {one.claim.source}", style="bold")
    say(one.claim.claim)
    out.print()
    say(f"listed    {one.claim.verdict}")
    say(f"found     {_found(one)}" + (f" {_mark(out, one.agrees)}" if one.finding else ""))
    why = one.beyond_git or (one.finding.note if one.finding else "")
    if why:
        say(f"why       {why}", hanging=10)
    say(f"evidence  {one.claim.evidence}", hanging=10)
    out.print()
    for part in one.finding.parts if one.finding else ():
        say(f"{_mark(out, part.holds)} {part.says}" + ("" if part.core else " (a detail)"), 2, 2)
        say(part.found, 4, style="dim")
    if one.finding and where.clone:
        if one.finding.parts:
            out.print()
        say(f"To see for yourself, in {where.clone.folder}:")
        for command in _commands(one):
            out.print(f"  {shown(command)}", soft_wrap=True)  # whole, to be pasted
        out.print()


def _commands(one: Verdict) -> list[str]:
    if one.finding is None:
        return []
    own = [part.command for part in one.finding.parts if part.command]
    return list(dict.fromkeys([*own, *one.finding.commands]))


def _sum_up(out: Console, where: Source, found: Sequence[Verdict], reasons: bool) -> None:
    """How many came out how. reasons: say of one that could not be checked why; the others have like ones."""
    beyond = [one for one in found if one.beyond_git]
    if where.clone is None:
        out.print(
            f"{plural(len(found), 'claim')} as listed; nothing was checked: {where.why} ({HOW_TO_GET_ONE}).",
            soft_wrap=True,
        )
        return
    checked = [one for one in found if one.agrees is not None]
    lacking = [one for one in found if one.finding and one.finding.verdict == CANNOT_SAY]
    other = [one for one in checked if not one.agrees]
    said = [f"{len(checked) - len(other)} checked and as listed"]
    if other:
        said.append(f"{len(other)} found to be otherwise: {', '.join(one.claim.id for one in other)}")
    if lacking:
        said.append(f"{len(lacking)} that this clone cannot answer")
    if beyond:
        said.append(f"{len(beyond)} beyond git: {', '.join(one.claim.id for one in beyond)}")
    notes = [f"{plural(len(found), 'claim')}: {'; '.join(said)}."]
    if reasons:
        mark = "+" if out.options.ascii_only else "✓"
        wheels = " E9 and E10 lean on what the catalogue has of the published wheels."
        leaning = any(one.claim.id in ("E9", "E10") for one in checked)
        notes.insert(0, f"{mark}: the check comes to the verdict that is listed.{wheels if leaning else ''}")
    for line in (line for note in notes for line in _wrapped(out, note, 0)):
        out.print(line, soft_wrap=True)
    if reasons and lacking and lacking[0].finding:
        for line in _wrapped(out, f"{lacking[0].claim.id}: {lacking[0].finding.note}", 0):
            out.print(line, soft_wrap=True)


def _document(where: Source, found: Sequence[Verdict]) -> dict[str, Any]:
    return {
        **source_json(where),
        "main": {"name": where.clone.main.name, "commit": where.clone.main.commit} if where.clone else None,
        "claims": [
            {
                "id": one.claim.id,
                "source": one.claim.source,
                "claim": one.claim.claim,
                "evidence": one.claim.evidence,
                "listed": one.claim.verdict,
                "found": one.finding.verdict if one.finding else None,
                "agrees": one.agrees,
                "beyond_git": one.beyond_git or None,
                "note": (one.finding.note or None) if one.finding else None,
                "parts": [
                    {"says": part.says, "holds": part.holds, "core": part.core, "found": part.found}
                    for part in (one.finding.parts if one.finding else ())
                ],
                "commands": _commands(one),
            }
            for one in found
        ],
    }
