"""Where the fastest algorithm changes as payloads grow, from a sweep of comparisons."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshmend.planning.comparison import Comparison
from meshmend.planning.pricing import Price


@dataclass(frozen=True)
class Crossover:
    """From about this payload on, `after` is faster than `before`."""

    payload_bytes: float
    before: str
    after: str


def winner(result: Comparison) -> Price:
    """Return the fastest price of those that sum over all chips that have something to sum."""
    return next(
        (each for each in result.prices if each.n_chips >= result.n_needed), result.prices[0]
    )


def crossovers(results: Sequence[Comparison]) -> tuple[Crossover, ...]:
    """Return the changes of the winner between neighbouring payloads of a rising sweep.

    Between two payloads, times are taken to be straight lines on logarithmic axes. Where two names
    stand for one time, as `auto` and what it chose, the winner does not change.
    """
    found = []
    for low, high in pairwise(results):
        before, after = winner(low).name, winner(high).name
        times_low, times_high = _times_s(low), _times_s(high)
        if before == after or not {before, after} <= times_low.keys() & times_high.keys():
            continue
        at_low = math.log(times_low[before] / times_low[after])
        at_high = math.log(times_high[before] / times_high[after])
        if at_low == 0 or at_high == 0:
            continue
        share = at_low / (at_low - at_high)
        ends = math.log(low.payload_bytes), math.log(high.payload_bytes)
        payload = math.exp(ends[0] + share * (ends[1] - ends[0]))
        found.append(Crossover(payload, before, after))
    return tuple(found)


def _times_s(result: Comparison) -> dict[str, float]:
    """Return the times that are not zero, by name."""
    return {price.name: price.time_s for price in result.prices if price.time_s > 0}
