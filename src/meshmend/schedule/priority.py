"""The priority of a row: the hops that must still follow it, and the delay that results.

Links serve earlier slices first. In a long pipeline a row near the end of its chain of hops can
wait a few slices for a row near the beginning. So each row has a **delay** in slices: the fewer
hops must follow it, the longer. A pipeline is then two numbers: the slices, and the **skew**, which
is the delay per hop in slices. Where every rank owns chunks, a third number, the **stagger**, lets
the chunks of a slice follow one another like slices. And **leaves last**: rows that nothing follows
go when nothing else waits. Knows nothing of time.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel, plain_kernel
from meshmend.schedule.hazards import Hazards, before_at, n_before
from meshmend.schedule.table import Schedule
from meshmend.topology.routes import Routes

LEVELS_PER_SLICE: Final = 64  # delays are rounded to a 64th of a slice, a level
_LONGEST_DELAY = 1e5  # slices; more than any pipeline has, so a longer delay changes nothing


def remaining_hops(schedule: Schedule, hazards: Hazards, routes: Routes) -> NDArray[np.int32]:
    """Return for each row the longest chain of hops that starts with its own.

    A row that waits to be sent adds its whole chain; a row that waits to be written adds only the
    hops after its own. One pass from the last row to the first, because rows wait for smaller ones
    only.
    """
    pairs = routes.pairs_of(schedule.src, schedule.dst)
    hops = np.append(routes.hops, 0).astype(np.int32)[pairs]  # a local row has none
    remaining: NDArray[np.int32] = _chains(hops, hazards.send, hazards.write, hazards.more)
    return remaining


def delay_slices(
    remaining: NDArray[np.int32],
    skew: float,
    *,
    starts: NDArray[np.float64] | None = None,
    stagger: float = 0.0,
    leaves_last: bool = False,
) -> NDArray[np.float64]:
    """Return each row's delay: `skew` slices per hop that its chain is shorter than the longest.

    A row that starts at the fraction `starts` of the payload waits `stagger` times that in slices.
    If `leaves_last`, a row of one hop that nothing follows waits for all other rows.
    """
    shorter_by: NDArray[np.int32] = remaining.max(initial=0) - remaining
    delays = np.minimum(np.multiply(shorter_by, skew, dtype=np.float64), _LONGEST_DELAY)
    if leaves_last:
        delays[remaining <= 1] += 2 * _LONGEST_DELAY
    return delays if starts is None or not stagger else delays + stagger * starts


def in_levels(delays: NDArray[np.float64]) -> NDArray[np.int32]:
    """Return delays in 64ths of a slice."""
    levels: NDArray[np.int32] = np.rint(delays * LEVELS_PER_SLICE).astype(np.int32)
    return levels


@kernel
def _chains(hops, send, write, more):  # type: ignore[no-untyped-def]
    """Return each row's hops and the most that must follow it."""
    remaining = hops.copy()
    for row in range(len(hops) - 1, -1, -1):
        _extend(remaining, hops, send[row], more, np.int64(remaining[row]))
        _extend(remaining, hops, write[row], more, remaining[row] - hops[row])
    return remaining


@plain_kernel
def _extend(remaining, hops, entry, more, following):  # type: ignore[no-untyped-def]
    """Let at least `following` hops follow each row that an entry of the hazards names."""
    for which in range(n_before(entry, more)):
        before = before_at(entry, more, which)
        remaining[before] = max(remaining[before], hops[before] + following)
