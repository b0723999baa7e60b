"""The colours of a diff."""

from __future__ import annotations

from refspec.cli.diff_colours import styled


def test_heads_are_told_from_lines_that_look_like_them() -> None:
    patches = ["diff --git a/x b/x", "--- a/x", "+++ b/x", "@@ -1,2 +1 @@ head", "--- gone", "+++ came", " kept"]
    styles = ["bold", "bold", "bold", "cyan", "red", "green", ""]
    assert [style for _, style in styled([*patches, *patches])] == styles * 2
    assert [style for _, style in styled(patches[1:])] == styles[1:], "without git's line"
    assert [style for _, style in styled(patches[3:])] == styles[3:], "of no file"
