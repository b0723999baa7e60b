"""Rounds on a terminal: what the view says, and the keys that step through it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from builders import agreeing_now_and_then, ragged_prompts, random_logits
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

import refspec
from refspec import Engine, SamplingParams, SpecConfig
from refspec.cli.main import app
from refspec.cli.render import ASCII, UNICODE, RoundView, probability, ranges, round_views, shortened
from refspec.cli.report import most_telling
from refspec.models.scripted import ScriptedModel
from refspec.trace import Output, Round, Trace

SOURCE = str(Path(refspec.__file__).parents[1])
VOCABULARY = {
    0: "\n",
    1: " ",
    2: " the",
    3: "'",
    4: "é",
    5: "漢字",
    6: "\ufffd",
    7: "[bold]",
    8: "\x1b[2J",
    9: "word" * 9,
}


def record(
    topk: int, steps: int, draft_tokens: int, prompts: int = 1, new_tokens: int = 30, page_size: int = 1
) -> Trace:
    """A run with scripted models whose draft is right now and then."""
    size = 24
    target = random_logits(size)
    draft = agreeing_now_and_then(target, random_logits(size, salt=1))
    spec = SpecConfig(topk=topk, num_steps=steps, num_draft_tokens=draft_tokens, page_size=page_size)
    engine = Engine(ScriptedModel(target, size), ScriptedModel(draft, size), spec)
    rounds: list[Round] = []
    texts = ragged_prompts(prompts, 5, size)
    done = engine.generate(texts, SamplingParams(new_tokens), rounds.append)
    return Trace(
        config={},
        vocabulary={token: VOCABULARY.get(token, chr(ord("a") + token)) for token in range(size)},
        rounds=rounds,
        outputs=[
            Output(prompt_ids=text, token_ids=g.token_ids, finish_reason=g.finish_reason, accept_lens=g.accept_lens)
            for text, g in zip(texts, done, strict=True)
        ],
    )


@pytest.fixture(scope="module")
def trace() -> Trace:
    return record(4, 3, 16)


@pytest.fixture(scope="module")
def file(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace.save(path := tmp_path_factory.mktemp("trace") / "t.json")
    return path


def drawn(view: RoundView, width: int = 80, encoding: str = "utf-8", **settings: object) -> str:
    output = TextIOWrapper(BytesIO(), encoding=encoding)
    Console(file=output, width=width, highlight=False, **settings).print(view)  # type: ignore[arg-type]
    output.seek(0)
    return output.read()


def all_views(trace: Trace) -> list[RoundView]:
    return [view for requests in round_views(trace) for view in requests]


def drawn_marks(view: RoundView, **settings: object) -> tuple[dict[int, str], int]:
    """The mark of each row but the root, and how many bonuses there are."""
    rows: dict[int, str] = {}
    bonuses = 0
    for line in drawn(view, **settings).splitlines():  # type: ignore[arg-type]
        if found := re.match(r"^[│├└─╴ |+`-]*?(?:\d+ )?([✓✗·~+x.]) +(\d+) +['\"<]", line):
            rows[int(found[2])] = found[1]
        bonuses += bool(re.match(r"^[│├└─╴ |+`-]*(?:\d+ )?[★*] +['\"<]", line))
    return rows, bonuses


# --- what the view says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topk", "steps", "draft_tokens"), [(4, 3, 16), (1, 5, 6), (8, 5, 64), (1, 40, 41), (2, 16, 30)]
)
def test_marks_tell_what_became_of_each_row(topk: int, steps: int, draft_tokens: int) -> None:
    accepted_in_all = 0
    for view in all_views(record(topk, steps, draft_tokens)):
        tree, path = view.tree, view.tree.accepted_rows
        rows, bonuses = drawn_marks(view)
        committed = len(tree.committed)
        expected = {}
        for row, parent in enumerate(tree.parents):
            if row in path[1:]:
                expected[row] = "✓" if path.index(row) <= committed else "~"
            elif row:
                expected[row] = "✗" if parent in path else "·"
        assert rows == expected
        assert bonuses == (committed == len(path))
        accepted_in_all += committed - bonuses
        assert drawn_marks(view, encoding="ascii") == (
            {row: {"✓": "+", "✗": "x", "·": ".", "~": "~"}[mark] for row, mark in rows.items()},
            bonuses,
        )
    assert accepted_in_all > 3


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize(
    ("topk", "steps", "draft_tokens"), [(4, 3, 16), (1, 40, 41), (8, 5, 64), (2, 16, 30), (1, 1, 2)]
)
def test_every_row_and_number_fits(width: int, topk: int, steps: int, draft_tokens: int) -> None:
    for view in all_views(record(topk, steps, draft_tokens, new_tokens=8)):
        lines = drawn(view, width).splitlines()
        assert all(cell_len(line) <= width for line in lines)
        rows, _ = drawn_marks(view, width=width)
        assert sorted(rows) == list(range(1, draft_tokens))
        with_odds = [line for line in lines if re.search(r"[01<]\.\d\d\d +[01<]\.\d\d\d", line)]
        assert len(with_odds) == draft_tokens - 1


def test_odds_are_those_of_the_trace(trace: Trace) -> None:
    view = all_views(trace)[0]
    tree = view.tree
    lines = drawn(view).splitlines()
    for row in range(1, 16):
        candidate = tree.candidates[tree.kept[row - 1]]
        before = tree.candidates[candidate.parent].score if candidate.parent >= 0 else 1.0
        [line] = [line for line in lines if re.match(rf"^[│├└─ ]*[✓✗·] +{row} +['\"<]", line)]
        assert f"{candidate.score / before:.3f} {probability(candidate.score):>5}" in line


def test_the_mask_is_the_trees(trace: Trace) -> None:
    view = all_views(trace)[0]
    for row, bits in enumerate(view.tree.tree_mask):
        assert f"{row:>3} {bits.replace('1', '█').replace('0', '·')}" in drawn(view)
        assert f"{row:>3} {bits.replace('1', '#').replace('0', '.')}" in drawn(view, encoding="ascii")


def test_a_mask_that_does_not_fit_is_left_out() -> None:
    [view, *_] = all_views(record(8, 5, 64, new_tokens=4))
    assert "0123456789" in drawn(view, 80)
    assert "0123456789" not in drawn(view, 60)


def test_slots_and_counts(trace: Trace) -> None:
    for view in all_views(trace):
        text = " ".join(drawn(view, 200).split())
        tree = view.tree
        assert "36 scored = 4 + 2·16, 15 kept" in text
        assert "12, until verify" in text
        assert "verify slots 16: " in text
        assert "taken: draft=12, verify=16" in text
        assert f"given back: draft=12, commit={16 - len(tree.kept_slots)}" in text
        assert f"{len(tree.kept_slots)} kept: {ranges(tree.kept_slots, UNICODE)}" in text
        assert f"{16 - len(tree.kept_slots)} not kept" in text
        assert f"draft={view.round.forwards['draft']}, target=1" in text


@pytest.mark.parametrize("page_size", [4, 16])
def test_slots_in_pages(page_size: int) -> None:
    """The draft's branches take whole pages, a page with a committed token stays, and kept rows move to the front."""
    views = all_views(record(4, 3, 16, page_size=page_size))
    moved = []
    for view in views:
        text, tree, round_ = " ".join(drawn(view, 200).split()), view.tree, view.round
        taken, returned = round_.slots_taken, round_.slots_returned
        assert f"taken: draft={taken['draft']}, " in text
        assert f"given back: draft={returned['draft']}" in text
        assert taken["draft"] == returned["draft"] >= 12
        assert taken["draft"] % page_size == 0
        begun = -tree.seq_len % page_size  # slots that the request has already
        assert (
            taken.get("verify", 0) - returned.get("commit", 0)
            == -(-max(0, len(tree.kept_slots) - begun) // page_size) * page_size  # pages with kept tokens
        )
        assert tree.kept_slots == tree.verify_slots[: len(tree.kept_slots)]
        moved.append(tree.accepted_rows[: len(tree.kept_slots)] != list(range(len(tree.kept_slots))))
        assert ("kept, moved to the front: " in text) == moved[-1]
    assert len(set(moved)) == 2
    assert any(view.round.slots_taken["draft"] > 12 for view in views)


def test_the_end_of_a_request_is_told() -> None:
    cut = [view for new in range(2, 9) for view in all_views(record(4, 3, 16, new_tokens=new)) if view.was_cut]
    assert cut
    for view in cut:
        committed, accepted = len(view.tree.committed), len(view.tree.accepted_rows)
        assert f"the request ended (length) at token {committed} of these {accepted}" in drawn(view)
        rows, bonuses = drawn_marks(view)
        assert list(rows.values()).count("~") == accepted - 1 - committed
        assert not bonuses
    views = round_views(record(4, 3, 16))
    assert not most_telling(views).was_cut
    longest = max(len(v.tree.accepted_rows) for requests in views for v in requests if not v.was_cut)
    assert len(most_telling(views).tree.accepted_rows) == longest


def test_why_the_bonus_was_no_draft() -> None:
    notes = set()
    for view in all_views(record(2, 2, 4, new_tokens=200)):
        if not view.was_cut:
            end = view.tree.accepted_rows[-1]
            drafted = [c for c in view.tree.candidates if c.parent == (view.tree.kept[end - 1] if end else -1)]
            if view.tree.positions[end] - view.tree.positions[0] == 2:
                note = "past the drafts"
            elif any(candidate.token == view.tree.committed[-1] for candidate in drafted):
                note = "not kept: "
            else:
                note = "not drafted"
            assert note in drawn(view)
            notes.add(note)
    assert len(notes) == 3


def test_no_meaning_by_colour_alone(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    view = all_views(trace)[0]
    coloured = drawn(view, force_terminal=True, color_system="truecolor")
    assert "\x1b[1;32m" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == drawn(view)
    monkeypatch.setenv("NO_COLOR", "1")
    bleak = drawn(view, force_terminal=True, color_system="truecolor")
    assert not re.search(r"\x1b\[[\d;]*3\dm", bleak)


def test_tokens_are_shown_whatever_they_hold(trace: Trace) -> None:
    for view in all_views(trace):
        for encoding in ("utf-8", "ascii"):
            text = drawn(view, encoding=encoding)
            assert "\x1b" not in text
            assert encoding == "utf-8" or text.isascii()
    view = all_views(trace)[0]
    shown = [view._shown(token, UNICODE) for token in VOCABULARY]
    assert shown == [
        "'\\n'",
        "'␣'",
        "'␣the'",
        '"\'"',
        "'é'",
        "'漢字'",
        "<6>",
        "'[bold]'",
        "'\\x1b[2J'",
        f"'{'word' * 9}'",
    ]
    assert view._shown(99, UNICODE) == "<99>"
    assert view._shown(4, ASCII) == "'\\xe9'"


@pytest.mark.parametrize(
    ("text", "width", "keep_end", "cut"),
    [
        ("abcdef", 6, False, "abcdef"),
        ("abcdef", 5, False, "abcd…"),
        ("abcdef", 5, True, "…cdef"),
        ("漢字漢字", 6, False, "漢字…"),
        ("漢字漢字", 6, True, "…漢字"),
        ("abc", 1, False, "…"),
        ("abc", 0, False, ""),
    ],
)
def test_shortened(text: str, width: int, keep_end: bool, cut: str) -> None:
    assert shortened(text, width, UNICODE, keep_end) == cut


# --- trace show -----------------------------------------------------------------------------------------------------


def show(*args: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["trace", "show", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


def test_all_rounds_where_there_is_no_terminal(file: Path, trace: Trace) -> None:
    status, out, err = show(file)
    assert (status, err) == (0, "")
    assert re.findall(r"^round (\d+) ", out, re.MULTILINE) == [str(r.number) for r in trace.rounds]


def test_one_round_one_request(tmp_path: Path) -> None:
    batch = record(2, 2, 4, prompts=3)
    batch.save(tmp_path / "t.json")
    _, out, _ = show(tmp_path / "t.json", "--round", "2")
    assert re.findall(r"^round (\d+) .* request (\d)", out, re.MULTILINE) == [("2", "0"), ("2", "1"), ("2", "2")]
    _, out, _ = show(tmp_path / "t.json", "--round", "2", "--request", "1")
    assert re.findall(r"^round (\d+) .* request (\d)", out, re.MULTILINE) == [("2", "1")]
    _, out, _ = show(tmp_path / "t.json", "--request", "1")
    assert len(re.findall(r"^round .* request 1", out, re.MULTILINE)) == len(batch.outputs[1].accept_lens)
    assert " request 0" not in out
    assert "for the whole batch" in out


def test_what_show_refuses(file: Path, trace: Trace, tmp_path: Path) -> None:
    last = trace.rounds[-1].number
    raw = json.loads(file.read_text())
    first = raw["rounds"][0]["requests"][0]
    other = tmp_path / "other.json"
    cases = [
        ((file, "--round", "999"), f"has no round 999, its rounds are 0 to {last}"),
        ((file, "--request", "1"), "has no request 1, its last is 0"),
        ((file, "--request", "-1"), "has no request -1"),
        ((other,), "No such file"),
    ]
    for args, words in cases:
        status, out, err = show(*args)
        assert (status, out) == (1, "")
        assert words in err
    spoilt = [
        ({**raw, "schema_version": 99}, "version 99"),
        ({**raw, "rounds": 3}, "rounds"),
        ({**raw, "outputs": []}, "contradicts itself in round 0, request 0"),
        ([], "is no trace"),
    ]
    for name, value in {
        "accepted_rows": [0, 99],
        "kept": [99] * 15,
        "parents": [-1] + [20] * 15,
        "committed": [],
        "draft_slots": [],
        "positions": [],
    }.items():
        rounds = [{**raw["rounds"][0], "requests": [{**first, name: value}]}]
        spoilt.append(({**raw, "rounds": rounds}, "contradicts itself in round 0, request 0"))
    for document, words in spoilt:
        other.write_text(json.dumps(document))
        status, out, err = show(other)
        assert (status, out) == (1, "")
        assert err.startswith("refspec: ")
        assert words in err
        assert err.count("\n") == 1


# --- keys -----------------------------------------------------------------------------------------------------------


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *args: str | Path, size: tuple[int, int] = (24, 80), **env: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(size)
        self.settings = termios.tcgetattr(self.slave)
        env = {**os.environ, "PYTHONPATH": SOURCE, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **env}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            env.pop(name, None)
        self.program = subprocess.Popen(
            [sys.executable, "-m", "refspec", *map(str, args)],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=env,
            start_new_session=True,
        )
        self.output = ""

    def resize(self, size: tuple[int, int]) -> None:
        termios.tcsetwinsize(self.slave, size)

    def wait_for(self, words: str) -> list[str]:
        """The lines of the first screen drawn from now on that holds the words."""
        seen = len(self.output)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            self._read()
            for screen in self.output[seen:].split("\x1b[H")[1:]:
                text = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", screen)
                if words in text and screen.endswith("\x1b[J"):
                    return text.split("\r\n")
        raise AssertionError(f"no {words!r} in {self.output[seen:]!r}")

    def send(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self) -> int:
        """Its exit status. The terminal must be as it was."""
        while self.program.poll() is None or select.select([self.master], [], [], 0.05)[0]:
            self._read()
        assert termios.tcgetattr(self.slave) == self.settings
        assert self.output.count("\x1b[?1049h") == self.output.count("\x1b[?1049l") > 0
        assert self.output.rindex("\x1b[?1049l") > self.output.rindex("\x1b[?1049h")
        assert self.output.rindex("\x1b[?25h") > self.output.rindex("\x1b[?25l")
        return self.program.returncode

    def _read(self) -> None:
        if select.select([self.master], [], [], 0.05)[0]:
            self.output += os.read(self.master, 1 << 16).decode(errors="replace")

    def close(self) -> None:
        self.program.kill()
        self.program.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def open_terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_(*args: str | Path, **settings: Any) -> Terminal:
        opened.append(Terminal(*args, **settings))
        return opened[-1]

    yield open_
    for terminal in opened:
        terminal.close()


def test_keys_step_through_the_rounds(file: Path, trace: Trace, open_terminal: Callable[..., Terminal]) -> None:
    last = trace.rounds[-1].number
    terminal = open_terminal("trace", "show", file)
    screen = terminal.wait_for("round 0 ")
    assert len(screen) == 24
    assert all(cell_len(line) <= 80 for line in screen)
    assert screen[-1].startswith(f"1/{last + 1}  space next  b back  g end  q quit")
    forward = [(" ", 1), ("\r", 2), ("\x1b[C", 3), ("\x1bOC", 4)]
    for keys, number in [*forward, ("b", 3), ("\x1b[D", 2), ("g", last), (" ", last), ("b", last - 1)]:
        terminal.send(keys)
        terminal.wait_for(f"round {number} ")
    for key in "bbb":
        terminal.send(key)
    terminal.send("?zä\x1b[1;5A")  # keys that mean nothing
    terminal.send("q")
    assert terminal.end() == 0


def test_keys_scroll(file: Path, open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("trace", "show", file, size=(12, 80))
    first = terminal.wait_for("round 0 ")
    terminal.send("\x1b[B")
    assert terminal.wait_for("below")[0] == first[1]
    terminal.send("\x1b[6~")
    assert terminal.wait_for("below")[0] not in first
    for _ in range(9):
        terminal.send("\x1b[6~")
    terminal.wait_for("(0 below)")
    terminal.send("k")
    terminal.wait_for("(1 below)")
    for _ in range(9):
        terminal.send("\x1b[5~")
    terminal.wait_for("round 0 ")
    terminal.resize((40, 100))
    assert len(terminal.wait_for("round 0 ")) == 40
    terminal.send("\x1b")
    assert terminal.end() == 0


def test_tab_goes_to_the_next_request(tmp_path: Path, open_terminal: Callable[..., Terminal]) -> None:
    record(2, 2, 4, prompts=2).save(tmp_path / "t.json")
    terminal = open_terminal("trace", "show", tmp_path / "t.json")
    terminal.wait_for("request 0")
    terminal.send("\t")
    assert "tab request 2/2" in terminal.wait_for("request 1")[-1]
    terminal.send(" ")
    assert terminal.wait_for("request 1")[0].startswith("round 1 ")
    terminal.send("\t")
    terminal.wait_for("request 0")
    terminal.send("q")
    assert terminal.end() == 0


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)], ids=str
)
def test_signals_leave_the_terminal_as_it_was(
    number: int, status: int, file: Path, open_terminal: Callable[..., Terminal]
) -> None:
    terminal = open_terminal("trace", "show", file)
    terminal.wait_for("round 0 ")
    terminal.program.send_signal(number)
    assert terminal.end() == status
    assert ("refspec: interrupted" in terminal.output) == (number == signal.SIGINT)
    assert "Traceback" not in terminal.output


def test_suspended_and_resumed(file: Path, open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("trace", "show", file)
    terminal.wait_for("round 0 ")
    terminal.program.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, terminal.program.pid, os.WSTOPPED | os.WNOWAIT)
    assert termios.tcgetattr(terminal.slave) == terminal.settings
    terminal.program.send_signal(signal.SIGCONT)
    terminal.wait_for("round 0 ")
    terminal.send(" ")
    terminal.wait_for("round 1 ")
    terminal.send("q")
    assert terminal.end() == 0


def test_one_round_is_printed_without_asking_for_keys(file: Path, open_terminal: Callable[..., Terminal]) -> None:
    for args, env in ((("--round", "1"), {}), ((), {"TERM": "dumb"})):
        terminal = open_terminal("trace", "show", file, *args, **env)
        while terminal.program.poll() is None:
            terminal._read()
        assert terminal.program.returncode == 0
        assert "\x1b[?1049h" not in terminal.output
        assert "round 1" in terminal.output
