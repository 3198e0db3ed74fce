"""The layout of a tree of JAX arrays in flat arrays, one per type, as the chips sum them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshmend.train.state.array_state import Array

Tree = Any  # any nesting of dicts, lists, tuples and dataclasses that JAX knows

_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)


@dataclass(frozen=True)
class FlatTree:
    """Where the leaves of a tree, and two numbers more, are in flat arrays.

    There is one array of float32, and one of float64 if leaves are of that type. The numbers are at
    the end of the first of them: one is flattened with the tree, the other is left to the caller.
    Leaves of other types are converted to float32.
    """

    structure: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]

    @classmethod
    def of(cls, tree: Tree) -> "FlatTree":
        """Return the layout of a tree of arrays of JAX or NumPy."""
        leaves, structure = jax.tree.flatten(tree)
        dtypes = (jax.dtypes.canonicalize_dtype(leaf.dtype) for leaf in leaves)
        return cls(
            structure,
            tuple(
                (leaf.shape, np.dtype(dtype)) for leaf, dtype in zip(leaves, dtypes, strict=True)
            ),
        )

    def sizes(self) -> list[tuple[int, str]]:
        """Return the number of elements and the type of each flat array."""
        counts = dict.fromkeys(self._kinds(), 0)
        counts[self._kinds()[0]] = 2
        for shape, dtype in self.leaves:
            counts[_kind(dtype)] += int(np.prod(shape))
        return [(count, kind.name) for kind, count in counts.items()]

    def zeros(self) -> list[Array]:
        """Return new flat arrays of zeros."""
        return [np.zeros(n_elements, dtype=dtype) for n_elements, dtype in self.sizes()]

    def flatten(self, tree: Tree, number: jax.Array) -> list[jax.Array]:
        """Return a tree of this layout, and the number, as flat arrays."""
        parts: dict[np.dtype[Any], list[jax.Array]] = {kind: [] for kind in self._kinds()}
        for leaf, (_, dtype) in zip(jax.tree.leaves(tree), self.leaves, strict=True):
            parts[_kind(dtype)].append(leaf.astype(_kind(dtype)).reshape(-1))
        first = self._kinds()[0]
        parts[first].append(jnp.pad(number.astype(first).reshape(1), (0, 1)))
        return [jnp.concatenate(part) for part in parts.values()]

    def unflatten(self, flat: Sequence[jax.Array]) -> Tree:
        """Return the tree that was flattened, with the types of its leaves."""
        arrays = dict(zip(self._kinds(), flat, strict=True))
        at = dict.fromkeys(self._kinds(), 0)
        found = []
        for shape, dtype in self.leaves:
            kind, size = _kind(dtype), int(np.prod(shape))
            found.append(arrays[kind][at[kind] : at[kind] + size].reshape(shape).astype(dtype))
            at[kind] += size
        return jax.tree.unflatten(self.structure, found)

    def number(self, flat: Sequence[jax.Array]) -> jax.Array:
        """Return the number that was flattened with the tree."""
        return flat[0][-2]

    def _kinds(self) -> list[np.dtype[Any]]:
        """Return the types of the flat arrays, the widest first."""
        kinds = {_kind(dtype) for _, dtype in self.leaves}
        return [kind for kind in (_DOUBLE, _SINGLE) if kind in kinds]


def _kind(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return _DOUBLE if dtype == _DOUBLE else _SINGLE
