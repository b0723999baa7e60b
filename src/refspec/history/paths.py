"""Paths in SGLang's repository: as people type them, as git has them, and as they are told.

A path counts from the repository's root. Where one file is asked for, what stands below the folder of speculative
decoding may be left out as well, and so may the folders in it where the file's name is the only one of its kind.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable

from refspec.history.catalogue import DIRECTORY
from refspec.history.clone import HistoryError


def path_in_repository(path: str) -> str:
    """A path as git has it; the repository's root is ".". Raises HistoryError for one that leads out of it, or is none.

    It need not exist.
    """
    plain = posixpath.normpath(path)
    if not path or posixpath.isabs(plain) or plain.split("/")[0] == ".." or {"\0", "\n"} & set(plain):
        raise HistoryError(f"not a path in SGLang's repository, as {DIRECTORY} is one: {readable(path)!r}")
    return plain


def readings(file: str) -> tuple[str, str]:
    """The paths that `file` may stand for, the likelier one first: below the folder, and from the root."""
    plain = posixpath.normpath(file)
    return f"{DIRECTORY}/{plain}", plain


def file_meant(file: str, known: Iterable[str]) -> tuple[str | None, list[str]]:
    """The one of the known paths that `file` stands for: by its readings, or the only one in the folder that ends so.

    Else None, and up to four that may be meant: names in the folder, or whole paths of files elsewhere.
    """
    from difflib import get_close_matches

    paths = dict.fromkeys(known)
    for path in readings(file):
        if path in paths:
            return path, []
    plain = posixpath.normpath(file)
    below = [path for path in paths if path.startswith(f"{DIRECTORY}/")]
    ends = [path for path in below if path.endswith(f"/{plain}")]
    if len(ends) == 1:
        return ends[0], []
    names = [readable(path.removeprefix(f"{DIRECTORY}/")) for path in ends or below]
    elsewhere = [readable(path) for path in paths if path.endswith(f"/{plain}")]
    return None, (names if ends else elsewhere or get_close_matches(plain, names, 4))[:4]


def readable(path: str) -> str:
    """A path off os.fsdecode, with a replacement mark in place of the surrogate of each byte that is not UTF-8."""
    return os.fsencode(path).decode(errors="replace")
