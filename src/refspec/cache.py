"""Where downloads are kept: in $REFSPEC_CACHE, else in `refspec` of $XDG_CACHE_HOME, else in ~/.cache/refspec."""

from __future__ import annotations

import os
from pathlib import Path


class NoHomeError(ValueError):
    """There is no home folder, and so no place for a cache."""


def folder() -> Path:
    """The cache folder; it need not exist. Raises NoHomeError where no home folder is known."""
    try:
        if chosen := os.environ.get("REFSPEC_CACHE"):
            return Path(chosen).expanduser().absolute()
        chosen = os.environ.get("XDG_CACHE_HOME", "")
        if os.path.isabs(chosen):  # a relative one is to be ignored, says its specification
            return Path(chosen) / "refspec"
        return Path.home() / ".cache" / "refspec"
    except RuntimeError:
        raise NoHomeError("no home folder is known: set REFSPEC_CACHE to the full path of a folder") from None
