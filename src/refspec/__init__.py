"""An annotated reference implementation of EAGLE speculative decoding in a serving engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refspec.config import SamplingParams, SpecConfig
    from refspec.engine.engine import Engine, Generation, StreamBlock

__all__ = ["Engine", "Generation", "SamplingParams", "SpecConfig", "StreamBlock", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Names are looked up on first use: it takes torch seconds to load, and much here needs none of it."""
    if name in ("SamplingParams", "SpecConfig"):
        from refspec import config

        return getattr(config, name)
    if name in ("Engine", "Generation", "StreamBlock"):
        from refspec.engine import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
