"""States of NumPy arrays as bytes. JAX's arrays become such without a copy on a CPU."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.train.state.digest import digests_of
from meshmend.train.state.raw_state import (
    Bytes,
    RawArray,
    map_state,
    pack_raw,
    raw_parts,
    unpack_raw,
)

Array = NDArray[Any]


def pack_arrays(state: Any) -> Bytes:
    """Return a state as bytes that `unpack_arrays` reads.

    Raises:
        InputError: the state holds something that is neither an array nor a plain value.
    """
    return pack_raw(map_state(raw_array_leaf, state))


def array_parts(state: Any) -> list[Bytes]:
    """Return the bytes of `pack_arrays` in parts, without copies of arrays.

    Raises:
        InputError: the state holds something that is neither an array nor a plain value.
    """
    return raw_parts(map_state(raw_array_leaf, state))


def unpack_arrays(data: Bytes) -> Any:
    """Return the state that `pack_arrays` wrote; its arrays are views of the bytes."""
    return map_state(_array_leaf, unpack_raw(data))


def digest_array_parts(state: Any) -> dict[str, str]:
    """Return a hash of each array of a state by its name, and each plain value."""
    return digests_of(map_state(raw_array_leaf, state))


def _raw(array: Array) -> RawArray:
    flat = np.ascontiguousarray(array).reshape(-1)
    return RawArray(str(array.dtype), array.shape, flat.view(np.uint8))


def raw_array_leaf(leaf: Any) -> Any:
    """Return an array as a `RawArray`, and anything else as it is."""
    return _raw(leaf) if isinstance(leaf, np.ndarray) else leaf


def _array_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, RawArray):
        return leaf
    return leaf.data.view(np.dtype(leaf.dtype)).reshape(leaf.shape)
