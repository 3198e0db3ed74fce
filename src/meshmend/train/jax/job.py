"""A training job in JAX that survives: the loop of `meshmend.train.Job`, with params and optax.

    job = JaxJob(params, optax.adam(1e-3), loss, (images, labels), batch=64, steps=1000)
    for batch in job:
        if job.step(batch) and job.is_leader:
            print(job.step_number, job.loss)

`loss(params, batch)` returns one loss per sample. The job hands out this chip's share of each
step's samples. `step` computes their gradients, sums them over all chips and steps the optimizer.
If the mesh changed meanwhile, the step does not count, and the new share of the same step follows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
import optax

from meshmend.errors import InputError, check_count, hides_frames
from meshmend.membership.job import JobFingerprint
from meshmend.train.core.chip_job import ChipJob
from meshmend.train.core.job_core import JobCore
from meshmend.train.core.job_settings import JobSettings
from meshmend.train.core.worker_environment import worker_environment
from meshmend.train.jax.learner import N_TRIED, JaxLearner, checked_params, numpy_array
from meshmend.train.jax.outside_values import OutsideValues
from meshmend.train.jax.program import (
    FlatTree,
    JaxProgram,
    Loss,
    Tree,
    jax_program,
    shared_programs,
)
from meshmend.train.state.checkpoint import Saving
from meshmend.train.state.comparison import COMPARE_EVERY
from meshmend.train.state.fingerprint import job_fingerprint, parameter_words, sample_words
from meshmend.train.state.resume import Resume
from meshmend.train.state.state_tree import ARRAYS, Bytes, map_state

# What the programs of earlier jobs of this process have read; a notebook may make several jobs.
_outside_of: WeakKeyDictionary[JaxProgram, OutsideValues] = WeakKeyDictionary()


def stacked(samples: Sequence[Tree]) -> Tree:
    """Return a batch: each array of the samples, stacked along a new first axis.

    Raises:
        InputError: the samples are not alike.
    """
    try:
        return jax.tree.map(lambda *arrays: np.stack([*map(numpy_array, arrays)]), *samples)
    except ValueError as error:
        raise InputError(
            f"JaxJob needs samples that are alike, or a collate function that makes a batch of "
            f"them, but: {str(error).splitlines()[0]}"
        ) from None


class JaxJob(ChipJob):
    """One chip's part in training JAX parameters on the samples of a data set.

    The data set is a tuple or dict of arrays with the samples along their first axis, or anything
    with `len()` and `[]`, whose samples `collate` makes a batch of. A step uses `batch` samples
    over all chips together; with `policy="shrink"`, fewer while chips are missing. With
    `random_keys`, `loss(params, batch, keys)` gets one random key per sample. Gradients are
    computed `micro_batch` samples at a time. `resume` is a folder of checkpoints: the job begins
    with the newest one that is complete and undamaged; with "auto", with that of the folder of
    `saving`, or anew if there is none. The states of all chips are compared
    every `compare_every` steps; `check_shares`, `on_wrong_result` and `shares` are as in
    `meshmend.train.Job`.
    """

    @hides_frames
    def __init__(
        self,
        params: Tree,
        optimizer: optax.GradientTransformation,
        loss: Loss,
        dataset: Any,
        *,
        batch: int,
        steps: int,
        seed: int = 0,
        policy: str = "constant",
        micro_batch: int | None = None,
        random_keys: bool = False,
        collate: Callable[[Sequence[Any]], Tree] = stacked,
        saving: Saving | None = None,
        resume: Resume = None,
        compare_every: int = COMPARE_EVERY,
        check_shares: int | None = None,
        on_wrong_result: str | None = None,
        shares: str | None = None,
    ) -> None:
        samples = ArraySamples(dataset) if isinstance(dataset, tuple | dict) else dataset
        if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
            raise InputError(
                "JaxJob needs a tuple or dict of arrays, or a data set with len() and [], but got "
                f"a {type(samples).__name__}; put the samples of a generator into a list"
            )
        settings = JobSettings(
            len(samples),
            batch,
            steps,
            seed,
            policy,
            saving,
            resume,
            compare_every=compare_every,
            check_shares=check_shares,
            on_wrong_result=on_wrong_result,
            shares=shares,
        )
        settings.order()  # refuses a data set without samples
        if micro_batch is not None:
            check_count("JaxJob", "micro_batch", micro_batch, least=1)
        for name, function in (("a loss function", loss), ("a collate function", collate)):
            if not callable(function):
                raise InputError(f"JaxJob needs {name}, but got a {type(function).__name__}")
        for part in ("init", "update"):
            if not callable(getattr(optimizer, part, None)):
                raise InputError(
                    "JaxJob needs an optimizer of optax, such as optax.adam(1e-3), but got "
                    f"{optimizer!r:.80}"
                )
        environment = worker_environment()
        n_notes = settings.n_notes
        size = micro_batch or default_micro_batch(
            batch, environment.n_live_at_start, by_speed=n_notes > 0
        )
        flat = FlatTree.of(checked_params(params), n_notes)
        arguments = loss, optimizer, flat, seed if random_keys else None
        program = jax_program(*arguments)
        if program in _outside_of and _outside_of[program].changed() is not None:
            program = JaxProgram(*arguments)  # the kept one has the values of an earlier job
        self.steps = steps
        self._samples, self._collate = samples, collate
        with shared_programs(environment.run_dir):
            self._learner: JaxLearner = JaxLearner(params, program, micro_batch=size)
            if steps > 0:
                tried = np.linspace(0, len(samples) - 1, N_TRIED).astype(int)
                self._learner.warm_up(self._batch(tried.tolist()))
        self._outside = _outside_of[program] = OutsideValues(loss, optimizer.update)
        self._core = JobCore(
            self._learner, settings, lambda: jax_fingerprint(self._learner, samples, settings)
        )

    @property
    def params(self) -> Tree:
        """The parameters after the last step."""
        return self._learner.params

    @params.setter
    def params(self, params: Tree) -> None:
        """Replace them, on all chips alike."""
        self._learner.params = params

    @property
    def opt_state(self) -> Tree:
        """The state of the optimizer after the last step."""
        return self._learner.opt_state

    @opt_state.setter
    def opt_state(self, opt_state: Tree) -> None:
        """Replace it, on all chips alike."""
        self._learner.opt_state = opt_state

    def __iter__(self) -> Iterator[Tree]:
        """Yield this chip's samples, step by step, until all steps are done on all chips.

        Raises:
            JobFailedError: neither a chip nor a checkpoint has a state to go on from.
        """
        for samples in self._core:
            self._learner.begin_turn()
            yield self._batch(samples.tolist())
            self._learner.end_turn()

    def step(self, batch: Tree) -> bool:
        """Sum the gradients over all chips and step the optimizer; return whether it counted.

        Raises:
            InputError: these are not the samples of a new step.
        """
        share = self._core.share_to_step_on()
        self._outside.refuse_changes()
        self._learner.gather(batch, share, is_last=self._core.is_stopping)
        has_counted = self._core.complete_step()
        self._learner.end_step(counts=has_counted)
        return has_counted

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all chips; arrays come back as NumPy's. See `ChipJob.gather`."""
        return super().gather(map_state(_plain_value, value))

    def _batch(self, indices: list[int]) -> Tree:
        if isinstance(self._samples, ArraySamples):
            return self._samples.batch(indices)
        return self._collate([self._samples[index] for index in indices])


def _plain_value(leaf: Any) -> Any:
    """Return an array of JAX as NumPy's, and a scalar of either as a number."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    array = numpy_array(leaf)
    return array if array.ndim else array.item()


class ArraySamples:
    """The samples of a tree of arrays, along their first axis, as a data set.

    Raises:
        InputError: there are no arrays, or their lengths differ.
    """

    def __init__(self, arrays: Tree) -> None:
        self._arrays = jax.tree.map(numpy_array, arrays)
        lengths = {array.shape[:1] for array in jax.tree.leaves(self._arrays)}
        if len(lengths) != 1 or () in lengths:
            raise InputError(
                "JaxJob needs arrays of one length, the number of samples, but their shapes are "
                f"{[array.shape for array in jax.tree.leaves(self._arrays)]!r:.200}"
            )
        self._length = int(lengths.pop()[0])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tree:
        return jax.tree.map(lambda array: array[index], self._arrays)

    def batch(self, indices: Sequence[int]) -> Tree:
        """Return the samples with these indices."""
        return jax.tree.map(lambda array: array[np.asarray(indices)], self._arrays)


def default_micro_batch(batch: int, n_chips: int, *, by_speed: bool = False) -> int:
    """Return half the share of a chip while all chips are live.

    Then the share of a mesh with a hole, which is a little larger, needs one micro-batch more, and
    not twice as many. Shares by speed need smaller ones, or a small share would take as long as
    half a share.
    """
    share = -(-batch // n_chips)
    return -(-share // (8 if by_speed else 2))


def jax_fingerprint(learner: JaxLearner, dataset: Any, settings: JobSettings) -> JobFingerprint:
    """Return what must be equal on all workers of a job; reads a few samples, each twice."""

    def packed(samples: Any) -> Bytes:
        return ARRAYS.packed(map_state(_plain_value, samples))

    state = learner.state()
    return job_fingerprint(
        settings,
        framework="jax",
        model=parameter_words(state["model"]),
        optimizer=f"optax with {parameter_words(state['optimizer'])}",
        samples=sample_words(dataset, packed),
    )
