"""How files that changed, and patches, are printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from refspec.cli.diff_colours import styled
from refspec.cli.history.output import shown
from refspec.history.patches import FileDiff
from refspec.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment


def print_files(out: Console, files: Sequence[FileDiff], folder: str) -> None:
    """A line for each: status, lines added and deleted, name; names in `folder`, unless that is "", without it."""
    from rich.text import Text

    plus = ["" if file.lines_added is None else f"+{file.lines_added}" for file in files]
    minus = ["" if file.lines_deleted is None else f"-{file.lines_deleted}" for file in files]
    plus_width, minus_width = max(map(len, plus), default=0), max(map(len, minus), default=0)
    for file, added, deleted in zip(files, plus, minus, strict=True):
        line = Text(f"{file.status} ")
        if plus_width or minus_width:
            line.append(f" {added:>{plus_width}}", "green").append(f" {deleted:>{minus_width}}", "red").append(" ")
        out.print(line.append(f" {file_name(file, folder)}"), soft_wrap=True)


def file_name(file: FileDiff, folder: str) -> str:
    """Its name, and of a renamed one both: below `folder`, or whole if one of them is not in it."""
    names = [shown(name) for name in (file.old_path, file.path) if name]
    if folder and all(name.startswith(f"{folder}/") for name in names):
        names = [name.removeprefix(f"{folder}/") for name in names]
    return " -> ".join(names)


def print_patches(out: Console, files: Iterable[FileDiff]) -> None:
    """The patches, coloured as git does it; long lines are left to the terminal."""
    from rich.segment import Segments

    lines = (line for file in files for line in file.patch.removesuffix("\n").split("\n") if file.patch)
    out.print(Segments(list(coloured(lines))), crop=False, end="")


def coloured(lines: Iterable[str]) -> Iterator[Segment]:
    """Lines of patches, each with its line break."""
    from rich.segment import Segment
    from rich.style import Style

    for line, style in styled(lines):
        yield Segment(printable(line), Style.parse(style) if style else None)
        yield Segment.line()


def file_json(file: FileDiff) -> dict[str, Any]:
    """What is known of a file's change, for --json. patch: null where it is not known, or was not wanted."""
    return {
        "status": file.status,
        "path": file.path,
        "old_path": file.old_path,
        "lines_added": file.lines_added,
        "lines_deleted": file.lines_deleted,
        "patch": file.patch or None,
    }
