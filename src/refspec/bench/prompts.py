"""The prompts that measurements use: beginnings of Python modules, written for this purpose, in no training text.

The shipped models know the style of Python's standard library and little else, so the prompts keep to it.
"""

from __future__ import annotations

from pathlib import Path


def load_prompts() -> list[str]:
    """The texts of prompts.txt, which lines of four dashes part; none ends in white space."""
    text = Path(__file__).with_name("prompts.txt").read_text(encoding="utf-8")
    return [prompt.rstrip() for prompt in text.split("\n----\n")]
