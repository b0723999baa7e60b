"""How values travel between the judge and the process that runs a learner's code: as JSON, with arrays as bytes.

    None, True, 7, [..]             as in JSON; tuples are lists
    {"float": "0x1.8p+1"}           exact, and NaN has a name
    {"array": [dtype, shape, data]} data in base64, little-endian, row by row
    {"other": "dict"}               anything else, by the name of its type

Decoding makes plain values and numpy arrays, whatever the bytes say, or raises MessageError. Nothing that was decoded
can run code; that is why this is not pickle.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from refspec.printable import printable

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
DEEPEST = 8
MOST_DIMENSIONS = 8
LONGEST_NAME = 80
# In the place of an exception's name, which has no spaces:
REFUSED = "not to be imported"
NO_FUNCTION = "no function"


class MessageError(ValueError):
    """Bytes that are no message."""


@dataclass(frozen=True)
class Other:
    """A value that cannot travel."""

    name: str  # of its type


Plain: TypeAlias = "bool | int | float | np.ndarray | Other | list[Plain] | None"


def encode(value: object, depth: int = 0) -> Any:
    """A value as JSON knows them. Runs where learners' objects are: it may raise whatever these raise."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else {"other": "integer of more than 64 bits"}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    torch = sys.modules.get("torch")  # nobody has a tensor who has not imported it, and that takes a second
    if torch is not None and isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        value = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.name in DTYPES:
        array = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
        return {"array": [value.dtype.name, list(value.shape), base64.b64encode(array.tobytes()).decode("ascii")]}
    if isinstance(value, list | tuple) and depth < DEEPEST:
        return [encode(item, depth + 1) for item in value]
    return {"other": type(value).__name__}


def decode(data: Any, depth: int = 0) -> Plain:
    """The opposite, of what json.loads gave. Raises MessageError for anything that `encode` does not make."""
    if data is None or isinstance(data, bool):
        return data
    if isinstance(data, int) and -(2**63) <= data < 2**63:
        return data
    if isinstance(data, list) and depth < DEEPEST:
        return [decode(item, depth + 1) for item in data]
    if isinstance(data, dict) and len(data) == 1:
        if isinstance(name := data.get("other"), str):
            return Other(printable(name)[:LONGEST_NAME])
        if isinstance(number := data.get("float"), str) and len(number) < 32:
            try:
                return float.fromhex(number)
            except (ValueError, OverflowError):
                pass
        if "array" in data:
            return _decode_array(data["array"])
    raise MessageError("a value in no known form")


def loads(line: bytes) -> Any:
    """One line of JSON. Raises MessageError for anything else, and for the numbers that JSON does not have."""
    try:
        return json.loads(line.decode("ascii"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise MessageError("not JSON") from None


def dumps(message: object) -> bytes:
    """A message as a line."""
    return json.dumps(message, allow_nan=False).encode("ascii") + b"\n"


def _decode_array(data: Any) -> np.ndarray:
    if not (isinstance(data, list) and len(data) == 3):
        raise MessageError("an array is dtype, shape and data")
    dtype, shape, text = data
    if not (isinstance(dtype, str) and dtype in DTYPES and isinstance(shape, list) and isinstance(text, str)):
        raise MessageError("an array is dtype, shape and data")
    if len(shape) > MOST_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
        raise MessageError("a shape is a few small integers")
    kind = np.dtype(dtype).newbyteorder("<")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MessageError("array data that is not base64") from None
    if len(raw) != math.prod(shape) * kind.itemsize:
        raise MessageError("array data of another length than its shape says")
    try:
        return np.frombuffer(raw, dtype=kind).astype(np.dtype(dtype)).reshape(shape)
    except ValueError:  # nothing at all, in a shape beyond NumPy's bounds
        raise MessageError("a shape is a few small integers") from None


def _refuse(name: str) -> None:
    raise MessageError(f"{name} is no number of JSON")
