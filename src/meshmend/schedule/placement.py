"""Where a schedule's ranks sit and how its pairs are routed: a schedule laid over a mesh.

A schedule names ranks only. Its placement is the mesh (rank i is the i-th live chip) and
one route for each pair of ranks that exchange data.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.kernels import kernel
from meshmend.schedule.table import Schedule
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import Routes, routes_for


@dataclass(frozen=True, eq=False)
class Placement:
    """A mesh and routes between its ranks for every pair that a schedule uses."""

    mesh: Mesh
    routes: Routes


def placed(mesh: Mesh, schedule: Schedule) -> Placement:
    """Return the schedule's placement on a connected mesh, over routes that cannot deadlock.

    Raises:
        InputError: the mesh has more or fewer live chips than the schedule has ranks.
    """
    if mesh.n_live != schedule.n_ranks:
        raise InputError(
            f"a schedule for {schedule.n_ranks} ranks needs as many live chips, but {mesh} has "
            f"{mesh.n_live}"
        )
    return Placement(mesh, routes_for(mesh, *distinct_pairs(schedule)))


_MANY_RANKS: Final = 256


def distinct_pairs(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sources and destinations of the pairs of ranks that exchange data, each once."""
    n_ranks = schedule.n_ranks
    if _MANY_RANKS**2 < n_ranks**2 <= schedule.n_rows:  # of many targets each a table is quicker
        is_used = np.zeros((n_ranks, n_ranks), dtype=np.bool_)
        is_used[schedule.src, schedule.dst] = True
        src, dst = np.nonzero(is_used)
    else:
        src, dst = _distinct_pairs(schedule.src, schedule.dst, n_ranks)
    if schedule.has_scratch:  # local rows take no route
        return src[src != dst], dst[src != dst]
    return src, dst


def channel_loads(schedule: Schedule, routes: Routes) -> NDArray[np.float64]:
    """Return what each channel carries as a fraction of the payload.

    A channel is a directed link, numbered rank x ports + port.
    """
    pairs = routes.pairs_of(schedule.src, schedule.dst)
    per_pair = np.bincount(pairs + 1, schedule.row_fractions(), routes.n_pairs + 1)[1:]
    loads = np.zeros(routes.n_ranks * routes.n_ports)
    np.add.at(loads, routes.channels, np.repeat(per_pair, routes.hops))
    return loads


@kernel
def _distinct_pairs(src, dst, n_ranks):  # type: ignore[no-untyped-def]
    """Return each pair (src, dst) that occurs, once; a source's few targets are a linked list."""
    head = np.full(n_ranks, -1, dtype=np.int64)
    targets = np.empty((4 * n_ranks, 2), dtype=np.int64)  # target, next in the list
    n_pairs = 0
    for row in range(len(src)):
        pair = head[src[row]]
        while pair >= 0 and targets[pair, 0] != dst[row]:
            pair = targets[pair, 1]
        if pair < 0:
            if n_pairs == len(targets):
                targets = np.concatenate((targets, np.empty_like(targets)))
            targets[n_pairs, 0] = dst[row]
            targets[n_pairs, 1] = head[src[row]]
            head[src[row]] = n_pairs
            n_pairs += 1
    sources = np.empty(n_pairs, dtype=np.int64)
    for rank in range(n_ranks):
        pair = head[rank]
        while pair >= 0:
            sources[pair] = rank
            pair = targets[pair, 1]
    return sources, targets[:n_pairs, 0].copy()
