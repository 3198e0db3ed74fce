"""Proves that nobody reads a scratch cell before something was written there.

Runs the table on one flag for each place and chunk: whether it holds anything. A payload does from
the start, scratch does not. Counting contributions is not enough: scratch that nothing was written
to counts as nothing, but a real buffer holds whatever was in memory.
"""

import numpy as np

from meshmend.errors import VerificationError
from meshmend.kernels import plain_kernel
from meshmend.schedule.table import COPY, Schedule


def check_scratch(schedule: Schedule) -> None:
    """Prove that each row sends, and adds to, cells that hold something.

    Raises:
        VerificationError: names the row, the chunk and the buffer.
    """
    if not schedule.has_scratch:
        return
    is_written = np.zeros((schedule.n_places, schedule.n_chunks), dtype=np.bool_)
    is_written[:: schedule.n_buffers] = True
    columns = (schedule.src_place, schedule.dst_place, schedule.lo, schedule.hi, schedule.op)
    row, chunk, place = _first_unwritten(columns, is_written)
    if row >= 0:
        rank, buffer = divmod(int(place), schedule.n_buffers)
        raise VerificationError(
            f"{schedule.algorithm} {schedule.collective} is wrong: in row {row}, where "
            f"{schedule.row(row)}, it uses chunk {chunk} in buffer {buffer} of rank {rank}, where "
            "nothing was written"
        )


@plain_kernel
def _first_unwritten(table, is_written):  # type: ignore[no-untyped-def]
    """Run the table on flags; return the first row, chunk and place that holds nothing, or -1."""
    src, dst, lo, hi, op = table
    for row in range(len(src)):
        here, there = np.int64(src[row]), np.int64(dst[row])
        for chunk in range(np.int64(lo[row]), np.int64(hi[row])):
            if not is_written[here, chunk]:
                return row, chunk, here
            if op[row] == COPY:
                is_written[there, chunk] = True
            elif not is_written[there, chunk]:
                return row, chunk, there
    return -1, np.int64(0), np.int64(0)
