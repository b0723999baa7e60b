"""`refspec history dir`: how the folder of speculative decoding grew.

Where it says what scripts/spec-dir.sh says, it has the same words, in both languages.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from refspec.cli.command_line import UsageError
from refspec.cli.history.options import CatalogueOnly, ClonePath, Json, Lang, Pager, language, source_json, source_of
from refspec.cli.history.output import UNBOUNDED, ascii_only, bar, paged, plain, print_json, shown, wrapped
from refspec.history.catalogue import DIRECTORY, REPOSITORY
from refspec.history.directory import Growth, Snapshot, growth_at, growth_of_releases, is_version
from refspec.history.paths import readable
from refspec.history.sources import HOW_TO_GET_ONE, Source
from refspec.printable import printable

LONGEST_BAR = 30
ROOM_FOR_ALL = 60  # columns of a terminal; below that, days and workers are left out
MARKS = {"clone": " ", "catalogue": "c", "wheel": "w"}
OTHER_FILES = ("other files, not counted:", "其他文件，不计入：")
FETCH_TAGS = f"git fetch --tags {REPOSITORY}"

At = Annotated[
    list[str] | None,
    typer.Option("--at", metavar="REV", help="The folder at this revision; 0.4.6 is the tag v0.4.6. May be repeated."),
]
Releases = Annotated[bool, typer.Option("--releases", help="All releases, and which files came, went, were renamed.")]
Files = Annotated[
    bool, typer.Option("--files", help="List the files with their lines; default: of the newest release.")
]


def dir_(
    at: At = None,
    releases: Releases = False,
    files: Files = False,
    clone: ClonePath = None,
    catalogue_only: CatalogueOnly = False,
    as_json: Json = False,
    pager: Pager = True,
    lang: Lang = None,
) -> None:
    """How the folder grew: its files, workers and lines, by default at the releases that changed the set of files.

    Python files are counted, as scripts/spec-dir.sh does; others are named apart, where a clone knows them.
    """
    if releases and (at or files):
        raise UsageError("--releases goes with neither --at nor --files")
    words = _Words(language(lang))
    source = source_of(clone, catalogue_only, as_json)
    growth = growth_at(source, at) if at else growth_of_releases(source)
    rows = growth.snapshots
    if files and not at:
        rows = rows[-1:]
    elif not (at or releases):
        rows = tuple(row for row in rows if row.changed)
    if as_json:
        print_json(_document(source, growth, rows))
    else:
        mixed = source.clone is not None and not growth.tagless
        with _page(pager) as page:
            if at or files:
                _revisions(page, words, rows, with_files=files, mixed=mixed)
            else:
                _table(page, words, rows, named=releases, mixed=mixed)
            _notes(page, words, source, growth, rows, all_shown=bool(at or releases or files))
    for label in growth.lacking:
        typer.echo(f"refspec: {printable(words.lacks(source, label, label in growth.without_files))}", err=True)
    if growth.lacking:
        raise typer.Exit(1)


@dataclass
class _Page:
    """Lines with their styles, to be printed at once: line by line, rich takes longer than git for a release."""

    width: int
    ascii_only: bool
    lines: list[tuple[str, str]] = field(default_factory=list)

    def add(self, line: str = "", style: str = "") -> None:
        self.lines.append((line.rstrip(), style))

    def wrap(self, text: str, first: str = "", others: str = "", style: str = "") -> None:
        """Wrapped to the terminal; into a file or pipe the text is one line."""
        for line in wrapped(text, self.width, first, others):
            self.add(line, style)

    def bar(self, share: float, room: int) -> str:
        room = min(LONGEST_BAR, room)
        return bar(round(share * room), self.ascii_only) if room >= 8 else ""


@contextmanager
def _page(pager: bool) -> Iterator[_Page]:
    """A page, which is printed when the block is left."""
    if plain():
        page = _Page(UNBOUNDED, ascii_only())
        yield page
        if page.lines:
            print("\n".join(line for line, _ in page.lines))
        return
    with paged(pager) as out:
        page = _Page(out.width, out.options.ascii_only)
        yield page
        from rich.text import Text

        if page.lines:
            out.print(Text("\n").join(Text(*line) for line in page.lines), soft_wrap=True)


class _Words:
    """What is said in both languages."""

    def __init__(self, lang: str) -> None:
        self.zh = lang == "zh"

    def __call__(self, english: str, chinese: str) -> str:
        return chinese if self.zh else english

    def counts(self, row: Snapshot) -> str:
        """As spec-dir.sh says it, though without cutting the list of workers."""
        files, workers = len(row.python_files), len(row.workers)
        names = " ".join(shown(name.rsplit("/", 1)[-1].removesuffix(".py")) for name in row.workers)
        if self.zh:
            return f"{files:3} 个文件：{workers} 个带 worker 的文件" + (f"；{names}" if names else "")
        noun, their = "file" if files == 1 else "files", "its name" if workers == 1 else "their names"
        return f"{files:3} {noun}, {workers} with worker in {their}" + (f": {names}" if names else "")

    def lines(self, row: Snapshot) -> str:
        if row.lines is None:
            return self("- lines", "- 行")
        return self(f"{row.lines} lines", f"{row.lines} 行")

    def lacks(self, source: Source, label: str, without_files: bool) -> str:
        if source.clone is None:
            return self(
                f"the catalogue lacks {label}, and there is no clone ({HOW_TO_GET_ONE})",
                f"内置目录中没有 {label}，也没有克隆（用 refspec history clone 创建，或用 --clone 指定）",
            )
        if without_files:
            return self(
                f"this clone has {label} but not the list of its files (was it made with --filter=tree:0?)",
                f"这个克隆里有 {label}，但没有它的文件列表（是用 --filter=tree:0 克隆的吗？）",
            )
        if is_version(label):
            return self(
                f"this clone lacks the tag {label} ({FETCH_TAGS} brings it)",
                f"这个克隆里没有标签 {label}（用 {FETCH_TAGS} 取回）",
            )
        shallow = "（这是浅克隆：用 git fetch --unshallow 取回其余历史）" if source.clone.is_shallow else ""
        return self(
            f"this clone lacks the commit {label}{source.clone.remedy()}", f"这个克隆里没有提交 {label}{shallow}"
        )


def _table(page: _Page, words: _Words, rows: tuple[Snapshot, ...], *, named: bool, mixed: bool) -> None:
    """One line for each release; named: below it which files came, went, were renamed, else how many.

    mixed: some are of a clone and others may not be, so these get a mark.
    """
    wide = page.width >= ROOM_FOR_ALL
    release, date, files, worker, lines, change = (
        ("版本", "日期", "文件", "worker", "行数", "变化")
        if words.zh
        else ("release", "date", "files", "workers", "lines", "change")
    )
    head = _padded(release, 16) + (_padded(date, 12) if wide else "") + _padded(files, 5, right=True)
    head += (_padded(worker, 9, right=True) if wide else "") + _padded(lines, 7, right=True)
    changes = {row.name: "" if named else _change(row) for row in rows}
    widest = max(map(len, changes.values()), default=0)
    page.add(f"{head}  {'' if named else change}", "bold")
    for row, share in zip(rows, _shares(rows), strict=True):
        mark = MARKS[row.source] if mixed or row.source == "wheel" else " "
        line = f"{shown(row.name):14}{mark} " + (f"{row.date or '-':12}" if wide else "") + f"{len(row.python_files):5}"
        line += (f"{len(row.workers):9}" if wide else "") + f"{'-' if row.lines is None else row.lines:>7}"
        line += f"  {changes[row.name]:{widest}}  "
        page.add(line + page.bar(share, page.width - len(line)))
        if named:
            _names(page, words, row, "  ")


def _padded(text: str, width: int, right: bool = False) -> str:
    """Padded to so many cells of a terminal; a Chinese character takes two."""
    blank = " " * (width - sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text))
    return blank + text if right else text + blank


def _revisions(page: _Page, words: _Words, rows: tuple[Snapshot, ...], *, with_files: bool, mixed: bool) -> None:
    """Each as spec-dir.sh has it; then its day, commit and lines, and which files came, went, were renamed."""
    indent = " " * (12 if page.width >= ROOM_FOR_ALL else 2)
    for row, share in zip(rows, _shares(rows), strict=True):
        page.wrap(f"{shown(row.name):10}  {words.counts(row)}", "", indent)
        mark = MARKS[row.source] if mixed or row.source == "wheel" else " "
        facts = f"{indent}{row.date or '-':10} {mark} {(row.commit or '-')[:10]:10}  {words.lines(row):>12}  "
        page.add(facts + page.bar(share, page.width - len(facts)))
        _names(page, words, row, indent)
        if with_files:
            for name in row.python_files:
                page.add(f"{indent}{'-' if row.files[name] is None else row.files[name]:>6}  {shown(name)}")
            if row.other_files:
                page.add(indent + words(*OTHER_FILES))
            for name in row.other_files:
                page.add(f"{indent}{'':6}  {shown(name)}")


def _names(page: _Page, words: _Words, row: Snapshot, indent: str) -> None:
    """Which files came, went, were renamed: wrapped, or one a line where no width is known."""
    for python in (True, False):
        came, went, renamed = row.change(python)
        if not python and (came or went or renamed):
            page.add(indent + words(*OTHER_FILES))
        for sign, names, colour in (
            ("+", [shown(name) for name in came], "green"),
            ("-", [shown(name) for name in went], "red"),
            ("~", [f"{shown(old)} -> {shown(new)}" for old, new in renamed.items()], "yellow"),
        ):
            for part in names if page.width >= UNBOUNDED else ["  ".join(names)] * bool(names):
                page.wrap(part, f"{indent}{sign} ", f"{indent}  ", colour)


def _notes(
    page: _Page, words: _Words, source: Source, growth: Growth, rows: tuple[Snapshot, ...], *, all_shown: bool
) -> None:
    sources = {row.source for row in rows}
    notes = []
    if growth.tagless:
        notes.append(
            words(
                f"This clone has no tags of releases ({FETCH_TAGS} brings them): the catalogue answers instead.",
                f"这个克隆里没有发布版本的标签（用 {FETCH_TAGS} 取回）：以下来自内置目录。",
            )
        )
    elif source.clone and "catalogue" in sources:
        notes.append(
            words(
                "c: from the catalogue, since this clone lacks the tag or the list of its files.",
                "c：来自内置目录，因为这个克隆里没有该标签或其文件列表。",
            )
        )
    elif not source.clone and rows:
        notes.append(words("From the catalogue; no clone was asked.", "来自内置目录，没有查询克隆。"))
    if "wheel" in sources:
        notes.append(
            words(
                "w: read from the published wheel; no commit of it is known here.",
                "w：读自已发布的 wheel 包；这里没有它的提交。",
            )
        )
    if any(row.lines is None for row in rows):
        notes.append(
            words(
                "Lines are not known where this clone lacks the contents.", "这个克隆里没有文件内容的地方，行数未知。"
            )
        )
    if rows:
        notes.append(
            words("Files, workers and lines are of Python files.", "文件数、worker 数和行数只算 Python 文件。")
        )
    if all_shown and any(row.came is not None and row.changed for row in rows):
        notes.append(
            words(
                "+ came, - went, ~ renamed, against the one before it.",
                "+ 新增，- 删除，~ 重命名，与前一行相比。",
            )
        )
    if not all_shown:
        notes.append(
            words(
                "Releases that changed the set of files: + came, - went, ~ renamed. --releases has all, with names.",
                "改变了文件集合的版本：+ 新增，- 删除，~ 重命名。--releases 列出全部版本和文件名。",
            )
        )
    if notes:
        page.add()
    for note in notes:
        page.wrap(note)


def _change(row: Snapshot) -> str:
    counts = zip("+-~", row.change(), strict=True)
    return " ".join(f"{sign}{len(names)}" for sign, names in counts if names)


def _shares(rows: tuple[Snapshot, ...]) -> list[float]:
    """How long the bar of each is, the longest being 1: by lines, or by files if not all lines are known."""
    lines = [row.lines for row in rows if row.lines is not None]
    sizes = lines if len(lines) == len(rows) else [len(row.python_files) for row in rows]
    return [size / max(1, *sizes) for size in sizes]


def _readable(names: Iterable[str] | None) -> list[str] | None:
    return None if names is None else [readable(name) for name in names]


def _document(source: Source, growth: Growth, rows: tuple[Snapshot, ...]) -> dict[str, Any]:
    return {
        "directory": DIRECTORY,
        **source_json(source),
        "snapshots": [
            {
                "name": row.name,
                "commit": row.commit,
                "date": row.date,
                "source": row.source,
                "python_files": len(row.python_files),
                "workers": _readable(row.workers),
                "lines": row.lines,
                "files": {readable(name): lines for name, lines in row.files.items()},
                "came": _readable(row.came),
                "went": _readable(row.went),
                "renamed": None
                if row.renamed is None
                else {readable(old): readable(new) for old, new in row.renamed.items()},
            }
            for row in rows
        ],
        "lacking": growth.lacking,
        "without_files": growth.without_files,
        "tagless": growth.tagless,
    }
