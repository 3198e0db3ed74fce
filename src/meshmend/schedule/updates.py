"""Proves that a sharded update updates each chunk once, and that nobody sees it before.

An owner updates a chunk just before the first row that copies it from the owner. Runs the table on
one flag for each rank and chunk: whether the rank holds the updated chunk. A row that copies must
copy an updated chunk, and a row that adds must neither send nor change one. Then every copy of a
chunk comes from its owner's, and no sum changes after its update. So if every rank ends with the
data of every rank exactly once (`contributions`), that was in the owner's sum when it was updated.
"""

from typing import Final

import numpy as np

from meshmend.errors import VerificationError
from meshmend.kernels import plain_kernel
from meshmend.schedule.table import COPY, Collective, Schedule

_FINE: Final = 0
_TOO_EARLY: Final = 1
_ADDS_A_WEIGHT: Final = 2
_ADDS_TO_A_WEIGHT: Final = 3
_WORDS: Final = {
    _TOO_EARLY: "which is no updated weight at rank {src}; rank {owner} owns it",
    _ADDS_A_WEIGHT: "which rank {owner} has updated: it is a weight, no sum",
    _ADDS_TO_A_WEIGHT: "which rank {dst} holds as an updated weight already",
}


def check_updates(schedule: Schedule) -> None:
    """Prove of a sharded update that no rank uses a weight before its owner has updated it.

    Other collectives update nothing, so there is nothing to prove.

    Raises:
        VerificationError: names the row, the chunk and its owner.
    """
    if schedule.collective is not Collective.SHARDED_UPDATE:
        return
    is_updated = np.zeros((schedule.n_ranks, schedule.n_chunks), dtype=np.bool_)
    columns = (schedule.src, schedule.dst, schedule.lo, schedule.hi, schedule.op)
    row, chunk, fault = _first_fault(columns, schedule.owners, is_updated)
    if fault != _FINE:
        src, dst = int(schedule.src[row]), int(schedule.dst[row])
        why = _WORDS[fault].format(owner=int(schedule.owners[chunk]), src=src, dst=dst)
        raise VerificationError(
            f"{schedule.algorithm} {schedule.collective} is wrong: in row {row}, where "
            f"{schedule.row(row)}, it moves chunk {chunk}, {why}"
        )


@plain_kernel
def _first_fault(table, owners, is_updated):  # type: ignore[no-untyped-def]
    """Run the table on flags; return the first row and chunk with a fault, and which it is."""
    src, dst, lo, hi, op = table
    for row in range(len(src)):
        here, there = src[row], dst[row]
        for chunk in range(np.int64(lo[row]), np.int64(hi[row])):
            if op[row] == COPY:
                if owners[chunk] == here:
                    is_updated[here, chunk] = True
                if not is_updated[here, chunk]:
                    return row, chunk, _TOO_EARLY
                is_updated[there, chunk] = True
            elif is_updated[here, chunk]:
                return row, chunk, _ADDS_A_WEIGHT
            elif is_updated[there, chunk]:
                return row, chunk, _ADDS_TO_A_WEIGHT
    return 0, np.int64(0), _FINE
