"""The drawings say what the run and the example say."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from refspec.config import SamplingParams, SpecConfig
from refspec.course.example import work_out
from refspec.course.figures import FIGURES, draw_example_tree, draw_one_round, draw_round
from refspec.course.runs import record_run


def parsed(figure: str) -> ElementTree.Element:
    return ElementTree.fromstring(figure)


def texts(figure: str) -> list[str]:
    return [node.text or "" for node in parsed(figure).iter("text")]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_a_title_a_description_and_a_caption(name: str) -> None:
    drawing = parsed(FIGURES[name]())
    for tag in ("title", "desc", "figcaption"):
        assert drawing.findtext(f".//{tag}")
    assert "#" not in re.sub(r"var\(--rs-\w+, #\w{6}\)", "", FIGURES[name]()), "colours follow the page's theme"


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_drawn_outside_the_picture(name: str) -> None:
    svg = next(parsed(FIGURES[name]()).iter("svg"))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for box in svg.iter("rect"):
        x, y, w, h = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height


@pytest.mark.parametrize(("topk", "num_steps", "num_draft_tokens"), [(4, 3, 16), (1, 5, 6), (2, 1, 3)])
def test_a_round_is_drawn_with_its_own_counts(topk: int, num_steps: int, num_draft_tokens: int) -> None:
    spec = SpecConfig(topk=topk, num_steps=num_steps, num_draft_tokens=num_draft_tokens)
    round_ = record_run("def median(data):", spec, SamplingParams(max_new_tokens=24)).rounds[0]
    [tree] = round_.requests
    new, svg = len(tree.committed), draw_round(round_)
    drafted = topk * num_steps
    said = texts(svg)
    assert f"+{drafted}, then −{drafted}" in said
    assert f"+{num_draft_tokens}" in said
    assert f"−{num_draft_tokens - new}: {new} stay" in said
    boxes = [box.attrib["fill"].split(",")[0] for box in parsed(svg).iter("rect") if box.attrib["height"] == "14"]
    assert boxes.count("var(--rs-draft") == num_steps - 1 + 1  # the loop's and the extend
    assert boxes.count("var(--rs-target") == 1
    widths = [float(box.attrib["width"]) for box in parsed(svg).iter("rect") if box.attrib["height"] == "10"]
    held = [drafted, num_draft_tokens, new, new]
    assert widths == pytest.approx([200 * slots / max(held) for slots in held], rel=1e-4)


def test_one_round_is_a_whole_round() -> None:
    assert "2 × 4 rows" in texts(draw_one_round())


def test_the_example_tree_marks_the_walk() -> None:
    seen = work_out()
    path = [row for row in seen.accept_index if row >= 0]
    drawing = parsed(draw_example_tree())
    accepted = [box for box in drawing.iter("rect") if "accept" in box.attrib["stroke"]]
    assert len(accepted) == len(path)
    thick = [line for line in drawing.iter("line") if line.attrib["stroke-width"] == "3"]
    assert len(thick) == len(path) - 1
    assert [text for text in texts(draw_example_tree()) if text[0].isdigit()] == [
        "0  the",
        "1  cat",
        "2  dog",
        "3  sat",
        "4  ran",
        "5  ran",
        "6  down",
    ]
