"""Named pieces of the sources: what is found, and every way in which a marker can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from refspec.chapters import CourseError
from refspec.course.sections import find_sections, sections_of

SOURCE = '''"""A module.

# region in_a_string
"""


def f(x):
    # region outer
    y = x + 1
    # region inner
    if y:
        y = 2

    # endregion inner
    return y
    # endregion outer
'''


def write(folder: Path, text: str, name: str = "m.py") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_code_is_shown_without_markers_and_without_its_indentation(tmp_path: Path) -> None:
    inner, outer = sections_of(write(tmp_path, SOURCE))
    assert (inner.name, inner.code) == ("inner", "if y:\n    y = 2")
    assert (outer.name, outer.code) == ("outer", "y = x + 1\nif y:\n    y = 2\n\nreturn y")


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    inner, outer = sections_of(write(tmp_path, SOURCE))
    assert (inner.first_line, inner.last_line) == (11, 12)
    assert (outer.first_line, outer.last_line) == (9, 15)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# region a\nx = 1\n", "m.py:1: section a begins here, but does not end"),
        ("x = 1\n# endregion a\n", "m.py:2: section a ends here, but has not begun"),
        ("# region a\n# region a\nx = 1\n# endregion a\n", "m.py:2: section a begins again"),
        ("# region a\nx = 1\n# endregion b\n", "m.py:3: section b ends here, but has not begun"),
        ("# region a\n\n# endregion a\n", "m.py:3: section a is empty"),
        ("x = 1  # region a\n# endregion a\n", "m.py:1: a marker must have its line to itself"),
        ("# region a\nx = (1\n# endregion a\n", "m.py is no Python: "),
        ("# region a\nx = 1\n# endregion a\n# region a\ny = 1\n# endregion a\n", "section a is there twice"),
    ],
)
def test_a_marker_that_is_wrong_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    write(tmp_path, text)
    with pytest.raises(CourseError, match=complaint):
        find_sections(tmp_path)


def test_a_name_in_two_files_is_refused_with_both(tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        write(tmp_path, "# region a\nx = 1\n# endregion a\n", name)
    with pytest.raises(CourseError, match=r"one\.py:2 and .*two\.py:2"):
        find_sections(tmp_path)


def test_our_own_sources() -> None:
    sections = find_sections()
    assert sections["one_round"].code.startswith("def _round(")
    assert all("# region" not in section.code for section in sections.values())
