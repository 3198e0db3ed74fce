"""Cuts a schedule so that every row moves a range of equal cells, at most so many.

A permute moves arrays of one shape. So the payload is cut anew into equal **cells**: a chunk
becomes a number of cells in proportion to its part of the payload. Rows that are wider than
`width` cells are split; narrower ones move a span of `width` cells of which some do not count.
Knows nothing of steps.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.schedule.table import REDUCE, Rows, Schedule, even_cuts, schedule_of

# Cells per chunk to try, where chunks differ in size: more cells follow the sizes more closely.
_MOST_CELLS_PER_CHUNK: Final = 8
_CLOSE_ENOUGH: Final = 1.02  # times the busiest pair's load with the sizes as they are


@dataclass(frozen=True, eq=False)
class CellSchedule:
    """A schedule whose chunks are equal cells; no row moves more than `width` of them."""

    schedule: Schedule
    width: int


def with_equal_cells(schedule: Schedule) -> Schedule:
    """Return the schedule with its payload cut into equal cells, in the same order.

    Where chunks are equal it is the schedule itself. A chunk of no size gets no cell, and rows that
    move nothing go.

    Raises:
        UnsupportedError: the schedule needs scratch buffers, which permutes do not have.
    """
    schedule.refuse_scratch("a lockstep program")
    sizes = np.diff(schedule.cuts)
    if np.ptp(sizes) <= 1e-9:
        return schedule
    n_cells = _cells_of_chunks(schedule, sizes)
    bounds = np.concatenate([[0], np.cumsum(n_cells)])
    lo, hi = bounds[schedule.lo], bounds[schedule.hi]
    return _rewritten(
        schedule, np.flatnonzero(lo < hi), lo, hi, np.repeat(schedule.owners, n_cells)
    )


def in_pieces(schedule: Schedule, width: int) -> CellSchedule:
    """Return a schedule of equal cells with its rows split into pieces of at most `width` cells."""
    lo, hi = schedule.lo.astype(np.int64), schedule.hi.astype(np.int64)
    n_pieces = -(-(hi - lo) // width)
    if n_pieces.max(initial=1) == 1:
        return CellSchedule(schedule, width)
    row = np.repeat(np.arange(schedule.n_rows), n_pieces)
    number = np.arange(len(row)) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces)
    start = lo[row] + number * width
    stop = np.minimum(start + width, hi[row])
    return CellSchedule(_rewritten(schedule, row, start, stop, schedule.owners), width)


def row_widths(schedule: Schedule) -> list[int]:
    """Return how many chunks rows move, each number once, in rising order."""
    widths = schedule.hi.astype(np.int64) - schedule.lo
    return [int(width) for width in np.unique(widths)] or [1]


def _cells_of_chunks(schedule: Schedule, sizes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return how many cells each chunk gets: few, and the busiest pair carries little more."""
    wanted = _busiest_pair(schedule, sizes) * _CLOSE_ENOUGH
    tried = []
    for total in range(len(sizes), _MOST_CELLS_PER_CHUNK * len(sizes) + 1):
        n_cells = np.maximum(np.rint(sizes * total), sizes > 0).astype(np.int64)
        load = _busiest_pair(schedule, n_cells / n_cells.sum())
        tried.append((load, n_cells.sum(), n_cells))
        if load <= wanted:
            break
    return min(tried, key=lambda each: each[:2])[2]


def _busiest_pair(schedule: Schedule, sizes: NDArray[np.float64]) -> float:
    """Return the part of the payload that the busiest pair of ranks exchanges."""
    cuts = np.concatenate([[0.0], np.cumsum(sizes)])
    pair = schedule.src.astype(np.int64) * schedule.n_ranks + schedule.dst
    _, which = np.unique(pair, return_inverse=True)
    return float(np.bincount(which, cuts[schedule.hi] - cuts[schedule.lo]).max(initial=0.0))


def _rewritten(
    schedule: Schedule,
    row: NDArray[np.int64],
    lo: NDArray[np.int64],
    hi: NDArray[np.int64],
    owners: NDArray[np.integer],
) -> Schedule:
    """Return the schedule of these rows, in this order; `lo` and `hi` are their cells, or all's."""
    if len(lo) != len(row):
        lo, hi = lo[row], hi[row]
    src, dst, op = schedule.src[row], schedule.dst[row], schedule.op[row]
    # `Rows` has one op, so a run of rows of one op is one phase.
    edges = [0, *(np.flatnonzero(np.diff(op)) + 1).tolist(), len(row)]
    phases = [
        ("rows", Rows(src[a:b], dst[a:b], lo[a:b], hi[a:b], int(op[a]) if b > a else REDUCE))
        for a, b in pairwise(edges)
    ]
    return schedule_of(
        phases,
        algorithm=schedule.algorithm,
        collective=schedule.collective,
        owners=owners,
        n_ranks=schedule.n_ranks,
        cuts=even_cuts(len(owners)),
    )
