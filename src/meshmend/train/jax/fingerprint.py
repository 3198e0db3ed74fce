"""What a JAX job must have in common on all workers, as its fingerprint."""

from typing import Any

import jax

from meshmend.membership.job_fingerprint import JobFingerprint
from meshmend.train.core.job_core import JobSettings
from meshmend.train.jax.learner import JaxLearner
from meshmend.train.state.array_state import ARRAYS, Array
from meshmend.train.state.fingerprint import job_fingerprint, parameter_words, sample_words


def jax_fingerprint(learner: JaxLearner, dataset: Any, settings: JobSettings) -> JobFingerprint:
    """Return what must be equal on all workers of a job; reads a few samples, each twice."""
    state = learner.state()
    return job_fingerprint(
        settings,
        framework="jax",
        model=_words(state["model"]),
        optimizer=f"optax with {_words(state['optimizer'])}",
        samples=sample_words(_Plain(dataset), ARRAYS.packed),
    )


def _words(arrays: dict[str, Array]) -> str:
    return parameter_words(
        {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
    )


class _Plain:
    """A data set whose JAX arrays are NumPy's."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self._dataset[index]
        return jax.tree.map(
            lambda leaf: jax.device_get(leaf) if isinstance(leaf, jax.Array) else leaf, sample
        )
