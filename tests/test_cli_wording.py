"""Words for numbers, and the lines that texts are broken into."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from refspec.cli.history.output import UNBOUNDED, wrapped
from refspec.cli.wording import plural, size_of


def test_nouns_are_counted() -> None:
    assert [plural(number, "file") for number in (0, 1, 2)] == ["0 files", "1 file", "2 files"]


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 kB"), (1200, "1 kB"), (1_440_000, "1.4 MB"), (9_960_000, "10.0 MB"), (41e6, "41 MB")]
)
def test_sizes_are_never_rounded_to_nothing(number: int, said: str) -> None:
    assert size_of(number) == said


def test_long_words_stand_out_or_are_broken() -> None:
    text = "one " + "x" * 30 + " two"
    assert wrapped(text, 20, "- ", "  ") == ["- one", "  " + "x" * 30, "  two"]
    assert wrapped(text, 20, "- ", "  ", break_words=True) == ["- one " + "x" * 14, "  " + "x" * 16, "  two"]
    assert wrapped(text, UNBOUNDED, "- ", "  ") == [f"- {text}"]
    assert wrapped("", UNBOUNDED, "- ") == wrapped("", 20, "- ") == []
    assert len(wrapped("word " * 20, 2)) == 10, "never fewer than ten columns"


def test_the_first_screen_and_a_log_off_a_pipe_do_without_rich() -> None:
    script = (
        "import sys\n"
        "from refspec.cli.history.log import log\n"
        "from refspec.cli.history.overview import overview\n"
        "overview(catalogue_only=True)\n"
        "log(catalogue_only=True, limit=1)\n"
        "sys.exit([name for name in sys.modules if name.split('.')[0] == 'rich'][:1] or 0)"
    )
    settings = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, env=settings
    )
    assert done.returncode == 0, done.stderr
    assert "1 of " in done.stdout
