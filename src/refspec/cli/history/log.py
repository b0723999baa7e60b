"""`refspec history log`: the commits of the folder, chosen and counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from refspec.cli.command_line import UsageError
from refspec.cli.history.commit_view import commit_json, pr_link, read, title
from refspec.cli.history.options import (
    CatalogueOnly,
    ClonePath,
    Json,
    Pager,
    language,
    repository_path,
    source_json,
    source_of,
)
from refspec.cli.history.output import UNBOUNDED, bar, cut, paged, plain, print_json, shown
from refspec.cli.wording import plural
from refspec.history import catalogue
from refspec.history.catalogue import DIRECTORY, Commit
from refspec.history.clone import HistoryError
from refspec.history.log import Choice, Whose, by_author, by_month, count_lines, day, fits
from refspec.history.sources import Source

if TYPE_CHECKING:
    from rich.console import Console

LONG_GAP = 24  # months without commits that are still printed one by one
NARROW = 72  # columns; below, a title has a line of its own

Since = Annotated[str | None, typer.Option(metavar="DATE", help="From this day, month or year on, as 2026-06.")]
Until = Annotated[str | None, typer.Option(metavar="DATE", help="Up to this day, month or year, with all of it.")]
By = Annotated[
    Literal["author", "committer"],
    typer.Option(help="Whose local day counts for dates: that of who wrote a commit, or of who put it on main."),
]
PullRequests = Annotated[
    list[str] | None, typer.Option("--pr", metavar="N", help="The commit of this pull request; may be repeated.")
]
Files = Annotated[
    list[str] | None,
    typer.Option(
        "--file",
        metavar="NAME",
        help="Commits that touch a file of this name, or rename one from or to it (follow goes through "
        "renames): a name in the folder, a whole path, a folder in it, or a pattern as '*_worker.py'; may be "
        "repeated.",
    ),
]
Text = Annotated[str | None, typer.Option("--text", metavar="WORDS", help="Each of these words is in the title.")]
Limit = Annotated[int | None, typer.Option("--limit", "-n", metavar="N", min=1, help="The newest N of these alone.")]
MonthsLang = Annotated[
    str | None,
    typer.Option(
        "--lang", metavar="zh|en", help="Language of --by-month; default: that of LC_ALL, LC_MESSAGES or LANG."
    ),
]
Path = Annotated[str, typer.Option("--path", metavar="FOLDER", help="Another folder or file of SGLang; from a clone.")]


def log(
    since: Since = None,
    until: Until = None,
    by: By = "author",
    prs: PullRequests = None,
    files: Files = None,
    text: Text = None,
    limit: Limit = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="The oldest first.")] = False,
    path: Path = DIRECTORY,
    months: Annotated[bool, typer.Option("--by-month", help="Count the commits of each month instead.")] = False,
    authors: Annotated[
        bool, typer.Option("--authors", help="Count those of each author instead; from a clone.")
    ] = False,
    clone: ClonePath = None,
    catalogue_only: CatalogueOnly = False,
    lang: MonthsLang = None,
    pager: Pager = True,
    as_json: Json = False,
) -> None:
    """The commits on the main line that touch the folder, the newest first.

    A day is the author's local day, unless --by committer. +/- are lines in the folder; a dash: not known.
    """
    if months and authors:
        raise UsageError("--by-month and --authors: one of them at a time")
    spoken = language(lang)
    path = repository_path(path)
    try:
        choice = Choice(since, until, by, frozenset(pr_number(pr) for pr in prs or ()), tuple(files or ()), text or "")
    except HistoryError as error:
        raise UsageError(str(error)) from None
    source = source_of(clone, catalogue_only, as_json)
    if authors:
        source.needed("who wrote a commit")
    if path != DIRECTORY:
        source.needed("another folder")
    all_of_them = read(source, path)
    chosen = [commit for commit in all_of_them if choice.takes(commit, path)]
    chosen = chosen[-limit:] if limit else chosen
    if not (months or authors) and source.clone:
        chosen = count_lines(source.clone, chosen, path)
    if not reverse:
        chosen = chosen[::-1]
    counted = "months" if months else "authors" if authors else None
    lacking = authors and _lacks_mailmap(source)
    if as_json:
        print_json(_document(source, path, chosen, len(all_of_them), by, counted))
    elif plain() and not counted:
        table = _table(chosen, by, UNBOUNDED, ascii_only=False, codes=[("", "")] * len(STYLES))
        print(table + _last_line(source, chosen, len(all_of_them), lines=True))
    else:
        with paged(pager) as out:
            if months:
                _print_months(out, by_month(chosen, by), path, source, spoken)
            elif authors:
                _print_authors(out, by_author(chosen))
            else:
                _print_table(out, chosen, by)
            if months and spoken == "zh":
                line = _last_line_in_chinese(source, len(chosen), len(all_of_them))
            else:
                line = _last_line(source, chosen, len(all_of_them), lines=not (months or authors))
            out.print(line, style="dim")
    complaints = list(_unknown(all_of_them, choice, path))
    if lacking:
        complaints.append("this clone lacks the contents of .mailmap, so one author may count as several")
    for complaint in complaints:
        typer.echo(f"refspec: {shown(complaint)}", err=True)
    if complaints:
        raise typer.Exit(1)


def _unknown(commits: Sequence[Commit], choice: Choice, path: str) -> Iterator[str]:
    """What was asked for by name, and no commit knows."""
    if not commits:
        yield f"no commit touches {path}"
    yield from (f"no commit here is #{pr}" for pr in sorted(choice.prs - {commit.pr for commit in commits}))
    for file in choice.files:
        if not any(fits(file, path, commit) for commit in commits):
            yield f"no commit here touches a file {file}"


def pr_number(text: str) -> int:
    """27 of "27" or "#27". Raises UsageError for what is no number."""
    digits = text.removeprefix("#")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
        raise UsageError(f"--pr takes the number of a pull request, as 26997, not '{text}'")
    return int(digits)


def _lacks_mailmap(source: Source) -> bool:
    from refspec.history.commits import lacks_mailmap

    return lacks_mailmap(source.needed("who wrote a commit"))


def _document(
    source: Source, path: str, chosen: Sequence[Commit], of: int, by: Whose, counted: str | None
) -> dict[str, Any]:
    main, commit = _main(source)
    document: dict[str, Any] = {
        **source_json(source),
        "main": main,
        "main_commit": commit,
        "shallow": bool(source.clone and source.clone.is_shallow),
        "path": path,
        "by": by,
        "found": len(chosen),
        "of": of,
    }
    if counted == "months":
        document["months"] = by_month(chosen, by)
    elif counted == "authors":
        document["authors"] = [{"author": author, "commits": number} for author, number in by_author(chosen)]
    else:
        document["commits"] = [commit_json(commit) for commit in chosen]
    return document


def _main(source: Source) -> tuple[str, str]:
    """The main line's name, and its last commit."""
    if source.clone is None:
        return "main", catalogue.reach().commit
    return source.clone.main.name, source.clone.main.commit


def _last_line(source: Source, chosen: Sequence[Commit], of: int, lines: bool) -> str:
    """How many these are, who says so, and what could not be known."""
    number = plural(of, "commit") if len(chosen) == of else f"{len(chosen)} of {of} commits"
    if source.clone is None:
        return f"{number} on main up to {catalogue.reach().date}, from the embedded catalogue ({source.why})"
    main, tip = _main(source)
    parts = [f"{number} on {main} up to {tip[:10]}, from the clone {source.clone.folder}"]
    if source.clone.is_shallow:
        parts.append("it is shallow: what came before is not in it")
    if any(commit.boundary for commit in chosen):
        parts.append("what a boundary commit changed is not known, for the clone lacks its parents")
    if lines and any(commit.lines_added is None and not commit.boundary and commit.changes for commit in chosen):
        parts.append("where lines are a dash it lacks contents of files")
    return shown("; ".join(parts))


def _last_line_in_chinese(source: Source, found: int, of: int) -> str:
    number = f"{of} 个提交" if found == of else f"{of} 个提交中的 {found} 个"
    if source.clone is None:
        return f"{number}，来自内置目录（截至 {catalogue.reach().date}）"
    shallow = "；这是浅克隆，更早的提交不在其中" if source.clone.is_shallow else ""
    return shown(f"{number}，来自克隆 {source.clone.folder}{shallow}")


LINK = "https://link"  # stands for the one that a line has
STYLES = ("yellow", f"blue link {LINK}", "green", "red")


def _print_table(out: Console, commits: Sequence[Commit], by: Whose) -> None:
    codes = [_codes(out, style) for style in STYLES]
    out.out(_table(commits, by, out.width, out.options.ascii_only, codes), highlight=False, end="")


def _table(
    commits: Sequence[Commit], by: Whose, columns: int, ascii_only: bool, codes: Sequence[tuple[str, str]]
) -> str:
    """One line for each, put together by hand: rich takes longer for a table than git for the history.

    codes: what stands before and after a text in each of STYLES.
    """
    prs = [f"#{commit.pr}" if commit.pr else "" for commit in commits]
    plus = [_signed("+", commit.lines_added) for commit in commits]
    minus = [_signed("-", commit.lines_deleted) for commit in commits]
    pr_width, plus_width, minus_width = (max(map(len, cells), default=0) for cells in (prs, plus, minus))
    narrow = columns < NARROW
    gap = " " if narrow else "  "
    before_title = "\n  " if narrow else gap
    room = columns - (2 if narrow else 10 + 10 + pr_width + plus_width + 1 + minus_width + 4 * len(gap))
    (yellow, no_yellow), (blue, no_blue), (green, no_green), (red, no_red) = codes
    lines = []
    for commit, pr, added, deleted in zip(commits, prs, plus, minus, strict=True):
        linked = f"{blue.replace(LINK, pr_link(commit.pr))}{pr}{no_blue}" if commit.pr else ""
        lines.append(
            f"{day(commit, by)}{gap}{yellow}{commit.hash[:10]}{no_yellow}{gap}{' ' * (pr_width - len(pr))}{linked}{gap}"
            f"{green}{added:>{plus_width}}{no_green} {red}{deleted:>{minus_width}}{no_red}"
            f"{before_title}{cut(title(commit), room, ascii_only)}\n"
        )
    return "".join(lines)


def _codes(out: Console, style: str) -> tuple[str, str]:
    """What this console prints before and after a text of that style."""
    from rich.text import Text

    with out.capture() as printed:
        out.print(Text("|", style), end="")
    before, _, after = printed.get().partition("|")
    return before, after


def _signed(sign: str, lines: int | None) -> str:
    return "-" if lines is None else f"{sign}{lines}"


def _print_months(out: Console, months: dict[str, int], path: str, source: Source, spoken: str) -> None:
    """As scripts/spec-timeline.sh has it, but for what the bars are made of."""
    main, tip = _main(source)
    if spoken == "zh":
        head, total = f"{path}，{main}（{tip[:10]}）上每月的提交数", "合计     "
    else:
        head, total = f"{path} on {main} ({tip[:10]}), commits per month", "total    "
    out.print(shown(head), soft_wrap=True)
    most = max(months.values(), default=0)
    ascii_only = out.options.ascii_only
    widest = min(60, most, max(out.width - 16, 1))
    for is_empty, run in groupby(months.items(), key=lambda month: month[1] == 0):
        kept = list(run)
        if is_empty and len(kept) > LONG_GAP:
            since, until = kept[0][0], kept[-1][0]
            no_commit = f"：{len(kept)} 个月没有提交" if spoken == "zh" else f": no commit in {len(kept)} months"
            out.print(f"{since} {'至' if spoken == 'zh' else 'to'} {until}{no_commit}", soft_wrap=True)
            continue
        for month, number in kept:
            length = -(-number * widest // most) if most else 0
            out.print(f"{month}  {number:4}  {bar(length, ascii_only)}".rstrip(), soft_wrap=True)
    out.print(f"{total}{sum(months.values()):4}", soft_wrap=True)


def _print_authors(out: Console, authors: list[tuple[str, int]]) -> None:
    for author, number in authors:
        out.print(f"{number:5}  {cut(shown(author), out.width - 7, out.options.ascii_only)}", no_wrap=True)
