"""What a JAX job computes in a step, as functions that JAX compiles once.

Gradients are computed in micro-batches of one fixed size, the last of them padded. So another
number of samples, after a chip died, needs no other program: nothing is compiled after the start.
One worker of a host compiles, the others wait and load what it has compiled from the folder of the
run. A worker that is started again compiles nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.compilation_cache import compilation_cache
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.locks import folder_lock
from meshmend.train.state.state_tree import Array

Tree = Any  # any nesting of dicts, lists, tuples and dataclasses that JAX knows
Loss = Callable[..., jax.Array]

_LOW_BITS: Final = 32
_WAIT_S: Final = 600.0  # a large model compiles for minutes; who waits in vain compiles itself
_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)

# JAX imports these for its first program. Here they are imported once, before workers are forked.
for _dialect in ("builtin", "mhlo"):
    with suppress(ImportError):  # other versions of JAX may need none of them
        import_module(f"jaxlib.mlir.dialects.{_dialect}")


@dataclass(frozen=True)
class FlatTree:
    """Where the leaves of a tree, and some numbers more, are in flat arrays.

    There is one array of float32, and one of float64 if leaves are of that type. The numbers are at
    the end of the first of them: one is flattened with the tree, the others are left to the caller:
    one, and `n_notes` that are the job's own.
    Leaves of other types are converted to float32.
    """

    structure: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    n_notes: int = 0

    @classmethod
    def of(cls, tree: Tree, n_notes: int = 0) -> "FlatTree":
        """Return the layout of a tree of arrays of JAX or NumPy."""
        leaves, structure = jax.tree.flatten(tree)
        dtypes = (jax.dtypes.canonicalize_dtype(leaf.dtype) for leaf in leaves)
        return cls(
            structure,
            tuple(
                (leaf.shape, np.dtype(dtype)) for leaf, dtype in zip(leaves, dtypes, strict=True)
            ),
            n_notes,
        )

    def sizes(self) -> list[tuple[int, str]]:
        """Return the number of elements and the type of each flat array."""
        counts = dict.fromkeys(self._kinds(), 0)
        counts[self._kinds()[0]] = 2 + self.n_notes
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
        parts[first].append(jnp.pad(number.astype(first).reshape(1), (0, 1 + self.n_notes)))
        return [jnp.concatenate(part) for part in parts.values()]

    def unflatten(self, flat: Sequence[jax.Array]) -> Tree:
        """Return the tree that was flattened, with the types of its leaves."""
        arrays = dict(zip(self._kinds(), flat, strict=True))
        found = [
            arrays[kind][span].reshape(shape).astype(dtype)
            for (kind, span), (shape, dtype) in zip(self._spans(), self.leaves, strict=True)
        ]
        return jax.tree.unflatten(self.structure, found)

    def number(self, flat: Sequence[jax.Array]) -> jax.Array:
        """Return the number that was flattened with the tree."""
        return flat[0][-2 - self.n_notes]

    def places(self) -> list[dict[str, slice]]:
        """Return where each leaf is in each flat array, by its name."""
        tree = jax.tree.unflatten(self.structure, range(len(self.leaves)))
        paths, _ = jax.tree_util.tree_flatten_with_path(tree)
        found: dict[np.dtype[Any], dict[str, slice]] = {kind: {} for kind in self._kinds()}
        for (path, _), (kind, span) in zip(paths, self._spans(), strict=True):
            found[kind][jax.tree_util.keystr(path)] = span
        return list(found.values())

    def _spans(self) -> Iterator[tuple[np.dtype[Any], slice]]:
        """Yield the type of the flat array that each leaf is in, and where it is there."""
        at = dict.fromkeys(self._kinds(), 0)
        for shape, dtype in self.leaves:
            kind, size = _kind(dtype), int(np.prod(shape))
            yield kind, slice(at[kind], at[kind] + size)
            at[kind] += size

    def _kinds(self) -> list[np.dtype[Any]]:
        """Return the types of the flat arrays, the widest first."""
        kinds = {_kind(dtype) for _, dtype in self.leaves}
        return [kind for kind in (_DOUBLE, _SINGLE) if kind in kinds]


def _kind(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return _DOUBLE if dtype == _DOUBLE else _SINGLE


class JaxProgram:
    """The three functions of a job, `init`, `accumulate` and `update`, and one to check the loss.

    `init(params)` returns the state of the optimizer. `accumulate(params, totals, batch, weights,
    places)` adds the weighted gradients and losses of a micro-batch to flat totals. `update(params,
    opt_state, sums)` steps the optimizer. `loss_of_one(params, batch, places)` is the loss of a
    batch of one sample.
    """

    def __init__(
        self, loss: Loss, optimizer: optax.GradientTransformation, flat: FlatTree, seed: int | None
    ) -> None:
        self.flat = flat
        self.init = jax.jit(lambda params: optimizer.init(params))  # it may have no hash
        self.accumulate = jax.jit(_accumulation(loss, flat, seed))
        self.loss_of_one = jax.jit(_loss_of_one(loss, seed))
        self.update = jax.jit(_update_of(optimizer, flat))

    def trace(self, params: Tree, batch: Tree, micro_batch: int) -> None:
        """Trace all functions for one sample's batch, without computing.

        Processes that are forked from this one need not trace them again.
        """
        some = np.zeros(micro_batch, dtype=np.int64)
        filled = jax.tree.map(lambda array: np.asarray(array)[some], batch)
        totals = self.flat.zeros()
        weights = np.zeros(micro_batch, dtype=totals[0].dtype)
        self.accumulate.trace(params, totals, filled, weights, places_of(some))
        self.init.trace(params)
        self.update.trace(params, jax.eval_shape(self.init, params), self.flat.zeros())


def jax_program(
    loss: Loss, optimizer: optax.GradientTransformation, flat: FlatTree, seed: int | None
) -> JaxProgram:
    """Return the program of a job; the same arguments give the same program, if they have hashes.

    With `seed`, the loss function gets one random key per sample as its third argument.
    """
    try:
        return _kept_program(loss, optimizer, flat, seed)
    except TypeError:  # a loss or an optimizer without a hash, such as a dataclass
        return JaxProgram(loss, optimizer, flat, seed)


_kept_program = lru_cache(maxsize=4)(JaxProgram)


def _accumulation(loss: Loss, flat: FlatTree, seed: int | None) -> Callable[..., list[jax.Array]]:
    def weighted_loss(params: Tree, batch: Tree, weights: jax.Array, places: Any) -> jax.Array:
        keys = () if seed is None else (keys_of(seed, places),)
        losses = loss(params, batch, *keys)
        if not isinstance(losses, jax.Array):
            raise InputError(
                f"the loss function of a JaxJob needs to return one loss per sample and nothing "
                f"else, but returned a {type(losses).__name__}; compute metrics from job.params "
                "after the step, and use group or layer normalisation, which has no statistics to "
                "return"
            )
        if losses.shape != weights.shape:
            raise InputError(
                f"the loss function of a JaxJob needs to return one loss per sample, an array of "
                f"shape {weights.shape}, but returned shape {losses.shape}; leave out the mean"
            )
        if not jnp.issubdtype(losses.dtype, jnp.floating):
            raise InputError(
                "the loss function of a JaxJob needs to return losses that are floats, but "
                f"returned {losses.dtype}"
            )
        return jnp.sum(losses.astype(weights.dtype) * weights)

    def accumulate(
        params: Tree, totals: list[jax.Array], batch: Tree, weights: jax.Array, places: Any
    ) -> list[jax.Array]:
        value, gradients = jax.value_and_grad(weighted_loss)(params, batch, weights, places)
        added = flat.flatten(gradients, value)
        return [total + each for total, each in zip(totals, added, strict=True)]

    return accumulate


def _loss_of_one(loss: Loss, seed: int | None) -> Callable[..., jax.Array]:
    def loss_of_one(params: Tree, batch: Tree, places: Any) -> jax.Array:
        keys = () if seed is None else (keys_of(seed, places),)
        return loss(params, batch, *keys).reshape(())  # it may have lost its axis of one sample

    return loss_of_one


def _update_of(optimizer: optax.GradientTransformation, flat: FlatTree) -> Callable[..., Any]:
    def update(params: Tree, opt_state: Tree, sums: list[jax.Array]) -> tuple[Tree, Tree]:
        gradients, loss = flat.unflatten(sums), flat.number(sums)
        changes, new_state = _changes_by(optimizer, gradients, opt_state, params, loss)
        _refuse_other_shapes(changes, params)
        return optax.apply_updates(params, changes), _as_before(new_state, opt_state)

    return update


def _refuse_other_shapes(changes: Tree, params: Tree) -> None:
    """Raise InputError if changes are not those of each parameter; a number is one for all of it.

    What takes a gradient of each sample gives others, and they could be added all the same.
    """
    structure: Any = jax.tree.structure(params)  # half typed
    if jax.tree.structure(changes) != structure:
        raise InputError(
            "JaxJob needs an optimizer that returns a tree of changes like the parameters, "
            f"{structure!s:.100}, but got {jax.tree.structure(changes)!s:.100}"
        )
    leaves = jax.tree.leaves(changes)
    for (path, leaf), change in zip(
        jax.tree_util.tree_leaves_with_path(params), leaves, strict=True
    ):
        if not isinstance(change, int | float) and np.shape(change) != leaf.shape:
            raise InputError(
                f"JaxJob needs an optimizer that changes params{jax.tree_util.keystr(path)}, of "
                f"shape {leaf.shape}, by as many numbers, but got the shape {np.shape(change)}; "
                "it gets the mean gradient of all samples, and not the gradient of each"
            )


def _as_before(new_state: Tree, opt_state: Tree) -> Tree:
    """Return the new state of an optimizer with the types of the one before.

    Other types would be compiled again, and no chip that joins could take them.

    Raises:
        InputError: it is of another structure, or the types before cannot hold it.
    """
    structure: Any = jax.tree.structure(opt_state)  # half typed
    if jax.tree.structure(new_state) != structure:
        raise InputError(
            "JaxJob needs an optimizer whose state keeps its structure, but init returned "
            f"{structure!s:.100} and update {jax.tree.structure(new_state)!s:.100}"
        )

    def kept(path: Any, old: Any, new: Any) -> Any:
        if is_key(old) and is_key(new) and old.shape == new.shape:
            return new
        if is_key(old) or is_key(new) or np.shape(new) != old.shape or not can_hold(old.dtype, new):
            raise InputError(
                "JaxJob needs an optimizer whose state keeps its shapes and kinds of numbers, but "
                f"init made state{jax.tree_util.keystr(path)} {old.dtype} of shape {old.shape}, "
                f"and update made it {jnp.result_type(new)} of shape {np.shape(new)}"
            )
        return jnp.asarray(new, old.dtype)

    return jax.tree_util.tree_map_with_path(kept, opt_state, new_state)


def can_hold(dtype: Any, value: Any) -> bool:
    """Whether a type can hold a value but for rounding: no whole number holds a fraction."""
    return _generality(dtype) >= _generality(jnp.result_type(value))


def _generality(dtype: Any) -> int:
    kinds = jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating
    return next(number for number, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind))


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a random key of the new style, which is no array of NumPy."""
    return jnp.issubdtype(getattr(leaf, "dtype", np.int32), jax.dtypes.prng_key)


def _changes_by(
    optimizer: optax.GradientTransformation,
    gradients: Tree,
    opt_state: Tree,
    params: Tree,
    loss: jax.Array,
) -> Any:
    """Return what the optimizer changes, and its new state.

    Those that ask for the loss as `value`, as `optax.contrib.reduce_on_plateau` does, get it.

    Raises:
        InputError: it asks for more, as for `value_fn`, which computes the loss of other weights.
    """
    extended = optax.with_extra_args_support(optimizer)
    try:
        return extended.update(gradients, opt_state, params, value=loss, grad=gradients)
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split())
    try:  # some, such as optax.contrib.sam, take no further arguments at all
        return optimizer.update(gradients, opt_state, params)
    except (TypeError, ValueError):
        way_out = "; of optax.lbfgs use lbfgs(learning_rate, linesearch=None)"
        raise InputError(
            "JaxJob needs an optimizer that steps with the gradients, the parameters and the loss "
            f"(value) alone, but: {why:.300}{way_out * ('value_fn' in why)}"
        ) from None


@contextmanager
def shared_programs(run_dir: Path | None) -> Iterator[None]:
    """Compile inside this block as the only worker of the run on this host.

    If JAX has a folder for compiled programs already, that one is used.
    """
    settings: Any = jax.config  # half typed
    folder = settings.jax_compilation_cache_dir
    if folder is None and run_dir is not None:
        folder = str(run_dir / "compiled")
        settings.update("jax_compilation_cache_dir", folder)
        settings.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        settings.update("jax_persistent_cache_min_entry_size_bytes", -1)
        compilation_cache.reset_cache()  # JAX looks at these settings only once
    if folder is None:
        yield
        return
    done = Path(folder) / f"meshmend-{jax.__version__}.done"
    with folder_lock(Path(folder), timeout_s=_WAIT_S, is_needless=done.exists):
        yield
    with suppress(OSError):
        done.touch()  # from now on all workers load what was compiled, at the same time


def places_of(places: NDArray[np.int64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the high and the low half of places, because JAX's integers have 32 bits."""
    return (places >> _LOW_BITS).astype(np.uint32), places.astype(np.uint32)


def keys_of(seed: int, places: Any) -> jax.Array:
    """Return one random key for each place: it depends on the seed and the sample's place alone.

    So a step done again, or shared out among fewer chips, draws the same random numbers.
    """
    # Other kinds draw other numbers for a sample beside other samples.
    root = jax.random.key(seed, impl="threefry2x32")

    def key(high: jax.Array, low: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(root, high), low)

    return jax.vmap(key)(*places)
