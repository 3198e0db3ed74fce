"""Compares sums of many buckets: one at a time, all in flight at once, or one sum of the whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmend.errors import InputError
from meshmend.planning.comparison import ALL, Comparison, compared
from meshmend.planning.pricing import BASELINES
from meshmend.planning.progress import ProgressCallback, ProgressShares, no_progress
from meshmend.schedule.placement import placed
from meshmend.simulator.buckets import fastest_in_flight, in_flight
from meshmend.simulator.rules import Simulation
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh

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
