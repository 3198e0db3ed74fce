"""What must wait for what: dependencies between the rows of a schedule, derived from it.

A row reads chunks at its source and writes them at its destination, so every dependency is
local to one chunk of one place, which is a rank or, with scratch, a buffer of a rank:

- **send**: rows that wrote what this row sends (read after write). They gate its sending.
- **write**: rows that read or wrote what this row will change at its destination (write after
  read, write after write). They gate only the change there, not the sending.

REDUCE rows that add to one cell with no read between them commute: they do not wait for each
other, and the next row that reads the cell waits for all of them. An executor adds them in row
order, so that sums repeat bit for bit; a simulator may add them in order of arrival.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import inlined, kernel, plain_kernel
from meshmend.schedule.table import COPY, Schedule

NONE: Final = np.uint32(0xFFFFFFFF)
MANY: Final = np.uint32(0x80000000)


@dataclass(frozen=True, eq=False)
class Hazards:
    """For each row the rows that its sending, and its writing, wait for.

    Most rows wait for one other at most, so an entry of `send` or `write` is `NONE`, a row, or
    `MANY + at`, where `more[at]` counts the rows that follow it in `more`. Lists are without
    repeats and name smaller rows only.
    """

    send: NDArray[np.uint32]
    write: NDArray[np.uint32]
    more: NDArray[np.uint32]

    def before_send(self, row: int) -> list[int]:
        """Return the rows whose writes must be in place before this row is sent, sorted."""
        return self._rows(self.send[row])

    def before_write(self, row: int) -> list[int]:
        """Return the rows that must be done at the destination before this row writes, sorted."""
        return self._rows(self.write[row])

    def _rows(self, entry: np.uint32) -> list[int]:
        if entry == NONE:
            return []
        if entry < MANY:
            return [int(entry)]
        at = int(entry - MANY)
        return sorted(self.more[at + 1 : at + 1 + int(self.more[at])].tolist())


@inlined
def n_before(entry, more):  # type: ignore[no-untyped-def]
    """Return how many rows an entry of the hazards names."""
    if entry == NONE:
        return 0
    return np.int64(more[entry - MANY]) if entry >= MANY else 1


@inlined
def before_at(entry, more, which):  # type: ignore[no-untyped-def]
    """Return one of the rows that an entry of the hazards names."""
    return np.int64(more[entry - MANY + np.uint32(1) + which] if entry >= MANY else entry)


def hazards_of(schedule: Schedule) -> Hazards:
    """Return the dependencies between the rows of a schedule.

    Every dependency is local to a place, so places are analysed one after another, each with the
    few kilobytes of state that its chunks need, in time about linear in the rows. Large
    schedules are shared out between two threads. The kernels below say rank for place.
    """
    send, write = (np.empty(schedule.n_rows, dtype=np.uint32) for _ in range(2))
    src, dst = schedule.src_place, schedule.dst_place
    ptr = _event_ptr(src, dst, schedule.n_places)

    def analysed(batch: tuple[int, int]) -> NDArray[np.uint32]:
        first, last = batch
        events = _events_of((src, dst, schedule.lo, schedule.hi, schedule.op), ptr, first, last)
        waits, more = _analyse(ptr[first : last + 1] - ptr[first], events, schedule.n_chunks)
        _deal_out(src, dst, ptr, (first, last), waits, (send, write))
        return np.asarray(more, dtype=np.uint32)

    batches = _batches(ptr)
    with ThreadPoolExecutor(max_workers=2) as pool:
        parts = list(pool.map(analysed, batches) if len(batches) > 1 else map(analysed, batches))
    if len(parts) > 1 and any(len(part) for part in parts):
        shift = np.empty(schedule.n_places, dtype=np.uint32)
        at = 0
        for (first, last), part in zip(batches, parts, strict=True):
            shift[first:last] = at
            at += len(part)
        _shift(send, src, shift)
        _shift(write, dst, shift)
    more = np.concatenate(parts)
    for array in (send, write, more):
        array.flags.writeable = False
    return Hazards(send, write, more)


# Each row is an event at two ranks; a batch of ranks lists about this many events at a time.
_EVENTS_PER_BATCH = 1 << 24


def _batches(ptr: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Split the ranks so that the event lists of a batch stay small next to the table."""
    n_batches = 1 + int(ptr[-1]) // _EVENTS_PER_BATCH
    bounds = np.searchsorted(ptr, np.linspace(0, ptr[-1], n_batches + 1)[1:-1])
    return [pair for pair in pairwise([0, *bounds.tolist(), len(ptr) - 1]) if pair[0] < pair[1]]


@kernel
def _event_ptr(src, dst, n_ranks):  # type: ignore[no-untyped-def]
    """Return where each rank's events start when all are listed rank by rank."""
    ptr = np.zeros(n_ranks + 1, dtype=np.int64)
    for row in range(len(src)):
        ptr[src[row] + 1] += 1
        ptr[dst[row] + 1] += 1
    for rank in range(n_ranks):
        ptr[rank + 1] += ptr[rank]
    return ptr


@kernel
def _events_of(table, ptr, first, last):  # type: ignore[no-untyped-def]
    """Return for ranks first..last-1 the rows that touch each, in program order.

    An event is (row, first chunk, end chunk, kind): kind 0 reads, 1 adds, 2 overwrites.
    """
    src, dst, lo, hi, op = table
    fill = ptr[first:last] - ptr[first]
    n_events = ptr[last] - ptr[first]
    rows = np.empty(n_events, dtype=np.uint32)
    chunks = np.empty((n_events, 2), dtype=lo.dtype)
    kinds = np.empty(n_events, dtype=np.uint8)
    for row in range(len(src)):
        for side in range(2):
            rank = dst[row] if side else src[row]
            if first <= rank < last:
                at = fill[rank - first]
                fill[rank - first] = at + 1
                rows[at] = row
                chunks[at, 0] = lo[row]
                chunks[at, 1] = hi[row]
                kinds[at] = side * (1 + (op[row] == COPY))
    return rows, chunks, kinds


@kernel
def _deal_out(src, dst, ptr, batch, waits, entries):  # type: ignore[no-untyped-def]
    """Enter what each event waits for at its row.

    Going through the rows in order and picking from the ranks' lists is twice as fast as going
    through the lists and jumping between the rows.
    """
    first, last = batch
    send, write = entries
    at = ptr[first:last] - ptr[first]
    for row in range(len(src)):
        if first <= src[row] < last:
            send[row] = waits[at[src[row] - first]]
            at[src[row] - first] += 1
        if first <= dst[row] < last:
            write[row] = waits[at[dst[row] - first]]
            at[dst[row] - first] += 1


@plain_kernel
def _shift(entries, rank_of_row, shift):  # type: ignore[no-untyped-def]
    """Move the lists of each batch behind those of the batches before it."""
    for row in range(len(entries)):
        if MANY <= entries[row] < NONE:
            entries[row] += shift[rank_of_row[row]]


@plain_kernel
def _to_segments(chunks, start, stop, segment_of):  # type: ignore[no-untyped-def]
    """Renumber the chunks of a rank's events so that only bounds that occur there count.

    Return how many (event, segment) pairs the rank has: a rank whose rows move wide ranges has
    few segments, and the analysis works on those.
    """
    segment_of[:] = 0
    for event in range(start, stop):
        segment_of[chunks[event, 0]] = 1
        segment_of[chunks[event, 1]] = 1
    n_segments = -1
    for chunk in range(len(segment_of)):
        n_segments += segment_of[chunk]
        segment_of[chunk] = n_segments
    pairs = np.int64(0)
    for event in range(start, stop):
        chunks[event, 0] = segment_of[chunks[event, 0]]
        chunks[event, 1] = segment_of[chunks[event, 1]]
        pairs += np.int64(chunks[event, 1]) - np.int64(chunks[event, 0])
    return pairs


@kernel
def _analyse(ptr, events, n_chunks):  # type: ignore[no-untyped-def]
    """Return what each event of some ranks waits for, and the lists `more`."""
    rows, chunks, kinds = events
    waits = np.full(len(rows), NONE, dtype=np.uint32)
    more = np.empty(1024, dtype=np.uint32)
    n_more = np.int64(0)
    segment_of = np.empty(n_chunks + 1, dtype=np.int32)
    most_events, most_nodes = 1, 1
    for rank in range(len(ptr) - 1):
        most_nodes = max(most_nodes, _to_segments(chunks, ptr[rank], ptr[rank + 1], segment_of))
        most_events = max(most_events, ptr[rank + 1] - ptr[rank])
    cells = np.empty((n_chunks, 4), dtype=np.int32)
    nodes = np.empty((most_nodes, 2), dtype=np.int32)
    stamp = np.empty(most_events, dtype=np.int32)
    found = np.empty(most_events, dtype=np.uint32)
    for rank in range(len(ptr) - 1):
        start, stop = ptr[rank], ptr[rank + 1]
        cells[:] = -1
        stamp[: stop - start] = -1
        n_nodes = np.int64(0)
        for event in range(stop - start):
            kind = kinds[start + event]
            lo, hi = chunks[start + event, 0], chunks[start + event, 1]
            n_found = np.int64(0)
            for segment in range(lo, hi):
                node = _enter(cells, segment, nodes, n_nodes, event, kind)
                n_nodes += 1
                while node >= 0:
                    earlier = nodes[node, 0]
                    if hi - lo == 1 or stamp[earlier] != event:
                        stamp[earlier] = event
                        found[n_found] = rows[start + earlier]
                        n_found += 1
                    node = nodes[node, 1]
            if n_found == 1:
                waits[start + event] = found[0]
            elif n_found > 1:
                waits[start + event] = MANY + np.uint32(n_more)
                more, n_more = _append(more, n_more, found, n_found)
    return waits, more[:n_more].copy()


@inlined
def _enter(cells, segment, nodes, n_nodes, event, kind):  # type: ignore[no-untyped-def]
    """Enter an event into a cell's state; return the list of events that it waits for.

    A cell is (writers, readers, base, is copy): the last group of commuting writes, the reads
    since, and what that group itself waited for, as heads of linked lists. An overwrite, and an
    addition after a read or after an overwrite, start a new group.
    """
    nodes[n_nodes, 0] = event
    if kind == 0:
        nodes[n_nodes, 1] = cells[segment, 1]
        cells[segment, 1] = n_nodes
        return cells[segment, 0]
    if kind == 2 or cells[segment, 1] >= 0 or cells[segment, 3] == 1:
        cells[segment, 2] = cells[segment, 1] if cells[segment, 1] >= 0 else cells[segment, 0]
        cells[segment, 0] = -1
        cells[segment, 1] = -1
        cells[segment, 3] = kind == 2
    nodes[n_nodes, 1] = cells[segment, 0]
    cells[segment, 0] = n_nodes
    return cells[segment, 2]


@kernel
def _append(more, n_more, found, n_found):  # type: ignore[no-untyped-def]
    if n_more + n_found + 1 > len(more):
        grown = np.empty(2 * (len(more) + n_found), dtype=np.uint32)
        for at in range(n_more):  # assigning slices would take two seconds more to compile
            grown[at] = more[at]
        more = grown
    more[n_more] = n_found
    for at in range(n_found):
        more[n_more + 1 + at] = found[at]
    return more, n_more + 1 + n_found
