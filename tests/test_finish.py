"""When a request ends, token by token: a stop before the budget, the budget before the context."""

from __future__ import annotations

import pytest
from builders import tokenizer_of

from refspec import SamplingParams
from refspec.requests.finish import append_tokens, finish_reason, matched_stop
from refspec.requests.output_text import OutputText
from refspec.requests.request import Request

STOP = 77


def request_of(budget: int = 100, room: int = 100, output: tuple[int, ...] = (), prompt_len: int = 3) -> Request:
    """room: output tokens that the context has place for."""
    return Request(
        index=0,
        prompt_ids=[1] * prompt_len,
        params=SamplingParams(max_new_tokens=budget),
        stop_token_ids=frozenset({STOP}),
        max_total_len=prompt_len + room,
        output_ids=list(output),
    )


def test_FIN_01_stop_in_a_block_that_also_runs_past_the_budget() -> None:
    request = request_of(budget=6)
    kept = append_tokens(request, [4, 9, STOP, 6, 6, 2, 8])
    assert (kept, request.output_ids, request.finish_reason) == (3, [4, 9, STOP], "stop")


@pytest.mark.parametrize("stop_at", range(8))
@pytest.mark.parametrize("budget", range(1, 9))
@pytest.mark.parametrize("room", [1, 4, 7, 8])
@pytest.mark.parametrize("already", [0, 2])
def test_FIN_01_wherever_stop_budget_and_context_meet(stop_at: int, budget: int, room: int, already: int) -> None:
    """The first of them ends it; where two meet at one token, the stop gives the reason."""
    block = [6] * 7
    if stop_at < 7:
        block[stop_at] = STOP
    request = request_of(budget + already, room + already, output=(5,) * already)
    kept = append_tokens(request, block)
    at_most = min(budget, room, 7)
    assert kept == min(at_most, stop_at + 1)
    assert request.output_ids == [5] * already + block[:kept]
    if stop_at < at_most:
        assert request.finish_reason == "stop"
    else:
        assert request.finish_reason == ("length" if min(budget, room) <= 7 else None)


def test_block_without_an_end_is_kept_whole() -> None:
    request = request_of()
    assert append_tokens(request, [4, 9, 6]) == 3
    assert request.finish_reason is None


def test_nothing_is_read_behind_the_end() -> None:
    """The block may be worked out as it is read."""
    block = iter([4, STOP, 6])
    append_tokens(request_of(), block)
    assert list(block) == [6]


@pytest.mark.parametrize(
    ("output", "budget", "room", "reason"),
    [
        ((5,), 2, 9, None),
        ((5, 5), 2, 9, "length"),
        ((5, STOP), 2, 9, "stop"),
        ((STOP, 5), 3, 9, None),
        ((5, 5), 9, 3, None),
        ((5, 5, 5), 9, 3, "length"),
        ((5, 5, STOP), 9, 3, "stop"),
    ],
)
def test_only_the_newest_token_can_end_it(output: tuple[int, ...], budget: int, room: int, reason: str | None) -> None:
    assert finish_reason(request_of(budget, room, output)) == reason


# --- stop strings -------------------------------------------------------------------------------------------------

LETTERS = tokenizer_of([bytes([c]) for c in range(ord("a"), ord("z") + 1)])  # one character per token: a is 0


def letters(text: str) -> list[int]:
    return [ord(c) - ord("a") for c in text]


def with_stop(*stops: str, budget: int = 100, room: int = 100, include: bool = False) -> Request:
    request = request_of(budget, room)
    request.text = OutputText(LETTERS.decode, stops, include)
    return request


def text_of(request: Request) -> str:
    assert request.text is not None
    return request.text.take(last=True)


def test_FIN_01_stop_text_equal_to_the_text_of_the_token() -> None:
    """4 9 S 6 6 2 8 with a budget of 6, where S is no stop token, but its text is the stop string."""
    s = letters("s")[0]
    request = with_stop("s", budget=6)
    kept = append_tokens(request, [4, 9, s, 6, 6, 2, 8])
    assert (kept, request.output_ids, request.finish_reason) == (3, [4, 9, s], "stop")
    assert (text_of(request), matched_stop(request)) == ("ej", "s")


def test_FIN_01_stop_token_that_completes_a_stop_string() -> None:
    """Both hold at one token: the string is reported, and is not in the text."""
    s = letters("s")[0]
    request = with_stop("js", budget=3)
    request.stop_token_ids = frozenset({s})
    assert append_tokens(request, [4, 9, s, 6]) == 3
    assert (request.finish_reason, text_of(request), matched_stop(request)) == ("stop", "e", "js")


def test_a_stop_token_before_the_stop_string_is_complete() -> None:
    request = with_stop("sx")
    request.stop_token_ids = frozenset(letters("s"))
    assert append_tokens(request, letters("esx")) == 2
    assert (text_of(request), matched_stop(request)) == ("es", letters("s")[0])


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xab")])
@pytest.mark.parametrize("cut", range(8))
def test_FIN_03_stop_text_early_in_a_long_block(include: bool, text: str, cut: int) -> None:
    """x a b c d e f g, accepted at once or in two blocks: the third token ends it, and c..g are nowhere."""
    request = with_stop("ab", include=include)
    kept = append_tokens(request, letters("xabcdefg")[:cut])
    if request.finish_reason is None:
        kept += append_tokens(request, letters("xabcdefg")[cut:])
    assert (kept, request.output_ids, request.finish_reason) == (3, letters("xab"), "stop")
    assert text_of(request) == text


@pytest.mark.parametrize("budget", range(1, 9))
@pytest.mark.parametrize("room", [1, 2, 3, 4, 8])
def test_FIN_01_wherever_the_end_of_a_stop_string_meets_budget_and_context(budget: int, room: int) -> None:
    request = with_stop("bc", budget=budget, room=room)
    kept = append_tokens(request, letters("xabcdefg"))
    assert kept == min(budget, room, 4)
    assert request.finish_reason == ("stop" if kept == 4 else "length")
    assert text_of(request) == "xabc"[:kept].removesuffix("bc")
    assert matched_stop(request) == ("bc" if kept == 4 else None)


def test_nothing_is_read_behind_a_stop_string() -> None:
    block = iter(letters("abcd"))
    append_tokens(with_stop("b"), block)
    assert list(block) == letters("cd")
