"""A training state as bytes: tensors raw, everything else as JSON. No pickle.

Works on nested dicts, lists and tuples of tensors and plain values. The `state_dict` of modules,
optimizers and schedulers returns these. A state that is packed and unpacked is equal bit for bit.

    length of the JSON (8 bytes), the JSON, padding to 64 bytes, the tensors one after another
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from meshmend.errors import InputError

Bytes = NDArray[np.uint8]

_LENGTH: Final = struct.Struct("<Q")
_ALIGN: Final = 64


def packed(state: Any) -> Bytes:
    """Return a state as bytes that `unpacked` reads.

    Raises:
        InputError: the state holds something that is neither a tensor nor a plain value.
    """
    tensors: list[torch.Tensor] = []
    text = json.dumps(_described(state, tensors)).encode()
    head = _LENGTH.pack(len(text)) + text
    head += bytes(-len(head) % _ALIGN)
    result = np.empty(len(head) + sum(_padded_size(tensor) for tensor in tensors), dtype=np.uint8)
    result[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    at = len(head)
    for tensor in tensors:
        raw = _raw(tensor)
        result[at : at + len(raw)] = raw
        result[at + len(raw) : at + _padded_size(tensor)] = 0
        at += _padded_size(tensor)
    return result


def unpacked(data: Bytes) -> Any:
    """Return the state that `packed` wrote."""
    (length,) = _LENGTH.unpack_from(data.data)
    description = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + length]))
    start = _LENGTH.size + length
    start += -start % _ALIGN
    return _restored(description, _Reader(torch.from_numpy(data), start))


def digest(tensors: Iterator[torch.Tensor]) -> str:
    """Return a hash of the bits of tensors; equal tensors have equal hashes."""
    result = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        result.update(_raw(tensor).data)
    return result.hexdigest()


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested state in their order."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_of(value)


def _raw(tensor: torch.Tensor) -> Bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: Bytes = flat.view(torch.uint8).numpy()
    return raw


def _padded_size(tensor: torch.Tensor) -> int:
    n_bytes = tensor.numel() * tensor.element_size()
    return n_bytes + -n_bytes % _ALIGN


def _described(state: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a description that JSON can hold; append the tensors to the list."""
    if isinstance(state, torch.Tensor):
        tensors.append(state)
        return ["tensor", str(state.dtype).removeprefix("torch."), list(state.shape)]
    if isinstance(state, dict):
        pairs = [[_plain(key), _described(value, tensors)] for key, value in state.items()]
        return ["dict", pairs]
    if isinstance(state, list | tuple):
        kind = "list" if isinstance(state, list) else "tuple"
        return [kind, [_described(value, tensors) for value in state]]
    return ["value", _plain(state)]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        f"a training state needs tensors, numbers and text, but got {type(value).__name__} "
        f"{value!r:.60}; leave it out of the state_dict"
    )


class _Reader:
    """Reads the tensors of packed bytes, one after another."""

    def __init__(self, data: torch.Tensor, at: int) -> None:
        self._data = data
        self._at = at

    def tensor(self, dtype: str, shape: list[int]) -> torch.Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        n_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        raw = self._data[self._at : self._at + n_bytes]
        self._at += n_bytes + -n_bytes % _ALIGN
        return raw.view(kind).reshape(shape).clone()


def _restored(description: Any, reader: _Reader) -> Any:
    kind, content = description[0], description[1]
    if kind == "tensor":
        return reader.tensor(content, description[2])
    if kind == "dict":
        return {key: _restored(value, reader) for key, value in content}
    if kind in ("list", "tuple"):
        values = [_restored(value, reader) for value in content]
        return values if kind == "list" else tuple(values)
    return content
