"""How every command of refspec ends: well, or with one line on stderr that says what is wrong.

| what went wrong                                   | exit status                |
|---------------------------------------------------|----------------------------|
| the command line: options that are wrong or clash | 2                          |
| what it asked for: a file, a model, memory        | 1                          |
| the reader of the output has gone away            | 1, silently                |
| Ctrl-C                                            | 130                        |
| another signal that ends a process                | 128 + its number, silently |

A fault of refspec itself keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

from refspec.printable import printable

# What typer raises for a bad command line. Where it can be imported from differs between typer's versions.
_TYPER_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


class LateCommands(Mapping[str, Any]):
    """Commands of a group, each imported when it is first asked for: who runs one does not wait for all.

    places: "module:attribute" of each, a Typer of its own or a function; with a second one, the class of the command.
    """

    def __init__(self, places: Mapping[str, tuple[str, ...]]) -> None:
        self._places = dict(places)
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            found, *classes = (_imported(place) for place in self._places[name])
            if isinstance(found, typer.Typer):
                found.rich_markup_mode = None  # as of the group that it is in, were it added to it in typer's own way
                self._loaded[name] = typer.main.get_group(found)
                self._loaded[name].name = name
            else:
                alone = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
                alone.command(name, cls=classes[0] if classes else None)(found)
                self._loaded[name] = typer.main.get_command(alone)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _imported(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


class UsageError(ValueError):
    """Options that are fine one by one, but not together."""


class CommandLine(TyperGroup):
    """A group of commands. Without arguments it prints its help."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError):  # a stand-in may not be able to
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # TextIO has none
        extra["standalone_mode"] = False
        try:
            with _signals_as_exits():
                status = super().main(args, **extra)
            sys.stdout.flush()
        except _TYPER_USAGE_ERROR as error:
            status = _complain(error.format_message(), 2)  # type: ignore[attr-defined] # click's
        except BrokenPipeError:
            status = _close_broken_stdout()
        except OSError as error:  # of the flush
            status = _complain(_what_failed(error), 1)
        sys.exit(status if isinstance(status, int) else 0)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args or ["--help"])
        except KeyboardInterrupt:
            raise typer.Exit(_complain("interrupted", 130)) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            status = _complain("interrupted", 130)
        except UsageError as error:
            status = _complain(error, 2)
        except BrokenPipeError:
            status = _close_broken_stdout()
        except OSError as error:
            status = _complain(_what_failed(error), 1)
        except ImportError as error:
            status = _complain(f"{error} (`refspec doctor` says what is missing, and what to do)", 1)
        except Exception as error:
            # torch has no exception of its own for a CPU without memory.
            if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate" in str(error)):
                status = _complain("out of memory: lower --kv-slots or --max-running, or take a smaller model", 1)
            elif isinstance(error, ValueError | _out_of_slots()):
                status = _complain(error, 1)
            else:
                raise
        raise typer.Exit(status)


def shows_progress(as_json: bool) -> bool:
    """Is there somebody who would like to see that something happens?"""
    return not as_json and sys.stderr.isatty()


@contextlib.contextmanager
def _signals_as_exits() -> Iterator[None]:
    """A signal that ends the process becomes an exception, so that whoever holds a terminal or a file can let go."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    names = ("SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # Only where nobody else has a say: nohup, for one, asks for SIGHUP to be ignored.
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _complain(what: object, status: int) -> int:
    print("refspec:", printable(" ".join(str(what).splitlines())), file=sys.stderr)
    return status


def _what_failed(error: OSError) -> str:
    """What could not be read or written, and why."""
    if error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"cannot write to standard output, or to a temporary file: {error.strerror}"
    return str(error)


def _close_broken_stdout() -> int:
    """Nobody reads any more (`| head`). What is still buffered must go somewhere when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _out_of_slots() -> type[Exception]:
    """The engine's OutOfSlots, without importing torch for it: where no engine was imported, none can have raised."""
    allocator = sys.modules.get("refspec.memory.allocator")
    return allocator.OutOfSlots if allocator else UsageError
