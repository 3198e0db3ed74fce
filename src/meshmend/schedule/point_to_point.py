"""A schedule that sends parts of a payload from one rank to another: no collective.

Every part has a source and a target of its own. What else the ranks hold stays as it is.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshmend.schedule.table import COPY, Collective, Rows, Schedule, schedule_of

Ends = tuple[int, int]  # the ranks that send and receive a part


def point_to_point(ends: Sequence[Ends], cuts: NDArray[np.float64], n_ranks: int) -> Schedule:
    """Return a schedule that copies each part, between its two cuts, from one rank to another.

    It is the part of an all-gather that reaches one rank for each chunk.
    """
    source, target = np.array(ends, dtype=np.int32).reshape(-1, 2).T
    part = np.arange(len(source), dtype=np.int32)
    return schedule_of(
        [("send", Rows(src=source, dst=target, lo=part, hi=part + np.int32(1), op=COPY))],
        algorithm="point-to-point",
        collective=Collective.ALL_GATHER,
        owners=source,
        n_ranks=n_ranks,
        cuts=cuts,
    )
