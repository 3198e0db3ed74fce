"""NumPy's arrays as raw arrays and back. JAX's become NumPy's, without a copy on a CPU."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshmend.train.state.state_tree import Bytes, Framework, RawArray

Array = NDArray[Any]


def _raw(leaf: Any, where: str) -> RawArray | None:
    if not isinstance(leaf, np.ndarray):
        return None

    def read(start: int, stop: int) -> Bytes:
        return np.ascontiguousarray(leaf.reshape(-1)[start:stop]).view(np.uint8)

    return RawArray(str(leaf.dtype), leaf.shape, leaf.itemsize, read)


def _array(array: RawArray) -> Array:
    """Return an array; if it can, it shares its memory."""
    return array.data.view(np.dtype(array.dtype)).reshape(array.shape)


ARRAYS: Final = Framework("jax", _raw, _array)
