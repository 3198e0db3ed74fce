"""JAX parameters and an optax optimizer, as a job trains them.

Gradients are computed in micro-batches of one fixed size, the last of them padded. So another
number of samples, after a chip died, needs no other program: nothing is compiled after the start.
The gradients of a step are summed in float32, those of float64 parameters in float64.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshmend.errors import InputError
from meshmend.train.array_shards import ARRAY_SHARDS
from meshmend.train.array_state import Array, digest_arrays, pack_arrays, unpack_arrays
from meshmend.train.learner import Bytes
from meshmend.train.sample_keys import keys_of, places_of
from meshmend.train.samples import Share
from meshmend.train.shard_format import ShardFormat
from meshmend.train.worker_loop import SumSizes

Tree = Any  # any nesting of dicts, lists, tuples and dataclasses that JAX knows
Loss = Callable[..., jax.Array]


class JaxLearner:
    """Parameters, their optimizer and their loss function, as a `Learner`.

    `loss(params, batch)` returns one loss per sample. With `seed` it gets one random key per sample
    as its third argument.
    """

    shards: Final[ShardFormat] = ARRAY_SHARDS

    def __init__(
        self,
        params: Tree,
        optimizer: optax.GradientTransformation,
        loss: Loss,
        *,
        micro_batch: int,
        seed: int | None = None,
    ) -> None:
        self.params = _strong(_checked(params))
        self.opt_state = _strong(jax.jit(optimizer.init)(self.params))
        self._micro_batch = micro_batch
        self._flat = FlatTree(self.params)
        self._sums = self._flat.zeros()
        self._accumulate = jax.jit(_accumulation(loss, self._flat, seed))
        self._update = jax.jit(_update_of(optimizer, self._flat))

    def warm_up(self, batch: Tree) -> None:
        """Compile all that a step needs; the batch is of one sample, and changes nothing."""
        self.gather(batch, Share(0, 1, 1))
        jax.block_until_ready(self._update(self.params, self.opt_state, self._flat.zeros()))

    def gather(self, batch: Tree, share: Share) -> None:
        """Put the weighted gradients and losses of this chip's samples into the payloads.

        Raises:
            InputError: the batch has another number of samples than the share.
        """
        arrays = jax.tree.map(np.asarray, batch)
        for array in jax.tree.leaves(arrays):
            if array.shape[:1] != (share.n_samples,):
                raise InputError(
                    f"JaxJob.step needs arrays of {share.n_samples} samples, as the job handed "
                    f"them out, but got one of shape {array.shape}"
                )
        totals: Sequence[Any] = self._flat.zeros()
        for start in range(0, share.n_samples, self._micro_batch):
            places = np.arange(start, start + self._micro_batch)
            weights = ((places < share.n_samples) / share.batch).astype(np.float32)
            # The last sample fills the rest: its loss is finite if the loss of the step is.
            chosen = np.minimum(places, share.n_samples - 1)
            part = jax.tree.map(lambda array, at=chosen: array[at], arrays)
            totals = self._accumulate(
                self.params, totals, part, weights, places_of(share.start + chosen)
            )
        # Copies: the sum is made in place, but JAX's arrays must not change.
        self._sums = [np.array(total) for total in totals]

    def sum_sizes(self) -> SumSizes:
        """Return the number of elements and the type of each sum of a step."""
        return self._flat.sizes()

    def payloads(self) -> Sequence[Bytes]:
        """Return what this chip puts into each sum; the sums replace it in place."""
        return [total.view(np.uint8) for total in self._sums]

    def clear(self) -> None:
        """Put zeros into the payloads, because this chip has no samples."""
        self._sums = self._flat.zeros()

    def undo(self) -> None:
        """Do nothing: a step changes nothing before its update."""

    def update(self) -> float:
        """Step the optimizer with the sums; return the mean loss over all samples."""
        updated = self._update(self.params, self.opt_state, self._sums)
        self.params, self.opt_state = jax.block_until_ready(updated)
        return float(self._sums[0][-1])

    def state(self) -> dict[str, Any]:
        """Return the arrays of the parameters and of the optimizer by their names."""
        return {
            "model": named_arrays(self.params),
            "optimizer": named_arrays(self.opt_state),
            "also": [],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Replace these parts by those of another chip or of a checkpoint."""
        params = _with_arrays(self.params, state["model"])
        self.opt_state = _with_arrays(self.opt_state, state["optimizer"])
        self.params = params

    def packed(self, state: dict[str, Any]) -> Bytes:
        """Return a state, with the progress of the job, as bytes."""
        return pack_arrays(state)

    def unpacked(self, data: Bytes) -> dict[str, Any]:
        """Return the state that `packed` wrote."""
        state: dict[str, Any] = unpack_arrays(data)
        return state

    def digest(self) -> str:
        """Return a hash of the bits of the state."""
        state = self.state()
        return digest_arrays({**state["model"], **_prefixed(state["optimizer"])})


class FlatTree:
    """The layout of a tree of arrays, and of one number more, in one flat array per type."""

    def __init__(self, tree: Tree) -> None:
        leaves, self._structure = jax.tree.flatten(tree)
        self._leaves = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
        kinds = [
            np.dtype(np.float64 if leaf.dtype == np.float64 else np.float32) for leaf in leaves
        ]
        self._kind_of_leaf = kinds
        # The number is in the first array: the one of float64, if there is one.
        self._kinds = sorted(set(kinds) or {np.dtype(np.float32)}, key=lambda kind: -kind.itemsize)

    def zeros(self) -> list[Array]:
        """Return new flat arrays of zeros."""
        return [np.zeros(n_elements, dtype=dtype) for n_elements, dtype in self.sizes()]

    def sizes(self) -> list[tuple[int, str]]:
        """Return the number of elements and the type of each flat array."""
        counts = dict.fromkeys(self._kinds, 0)
        counts[self._kinds[0]] = 1
        for (shape, _), kind in zip(self._leaves, self._kind_of_leaf, strict=True):
            counts[kind] += int(np.prod(shape))
        return [(count, kind.name) for kind, count in counts.items()]

    def flatten(self, tree: Tree, number: jax.Array) -> list[jax.Array]:
        """Return a tree of this structure, and the number, as flat arrays."""
        parts: dict[Any, list[jax.Array]] = {kind: [] for kind in self._kinds}
        for leaf, kind in zip(jax.tree.leaves(tree), self._kind_of_leaf, strict=True):
            parts[kind].append(leaf.astype(kind).reshape(-1))
        parts[self._kinds[0]].append(number.astype(self._kinds[0]).reshape(1))
        return [jnp.concatenate(part) for part in parts.values()]

    def unflatten(self, flat: Sequence[jax.Array]) -> Tree:
        """Return the tree that was flattened, with the types of the original tree."""
        arrays = dict(zip(self._kinds, flat, strict=True))
        at = dict.fromkeys(self._kinds, 0)
        leaves = []
        for (shape, dtype), kind in zip(self._leaves, self._kind_of_leaf, strict=True):
            size = int(np.prod(shape))
            part = arrays[kind][at[kind] : at[kind] + size]
            leaves.append(part.reshape(shape).astype(dtype))
            at[kind] += size
        return jax.tree.unflatten(self._structure, leaves)


def named_arrays(tree: Tree) -> dict[str, Array]:
    """Return the arrays of a tree by their names; on a CPU they share its memory."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


def _with_arrays(tree: Tree, arrays: dict[str, Array]) -> Tree:
    """Return a tree with copies of these arrays as leaves."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.array(arrays[jax.tree_util.keystr(path)]), tree
    )


def _prefixed(arrays: dict[str, Array]) -> dict[str, Array]:
    return {f"optimizer{name}": array for name, array in arrays.items()}


def _strong(tree: Tree) -> Tree:
    """Return a copy of a tree whose types are no weak types, which would be compiled again."""
    return jax.tree.map(lambda leaf: jnp.array(np.asarray(leaf)), tree)


def _checked(params: Tree) -> Tree:
    """Return parameters if all are arrays of floats.

    Raises:
        InputError: one is not, or there are none.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(params)
    if not found:
        raise InputError("JaxJob needs parameters to train, but got none")
    for path, leaf in found:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise InputError(
                f"JaxJob needs parameters that are arrays of floats, but "
                f"params{jax.tree_util.keystr(path)} is {dtype or type(leaf).__name__}; keep what "
                "is not trained out of params"
            )
    return params


def _accumulation(loss: Loss, flat: FlatTree, seed: int | None) -> Callable[..., list[jax.Array]]:
    """Return a function that adds the gradients and losses of a micro-batch to flat totals."""

    def weighted_loss(params: Tree, batch: Tree, weights: jax.Array, places: Any) -> jax.Array:
        keys = () if seed is None else (keys_of(seed, places),)
        losses = loss(params, batch, *keys)
        if losses.shape != weights.shape:
            raise InputError(
                f"the loss function of a JaxJob needs to return one loss per sample, an array of "
                f"shape {weights.shape}, but returned shape {losses.shape}; leave out the mean"
            )
        return jnp.sum(losses * weights)

    def accumulate(
        params: Tree, totals: list[jax.Array], batch: Tree, weights: jax.Array, places: Any
    ) -> list[jax.Array]:
        value, gradients = jax.value_and_grad(weighted_loss)(params, batch, weights, places)
        added = flat.flatten(gradients, value)
        return [total + each for total, each in zip(totals, added, strict=True)]

    return accumulate


def _update_of(optimizer: optax.GradientTransformation, flat: FlatTree) -> Callable[..., Any]:
    """Return a function that steps an optimizer with the flat sums of all chips."""

    def update(params: Tree, opt_state: Tree, sums: list[jax.Array]) -> tuple[Tree, Tree]:
        changes, new_state = optimizer.update(flat.unflatten(sums), opt_state, params)
        new_params = optax.apply_updates(params, changes)
        kept = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, opt_state)
        return new_params, kept

    return update
