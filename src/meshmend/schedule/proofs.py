"""Proofs about a schedule that take one pass over its rows; `contributions` proves what it sums.

Routes: every transfer must cross live links all the way. Scratch: nobody reads a scratch cell
before something was written there. Updates: a sharded update updates each chunk once, and nobody
sees it before.
"""

from typing import Final

import numpy as np

from meshmend.errors import VerificationError
from meshmend.kernels import plain_kernel
from meshmend.schedule.placement import Placement
from meshmend.schedule.table import COPY, Collective, Schedule
from meshmend.topology.routes import check_paths

_FINE: Final = 0
_TOO_EARLY: Final = 1
_ADDS_A_WEIGHT: Final = 2
_ADDS_TO_A_WEIGHT: Final = 3
_REASONS: Final = {
    _TOO_EARLY: "which is no updated weight at rank {src}; rank {owner} owns it",
    _ADDS_A_WEIGHT: "which rank {owner} has updated: it is a weight, no sum",
    _ADDS_TO_A_WEIGHT: "which rank {dst} holds as an updated weight already",
}


def check_hops(schedule: Schedule, placement: Placement) -> None:
    """Prove that each row has a route, and that each hop of each route exists and lives.

    Raises:
        VerificationError: a pair without a route, or a route with a dead hop.
    """
    routes = placement.routes
    check_paths(placement.mesh, routes)
    if schedule.n_ranks != routes.n_ranks:
        raise VerificationError(
            f"these routes are for {routes.n_ranks} ranks, but the schedule has {schedule.n_ranks}"
        )
    unrouted = (routes.pairs_of(schedule.src, schedule.dst) < 0) & ~schedule.is_local
    if unrouted.any():
        row = int(np.argmax(unrouted))
        raise VerificationError(
            f"every row needs a route, but there is none for row {row}: {schedule.row(row)}"
        )


def check_scratch(schedule: Schedule) -> None:
    """Prove that each row sends, and adds to, cells that hold something.

    Runs the table on one flag for each place and chunk: whether it holds anything. A payload does
    from the start, in a table of colours in the chunks of its own colour only; scratch does not.
    Counting contributions is not enough: scratch that nothing was written to counts as nothing, but
    a real buffer holds whatever was in memory.

    Raises:
        VerificationError: names the row, the chunk and the buffer.
    """
    if not schedule.has_scratch and schedule.colours is None:
        return
    is_written = np.zeros((schedule.n_places, schedule.n_chunks), dtype=np.bool_)
    is_written[:: schedule.n_buffers] = (
        True if schedule.colours is None else schedule.colours.takes_part
    )
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


def check_updates(schedule: Schedule) -> None:
    """Prove of a sharded update that no rank uses a weight before its owner has updated it.

    An owner updates a chunk just before the first row that copies it from the owner. Runs the table
    on one flag for each rank and chunk: whether the rank holds the updated chunk. A row that copies
    must copy an updated chunk, and a row that adds must neither send nor change one. Then every
    copy of a chunk comes from its owner's, and no sum changes after its update. So if every rank
    ends with the data of every rank exactly once (`contributions`), that was in the owner's sum
    when it was updated. Other collectives update nothing, so there is nothing to prove.

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
        why = _REASONS[fault].format(owner=int(schedule.owners[chunk]), src=src, dst=dst)
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
