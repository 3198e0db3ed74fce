"""Walks the routes: every transfer of a schedule must cross live links all the way."""

import numpy as np

from meshmend.errors import VerificationError
from meshmend.routing.routes import check_paths
from meshmend.schedule.placement import Placement, distinct_pairs
from meshmend.schedule.table import Schedule


def check_hops(schedule: Schedule, placement: Placement) -> None:
    """Prove that each row has a route, and that each hop of each route exists and lives.

    Raises:
        VerificationError: a pair without a route, or a route with a dead hop.
    """
    check_paths(placement.mesh, placement.routes)
    routes = placement.routes
    src, dst = distinct_pairs(schedule)
    wanted = src * schedule.n_ranks + dst
    routed = routes.src.astype(np.int64) * routes.n_ranks + routes.dst
    lost = np.setdiff1d(wanted, routed, assume_unique=True)
    if len(lost):
        sender, receiver = divmod(int(lost[0]), schedule.n_ranks)
        raise VerificationError(
            f"every row needs a route, but rank {sender} sends to rank {receiver} and there is none"
        )
