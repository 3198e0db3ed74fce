"""Which samples a step uses, and which of them each chip uses: pure functions of seed and place.

The epochs follow each other in one endless row of samples; each epoch has its own random order. A
step uses the next samples of that row, whatever failed before. So every sample of an epoch is used
once, and a batch has its full size also where it crosses the end of an epoch.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError

Indices = NDArray[np.int64]
Speeds = tuple[int, ...]  # of each rank, in hundredths of that of a chip that is not slow

POLICIES: Final = ("constant", "shrink")
FULL_SPEED: Final = 100
LARGEST_CHECKSUM: Final = 2**59 - 1  # at most 18 digits, like all numbers in a ledger


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


@dataclass(frozen=True)
class StreamOrder:
    """The row of a data set that is a stream: its samples, as they come; places are indices."""

    seed: int = 0
    n_samples: Final = 0  # how many come is not known

    def samples(self, start: int, stop: int) -> Indices:
        """Return the places from `start` to before `stop`."""
        return np.arange(start, stop)


@lru_cache(maxsize=4)
def _shuffled(n_samples: int, seed: int, epoch: int) -> Indices:
    order: Indices = np.random.default_rng([seed, epoch]).permutation(n_samples)
    return order


def checksum(samples: Indices) -> int:
    """Return a checksum of samples that does not depend on their order.

    The checksums of two parts add up to that of both together, modulo `LARGEST_CHECKSUM + 1`.
    """
    return int(scrambled(samples).sum(dtype=np.uint64)) & LARGEST_CHECKSUM


def scrambled(samples: Indices) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each sample's index (SplitMix64 of Steele et al.)."""
    mixed = samples.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class Share:
    """The places of the row that one chip uses in a step: from `start` to before `stop`.

    `position` is where the step begins.
    """

    start: int
    stop: int
    batch: int = field(default=0)
    position: int = field(default=0, compare=False)

    @property
    def n_samples(self) -> int:
        return self.stop - self.start


class Seen(NamedTuple):
    """What a chip has read of a stream: a hash of one in eight samples before a place."""

    place: int
    hash: int


def share_of(position: int, batch: int, rank: int, n_ranks: int) -> Share:
    """Return a rank's share of the step at `position`; shares differ by at most one sample."""
    return Share(
        start=position + batch * rank // n_ranks,
        stop=position + batch * (rank + 1) // n_ranks,
        batch=batch,
        position=position,
    )


def share_by_speed(position: int, batch: int, rank: int, speeds: Speeds) -> Share:
    """Return a rank's share of the step at `position`, if ranks compute at these speeds."""
    stops = _stops_by_speed(batch, speeds)
    return Share(position + stops[rank], position + stops[rank + 1], batch, position)


@lru_cache(maxsize=16)
def _stops_by_speed(batch: int, speeds: Speeds) -> tuple[int, ...]:
    return tuple(accumulate(counts_by_speed(batch, speeds), initial=0))


def counts_by_speed(batch: int, speeds: Speeds) -> tuple[int, ...]:
    """Return how many samples each rank gets, so that the last is ready as early as possible.

    Ranks of equal speeds get equal shares, as by `share_of`, up to one sample. Every rank gets at
    least one, so that all can show how fast they are; where the batch is too small for that, all
    speeds count as equal. Only whole numbers decide: the same on every machine.
    """
    n_ranks = len(speeds)
    if batch < n_ranks or len(set(speeds)) == 1:
        cuts = [batch * rank // n_ranks for rank in range(n_ranks + 1)]
        return tuple(stop - start for start, stop in pairwise(cuts))
    total = sum(speeds)
    counts = [max(1, batch * speed // total) for speed in speeds]
    # One more for those that are then ready first (D'Hondt's rule), or one less for the last ones.
    change = 1 if sum(counts) < batch else -1

    def entry(rank: int) -> tuple[Fraction, int]:
        return change * Fraction(counts[rank] + max(0, change), speeds[rank]), rank

    heap = [entry(rank) for rank in range(n_ranks) if counts[rank] + change > 0]
    heapify(heap)
    for _ in range(abs(batch - sum(counts))):
        rank = heap[0][1]
        counts[rank] += change
        if counts[rank] + change > 0:
            heapreplace(heap, entry(rank))
        else:
            heappop(heap)
    return tuple(counts)


def batch_of(policy: str, batch: int, n_live: int, n_at_start: int) -> int:
    """Return how many samples a step uses, by one of `POLICIES`.

    With "constant" always `batch`. With "shrink" each chip keeps its number of samples, as in the
    paper, so a step uses fewer while chips are missing.
    """
    return batch if policy == "constant" else min(batch, max(1, batch * n_live // n_at_start))
