"""`refspec serve-demo`: on a screen of any size, as lines, as JSON, and how it ends."""

from __future__ import annotations

import os
import pty
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from itertools import islice
from typing import Any

import pytest
import typer
from builders import scripted_engine, text_logits
from rich.cells import cell_len
from rich.console import Console
from test_cli import run
from test_cli_trace import Terminal

from refspec import Engine, SamplingParams, SpecConfig
from refspec.cli import serve_demo
from refspec.cli.main import app
from refspec.cli.serve_demo import PROMPTS, input_has_ended
from refspec.cli.serve_run import Run, closing_lines
from refspec.cli.serve_view import ServeView, describe, label
from refspec.engine import compare
from refspec.engine.watch import Admitted, Arrived, Committed, Evicted, Finished, Page, Read, Retracted, Waits, Watch

FEW = ["def f(x):", "def f(y):", "class A:"]
QUICK = [*FEW, "--max-new-tokens", "6", "--kv-slots", "48", "--chunk-size", "4"]


@pytest.fixture(scope="module")
def moments() -> list[ServeView]:
    """Every step of a run of the built-in prompts."""
    return list(moments_of(kv_slots=352))


def moments_of(**settings: Any) -> Iterator[ServeView]:
    spec = SpecConfig(page_size=settings.get("page_size", 1))
    engine = Engine(spec=spec, max_running=6, prefix_cache=True, chunk_size=48, **settings)
    run_ = Run(Watch(engine), list(PROMPTS), SamplingParams(max_new_tokens=24), every=3)
    return (run_.view(fills_screen=True) for _ in run_.steps())


def drawn(view: ServeView, width: int, height: int, encoding: str = "utf-8", **settings: Any) -> list[str]:
    raw = BytesIO()
    file = TextIOWrapper(raw, encoding=encoding, newline="\n")
    Console(file=file, width=width, height=height, legacy_windows=False, **settings).print(view, end="")
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


# --- the screen -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(10, 5), (40, 24), (80, 24), (120, 40), (200, 60)])
def test_it_fits_whatever_the_size(width: int, height: int, moments: list[ServeView]) -> None:
    for view in moments[::3]:
        lines = drawn(view, width, height)
        assert all(cell_len(line) <= width for line in lines)
        assert len(lines) <= height - 1  # the last line is for the keys
        if (width, height) == (80, 24):
            assert [line for line in lines if line.startswith("J ")] or len(view.now.requests) < 10


def test_whatever_the_run_holds(moments: list[ServeView]) -> None:
    """The defaults show all that there is to see."""
    told = " ".join(line for _, line in moments[-1].news)
    for words in ("found in the cache", "is retracted", "admitted again", "gives up", "waits", "to go", "ends (l"):
        assert words in told
    states = {state.state for view in moments for state in view.now.requests}
    assert states == {"waiting", "reading", "running", "done"}


def test_the_map_has_a_mark_for_each_slot(moments: list[ServeView]) -> None:
    for view in moments:
        lines = drawn(view, 80, 24)
        marks = "".join(line.split()[1] for line in lines if re.match(r" *\d+ \S+ *$", line))
        assert len(marks) == 352
        assert marks.count("·") == view.now.free_slots
        assert sum(mark.isupper() for mark in marks) == view.now.held_slots
        assert sum(mark.islower() or mark.isdigit() for mark in marks) == view.now.read_slots
        for state in view.now.requests:
            holds = label(state.number) in marks or label(state.number).lower() in marks
            assert not holds or state.state in ("reading", "running")


@pytest.mark.parametrize(("kv_slots", "page_size", "words"), [(352, 16, "a page of 16"), (4096, 1, "most of 12 slots")])
def test_the_map_of_pages_and_of_a_large_pool(kv_slots: int, page_size: int, words: str) -> None:
    view = next(islice(moments_of(kv_slots=kv_slots, page_size=page_size), 8, None))
    lines = drawn(view, 80, 24)
    assert any(words in line for line in lines)
    marks = "".join(line.split()[1] for line in lines if re.match(r" *\d+ \S+ *$", line))
    together = -(-kv_slots // page_size // len(marks))
    assert len(marks) == -(-kv_slots // page_size // together)


def test_the_words_are_those_of_the_output(moments: list[ServeView]) -> None:
    view = next(view for view in moments if sum(len(state.output_ids) > 8 for state in view.now.requests) > 2)
    lines = drawn(view, 120, 40)
    for state in view.now.requests:
        [line] = [line for line in lines if line.startswith(f"{label(state.number)} ")]
        assert f" {len(state.output_ids)} " in line
        end = " ".join(view.decode(state.output_ids).split())[-20:]
        assert line.rstrip().endswith(end)


def test_no_meaning_by_colour_alone_and_ascii(moments: list[ServeView]) -> None:
    view = moments[20]
    plain = drawn(view, 80, 24)
    coloured = drawn(view, 80, 24, force_terminal=True, color_system="standard")
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in coloured] == plain
    assert "\x1b[" in "".join(coloured)
    ascii_only = drawn(view, 80, 24, encoding="ascii")
    assert all(line.isascii() for line in ascii_only)
    assert len(ascii_only) == len(plain)


def test_more_requests_than_lines() -> None:
    engine = scripted_engine(text_logits([1] * 99, 5), 5, None, max_running=2)
    watch = Watch(engine)
    for budget in (1, 1, 1, *[9] * 37):
        engine.add_request([1, 2], SamplingParams(max_new_tokens=budget))
    for _ in range(3):
        watch.step()
    lines = drawn(ServeView(watch.snapshot(), [], engine.decode, fills_screen=True), 80, 20)
    assert len(lines) <= 19
    assert not [line for line in lines if line.startswith("A ")]
    assert [line for line in lines if line.startswith("D ")]
    assert any(re.search(r"3 more done, \d+ more waiting or running", line) for line in lines)
    assert [label(number) for number in (0, 25, 26, 53)] == ["A", "Z", "A2", "B3"]


def test_every_event_has_its_words() -> None:
    assert [
        describe(event)
        for event in (
            Arrived(1, 0, 1),
            Admitted(1, 1, 0, 5, again=False),
            Admitted(1, 1, 4, 1, again=True),
            Read(1, 2, 3, 2, again=False),
            Read(1, 2, 1, 0, again=False),
            Committed(1, 0, 1, in_round=False),
            Committed(1, 0, 4, in_round=True),
            Retracted(1, 3, 1, 7),
            Evicted(1, 9),
            Evicted(1, 1, (0, 2)),
            Waits(1, 3, 20, 19, 0),
            Waits(1, 3, 20, 19, 2),
            Finished(1, 27, "stop", 9, 1),
        )
    ] == [
        "A arrives, with a prompt of 1 token",
        "B is admitted: 5 tokens to read",
        "B is admitted again: 4 found in the cache, 1 token to read",
        "C reads 3 tokens, 2 to go",
        "C reads 1 token, the last",
        "A gets 1 token, its first",
        "A gets 4 tokens",
        "D is retracted, with 7 output tokens, and gives back 1 slot of its own",
        "the prefix cache gives up 9 slots for a round",
        "the prefix cache gives up 1 slot for A, C to read",
        "D waits: it and a round need 20 slots, 19 free or evictable",
        "D waits, 2 behind it: it and a round need 20 slots, 19 free or evictable",
        "B2 ends (stop): 9 tokens in 1 round",
    ]


def test_marks_of_many_readers(moments: list[ServeView]) -> None:
    now = replace(moments[0].now, pages=[Page(cached=True, readers=tuple(range(n))) for n in (1, 2, 9, 10)])
    lines = drawn(ServeView(now, [], str), 80, 24)
    assert any(line.split() == ["1", "a29+"] for line in lines)


# --- lines and JSON -------------------------------------------------------------------------------------------------


def test_lines_where_there_is_no_terminal() -> None:
    shown = run("serve-demo", *QUICK)
    assert shown.status == 0
    assert shown.err == ""
    assert "\x1b" not in shown.out
    assert all(len(line.rstrip()) <= 80 for line in shown.out.splitlines())
    tokens = len(Engine().encode(FEW[0]))
    first = f"   1 A arrives, with a prompt of {tokens} tokens\n   1 A is admitted: {tokens} tokens to read\n"
    assert shown.out.startswith(first)
    assert shown.out.count(" ends (") == len(FEW)
    told = " ".join(shown.out.split())
    assert told.endswith("All outputs are, token by token, what each prompt gives alone.")
    assert "token by token" not in run("serve-demo", *QUICK, "--no-verify").out


def test_json_is_one_document_and_adds_up() -> None:
    printed = run("serve-demo", "--max-new-tokens", "24", "--json").json()
    assert list(printed) == ["config", "events", "requests", "summary", "notes"]
    summary, requests, events = printed["summary"], printed["requests"], printed["events"]
    assert summary["ok"]
    assert summary["same_outputs"] == summary["requests"] == len(requests) == len(PROMPTS)
    assert summary["tokens"] == sum(len(request["token_ids"]) for request in requests)
    assert summary["tokens_in_rounds"] == summary["tokens"] - len(requests)
    for i, request in enumerate(requests):
        mine = [event for event in events if event.get("request") == i]
        assert mine[0]["event"] == "arrived"
        assert mine[-1]["event"] == "finished"
        assert request["retractions"] == sum(event["event"] == "retracted" for event in mine)
        assert request["read_tokens"] == sum(event["tokens"] for event in mine if event["event"] == "read")
        assert len(request["token_ids"]) == sum(event["tokens"] for event in mine if event["event"] == "committed")
    assert summary["retractions"] == sum(request["retractions"] for request in requests) > 0
    found = summary["prompt_tokens_found"] + summary["tokens_found_again"]
    assert found == sum(request["found_tokens"] for request in requests)
    # What was read for the first time is what was not found, but for prompts that were cut short by a retraction.
    read = sum(request["read_tokens"] for request in requests) - summary["tokens_read_again"]
    assert read == summary["prompt_tokens"] - summary["prompt_tokens_found"]
    told = " ".join(closing_lines(summary, [request["name"] for request in requests], 352))
    assert re.search(r"\d were retracted, \w+( times)? in all: to go on where they stood, \d+ tokens had to be", told)
    assert re.search(r"Of \d+ prompt tokens, \d+ were in the prefix cache", told)
    assert told.endswith("All outputs are, token by token, what each prompt gives alone.")


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    class Watched(Engine):
        def __init__(self, **settings: Any) -> None:
            given.append(settings)
            super().__init__(**settings)

    monkeypatch.setattr("refspec.engine.engine.Engine", Watched)
    options = {
        "algorithm": "eagle",
        "topk": 2,
        "steps": 2,
        "draft_tokens": 5,
        "max_new_tokens": 7,
        "temperature": 0.5,
        "seed": 11,
        "dtype": "float64",
        "kv_slots": 96,
        "page_size": 4,
        "chunk_size": 9,
        "retraction": "largest",
        "max_running": 2,
        "every": 2,
    }
    # With these prompts and options not told by the config:
    others = {"prompt", "prompt_file", "prefix_cache", "step", "delay", "verify", "as_json"}
    known = {option.name for option in typer.main.get_command(app).commands["serve-demo"].params}  # type: ignore[attr-defined]
    assert known - {"help"} == {*options, *others}, "an option that this test does not know"
    words = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    printed = run(
        "serve-demo", *FEW, "--prompt-file", "-", "--no-prefix-cache", "--no-verify", "--json", *words, stdin="x = 1\n"
    ).json()
    names = {"steps": "num_steps", "draft_tokens": "num_draft_tokens"}
    assert printed["config"] == {
        **{names.get(name, name): value for name, value in options.items()},
        "prefix_cache": False,
        "prompts": [*FEW, "x = 1"],
    }
    engine_options = ("kv_slots", "page_size", "chunk_size", "retraction", "max_running", "dtype")
    assert given == [
        {
            "spec": SpecConfig(topk=2, num_steps=2, num_draft_tokens=5, page_size=4),
            "prefix_cache": False,
            **{name: options[name] for name in engine_options},
        }
    ]
    assert printed["summary"]["compared"] is False
    assert printed["summary"]["same_outputs"] is None
    arrivals = [event["step"] for event in printed["events"] if event["event"] == "arrived"]
    assert arrivals == [1, 3, 5, 7]
    for request in printed["requests"]:
        [alone] = Engine(spec=SpecConfig(topk=2, num_steps=2, num_draft_tokens=5), dtype="float64").generate(
            [[*FEW, "x = 1"]["ABCD".index(request["name"])]], SamplingParams(7, temperature=0.5, seed=11)
        )
        assert request["token_ids"] == alone.token_ids


def test_plain_decoding_and_all_at_once() -> None:
    printed = run("serve-demo", *QUICK, "--algorithm", "none", "--every", "0", "--json").json()
    assert printed["config"]["topk"] is None
    assert printed["summary"]["accept_length"] == 1
    assert printed["summary"]["ok"]
    assert [event["step"] for event in printed["events"] if event["event"] == "arrived"] == [1, 1, 1]


def test_nobody_waits_for_one_that_is_late() -> None:
    printed = run("serve-demo", *QUICK, "--every", "1000", "--json").json()
    assert printed["summary"]["steps"] < 40
    told = closing_lines(printed["summary"], ["A", "B", "C"], 48)
    assert told[0].endswith("; the first of each output came with its prompt.")
    assert told[1] == "Nobody was retracted: there was room for all."
    told = closing_lines({**printed["summary"], "waited_requests": 2}, ["A", "B", "C"], 48)
    assert told[1] == "Nobody was retracted: 2 of 3 had to wait before they began, but none after that."


# --- what is compared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gap", "options", "status", "words"),
    [
        (1e-6, [], 0, "rounding can do that"),
        (0.5, [], 1, "that is a fault, please report it"),
        (1e-6, ["--temperature", "1"], 1, "--dtype float64 does"),
    ],
)
def test_a_difference_is_named(
    gap: float, options: list[str], status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare.Difference(index=3, gap=gap, gap_limit=1e-4, plain_token=1, spec_token=2)
    monkeypatch.setattr("refspec.cli.serve_run.first_difference", lambda *_: found)
    shown = run("serve-demo", *QUICK, *options)
    assert shown.status == status
    told = " ".join(shown.out.split())
    assert words in told
    assert "A leaves the output that it gives alone at token 3" in told
    assert "0 of 3 outputs are, token by token" in told


def test_a_wrong_token_is_found() -> None:
    """The comparison itself, with an output that is really another one."""
    run_ = Run(Watch(Engine(spec=SpecConfig(), kv_slots=64)), FEW, SamplingParams(max_new_tokens=6), every=1)
    for _ in run_.steps():
        pass
    assert run_.differences() == {}
    run_.requests[1].output_ids[4] ^= 1
    run_.requests[2].finish_reason = "stop"
    found = run_.differences()
    assert {i: verdict for i, (_, verdict) in found.items()} == {1: "fault", 2: "fault"}
    assert [difference and difference.index for difference, _ in found.values()] == [4, None]
    lines = closing_lines(run_.summary(found), ["A", "B", "C"], 64)
    assert "C ended for another reason than alone: that is a fault, please report it." in lines


def test_outputs_that_the_pool_cut_short() -> None:
    shown = run("serve-demo", "def f(x):", "--kv-slots", "40", "--max-new-tokens", "60")
    assert shown.status == 0
    told = " ".join(shown.out.split())
    assert "1 output ended where the whole pool was too small for it: raise --kv-slots." in told
    assert "Nobody was retracted. 1 output" in told
    assert "All outputs are" in told


# --- how it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "status", "complaint"),
    [
        ("--page-size 5", 2, "--page-size is 5, which does not divide the pool of --kv-slots = 352"),
        ("--topk 0", 2, "--topk must be at least 1, got 0"),
        ("--temperature -1", 2, "--temperature must be at least 0"),
        ("--kv-slots 0", 2, "--kv-slots"),
        ("--retraction oldest", 2, "'oldest' is not one of: newest, largest, least_output"),
        ("--every -1", 2, "--every"),
        ("--delay nan", 2, "--delay"),
        ("--algorithm none --topk 2", 2, "--topk with --algorithm none"),
        ("--seed 1", 2, "--seed without --temperature"),
        ("--step --json", 2, "leave one of them out"),
        ("--step", 2, "no terminal to press them on"),
        ("--kv-slots 100", 1, "prompt 0 (A) has 118 tokens, and needs 134 KV slots"),
        ("--prompt-file no/such/file", 1, "no/such/file"),
    ],
)
def test_what_cannot_be(options: str, status: int, complaint: str) -> None:
    refused = run("serve-demo", *options.split())
    assert (refused.status, refused.out) == (status, "")
    assert refused.err.startswith("refspec: ")
    assert complaint in refused.err
    assert refused.err.count("\n") == 1


@pytest.fixture
def open_terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_(*args: str, **settings: Any) -> Terminal:
        opened.append(Terminal("serve-demo", *args, **settings))
        return opened[-1]

    yield open_
    for terminal in opened:
        terminal.close()


def test_by_key_on_a_terminal(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("--step", "--max-new-tokens", "6", *FEW, "--chunk-size", "2")
    screen = terminal.wait_for("step 1 ")
    assert len(screen) == 24
    assert all(cell_len(line) <= 80 for line in screen)
    assert screen[-1].rstrip() == "space next step  g go by itself  q to the end"
    terminal.send(" ")
    terminal.wait_for("step 2 ")
    terminal.send("b?")  # keys that mean nothing here
    terminal.resize((40, 120))
    assert len(terminal.wait_for("step 2 ")) == 40
    terminal.send("g")
    assert "space stop  q to the end" in terminal.wait_for("step 4 ")[-1]
    terminal.send(" ")
    terminal.wait_for("space next step")
    terminal.send("q")
    assert terminal.end() == 0
    after = terminal.output[terminal.output.rindex("\x1b[?1049l") :]
    assert "All outputs are, token by token, what each prompt gives alone." in " ".join(after.split())


def test_to_its_end_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no key is pressed, on a screen that only remembers what it is to show."""
    shown: list[ServeView] = []

    class Remembering:
        def __init__(self, console: Console) -> None: ...

        def __enter__(self) -> Remembering:
            return self

        def __exit__(self, *_: object) -> None: ...

        def show(self, view: ServeView, top: int, keys: str) -> None:
            shown.append(view)
            assert "space stop" in keys

        def key_within(self, seconds: float) -> None:
            assert seconds == 0.25

    monkeypatch.setattr(serve_demo, "has_screen", lambda console: True)
    monkeypatch.setattr(serve_demo, "Screen", Remembering)
    ended = run("serve-demo", *QUICK, "--delay", "0.25")
    assert ended.status == 0
    assert [view.now.step for view in shown] == list(range(1, len(shown) + 1))
    assert {state.state for state in shown[-1].now.requests} == {"done"}
    assert "3 requests shared 48 slots" in " ".join(ended.out.split())
    assert " arrives" not in ended.out.splitlines()[0]  # no line for each event


def test_a_terminal_whose_input_has_ended() -> None:
    master, slave = pty.openpty()
    try:
        assert not input_has_ended(slave)
        os.write(master, b"typed ahead\n")
        assert not input_has_ended(slave)
        os.write(master, b"and then\n\x04")
        assert input_has_ended(slave)
    finally:
        os.close(master)
        os.close(slave)


def test_ctrl_c_gives_the_terminal_back(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("--delay", "0.3")
    terminal.wait_for("step 2 ")
    terminal.program.send_signal(signal.SIGINT)
    assert terminal.end() == 130
    assert terminal.output.count("refspec: interrupted") == 1
    assert "Traceback" not in terminal.output
