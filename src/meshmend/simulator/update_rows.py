"""Updates as rows of a program: each chunk waits for its owner's sum, and its copies wait for it.

To the event loop an update is a message without a way: it holds a channel of its owner's own, the
update unit, for as long as the update takes. Knows hazards, not time.
"""

import numpy as np

from meshmend.kernels import kernel
from meshmend.schedule.hazards import MANY, NONE, Hazards
from meshmend.schedule.table import COPY, Collective, Schedule


def n_updates(schedule: Schedule) -> int:
    """Return how many updates the program of a schedule has: one for each chunk, or none."""
    return schedule.n_chunks if schedule.collective is Collective.SHARDED_UPDATE else 0


def with_updates(schedule: Schedule, hazards: Hazards) -> Hazards:
    """Return hazards in which row `n_rows + chunk` is the update of a chunk.

    The update waits for what the first row waits for that copies the chunk from its owner. Every
    such row then waits for the update.
    """
    if not n_updates(schedule):
        return hazards
    columns = (schedule.src, schedule.lo, schedule.hi, schedule.op, schedule.owners)
    return Hazards(*_with_updates(columns, hazards.send, hazards.write, hazards.more))


@kernel
def _with_updates(table, send, write, more):  # type: ignore[no-untyped-def]
    src, lo, hi, op, owners = table
    n_rows, n_chunks = len(src), len(owners)
    sends = np.full(n_rows + n_chunks, NONE, dtype=np.uint32)
    writes = np.full(n_rows + n_chunks, NONE, dtype=np.uint32)
    writes[:n_rows] = write
    is_known = np.zeros(n_chunks, dtype=np.bool_)
    n_more = len(more)
    for row in range(n_rows):  # how many entries the lists of wide rows take
        if op[row] == COPY and hi[row] - lo[row] > 1:
            n_more += 1 + hi[row] - lo[row]
            n_more += more[send[row] - MANY] if MANY <= send[row] < NONE else 1
    lists = np.empty(n_more, dtype=np.uint32)
    lists[: len(more)] = more
    at = len(more)
    for row in range(n_rows):
        sends[row] = send[row]
        if op[row] != COPY:
            continue
        n_owned = 0
        for chunk in range(np.int64(lo[row]), np.int64(hi[row])):
            if owners[chunk] == src[row]:
                n_owned += 1
                if not is_known[chunk]:
                    is_known[chunk] = True
                    sends[n_rows + chunk] = send[row]
        if n_owned == 0:
            continue
        if hi[row] - lo[row] == 1:
            sends[row] = np.uint32(n_rows + np.int64(lo[row]))
            continue
        start = at
        at += 1
        if MANY <= send[row] < NONE:
            for which in range(np.int64(more[send[row] - MANY])):
                lists[at] = more[send[row] - MANY + np.uint32(1) + np.uint32(which)]
                at += 1
        elif send[row] != NONE:
            lists[at] = send[row]
            at += 1
        for chunk in range(np.int64(lo[row]), np.int64(hi[row])):
            if owners[chunk] == src[row]:
                lists[at] = np.uint32(n_rows + chunk)
                at += 1
        lists[start] = at - start - 1
        sends[row] = MANY + np.uint32(start)
    return sends, writes, lists[:at].copy()
