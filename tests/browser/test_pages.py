"""The pages as a reader meets them: quiet, from one host, at home on a phone, and usable without a mouse."""

from __future__ import annotations

import pytest
from pairwise import pairwise
from playwright.sync_api import Page, expect

PAGES = {
    "home": "",
    "chapter": "chapters/01_one_round/",
    "notebook": "notebooks/01_one_round/",
    "glossary": "glossary/",
    "reference": "reference/spec/",
    "benchmarks": "benchmarks/",
}
PHONE, DESK = {"width": 360, "height": 740}, {"width": 1280, "height": 900}
COLOURS = ("fg", "muted", "target", "draft", "accept", "refuse", "bonus")


SCREENS = {"phone": PHONE, "desk": DESK}
SIGHTS = pairwise({"name": list(PAGES), "screen": list(SCREENS), "scheme": ["light", "dark"]})


@pytest.mark.parametrize(
    ("name", "context"),
    [(at["name"], {"viewport": SCREENS[at["screen"]], "color_scheme": at["scheme"]}) for at in SIGHTS],
    indirect=["context"],
    ids=["-".join(at.values()) for at in SIGHTS],
)
def test_page_is_quiet_and_fits(page: Page, address: str, name: str) -> None:
    """The fixture fails at errors and foreign requests. What is too wide scrolls inside itself."""
    response = page.goto(address + PAGES[name])
    assert response is not None
    assert response.ok
    expect(page.locator("h1")).to_have_count(1)
    page.mouse.wheel(0, 5000)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    assert page.evaluate("[...document.images].every((image) => image.alt)")


def test_code_of_100_characters_is_seen_whole(page: Page, address: str) -> None:
    page.goto(address + PAGES["chapter"])
    missing = """(code) => {
        const { paddingLeft, paddingRight } = getComputedStyle(code);
        const line = code.appendChild(document.createElement("span"));
        line.textContent = "m".repeat(100);
        return line.offsetWidth + parseFloat(paddingLeft) + parseFloat(paddingRight) - code.clientWidth;
    }"""
    assert page.locator(".highlight pre > code").first.evaluate(missing) <= 0


def test_what_is_wrong_in_a_page_is_noticed(page: Page, address: str, wrong: list[str]) -> None:
    """The watch on which all tests here rely."""
    page.goto(address)
    assert wrong == []
    page.evaluate("console.error('said by the page')")
    page.evaluate("setTimeout(() => { throw new Error('thrown by the page'); })")
    page.evaluate("fetch('http://localhost:9/elsewhere').catch(() => {})")
    page.evaluate("alert('shown by the page')")
    page.wait_for_timeout(200)
    said = "\n".join(wrong)
    for words in (
        "said by the page",
        "error: thrown by the page",
        "foreign request: http://localhost:9/elsewhere",
        "dialog: shown by the page",
    ):
        assert words in said
    wrong.clear()


def contrast(one: list[float], other: list[float]) -> float:
    """By WCAG 2, of two colours given as sRGB values of 0 to 255."""

    def luminance(colour: list[float]) -> float:
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    "context", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True, ids=["light", "dark"]
)
def test_colours_of_the_drawings_can_be_read(page: Page, address: str) -> None:
    page.goto(address)
    values = page.evaluate(
        """(names) => Object.fromEntries(names.map((name) => {
            const probe = document.body.appendChild(document.createElement("i"));
            probe.style.color = `var(--rs-${name})`;
            return [name, getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map(Number)];
        }))""",
        [*COLOURS, "bg"],
    )
    assert len({tuple(value) for value in values.values()}) == len(COLOURS) + 1
    assert {name for name in COLOURS if contrast(values[name], values["bg"]) < 4.5} == set()


@pytest.mark.parametrize("context", [{"color_scheme": "dark"}], indirect=True)
def test_palette_follows_the_system_and_can_be_switched_by_key(page: Page, address: str) -> None:
    page.goto(address)
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    assert page.evaluate(scheme) == "slate"
    page.get_by_title("Switch to the light palette").focus()
    page.keyboard.press("Enter")
    page.wait_for_function(f"{scheme} === 'default'")
    page.goto(address + PAGES["glossary"])
    assert page.evaluate(scheme) == "default"


def test_search_answers_by_key(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_load_state("networkidle")
    page.keyboard.press("/")
    page.keyboard.type("accept_token_num")
    result = page.locator(".md-search-result__link").first
    expect(result).to_be_visible()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: url != address)
    expect(page.locator("article")).to_contain_text("accept_token_num")


def test_answers_are_folded_and_open_by_key(page: Page, address: str) -> None:
    page.goto(address + PAGES["chapter"])
    question = page.locator("details.question").first
    assert question.get_attribute("open") is None
    question.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(question.locator("p").first).to_be_visible()


def test_first_tab_leads_past_the_navigation(page: Page, address: str) -> None:
    page.goto(address + PAGES["chapter"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className").split()[0] == "md-skip"
    page.keyboard.press("Enter")
    assert "#" in page.url


@pytest.mark.parametrize("context", [{"java_script_enabled": False}], indirect=True)
def test_without_javascript_the_replay_says_what_to_do(page: Page, address: str) -> None:
    page.goto(address + PAGES["chapter"])
    said = page.locator(".refspec-replay noscript code")
    expect(said).to_be_visible()
    assert (said.text_content() or "").startswith("refspec generate ")
