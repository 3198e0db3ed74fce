"""Counts contributions: which rank ends with which ranks' data, and how often.

Runs the table row after row, on counters instead of numbers. At the start
rank r holds its own contribution once in its payload, and nothing in scratch. At the end every
cell of a payload that the collective promises must hold what it promises exactly once, and nothing
else: a contribution that arrives twice is as wrong as one that is missing. In an all-gather some
ranks may be **replicas**: they hold at the start what each chunk's owner holds, so a copy from a
replica counts as a copy from the owner. In a table of colours a rank holds its contribution in the
chunks of its own colour, and nothing elsewhere. There it must end with the contributions of all
ranks of that colour, and of no other. In an all-to-all each chunk must end with the data of one
rank. Rows keep the place of a chunk, and a rank has one block with that place for each other rank,
so what came from a rank is the block that it had for this one.

Small schedules are counted exactly. In large ones each cell holds how many contributions it
has, and their sum modulo the prime 2^61 - 1 with a random weight per rank. If a cell has
the right number, none of its counts wraps around. So a cell with wrong counts passes with
probability 1 / (2^61 - 1). A wrong schedule has such a cell, so it passes with no more than that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError, VerificationError
from meshmend.kernels import plain_kernel
from meshmend.schedule.table import COPY, Collective, Schedule

PRIME: Final = (1 << 61) - 1
EXACT_COUNTERS: Final = 1 << 25  # places x chunks x ranks up to which counting exactly is quick
_CELLS_AT_A_TIME: Final = 1 << 25  # places x chunks of a fingerprint: 400 MB
_SATURATED: Final = 255
_MANY: Final = 1 << 31  # contributions in one cell: more than there are ranks


@dataclass(frozen=True)
class Proof:
    """How a schedule was proved right, and the probability that a wrong one would pass."""

    method: str  # "exact" or "fingerprint"
    error_probability: float


def check_contributions(
    schedule: Schedule,
    *,
    replicas: Sequence[int] = (),
    exact: bool | None = None,
    seed: int = 0,
) -> Proof:
    """Return the proof that the schedule keeps its collective's promise.

    `exact` says whether to count exactly or by fingerprint; None: exactly where that is quick. The
    weights of the fingerprint come from `seed`.

    Raises:
        VerificationError: names a rank, a chunk, and what is missing or there too often.
        InputError: replicas that are not ranks, or replicas in a sum.
    """
    _check_replicas(schedule, replicas)
    if exact is None:
        exact = schedule.n_places * schedule.n_chunks * schedule.n_ranks <= EXACT_COUNTERS
    if exact:
        wrong = _wrong_cell_exactly(schedule, replicas)
    else:
        wrong = _wrong_cell_by_fingerprint(schedule, replicas, seed)
    if wrong is not None:
        raise VerificationError(_diagnosis(schedule, replicas, *wrong))
    return Proof("exact", 0.0) if exact else Proof("fingerprint", 1 / PRIME)


def contribution_counts(
    schedule: Schedule, chunk: int, *, replicas: Sequence[int] = ()
) -> NDArray[np.uint8]:
    """Return how often each rank (first axis) ends with each rank's data of one chunk.

    Counts of 255 mean 255 or more. A replica's data count as the owner's.
    """
    counts = np.zeros((schedule.n_places, 1, schedule.n_ranks), dtype=np.uint8)
    payloads = counts[:: schedule.n_buffers, 0]
    payloads[:] = np.eye(schedule.n_ranks, dtype=np.uint8)
    if schedule.colours is not None:
        payloads[~schedule.colours.takes_part[:, chunk]] = 0
    payloads[list(replicas)] = payloads[schedule.owners[chunk]]
    _count(_columns(schedule), chunk, counts)
    return payloads


def _check_replicas(schedule: Schedule, replicas: Sequence[int]) -> None:
    if replicas and schedule.collective is not Collective.ALL_GATHER:
        raise InputError(
            f"replicas need an all-gather, but {schedule.algorithm} is of the collective "
            f"{schedule.collective}: in a sum every rank counts for itself"
        )
    if not all(0 <= rank < schedule.n_ranks for rank in replicas):
        raise InputError(
            f"replicas need to be ranks below {schedule.n_ranks}, but got {list(replicas)}"
        )


def _columns(schedule: Schedule) -> tuple[NDArray[np.unsignedinteger], ...]:
    return schedule.src_place, schedule.dst_place, schedule.lo, schedule.hi, schedule.op


def _promised(schedule: Schedule, rank: int, chunk: int) -> NDArray[np.uint8] | None:
    """Return how often a cell must hold each rank's data at the end; None: it may hold anything."""
    owner = schedule.owners[chunk]
    if schedule.collective is Collective.ALL_GATHER:
        wanted: NDArray[np.uint8] = np.eye(1, schedule.n_ranks, owner, dtype=np.uint8)[0]
        return wanted
    if schedule.collective is Collective.REDUCE_SCATTER and rank != owner:
        return None
    if schedule.collective is Collective.ALL_TO_ALL:
        origin = _origins(schedule)[rank, chunk]
        return np.asarray(np.arange(schedule.n_ranks) == origin, dtype=np.uint8)
    if schedule.colours is not None:
        takes_part = schedule.colours.takes_part[:, chunk]
        return takes_part.astype(np.uint8) if takes_part[rank] else None
    return np.ones(schedule.n_ranks, dtype=np.uint8)


def _origins(schedule: Schedule) -> NDArray[np.int64]:
    """Return in an all-to-all whose data each rank (first axis) must hold in each chunk."""
    chunks_each = schedule.n_chunks // schedule.n_ranks
    partners = [schedule.partners(rank) for rank in range(schedule.n_ranks)]
    return np.repeat(np.stack(partners), chunks_each, axis=1)


def _wrong_cell_exactly(schedule: Schedule, replicas: Sequence[int]) -> tuple[int, int] | None:
    n_ranks, n_chunks = schedule.n_ranks, schedule.n_chunks
    counts = np.zeros((schedule.n_places, n_chunks, n_ranks), dtype=np.uint8)
    payloads = counts[:: schedule.n_buffers]
    takes_part = np.True_ if schedule.colours is None else schedule.colours.takes_part
    payloads[np.arange(n_ranks), :, np.arange(n_ranks)] = takes_part
    owned = schedule.owners[:, None] == np.arange(n_ranks)
    payloads[list(replicas)] = owned
    _count(_columns(schedule), 0, counts)
    if schedule.collective is Collective.ALL_GATHER:
        wanted: NDArray[np.bool_] = owned
    elif schedule.collective is Collective.ALL_TO_ALL:
        wanted = _origins(schedule)[:, :, None] == np.arange(n_ranks)
    else:
        wanted = np.transpose(takes_part)
    return _first_promised(schedule, np.any(payloads != wanted, axis=2))


def _wrong_cell_by_fingerprint(
    schedule: Schedule, replicas: Sequence[int], seed: int
) -> tuple[int, int] | None:
    weights = np.random.default_rng(seed).integers(PRIME, size=schedule.n_ranks, dtype=np.uint64)
    whole, width = sum(weights.tolist()) % PRIME, max(1, _CELLS_AT_A_TIME // schedule.n_places)
    for first in range(0, schedule.n_chunks, width):
        owned = weights[schedule.owners[first : first + width]]
        all_cells = np.zeros((schedule.n_places, len(owned)), dtype=np.uint64)
        all_totals = np.zeros(all_cells.shape, dtype=np.uint32)
        cells, totals = (each[:: schedule.n_buffers] for each in (all_cells, all_totals))
        cells[:], totals[:] = weights[:, None], 1
        sums: int | NDArray[np.uint64] = whole
        members: int | NDArray[np.intp] = schedule.n_ranks
        if schedule.colours is not None:
            takes_part = schedule.colours.takes_part[:, first : first + width]
            cells[~takes_part], totals[~takes_part] = 0, 0
            sums, members = _sums_of_members(weights, takes_part), takes_part.sum(axis=0)
        cells[list(replicas)] = owned
        _fingerprint(_columns(schedule), first, all_cells, all_totals)
        if schedule.collective is Collective.ALL_GATHER:
            wrong = (cells != owned) | (totals != 1)
        elif schedule.collective is Collective.ALL_TO_ALL:
            origins = _origins(schedule)[:, first : first + width]
            wrong = (cells != weights[origins]) | (totals != 1)
        else:
            wrong = (cells != np.asarray(sums, dtype=np.uint64)) | (totals != members)
        if (found := _first_promised(schedule, wrong, first)) is not None:
            return found
    return None


def _sums_of_members(
    weights: NDArray[np.uint64], takes_part: NDArray[np.bool_]
) -> NDArray[np.uint64]:
    """Return of each chunk the weights of the ranks that take part, together modulo PRIME."""
    as_integers = weights.astype(object)
    sums = [int(as_integers[part].sum()) % PRIME for part in takes_part.T]
    return np.array(sums, dtype=np.uint64)


def _first_promised(
    schedule: Schedule, wrong: NDArray[np.bool_], first: int = 0
) -> tuple[int, int] | None:
    """Return the first wrong cell that the collective makes a promise about.

    `wrong` is an array (rank, chunk from `first` on).
    """
    if schedule.collective is Collective.REDUCE_SCATTER:
        owners = schedule.owners[first : first + wrong.shape[1]]
        wrong = wrong & (owners == np.arange(schedule.n_ranks)[:, None])
    if schedule.colours is not None:
        wrong = wrong & schedule.colours.takes_part[:, first : first + wrong.shape[1]]
    if not wrong.any():
        return None
    rank, chunk = np.unravel_index(np.argmax(wrong), wrong.shape)
    return int(rank), first + int(chunk)


def _diagnosis(schedule: Schedule, replicas: Sequence[int], rank: int, chunk: int) -> str:
    counts = contribution_counts(schedule, chunk, replicas=replicas)[rank]
    promised = _promised(schedule, rank, chunk)
    assert promised is not None, "only promised cells are found wrong"
    missing = np.nonzero(counts < promised)[0]
    double = np.nonzero((counts > promised) & (promised > 0))[0]
    strange = np.nonzero((counts > 0) & (promised == 0))[0]
    faults = [
        f"{what} {_listed(ranks)}"
        for what, ranks in (
            ("misses the data of", missing),
            ("counts more than once", double),
            ("has data that do not belong there, of", strange),
        )
        if len(ranks)
    ]
    return (
        f"{schedule.algorithm} {schedule.collective} is wrong: rank {rank}, chunk {chunk} of "
        f"{schedule.n_chunks} {' and '.join(faults)}"
    )


def _listed(ranks: NDArray[np.intp]) -> str:
    shown = ", ".join(map(str, ranks[:6]))
    rest = f" and {len(ranks) - 6} more" if len(ranks) > 6 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{rest}"


@plain_kernel
def _count(table, first, counts):  # type: ignore[no-untyped-def]
    """Run the table on counters (rank, chunk from `first` on, contributor), saturating.

    The inner loops are plain enough to run on vectors of bytes, 14 times as fast as one by one.
    """
    src, dst, lo, hi, op = table
    n_chunks, n_ranks = counts.shape[1], counts.shape[2]
    for row in range(len(src)):
        here, there = src[row], dst[row]
        for chunk in range(max(np.int64(lo[row]), first), min(np.int64(hi[row]), first + n_chunks)):
            sent, held = counts[here, chunk - first], counts[there, chunk - first]
            if op[row] == COPY:
                for rank in range(n_ranks):
                    held[rank] = sent[rank]
            else:
                for rank in range(n_ranks):
                    total = np.uint8(held[rank] + sent[rank])  # wraps around
                    held[rank] = np.uint8(_SATURATED) if total < sent[rank] else total


@plain_kernel
def _fingerprint(table, first, cells, totals):  # type: ignore[no-untyped-def]
    """Run the table on cells (rank, chunk from `first` on) of integers modulo PRIME, and on
    saturating totals."""
    src, dst, lo, hi, op = table
    prime, n_chunks = np.uint64(PRIME), cells.shape[1]
    for row in range(len(src)):
        here, there = src[row], dst[row]
        start, stop = max(np.int64(lo[row]) - first, 0), min(np.int64(hi[row]) - first, n_chunks)
        if op[row] == COPY:
            for chunk in range(start, stop):
                cells[there, chunk] = cells[here, chunk]
                totals[there, chunk] = totals[here, chunk]
        else:
            for chunk in range(start, stop):
                value = cells[there, chunk] + cells[here, chunk]
                cells[there, chunk] = value - prime if value >= prime else value
                total = np.int64(totals[there, chunk]) + np.int64(totals[here, chunk])
                totals[there, chunk] = min(total, _MANY)
