"""The replay: its steps tell what the trace holds, and what it draws is what its steps say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from refspec.config import SamplingParams, SpecConfig
from refspec.course.runs import record_run

CHAPTER = "chapters/01_one_round/"
PHASES = ["start", "draft", "give back", "keep", "mask", "verify", "walk", "commit", "extend"]
SHAPES = {"k1": (1, 3, 4), "k1 S1": (1, 1, 2), "k4": (4, 3, 16), "k4 S1": (4, 1, 5), "k8": (8, 5, 32)}

STEPS = """(trace) => trace.rounds.map((round) =>
    refspecReplay.stepsOf(round.requests[0], trace.vocabulary))"""
# A replay of a trace of ours in the place of the page's own.
REPLACE = """([trace, round]) => {
    const element = document.querySelector(".refspec-replay");
    const data = document.createElement("script");
    data.type = "application/json";
    data.textContent = typeof trace === "string" ? trace : JSON.stringify(trace);
    element.replaceChildren(data);
    element.dataset.round = round;
    refspecReplay.enhance(element);
}"""


def trace_of(shape: str, max_new_tokens: int = 24) -> dict[str, Any]:
    k, s, n = SHAPES[shape]
    spec = SpecConfig(topk=k, num_steps=s, num_draft_tokens=n)
    return record_run("def fib(n):", spec, SamplingParams(max_new_tokens)).model_dump(mode="json")


def visible(trace: dict[str, Any], token: int) -> str:
    return trace["vocabulary"][str(token)].replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")


@pytest.fixture
def replay(page: Page, address: str) -> Locator:
    page.goto(address + CHAPTER)
    found = page.locator(".refspec-replay")
    expect(found.locator(".rs-replay")).to_be_visible()
    return found


def show(page: Page, trace: dict[str, Any] | str, round_number: int) -> None:
    page.evaluate(REPLACE, [trace, round_number])


def trace_in(replay: Locator) -> dict[str, Any]:
    return json.loads(replay.locator("script").text_content() or "")


# --- the steps, against the trace


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_tell_what_the_trace_holds(page: Page, replay: Locator, shape: str) -> None:
    """In every round of a run; its last one is cut by the budget."""
    trace = trace_of(shape)
    k, s, n = SHAPES[shape]
    all_steps = page.evaluate(STEPS, trace)
    assert len(all_steps) == len(trace["rounds"]) > 1
    for round_, steps in zip(trace["rounds"], all_steps, strict=True):
        [tree] = round_["requests"]
        path, committed = tree["accepted_rows"], tree["committed"]
        names = [step["phase"] for step in steps]
        assert list(dict.fromkeys(names)) == PHASES
        drafting = [step["sentence"] for step in steps if step["phase"] == "draft"]
        assert len(drafting) == s
        assert drafting[0].startswith("Level 0 needs no forward")
        for level, sentence in enumerate(drafting[1:], start=1):
            assert sentence.startswith(f"Draft forward {level - 1} makes level {level}: ")
            assert f"at position {tree['seq_len'] + level - 1};" in sentence
        walk = [step for step in steps if step["phase"] == "walk"]
        assert len(walk) == len(path)  # a step for each accepted edge, and one for the bonus
        assert [step["state"]["at"] for step in walk] == path
        assert [step["state"]["walked"] for step in walk] == [*range(2, len(path) + 1), len(path)]
        assert ["accepted." in step["sentence"].split(": ")[-1] for step in walk[:-1]] == [True] * (len(path) - 1)
        assert "it is the bonus" in walk[-1]["sentence"]
        assert [step["state"]["bonus"] for step in walk] == [False] * (len(path) - 1) + [True]

        commit = next(step["sentence"] for step in steps if step["phase"] == "commit")
        assert commit.startswith(f"Committed: {' '.join(f'‘{visible(trace, token)}’' for token in committed)}.")
        assert f"from {tree['seq_len']} to {tree['seq_len'] + len(committed)}." in commit
        assert (tree["finish_reason"] is not None) == ("has ended" in commit)
        keep = next(step["sentence"] for step in steps if step["phase"] == "keep")
        assert f"Of {k + (s - 1) * k * k} candidate" in keep
        assert f"best {n - 1} " in keep

        end = steps[-1]["state"]
        assert end["forwards"]["draft"] == round_["forwards"].get("draft", 0)
        assert end["forwards"]["target"] == round_["forwards"]["target"]
        assert end["forwards"]["extend"] == round_["forwards"].get("extend", 0)
        drafts = [step["state"]["draft"] for step in steps]
        assert drafts.index("returned") < names.index("verify"), "draft slots go back before verify takes its own"
        if tree["finish_reason"] is None:  # the draft's rows stand where the committed tokens are cached
            rows, start = len(committed), tree["seq_len"]
            at = f"position {start}" if rows == 1 else f"positions {start}–{start + rows - 1}"
            assert steps[-1]["sentence"].startswith(f"One draft forward over {rows} row{'s' * (rows > 1)}, at {at}, ")
        else:
            assert steps[-1]["sentence"].startswith("There is no extend")


def test_a_round_without_a_draft(page: Page, replay: Locator) -> None:
    """Guesses are looked up: no pool, no draft slots, no scores, and rows that are not in the trace but took slots."""
    spec = SpecConfig(algorithm="ngram", num_draft_tokens=8)
    trace = record_run("def f(a):\n    return a\n\ndef g(", spec, SamplingParams(24)).model_dump(mode="json")
    for round_, steps in zip(trace["rounds"], page.evaluate(STEPS, trace), strict=True):
        [tree] = round_["requests"]
        names = [step["phase"] for step in steps]
        assert list(dict.fromkeys(names)) == [name for name in PHASES if name != "give back"]
        sentences = {step["phase"]: step["sentence"] for step in steps}
        assert f"is looked up: {len(tree['candidates'])} found." in sentences["draft"]
        filling = 8 - len(tree["parents"])
        assert (f"{filling} row" in sentences["verify"]) == (filling > 0)
        assert steps[-1]["state"]["forwards"] == {"draft": 0, "target": 1, "extend": 0}
    longest = max(trace["rounds"], key=lambda round_: len(round_["requests"][0]["accepted_rows"]))
    assert len(longest["requests"][0]["accepted_rows"]) > 1
    show(page, trace, longest["number"])
    replay.locator(".rs-replay").focus()
    for _ in range(20):  # through all steps; an error in the page fails the test
        page.keyboard.press("ArrowRight")
    expect(replay.locator(".rs-node.rs-accepted")).to_have_count(len(longest["requests"][0]["accepted_rows"]) - 1)


def test_steps_are_the_same_whenever_they_are_asked_for(page: Page, replay: Locator) -> None:
    trace = trace_of("k4")
    assert page.evaluate(STEPS, trace) == page.evaluate(STEPS, trace)


# --- the drawing, against the steps


def words(replay: Locator, selector: str) -> list[str]:
    return replay.locator(selector).all_text_contents()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_draws_what_the_trace_holds(page: Page, replay: Locator, shape: str) -> None:
    trace = trace_of(shape)
    k, s, n = SHAPES[shape]
    round_ = trace["rounds"][1]
    [tree] = round_["requests"]
    show(page, trace, round_["number"])
    replay.locator(".rs-replay").focus()
    steps = page.evaluate(STEPS, trace)[1]
    for i, step in enumerate(steps):
        state = step["state"]
        expect(replay).to_have_attribute("data-step", str(i))
        expect(replay).to_have_attribute("data-phase", step["phase"])
        assert words(replay, ".rs-sentence") == [step["sentence"]]
        nodes = replay.locator(".rs-node:visible")
        if not state["mask"]:
            assert nodes.count() == 1 + (k + (state["levels"] - 1) * k * k if state["levels"] else 0)
        else:
            assert nodes.count() == n + state["bonus"]
        if step["phase"] == "draft":
            assert replay.locator(".rs-node.rs-branch").count() == min(state["levels"], s - 1) * k
            assert replay.locator(".rs-cell.rs-slot-draft").count() == k * state["written"]
            assert replay.locator(".rs-cell.rs-slot-reserved").count() == k * (s - state["written"])
        if step["phase"] in ("give back", "keep", "mask"):
            assert replay.locator(".rs-cell:is(.rs-slot-draft, .rs-slot-reserved, .rs-slot-verify)").count() == 0
        if step["phase"] == "keep":
            assert replay.locator(".rs-node.rs-row").count() == n - 1
            assert replay.locator(".rs-node.rs-faded").count() == len(tree["candidates"]) - (n - 1)
        if step["phase"] in ("verify", "walk"):
            assert replay.locator(".rs-cell.rs-slot-verify").count() == n
        if step["phase"] == "walk":
            assert replay.locator(".rs-node.rs-accepted").count() == state["walked"] - 1
        page.keyboard.press("ArrowRight")
    kept = [int(text) for text in words(replay, ".rs-cell.rs-slot-kept > span:first-child")]
    assert kept == sorted(tree["kept_slots"])
    shown_mask = [
        "".join("1" if cell == "rs-seen" else "0" for cell in row)
        for row in page.evaluate(
            """() => [...document.querySelectorAll(".rs-mask-row")].map((row) =>
                [...row.querySelectorAll(".rs-seen, .rs-unseen")].map((cell) => cell.getAttribute("class")))"""
        )
    ]
    assert shown_mask == tree["tree_mask"]
    assert words(replay, ".rs-story ins") == ["".join(visible(trace, token) for token in tree["committed"])]


def test_block_that_a_stop_cut(page: Page, replay: Locator) -> None:
    """Found, not made: some budget ends a request inside an accepted block."""
    for budget in range(6, 24):
        trace = trace_of("k4", budget)
        [tree] = trace["rounds"][-1]["requests"]
        if len(tree["committed"]) < len(tree["accepted_rows"]) - 1:
            break
    else:
        pytest.fail("no budget cuts a block before its last draft")
    show(page, trace, trace["rounds"][-1]["number"])
    replay.locator(".rs-replay").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(replay).to_have_attribute("data-phase", "commit")
    expect(replay.locator(".rs-sentence")).to_contain_text("behind its end is dropped")
    assert replay.locator(".rs-node.rs-bonus:visible").count() == 0
    dropped = len(tree["accepted_rows"]) - 1 - len(tree["committed"])
    assert replay.locator(".rs-node.rs-dropped").count() == dropped
    assert replay.locator(".rs-cell.rs-slot-kept").count() == len(tree["committed"])


# --- keys, and other ways in


def test_keys_and_buttons_and_rounds(page: Page, replay: Locator) -> None:
    trace = trace_in(replay)
    frame = replay.locator(".rs-replay")
    frame.focus()
    assert frame.evaluate("(node) => getComputedStyle(node).outlineStyle") == "solid", "one sees where the focus is"
    last = int(words(replay, ".rs-counter")[0].split()[-1]) - 1

    def at(step: int) -> None:
        expect(replay).to_have_attribute("data-step", str(step))

    at(0)
    for key, step in [
        ("ArrowLeft", 0),
        ("ArrowRight", 1),
        (" ", 2),
        ("ArrowLeft", 1),
        ("End", last),
        ("ArrowRight", last),
    ]:
        page.keyboard.press(key)
        at(step)
    page.keyboard.press("Home")
    at(0)
    top = page.evaluate("scrollY")
    page.keyboard.press(" ")
    at(1)
    assert page.evaluate("scrollY") == top, "a key that means something here does not scroll the page as well"

    replay.get_by_role("button", name="next step (Right)").focus()
    page.keyboard.press(" ")  # the button's own key, and only once
    at(2)
    replay.get_by_role("button", name="go to: commit").click()
    expect(replay).to_have_attribute("data-phase", "commit")
    assert words(replay, ".rs-phases [aria-current]") == ["commit"]

    first = trace["rounds"].index(
        next(r for r in trace["rounds"] if str(r["number"]) == replay.get_attribute("data-round"))
    )
    replay.get_by_role("button", name="next round").click()
    at(0)
    assert replay.locator("select").input_value() == str(first + 1)
    replay.locator("select").select_option(index=0)
    expect(replay.get_by_role("button", name="previous round")).to_be_disabled()
    tree = trace["rounds"][0]["requests"][0]
    expect(replay.locator(".rs-sentence")).to_contain_text(f"its position is {tree['seq_len']}.")


def test_keys_without_a_focus_go_to_the_replay_in_view(page: Page, replay: Locator) -> None:
    """And stay with whatever has the focus, or with the page where no replay is seen."""
    assert replay.locator(".rs-keys").is_visible()
    page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
    page.keyboard.press("ArrowRight")
    expect(replay).to_have_attribute("data-step", "0")
    replay.locator(".rs-replay").evaluate("(node) => node.scrollIntoView({ behavior: 'instant' })")
    last = int(words(replay, ".rs-counter")[0].split()[-1]) - 1
    for key, step in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", last), ("Home", 0), (" ", 0)]:
        page.keyboard.press(key)
        expect(replay).to_have_attribute("data-step", str(step))
    page.locator("article a:visible").first.evaluate("(link) => link.focus({ preventScroll: true })")
    page.keyboard.press("ArrowRight")
    replay.locator("select").focus()
    page.keyboard.press("End")
    expect(replay).to_have_attribute("data-step", "0")


def test_rounds_are_counted_from_0_and_say_so(replay: Locator) -> None:
    last = trace_in(replay)["rounds"][-1]["number"]
    assert words(replay, "option") == [f"round {i} (of 0 to {last})" for i in range(last + 1)]


def test_every_step_is_announced(replay: Locator) -> None:
    assert replay.locator(".rs-sentence").get_attribute("aria-live") == "polite"
    assert replay.locator(".rs-replay").get_attribute("aria-label")
    unnamed = (
        "(node) => [...node.querySelectorAll('button, select')].filter((b) => !b.getAttribute('aria-label')).length"
    )
    assert replay.evaluate(unnamed) == 0


def test_row_is_looked_at_by_key_and_by_pointer(page: Page, replay: Locator) -> None:
    frame = replay.locator(".rs-replay")
    frame.focus()
    page.keyboard.press("ArrowDown")
    assert words(replay, ".rs-looked") == [""], "there are no rows yet"
    replay.get_by_role("button", name="go to: mask").click()
    frame.focus()
    tree = next(r for r in trace_in(replay)["rounds"] if str(r["number"]) == replay.get_attribute("data-round"))[
        "requests"
    ][0]
    row = len(tree["parents"]) - 1
    page.keyboard.press("ArrowUp")
    for _ in range(row):
        page.keyboard.press("ArrowDown")
    seen = [column for column, bit in enumerate(tree["tree_mask"][row]) if bit == "1"]
    token = visible(trace_in(replay), tree["candidates"][tree["kept"][row - 1]]["token"])
    others = ", ".join([f"the {tree['seq_len']} cached tokens", *(f"row {column}" for column in seen[:-1])])
    expect(replay.locator(".rs-looked")).to_have_text(
        f"Row {row} (‘{token}’), position {tree['positions'][row]}, attends {others} and itself."
    )
    assert replay.locator(".rs-node.rs-look").count() == replay.locator(".rs-mask-row.rs-look").count() == 1
    assert (
        replay.locator(".rs-node.rs-ancestor").count()
        == replay.locator(".rs-mask-row.rs-ancestor").count()
        == len(seen) - 1
    )
    page.keyboard.press("Escape")
    assert replay.locator(".rs-look").count() == 0

    replay.locator(".rs-mask-row").nth(1).hover()
    expect(replay.locator(".rs-looked")).to_contain_text("Row 1 (")
    page.keyboard.press("ArrowRight")
    expect(replay.locator(".rs-looked")).to_be_empty()
    page.keyboard.press("ArrowLeft")
    replay.locator(".rs-node:visible").last.hover()
    assert replay.locator(".rs-node.rs-look").count() == 1
    replay.locator(".rs-sentence").hover()
    assert replay.locator(".rs-look").count() == 0


@pytest.mark.parametrize("context", [{"viewport": {"width": 360, "height": 740}}], indirect=True)
def test_wide_trees_scroll_inside_on_a_phone(page: Page, replay: Locator) -> None:
    show(page, trace_of("k8"), 1)
    replay.locator(".rs-replay").focus()
    for _ in PHASES:
        assert page.evaluate("document.documentElement.scrollWidth <= 360")
        page.keyboard.press("ArrowRight")
    pane = replay.locator(".rs-pane").first
    assert pane.evaluate("(node) => node.scrollWidth > node.clientWidth")
    assert pane.evaluate("(node) => node.clientHeight >= node.firstElementChild.getBoundingClientRect().height")
    page.keyboard.press("Home")
    expect(pane).to_have_class(re.compile(r"rs-more-right"))  # the edge fades where there is more
    expect(pane).not_to_have_class(re.compile(r"rs-more-left"))


@pytest.mark.parametrize("context", [{"viewport": {"width": 360, "height": 740}}], indirect=True)
@pytest.mark.parametrize("shape", ["k4", "k8"])
def test_walk_and_draft_scroll_to_what_they_are_about(page: Page, replay: Locator, shape: str) -> None:
    trace = trace_of(shape)
    show(page, trace, 1)
    replay.locator(".rs-replay").focus()
    in_pane = """(node) => {
        const [pane, box] = [node.closest(".rs-pane"), node.querySelector("rect")];
        const [around, inside] = [pane.getBoundingClientRect(), box.getBoundingClientRect()];
        return around.left <= inside.left && inside.right <= around.right;
    }"""
    for step in page.evaluate(STEPS, trace)[1]:
        if step["phase"] in ("draft", "walk"):
            page.wait_for_timeout(600)  # until nothing moves
            kind = ".rs-bonus" if step["state"]["bonus"] else ".rs-accepted" if step["phase"] == "walk" else ":visible"
            assert replay.locator(f".rs-node{kind}").last.evaluate(in_pane)
            if step["phase"] == "walk":
                assert replay.locator(".rs-node.rs-at").evaluate(in_pane)
        page.keyboard.press("ArrowRight")


@pytest.mark.parametrize("context", [{"reduced_motion": "reduce"}], indirect=True)
def test_nothing_moves_for_those_who_do_not_want_it(replay: Locator) -> None:
    assert replay.locator(".rs-node").first.evaluate("(node) => getComputedStyle(node).transitionDuration") == "0s"


def test_things_move_otherwise(replay: Locator) -> None:
    assert replay.locator(".rs-node").first.evaluate("(node) => getComputedStyle(node).transitionDuration") != "0s"


# --- what a trace may hold


HOSTILE = [
    "<script>alert(1)</script>",
    "</script>",
    "<img src=x onerror=alert(1)>",
    "&lt;b&gt;",
    "\u202eback",
    "\x00\x1b",
    "",
    "\ufffd",
]


def test_tokens_are_text_whatever_they_hold(page: Page, replay: Locator) -> None:
    """A dialog, a request for x or an error would fail the test at its end."""
    trace = trace_of("k4")
    trace["vocabulary"] = {token: HOSTILE[i % len(HOSTILE)] for i, token in enumerate(trace["vocabulary"])}
    show(page, trace, 1)
    replay.locator(".rs-replay").focus()
    for step in page.evaluate(STEPS, trace)[1]:
        assert words(replay, ".rs-sentence") == [step["sentence"]]
        page.keyboard.press("ArrowRight")
    assert replay.locator("img, b, script:not([type])").count() == 0
    shown = "".join(words(replay, ".rs-node title"))
    assert "<script>alert(1)</script>" in shown
    assert "\u202e" not in shown
    assert "\\u202eback" in shown
    assert any(f"<{token}> (id {token})" in shown for token in trace["vocabulary"])


def test_spaces_can_be_seen(page: Page, replay: Locator) -> None:
    trace = trace_of("k4")
    trace["vocabulary"] = dict.fromkeys(trace["vocabulary"], " \n\t")
    show(page, trace, 1)
    assert words(replay, ".rs-token")[0] == "␣↵⇥"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 3}, "its trace has version 3, this page reads 2"),
        ({"rounds": []}, "it has no round of request 0"),
        ({"rounds": [{"number": 0, "requests": [{"request": 0}]}]}, "This replay cannot be shown: "),
        ("{", "This replay cannot be shown: "),
    ],
)
def test_what_is_no_trace_is_said_in_its_place(page: Page, replay: Locator, change: Any, said: str) -> None:
    show(page, change if isinstance(change, str) else trace_of("k1") | change, 0)
    expect(replay.locator(".rs-broken")).to_contain_text(said)
    assert replay.locator(".rs-replay").count() == 0
