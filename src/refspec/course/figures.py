"""The lessons' drawings, made from recorded rounds.

SVG that stands in the page itself, so that its colours follow the page's light or dark theme: they are the custom
properties of docs/assets/refspec.css, with the light ones to fall back on.
"""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

from refspec.config import SamplingParams, SpecConfig
from refspec.course.runs import record_run
from refspec.trace import Round

COLOURS = {
    "fg": "#1b1f24",
    "muted": "#5c6670",
    "line": "#c4cad1",
    "draft": "#0072b2",
    "target": "#b35900",
    "accept": "#00795a",
}


def colour(name: str) -> str:
    """The page's colour of this name, as a value for fill or stroke."""
    return f"var(--rs-{name}, {COLOURS[name]})"


class Drawing:
    """An SVG picture of a given size, with a title and a description for those who hear the page."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.root = ElementTree.Element(
            "svg", {"viewBox": f"0 0 {width} {height}", "role": "img", "class": "rs-figure", "font-size": "14"}
        )
        ElementTree.SubElement(self.root, "title").text = title
        ElementTree.SubElement(self.root, "desc").text = description

    def text(self, x: float, y: float, words: str, fill: str = "fg", **attributes: str) -> None:
        attributes = {name.replace("_", "-"): value for name, value in attributes.items()}
        node = ElementTree.SubElement(self.root, "text", {"x": f"{x:g}", "y": f"{y:g}", **attributes})
        node.set("fill", colour(fill))
        node.text = words

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        place = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}", "rx": "3"}
        ElementTree.SubElement(self.root, "rect", {**place, "fill": colour(fill)})

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        ends = {"x1": f"{x1:g}", "y1": f"{y1:g}", "x2": f"{x2:g}", "y2": f"{y2:g}"}
        ElementTree.SubElement(self.root, "line", {**ends, "stroke": colour("line")})

    def svg(self) -> str:
        return ElementTree.tostring(self.root, encoding="unicode")


def draw_one_round() -> str:
    """Time runs downward, a row for each phase: which model runs, and how many slots the round holds."""
    trace = record_run("def fib(n):", SpecConfig(topk=4, num_steps=3, num_draft_tokens=16), SamplingParams(48))
    return figure(draw_round(trace.rounds[0]), "One round of one request, as recorded: k = 4, S = 3, N = 16.")


def draw_round(round_: Round) -> str:
    """The figure for any round of a single request that no stop cut."""
    [tree] = round_.requests
    drafts, targets, extends = (round_.forwards.get(name, 0) for name in ("draft", "target", "extend"))
    drafted, verified = round_.slots_taken["draft"], round_.slots_taken["verify"]
    rejected = round_.slots_returned["commit"]
    kept = verified - rejected
    rows = [  # phase, the model that runs, how often, its rows; slots held, their colour, what to say of them
        ("draft", "draft", drafts, len(tree.draft_slots), drafted, "draft", f"+{drafted}, then −{drafted}"),
        ("tree", "", 0, 0, 0, "draft", "0"),
        ("verify", "target", targets, len(tree.parents), verified, "target", f"+{verified}"),
        ("commit", "", 0, 0, kept, "accept", f"−{rejected}: {kept} stay"),
        ("extend", "draft", extends, len(tree.committed), kept, "accept", f"{kept}"),
    ]
    left, top, height = {"draft": 80, "target": 194, "slots": 312}, 52, 48
    unit = 200 / max(drafted, verified)
    told = [f"{phase}: {count} forwards of {n} rows; slots: {words}" for phase, _, count, n, _, _, words in rows]
    drawing = Drawing(520, top + len(rows) * height + 4, "The phases of a round", ". ".join(told))
    for lane, words in (("draft", "draft model"), ("target", "target model"), ("slots", "KV slots of the round")):
        drawing.text(left[lane], 26, words, "muted")
    for i, (phase, model, count, n, slots, fill, words) in enumerate(rows):
        y = top + i * height
        drawing.line(0, y - 8, 520, y - 8)
        drawing.text(0, y + 16, phase, font_weight="600")
        for j in range(count):
            drawing.box(left[model] + j * 34, y + 2, 28, 14, model)
        if count:
            times = f"{count} × " if count > 1 else ""
            drawing.text(left[model], y + 33, f"{times}{n} rows", "muted")
        if slots:
            drawing.box(left["slots"], y + 4, slots * unit, 10, fill)
        drawing.text(left["slots"], y + 33, words, "muted")
    return drawing.svg()


def figure(svg: str, caption: str) -> str:
    """A drawing with its caption, as HTML on one line."""
    return f'<figure class="rs-drawing">{svg}<figcaption>{caption}</figcaption></figure>'


FIGURES: dict[str, Callable[[], str]] = {"one_round": draw_one_round}
