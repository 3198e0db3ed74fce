"""Which samples a step uses, and which of them are a chip's: functions of seed and place alone.

The epochs follow each other in one endless row of samples, each epoch in an order of its own; a
step takes the next so many of that row, whatever failed before. So the batch stays the same
across the end of an epoch, and every sample of an epoch is used once.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError

Indices = NDArray[np.int64]

LARGEST_CHECKSUM: Final = 2**59 - 1  # at most 18 digits, as all numbers of a ledger


@dataclass(frozen=True)
class Order:
    """The endless row of samples of a data set: epoch after epoch, each shuffled by the seed."""

    n_samples: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_samples < 1:
            raise InputError(f"training needs at least one sample, but got {self.n_samples}")

    def samples(self, start: int, stop: int) -> Indices:
        """Return the samples at places from `start` to before `stop` of the row."""
        places = np.arange(start, stop)
        result = np.empty(len(places), dtype=np.int64)
        for epoch in range(start // self.n_samples, -(-stop // self.n_samples)):
            inside = places // self.n_samples == epoch
            order = _shuffled(self.n_samples, self.seed, epoch)
            result[inside] = order[places[inside] % self.n_samples]
        return result


@lru_cache(maxsize=4)
def _shuffled(n_samples: int, seed: int, epoch: int) -> Indices:
    order: Indices = np.random.default_rng([seed, epoch]).permutation(n_samples)
    return order


def checksum(samples: Indices) -> int:
    """Return a number that stands for a set of samples, whatever their order.

    The numbers of parts add up to that of the whole, modulo `LARGEST_CHECKSUM + 1`.
    """
    return int(scrambled(samples).sum(dtype=np.uint64)) & LARGEST_CHECKSUM


def scrambled(samples: Indices) -> NDArray[np.uint64]:
    """Return a number for each sample, as if drawn at random (SplitMix64 of Steele et al.)."""
    mixed = samples.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class Share:
    """The places of the row that one chip works on: from `start` to before `stop`."""

    start: int
    stop: int
    batch: int = field(default=0)

    @property
    def n_samples(self) -> int:
        return self.stop - self.start


def share_of(position: int, batch: int, rank: int, n_ranks: int) -> Share:
    """Return a rank's part of the step that begins at a place: parts differ by one at most."""
    return Share(
        start=position + batch * rank // n_ranks,
        stop=position + batch * (rank + 1) // n_ranks,
        batch=batch,
    )


def batch_of(policy: str, batch: int, n_live: int, n_whole: int) -> int:
    """Return how many samples a step uses: all, or with fewer chips fewer, as the paper does.

    Raises:
        InputError: an unknown policy.
    """
    if policy == "constant":
        return batch
    if policy == "shrink":
        return min(batch, max(1, batch * n_live // n_whole))
    raise InputError(f"a batch policy is constant or shrink, but got {policy!r}")
