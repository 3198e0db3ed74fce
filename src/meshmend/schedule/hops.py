"""Follows the routes: every transfer of a schedule must cross live links all the way."""

from meshmend.errors import VerificationError
from meshmend.kernels import plain_kernel
from meshmend.schedule.placement import Placement
from meshmend.schedule.table import Schedule
from meshmend.topology.routes import check_paths


def check_hops(schedule: Schedule, placement: Placement) -> None:
    """Prove that each row has a route, and that each hop of each route exists and lives.

    Raises:
        VerificationError: a pair without a route, or a route with a dead hop.
    """
    routes = placement.routes
    check_paths(placement.mesh, routes)
    if schedule.n_ranks != routes.n_ranks:
        raise VerificationError(
            f"these routes are for {routes.n_ranks} ranks, but the schedule has {schedule.n_ranks}"
        )
    row = _first_unrouted(schedule.src, schedule.dst, routes.pair_ptr, routes.dst)
    if row >= 0:
        raise VerificationError(
            f"every row needs a route, but there is none for row {row}: {schedule.row(row)}"
        )


@plain_kernel
def _first_unrouted(src, dst, pair_ptr, pair_dst):  # type: ignore[no-untyped-def]
    """Return the first row whose pair of ranks has no route, or -1; a local row needs none."""
    for row in range(len(src)):
        if src[row] == dst[row]:
            continue
        pair, stop = pair_ptr[src[row]], pair_ptr[src[row] + 1]
        while pair < stop and pair_dst[pair] != dst[row]:
            pair += 1
        if pair == stop:
            return row
    return -1
