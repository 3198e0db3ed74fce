"""A training state as bytes: arrays raw, everything else as JSON. No pickle, and no framework.

Works on nested dicts, lists and tuples of `RawArray` and plain values. `torch_state.py` and
`array_state.py` turn the tensors of their frameworks into `RawArray` and back.

    length of the JSON (8 bytes), the JSON, padding to 64 bytes, the arrays one after another
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError

Bytes = NDArray[np.uint8]

_LENGTH: Final = struct.Struct("<Q")
_ALIGN: Final = 64


@dataclass(frozen=True, eq=False)
class RawArray:
    """The bytes of a dense array in row-major order, the name of its element type, its shape."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


def pack_raw(state: Any) -> Bytes:
    """Return a state as bytes that `unpack_raw` reads.

    Raises:
        InputError: the state holds something that is neither an array nor a plain value.
    """
    parts = raw_parts(state)
    return cut_raw(parts, 0, sum(len(part) for part in parts))


def raw_parts(state: Any) -> list[Bytes]:
    """Return the bytes of `pack_raw` in parts, one after another, without copies of arrays.

    Raises:
        InputError: the state holds something that is neither an array nor a plain value.
    """
    arrays: list[RawArray] = []
    text = json.dumps(_described(state, arrays)).encode()
    head = _LENGTH.pack(len(text)) + text
    parts = [np.frombuffer(head + bytes(-len(head) % _ALIGN), dtype=np.uint8)]
    for array in arrays:
        padding = np.zeros(-len(array.data) % _ALIGN, dtype=np.uint8)
        parts += [array.data, padding] if len(padding) else [array.data]
    return parts


def cut_raw(parts: Sequence[Bytes], low: int, high: int, step: int = 1) -> Bytes:
    """Return a copy of every `step`-th byte from `low` to before `high` of all parts together."""
    found, begin = [np.empty(0, dtype=np.uint8)], 0
    for part in parts:
        first, last = max(low, begin), min(high, begin + len(part))
        first += (low - first) % step
        if first < last:
            found.append(part[first - begin : last - begin : step])
        begin += len(part)
    return np.concatenate(found)


def unpack_raw(data: Bytes) -> Any:
    """Return the state that `pack_raw` wrote; its arrays are views of the bytes."""
    (length,) = _LENGTH.unpack_from(data.data)
    description = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + length]))
    start = _LENGTH.size + length
    return _restored(description, _Reader(data, start + -start % _ALIGN))


def _padded(n_bytes: int) -> int:
    return n_bytes + -n_bytes % _ALIGN


def _described(state: Any, arrays: list[RawArray]) -> Any:
    """Return a description that JSON can hold; append the arrays to the list."""
    if isinstance(state, RawArray):
        arrays.append(state)
        return ["tensor", state.dtype, list(state.shape), len(state.data)]
    if isinstance(state, dict):
        pairs = [[_plain(key), _described(value, arrays)] for key, value in state.items()]
        return ["dict", pairs]
    if isinstance(state, list | tuple):
        kind = "list" if isinstance(state, list) else "tuple"
        return [kind, [_described(value, arrays) for value in state]]
    return ["value", _plain(state)]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        f"a training state needs tensors, numbers and text, but got {type(value).__name__} "
        f"{value!r:.60}; leave it out of the state_dict"
    )


class _Reader:
    """Reads the arrays of packed bytes, one after another."""

    def __init__(self, data: Bytes, at: int) -> None:
        self._data = data
        self._at = at

    def array(self, dtype: str, shape: list[int], n_bytes: int) -> RawArray:
        raw = self._data[self._at : self._at + n_bytes]
        self._at += _padded(n_bytes)
        return RawArray(dtype, tuple(shape), raw)


def _restored(description: Any, reader: _Reader) -> Any:
    kind, content = description[0], description[1]
    if kind == "tensor":
        return reader.array(content, description[2], description[3])
    if kind == "dict":
        return {key: _restored(value, reader) for key, value in content}
    if kind in ("list", "tuple"):
        values = [_restored(value, reader) for value in content]
        return values if kind == "list" else tuple(values)
    return content


def map_state(change: Any, state: Any) -> Any:
    """Return a nested state with `change(leaf)` in place of each leaf."""
    if isinstance(state, dict):
        return {key: map_state(change, value) for key, value in state.items()}
    if isinstance(state, list):
        return [map_state(change, value) for value in state]
    if isinstance(state, tuple):
        return tuple(map_state(change, value) for value in state)
    return change(state)
