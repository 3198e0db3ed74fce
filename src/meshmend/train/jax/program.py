"""What a JAX job computes in a step, as functions that JAX compiles once.

Gradients are computed in micro-batches of one fixed size, the last of them padded. So another
number of samples, after a chip died, needs no other program: nothing is compiled after the start.
One worker of a host compiles, the others wait and load what it has compiled from the folder of the
run. A worker that is started again compiles nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.compilation_cache import compilation_cache

from meshmend.errors import InputError
from meshmend.locks import folder_lock
from meshmend.train.jax.flat_tree import FlatTree, Tree
from meshmend.train.jax.sample_keys import keys_of, places_of

Loss = Callable[..., jax.Array]

_WAIT_S: Final = 600.0  # a large model compiles for minutes; who waits in vain compiles itself


class JaxProgram:
    """The three functions of a job: `init`, `accumulate` and `update`.

    `init(params)` returns the state of the optimizer. `accumulate(params, totals, batch, weights,
    places)` adds the weighted gradients and losses of a micro-batch to flat totals. `update(params,
    opt_state, sums)` steps the optimizer.
    """

    def __init__(
        self, loss: Loss, optimizer: optax.GradientTransformation, flat: FlatTree, seed: int | None
    ) -> None:
        self.flat = flat
        self.init = jax.jit(optimizer.init)
        self.accumulate = jax.jit(_accumulation(loss, flat, seed))
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


@lru_cache(maxsize=4)
def jax_program(
    loss: Loss, optimizer: optax.GradientTransformation, flat: FlatTree, seed: int | None
) -> JaxProgram:
    """Return the program of a job; the same arguments give the same program.

    With `seed`, the loss function gets one random key per sample as its third argument.
    """
    return JaxProgram(loss, optimizer, flat, seed)


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
        return jnp.sum(losses * weights)

    def accumulate(
        params: Tree, totals: list[jax.Array], batch: Tree, weights: jax.Array, places: Any
    ) -> list[jax.Array]:
        value, gradients = jax.value_and_grad(weighted_loss)(params, batch, weights, places)
        added = flat.flatten(gradients, value)
        return [total + each for total, each in zip(totals, added, strict=True)]

    return accumulate


def _update_of(optimizer: optax.GradientTransformation, flat: FlatTree) -> Callable[..., Any]:
    def update(params: Tree, opt_state: Tree, sums: list[jax.Array]) -> tuple[Tree, Tree]:
        gradients, loss = flat.unflatten(sums), flat.number(sums)
        changes, new_state = _changes_by(optimizer, gradients, opt_state, params, loss)
        new_params = optax.apply_updates(params, changes)
        # Other types than before would be compiled again.
        kept = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, opt_state)
        return new_params, kept

    return update


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
    except TypeError as error:
        why = str(error)
    try:  # some, such as optax.contrib.sam, take no further arguments at all
        return optimizer.update(gradients, opt_state, params)
    except TypeError:
        raise InputError(
            "JaxJob needs an optimizer that steps with the gradients, the parameters and the loss "
            f"(value) alone, but: {why}; of optax.lbfgs use lbfgs(learning_rate, linesearch=None)"
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
