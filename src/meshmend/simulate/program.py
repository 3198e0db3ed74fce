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
from meshmend.schedule.table import REDUCE, Phase, Schedule

# Columns of Tables.rows.
FIRST_HOP: Final = 0
LAST_HOP: Final = 1
SIZE_CLASS: Final = 2
PHASE: Final = 3
WRITE_SLOT: Final = 4

# Kinds of successors, the two lowest bits; the bits above hold a row, or a slot to count down.
SEND: Final = 0
COUNTED_SEND: Final = 1
COUNTED_WRITE: Final = 2

MAX_ROWS: Final = 1 << 30

# Chunks of one size come out of the cuts with this much noise: they count as one size.
_SAME_FRACTION: Final = 2.0**-50


class Tables(NamedTuple):
    """What the event loop reads.

    A row's message takes `hops[first hop .. last hop]`. When it has left its source it sets off
    `left_next[left_ptr[row]:left_ptr[row + 1]]`, when it is in place at its destination the
    same of `done`. A row that waits for one thing only is set off at once; others own a slot,
    which counts down from `slot_needs`. Rows that wait for nothing are listed by the channel
    they start on, in row order.
    """

    rows: NDArray[np.int32]
    reduces: NDArray[np.bool_]
    hops: NDArray[np.int32]
    chip_of_hop: NDArray[np.int32]
    left_ptr: NDArray[np.uint32]
    left_next: NDArray[np.uint32]
    done_ptr: NDArray[np.uint32]
    done_next: NDArray[np.uint32]
    slot_row: NDArray[np.uint32]
    slot_needs: NDArray[np.int32]
    start_ptr: NDArray[np.int64]
    start_rows: NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Program:
    """A schedule on its routes, ready to be simulated with any fabric, payload and slices.

    `fractions[k]` is the part of the payload that a row of size class k moves. A row of class k
    that reduces is marked in `tables.reduces`.
    """

    schedule: Schedule
    n_channels: int
    fractions: NDArray[np.float64]
    tables: Tables

    @property
    def n_rows(self) -> int:
        return self.schedule.n_rows

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.schedule.phases

    def hops_of_rows(self) -> NDArray[np.int32]:
        """Return the number of hops of each row."""
        hops: NDArray[np.int32] = self.tables.rows[:, LAST_HOP] - self.tables.rows[:, FIRST_HOP] + 1
        return hops

    def channel_loads(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return how many rows cross each channel, and which fraction of the payload in all."""
        counts = np.zeros(self.n_channels, dtype=np.int64)
        loads = np.zeros(self.n_channels)
        _add_loads(self.tables.rows, self.tables.hops, self.fractions, counts, loads)
        return counts, loads


def program_of(schedule: Schedule, hazards: Hazards, routes: Routes) -> Program:
    """Return a schedule laid out for the event loop, in time linear in its rows and hazards.

    Raises:
        InputError: a row without a route, hazards of another schedule, or too many rows.
    """
    n_rows = schedule.n_rows
    if len(hazards.send) != n_rows or routes.n_ranks != schedule.n_ranks:
        raise InputError(
            f"program_of needs hazards of {n_rows} rows and routes of {schedule.n_ranks} ranks, "
            f"but got {len(hazards.send)} and {routes.n_ranks}; make both for this schedule"
        )
    if n_rows >= MAX_ROWS:
        raise InputError(f"program_of needs fewer than {MAX_ROWS} rows, but got {n_rows}")
    rows = np.empty((n_rows, 5), dtype=np.int32)
    rows[:, PHASE] = schedule.phase_of_rows()
    _enter_hops(rows, schedule.src, schedule.dst, routes.pair_ptr, routes.dst, routes.hop_ptr)
    if n_rows and np.any(missing := rows[:, FIRST_HOP] < 0):
        row = int(np.argmax(missing))
        raise InputError(
            f"program_of needs a route for every row, but there is none for row {row} "
            f"({schedule.row(row)}); name its ranks in routes_for"
        )
    n_channels = routes.n_ranks * routes.n_ports
    fractions = _enter_size_classes(rows, schedule.lo, schedule.hi, schedule.cuts)
    slot_row, slot_needs = _enter_slots(rows, *_waits(hazards))
    left_ptr, left_next, done_ptr, done_next = _successors(
        hazards.send, hazards.write, hazards.more, schedule.src, schedule.dst, rows
    )
    start_ptr, start_rows = _starts(hazards.send, rows, routes.channels, n_channels)
    tables = Tables(
        rows=rows,
        reduces=schedule.op == REDUCE,
        hops=routes.channels,
        chip_of_hop=...,
        left_ptr=left_ptr,
    )
    return Program(schedule, n_channels, fractions, tables)
