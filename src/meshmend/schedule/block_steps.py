"""An all-to-all as steps that all ranks take together: blocks hop from neighbour to neighbour.

A permute between chips that are no neighbours takes a way that only the machine knows, and that may
hug a hole. So here every message of a plan follows the route that the plan was proved on, hop by
hop, and waits on the way in a cell of the chip where it is. Where two messages are never at a chip
at the same time, one cell serves both.

Knows tables and routes, nothing of JAX.
"""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.schedule.lockstep_program import LockstepProgram, step_tables
from meshmend.schedule.placement import Placement
from meshmend.schedule.step_packing import graph_of, packed_steps
from meshmend.schedule.table import Collective, Schedule

_Rows = NDArray[np.int64]


def block_program(schedule: Schedule, placement: Placement) -> LockstepProgram:
    """Return an all-to-all as a program whose permutes are between neighbours.

    A rank's cells are its own blocks, in the order of the ranks that they are for, then those that
    arrive, in the order of the ranks that they are from, and then room for what passes. A block has
    as many cells as the schedule has chunks for it. A rank's block for itself stays where it is.

    Raises:
        InputError: the schedule is no all-to-all.
    """
    if schedule.collective is not Collective.ALL_TO_ALL:
        raise InputError(f"steps of blocks need an all-to-all, but got {schedule!r}")
    message, src, dst, first, last = _hops(schedule, placement)
    before = _hops_before(schedule, message, first, last)
    waits = np.flatnonzero(before >= 0)
    graph = graph_of(src, dst, np.stack([before[waits], waits, np.ones_like(waits)]))
    steps = packed_steps(graph, 1)[0]
    after = np.full(len(src), -1)
    after[before[waits]] = waits

    n_cells = 2 * schedule.n_chunks
    send, place = _cells(schedule, message, src), n_cells // 2 + _cells(schedule, message, dst)
    passes = np.flatnonzero(after >= 0)
    place[passes], n_room = _room(dst[passes], steps[passes], steps[after[passes]], n_cells)
    send[waits] = place[before[waits]]
    n_cells += n_room
    permutations, sends, places, takes = step_tables(
        schedule.n_ranks, n_cells, src, dst, steps, send, place, np.full_like(src, -1)
    )
    return LockstepProgram(
        collective=schedule.collective,
        n_ranks=schedule.n_ranks,
        slices=1,
        cells_per_slice=n_cells,
        width=1,
        owners=np.zeros(0, dtype=np.int32),
        permutations=permutations,
        send=sends,
        place=places,
        take=takes,
        busiest=graph.busiest,
        depth=graph.depth,
        bound=graph.bound(1),
    )


def _hops(schedule: Schedule, placement: Placement) -> tuple[_Rows, _Rows, _Rows, _Rows, _Rows]:
    """Return of each hop its message (a row that is not local) and its ends; and of each row its
    first and last hop, -1 for local ones."""
    routes = placement.routes
    sent = np.flatnonzero(~schedule.is_local)
    pair = routes.pairs_of(schedule.src[sent], schedule.dst[sent])
    n_hops = routes.hops[pair]
    ends = np.cumsum(n_hops)
    message = np.repeat(sent, n_hops)
    number = np.arange(len(message)) - np.repeat(ends - n_hops, n_hops)
    channel = routes.channels[np.repeat(routes.hop_ptr[pair], n_hops) + number].astype(np.int64)
    src = channel // routes.n_ports
    dst = placement.mesh.neighbor_ranks.reshape(-1)[channel].astype(np.int64)
    first, last = np.full(schedule.n_rows, -1), np.full(schedule.n_rows, -1)
    first[sent], last[sent] = ends - n_hops, ends - 1
    return message, src, dst, first, last


def _hops_before(schedule: Schedule, message: _Rows, first: _Rows, last: _Rows) -> _Rows:
    """Return the hop that brings what each hop sends, -1 where it is a block of the sender."""
    before = np.arange(-1, len(message) - 1)
    before[first[first >= 0]] = -1
    # What a relay sends on lies in a buffer of its own, so exactly one row has written it.
    wrote = schedule.dst_place.astype(np.int64) * schedule.n_chunks + schedule.lo
    reads = schedule.src_place.astype(np.int64) * schedule.n_chunks + schedule.lo
    is_payload = schedule.src_place % schedule.n_buffers == 0
    onward = np.flatnonzero(~is_payload & ~schedule.is_local)
    order = np.argsort(wrote, kind="stable")
    writer = order[np.searchsorted(wrote[order], reads[onward])]
    before[first[onward]] = last[writer]
    return before


def _cells(schedule: Schedule, message: _Rows, rank: _Rows) -> _Rows:
    """Return which cell of a rank's blocks, own or arrived, the chunk of each hop's message is."""
    n_parts = schedule.n_chunks // schedule.n_ranks
    place, part = np.divmod(schedule.lo[message].astype(np.int64), n_parts)
    return (place - rank) % schedule.n_ranks * n_parts + part


def _room(rank: _Rows, comes: _Rows, goes: _Rows, first: int) -> tuple[_Rows, int]:
    """Return a cell from `first` on for each part that passes a rank, and how many there are.

    A step reads before it writes: a cell is free in the step in which it is sent.
    """
    room = np.empty(len(rank), dtype=np.int64)
    free: dict[int, list[int]] = {}
    until: dict[int, list[tuple[int, int]]] = {}
    n_room: dict[int, int] = {}
    for each in np.argsort(comes, kind="stable").tolist():
        at = int(rank[each])
        leaving, unused = until.setdefault(at, []), free.setdefault(at, [])
        while leaving and leaving[0][0] <= comes[each]:
            heappush(unused, heappop(leaving)[1])
        if not unused:
            n_room[at] = n_room.get(at, 0) + 1
            unused.append(n_room[at] - 1)
        cell = heappop(unused)
        heappush(leaving, (int(goes[each]), cell))
        room[each] = first + cell
    return room, max(n_room.values(), default=0)
