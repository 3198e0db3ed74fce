"""A schedule on its routes, laid out for the event loop: what a row is, and what it sets off.

Hazards say what a row waits for; an event loop needs the reverse, what waits for a row. That
depends on no figure of the fabric, no payload and no number of slices, so it is made once.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.routing.routes import Routes
from meshmend.schedule.hazards import MANY, NONE, Hazards
from meshmend.schedule.table import REDUCE, Schedule

# Columns of Tables.rows.
FIRST_HOP: Final = 0  # where its channels begin in Tables.hops
LAST_HOP: Final = 1
SIZE_CLASS: Final = 2
PHASE: Final = 3  # -1: none
WRITE_SLOT: Final = 4  # -1: its writing waits for its arrival only
REDUCE_AT: Final = 5  # the rank that adds it up, -1: it overwrites
N_COLUMNS: Final = 6

# What a row sets off: the two lowest bits say how, those above are a row (SEND) or a slot.
SEND: Final = 0
COUNTED_SEND: Final = 1
COUNTED_WRITE: Final = 2

MAX_ROWS: Final = 1 << 30

# Chunks of one size come out of the cuts with less noise than this: they count as one size.
_SAME_FRACTION: Final = 2.0**-50


class Tables(NamedTuple):
    """What the event loop reads.

    A row's message takes `hops[first .. last]`. When it has left its source it sets off
    `left_next[left_ptr[row]:left_ptr[row + 1]]`, and when it is in place at its destination the
    same of `done`. A sending that waits for one row only is set off by it at once; what waits
    for more owns a slot, which counts down from `slot_needs`. Rows that wait for nothing are
    listed by the channel they start on, in row order.
    """

    rows: NDArray[np.int32]
    hops: NDArray[np.int32]
    left_ptr: NDArray[np.int64]
    left_next: NDArray[np.uint32]
    done_ptr: NDArray[np.int64]
    done_next: NDArray[np.uint32]
    slot_row: NDArray[np.uint32]
    slot_needs: NDArray[np.int32]
    start_ptr: NDArray[np.int64]
    start_rows: NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Program:
    """A schedule on its routes, ready to be simulated with any fabric, payload and slices.

    `fractions[k]` is the part of the payload that a row of size class k moves.
    """

    schedule: Schedule
    n_channels: int
    fractions: NDArray[np.float64]
    tables: Tables

    @property
    def n_rows(self) -> int:
        return self.schedule.n_rows

    @property
    def n_hops(self) -> int:
        """How many hops all rows take together."""
        rows = self.tables.rows
        return int((rows[:, LAST_HOP] - rows[:, FIRST_HOP] + 1).sum(dtype=np.int64))

    def channel_loads(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return how many rows cross each channel, and how many payloads that makes in all."""
        counts = np.zeros(self.n_channels, dtype=np.int64)
        loads = np.zeros(self.n_channels)
        _add_loads(self.tables.rows, self.tables.hops, self.fractions, counts, loads)
        return counts, loads


def program_of(schedule: Schedule, hazards: Hazards, routes: Routes) -> Program:
    """Return a schedule laid out for the event loop, in time linear in its rows and hazards.

    Raises:
        InputError: a row without a route, hazards or routes of something else, too many rows.
    """
    _check_fit(schedule, hazards, routes)
    rows = np.empty((schedule.n_rows, N_COLUMNS), dtype=np.int32)
    rows[:, PHASE] = schedule.phase_of_rows()
    rows[:, REDUCE_AT] = np.where(schedule.op == REDUCE, schedule.dst.astype(np.int32), -1)
    _enter_hops(rows, schedule.src, schedule.dst, routes.pair_ptr, routes.dst, routes.hop_ptr)
    if np.any(missing := rows[:, FIRST_HOP] < 0):
        row = int(np.argmax(missing))
        raise InputError(
            f"program_of needs a route for every row, but there is none for row {row}, where "
            f"{schedule.row(row)}; name its ranks in routes_for"
        )
    n_channels = routes.n_ranks * routes.n_ports
    fractions = _enter_sizes(rows, schedule.lo, schedule.hi, schedule.cuts)
    slot_row, slot_needs = _enter_slots(rows, hazards.send, hazards.write, hazards.more)
    dependencies = (hazards.send, hazards.write, hazards.more, schedule.src, schedule.dst)
    left_ptr, left_next, done_ptr, done_next = _successors(*dependencies)
    start_ptr, start_rows = _starts(hazards.send, rows, routes.channels, n_channels)
    tables = Tables(
        rows=rows,
        hops=routes.channels,
        left_ptr=left_ptr,
        left_next=left_next,
        done_ptr=done_ptr,
        done_next=done_next,
        slot_row=slot_row,
        slot_needs=slot_needs,
        start_ptr=start_ptr,
        start_rows=start_rows,
    )
    for table in tables:
        table.flags.writeable = False
    return Program(schedule, n_channels, fractions, tables)


def _check_fit(schedule: Schedule, hazards: Hazards, routes: Routes) -> None:
    if len(hazards.send) != schedule.n_rows or routes.n_ranks != schedule.n_ranks:
        raise InputError(
            f"program_of needs hazards of {schedule.n_rows} rows and routes of "
            f"{schedule.n_ranks} ranks, but got {len(hazards.send)} and {routes.n_ranks}; "
            "make both for this schedule"
        )
    if schedule.n_rows >= MAX_ROWS:
        raise InputError(f"program_of needs fewer than {MAX_ROWS} rows, got {schedule.n_rows}")


@njit(cache=True)
def _enter_hops(rows, src, dst, pair_ptr, pair_dst, hop_ptr):  # type: ignore[no-untyped-def]
    """Enter each row's first and last hop; -1 where its pair has no route."""
    for row in range(len(rows)):
        rows[row, FIRST_HOP] = -1
        low, stop = pair_ptr[src[row]], pair_ptr[np.int64(src[row]) + 1]
        high = stop
        while low < high:
            middle = (low + high) // 2
            if pair_dst[middle] < dst[row]:
                low = middle + 1
            else:
                high = middle
        if low < stop and pair_dst[low] == dst[row]:
            rows[row, FIRST_HOP] = hop_ptr[low]
            rows[row, LAST_HOP] = hop_ptr[low + 1] - 1


@njit(cache=True)
def _enter_sizes(rows, lo, hi, cuts):  # type: ignore[no-untyped-def]
    """Number the sizes of rows in order of first use; return the fraction of each."""
    fractions = np.empty(16, dtype=np.float64)
    order = np.empty(16, dtype=np.int32)  # the classes by rising fraction
    n_classes = 0
    for row in range(len(rows)):
        fraction = cuts[hi[row]] - cuts[lo[row]]
        if row and abs(fraction - fractions[rows[row - 1, SIZE_CLASS]]) <= _SAME_FRACTION:
            rows[row, SIZE_CLASS] = rows[row - 1, SIZE_CLASS]
            continue
        low, high = 0, n_classes
        while low < high:
            middle = (low + high) // 2
            if fractions[order[middle]] < fraction - _SAME_FRACTION:
                low = middle + 1
            else:
                high = middle
        if low == n_classes or fractions[order[low]] > fraction + _SAME_FRACTION:
            if n_classes == len(fractions):
                fractions = np.concatenate((fractions, fractions))
                order = np.concatenate((order, order))
            for at in range(n_classes, low, -1):
                order[at] = order[at - 1]
            fractions[n_classes] = fraction
            order[low] = n_classes
            n_classes += 1
        rows[row, SIZE_CLASS] = order[low]
    return fractions[:n_classes].copy()


@njit(cache=True)
def _n_before(entry, more):  # type: ignore[no-untyped-def]
    """Return how many rows an entry of the hazards names."""
    if entry == NONE:
        return 0
    return np.int64(more[entry - MANY]) if entry >= MANY else 1


@njit(cache=True)
def _before(entry, more, which):  # type: ignore[no-untyped-def]
    """Return one of the rows that an entry of the hazards names."""
    return np.int64(more[entry - MANY + np.uint32(1) + which] if entry >= MANY else entry)


@njit(cache=True)
def _enter_slots(rows, send, write, more):  # type: ignore[no-untyped-def]
    """Number the slots, a row's for sending before its for writing; return whose and how many.

    A sending has one if it waits for two rows or more; a writing if it waits for any, and its
    slot counts the message's own arrival too.
    """
    n_slots = 0
    for row in range(len(rows)):
        n_slots += (_n_before(send[row], more) > 1) + (_n_before(write[row], more) > 0)
    slot_row = np.empty(n_slots, dtype=np.uint32)
    slot_needs = np.empty(n_slots, dtype=np.int32)
    slot = 0
    for row in range(len(rows)):
        n_send, n_write = _n_before(send[row], more), _n_before(write[row], more)
        if n_send > 1:
            slot_row[slot], slot_needs[slot] = row, n_send
            slot += 1
        rows[row, WRITE_SLOT] = -1
        if n_write > 0:
            rows[row, WRITE_SLOT] = slot
            slot_row[slot], slot_needs[slot] = row, n_write + 1
            slot += 1
    return slot_row, slot_needs


@njit(cache=True)
def _successors(send, write, more, src, dst):  # type: ignore[no-untyped-def]
    """Return for each row what its leaving, and what its being in place, sets off."""
    n_rows = len(send)
    left_ptr, done_ptr = np.zeros(n_rows + 1, np.int64), np.zeros(n_rows + 1, np.int64)
    for row in range(n_rows):
        for which in range(_n_before(send[row], more)):
            done_ptr[_before(send[row], more, which) + 1] += 1
        for which in range(_n_before(write[row], more)):
            before = _before(write[row], more, which)
            (left_ptr if src[before] == dst[row] else done_ptr)[before + 1] += 1
    for row in range(n_rows):
        left_ptr[row + 1] += left_ptr[row]
        done_ptr[row + 1] += done_ptr[row]
    left_next = np.empty(left_ptr[n_rows], dtype=np.uint32)
    done_next = np.empty(done_ptr[n_rows], dtype=np.uint32)
    slot = 0
    for row in range(n_rows):
        n_send, n_write = _n_before(send[row], more), _n_before(write[row], more)
        code = slot << 2 | COUNTED_SEND if n_send > 1 else row << 2 | SEND
        for which in range(n_send):
            before = _before(send[row], more, which)
            done_next[done_ptr[before]] = code
            done_ptr[before] += 1
        slot += n_send > 1
        for which in range(n_write):
            before = _before(write[row], more, which)
            ptr, following = (left_ptr, left_next) if src[before] == dst[row] else (
                done_ptr,
                done_next,
            )
            following[ptr[before]] = slot << 2 | COUNTED_WRITE
            ptr[before] += 1
        slot += n_write > 0
    for ptr in (left_ptr, done_ptr):  # each start has moved to its end: move all back by one
        ptr[1:] = ptr[:-1].copy()
        ptr[0] = 0
    return left_ptr, left_next, done_ptr, done_next


@njit(cache=True)
def _starts(send, rows, hops, n_channels):  # type: ignore[no-untyped-def]
    """Return by channel the rows that start on it and wait for nothing, in row order."""
    ptr = np.zeros(n_channels + 1, dtype=np.int64)
    for row in range(len(rows)):
        if send[row] == NONE:
            ptr[hops[rows[row, FIRST_HOP]] + 1] += 1
    for channel in range(n_channels):
        ptr[channel + 1] += ptr[channel]
    fill = ptr.copy()
    listed = np.empty(ptr[n_channels], dtype=np.uint32)
    for row in range(len(rows)):
        if send[row] == NONE:
            channel = hops[rows[row, FIRST_HOP]]
            listed[fill[channel]] = row
            fill[channel] += 1
    return ptr, listed


@njit(cache=True)
def _add_loads(rows, hops, fractions, counts, loads):  # type: ignore[no-untyped-def]
    for row in range(len(rows)):
        for hop in range(rows[row, FIRST_HOP], rows[row, LAST_HOP] + 1):
            counts[hops[hop]] += 1
            loads[hops[hop]] += fractions[rows[row, SIZE_CLASS]]
