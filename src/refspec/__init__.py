"""An annotated reference implementation of EAGLE speculative decoding in a serving engine."""

from refspec.config import SamplingParams, SpecConfig
from refspec.engine.engine import Engine, Generation, StreamBlock

__all__ = ["Engine", "Generation", "SamplingParams", "SpecConfig", "StreamBlock", "__version__"]
__version__ = "0.1.0"
