"""Describes a rank's part in a collective as a task, and the transports that run tasks.

A transport has `run(task, payload, timeout_s=...)`, which sends and receives what the task says;
`interrupt()`, which makes a run, or the next one, raise StoppedError; and `close()`.

    TransportError              a collective did not finish on this rank
    ├── PeerLostError           the connection to a rank broke, or it never came up
    ├── MismatchError           ranks do not agree on what they are doing
    ├── StoppedError            `interrupt` was called
    ├── StalledError            nothing moved for the time allowed
    └── HandshakeError          the other end did not prove that it knows the secret

A **move** is a row of a schedule that this rank sends, receives, or does alone between two of its
buffers; moves are numbered in row order. A **program** holds the moves, and is made once per
schedule and rank. A **layout** adds the sizes, and is made once per payload size, element size and
number of slices. With S slices every move runs S times, on S disjoint parts of the payload. Each of
these runs has a **key**, `slice x moves + move`. Of what is ready for a peer, the smallest (slice +
delay, move) is sent first, as in the simulator. A move has the delay of its row.
"""

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.schedule.hazards import Hazards
from meshmend.schedule.priority import in_levels
from meshmend.schedule.table import COPY, Schedule
from meshmend.transport.combine import DTYPES, OPS, combine_code, describe_code

Numbers = NDArray[np.int64]

Bytes = NDArray[np.uint8]

SEND: Final = 0
ADD: Final = 1
PUT: Final = 2
LOCAL_ADD: Final = 3
LOCAL_PUT: Final = 4

ITEMSIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "uint8": 1}
_HALF_BYTES = 2


@dataclass(frozen=True, eq=False)
class RankProgram:
    """The moves of one rank: `kind` is SEND, ADD, PUT, LOCAL_ADD or LOCAL_PUT.

    `peer` is the rank at the other end, in a local move this rank itself.

    `needs[m]` counts the moves that move m waits for. When m is done, the count of each move in
    `following[following_ptr[m]:following_ptr[m + 1]]` decreases by one. A move waits for its
    hazards. Additions to one chunk also wait for each other in row order, so that sums are the same
    bit for bit whatever arrives first.
    """

    schedule: Schedule
    rank: int
    row: Numbers
    peer: Numbers
    kind: Numbers
    needs: Numbers
    following_ptr: Numbers
    following: Numbers

    @property
    def n_moves(self) -> int:
        return len(self.row)

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The ranks that this one exchanges data with, sorted."""
        return tuple(np.unique(self.peer[~self.is_local]).tolist())

    @cached_property
    def is_local(self) -> NDArray[np.bool_]:
        """Which moves this rank does alone."""
        return np.greater_equal(self.kind, LOCAL_ADD)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the bytes of each key are: `start` and `size` in the payload.

    Data that arrives too early waits at `staging_offset` in a buffer of `staging_bytes`. The offset
    is -1 for a key whose data is never too early. Scratch is the beginning of that buffer: a start
    below zero is the complement of a place there. A local move reads at `source` and writes at
    `start`; other moves have no source, -1.
    """

    n_slices: int
    start: Numbers
    size: Numbers
    staging_offset: Numbers
    staging_bytes: int
    source: Numbers
    scratch_bytes: int


@dataclass(frozen=True, eq=False)
class Task:
    """One rank's part in a collective on payloads of one size and type; it can run many times.

    The fingerprint identifies the collective: size, type, operation and plan. All ranks must have
    the same. `levels` are the delays of the moves, in 64ths of a slice: what is sent first, which
    no other rank has to know.
    """

    program: RankProgram
    layout: Layout
    code: int
    n_bytes: int
    fingerprint: int
    levels: Numbers


def task_of(
    program: RankProgram,
    n_elements: int,
    *,
    dtype: str = "float32",
    op: str = "sum",
    n_slices: int = 1,
    delays: NDArray[np.float64] | None = None,
) -> Task:
    """Return one rank's part in a collective on `n_elements` elements of a type.

    `delays` are those of the schedule's rows, in slices; none: all are zero.

    Raises:
        InputError: `combine` does not support the type or the operation.
    """
    code = combine_code(dtype, op)
    itemsize = ITEMSIZES.get(dtype, _HALF_BYTES)
    layout = layout_of(program, n_elements, itemsize=itemsize, n_slices=n_slices)
    identity = f"{program.schedule.digest} {n_slices}"
    n_bytes = n_elements * itemsize
    fingerprint = n_bytes << 24 | code << 16 | zlib.crc32(identity.encode()) & 0xFFFF
    levels = np.zeros(program.n_moves, dtype=np.int64)
    if delays is not None:
        levels = in_levels(delays)[program.row].astype(np.int64)
    return Task(program, layout, code, n_bytes, fingerprint, levels)


def rank_program(schedule: Schedule, hazards: Hazards, rank: int) -> RankProgram:
    """Return one rank's part of a schedule, in time linear in its rows and the chunks they move.

    Raises:
        InputError: the schedule has no such rank.
    """
    if not 0 <= rank < schedule.n_ranks:
        raise InputError(
            f"{schedule.algorithm} has ranks 0 to {schedule.n_ranks - 1}, but got rank {rank}"
        )
    sends = schedule.src == rank
    row = np.flatnonzero(sends | (schedule.dst == rank))
    sends = sends[row]
    kind = np.where(sends, SEND, np.where(schedule.op[row] == COPY, PUT, ADD))
    if schedule.has_scratch:
        local = np.where(schedule.op[row] == COPY, LOCAL_PUT, LOCAL_ADD)
        kind = np.where(schedule.is_local[row], local, kind)
    peer = np.where(sends, schedule.dst[row], schedule.src[row]).astype(np.int64)
    before = _before(schedule, hazards, row, kind)
    needs = np.array([len(rows) for rows in before], dtype=np.int64)
    earlier = np.array([move for rows in before for move in sorted(rows)], dtype=np.int64)
    order = np.argsort(earlier, kind="stable")
    return RankProgram(
        schedule=schedule,
        rank=rank,
        row=row,
        peer=peer,
        kind=kind.astype(np.int64),
        needs=needs,
        following_ptr=np.searchsorted(earlier[order], np.arange(len(row) + 1)),
        following=np.repeat(np.arange(len(row)), needs)[order],
    )


def _before(
    schedule: Schedule, hazards: Hazards, row: Numbers, kind: NDArray[Any]
) -> list[set[int]]:
    """Return the moves that each move waits for."""
    move_of = dict(zip(row.tolist(), range(len(row)), strict=True))
    last_writers = np.full((schedule.n_buffers, schedule.n_chunks), -1, dtype=np.int64)
    columns = (
        row,
        schedule.dst_place[row] % schedule.n_buffers,
        schedule.lo[row],
        schedule.hi[row],
    )
    spans = zip(*(column.tolist() for column in columns), strict=True)
    result = []
    for move, (number, buffer, lo, hi) in enumerate(spans):
        waits = set[int]()
        if kind[move] not in {ADD, PUT}:
            waits.update(move_of[earlier] for earlier in hazards.before_send(number))
        if kind[move] != SEND:
            waits.update(move_of[earlier] for earlier in hazards.before_write(number))
            last_writer = last_writers[buffer, lo:hi]
            if kind[move] in {ADD, LOCAL_ADD}:
                waits.update(set(last_writer.tolist()) - {-1})
            last_writer[:] = move
        result.append(waits)
    return result


def layout_of(program: RankProgram, n_elements: int, *, itemsize: int, n_slices: int = 1) -> Layout:
    """Return where the bytes of each key are in a payload of `n_elements` cut in `n_slices`.

    If every row moves one chunk, each chunk is cut in slices, so that the place of a chunk does not
    depend on the number of slices. Otherwise the whole payload is cut in slices.
    """
    schedule, row = program.schedule, program.row
    lo, hi = schedule.lo[row].astype(np.int64), schedule.hi[row].astype(np.int64)
    part = np.arange(n_slices + 1, dtype=np.int64)[:, None]
    if np.all(schedule.hi.astype(np.int64) - schedule.lo == 1):
        bounds = np.rint(schedule.cuts * n_elements).astype(np.int64)
        edge = bounds[lo] + (bounds[hi] - bounds[lo]) * part // n_slices
        start, stop = edge[:-1], edge[1:]
    else:
        edges = n_elements * part // n_slices
        bounds = edges[:-1] + np.rint(schedule.cuts * np.diff(edges, axis=0)).astype(np.int64)
        start, stop = bounds[:, lo], bounds[:, hi]
    size = (stop - start).reshape(-1) * itemsize
    can_be_early = ((program.kind == ADD) | (program.kind == PUT)) & (program.needs > 0)
    is_staged = np.tile(can_be_early, n_slices) & (size > 0)
    room = np.where(is_staged, -(-size // 64) * 64, 0)
    # Pages of scratch that no move uses take no memory.
    buffer_bytes = -(-n_elements * itemsize // 64) * 64
    scratch_bytes = (schedule.n_buffers - 1) * buffer_bytes
    staging_offset = np.where(is_staged, scratch_bytes + np.cumsum(room) - room, -1)
    in_payload = start.reshape(-1) * itemsize
    read, written = (
        np.tile(place[row].astype(np.int64) % schedule.n_buffers, n_slices)
        for place in (schedule.src_place, schedule.dst_place)
    )
    is_send, is_local = (
        np.tile(each, n_slices) for each in (program.kind == SEND, program.is_local)
    )
    starts = _starts(in_payload, np.where(is_send, read, written), buffer_bytes)
    source = np.where(is_local, _starts(in_payload, read, buffer_bytes), -1)
    return Layout(
        n_slices,
        starts,
        size,
        staging_offset,
        scratch_bytes + int(room.sum()),
        source,
        scratch_bytes,
    )


def _starts(in_payload: Numbers, buffer: Numbers, buffer_bytes: int) -> Numbers:
    """Return where the bytes of keys are: in the payload, or the complement of a scratch place."""
    return np.where(buffer == 0, in_payload, ~((buffer - 1) * buffer_bytes + in_payload))


def describe_fingerprint(fingerprint: int) -> str:
    """Return in words the collective that a fingerprint stands for."""
    code = fingerprint >> 16 & 0xFF
    known = code < len(DTYPES) * len(OPS)
    what = describe_code(code) if known else "something unknown"
    return f"{what} over {fingerprint >> 24} bytes (plan {fingerprint & 0xFFFF:04x})"
