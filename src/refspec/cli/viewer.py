"""The whole terminal as a screen that is stepped through by key: rounds one by one, or whatever a command draws on it.

Where there is no terminal to ask for keys: all rounds, one below the other.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from refspec.cli.render import RoundView

if sys.platform != "win32":
    import termios
    import tty

# What a key sends, and what it means here.
KEYS = {
    **dict.fromkeys((" ", "\r", "\n", "\x1b[C", "\x1bOC"), "next"),
    **dict.fromkeys(("b", "\x1b[D", "\x1bOD"), "back"),
    **dict.fromkeys(("g", "\x1b[F", "\x1bOF"), "end"),
    **dict.fromkeys(("j", "\x1b[B", "\x1bOB"), "down"),
    **dict.fromkeys(("k", "\x1b[A", "\x1bOA"), "up"),
    "\x1b[6~": "page down",
    "\x1b[5~": "page up",
    "\t": "request",
    **dict.fromkeys(("q", "\x1b", "\x04", ""), "quit"),  # "": the terminal is gone
}
ESCAPE_SECONDS = 0.05  # how long the rest of an escape sequence may take to arrive
RESIZE_SECONDS = 0.3  # how often to look whether the window has another size


def show_rounds(console: Console, views: Sequence[Sequence[RoundView]]) -> None:
    """views: for each round, those of its requests; at least one."""
    if has_screen(console):
        with Screen(console) as screen:
            _step_through(screen, views)
    else:
        for requests in views:
            for view in requests:
                console.print(view)
                console.print()


def has_screen(console: Console) -> bool:
    """Is there a terminal, to draw on and to ask for keys?"""
    return sys.platform != "win32" and sys.stdin.isatty() and console.file.isatty() and not console.is_dumb_terminal


def _step_through(screen: Screen, views: Sequence[Sequence[RoundView]]) -> None:
    at, request, top = 0, views[0][0].tree.request, 0
    while True:
        requests = [view.tree.request for view in views[at]]
        column = requests.index(request) if request in requests else 0
        status = f"{at + 1}/{len(views)}  space next  b back  g end  q quit"
        if len(requests) > 1:
            status += f"  tab request {column + 1}/{len(requests)}"
        top = screen.show(views[at][column], top, status)
        match screen.key():
            case "next":
                at = min(at + 1, len(views) - 1)
            case "back":
                at = max(at - 1, 0)
            case "end":
                at = len(views) - 1
            case "request":
                request = requests[(column + 1) % len(requests)]
            case "down":
                top += 1
            case "up":
                top -= 1
            case "page down":
                top += screen.room
            case "page up":
                top -= screen.room
            case "quit":
                return


class Screen:
    """The whole terminal and its keys, for as long as the block lasts; then everything is as it was.

    Ctrl-Z too gives the terminal back, until the process goes on.
    """

    def __init__(self, console: Console) -> None:
        self.console, self.keyboard = console, sys.stdin.fileno()
        self.settings = termios.tcgetattr(self.keyboard)
        self.before = signal.getsignal(signal.SIGTSTP)
        self.shown: tuple[RenderableType, int, str] | None = None

    def __enter__(self) -> Screen:
        signal.signal(signal.SIGTSTP, self._suspend)
        try:
            self._take()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        signal.signal(signal.SIGTSTP, self.before)

    @property
    def room(self) -> int:
        """Lines for the view; the last one is the status."""
        return max(self.console.size.height - 1, 1)

    def show(self, view: RenderableType, top: int, status: str) -> int:
        """Draw as much of the view as there is room for, from line `top` on. Returns the line that it came to be."""
        self.shown, self.size = (view, top, status), self.console.size
        lines = self.console.render_lines(view, pad=False)
        top = max(0, min(top, len(lines) - self.room))
        if len(lines) > self.room:
            below = len(lines) - top - self.room
            status += f"  up/down ({below} below)"
        shown = lines[top : top + self.room]
        shown += [[]] * (self.room - len(shown))
        bar = Text(status, style="reverse")
        with self.console.capture() as captured:
            for line in shown:
                self.console.print(Segments([*line, Segment.line()]), end="")
            self.console.print(bar, end="", no_wrap=True, overflow="crop")
        # Over what is there, not after clearing it: nothing flickers.
        # And not to be interrupted by Ctrl-Z, whose handler writes too: a stream must not be entered twice.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
        try:
            self.console.file.write("\x1b[H" + captured.get().replace("\n", "\x1b[K\n") + "\x1b[J")
            self.console.file.flush()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
        return top

    def key(self) -> str:
        """Wait for a key that means something, and say what."""
        while True:
            if meaning := self.key_within(RESIZE_SECONDS):
                return meaning

    def key_within(self, seconds: float) -> str | None:
        """The same, but wait no longer than so many seconds; None: there was none."""
        end = time.monotonic() + seconds
        while True:
            left = max(0.0, end - time.monotonic())
            if select.select([self.keyboard], [], [], min(left, RESIZE_SECONDS))[0]:
                if meaning := KEYS.get(self._read()):
                    return meaning
            elif self.shown and self.size != self.console.size:
                self.show(*self.shown)
            if time.monotonic() >= end:
                return None

    def _read(self) -> str:
        """One character, or an escape sequence as a whole."""
        text = self._read_byte()
        if text == "\x1b":
            while select.select([self.keyboard], [], [], ESCAPE_SECONDS)[0]:
                byte = self._read_byte()
                text += byte
                if not byte or (len(text) > 2 and byte >= "@"):
                    break
        return text

    def _read_byte(self) -> str:
        try:
            return os.read(self.keyboard, 1).decode("latin-1")
        except OSError:
            return ""

    def _take(self) -> None:
        tty.setcbreak(self.keyboard)
        self.console.set_alt_screen(True)
        self.console.show_cursor(False)

    def _give_back(self) -> None:
        try:
            termios.tcsetattr(self.keyboard, termios.TCSAFLUSH, self.settings)
            self.console.show_cursor(True)
            self.console.set_alt_screen(False)
        except (OSError, termios.error):
            pass  # the terminal is gone, and with it what there was to restore

    def _suspend(self, _: int, __: FrameType | None) -> None:
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()
        if self.shown:
            self.show(*self.shown)
