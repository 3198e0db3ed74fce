"""A schedule on its routes, laid out for the event loop: each row, and what waits for it.

Hazards say what a row waits for; an event loop needs the reverse, what waits for a row. That
depends on no figure of the fabric, no payload and no number of slices, so it is made once.

In a sharded update each chunk waits for its owner's sum, and its copies wait for it. To the event
loop an update is a message without a way: it holds a channel of its owner's own, the update unit,
for as long as the update takes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.kernels import inlined, kernel, plain_kernel
from meshmend.schedule.hazards import MANY, NONE, Hazards, before_at, n_before
from meshmend.schedule.table import COPY, REDUCE, Collective, Schedule
from meshmend.topology.routes import Routes


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
            n_more += 1 + hi[row] - lo[row] + n_before(send[row], more)
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
        for which in range(n_before(send[row], more)):
            lists[at] = before_at(send[row], more, which)
            at += 1
        for chunk in range(np.int64(lo[row]), np.int64(hi[row])):
            if owners[chunk] == src[row]:
                lists[at] = np.uint32(n_rows + chunk)
                at += 1
        lists[start] = at - start - 1
        sends[row] = MANY + np.uint32(start)
    return sends, writes, lists[:at].copy()


# Columns of Tables.rows.
FIRST_HOP: Final = 0  # where its channels begin in Tables.hops
SIZE_CLASS: Final = 1
PHASE: Final = 2  # -1: none
WRITE_SLOT: Final = 3  # -1: its writing waits for its arrival only
REDUCE_AT: Final = 4  # the rank that adds it up, -1: it overwrites
LEFT_AT: Final = 5  # start in Tables.after of what may go on when this row has left its source,
DONE_AT: Final = 6  # end of that, and start of what may go on when this row is in place,
DONE_STOP: Final = 7  # and end of that
N_COLUMNS: Final = 8  # half a cache line: the event loop spends most of its time on memory

# Entries of Tables.after: the two lowest bits are one of these, the others a row (SEND) or a slot.
SEND: Final = 0
COUNTED_SEND: Final = 1
COUNTED_WRITE: Final = 2

MAX_ROWS: Final = 1 << 30

# Fractions that differ by no more than this differ by rounding only: they count as one size.
_SAME_FRACTION: Final = 2.0**-50


class Tables(NamedTuple):
    """What the event loop reads.

    A row's message takes the channels of `hops` from its first hop on; the last one stands there
    as its complement `~channel`. `hop_delay` is the first size class for the speed of that hop.
    `after` lists what waits for each row. A send that waits for one row only starts as soon as that
    row is in place. A send or write that waits for more has a slot, which counts down from
    `slot_needs`. `start_rows` are the rows that wait for nothing.
    """

    rows: NDArray[np.int32]
    hops: NDArray[np.int32]
    hop_delay: NDArray[np.int32]
    after: NDArray[np.uint32]
    slot_row: NDArray[np.int32]
    slot_needs: NDArray[np.int32]
    start_rows: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Program:
    """A schedule on its routes, ready to be simulated with any fabric, payload and slices.

    `fractions[k]` is the part of the payload that a row of size class k moves. A hop of class s has
    the speed `speeds[s]`, and `speeds[0]` is 1: a message that crossed a slow link goes on at that
    speed. The rows of the
    tables that come after those of the schedule are updates. Updates and local rows take no link:
    their classes are the last `n_own_classes`, and channel `n_channels` + rank is the rank's own.
    """

    schedule: Schedule
    n_channels: int
    fractions: NDArray[np.float64]
    n_own_classes: int
    tables: Tables
    speeds: NDArray[np.float64]

    @property
    def n_rows(self) -> int:
        """How many rows there are, updates included."""
        return len(self.tables.rows)

    @property
    def n_hops(self) -> int:
        """How many hops all rows take together; an update or a local row counts as one."""
        n_local = int(self.schedule.is_local.sum()) if self.schedule.has_scratch else 0
        return int(self.channel_loads[0].sum()) + n_updates(self.schedule) + n_local

    @cached_property
    def channel_loads(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """How many rows cross each channel, and how many payloads at full speed that makes in all.

        A payload on a link of half the speed counts twice.
        """
        n_queues = self.n_channels + self.schedule.n_ranks  # local rows are at the last of them
        counts = np.zeros(n_queues, dtype=np.int64)
        loads = np.zeros(n_queues)
        rows = self.tables.rows[: self.schedule.n_rows]
        slowness = 1 / self.speeds[self.tables.hop_delay // len(self.fractions)]
        _add_loads(rows, self.tables.hops, slowness, self.fractions, counts, loads)
        return counts[: self.n_channels], loads[: self.n_channels]


def program_of(schedule: Schedule, hazards: Hazards, routes: Routes) -> Program:
    """Return a schedule laid out for the event loop, in time linear in its rows and hazards.

    Raises:
        InputError: a row without a route, hazards or routes of something else, too many rows.
    """
    _check_fit(schedule, hazards, routes)
    hazards = with_updates(schedule, hazards)
    all_rows = np.empty((schedule.n_rows + n_updates(schedule), N_COLUMNS), dtype=np.int32)
    all_rows[:, PHASE] = all_rows[:, REDUCE_AT] = -1
    rows = all_rows[: schedule.n_rows]
    rows[:, PHASE] = schedule.phase_of_rows()
    rows[:, REDUCE_AT] = np.where(schedule.op == REDUCE, schedule.dst.astype(np.int32), -1)
    pairs = routes.pairs_of(schedule.src, schedule.dst)
    rows[:, FIRST_HOP] = np.append(routes.hop_ptr[:-1], -1)[pairs]  # a pair of -1 is the last
    if schedule.has_scratch:
        rows[:, FIRST_HOP] = np.where(
            schedule.is_local,
            len(routes.channels) + schedule.src.astype(np.int32),
            rows[:, FIRST_HOP],
        )
    if np.any(missing := rows[:, FIRST_HOP] < 0):
        row = int(np.argmax(missing))
        raise InputError(
            f"program_of needs a route for every row, but there is none for row {row}, where "
            f"{schedule.row(row)}; name its ranks in routes_for"
        )
    n_channels = routes.n_ranks * routes.n_ports
    hops = routes.channels.copy()
    hops[routes.hop_ptr[1:] - 1] = ~hops[routes.hop_ptr[1:] - 1]
    fractions = _enter_sizes(rows, schedule.lo, schedule.hi, schedule.cuts)
    if schedule.has_scratch:
        own_fractions, units = _enter_local(rows, schedule, fractions)
    else:
        own_fractions, units = _enter_updates(all_rows, schedule, len(fractions), len(hops))
    slot_row, slot_needs = _enter_slots(all_rows, hazards.send, hazards.write, hazards.more)
    dependencies = (hazards.send, hazards.write, hazards.more, schedule.src, schedule.dst)
    after = _enter_successors(all_rows, *dependencies)
    fractions = np.concatenate([fractions, own_fractions])
    speeds, speed_class = _hop_speeds(routes)
    hop_delay = np.zeros(len(hops) + len(units), dtype=np.int32)
    hop_delay[: len(hops)] = len(fractions) * speed_class
    tables = Tables(
        rows=all_rows,
        hops=np.concatenate([hops, ~(n_channels + units)]).astype(hops.dtype),
        hop_delay=hop_delay,
        after=after,
        slot_row=slot_row,
        slot_needs=slot_needs,
        start_rows=np.flatnonzero(hazards.send == NONE).astype(np.int32),
    )
    for table in tables:
        table.flags.writeable = False
    return Program(schedule, n_channels, fractions, len(own_fractions), tables, speeds)


def _hop_speeds(routes: Routes) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the speeds that hops have, 1 first, and which of them each hop of the routes has."""
    if routes.speeds is None:
        return np.ones(1), np.zeros(len(routes.channels), dtype=np.int64)
    slowest = _slowest_so_far(routes.hop_ptr, routes.speeds[routes.channels])
    speeds, which = np.unique(np.append(slowest, 1.0), return_inverse=True)
    return speeds[::-1].copy(), (len(speeds) - 1 - which.reshape(-1))[:-1]


@kernel
def _slowest_so_far(hop_ptr, speeds):  # type: ignore[no-untyped-def]
    """Return the least speed of each route from its start up to each hop."""
    slowest = speeds.copy()
    for pair in range(len(hop_ptr) - 1):
        for hop in range(hop_ptr[pair] + 1, hop_ptr[pair + 1]):
            slowest[hop] = min(slowest[hop], slowest[hop - 1])
    return slowest


def _enter_local(
    rows: NDArray[np.int32], schedule: Schedule, fractions: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Give local rows size classes of their own; return the fractions of these, and all ranks."""
    kinds, which = np.unique(rows[schedule.is_local, SIZE_CLASS], return_inverse=True)
    rows[schedule.is_local, SIZE_CLASS] = len(fractions) + which.reshape(-1)
    return fractions[kinds], np.arange(schedule.n_ranks, dtype=np.int32)


def _enter_updates(
    rows: NDArray[np.int32], schedule: Schedule, first_class: int, first_hop: int
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Enter size and hop of each update; return the fractions of their classes, and their units."""
    if not n_updates(schedule):
        return np.empty(0), np.empty(0, dtype=np.int32)
    sizes = np.rint(np.diff(schedule.cuts) / _SAME_FRACTION)
    updates = rows[schedule.n_rows :]
    kinds, which = np.unique(sizes, return_inverse=True)
    updates[:, SIZE_CLASS] = first_class + which.reshape(-1)
    updates[:, FIRST_HOP] = first_hop + np.arange(schedule.n_chunks)
    return kinds * _SAME_FRACTION, schedule.owners


def _check_fit(schedule: Schedule, hazards: Hazards, routes: Routes) -> None:
    if len(hazards.send) != schedule.n_rows or routes.n_ranks != schedule.n_ranks:
        raise InputError(
            f"program_of needs hazards of {schedule.n_rows} rows and routes of "
            f"{schedule.n_ranks} ranks, but got {len(hazards.send)} and {routes.n_ranks}; "
            "make both for this schedule"
        )
    if schedule.n_rows + len(hazards.more) >= MAX_ROWS:
        raise InputError(
            f"program_of needs fewer than {MAX_ROWS} rows and hazards, but got "
            f"{schedule.n_rows + len(hazards.more)}"
        )


@kernel
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


@kernel
def _enter_slots(rows, send, write, more):  # type: ignore[no-untyped-def]
    """Number the slots, a row's send slot before its write slot; return each slot's row and count.

    A send has a slot if it waits for two rows or more. A write has one if it waits for any row,
    and its count includes the message's own arrival.
    """
    n_slots = 0
    for row in range(len(rows)):
        n_slots += (n_before(send[row], more) > 1) + (n_before(write[row], more) > 0)
    slot_row = np.empty(n_slots, dtype=np.int32)
    slot_needs = np.empty(n_slots, dtype=np.int32)
    slot = 0
    for row in range(len(rows)):
        n_send, n_write = n_before(send[row], more), n_before(write[row], more)
        if n_send > 1:
            slot_row[slot], slot_needs[slot] = row, n_send
            slot += 1
        rows[row, WRITE_SLOT] = -1
        if n_write > 0:
            rows[row, WRITE_SLOT] = slot
            slot_row[slot], slot_needs[slot] = row, n_write + 1
            slot += 1
    return slot_row, slot_needs


@kernel
def _enter_successors(rows, send, write, more, src, dst):  # type: ignore[no-untyped-def]
    """Return `after`, the lists of what waits for each row; enter where each list begins."""
    rows[:, LEFT_AT:] = 0
    for row in range(len(rows)):
        for which in range(n_before(send[row], more)):
            rows[before_at(send[row], more, which), DONE_AT] += 1
        for which in range(n_before(write[row], more)):
            before = before_at(write[row], more, which)
            is_read = src[before] == dst[row] and src[before] != dst[before]
            rows[before, LEFT_AT if is_read else DONE_AT] += 1
    n_after = np.int64(0)
    for row in range(len(rows)):
        n_left, n_done = rows[row, LEFT_AT], rows[row, DONE_AT]
        rows[row, LEFT_AT], rows[row, DONE_AT] = n_after, n_after + n_left
        n_after += np.int64(n_left) + np.int64(n_done)
        rows[row, DONE_STOP] = n_after
    after = np.empty(n_after, dtype=np.uint32)
    slot = 0
    for row in range(len(rows)):
        n_send, n_write = n_before(send[row], more), n_before(write[row], more)
        code = slot << 2 | COUNTED_SEND if n_send > 1 else row << 2 | SEND
        for which in range(n_send):
            _append(rows, after, before_at(send[row], more, which), np.int64(DONE_AT), code)
        slot += n_send > 1
        for which in range(n_write):
            before = before_at(write[row], more, which)
            is_read = src[before] == dst[row] and src[before] != dst[before]
            column = LEFT_AT if is_read else DONE_AT
            _append(rows, after, before, column, slot << 2 | COUNTED_WRITE)
        slot += n_write > 0
    at = 0
    for row in range(len(rows)):  # starts have moved to where their lists end: set them back
        rows[row, DONE_AT] = rows[row, LEFT_AT]
        rows[row, LEFT_AT] = at
        at = rows[row, DONE_STOP]
    return after


@inlined
def _append(rows, after, row, column, code):  # type: ignore[no-untyped-def]
    after[rows[row, column]] = code
    rows[row, column] += 1


@inlined
def channel_of(hop):  # type: ignore[no-untyped-def]
    """Return the channel that an entry of `hops` stands for."""
    return ~hop if hop < 0 else hop


@plain_kernel
def _add_loads(rows, hops, slowness, fractions, counts, loads):  # type: ignore[no-untyped-def]
    for row in range(len(rows)):
        hop = rows[row, FIRST_HOP]
        fraction = fractions[rows[row, SIZE_CLASS]]
        while True:
            channel = channel_of(hops[hop])
            counts[channel] += 1
            loads[channel] += fraction * slowness[hop]
            if hops[hop] < 0:
                break
            hop += 1
