"""The fingerprint of a job: what must be equal on all workers, compared before they train.

Imports no framework: the jobs of PyTorch and JAX describe their models, optimizers and samples.
Samples are not compared if they cannot be hashed, or if reading them twice gives different values.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

import meshmend
from meshmend.membership.job import NOT_COMPARED, JobFingerprint
from meshmend.train.core.job_settings import JobSettings
from meshmend.train.data.random_numbers import seeded
from meshmend.train.state.state_tree import Bytes, RawArray, map_state

_SEED: Final = 1  # of samples that draw random numbers, so that all workers draw the same
_N_SAMPLES: Final = 3  # the first, the last, and one in the middle
_DIGEST_BYTES: Final = 8


def job_fingerprint(
    settings: JobSettings, *, framework: str, model: str, optimizer: str, samples: str
) -> JobFingerprint:
    """Return the fingerprint of a job, given its model, optimizer and samples in words."""
    return JobFingerprint(
        version=meshmend.__version__,
        steps=settings.steps,
        batch=settings.batch,
        seed=settings.seed,
        policy=settings.policy,
        model=model,
        optimizer=optimizer,
        dataset_length=settings.n_samples or 0,  # a stream has none
        samples=samples,
        framework=framework,
        check_shares=settings.checked_every,
        shares=settings.shared_by,
    )


def parameter_words(parameters: Mapping[str, Any]) -> str:
    """Return counts and a digest of the types and shapes of parameters, given by their names."""
    described = [
        (name, str(each.dtype), tuple(each.shape)) for name, each in sorted(parameters.items())
    ]
    n_elements = sum(math.prod(shape) for _, _, shape in described)
    digest = _digest(json.dumps(described).encode())
    return f"{len(parameters)} parameters of {n_elements} elements (digest {digest})"


def sample_words(dataset: Any, packed: Callable[[Any], Bytes]) -> str:
    """Return a digest of a few samples, each read twice, or `NOT_COMPARED`.

    `packed(samples)` returns them as bytes; it gets NumPy's arrays as `RawArray`.
    """
    length = len(dataset)
    chosen = sorted({index * (length - 1) // (_N_SAMPLES - 1) for index in range(_N_SAMPLES)})
    indices = [index for index in chosen if 0 <= index < length]
    try:
        first, again = (_digest_of_samples(dataset, indices, packed) for _ in range(2))
    except Exception:  # a user's data set may raise anything; training will show it
        return NOT_COMPARED
    return first if first == again else NOT_COMPARED


def _digest_of_samples(dataset: Any, indices: list[int], packed: Callable[[Any], Bytes]) -> str:
    with seeded(_SEED):
        return _digest(packed(map_state(_plain, [dataset[index] for index in indices])).data)


def _plain(leaf: Any) -> Any:
    """Return a value of NumPy as `RawArray`, and bytes as text."""
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.ascontiguousarray(leaf)
        return RawArray.of(str(array.dtype), np.shape(leaf), array.reshape(-1).view(np.uint8))
    return leaf.hex() if isinstance(leaf, bytes) else leaf


def _digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
