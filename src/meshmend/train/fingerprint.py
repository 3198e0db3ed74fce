"""The fingerprint of a job: what must be equal on all workers, compared before they train.

Knows torch models, optimizers and data sets. Samples are not compared if they cannot be hashed, or
if reading them twice gives different values.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

import meshmend
from meshmend.membership.job_fingerprint import NOT_COMPARED, JobFingerprint
from meshmend.train.torch_state import packed

_N_SAMPLES: Final = 3  # the first, the last, and one in the middle
_DIGEST_BYTES: Final = 8
_SEED: Final = 1  # of transforms that draw random numbers, so that all workers draw the same


def fingerprint_of(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    batch: int,
    steps: int,
    seed: int,
    policy: str,
) -> JobFingerprint:
    """Return what must be equal on all workers of a job; reads a few samples, each twice."""
    return JobFingerprint(
        version=meshmend.__version__,
        steps=steps,
        batch=batch,
        seed=seed,
        policy=policy,
        model=_model_words(model),
        optimizer=_optimizer_words(optimizer),
        dataset_length=len(dataset),
        samples=_sample_words(dataset),
    )


def _model_words(model: torch.nn.Module) -> str:
    """Return counts and a digest of the names, shapes and types of a model's parameters."""
    parameters = dict(model.named_parameters())
    described = [
        (name, str(each.dtype), tuple(each.shape)) for name, each in sorted(parameters.items())
    ]
    n_elements = sum(each.numel() for each in parameters.values())
    digest = _digest(json.dumps(described).encode())
    return f"{len(parameters)} parameters of {n_elements} elements (digest {digest})"


def _optimizer_words(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer and the names of its settings.

    The values may differ: a worker that gets another worker's state gets its values too.
    """
    keys = sorted({str(key) for group in optimizer.param_groups for key in group} - {"params"})
    return f"{type(optimizer).__name__}({', '.join(keys)})"


def _sample_words(dataset: Any) -> str:
    """Return a digest of a few samples, or `NOT_COMPARED`."""
    length = len(dataset)
    chosen = sorted({index * (length - 1) // (_N_SAMPLES - 1) for index in range(_N_SAMPLES)})
    indices = [index for index in chosen if 0 <= index < length]
    try:
        first, again = (_digest_of_samples(dataset, indices) for _ in range(2))
    except Exception:  # a user's data set may raise anything; training will show it
        return NOT_COMPARED
    return first if first == again else NOT_COMPARED


def _digest_of_samples(dataset: Any, indices: list[int]) -> str:
    with _fixed_random_seed():
        return _digest(packed([_as_tensors(dataset[index]) for index in indices]).data)


def _as_tensors(sample: Any) -> Any:
    """Return a sample that `packed` can store: NumPy values as tensors, bytes as text."""
    if isinstance(sample, np.ndarray | np.generic):
        return torch.from_numpy(np.array(sample))
    if isinstance(sample, bytes):
        return sample.hex()
    if isinstance(sample, dict):
        return {key: _as_tensors(value) for key, value in sample.items()}
    if isinstance(sample, list | tuple):
        return [_as_tensors(value) for value in sample]
    return sample


@contextmanager
def _fixed_random_seed() -> Iterator[None]:
    """Seed Python's, NumPy's and torch's random numbers; restore their states at the end."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.default_generator.manual_seed(_SEED)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


def _digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
