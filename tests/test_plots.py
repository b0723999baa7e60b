"""What the figures of a round show, read back from the figures."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib
import matplotlib.pyplot as plt
import pytest
from builders import agreeing_now_and_then, generate_watched, random_logits
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from refspec import Engine, SamplingParams, SpecConfig
from refspec.course import plots
from refspec.models.scripted import ScriptedModel
from refspec.trace import Round

VOCABULARY = {token: f"w{token}" for token in range(30)}


@pytest.fixture(autouse=True)
def axes() -> Iterator[Axes]:
    with matplotlib.rc_context({"backend": "agg"}):
        plots.use_style()
        _, ax = plt.subplots()
        yield ax
        plt.close("all")


@pytest.fixture(params=[(4, 3, 16), (1, 3, 4), (3, 1, 3)], ids=str)
def rounds(request: pytest.FixtureRequest) -> list[Round]:
    """Rounds with paths of several lengths."""
    k, steps, n = request.param
    target = random_logits(30, salt=3)
    draft = agreeing_now_and_then(target, random_logits(30, salt=5), one_in=3)
    engine = Engine(ScriptedModel(target, 30), ScriptedModel(draft, 30), SpecConfig("eagle", k, steps, n))
    _, watcher = generate_watched(engine, [[1, 2, 3]], SamplingParams(max_new_tokens=40))
    assert len({len(tree.accepted_rows) for tree in watcher.requests}) > 1
    return watcher.rounds


def test_the_pool(rounds: list[Round], axes: Axes) -> None:
    (tree,) = rounds[0].requests
    plots.draw_pool(axes, tree)
    dropped, kept = (collection.get_offsets()[:, 1].tolist() for collection in axes.collections)
    scores = [candidate.score for candidate in tree.candidates]
    assert kept == [scores[i] for i in tree.kept]
    assert dropped == [score for i, score in enumerate(scores) if i not in tree.kept]
    k, steps = len(tree.draft_slots), len(tree.draft_slots[0])
    sizes = [k if level == 0 else k * k for level in range(steps)]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == [f"level {level}\n{size} candidates" for level, size in enumerate(sizes)]
    places = sorted(x for collection in axes.collections for x, _ in collection.get_offsets())
    for level, size in enumerate(sizes):
        assert sum(abs(place - level) < 0.5 for place in places) == size


def test_the_tree(rounds: list[Round], axes: Axes) -> None:
    for round_ in rounds:
        axes.clear()
        (tree,) = round_.requests
        plots.draw_tree(axes, tree, VOCABULARY)
        depths = [position - tree.seq_len for position in tree.positions]
        edges = {(line.get_xydata()[0, 1], line.get_xydata()[1, 1]): line.get_linewidth() for line in axes.lines}
        assert set(edges) == {(parent, row) for row, parent in enumerate(tree.parents) if row}
        path = tree.accepted_rows
        assert {row for (_, row), width in edges.items() if width > 2} == set(path[1:])
        nodes = [tuple(collection.get_offsets()[0]) for collection in axes.collections]
        assert nodes == [(depth, row) for row, depth in enumerate(depths)]
        labels = [label.get_text().split() for label in axes.get_yticklabels()]
        tokens = [tree.bonus_token, *(tree.candidates[i].token for i in tree.kept)]
        assert labels == [[f"w{token}", str(row)] for row, token in enumerate(tokens)]
        choices = [text.get_text() for text in axes.texts[: len(tokens)]]
        assert choices == [f"w{t}" + " ★" * (row == path[-1]) for row, t in enumerate(tree.target_predict)]


def test_the_mask(rounds: list[Round], axes: Axes) -> None:
    (tree,) = rounds[0].requests
    plots.draw_mask(axes, tree, VOCABULARY)
    (mesh,) = axes.collections
    rows = range(len(tree.parents))
    assert [[int(cell > 0) for cell in row] for row in mesh.get_array()] == [
        [int(bit) for bit in row] for row in tree.tree_mask
    ]
    assert [row for row in rows if mesh.get_array()[row].max() == 2] == tree.accepted_rows
    assert axes.yaxis_inverted()  # row 0 on top, as in the tree
    assert [label.get_text() for label in axes.get_xticklabels()] == plots.row_labels(tree, VOCABULARY)


def test_the_slots(rounds: list[Round], axes: Axes) -> None:
    for round_ in rounds:
        axes.clear()
        (tree,) = round_.requests
        plots.draw_slots(axes, round_)
        owned = axes.lines[0].get_ydata().tolist()
        drafted, rows, stay = sum(map(len, tree.draft_slots)), len(tree.verify_slots), len(tree.kept_slots)
        before = tree.seq_len
        steps = [before, before + drafted, before, before + rows]
        assert owned[: len(steps)] == steps
        assert set(owned[len(steps) :]) == {before + stay}
        numbers = [text.get_text().strip() for text in axes.texts]
        freed = [f"−{rows - stay}"] if rows > stay else []
        assert numbers == [f"+{drafted}", f"−{drafted}", f"+{rows}", *freed]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("def", "def"),
        (" if", "␣if"),
        ("\n   ", "\\n␣␣␣"),
        ("\\", "\\\\"),
        ("abcdefghijk", "abcdefghijk"),
        ("abcdefghijkl", "abcdefghij…"),
        ("\ufffd", "<7>"),
        (None, "<7>"),
    ],
)
def test_token_text(text: str | None, shown: str) -> None:
    assert plots.token_text(7, {} if text is None else {7: text}) == shown


def test_a_user_s_own_settings_do_not_show() -> None:
    with matplotlib.rc_context({"figure.facecolor": "black", "lines.linewidth": 9, "font.size": 30}):
        plots.use_style()
        assert to_hex(plt.rcParams["figure.facecolor"]) == plots.CARD
        assert plt.rcParams["lines.linewidth"] == matplotlib.rcParamsDefault["lines.linewidth"]


def test_text_can_be_read_on_the_card() -> None:
    """WCAG's contrast, at least 4.5 for all that text is written in."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for colour in (plots.INK, plots.QUIET, plots.BLUE, plots.ORANGE):
        assert (luminance(plots.CARD) + 0.05) / (luminance(colour) + 0.05) >= 4.5, colour
