"""The README's Python runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) == 3


@pytest.mark.parametrize("number", range(3))
def test_snippet_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(SNIPPETS[0], names)  # the others build on its imports
    if number:
        capsys.readouterr()
        exec(SNIPPETS[number], names)
    printed = capsys.readouterr().out
    assert printed
    if number == 1:
        assert " length [-" in printed  # the finish reason, then log-probabilities
    if number == 2:
        assert "token_ids=[8, 9, 0, 1, 2, 3, 4, 5, 6]" in printed
        assert "accept_lens=[4, 4]" in printed
