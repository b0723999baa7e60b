"""`refspec history symbol`: the life of a function, class, method or name."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from refspec.cli.command_line import UsageError
from refspec.cli.history.events import (
    WORDS,
    Row,
    below,
    event_json,
    notes_of,
    origin,
    print_events,
    say_begins,
    say_unseen,
    word_of,
)
from refspec.cli.history.options import ClonePath, Json, Lang, Pager, language, repository_path, source_json, source_of
from refspec.cli.history.output import paged, print_json, shown
from refspec.history.catalogue import DIRECTORY
from refspec.history.clone import HistoryError
from refspec.history.sources import Source

if TYPE_CHECKING:
    from rich.console import Console

    from refspec.history.symbols import Event, Life, SymbolHistory

_LONG = {
    "came": "came from elsewhere",
    "left": "left the folder",
    "renamed from": "renamed from another name",
    "renamed to": "renamed",
}


def symbol(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As EAGLEWorker, verify or EAGLEWorker.verify.")],
    path: Annotated[str, typer.Option("--path", metavar="FOLDER", help="Another folder or file.")] = DIRECTORY,
    clone: ClonePath = None,
    lang: Lang = None,
    pager: Pager = True,
    as_json: Json = False,
) -> None:
    """The life of a function, class, method or name: born, moved, renamed, changed, died.

    Names count that a module or a class assigns or annotates. NAME may be defined in several files or classes at once:
    each has a life of its own. +/- are lines of the definition. A name that was never defined is told by its mentions.
    Needs a clone with contents of files.
    """
    from refspec.history.symbols import check_name, read_symbol

    spoken = language(lang)
    try:
        check_name(name)
    except HistoryError as error:
        raise UsageError(str(error)) from None
    path = repository_path(path)
    source = source_of(clone, as_json=as_json)
    asked = source.needed("the life of a name")
    history = read_symbol(asked, name, path)
    if as_json:
        print_json(_document(source, history))
    else:
        with paged(pager) as out:
            _print(out, history, spoken)
            out.print(origin(asked), style="dim", soft_wrap=True)
    if history.begins:
        say_begins(asked, history.begins[0])
    if history.unseen:
        say_unseen(asked, history.unseen)
    if history.begins or history.unseen:
        raise typer.Exit(1)


def _document(source: Source, history: SymbolHistory) -> dict[str, Any]:
    return {
        **source_json(source),
        "name": history.name,
        "path": history.path,
        "lives": [
            {
                "kind": life.kind,
                "place": asdict(life.place),
                "alive": life.alive,
                "events": [event_json(event) for event in life.events],
            }
            for life in history.lives
        ],
        "mentions": [asdict(mention) for mention in history.mentions],
        "mentioned_in": history.mentioned_in,
        "begins": history.begins,
        "unseen": history.unseen,
    }


def _print(out: Console, history: SymbolHistory, spoken: Literal["en", "zh"]) -> None:
    from rich.text import Text

    chinese = spoken == "zh"
    for life in history.lives:
        kind = WORDS[life.kind] if chinese else life.kind
        where = below(life.place.path, history.path)
        heading = f"{kind} {life.place.name}（{where}）" if chinese else f"{kind} {life.place.name} in {where}"
        out.print(Text(shown(heading), "bold"), soft_wrap=True)
        out.print(Text(_summary(life, spoken)), soft_wrap=True)
        out.print()
        print_events(out, [_row(event, history.path, spoken) for event in life.events])
        out.print()
    if not history.lives:
        _print_mentions(out, history, chinese)


def _print_mentions(out: Console, history: SymbolHistory, chinese: bool) -> None:
    first, last = history.mentions[0], history.mentions[-1]
    folder = shown(history.path)
    if chinese:
        out.print(f"{folder} 里从未定义过 {history.name}，只提及过", style="bold", soft_wrap=True)
    else:
        out.print(f"{history.name} was never defined in {folder}, only mentioned", style="bold", soft_wrap=True)
    out.print()
    for word, mention in ((("最早" if chinese else "first"), first), (("最近" if chinese else "last"), last)):
        number = f"提及 {mention.number} 次" if chinese else f"{mention.number} mentions"
        line = f"{word}  {mention.author_date[:10]}  {mention.hash[:10]}  {number}  {shown(mention.subject)}"
        out.print(line, no_wrap=True, overflow="ellipsis")
    files = ", ".join(below(path, history.path) for path in history.mentioned_in)
    if chinese:
        out.print(f"现在提及它的：{files}" if files else "现在无处提及", soft_wrap=True)
    else:
        out.print(f"mentioned now in {files}" if files else "mentioned nowhere now", soft_wrap=True)
    out.print()


def _summary(life: Life, spoken: Literal["en", "zh"]) -> str:
    """Its life in a line."""
    first, last = life.events[0], life.events[-1]
    changes = sum(event.what == "changed" for event in life.events)
    moves = sum(event.what == "moved" for event in life.events)
    if spoken == "zh":
        begin = f"{first.author_date[:10]} {word_of(first, spoken)}"
        end = "至今仍在" if life.alive else f"{last.author_date[:10]} {word_of(last, spoken)}"
        return f"{begin}，改动 {changes} 次，{f'移动 {moves} 次，' if moves else ''}{end}"
    begin, end = _LONG.get(first.what, first.what), _LONG.get(last.what, last.what)
    parts = [f"{begin} {first.author_date[:10]}", f"changed {_times(changes)}" if changes else "never changed"]
    if moves:
        parts.append(f"moved {_times(moves)}")
    parts.append("still there" if life.alive else f"{end} {last.author_date[:10]}")
    return ", ".join(parts)


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _row(event: Event, folder: str, spoken: Literal["en", "zh"]) -> Row:
    return Row(
        event.author_date[:10],
        event.hash,
        word_of(event, spoken),
        event.lines_added,
        event.lines_deleted,
        event.subject,
        notes_of(event, folder, spoken == "zh"),
    )
