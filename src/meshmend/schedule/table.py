"""The schedule: a table of transfers between ranks. Everything else is derived from it.

A row says: rank `src` sends chunks `lo` to `hi - 1` of its buffer to rank `dst`, which adds
them to its own (REDUCE) or overwrites its own (COPY). Executed one row after another the
table is correct: that is its meaning. What may overlap is computed by `hazards`, never
written by hand. A schedule knows nothing of chips, routes, bytes or time.

**Scratch.** A rank may have more buffers than its payload, each cut into the same chunks: buffer 0
is the payload, the others are scratch and hold nothing at the start. A row reads `src_buffer` and
writes `dst_buffer`. Then its two ranks may be the same: such a **local** row moves data between two
buffers of one rank. A buffer of a rank is a **place**, so every row goes from a place to another.

**Colours.** A table may hold several sums, one for each colour (`Colours`). A rank takes part in
the chunks of its own colour. In all others its payload holds nothing at the start, and rows may use
it to pass on what belongs to ranks of that colour.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError, UnsupportedError

# Beyond this a table no longer fits a workstation: to build and prove one takes 60 to 110 bytes a
# row.
MAX_ROWS: Final = 1 << 27

REDUCE: Final = 0
COPY: Final = 1

Index = NDArray[
    np.unsignedinteger
]  # uint16 while that is enough for all ranks and chunks, else uint32


class Collective(StrEnum):
    """What the ranks hold at the end.

    ALLREDUCE: every rank holds the sum of all. REDUCE_SCATTER: each chunk's owner holds the sum of
    all. ALL_GATHER: every rank holds what each chunk's owner held at the start. SHARDED_UPDATE:
    each chunk's owner turns the sum of all into new weights, just before the first row that copies
    the chunk from it, and every rank holds those. ALL_TO_ALL: the payload is a block for each rank,
    and every rank holds the blocks that all ranks had for it (`partners`).
    """

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    SHARDED_UPDATE = "sharded-update"
    ALL_TO_ALL = "all-to-all"


SUMS: Final = tuple(each for each in Collective if each is not Collective.ALL_TO_ALL)


@dataclass(frozen=True)
class Phase:
    """A named run of rows, for reports; it orders nothing."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Colours:
    """Which ranks take part in which chunks: those of the same colour.

    `of_rank` is -1 for a rank that takes part in nothing, and only passes messages on.
    """

    of_rank: NDArray[np.int32]
    of_chunk: NDArray[np.int32]

    def __post_init__(self) -> None:
        if np.any(self.of_chunk < 0) or not np.isin(self.of_chunk, self.of_rank).all():
            raise InputError("Colours need chunks of colours that some rank has")
        for array in (self.of_rank, self.of_chunk):
            array.flags.writeable = False

    @property
    def n_colours(self) -> int:
        return int(self.of_rank.max()) + 1

    @cached_property
    def takes_part(self) -> NDArray[np.bool_]:
        """Whether each rank takes part in each chunk (ranks, chunks)."""
        takes_part: NDArray[np.bool_] = self.of_rank[:, None] == self.of_chunk
        takes_part.flags.writeable = False
        return takes_part


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A table of transfers; row order is program order.

    The payload is cut at the sorted fractions `cuts` (from 0 to 1) into chunks. `owners[chunk]`
    is the rank that holds the chunk's sum between the reduce-scatter and the all-gather half.
    Pipelining is a number, not more rows: with S slices the payload is cut in S pieces that
    all run this table.
    """

    algorithm: str
    collective: Collective
    n_ranks: int
    cuts: NDArray[np.float64]
    owners: NDArray[np.int32]
    src: Index
    dst: Index
    lo: Index
    hi: Index
    op: NDArray[np.uint8]
    phases: tuple[Phase, ...] = ()
    src_buffer: NDArray[np.uint8] | None = None  # None: every row reads the payload
    dst_buffer: NDArray[np.uint8] | None = None
    colours: Colours | None = None  # None: every rank takes part in every chunk

    def __post_init__(self) -> None:
        columns = (self.src, self.dst, self.lo, self.hi)
        if len({len(column) for column in (*columns, self.op)}) != 1:
            raise InputError("Schedule needs columns of one length")
        if any(column.dtype != self.index_dtype for column in columns):
            raise InputError(f"Schedule needs its columns as {self.index_dtype}")
        if not (self.cuts[0] == 0 and self.cuts[-1] == 1 and np.all(np.diff(self.cuts) >= 0)):
            raise InputError("Schedule needs cuts that rise from 0 to 1")
        if len(self.owners) != self.n_chunks or np.any(
            (self.owners < 0) | (self.owners >= self.n_ranks)
        ):
            raise InputError(f"Schedule needs an owner below {self.n_ranks} for each chunk")
        if self.collective is Collective.ALL_TO_ALL:
            self._check_blocks()
        self._check_buffers()
        self._check_colours()
        if self.n_rows:
            self._check_rows()
        for array in (*columns, self.op, self.cuts, self.owners, *self.buffer_columns.values()):
            array.flags.writeable = False

    @property
    def buffer_columns(self) -> dict[str, NDArray[np.uint8]]:
        """The columns `src_buffer` and `dst_buffer` by name; none without scratch."""
        if self.src_buffer is None or self.dst_buffer is None:
            return {}
        return {"src_buffer": self.src_buffer, "dst_buffer": self.dst_buffer}

    def _check_blocks(self) -> None:
        """Check that an all-to-all has an equal block for each rank, of as many chunks as others.

        Rows keep the place of a chunk. If places had other sizes, blocks would be cut elsewhere.
        """
        if self.n_chunks % self.n_ranks:
            raise InputError(
                f"an all-to-all over {self.n_ranks} ranks needs as many chunks for each block, but "
                f"got {self.n_chunks} chunks"
            )
        blocks = self.cuts[:: self.n_chunks // self.n_ranks]
        if not np.allclose(blocks, even_cuts(self.n_ranks), rtol=0, atol=1e-12):
            raise InputError(f"an all-to-all over {self.n_ranks} ranks needs equal blocks")

    def _check_buffers(self) -> None:
        if (self.src_buffer is None) != (self.dst_buffer is None):
            raise InputError("Schedule needs both buffer columns or none")
        for column in self.buffer_columns.values():
            if len(column) != self.n_rows or column.dtype != np.uint8:
                raise InputError("Schedule needs its buffer columns as long as the others")
        if self.has_scratch and self.collective is Collective.SHARDED_UPDATE:
            raise InputError("a sharded update needs a Schedule without scratch buffers")

    def _check_colours(self) -> None:
        colours = self.colours
        if colours is None:
            return
        if (len(colours.of_rank), len(colours.of_chunk)) != (self.n_ranks, self.n_chunks):
            raise InputError(
                f"Schedule needs a colour for each of {self.n_ranks} ranks and {self.n_chunks} "
                f"chunks, but got {len(colours.of_rank)} and {len(colours.of_chunk)}"
            )
        if self.collective is not Collective.ALLREDUCE or self.has_scratch:
            raise InputError("a Schedule of colours needs an allreduce without scratch buffers")
        parts = np.bincount(colours.of_chunk, np.diff(self.cuts), colours.n_colours)
        is_in_order = bool(np.all(np.diff(colours.of_chunk) >= 0))
        if not is_in_order or not np.allclose(parts, 1 / colours.n_colours, rtol=0, atol=1e-12):
            raise InputError(
                f"a Schedule of {colours.n_colours} colours needs their chunks in order of colour, "
                "an equal part of the payload each"
            )

    def _check_rows(self) -> None:
        checks = (
            (self.src >= self.n_ranks, f"a source below {self.n_ranks}"),
            (self.dst >= self.n_ranks, f"a destination below {self.n_ranks}"),
            (self.src_place == self.dst_place, "two different ranks, or buffers of one rank"),
            (self.lo >= self.hi, "at least one chunk"),
            (self.hi > self.n_chunks, f"chunks up to {self.n_chunks}"),
            (self.op > COPY, "an op of 0 (REDUCE) or 1 (COPY)"),
        )
        for bad, needed in checks:
            if bad.any():
                row = int(np.argmax(bad))
                raise InputError(f"Schedule row {row} needs {needed}, but got {self.row(row)}")

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.algorithm} {self.collective}: {self.n_ranks} ranks, "
            f"{self.n_rows} rows, {self.n_chunks} chunks>"
        )

    @cached_property
    def digest(self) -> int:
        """A number from 1 to 2**63 - 1 that differs, almost surely, for another table."""
        head = f"{self.collective} {self.n_ranks} {self.src.dtype} {sorted(self.buffer_columns)}"
        state = hashlib.blake2b(head.encode(), digest_size=8)
        columns = (self.src, self.dst, self.lo, self.hi, self.op, self.cuts, self.owners)
        colours = () if self.colours is None else (self.colours.of_rank, self.colours.of_chunk)
        for column in (*columns, *self.buffer_columns.values(), *colours):
            state.update(column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes())
        return int.from_bytes(state.digest(), "little") >> 1 or 1

    @property
    def n_rows(self) -> int:
        return len(self.src)

    @property
    def n_chunks(self) -> int:
        return len(self.cuts) - 1

    @property
    def index_dtype(self) -> type[np.uint16] | type[np.uint32]:
        """The type of the columns that hold ranks, places and chunks."""
        return index_dtype(self.n_places, self.n_chunks)

    def row(self, row: int) -> str:
        """Return one row in words."""
        verb = "adds to" if self.op[row] == REDUCE else "overwrites"
        source, target = (
            f"rank {rank[row]}" + (f" buffer {buffer[row]}" if buffer is not None else "")
            for rank, buffer in ((self.src, self.src_buffer), (self.dst, self.dst_buffer))
        )
        return f"{source} chunks [{self.lo[row]}, {self.hi[row]}) {verb} {target}"

    @property
    def has_scratch(self) -> bool:
        """Whether some row reads or writes a buffer other than the payload."""
        return self.n_buffers > 1

    def refuse_scratch(self, who: str) -> None:
        """Raise UnsupportedError if the schedule needs scratch, which `who` does not have."""
        if self.has_scratch:
            raise UnsupportedError(
                f"{who} needs a schedule without scratch buffers, but {self.algorithm} has "
                f"{self.n_buffers - 1}; use 'trees'"
            )

    def refuse_colours(self, who: str) -> None:
        """Raise UnsupportedError if not all ranks take part in all chunks, which `who` assumes."""
        if self.colours is not None:
            raise UnsupportedError(
                f"{who} needs one sum over all ranks, but {self.algorithm} sums "
                f"{self.colours.n_colours} colours apart; plan without a tile"
            )

    @cached_property
    def n_buffers(self) -> int:
        """How many buffers a rank has: its payload and its scratch."""
        columns = self.buffer_columns.values()
        return 1 + max((int(column.max(initial=0)) for column in columns), default=0)

    @cached_property
    def is_local(self) -> NDArray[np.bool_]:
        """Which rows move data between two buffers of one rank."""
        return np.equal(self.src, self.dst)

    @cached_property
    def src_place(self) -> Index:
        """What each row reads: rank x buffers + buffer. Without scratch a place is a rank."""
        return self._places(self.src, self.src_buffer)

    @cached_property
    def dst_place(self) -> Index:
        """What each row writes."""
        return self._places(self.dst, self.dst_buffer)

    @property
    def n_places(self) -> int:
        return self.n_ranks * self.n_buffers

    def _places(self, rank: Index, buffer: NDArray[np.uint8] | None) -> Index:
        if buffer is None or not self.has_scratch:
            return rank
        place = rank * self.index_dtype(self.n_buffers) + buffer
        place.flags.writeable = False
        return place

    def partners(self, rank: int) -> NDArray[np.int64]:
        """Return in an all-to-all whose block each place of a rank's payload holds.

        At the start place p holds the block for rank p - rank (modulo ranks), and at the end the
        block from that rank. So a block has the same place where it leaves and where it arrives.
        """
        return (np.arange(self.n_ranks) - rank) % self.n_ranks

    @property
    def shares(self) -> NDArray[np.float64]:
        """The part of the payload that each rank owns."""
        shares = np.zeros(self.n_ranks)
        np.add.at(shares, self.owners, np.diff(self.cuts))
        return shares

    def row_fractions(self) -> NDArray[np.float64]:
        """Return the fraction of the payload that each row moves."""
        fractions: NDArray[np.float64] = self.cuts[self.hi] - self.cuts[self.lo]
        return fractions

    def phase_of_rows(self) -> NDArray[np.int16]:
        """Return the number of each row's phase, -1 where it has none."""
        result = np.full(self.n_rows, -1, dtype=np.int16)
        for number, phase in enumerate(self.phases):
            result[phase.start : phase.stop] = number
        return result


def index_dtype(n_ranks: int, n_chunks: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smallest type that holds every rank (or place) and every chunk bound."""
    return np.uint16 if max(n_ranks, n_chunks) <= np.iinfo(np.uint16).max else np.uint32


@dataclass(frozen=True, eq=False)
class Rows:
    """A run of rows under construction: what a phase builder returns."""

    src: NDArray[np.integer]
    dst: NDArray[np.integer]
    lo: NDArray[np.integer]
    hi: NDArray[np.integer]
    op: int
    src_buffer: NDArray[np.integer] | int = 0
    dst_buffer: NDArray[np.integer] | int = 0

    @property
    def n_rows(self) -> int:
        return self.src.size

    @property
    def buffers(self) -> tuple[NDArray[np.integer] | int, NDArray[np.integer] | int]:
        """What the rows read, and what they write: 0 is the payload."""
        return self.src_buffer, self.dst_buffer


def even_cuts(n_chunks: int) -> NDArray[np.float64]:
    """Return the cuts of a payload into equal chunks."""
    return np.arange(n_chunks + 1) / n_chunks


def cuts_of(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cuts of a payload into chunks of these shares of it."""
    cuts: NDArray[np.float64] = np.minimum(np.concatenate([[0.0], np.cumsum(shares)]), 1.0)
    cuts[-1] = 1.0
    return cuts


def check_n_rows(algorithm: str, n_ranks: int, n_rows: int) -> None:
    """Raise UnsupportedError if a table of so many rows would not fit a workstation."""
    if n_rows > MAX_ROWS:
        raise UnsupportedError(
            f"{algorithm} needs a table of at most {MAX_ROWS:,} rows, but {n_ranks} ranks make "
            f"{n_rows:,}; take a smaller mesh"
        )


def schedule_of(
    phases: Iterable[tuple[str, Rows]],
    *,
    algorithm: str,
    collective: Collective,
    owners: NDArray[np.integer],
    n_ranks: int,
    cuts: NDArray[np.float64] | None = None,
) -> Schedule:
    """Return the schedule whose program is these phases one after another, empty ones left out."""
    parts = [(name, rows) for name, rows in phases if rows.n_rows]
    cuts = even_cuts(len(owners)) if cuts is None else cuts
    most = max((int(np.max(each)) for _, rows in parts for each in rows.buffers), default=0)
    dtype = index_dtype(n_ranks * (1 + most), len(owners))
    n_rows = sum(rows.n_rows for _, rows in parts)
    check_n_rows(algorithm, n_ranks, n_rows)
    src, dst, lo, hi = (np.empty(n_rows, dtype=dtype) for _ in range(4))
    op = np.empty(n_rows, dtype=np.uint8)
    buffers = np.empty((2, n_rows), dtype=np.uint8) if most else None
    spans, start = [], 0
    for name, rows in parts:
        stop = start + rows.n_rows
        for column, values in ((src, rows.src), (dst, rows.dst), (lo, rows.lo), (hi, rows.hi)):
            # Rows may be broadcast views of any shape: written straight into place, no copy.
            column[start:stop].reshape(values.shape)[...] = values
        op[start:stop] = rows.op
        if buffers is not None:
            buffers[0, start:stop], buffers[1, start:stop] = rows.buffers
        spans.append(Phase(name, start, stop))
        start = stop
    return Schedule(
        algorithm=algorithm,
        collective=collective,
        n_ranks=n_ranks,
        cuts=cuts,
        owners=owners.astype(np.int32),
        src=src,
        dst=dst,
        lo=lo,
        hi=hi,
        op=op,
        phases=tuple(spans),
        src_buffer=None if buffers is None else buffers[0],
        dst_buffer=None if buffers is None else buffers[1],
    )


def renamed(schedule: Schedule, names: NDArray[np.int64]) -> Schedule:
    """Return a schedule in which rank r has another name, `names[r]`."""
    return replace(
        schedule,
        owners=names[schedule.owners].astype(schedule.owners.dtype),
        src=names[schedule.src].astype(schedule.src.dtype),
        dst=names[schedule.dst].astype(schedule.dst.dtype),
    )


def in_rank_order(schedule: Schedule) -> Schedule:
    """Return a schedule with its chunks numbered by owner, so that rank i owns part i.

    PyTorch expects that; our schedules number chunks as it suits them. Where every row moves one
    chunk, nothing else changes: not the links, not the order of the rows.

    Raises:
        InputError: the ranks do not own equally many equal chunks, or a row moves several.
    """
    counts = np.bincount(schedule.owners, minlength=schedule.n_ranks)
    sizes = np.diff(schedule.cuts)
    if counts.min() != counts.max() or not np.allclose(sizes, sizes[0]):
        raise InputError(
            f"{schedule.algorithm} {schedule.collective} needs ranks that own equal parts, but "
            f"they own from {counts.min()} to {counts.max()} chunks; use trees or ring-1d"
        )
    if np.array_equal(schedule.owners, np.sort(schedule.owners)):
        return schedule
    if np.any(schedule.hi - schedule.lo != 1):
        raise InputError(
            f"{schedule.algorithm} {schedule.collective} needs rows that move one chunk each, but "
            "some move several; use trees or ring-1d"
        )
    order = np.argsort(schedule.owners, kind="stable")
    number = np.empty(schedule.n_chunks, dtype=schedule.index_dtype)
    number[order] = np.arange(schedule.n_chunks, dtype=schedule.index_dtype)
    lo = number[schedule.lo]
    return replace(schedule, owners=schedule.owners[order], lo=lo, hi=lo + number.dtype.type(1))
