"""The lessons' drawings, made from recorded rounds.

SVG that stands in the page itself, so that its colours follow the page's light or dark theme: they are the custom
properties of docs/assets/refspec.css, with the light ones to fall back on.
"""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

from refspec.config import SamplingParams, SpecConfig
from refspec.course.example import NUM_DRAFT_TOKENS, WORDS, work_out
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

    def frame(self, x: float, y: float, width: float, height: float, stroke: str) -> None:
        place = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}", "rx": "4"}
        ElementTree.SubElement(self.root, "rect", {**place, "fill": "none", "stroke": colour(stroke)})

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = "line", width: float = 1) -> None:
        ends = {"x1": f"{x1:g}", "y1": f"{y1:g}", "x2": f"{x2:g}", "y2": f"{y2:g}"}
        ElementTree.SubElement(self.root, "line", {**ends, "stroke": colour(stroke), "stroke-width": f"{width:g}"})

    def svg(self) -> str:
        return ElementTree.tostring(self.root, encoding="unicode")


def draw_one_round() -> str:
    """Time runs downward, a row for each phase: which model runs, and how many slots the round holds."""
    trace = record_run("def median(data):", SpecConfig(topk=4, num_steps=3, num_draft_tokens=16), SamplingParams(24))
    return figure(
        draw_round(trace.rounds[0]),
        "The first round of a run, recorded: k = 4, S = 3, N = 16. Boxes are forwards; bars, the slots that it holds.",
    )


def draw_round(round_: Round) -> str:
    """The figure for any round of a single request that no stop cut."""
    [tree] = round_.requests
    drafts, targets, extends = (round_.forwards.get(name, 0) for name in ("draft", "target", "extend"))
    drafted, verified = round_.slots_taken["draft"], round_.slots_taken["verify"]
    rejected = round_.slots_returned.get("commit", 0)
    kept = verified - rejected
    rows = [  # phase, the model that runs, how often, its rows; slots held, their colour, what to say of them
        ("draft", "draft", drafts, len(tree.draft_slots), drafted, "draft", f"+{drafted}, then −{drafted}"),
        ("tree", "", 0, 0, 0, "draft", "0"),
        ("verify", "target", targets, len(tree.parents), verified, "target", f"+{verified}"),
        ("commit", "", 0, 0, kept, "accept", f"−{rejected}: {kept} stay"),
        ("extend", "draft", extends, len(tree.committed), kept, "accept", f"the same {kept}"),
    ]
    left, top, height = {"draft": 80, "target": 194, "slots": 312}, 52, 48
    unit = 200 / max(drafted, verified)
    told = []
    for phase, model, count, n, slots, _, _ in rows:
        forwards = f"{count} {model} forward{'s' if count > 1 else ''} of {n} rows" if count else "no forward"
        told.append(f"{phase}: {forwards}, {slots} slots held")
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


def draw_example_tree() -> str:
    """The tree of example.py: a box for each row, the accepted path, the target's choice below each word."""
    seen = work_out()
    path = [row for row in seen.accept_index if row >= 0]
    depths = [position - seen.positions[0] for position in seen.positions]
    # Rows are in pool order: a parent's children stand together, and below those of an earlier parent.
    parents = [max((c for c in range(row) if seen.tree_mask[row][c]), default=-1) for row in range(NUM_DRAFT_TOKENS)]
    leaves = _leaves_in_order(parents)
    heights: dict[int, float] = {}
    for row in sorted(range(NUM_DRAFT_TOKENS), key=lambda row: -depths[row]):
        children = [heights[child] for child in range(NUM_DRAFT_TOKENS) if parents[child] == row]
        heights[row] = sum(children) / len(children) if children else float(leaves.index(row))

    box_width, step, height = 98, 138, 58
    told = [f"row {row} {WORDS[seen.rows[row]]}, under row {parents[row]}" for row in range(1, NUM_DRAFT_TOKENS)]
    words = [WORDS[seen.predict[row]] for row in path]
    drawing = Drawing(
        520,
        len(leaves) * height + 4,
        "The example's tree and the walk",
        f"{'. '.join(told)}. The walk takes the rows {', '.join(map(str, path))} and brings {', '.join(words)}.",
    )

    def place(row: int) -> tuple[float, float]:
        return 4 + depths[row] * step, 4 + heights[row] * height

    for row in range(1, NUM_DRAFT_TOKENS):
        (x1, y1), (x2, y2) = place(parents[row]), place(row)
        drawing.line(x1 + box_width, y1 + 20, x2, y2 + 20, "accept" if row in path else "line", 3 if row in path else 1)
    for row in range(NUM_DRAFT_TOKENS):
        x, y = place(row)
        drawing.frame(x, y, box_width, 42, "accept" if row in path else "line")
        drawing.text(x + 7, y + 17, f"{row}  {WORDS[seen.rows[row]]}", font_weight="600")
        drawing.text(x + 7, y + 34, f"→ {WORDS[seen.target_predict[row]]}", "target", font_size="12")
    caption = (
        "Each box: its row, its word, and after the arrow the target's choice there. The walk follows the thick lines."
    )
    return figure(drawing.svg(), caption)


def _leaves_in_order(parents: list[int], row: int = 0) -> list[int]:
    """The rows without children, as one meets them from the root downward."""
    children = [child for child, parent in enumerate(parents) if parent == row]
    return [leaf for child in children for leaf in _leaves_in_order(parents, child)] if children else [row]


FIGURES: dict[str, Callable[[], str]] = {"one_round": draw_one_round, "example_tree": draw_example_tree}
