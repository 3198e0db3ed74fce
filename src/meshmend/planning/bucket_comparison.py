"""Compares sums of many buckets: one at a time, all in flight at once, or one sum of the whole.

In flight, the older sum goes first on each link. To the simulator all sums are one schedule: each
has chunks of its own, and the rows of a later sum have a delay that is longer than any earlier sum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.errors import InputError
from meshmend.planning.comparison import ALL, Comparison, compared
from meshmend.planning.pricing import BASELINES
from meshmend.planning.progress import ProgressCallback, ProgressShares, no_progress
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import Schedule, index_dtype
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import Simulation, simulate
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import Routes

MOST_BUCKETS = 1000


@dataclass(frozen=True)
class Buckets:
    """How many buckets there are, and the size of each."""

    n: int
    size_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MOST_BUCKETS or self.size_bytes < 1:
            raise InputError(
                f"--buckets needs 1 to {MOST_BUCKETS} buckets of a byte or more, but got {self.n} "
                f"of {self.size_bytes} bytes; write 4x25MB"
            )

    @property
    def total_bytes(self) -> int:
        return self.n * self.size_bytes


@dataclass(frozen=True, eq=False)
class BucketPrice:
    """What an algorithm costs: one bucket, all of them in flight, and one sum of the whole."""

    name: str
    n: int
    one: Simulation
    together: Simulation
    whole: Simulation

    @property
    def one_at_a_time_s(self) -> float:
        return self.n * self.one.time_s

    def ratio(self, time_s: float) -> float:
        """Return a time divided by the time of one sum of the whole."""
        return time_s / self.whole.time_s if self.whole.time_s else 1.0


@dataclass(frozen=True, eq=False)
class BucketComparison:
    """The prices of algorithms for buckets, and for one sum of the whole, with its limit."""

    buckets: Buckets
    whole: Comparison
    prices: tuple[BucketPrice, ...]

    def summary(self) -> dict[str, Any]:
        """Return the figures as a JSON value."""
        return {
            "mesh": str(self.whole.mesh),
            "buckets": self.buckets.n,
            "bucket_bytes": self.buckets.size_bytes,
            "limit_s": self.whole.limit.time_s,
            "limit_kind": self.whole.limit.kind,
            "results": [
                {
                    "algorithm": price.name,
                    "whole_s": price.whole.time_s,
                    "one_at_a_time_s": price.one_at_a_time_s,
                    "in_flight_s": price.together.time_s,
                    "one_at_a_time_of_whole": price.ratio(price.one_at_a_time_s),
                    "in_flight_of_whole": price.ratio(price.together.time_s),
                    "slices": price.together.slices,
                    "max_link_utilisation": price.together.max_link_utilisation,
                }
                for price in self.prices
            ],
        }


def compared_buckets(
    mesh: Mesh,
    fabric: Fabric,
    buckets: Buckets,
    names: Sequence[str] = (ALL,),
    *,
    slices: int | None = None,
    cache_dir: Path | None = None,
    progress: ProgressCallback = no_progress,
) -> BucketComparison:
    """Return what algorithms cost for sums of buckets that start together, fastest first.

    A bucket is summed as it would be alone, except that it may have fewer slices. Baselines are
    left out: they sum on another mesh.

    Raises:
        UnsupportedError: an algorithm that was named does not support this mesh.
        InputError: there is no such algorithm, or it is a baseline.
    """
    if baselines := [name for name in names if name in BASELINES]:
        raise InputError(f"--buckets needs algorithms for the whole mesh, but got {baselines[0]}")
    shares = ProgressShares(progress, 3)
    whole, alone = (
        compared(
            mesh, fabric, size, names, slices=slices, cache_dir=cache_dir, progress=shares.of(share)
        )
        for share, size in enumerate((buckets.total_bytes, buckets.size_bytes))
    )
    whole_of = {price.name: price.simulation for price in whole.prices}
    prices = []
    for price in alone.prices:
        if price.name not in BASELINES:
            progress(f"{price.name}: {buckets.n} in flight")
            one = price.simulation
            routes = placed(alone.part, one.schedule).routes
            if slices is None:
                together = fastest_in_flight(one, routes, buckets.n)
            else:
                together = in_flight(one, routes, buckets.n, slices=slices)
            prices.append(BucketPrice(price.name, buckets.n, one, together, whole_of[price.name]))
    prices.sort(key=lambda price: price.together.time_s)
    return BucketComparison(buckets, whole, tuple(prices))


def repeated(schedule: Schedule, n_sums: int) -> Schedule:
    """Return the schedule of several sums, one after another in an n times larger payload.

    Raises:
        InputError: fewer than one sum.
    """
    if n_sums < 1:
        raise InputError(f"repeated needs one sum or more, but got {n_sums}")
    n_chunks = schedule.n_chunks
    dtype = index_dtype(schedule.n_places, n_sums * n_chunks)
    shift = np.repeat(np.arange(n_sums) * n_chunks, schedule.n_rows)
    starts = (np.arange(n_sums)[:, None] + schedule.cuts[:-1]) / n_sums
    return Schedule(
        algorithm=schedule.algorithm,
        collective=schedule.collective,
        n_ranks=schedule.n_ranks,
        cuts=np.append(starts, 1.0),
        owners=np.tile(schedule.owners, n_sums),
        src=np.tile(schedule.src, n_sums).astype(dtype),
        dst=np.tile(schedule.dst, n_sums).astype(dtype),
        lo=(np.tile(schedule.lo, n_sums) + shift).astype(dtype),
        hi=(np.tile(schedule.hi, n_sums) + shift).astype(dtype),
        op=np.tile(schedule.op, n_sums),
        src_buffer=None if schedule.src_buffer is None else np.tile(schedule.src_buffer, n_sums),
        dst_buffer=None if schedule.dst_buffer is None else np.tile(schedule.dst_buffer, n_sums),
    )


def in_flight(one: Simulation, routes: Routes, n_sums: int, *, slices: int) -> Simulation:
    """Simulate several sums like this one, started together, each cut in `slices`."""
    schedule = repeated(one.schedule, n_sums)
    delays = np.zeros(one.schedule.n_rows) if one.delay_slices is None else one.delay_slices
    a_sum = slices + math.ceil(delays.max(initial=0.0)) + 1
    return simulate(
        program_of(schedule, hazards_of(schedule), routes),
        one.fabric,
        payload_bytes=n_sums * one.payload_bytes,
        slices=slices,
        delay_slices=np.tile(delays, n_sums) + np.repeat(np.arange(n_sums) * a_sum, len(delays)),
    )


def fastest_in_flight(one: Simulation, routes: Routes, n_sums: int) -> Simulation:
    """Return the fastest of several sums in flight with the slices of one, half of them, and so on.

    What slices do for one sum, several sums do for each other, so fewer slices may be faster.
    """
    slices = one.slices
    best = in_flight(one, routes, n_sums, slices=slices)
    while slices > 1:
        slices //= 2
        found = in_flight(one, routes, n_sums, slices=slices)
        if found.time_s >= best.time_s:
            break
        best = found
    return best
