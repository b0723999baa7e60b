"""Values that travel, bytes that are no values, and when two answers are the same."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refspec.grader.compare import UnlikeError, first_difference, named_arrays, same, unchanged
from refspec.grader.judge import read_reply
from refspec.grader.wire import DTYPES, MessageError, Other, decode, dumps, encode, loads
from refspec.printable import printable

NAN = float("nan")


def there_and_back(value: object) -> Any:
    return decode(loads(dumps(encode(value))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_keep_their_bits(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    for given_array in (array, torch.from_numpy(array), torch.from_numpy(array).t().contiguous().t()):
        back = there_and_back(given_array)
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


numbers = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)


@given(st.recursive(numbers, st.lists))
def test_plain_values_come_back(value: object) -> None:
    def depth(value: object) -> int:
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    if depth(value) <= 8:
        assert there_and_back(value) == value


def test_what_cannot_travel_is_named() -> None:
    assert there_and_back({}) == Other("dict")
    assert there_and_back(10**30) == Other("integer of more than 64 bits")
    assert there_and_back(torch.zeros(2, dtype=torch.complex64)) == Other("ndarray")
    assert there_and_back(torch.full((2,), 0.5, dtype=torch.bfloat16)).tolist() == [0.5, 0.5]
    assert np.isnan(there_and_back(NAN))


def array_of(dtype: object, shape: object, data: bytes) -> object:
    return {"array": [dtype, shape, base64.b64encode(data).decode()]}


@pytest.mark.parametrize(
    "data",
    [
        10**30,
        0.5,
        "text",
        {},
        {"float": "1p"},
        [[[[[[[[[1]]]]]]]]],
        {"float": "0x" + "f" * 400},
        {"float": 1.0},
        {"other": 3},
        {"array": []},
        {"array": ["int64", [1], "*"]},
        {"array": ["int64", [1], 5]},
        {"array": "int64"},
        array_of("object", [1], b"12345678"),
        array_of("V8", [1], b"12345678"),
        array_of("int64", [2], b"12345678"),
        array_of("int64", [-1, -1], b"12345678"),
        array_of("int64", [True], b"12345678"),
        array_of("int64", [2**40, 2**40], b""),
        array_of("int64", [1.0], b"12345678"),
        array_of("int64", [0, 2**31 - 1, 2**31 - 1, 2**31 - 1], b""),
        array_of("int64", [1] * 9, b"12345678"),
        {"array": ["int64", [0], ""], "float": "0x1p0"},
        [[{"pickle": "cos\nsystem"}]],
    ],
    ids=lambda data: json.dumps(data)[:30],
)
def test_what_is_no_value_is_refused(data: Any) -> None:
    with pytest.raises(MessageError):
        decode(data)


@pytest.mark.parametrize(
    "line", [b"", b"{", b"NaN", b"[Infinity]", b"\xff", b"[" * 10**6, b"9" * 10**5, b'{"a": 1} {"a": 1}']
)
def test_what_is_no_json_is_refused(line: bytes) -> None:
    with pytest.raises(MessageError):
        decode(loads(line))


LOADED = b'{"loaded": true}\n'
NOTHING = b'{"case": %d, "value": null, "inputs": {}}\n'
RAISED = {"kind": "E", "message": "", "module": None, "line": None}


@pytest.mark.parametrize(
    "reply",
    [
        b"passed\n",
        b"\n",
        LOADED + LOADED,
        b'{"loaded": 1, "verdict": "pass"}\n',
        LOADED + b'{"case": 1, "value": null, "inputs": {}}\n',
        LOADED + b'{"case": 0, "value": null}\n',
        LOADED + b'{"case": 0, "value": null, "inputs": []}\n',
        LOADED + b'{"case": 0, "value": null, "inputs": {}, "verdict": "pass"}\n',
        LOADED + b'{"case": 0, "raised": "all", "inputs": {}}\n',
        LOADED + dumps({"case": 0, "raised": {**RAISED, "line": "7"}, "inputs": {}}),
        LOADED + dumps({"case": 0, "raised": {**RAISED, "kind": None}, "inputs": {}}),
        LOADED + NOTHING % 0 + NOTHING % 1 + NOTHING % 2,
        LOADED + NOTHING % 0 + NOTHING % 1 + b"x",
        dumps({"failed": RAISED}) + b"\n",
    ],
)
def test_what_is_no_reply_is_refused(reply: bytes) -> None:
    with pytest.raises(MessageError):
        read_reply(reply, 2)


def test_a_reply_that_breaks_off_counts_as_far_as_it_goes() -> None:
    first = dumps({"case": 0, "value": 7, "inputs": {}})
    assert not read_reply(b'{"load', 2).loaded
    assert read_reply(LOADED, 2).answers == ()
    assert [answer.value for answer in read_reply(LOADED + first + first[:9], 2).answers] == [7]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\tb\nc", "a\tb\nc"), ("\x1b[2J", "\\x1b[2J"), ("\r\x00", "\\r\\x00"), ("✓é", "✓é"), ("\ud800", "\\ud800")],
)
def test_nothing_that_moves_a_terminal_is_printed(text: str, shown: str) -> None:
    assert printable(text) == shown


# --- comparing --------------------------------------------------------------------------------------------------------


def difference(right: Any, yours: Any) -> Any:
    return first_difference({"x": np.array(right)}, {"x": np.array(yours)}, ("x",), {"x": "(n)"})


def test_GRD_04_nan_equals_a_nan_at_its_place_and_nothing_else() -> None:
    assert difference([1.0, NAN], [1.0, NAN]) is None
    assert difference([1.0, NAN], [NAN, 1.0]).sentence == "x[0] is NaN"
    assert difference([1.0, NAN], [1.0, 2.0]).sentence == "x[1] must be NaN, and yours is not"
    assert difference([1.0, 2.0], [1.0, NAN]).sentence == "x[1] is NaN"
    assert difference([1.0, 2.0], [NAN, NAN]).index == (0,)
    assert same({"x": np.array([NAN])}, {"x": np.array([NAN])})
    assert not same({"x": np.array([NAN])}, {"x": np.array([0.0])})


def test_whole_numbers_are_exact_and_fractions_nearly() -> None:
    assert difference([1.0], [1.0 + 1e-7]) is None
    assert difference([1.0], [1.001]).index == (0,)
    assert difference([0.0], [1e-6]).index == (0,)
    assert difference([float("inf")], [float("inf")]) is None
    assert difference([float("inf")], [3e38]).index == (0,)
    assert difference([2**60], [2**60 + 1]).index == (0,)
    assert difference(np.array([3], np.int32), np.array([3], np.int64)) is None
    assert difference(np.array([-1], np.int64), np.array([255], np.uint8)).index == (0,)


def test_kinds_and_shapes_come_before_values() -> None:
    assert "must hold whole numbers" in difference([1], [1.0]).sentence
    assert "must hold fractions" in difference([1.0], [1]).sentence
    assert "must have the shape (n) = (2,); yours has (1, 2)" in difference([1, 2], [[1, 3]]).sentence


def test_names_follow_the_form() -> None:
    names = ("a", ("b", "c"))
    assert {k: v.tolist() for k, v in named_arrays(names, [1, [[2, 3], np.array([4])]]).items()} == {
        "a": 1,
        "b": [2, 3],
        "c": [4],
    }
    for value in (None, 3, [1], [1, 2], [1, [2]], [1, [2, Other("dict")]], [1, [2, [3, [4]]]], [1, [2, [3, None]]]):
        with pytest.raises(UnlikeError):
            named_arrays(names, value)


def test_unchanged_is_to_the_bit() -> None:
    zero = np.array([0.0])
    assert unchanged(zero, np.array([0.0]))
    for other in (np.array([-0.0]), np.array([0.0, 0.0]), np.array([0.0], np.float32), [0.0], None, Other("Tensor")):
        assert not unchanged(zero, other)
    assert unchanged(np.array([NAN]), np.array([NAN]))
