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
from meshmend.train.core.learner import Bytes
from meshmend.train.core.worker_loop import SumSizes
from meshmend.train.data.samples import Share
from meshmend.train.jax.program import JaxProgram, Tree, places_of
from meshmend.train.state.digest import BegunDigests, hash_bytes
from meshmend.train.state.state_tree import ARRAYS, Array, Framework

_STATISTICS: Final = "batch_stats"  # the collection of flax's batch normalisation
_NO_STATISTICS: Final = (
    ", and use group or layer normalisation, or the statistics as they are (use_running_average)"
)
_LOSS_NAME: Final = "the loss"  # beside the names of parameters


class JaxLearner:
    """Parameters and the state of their optimizer, as a `Learner`; a program computes."""

    framework: Final[Framework] = ARRAYS

    def __init__(self, params: Tree, program: JaxProgram, *, micro_batch: int) -> None:
        self.params = _on_device(params)
        self.opt_state = _on_device(program.init(self.params))
        self._program, self._micro_batch = program, micro_batch
        self._sums = program.flat.zeros()
        # Where the numbers of the first flat array are: the job's own follow them.
        self._stop = len(self._sums[0]) - 1 - program.flat.n_notes
        self._loss = self._stop - 1

    def warm_up(self, batch: Tree) -> None:
        """Compile all that a step needs; the batch is of one sample, and changes nothing."""
        self.gather(batch, Share(0, 1, 1))
        jax.block_until_ready(
            self._program.update(self.params, self.opt_state, self._program.flat.zeros())
        )

    def gather(self, batch: Tree, share: Share, *, is_last: bool = False) -> None:
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

    def sum_sizes(self) -> SumSizes:
        """Return the number of elements and the type of each sum of a step."""
        return self._program.flat.sizes()

    def payloads(self) -> Sequence[Bytes]:
        """Return what this chip puts into each sum; the sums replace it in place."""
        return [total.view(np.uint8) for total in self._sums]

    def notes(self) -> NDArray[Any]:
        """Return the elements of the first sum that are the job's own."""
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
        """Do nothing: a step changes nothing before its update."""

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
        self.params, self.opt_state = jax.tree.map(_shape_of, (self.params, self.opt_state))

    def load(self, state: dict[str, Any]) -> None:
        """Replace these parts by those of another chip or of a checkpoint.

        It takes the arrays out of the state one by one, so that there is never a second copy of
        more than one.
        """
        params = _with_arrays(self.params, state["model"])
        self.opt_state = _with_arrays(self.opt_state, state["optimizer"])
        self.params = params

    def begun_digest(self) -> BegunDigests:
        """Begin to hash each array of the state by its name."""
        return ARRAYS.begun_digest(self.state())

    def part_name(self, name: str) -> str:
        """Return the name of a part of the state."""
        return name

    def share_digests(self) -> dict[str, str]:
        """Return nothing: every chip keeps all of the optimizer's state."""
        return {}


def named_arrays(tree: Tree) -> dict[str, Array]:
    """Return the arrays of a tree by their names; on a CPU they share its memory."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in found
        if not isinstance(leaf, jax.ShapeDtypeStruct)
    }


def _with_arrays(tree: Tree, arrays: dict[str, Array]) -> Tree:
    """Return a tree with copies of these arrays as leaves; takes them out of the dict."""

    def put(path: Any, _leaf: Any) -> Any:
        array = arrays.pop(jax.tree_util.keystr(path))
        return jax.device_put(array, may_alias=False).block_until_ready()

    return jax.tree_util.tree_map_with_path(put, tree)


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _on_device(tree: Tree) -> Tree:
    """Return a copy of a tree, without weak types, which would be compiled again."""
    return jax.tree.map(lambda leaf: jax.device_put(np.array(leaf)), tree)


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
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise InputError(
                f"JaxJob needs parameters that are arrays of floats, but "
                f"params{jax.tree_util.keystr(path)} is {dtype or type(leaf).__name__}; keep what "
                "is not trained out of params"
            )
    return params
