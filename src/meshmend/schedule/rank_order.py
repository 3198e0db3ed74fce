"""Schedules in rank order: rank i owns part i of the payload, as PyTorch expects.

Our schedules number chunks as it suits them. Where every row moves one chunk, the chunks can be
numbered anew, and nothing else changes: not the links, not the order of the rows.
"""

from dataclasses import replace

import numpy as np

from meshmend.errors import InputError
from meshmend.schedule.table import Schedule


def in_rank_order(schedule: Schedule) -> Schedule:
    """Return a schedule with its chunks numbered by owner, so that rank i owns part i.

    Raises:
        InputError: the ranks do not own equally many equal chunks, or a row moves several.
    """
    counts = np.bincount(schedule.owners, minlength=schedule.n_ranks)
    sizes = np.diff(schedule.cuts)
    if counts.min() != counts.max() or not np.allclose(sizes, sizes[0]):
        raise InputError(
            f"{schedule.algorithm} {schedule.collective} needs ranks that own equal parts, but "
            f"they own from {counts.min()} to {counts.max()} chunks; use trees or ring-1d"
        )
    if np.array_equal(schedule.owners, np.sort(schedule.owners)):
        return schedule
    if np.any(schedule.hi - schedule.lo != 1):
        raise InputError(
            f"{schedule.algorithm} {schedule.collective} needs rows that move one chunk each, but "
            "some move several; use trees or ring-1d"
        )
    order = np.argsort(schedule.owners, kind="stable")
    number = np.empty(schedule.n_chunks, dtype=schedule.index_dtype)
    number[order] = np.arange(schedule.n_chunks, dtype=schedule.index_dtype)
    lo = number[schedule.lo]
    return replace(schedule, owners=schedule.owners[order], lo=lo, hi=lo + number.dtype.type(1))
