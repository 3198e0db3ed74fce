"""JAX parameters and an optax optimizer, as a job trains them.

The gradients of a step are summed in float32, those of float64 parameters in float64.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.planning.plan_request import SumSizes
from meshmend.train.core.learner import LearnerSums
from meshmend.train.data.samples import Share
from meshmend.train.jax.program import JaxProgram, Tree, can_hold, is_key, places_of
from meshmend.train.state.digest import BegunDigests, hash_bytes
from meshmend.train.state.state_tree import ARRAYS, Array, Bytes, Framework

_STATISTICS: Final = "batch_stats"  # the collection of flax's batch normalisation
_NO_STATISTICS: Final = (
    ", and use group or layer normalisation, or the statistics as they are (use_running_average)"
)
_LOSS_NAME: Final = "the loss"  # beside the names of parameters
_ROUNDING: Final = 1e-3  # of the largest gradient; a GPU may add in another order
_ELSEWHERE: Final = 2e-2  # at another place in the batch, where half precision rounds otherwise
N_TRIED: Final = 8  # samples that are tried before the first step
_LOSS_ROUNDINGS: Final = 100  # what others add to a loss may be little


class JaxLearner:
    """Parameters and the state of their optimizer, as a `Learner`; a program computes."""

    framework: Final[Framework] = ARRAYS

    def __init__(self, params: Tree, program: JaxProgram, *, micro_batch: int) -> None:
        self.params = _on_device(params)
        self.opt_state = _on_device(program.init(self.params))
        self._shapes = jax.tree.map(_shape_of, (self.params, self.opt_state))
        self._key_kinds = _key_kinds(self.opt_state)
        self._begun: tuple[Tree, Tree] | None = None  # what a turn of the loop began with
        self._kept: tuple[Tree, Tree] | None = None  # what it is to leave, if its step is void
        self._is_void = False
        self._program, self._micro_batch = program, micro_batch
        self._sums = program.flat.zeros()
        # Where the numbers of the first flat array are: the job's own follow them.
        self._stop = len(self._sums[0]) - 1 - program.flat.n_notes
        self._loss = self._stop - 1

    def warm_up(self, batch: Tree) -> None:
        """Compile all that a step needs; the batch is of `N_TRIED` samples, and changes nothing.

        Raises:
            InputError: the loss of the first sample depends on the others, on its place, or on the
                size of the batch.
        """
        arrays = _numbers(batch, n_samples=N_TRIED)
        n = max(2, self._micro_batch)  # a single sample has no others
        alone = self._first_among(arrays, n, place=n // 2, others=[0])
        among = [
            self._first_among(arrays, n, place=n // 2, others=range(N_TRIED)[start : start + n - 1])
            for start in range(1, N_TRIED, n - 1)
        ]
        if any(self._depends(alone, found) for found in among):
            raise InputError(
                "JaxJob needs a loss of each sample that depends on no other, but that of sample 0 "
                "is another beside other samples; a share is computed in parts, of which the last "
                "is filled up; remove what mixes the samples, such as batch normalisation, a term "
                "of the whole batch, or one random key for all"
            )
        found = self._first_among(arrays, n, place=0, others=[0])
        if _is_finite(alone, found) and max(self._gaps(alone, found)) > _ELSEWHERE:
            raise InputError(
                "JaxJob needs a loss of each sample that does not depend on its place in the "
                "batch, but that of sample 0 is another at another place; a chip may compute it "
                "at any; draw random numbers from the sample's own key (random_keys=True)"
            )
        if n > self._micro_batch:
            self._first_among(arrays, self._micro_batch, place=0, others=[0])
        self._refuse_batch_sizes(arrays, float(alone[0][self._loss]))
        jax.block_until_ready(
            self._program.update(self.params, self.opt_state, self._program.flat.zeros())
        )

    def _refuse_batch_sizes(self, arrays: Tree, loss: float) -> None:
        """Raise InputError if the first sample has another loss in a batch of its own.

        The loss has read the size of its batch then, which is here that of a micro-batch.
        """
        part = jax.tree.map(lambda array: array[:1], arrays)
        try:
            own = float(self._program.loss_of_one(self.params, part, places_of(np.array([0]))))
        except (TypeError, ValueError, IndexError):  # it needs more samples, but may not mix them
            return
        largest = max(abs(own), abs(loss), _ROUNDING)
        if np.isfinite([own, loss]).all() and abs(own - loss) > _ELSEWHERE * largest:
            raise InputError(
                "JaxJob needs a loss of each sample that does not depend on how many samples there "
                f"are, but that of sample 0 is {loss:.6g} in a micro-batch and {own:.6g} alone; "
                "divide no term by the size of the batch, which is here that of a micro-batch"
            )

    def _first_among(
        self, arrays: Tree, n: int, *, place: int, others: Sequence[int]
    ) -> list[Array]:
        """Return gradients and loss of the first sample at a place among copies of others.

        It has the same random key everywhere, the others have their own.
        """
        chosen = np.insert(np.resize(np.array(others), n - 1), min(place, n - 1), 0)
        totals = self._program.flat.zeros()
        weights = (np.arange(n) == place).astype(totals[0].dtype)
        part = jax.tree.map(lambda array: array[chosen], arrays)
        sums = self._program.accumulate(self.params, totals, part, weights, places_of(chosen))
        return [np.asarray(each) for each in sums]

    def _depends(self, alone: list[Array], found: list[Array]) -> bool:
        """Whether the first sample among others is another than among copies of itself.

        If it is finite only among others, it depends on them; the loss of others may be infinite.
        """
        if not _is_finite(alone, found):
            return _is_finite(found)
        of_loss, of_gradients = self._gaps(alone, found)
        most = _LOSS_ROUNDINGS * np.finfo(found[0].dtype).eps
        return of_loss > most or of_gradients > _ROUNDING

    def _gaps(self, one: list[Array], other: list[Array]) -> tuple[float, float]:
        """Return how far losses and gradients are apart, of the largest."""
        mine, theirs = (float(each[0][self._loss]) for each in (one, other))
        return abs(mine - theirs) / max(1.0, abs(mine)), max(
            float(np.abs(mine - theirs).max() / max(np.abs(mine).max(), np.finfo(mine.dtype).tiny))
            for mine, theirs in zip(one, other, strict=True)
        )

    def begin_turn(self) -> None:
        """Remember parameters and state, whose containers the loop may change before the step."""
        self._begun = self._copies()

    def end_step(self, *, counts: bool) -> None:
        """Remember them again: the loop may change them after a step that does not count, too."""
        self._begun = None
        self._kept, self._is_void = self._copies(), not counts

    def end_turn(self) -> None:
        """Undo what the loop has changed in a turn that did not count, and check the rest."""
        kept, self._kept = self._kept, None
        if kept is not None:
            _refuse_donated(kept)
        if kept is not None and self._is_void:
            self.params, self.opt_state = kept
        self._take_changes()

    def _copies(self) -> tuple[Tree, Tree]:
        """Return parameters and state in containers of their own; arrays of JAX never change."""
        copies: tuple[Tree, Tree] = jax.tree.map(lambda leaf: leaf, (self.params, self.opt_state))
        return copies

    def _take_changes(self) -> None:
        """Give what the loop has put into parameters and state the types that they have.

        Raises:
            InputError: it has another shape, or does not belong there.
        """
        found = self.params, self.opt_state
        structure: Any = jax.tree.structure(self._shapes)  # half typed
        if jax.tree.structure(found) != structure:
            raise InputError(
                "JaxJob needs parameters and a state of the optimizer that keep their structure, "
                "but the loop has added or removed some; make them before the job"
            )
        self.params, self.opt_state = jax.tree_util.tree_map_with_path(
            _as_before, found, self._shapes
        )

    def gather(self, batch: Tree, share: Share, *, is_last: bool = False) -> None:
        """Put the weighted gradients and losses of this chip's samples into the payloads.

        Raises:
            InputError: the batch has another number of samples than the share.
        """
        _refuse_donated((self._begun, self.params, self.opt_state))
        if jax.dtypes.canonicalize_dtype(self._sums[0].dtype) != self._sums[0].dtype:
            raise InputError(
                "JaxJob has parameters of float64, but jax_enable_x64 is off in this step; set it "
                "with jax.config.update, or put the loop into the block too"
            )
        self._take_changes()
        arrays = _numbers(batch, n_samples=share.n_samples)
        totals: Sequence[Any] = self._program.flat.zeros()
        for start in range(0, share.n_samples, self._micro_batch):
            places = np.arange(start, start + self._micro_batch)
            weights = ((places < share.n_samples) / share.batch).astype(totals[0].dtype)
            # The last sample fills the rest: its loss is finite if the loss of the step is.
            chosen = np.minimum(places, share.n_samples - 1)
            part = jax.tree.map(lambda array, at=chosen: array[at], arrays)
            totals = self._program.accumulate(
                self.params, totals, part, weights, places_of(share.start + chosen)
            )
        # Copies: the sum is made in place, but JAX's arrays must not change.
        self._sums = [np.array(total) for total in totals]
        self._sums[0][self._stop] = is_last

    @property
    def sums(self) -> LearnerSums:
        """What is summed in a step, which is here."""
        return self

    @property
    def sizes(self) -> SumSizes:
        """The number of elements and the type of each sum of a step."""
        return self._program.flat.sizes()

    @property
    def payloads(self) -> Sequence[Bytes]:
        """What this chip puts into each sum; the sums replace it in place."""
        return [total.view(np.uint8) for total in self._sums]

    @property
    def notes(self) -> NDArray[Any]:
        """The elements of the first sum that are the job's own."""
        return self._sums[0][self._stop + 1 :]

    def payload_hashes(self, number: int) -> dict[str, int]:
        """Return a hash of what the samples have put into a sum, by parameter."""
        flat, places = self._sums[number], self._program.flat.places()[number]
        if number == 0:  # all but whether to stop
            places = {**places, _LOSS_NAME: slice(self._loss, self._stop)}
        return {name: hash_bytes(flat[at].view(np.uint8)) for name, at in places.items()}

    def refill_changed(self) -> None:
        """Do nothing: no gradient changes after it was computed."""

    def clear(self, *, is_last: bool) -> None:
        """Put zeros into the payloads, because this chip has no samples."""
        self._begun = None
        self._sums = self._program.flat.zeros()
        self._sums[0][self._stop] = is_last

    def flush(self) -> None:
        """Do nothing: no sum begins before the end of a step."""

    def refill_stale(self) -> Sequence[int]:
        """Return nothing: no gradient changes after its sum has begun."""
        return ()

    @property
    def is_last(self) -> bool:
        """Whether a chip said that this step is the last; known after the sum."""
        return bool(self._sums[0][self._stop] > 0)

    def is_finite(self) -> bool:
        """Return True: in JAX, `optax.apply_if_finite` looks after sums that are not finite."""
        return True

    def non_finite(self) -> Sequence[str]:
        """Return nothing: see `is_finite`."""
        return ()

    def skip(self) -> float:
        """Return the mean loss over all samples, without an update."""
        return float(self._sums[0][self._loss])

    def undo(self) -> None:
        """Undo what the loop has changed before its step, which changes nothing itself."""
        if self._begun is not None:
            (self.params, self.opt_state), self._begun = self._begun, None

    def update(self) -> float:
        """Step the optimizer with the sums; return the mean loss over all samples."""
        updated = self._program.update(self.params, self.opt_state, self._sums)
        self.params, self.opt_state = jax.block_until_ready(updated)
        return float(self._sums[0][self._loss])

    def state(self) -> dict[str, Any]:
        """Return the arrays of the parameters and of the optimizer by their names."""
        return {
            "model": named_arrays(self.params),
            "optimizer": named_arrays(self.opt_state),
            "also": [],
        }

    def saved_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return self.state()

    def free(self) -> None:
        """Give up all arrays, which cannot be written over; only their shapes stay."""
        self.params, self.opt_state = self._shapes
        self._begun = None

    def load(self, state: dict[str, Any]) -> None:
        """Replace these parts by those of another chip or of a checkpoint.

        It takes the arrays out of the state one by one, so that there is never a second copy of
        more than one.
        """
        params = _with_arrays(self.params, state["model"], {})
        self.opt_state = _with_arrays(self.opt_state, state["optimizer"], self._key_kinds)
        self.params, self._begun = params, None

    def begun_digest(self) -> BegunDigests:
        """Begin to hash each array of the state by its name."""
        return ARRAYS.begun_digest(self.state())

    def part_name(self, name: str) -> str:
        """Return the name of a part of the state."""
        return name

    def share_digests(self) -> dict[str, str]:
        """Return nothing: every chip keeps all of the optimizer's state."""
        return {}


def _is_finite(*found: list[Array]) -> bool:
    return all(np.isfinite(array).all() for arrays in found for array in arrays)


def _numbers(batch: Tree, *, n_samples: int) -> Tree:
    """Return a batch as arrays of NumPy.

    Raises:
        InputError: they are no numbers, or of another number of samples.
    """
    arrays = jax.tree.map(numpy_array, batch)
    for path, array in jax.tree_util.tree_flatten_with_path(arrays)[0]:
        if array.dtype.kind in "OSUMm":
            raise InputError(
                f"JaxJob needs samples of numbers, but batch{jax.tree_util.keystr(path)} is of "
                f"{array.dtype}; leave it out of the data set, or of what collate returns"
            )
        if array.shape[:1] != (n_samples,):
            raise InputError(
                f"JaxJob needs a batch of arrays of its {n_samples} samples, but got one of shape "
                f"{array.shape}; step takes what the job handed out, which collate has made"
            )
    return arrays


def numpy_array(leaf: Any) -> Array:
    """Return a number or an array as one of NumPy.

    Raises:
        InputError: it holds random keys, of which NumPy knows nothing.
    """
    if isinstance(leaf, jax.Array) and is_key(leaf):
        raise InputError(
            "JaxJob needs arrays that NumPy can hold, but got random keys; pass "
            "jax.random.key_data(keys), and make keys of it with jax.random.wrap_key_data; for a "
            "loss, the job can draw them (random_keys=True)"
        )
    return np.asarray(leaf)


def named_arrays(tree: Tree) -> dict[str, Array]:
    """Return the arrays of a tree by their names; on a CPU they share its memory."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): np.asarray(_plain(leaf))
        for path, leaf in found
        if not isinstance(leaf, jax.ShapeDtypeStruct)
    }


def _with_arrays(tree: Tree, arrays: dict[str, Array], key_kinds: Mapping[str, Any]) -> Tree:
    """Return a tree with copies of these arrays as leaves; takes them out of the dict."""

    def put(path: Any, _leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        array = jax.device_put(arrays.pop(name), may_alias=False).block_until_ready()
        if name in key_kinds:
            return jax.random.wrap_key_data(array, impl=key_kinds[name])
        return array

    return jax.tree_util.tree_map_with_path(put, tree)


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _on_device(tree: Tree) -> Tree:
    """Return a copy of a tree, without weak types, which would be compiled again."""
    return jax.tree.map(lambda leaf: leaf if is_key(leaf) else jax.device_put(np.array(leaf)), tree)


def _as_before(path: Any, leaf: Any, before: jax.ShapeDtypeStruct) -> Any:
    """Return a leaf with the type that it had, also if the loop has put a number there."""
    is_like = isinstance(leaf, jax.Array) and (leaf.shape, leaf.dtype) == (
        before.shape,
        before.dtype,
    )
    if is_like and (is_key(leaf) or not leaf.weak_type):
        return leaf
    is_array = not is_key(leaf) and not is_key(before) and np.shape(leaf) == before.shape
    if is_array and can_hold(before.dtype, leaf):
        return jax.device_put(np.array(leaf, before.dtype))
    begins_whole = is_array and jnp.issubdtype(before.dtype, jnp.integer)
    raise InputError(
        f"JaxJob needs an array of shape {before.shape} and type {before.dtype} at "
        f"{jax.tree_util.keystr(path)} of (params, opt_state), but the loop has put {leaf!r:.80} "
        "there" + "; what is to hold fractions begins as a float, such as 1.0" * begins_whole
    )


def _refuse_donated(tree: Tree) -> None:
    """Raise InputError if the loop has given away arrays that may have to come back."""
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree)):
        raise InputError(
            "JaxJob needs the arrays of its parameters and of the optimizer's state, because a "
            "step may not count, but a function that the loop has called with them has used up "
            "their memory; leave out donate_argnums there, or pass copies"
        )


def _key_kinds(tree: Tree) -> dict[str, Any]:
    """Return how each random key of a tree draws, by its name."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): jax.random.key_impl(leaf)
        for path, leaf in found
        if is_key(leaf)
    }


def _plain(leaf: Any) -> Any:
    """Return a random key as the numbers that it is made of, and other leaves as they are."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def checked_params(params: Tree) -> Tree:
    """Return parameters if all are arrays of floats, and none is a running statistic.

    Raises:
        InputError: one is, or there are none.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(params)
    if not found:
        raise InputError("JaxJob needs parameters to train, but got none")
    if isinstance(params, Mapping) and "params" in params and len(params) > 1:
        others = ", ".join(str(name) for name in params if name != "params")
        raise InputError(
            f"JaxJob needs the parameters alone, but got variables that hold {others} beside "
            "params, which the optimizer would train; pass variables['params']"
            + _NO_STATISTICS
            * (_STATISTICS in params)
        )
    for path, _leaf in found:
        if _STATISTICS in {getattr(part, "key", None) for part in path}:
            raise InputError(
                f"JaxJob needs parameters that are trained, but params{jax.tree_util.keystr(path)} "
                f"is a running statistic; keep it out of params{_NO_STATISTICS}"
            )
    for path, leaf in found:
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        dtype: Any = getattr(leaf, "dtype", None)
        if not is_array or not jnp.issubdtype(dtype, jnp.floating):
            raise InputError(
                f"JaxJob needs parameters that are arrays of floats, but "
                f"params{jax.tree_util.keystr(path)} is {dtype or type(leaf).__name__}; keep what "
                "is not trained out of params"
            )
    return params
