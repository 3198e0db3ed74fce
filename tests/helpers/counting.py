"""The plainest way to run a schedule on counters: what the fast checkers are compared with."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshmend.schedule.table import REDUCE, Collective, Schedule
from strategies import rows_of

Counts = NDArray[np.int64]  # (rank, chunk, contributor)


def start_counts(schedule: Schedule, replicas: Sequence[int] = ()) -> Counts:
    """Every rank holds its own contribution to each chunk, once; a replica has the owner's."""
    counts = np.zeros((schedule.n_ranks, schedule.n_chunks, schedule.n_ranks), dtype=np.int64)
    for rank in range(schedule.n_ranks):
        for chunk, owner in enumerate(schedule.owners.tolist()):
            counts[rank, chunk, owner if rank in replicas else rank] = 1
    return counts


def obvious_counts(schedule: Schedule, replicas: Sequence[int] = ()) -> Counts:
    """Run the rows one after another; counts stop at a million, far beyond right."""
    counts = start_counts(schedule, replicas)
    for src, dst, lo, hi, op in rows_of(schedule):
        sent = counts[src, lo:hi]
        counts[dst, lo:hi] = np.minimum(counts[dst, lo:hi] + sent if op == REDUCE else sent, 10**6)
    return counts


def wrong_cells(schedule: Schedule, counts: Counts) -> list[tuple[int, int]]:
    """Return the (rank, chunk) that do not hold what the collective promises, in order."""
    wrong = []
    for rank in range(schedule.n_ranks):
        for chunk, owner in enumerate(schedule.owners.tolist()):
            wanted = np.ones(schedule.n_ranks, dtype=np.int64)
            if schedule.collective is Collective.ALL_GATHER:
                wanted = (np.arange(schedule.n_ranks) == owner).astype(np.int64)
            elif schedule.collective is Collective.REDUCE_SCATTER and rank != owner:
                continue
            if not np.array_equal(counts[rank, chunk], wanted):
                wrong.append((rank, chunk))
    return wrong
