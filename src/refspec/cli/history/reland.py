"""`refspec history reland`: a first try, its revert, and what the reland has that the first try had not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refspec.cli.command_line import UsageError
from refspec.cli.history.commit_view import commit_json, pr_link, read, title
from refspec.cli.history.options import CatalogueOnly, ClonePath, Json, Pager, source_json, source_of
from refspec.cli.history.output import cut, paged, print_json, shown
from refspec.cli.history.patch_view import coloured
from refspec.cli.wording import plural
from refspec.history import catalogue
from refspec.history.catalogue import DIRECTORY, Commit
from refspec.history.clone import NO_DATE, HistoryError, LacksError
from refspec.history.patches import Line
from refspec.history.reland import LESSON, FileOfBoth, Findings, about, day_in_utc, examine, minutes, tries
from refspec.history.revisions import find
from refspec.history.sources import Source

if TYPE_CHECKING:
    from rich.console import Console

INVERSES = {
    "exact": "the exact inverse: it made every file what it had been before",
    "lines": "the inverse line by line; the files had moved on in between",
}
NEEDS_CLONE = (
    "What the reland changed beyond the first try, line by line, needs a clone (refspec history clone --full)."
)


def reland(
    first: Annotated[
        str | None, typer.Argument(metavar="FIRST", help="The first try: a revision or pull request; default: #26866.")
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="RELAND", help="The reland; default: the one that titles tell of.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the reverts and relands that titles tell of.")] = False,
    stat: Annotated[bool, typer.Option("--stat", help="Functions and numbers of lines, without the lines.")] = False,
    clone: ClonePath = None,
    catalogue_only: CatalogueOnly = False,
    pager: Pager = True,
    as_json: Json = False,
) -> None:
    """What had been forgotten: a first try and its reland, compared file by file and hunk by hunk."""
    if listed and first:
        raise UsageError("--list and commits: one of them at a time")
    source = source_of(clone, catalogue_only, as_json)
    if listed:
        _list(source, pager, as_json)
        return
    told = _told(source, first, second)
    findings, lack = _findings(source, told)
    if as_json:
        print_json(_document(source, told, findings, lines=not stat))
    else:
        with paged(pager) as out:
            _print(out, told, findings, lines=not stat)
            if source.clone is None:
                out.print(f"\n{NEEDS_CLONE}")
    if lack:
        typer.echo(f"refspec: {shown(lack)}", err=True)
        raise typer.Exit(1)


# The first try, its revert if one is known, and the reland.
Compared = tuple[Commit, Commit | None, Commit]


def _told(source: Source, first: str | None, second: str | None) -> Compared:
    """The commits that are to be compared. Raises HistoryError if titles do not tell of one that is not named."""
    if first is None:
        known = {commit.pr: commit for commit in catalogue.commits()}
        return known[LESSON[0]], known[LESSON[1]], known[LESSON[2]]
    one = find(source, first)
    all_told = tries(read(source))
    if second is None:
        for told in all_told:
            if one.hash in {commit.hash for commit in (told.first, told.revert, told.reland) if commit}:
                if told.first and told.reland:
                    return told.first, told.revert, told.reland
                raise HistoryError(f"titles tell of no {'reland' if told.first else 'first try'} of {first}: name both")
        raise HistoryError(f"no title tells that {first} was reverted or landed again (--list lists what titles tell)")
    other = find(source, second)
    revert = next((told.revert for told in all_told if told.first and told.first.hash == one.hash), None)
    return _facts(source, one.hash), revert, _facts(source, other.hash)


def _facts(source: Source, hash_: str) -> Commit:
    fact = catalogue.commits_by_hash().get(hash_)
    if fact:
        return fact
    asked = source.needed(f"{hash_[:10]}, of which the catalogue knows too little,")
    asked.commit(hash_)
    return about(asked, hash_)[0][0]


def _findings(source: Source, told: Compared) -> tuple[Findings | None, str]:
    """What the clone tells of them, and what it lacks for that, if it does."""
    if source.clone is None:
        return None, ""
    first, revert, second = told
    hashes = [commit.hash for commit in (first, second, revert) if commit]
    lacking = [hash_[:10] for hash_, here in zip(hashes, source.clone.resolve(*hashes), strict=True) if not here]
    if lacking:
        return None, f"this clone lacks {', '.join(lacking)}, so the catalogue answers{source.clone.remedy()}"
    try:
        tried, landed, *undone = about(source.clone, *hashes)
        found = examine(source.clone, tried, undone[0] if undone else None, landed)
    except LacksError as error:
        return None, str(error)
    if found.files is None:
        lack = "this clone lacks contents of these files, so what had been missing is not known"
        return found, lack + source.clone.remedy_for_contents()
    return found, ""


def _list(source: Source, pager: bool, as_json: bool) -> None:
    found = tries(read(source))
    if as_json:
        print_json(
            [{name: _commit_json(getattr(one, name)) for name in ("first", "revert", "reland")} for one in found]
        )
        return
    with paged(pager) as out:
        columns, ascii_only = out.width, out.options.ascii_only
        for one in found:
            for word, commit in (("first try", one.first), ("revert", one.revert), ("reland", one.reland)):
                if commit:
                    line = f"{word:9}  {day_in_utc(commit)}  {_pr(commit):>6}  {title(commit)}"
                else:
                    line = f"{word:9}  {'not told of by a title' if word == 'first try' else '-'}"
                out.print(cut(line, columns, ascii_only), no_wrap=True)
            out.print()
        out.print(f"{len(found)} in the titles of the folder's commits; days in UTC", style="dim")


def _pr(commit: Commit) -> str:
    return f"#{commit.pr}" if commit.pr else commit.hash[:10]


def _commit_json(commit: Commit | None) -> dict[str, Any] | None:
    return commit_json(commit) if commit else None


def _document(source: Source, told: Compared, findings: Findings | None, lines: bool) -> dict[str, Any]:
    def line_json(line: Line) -> dict[str, Any]:
        return {"sign": line.sign, "line": line.number, "text": line.text}

    first, revert, second = told
    document: dict[str, Any] = {
        **source_json(source),
        "first": _commit_json(first),
        "revert": _commit_json(revert),
        "reland": _commit_json(second),
        "minutes_to_revert": minutes(first, revert) if revert else None,
        "minutes_to_reland": minutes(first, second),
    }
    document["inverse"] = findings.inverse if findings else None
    document["inverse_differing_lines"] = findings.differing if findings else None
    document["files"] = None
    if findings and findings.files is not None:
        document["files"] = [
            {
                "path": file.path,
                "first_path": file.first_path,
                "shared_lines": file.shared,
                "missing": [
                    {
                        "functions": list(stretch.functions),
                        **_signs(stretch.lines),
                        **({"lines": [line_json(line) for line in stretch.lines]} if lines else {}),
                    }
                    for stretch in file.missing
                ],
                "dropped": {
                    **_signs(file.dropped),
                    **({"lines": [line_json(line) for line in file.dropped]} if lines else {}),
                },
            }
            for file in findings.files
        ]
    return document


def _signs(lines: Sequence[Line]) -> dict[str, int]:
    return {
        "lines_added": sum(line.sign == "+" for line in lines),
        "lines_deleted": sum(line.sign == "-" for line in lines),
    }


def _print(out: Console, told: Compared, findings: Findings | None, lines: bool) -> None:
    first, revert, second = told
    _print_commit(out, "first try", first, first.committer_date[:16].replace("T", " ") + first.committer_date[19:])
    if revert:
        _print_commit(out, "revert", revert, _later(minutes(first, revert)))
        if findings and findings.inverse:
            verdict = INVERSES.get(findings.inverse, f"not the inverse, by {plural(findings.differing, 'line')}")
            out.print(f"{'':11}{verdict}", soft_wrap=True)
    _print_commit(out, "reland", second, _later(minutes(revert or first, second)))
    out.print()
    if findings is None or findings.files is None:
        _print_facts(out, first, second)
        return
    files = findings.files
    missing = [line for file in files for stretch in file.missing for line in stretch.lines]
    touched = sum(bool(file.missing) for file in files)
    out.print(
        f"Lines changed in the reland alone: {len(missing)}, in {plural(touched, 'file')}; in both: "
        f"{sum(file.shared for file in files)}; in the first try alone: {sum(len(file.dropped) for file in files)}.",
    )
    for file in files:
        if file.missing or file.dropped:
            _print_file(out, file, lines)
    same = [shown(file.path) for file in files if file.path and not (file.missing or file.dropped)]
    if same:
        out.print("\nAs in the first try:", style="bold")
        for path in same:
            out.print(f"  {path}", soft_wrap=True)


def _print_commit(out: Console, label: str, commit: Commit, when: str) -> None:
    from rich.style import Style
    from rich.text import Text

    line = Text(f"{label:11}").append(commit.hash[:10], "yellow")
    if commit.pr:
        line.append("  ").append(f"#{commit.pr}", Style(color="blue", link=pr_link(commit.pr)))
    out.print(line.append(f"  {when}"), soft_wrap=True)
    out.print(f"{'':11}{title(commit)}", soft_wrap=True)


def _print_file(out: Console, file: FileOfBoth, lines: bool) -> None:
    note = ""
    if file.first_path is None:
        note = "  (not in the first try)"
    elif file.path is None:
        note = "  (in the first try alone)"
    elif file.path != file.first_path:
        note = f"  (in the first try: {shown(file.first_path)})"
    out.print()
    out.print(f"{shown(file.path or file.first_path or '')}{note}", style="bold", soft_wrap=True)
    parts = [(", ".join(stretch.functions) or "outside functions", stretch.lines) for stretch in file.missing]
    if file.dropped:
        parts.append(("in the first try alone", file.dropped))
    for name, changed in parts:
        count = _signs(changed)
        out.print(f"  {shown(name)}  +{count['lines_added']} -{count['lines_deleted']}", style="cyan", soft_wrap=True)
        if lines:
            from rich.segment import Segments

            out.print(
                Segments(list(coloured(f"{line.sign}   {line.text}".rstrip() for line in changed))), crop=False, end=""
            )


def _print_facts(out: Console, first: Commit, second: Commit) -> None:
    """What the catalogue knows: files of the folder."""
    ours, theirs = ({change.path.removeprefix(f"{DIRECTORY}/") for change in one.changes} for one in (first, second))
    out.print(f"In {DIRECTORY}: first try {_lines(first)}, reland {_lines(second)}", soft_wrap=True)
    for words, names in (
        ("in both", ours & theirs),
        ("in the reland alone", theirs - ours),
        ("in the first try alone", ours - theirs),
    ):
        if names:
            out.print(f"  {words}: {', '.join(shown(name) for name in sorted(names))}", soft_wrap=True)


def _lines(commit: Commit) -> str:
    return "lines not known" if commit.lines_added is None else f"+{commit.lines_added} -{commit.lines_deleted}"


def _later(whole: int | None) -> str:
    """Minutes up to three hours, then hours, then days."""
    return f"date {NO_DATE}" if whole is None else f"{_span(whole)} later"


def _span(whole: int) -> str:
    if whole < 180:
        return plural(whole, "minute")
    return plural(whole // 60, "hour") if whole < 72 * 60 else plural(whole // 1440, "day")
