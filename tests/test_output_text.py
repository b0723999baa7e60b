"""The text of an output as it grows, and the stop strings in it, against decoding everything after each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from builders import byte_tokenizer, naive_stop, tokenizer_of, undecided_end
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from refspec.requests.output_text import LONG_WINDOW, OutputText, TextInPieces


def tokenizer_that_drops_the_first_space() -> Tokenizer:
    """Of the kind of LLaMA 2's: ids 0 to 255 are bytes, 256 to 261 are pieces, 261 is skipped when it is decoded."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁☃b", "c", "▁", "\ufffd", "<s>"]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def byte_tokenizer_with_a_special_token() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<s>"])
    assert tokenizer.token_to_id("<s>") == 256
    return tokenizer


TOKENIZERS: dict[str, tuple[Callable[[], Tokenizer], list[list[int]]]] = {
    # What ids may follow one another: whole characters, parts of them, and bytes that belong to none.
    "bytes": (
        byte_tokenizer_with_a_special_token,
        [[97], [32], [*"é".encode()], [*"🙂".encode()], [0xF0, 0x9F], [0xFF], [*b"\xef\xbf\xbd"], [256], [0xC3, 256]],
    ),
    "pieces": (tokenizer_that_drops_the_first_space, [[256], [257], [258], [259], [260], [261], [*"🙂".encode(), 258]]),
}


# --- pieces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_pieces_of_a_text_join_to_it(kind: str, data: st.DataObject) -> None:
    make, parts = TOKENIZERS[kind]
    ids = [token for part in data.draw(st.lists(st.sampled_from(parts), max_size=40)) for token in part]
    tokenizer, told = make(), ""
    text = TextInPieces(tokenizer.decode)
    for end, token in enumerate(ids, start=1):
        told += text.append(token)
        so_far = tokenizer.decode(ids[:end])
        assert so_far.startswith(told)
        assert so_far[len(told) :].strip("\ufffd") == ""  # only bytes that may become a character wait
    assert told + text.rest() == tokenizer.decode(ids)


STRADDLING = [b"\xf0\x9f\x99", b"\x82\xf0\x9f\x99", b"\x82", b"a"]  # after the first, the second again and again


@pytest.mark.parametrize(
    ("tokens", "pattern"),
    [
        ([b"a", b" b"], [0, 1]),
        (STRADDLING, [0, *[1] * 9, 2, 3]),
        (STRADDLING, [0, *[1] * 500, 2, 3]),
        ([b"\xff", b"a"], [*[0] * 300, 1]),
        ([b"\xef\xbf\xbd", b"a"], [*[0] * 300, 1]),
        ([b"\xf0", b"\x9f\x99", b"\x82"], [*[0] * 50, 1, 2]),
    ],
    ids=["words", "no id ends a character", "for long", "bytes of none", "the mark itself", "a character at last"],
)
def test_a_token_costs_the_same_however_long_the_output(tokens: list[bytes], pattern: list[int]) -> None:
    tokenizer, ids = tokenizer_of(tokens), pattern * (600 // len(pattern) + 1)
    costs: list[int] = []

    def decode(some: Sequence[int]) -> str:
        costs[-1] += len(some)
        return tokenizer.decode(list(some))

    text, told = TextInPieces(decode), ""
    for token in ids:
        costs.append(0)
        told += text.append(token)
    assert max(costs) <= 4 * LONG_WINDOW
    assert told + text.rest() == tokenizer.decode(ids)


@pytest.mark.parametrize("before", range(2 * LONG_WINDOW))
def test_a_character_that_begins_where_the_window_is_cut(before: int) -> None:
    tokenizer = byte_tokenizer()
    text, ids = TextInPieces(tokenizer.decode), [*b"\xff" * before, *"🙂".encode(), *b"a"]
    assert "".join(map(text.append, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_that_are_no_text_take_no_room(kind: str) -> None:
    """An end of text that is ignored, and said again and again: the space behind it must not get lost."""
    tokenizer = TOKENIZERS[kind][0]()
    special = tokenizer.token_to_id("<s>")
    before, after = ([256], [256, 258]) if kind == "pieces" else ([97], [32, 97])
    ids, longest = [*before, *[special] * 500, *after], 0

    def decode(some: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(some))
        return tokenizer.decode(list(some))

    text = TextInPieces(decode)
    assert "".join(map(text.append, ids)) == tokenizer.decode(ids)
    assert longest <= LONG_WINDOW


# --- stop strings -------------------------------------------------------------------------------------------------


def read(tokens: Sequence[bytes], stops: Sequence[str], include: bool = False) -> tuple[int, str, str | None]:
    """Tokens up to the one that completes a stop string: how many, the text, and the stop string."""
    names = sorted(set(tokens))
    ids, decode = [names.index(token) for token in tokens], tokenizer_of(names).decode
    text, told = OutputText(decode, stops, include), ""
    for i, token in enumerate(ids, start=1):
        text.append(token)
        told += text.take(last=False)
        if text.matched_stop is not None:
            assert text.take(last=True) == ""
            whole = decode(ids[:i])
            assert whole[: len(whole) - text.cut] == told
            return i, told, text.matched_stop
    return len(tokens), told + text.take(last=True), None


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xab")])
def test_FIN_03_a_stop_early_in_a_long_run(include: bool, text: str) -> None:
    assert read([bytes([c]) for c in b"xabcdefg"], ["ab"], include) == (3, text, "ab")


@pytest.mark.parametrize(
    ("tokens", "stops", "kept", "cut", "included", "stop"),
    [
        ([b"one", b" two", b" three"], ["two"], 2, "one ", "one two", "two"),  # ends with its token
        ([b"one", b" two", b" three"], ["e t"], 2, "on", "one t", "e t"),  # begins and ends within tokens
        ([b"one", b" two", b" three"], ["ne two th"], 3, "o", "one two th", "ne two th"),  # spans a whole one
        ([b"a", b"b\nc", b"d"], ["\n"], 2, "ab", "ab\n", "\n"),  # within one
        ([b"a", b".b.c.", b"d"], ["."], 2, "a", "a.", "."),  # the first of several places
        ([b"a\xc3", b"\xa9b", b"c"], ["é"], 2, "a", "aé", "é"),  # its character is spread over two
        ([b"\xf0\x9f", b"\x99", b"\x82!", b"c"], ["🙂"], 3, "", "🙂", "🙂"),
        ([b"x", b".\xf0\x9f", b"\x99\x82"], ["."], 2, "x", "x.", "."),  # half a character follows it
        ([b"x", b"\xff", b".", b"y"], ["."], 3, "x\ufffd", "x\ufffd.", "."),  # bytes of none stand before it
        ([b"a", b"b", b"c", b"d"], ["abcd", "bc"], 3, "a", "abc", "bc"),  # an earlier token completes the inner one
        ([b"ab", b"cd"], ["abcd", "bc"], 2, "", "abcd", "abcd"),  # one token completes both: the first to begin
        ([b"xa", b"bc"], ["ab", "abc", "bc"], 2, "x", "xab", "ab"),  # of those that begin together the shortest
        ([b"a", b"a", b"b", b"c"], ["aab"], 3, "", "aab", "aab"),
        ([b"a", b"a", b"a", b"b", b"c"], ["aab"], 4, "a", "aaab", "aab"),  # a false start within a false start
        ([b"END", b"x"], ["END"], 1, "", "END", "END"),  # there is nothing before it
        ([b"a", b"b"], ["bc"], 2, "ab", "ab", None),  # not completed: its beginning is text after all
        ([b"a", b"b"], ["abc", "x"], 2, "ab", "ab", None),
        ([b"a", b"\xc3"], ["é"], 2, "a\ufffd", "a\ufffd", None),
    ],
    ids=str,
)
def test_where_a_stop_string_ends_the_output(
    tokens: list[bytes], stops: list[str], kept: int, cut: str, included: str, stop: str | None
) -> None:
    assert read(tokens, stops) == (kept, cut, stop)
    assert read(tokens, stops, include=True) == (kept, included, stop)


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_in_which_stop_strings_are_named_does_not_matter(order: int) -> None:
    assert read([b"xa", b"bc"], ["bc", "ab", "abc"][::order]) == (2, "x", "ab")


def test_what_may_become_a_stop_string_is_held_back_and_no_more() -> None:
    tokens = [b"x", b"a", b"b", b"a", b"b", b"y", b"a"]
    names = sorted(set(tokens))
    text = OutputText(tokenizer_of(names).decode, ["abac", "by!"])
    told = []
    for token in tokens:
        text.append(names.index(token))
        told.append(text.take(last=False))
    assert told == ["x", "", "", "", "ab", "a", "by"]
    assert text.take(last=True) == "a"


ALPHABET = [b"a", b"b", b"ab", b"ba", b"a b", b" ", "é".encode(), b"\xc3", b"\xa9", b"\xa9a", b"b\xc3", b"\xf0\x9f\x99"]
ALPHABET += [b"\x82", b"\x82\xf0\x9f\x99", b"\xff", b"\xef\xbf\xbd"]
STOPS = st.lists(st.text("ab é🙂", min_size=1, max_size=5), min_size=1, max_size=3)


@given(ids=st.lists(st.integers(0, len(ALPHABET) - 1), max_size=40), stops=STOPS, include=st.booleans())
def test_equal_to_decoding_everything_after_each_token(ids: list[int], stops: list[str], include: bool) -> None:
    tokenizer = tokenizer_of(ALPHABET)
    kept, expected, stop = naive_stop(tokenizer.decode, ids, stops, include)
    text, told = OutputText(tokenizer.decode, stops, include), ""
    for end, token in enumerate(ids[:kept], start=1):
        assert text.matched_stop is None
        text.append(token)
        told += text.take(last=False)
        if text.matched_stop is None:
            so_far = tokenizer.decode(ids[:end])
            assert told == so_far[: len(so_far) - undecided_end(so_far, stops)]
    assert text.matched_stop == stop
    assert told + text.take(last=True) == expected
    whole = tokenizer.decode(ids[:kept])
    assert whole[: len(whole) - text.cut] == expected


@given(data=st.data(), include=st.booleans())
def test_equal_for_a_tokenizer_of_pieces(data: st.DataObject, include: bool) -> None:
    make, parts = TOKENIZERS["pieces"]
    ids = [token for part in data.draw(st.lists(st.sampled_from(parts), max_size=20)) for token in part]
    stops = data.draw(st.lists(st.text("ac b☃🙂", min_size=1, max_size=4), min_size=1, max_size=3))
    decode = make().decode
    kept, expected, stop = naive_stop(decode, ids, stops, include)
    text = OutputText(decode, stops, include)
    for token in ids[:kept]:
        assert text.matched_stop is None
        text.append(token)
    assert text.matched_stop == stop
    assert text.take(last=True) == expected


def test_a_long_stop_string_costs_no_longer_window() -> None:
    """The search remembers characters, not ids: what is decoded for a token does not depend on the stop strings."""
    tokenizer, longest = byte_tokenizer(), 0

    def decode(some: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(some))
        return tokenizer.decode(list(some))

    text = OutputText(decode, ["a" * 300 + "b"])
    for token in b"a" * 700 + b"b":
        text.append(token)
    assert text.matched_stop == "a" * 300 + "b"
    assert text.take(last=True) == "a" * 400
    assert longest <= 4
