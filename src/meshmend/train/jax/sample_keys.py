"""JAX's random keys of samples: each depends on the seed and the sample's place in the row.

So a step done again, or shared out among fewer chips, draws the same random numbers.
"""

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

_LOW_BITS = 32


def places_of(places: NDArray[np.int64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the high and the low half of places, because JAX's integers have 32 bits."""
    return (places >> _LOW_BITS).astype(np.uint32), places.astype(np.uint32)


def keys_of(seed: int, places: Any) -> jax.Array:
    """Return one random key for each place."""
    root = jax.random.key(seed)

    def key(high: jax.Array, low: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(root, high), low)

    return jax.vmap(key)(*places)
