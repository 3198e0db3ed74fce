"""How compiled loops of a year get their values: one record of figures, and one array of parts.

Loops that pass many arrays to each other compile slowly and run slowly. So there are two values: a
record, whose fields are single figures, and `cells`, which holds all parts one behind the other. A
field of the record says where each part begins: `cells[walk.dead + chip]`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Figures = Mapping[str, float | Sequence[float]]


def packed(
    dtype: np.dtype[Any], figures: Figures, parts: Mapping[str, int | Ints]
) -> tuple[np.record, Ints]:
    """Return a record and its cells; of a part that is a number, so many zeros."""
    filled = [
        np.zeros(part, np.int64) if isinstance(part, int) else part for part in parts.values()
    ]
    begins = itertools.accumulate(map(len, filled[:-1]), initial=0)
    record: np.record = np.zeros(1, dtype)[0]
    for name, value in (*figures.items(), *zip(parts, begins, strict=True)):
        record[name] = value
    return record, np.concatenate(filled)
