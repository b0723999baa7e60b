"""The full-screen explorer, driven by keys and clicks on terminals of several sizes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.text import Text
from small_history import FOLDER, Step, make_history
from textual.pilot import Pilot
from textual.widgets import DataTable, Static
from typer.testing import CliRunner

from refspec.cli.history.commit_view import read
from refspec.cli.history.explorer import BAR, Explorer, _patch, matches
from refspec.cli.main import app
from refspec.history import catalogue
from refspec.history.clone import Clone
from refspec.history.file_life import lives_of_files
from refspec.history.sources import Source

CATALOGUE = Source(None, "asked for")
COMMITS = 40  # of the catalogue; all of them take seconds to lay out
AUGUST = sum(commit.author_date.startswith("2026-08") for commit in catalogue.commits()[-COMMITS:])
WORKER = f"{catalogue.DIRECTORY}/eagle_worker_v2.py"
HOSTILE = "[bold]not markup[/bold] \x1b[31mred\x1b[0m \x07 (#7)"
Play = Callable[[Pilot[None], Explorer], Awaitable[None]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("explorer") / "small"
    steps = [
        Step("The folder (#1)", {f"{FOLDER}/spec_info.py": "a = 1\n", "README.md": "x\n"}, body="why it\nis there"),
        Step("Elsewhere", {"README.md": "y\n"}),
        Step(HOSTILE, {f"{FOLDER}/spec_info.py": "a = 2\n", f"{FOLDER}/d x.py": "\x1b[31mb\n" * 3000}),
    ]
    make_history(folder, steps)
    return Source(Clone(folder), "made for this test")


def play(source: Source, script: Play, size: tuple[int, int] = (80, 24)) -> None:
    async def run() -> None:
        explorer = Explorer(source, read(source)[-COMMITS:])
        async with explorer.run_test(size=size) as pilot:
            await pilot.pause()
            await script(pilot, explorer)

    asyncio.run(run())


async def settled(pilot: Pilot[None], explorer: Explorer) -> str:
    """What the pane says once the clone has answered."""
    await pilot.pause()
    await explorer.workers.wait_for_complete()
    await pilot.pause()
    said = explorer.query_one("#text", Static).content
    assert isinstance(said, Text)
    return said.plain


def titles(explorer: Explorer) -> list[str]:
    table = explorer.query_one("#commits-list", DataTable)
    return [table.get_row_at(row)[-1].plain for row in range(table.row_count)]


def test_lists_search_and_mouse_without_a_clone() -> None:
    async def script(pilot: Pilot[None], explorer: Explorer) -> None:
        assert catalogue.commits()[-1].hash in await settled(pilot, explorer)
        await pilot.press("d")
        assert "The diff needs a clone of SGLang" in await settled(pilot, explorer)
        await pilot.click("#commits-list", offset=(4, 3))
        assert catalogue.commits()[-3].subject in await settled(pilot, explorer), "the diff is in the facts' place"
        await pilot.press("d")
        assert catalogue.commits()[-3].hash in await settled(pilot, explorer)

        await pilot.click("#--content-tab-story")
        await pilot.press("down")
        second = catalogue.story()[1]
        assert (await settled(pilot, explorer)).startswith(f"{second.label}. {second.subject}")
        await pilot.press("4")
        assert (await settled(pilot, explorer)).startswith(catalogue.releases()[-1].version)

        await pilot.press("slash", *"#35412")
        assert "(#35412)" in await settled(pilot, explorer)
        assert len(titles(explorer)) == 1
        await pilot.press("space", "x", "x")
        assert await settled(pilot, explorer) == "Nothing here matches."
        await pilot.press("escape")
        await pilot.pause()
        assert len(titles(explorer)) == COMMITS

        await pilot.press("5")
        assert (await settled(pilot, explorer)).startswith("2026-08\n")
        table = explorer.query_one("#months-list", DataTable)
        assert [cell.plain.strip() for cell in table.get_row_at(0)][:2] == ["2026-08", str(AUGUST)]
        bars = [table.get_row_at(row)[-1].plain for row in range(table.row_count)]
        assert max(map(len, bars)) == BAR
        await pilot.press("enter")
        await pilot.pause()
        assert titles(explorer) == [commit.subject for commit in catalogue.commits()[: -AUGUST - 1 : -1]]

        await pilot.press("2")
        await pilot.pause()
        key, life = next((key, life) for key, life in explorer.files.items() if life.paths[-1] == WORKER)
        table = explorer.query_one("#files-list", DataTable)
        table.move_cursor(row=table.get_row_index(key))
        assert f"{len(life.events)} commits; Enter lists them" in await settled(pilot, explorer)
        await pilot.press("enter")
        await pilot.pause()
        assert titles(explorer) == [event.subject for event in reversed(life.events)]

        await pilot.press("tab")
        assert explorer.focused is explorer.query_one("#pane")
        await pilot.press("tab")
        assert explorer.focused is explorer.query_one("#commits-list")

    play(CATALOGUE, script)


@pytest.mark.parametrize(("size", "side_by_side"), [((80, 24), False), ((140, 40), True), ((40, 12), False)])
def test_list_and_text_have_room(small: Source, size: tuple[int, int], side_by_side: bool) -> None:
    async def script(pilot: Pilot[None], explorer: Explorer) -> None:
        pane, front = explorer.query_one("#pane").region, explorer.query_one("#commits-list").region
        assert (pane.x > 0) == side_by_side
        assert pane.width >= min(size[0], 60)
        assert (front.height, pane.height) >= ((2, 4) if size[1] < 24 else (8, 10))
        keys = explorer.query("FooterKey")
        assert size[0] < 80 or max(key.region.right for key in keys) <= size[0]
        assert len(keys) == 9
        await pilot.press("q")
        assert not explorer.is_running

    play(small, script, size)


def test_messages_and_diffs_come_from_the_clone(small: Source) -> None:
    """Nothing of them is markup or reaches the terminal as a control character; a long diff is cut, and says so. A
    commit of the story that the clone lacks is told, and the rest stays.
    """

    async def script(pilot: Pilot[None], explorer: Explorer) -> None:
        assert titles(explorer)[0] == r"[bold]not markup[/bold] \x1b[31mred\x1b[0m \x07 (#7)"
        assert "[bold]not markup[/bold]" in await settled(pilot, explorer)
        await pilot.press("d")
        said = await settled(pilot, explorer)
        assert r"+\x1b[31mb" in said
        assert "more lines: refspec history show prints them all" in said
        assert "\x1b" not in said
        await pilot.press("down")
        said = await settled(pilot, explorer)
        assert "+a = 1" in said
        assert "README.md" not in said, "of the folder alone"
        await pilot.press("3")
        said = await settled(pilot, explorer)
        assert said.startswith("1. Clean up wrapper")
        assert "this clone lacks the revision 3815b23ccb" in said
        await pilot.press("1", "d")
        assert "is there" in await settled(pilot, explorer)

    play(small, script)


def test_words_match_titles_files_numbers_days_and_hashes() -> None:
    commit = next(commit for commit in catalogue.commits() if commit.pr == 26997)
    for words in ("RELAND spec", "#26997", "2026-06-03", "ac99794", "eagle_worker_v2.py tree", "no.py|#26997|", ""):
        assert matches(commit, words), words
    for words in ("reland nothing", "#2699", "2026-05", "c99794e"):
        assert not matches(commit, words), words


def test_a_rename_goes_on_with_the_file() -> None:
    lives = {
        life.paths[-1].removeprefix(f"{catalogue.DIRECTORY}/"): life for life in lives_of_files(catalogue.commits())
    }
    assert "ngram_utils.py" not in lives
    life = lives["ngram_info.py"]
    assert [path.rsplit("/", 1)[-1] for path in life.paths] == ["lookahead_utils.py", "ngram_utils.py", "ngram_info.py"]
    assert [event.what for event in life.events if event.old_path] == ["renamed", "renamed"]
    assert matches(catalogue.commits_by_hash()[life.events[0].hash], "ngram_info.py|lookahead_utils.py")


def test_a_deleted_line_is_no_head_of_a_file() -> None:
    told = _patch("diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n--- a comment\n+more\n")
    styles = {told.plain[span.start : span.end]: str(span.style) for span in told.spans}
    assert (styles["--- a/x"], styles["--- a comment"], styles["+more"]) == ("bold", "red", "green")


def test_not_a_terminal(small: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFSPEC_SGLANG", str(small.clone.folder))  # type: ignore[union-attr]
    done = CliRunner().invoke(app, ["history", "explore"])
    assert done.exit_code == 1
    assert "explore needs a terminal" in done.output
    done = CliRunner().invoke(app, ["history", "explore", "--json"])
    document = json.loads(done.output)
    assert [commit["pr"] for commit in document["commits"]] == [7, 1]
    assert len(document["story"]) == 31
    assert Path(document["clone"]) == small.clone.folder  # type: ignore[union-attr]
