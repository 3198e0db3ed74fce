"""A plan's payload in equal chunks, as formats of others want it."""

from fractions import Fraction
from math import lcm

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import UnsupportedError
from meshmend.schedule.table import Schedule

_MOST_CHUNKS = 4096
_CLOSE = 1e-9


def equal_cuts(schedule: Schedule, who: str) -> NDArray[np.int64]:
    """Return the cuts of a schedule as whole numbers of equal chunks; the last is their number.

    Raises:
        UnsupportedError: the cuts are not at multiples of one part of at most 1/4096.
    """
    parts = [Fraction(float(cut)).limit_denominator(_MOST_CHUNKS) for cut in schedule.cuts]
    n_chunks = lcm(*(part.denominator for part in parts))
    exact = np.array([float(part) for part in parts])
    if n_chunks > _MOST_CHUNKS or not np.allclose(exact, schedule.cuts, rtol=0, atol=_CLOSE):
        raise UnsupportedError(
            f"{who} needs a payload in at most {_MOST_CHUNKS} equal chunks, but this plan cuts it "
            "in parts that share no such chunk; plan with another algorithm"
        )
    return np.array([int(part * n_chunks) for part in parts], dtype=np.int64)
