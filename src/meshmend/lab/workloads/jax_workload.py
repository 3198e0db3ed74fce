"""A JAX workload: parameters, their optimizer, their samples and their loss, as one value.

A launcher asks for shapes only, which needs no computation with JAX.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax

from meshmend.config import JobConfig
from meshmend.lab.workloads.trainable import SampleSet, resume_of, saving_of
from meshmend.train.core.worker_loop import SumSizes
from meshmend.train.jax.job import JaxJob, default_micro_batch, stacked
from meshmend.train.jax.learner import named_arrays
from meshmend.train.jax.program import FlatTree, Tree, jax_program
from meshmend.train.state.state_tree import ARRAYS, Framework

MAX_EVALUATED = 1024  # held-out samples; enough for the figures at the end of a run
_EVALUATION_BATCH = 64

# The scores of a batch by name, such as "loss" and "accuracy": one value per sample.
SampleScores = Mapping[str, jax.Array]


@dataclass(frozen=True)
class JaxWorkload:
    """A JAX model to train on samples; `new_params(seed)` returns NumPy arrays."""

    name: str
    dataset: SampleSet
    held_out: SampleSet
    new_params: Callable[[int], Tree]
    optimizer: Callable[[float], optax.GradientTransformation]
    scores: Callable[[Tree, tuple[Any, ...]], SampleScores]
    rate: float
    seed: int = 0

    @property
    def n_samples(self) -> int:
        """The number of samples to train on."""
        return len(self.dataset)

    @property
    def n_parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def framework(self) -> Framework:
        """How its states become bytes."""
        return ARRAYS

    @cached_property
    def params(self) -> Tree:
        """The parameters before the first step: NumPy arrays, the same in every process."""
        return self.new_params(self.seed)

    def preload(self, config: JobConfig, n_chips: int) -> None:
        """Trace what workers compute, which needs no computation, so that they need not."""
        program = jax_program(self.loss, self._optimizer_of(config), FlatTree.of(self.params), None)
        micro_batch = default_micro_batch(config.training.batch, n_chips)
        program.trace(self.params, stacked([self.dataset[0]]), micro_batch)

    def sum_sizes(self, config: JobConfig, n_chips: int) -> SumSizes:
        """Return the number of elements and the type of each sum of a step."""
        return FlatTree.of(self.params).sizes()

    def fresh_state(self) -> dict[str, Any]:
        """Return the training state before the first step; the optimizer's values are zeros."""
        described = jax.eval_shape(self.optimizer(self.rate).init, self.params)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), described)
        return {
            "model": named_arrays(self.params),
            "optimizer": named_arrays(zeros),
            "also": [],
        }

    def loss(self, params: Tree, batch: Any) -> jax.Array:
        """Return the loss of each sample of a batch."""
        return self.scores(params, batch)["loss"]

    def train(self, config: JobConfig) -> Mapping[str, float]:
        """Run the loop of one worker; return the evaluation on the leader, and nothing elsewhere.

        Raises:
            InputError: the settings, or the checkpoint to resume, do not fit.
        """
        what = config.training
        job = JaxJob(
            self.params,
            self._optimizer_of(config),
            self.loss,
            self.dataset,
            batch=what.batch,
            steps=what.steps,
            seed=what.seed,
            policy=what.batch_policy,
            saving=saving_of(config),
            resume=resume_of(config),
        )
        for batch in job:
            job.step(batch)
        return self.evaluate(job.params) if job.is_leader else {}

    def _optimizer_of(self, config: JobConfig) -> optax.GradientTransformation:
        """Return the optimizer of these settings: the same object each time."""
        rate = config.training.lr or self.rate
        if rate not in self._optimizers:
            self._optimizers[rate] = self.optimizer(rate)
        return self._optimizers[rate]

    @cached_property
    def _optimizers(self) -> dict[float, optax.GradientTransformation]:
        return {}

    def evaluate(self, params: Tree) -> dict[str, float]:
        """Return the means of all scores over held-out samples."""
        n_samples = min(len(self.held_out), MAX_EVALUATED)
        totals: dict[str, float] = {}
        scores = jax.jit(self.scores)
        for start in range(0, n_samples, _EVALUATION_BATCH):
            # The last batch is filled with samples that do not count, so that all have one shape.
            places = range(start, start + _EVALUATION_BATCH)
            batch = stacked([self.held_out[min(at, n_samples - 1)] for at in places])
            n_counted = min(_EVALUATION_BATCH, n_samples - start)
            for name, values in scores(params, batch).items():
                totals[name] = totals.get(name, 0.0) + float(np.asarray(values)[:n_counted].sum())
        return {name: total / n_samples for name, total in totals.items()}
