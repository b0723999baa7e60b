"""What the checks of the study notes on EAGLE share: the four commits, and what came with which."""

from __future__ import annotations

from refspec.history.claims.evidence import each, exists
from refspec.history.clone import Clone

FOUR = ("9c05c6898e", "b0524c3789", "ad20b7957e", "815dce0554")  # the four that brought EAGLE


def came_with(clone: Clone, revision: str, path: str) -> bool:
    """Is the path there since this commit, and not before it?"""
    before, after = each(lambda one: exists(clone, one, path), (f"{revision}^", revision))
    return after and not before


def came(did: bool) -> str:
    """Of something that came, or did not."""
    return "came" if did else "did not come"


def yes(is_so: bool) -> str:
    """Yes or no."""
    return "yes" if is_so else "no"
