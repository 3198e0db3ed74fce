"""Reads the trees back out of a schedule whose chunks go up and down spanning trees.

Knows a table of transfers, not how its trees were found; so it reads tables of others too.
"""

import numpy as np
from numpy.typing import NDArray

from meshmend.schedule.table import COPY, REDUCE, Schedule


def trees_in(schedule: Schedule) -> NDArray[np.int32] | None:
    """Return the tree of each chunk as parents over ranks, -1 at its root; None if there are none.

    Sums go up a tree and copies come down, so a sum's receiver is the sender's parent. A schedule
    without sums has its trees in its copies. Each chunk needs one row into or out of each rank but
    one. An exchange through scratch buffers has no trees.
    """
    if schedule.has_scratch:
        return None
    n_chunks, n_ranks = schedule.n_chunks, schedule.n_ranks
    reduces = bool((schedule.op == REDUCE).any())
    rows = np.flatnonzero(schedule.op == (REDUCE if reduces else COPY))
    width = (schedule.hi[rows] - schedule.lo[rows]).astype(np.int64)
    if int(width.sum()) != n_chunks * (n_ranks - 1):
        return None
    row = np.repeat(rows, width)
    first = np.concatenate([[0], np.cumsum(width)[:-1]]) if len(width) else np.zeros(0, np.int64)
    chunk = schedule.lo[row] + np.arange(len(row)) - np.repeat(first, width)
    ends = schedule.src[row], schedule.dst[row]
    child, parent = ends if reduces else ends[::-1]
    parents = np.full((n_chunks, n_ranks), -1, dtype=np.int32)
    parents[chunk, child] = parent
    one_root = (parents < 0).sum(axis=1) == 1
    return parents if one_root.all() and not _has_circle(parents) else None


def _has_circle(parents: NDArray[np.int32]) -> bool:
    """Whether a rank is its own ancestor; each round jumps twice as far towards the root."""
    at = parents
    for _ in range(max(1, parents.shape[1]).bit_length()):
        above = np.take_along_axis(at, np.maximum(at, 0), axis=1)
        at = np.where(at >= 0, above, -1)
    return bool((at >= 0).any())
