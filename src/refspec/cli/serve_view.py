"""What a terminal shows of an engine at work: its pool, its requests, and what happens, as lines or as one screen.

It is drawn from the snapshots and events of `refspec.engine.watch`. Each request has a letter and a colour; the letter
says all that the colour does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from refspec.cli.render import UNICODE, Glyphs, escaped, shortened
from refspec.cli.wording import plural
from refspec.contracts import ForwardMode
from refspec.engine.watch import (
    Admitted,
    Arrived,
    Committed,
    Event,
    Evicted,
    Finished,
    Page,
    Read,
    RequestState,
    Retracted,
    Snapshot,
    Waits,
)

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLOURS = [bright + hue for bright in ("", "bright_") for hue in ("cyan", "magenta", "yellow", "green", "blue", "red")]
FREE_STYLE, CACHE_STYLE, SHARED_STYLE = "dim", "dim", "bold"
_KEPT = (":", "░")  # a cached page that nobody reads, in ASCII and in Unicode
MOST_MAP_ROWS = 5
FEWEST_NEWS = 2
FEWEST_WORDS = 12  # cells; with less there is no column of words
# What is left out first where a terminal is narrow.
OPTIONAL_COLUMNS = ("words", "retr.", "found", "accept")


def label(number: int) -> str:
    """A request's name: A to Z, then A2 to Z2 and so on."""
    again, letter = divmod(number, len(LETTERS))
    return LETTERS[letter] + (str(again + 1) if again else "")


def colour(number: int) -> str:
    """A request's colour; after twelve requests they begin anew."""
    return COLOURS[number % len(COLOURS)]


def describe(event: Event) -> str:
    """What happened, as a line."""
    match event:
        case Arrived(request=number, prompt_tokens=tokens):
            return f"{label(number)} arrives, with a prompt of {plural(tokens, 'token')}"
        case Admitted(request=number, found_tokens=tokens, tokens_to_read=unread, again=again):
            how = "is admitted again" if again else "is admitted"
            found = f"{tokens} found in the cache, " if tokens else ""
            return f"{label(number)} {how}: {found}{plural(unread, 'token')} to read"
        case Read(request=number, tokens=tokens, unread=unread):
            return f"{label(number)} reads {plural(tokens, 'token')}, " + (f"{unread} to go" if unread else "the last")
        case Committed(request=number, tokens=tokens, in_round=in_round):
            return f"{label(number)} gets {plural(tokens, 'token')}" + ("" if in_round else ", its first")
        case Retracted(request=number, slots=slots, output_tokens=tokens):
            had = plural(tokens, "output token")
            return f"{label(number)} is retracted, with {had}, and gives back {plural(slots, 'slot')} of its own"
        case Waits(request=number, needed_slots=slots, room=room, behind=behind):
            others = f", {behind} behind it" if behind else ""
            needed = f"it and a round need {plural(slots, 'slot')}"
            return f"{label(number)} waits{others}: {needed}, {room} free or evictable"
        case Evicted(slots=slots, readers=readers):
            whom = f"{', '.join(map(label, readers))} to read" if readers else "a round"
            return f"the prefix cache gives up {plural(slots, 'slot')} for {whom}"
        case Finished(request=number, reason=reason, output_tokens=tokens, rounds=rounds):
            return f"{label(number)} ends ({reason}): {plural(tokens, 'token')} in {plural(rounds, 'round')}"
    raise AssertionError(f"no words for {event}")


def is_news(event: Event, chunked: bool) -> bool:
    """Is it worth a line? Tokens come in every step, and a prompt that is read in one go is no news."""
    return not isinstance(event, Committed | Read) or (isinstance(event, Read) and chunked)


@dataclass
class News:
    """The events of a run that are worth a line, as (step, line)."""

    lines: list[tuple[int, str]] = field(default_factory=list)
    _in_chunks: set[int] = field(default_factory=set)  # requests that have read a part of their prompt

    def add(self, events: Sequence[Event]) -> list[tuple[int, str]]:
        """Take in the events of a step. Returns their lines."""
        new = []
        for event in events:
            chunked = False
            if isinstance(event, Read):
                chunked = event.unread > 0 or event.request in self._in_chunks
                (self._in_chunks.add if event.unread else self._in_chunks.discard)(event.request)
            if isinstance(event, Retracted | Finished):
                self._in_chunks.discard(event.request)
            if is_news(event, chunked):
                new.append((event.step, describe(event)))
        self.lines += new
        return new


class ServeView:
    """One moment of a run, on a screen of any size."""

    def __init__(
        self,
        now: Snapshot,
        news: Sequence[tuple[int, str]],
        decode: Callable[[Sequence[int]], str],
        to_come: int = 0,
        fills_screen: bool = False,
    ) -> None:
        """news: see News. to_come: requests that have not arrived. fills_screen: as high as the terminal, but for its
        last line, with as much of the news as there is room for; else as high as it takes, without news.
        """
        self.now, self.news, self.decode, self.to_come, self.fills_screen = now, news, decode, to_come, fills_screen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs, width = Glyphs.of(options), options.max_width
        height = max(1, options.size.height - 1) if self.fills_screen else None
        states = self.now.requests
        above = [self._title(glyphs, width), *self._totals(width), *self._pool(glyphs, width, height)]
        if height is None:
            yield from above
            yield self._table(states, glyphs, width)
            return
        room = height - len(above) - 1  # without the heads of the table
        shown, left_out = self._chosen(max(1, room - FEWEST_NEWS))
        rest: list[Text] = [_line(left_out, width, glyphs, "dim")] if left_out else []
        most_news = room - len(shown) - len(rest)
        for step, line in self.news[-most_news:] if most_news > 0 else ():
            rest.append(_line(f"{step:>4} {line}", width, glyphs, "" if step == self.now.step else "dim"))
        lines = console.render_lines(Group(*above, self._table(shown, glyphs, width), *rest), options, pad=False)
        for segments in lines[:height]:
            yield from segments
            yield Segment.line()

    # --- above ----------------------------------------------------------------------------------------------------

    def _title(self, glyphs: Glyphs, width: int) -> Text:
        """The step, its mode, and for whom it was."""
        now = self.now
        if now.mode is ForwardMode.EXTEND:
            what = "prompts are read"
        elif now.mode is ForwardMode.DECODE:
            brought = [(state.number, state.newest) for state in now.requests if state.newest]
            what = f"a round of {len(brought)}: " + " ".join(f"{label(number)}+{tokens}" for number, tokens in brought)
        else:
            what = "nobody is there"
        mode = now.mode.name if now.mode else "IDLE"
        text = Text.assemble((f"step {now.step}", "bold"), "  ", (mode, "bold reverse"), f"  {what}")
        return _cut(text, width, glyphs)

    def _totals(self, width: int) -> list[Text]:
        now = self.now
        states = Counter(state.state for state in now.requests)
        per_round = f"{now.committed_tokens / now.rounds:.1f}" if now.rounds else "-"
        accept = f"{now.committed_tokens / now.request_rounds:.2f}" if now.request_rounds else "-"
        facts = [
            f"{states['running']} running",
            f"{states['reading']} reading",
            f"{states['waiting']} waiting",
            f"{states['done']} done",
            f"{self.to_come} to come",
        ]
        counts = [
            f"{plural(now.rounds, 'round')} of {per_round} tokens",
            f"accept length {accept}",
            plural(now.retractions, "retraction"),
            f"{now.evicted_tokens} evicted",
        ]
        return [Text(line) for line in (*_wrapped(facts, width), *_wrapped(counts, width))]

    # --- the pool ---------------------------------------------------------------------------------------------------

    def _pool(self, glyphs: Glyphs, width: int, height: int | None) -> list[Text]:
        """The pool's pages as cells, line by line, each with the number of its first slot; and what they mean."""
        now, pages = self.now, self.now.pages
        number_width = len(str(now.slots)) + 1
        columns = max(1, width - number_width)
        if 16 < columns < len(pages):
            columns -= columns % 8
        most_rows = MOST_MAP_ROWS if height is None else max(1, min(MOST_MAP_ROWS, height // 4))
        together = -(-len(pages) // (columns * most_rows))  # pages in one cell
        cells = [
            Counter(_mark(page, glyphs) for page in pages[start : start + together]).most_common(1)[0][0]
            for start in range(0, len(pages), together)
        ]
        slots_in_cell = together * now.page_size
        legend = [
            f"{now.slots} slots",
            f"A own {now.held_slots}",
            f"a cached, read by A {now.read_slots} (2: by two)",
            f"{_KEPT[glyphs is UNICODE]} cached {now.cached_slots - now.read_slots}",
            f"{glyphs.unseen} free {now.free_slots}",
        ]
        if together > 1:
            legend.append(f"a mark: what most of {slots_in_cell} slots are")
        elif slots_in_cell > 1:
            legend.append(f"a mark: a page of {slots_in_cell} slots")
        lines = [Text(line, "bold") for line in _wrapped(legend, width, gap=2)]
        for start in range(0, len(cells), columns):
            first_slot = start * slots_in_cell + now.page_size
            line = Text(f"{first_slot:>{number_width - 1}} ", "dim")
            for mark, style in cells[start : start + columns]:
                line.append(mark, style)
            lines.append(line)
        return lines

    # --- the requests -----------------------------------------------------------------------------------------------

    def _chosen(self, rows: int) -> tuple[list[RequestState], str]:
        """The requests that there is room for, and a line for the others: first those that are done go."""
        states = self.now.requests
        if len(states) <= rows:
            return states, ""
        rows = max(1, rows - 1)
        live = [state for state in states if state.state != "done"]
        done = [state for state in states if state.state == "done"]
        chosen = live[:rows]
        if rows > len(live):
            chosen = sorted([*done[len(live) - rows :], *live], key=lambda state: state.number)
        left_out = [state for state in states if state not in chosen]
        waiting = sum(state.state != "done" for state in left_out)
        parts = [f"{len(left_out) - waiting} more done"] * (len(left_out) > waiting)
        parts += [f"{waiting} more waiting or running"] * (waiting > 0)
        return chosen, "     " + ", ".join(parts)

    def _table(self, states: Sequence[RequestState], glyphs: Glyphs, width: int) -> Table:
        names = ["", "state", "tokens", "found", "accept", "retr.", "words"]
        rows = [self._row(state) for state in states]

        def width_of(name: str) -> int:
            i = names.index(name)
            return max([cell_len(name), *(cell_len(row[i]) for row in rows)])

        def taken() -> int:
            return sum(width_of(name) + 2 for name in names if name != "words")

        for name in OPTIONAL_COLUMNS:
            if taken() + (FEWEST_WORDS if "words" in names else -2) <= width:
                break
            i = names.index(name)
            rows = [row[:i] + row[i + 1 :] for row in rows]
            names.remove(name)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False, pad_edge=False)
        for name in names:
            right = name in ("tokens", "found", "accept", "retr.")
            table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="crop")
        words_width = width - taken() if "words" in names else 0
        for state, row in zip(states, rows, strict=True):
            style = colour(state.number)
            cells = [Text(row[0], f"bold {style}"), *map(Text, row[1 : len(names)])]
            cells[1].stylize(_state_style(state))
            if "words" in names:
                cells[-1] = self._words(state, words_width, glyphs)
            table.add_row(*cells)
        return table

    def _row(self, state: RequestState) -> list[str]:
        what = state.state
        if what == "reading":
            what = f"read {state.read_tokens} of {state.tokens_to_read}"
        elif what == "done":
            what = f"done: {state.finish_reason}"
        elif what == "waiting" and state.retractions:
            what = "waiting again"
        accept = state.accept_length
        return [
            label(state.number),
            what,
            str(len(state.output_ids)),
            str(state.found_tokens or ""),
            "" if accept is None else f"{accept:.2f}",
            str(state.retractions or ""),
            "",
        ]

    def _words(self, state: RequestState, width: int, glyphs: Glyphs) -> Text:
        """The end of the output; what the last step brought stands out."""
        old_ids = state.output_ids[: len(state.output_ids) - state.newest]
        old = self.decode(old_ids).rstrip("\ufffd")
        new = self.decode(state.output_ids)[len(old) :] if state.newest else ""
        if not old.strip():
            old, new = "", new.lstrip()
        new = shortened(_on_one_line(new, glyphs), width, glyphs, keep_end=True)
        room = width - cell_len(new)
        old = shortened(_on_one_line(old.lstrip(), glyphs), room, glyphs, keep_end=True) if room else ""
        return Text.assemble((old, "dim"), (new, "bold"), no_wrap=True)


def _mark(page: Page, glyphs: Glyphs) -> tuple[str, str]:
    """The character of a page, and its style."""
    if page.holder is not None:
        return LETTERS[page.holder % len(LETTERS)], f"bold {colour(page.holder)}"
    if len(page.readers) == 1:
        return LETTERS[page.readers[0] % len(LETTERS)].lower(), colour(page.readers[0])
    if page.readers:
        return (str(len(page.readers)) if len(page.readers) < 10 else "+"), SHARED_STYLE
    if page.cached:
        return _KEPT[glyphs is UNICODE], CACHE_STYLE
    return glyphs.unseen, FREE_STYLE


def _state_style(state: RequestState) -> str:
    if state.state == "waiting":
        return "red" if state.retractions else "yellow"
    return {"reading": "cyan", "running": "green"}.get(state.state, "dim")


def _on_one_line(text: str, glyphs: Glyphs) -> str:
    """Any run of white space as one space, everything else visible."""
    return " ".join(escaped(word, glyphs) for word in re.split(r"\s+", text))


def _wrapped(facts: Sequence[str], width: int, gap: int = 3) -> list[str]:
    """The facts with gaps between them, in as many lines as it takes; one that is too long is cut."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + gap + len(fact) <= width:
            lines[-1] += " " * gap + fact
        else:
            lines.append(fact[:width])
    return lines


def _line(text: str, width: int, glyphs: Glyphs, style: str) -> Text:
    return Text(shortened(text, width, glyphs), style=style, no_wrap=True)


def _cut(text: Text, width: int, glyphs: Glyphs) -> Text:
    """Cut to one line."""
    if text.cell_len > width:
        text.truncate(max(0, width - cell_len(glyphs.ellipsis)))
        text.append(glyphs.ellipsis[:width])
    text.no_wrap = True
    return text
