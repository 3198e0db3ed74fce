"""A schedule lowered to steps that all ranks take together: permutations, and a table per rank.

In each step every permutation moves one span of cells along each of its pairs. What a rank
sends, where it puts what arrives, and whether it adds or overwrites stands in tables, so that one
loop body serves all ranks and all steps. A pair that has nothing to move sends a span that the
receiver drops. Knows nothing of bytes, time or JAX.

A permute moves arrays of one shape. So the payload is cut anew into equal **cells**: a chunk
becomes a number of cells in proportion to its part of the payload. Rows that are wider than
`width` cells are split; narrower ones move a span of `width` cells of which some do not count.

In a permutation no rank sends or receives twice. Sources and destinations are the two sides of a
bipartite graph, and a permutation is a matching. By Koenig's theorem as many matchings are enough
as the busiest rank has pairs on one side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.step_packing import RowGraph, packed_steps, row_graph
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, even_cuts, schedule_of

Pairs = tuple[tuple[int, int], ...]

Table = NDArray[np.int32]

# Cells per chunk to try, where chunks differ in size: more cells follow the sizes more closely.
_MOST_CELLS_PER_CHUNK: Final = 8
_CLOSE_ENOUGH: Final = 1.02  # times the busiest pair's load with the sizes as they are


@dataclass(frozen=True, eq=False)
class CellSchedule:
    """A schedule whose chunks are equal cells; no row moves more than `width` of them."""

    schedule: Schedule
    width: int


@dataclass(frozen=True, eq=False, repr=False)
class LockstepProgram:
    """Steps of permutes over a buffer of cells.

    A rank's buffer has `slices x cells_per_slice` cells, and then `width` more for what is
    dropped. In step t, rank r sends the `width` cells from `send[r, t, k]` on along permutation k.
    It puts what arrives at `place[r, t, k]`: `take[r, t, k]` cells are added if that is positive,
    overwritten if it is negative, and dropped if it is zero.
    """

    collective: Collective
    n_ranks: int
    slices: int
    cells_per_slice: int
    width: int
    owners: NDArray[np.int32]  # of the cells of a slice
    permutations: tuple[Pairs, ...]
    send: Table
    place: Table
    take: Table
    busiest: int  # rows that the busiest pair moves, all slices
    depth: int  # rows in the longest chain of one slice
    bound: int  # no order of these rows takes fewer steps

    def __repr__(self) -> str:
        return (
            f"<LockstepProgram {self.collective}: {self.n_ranks} ranks, {self.n_steps} steps of "
            f"{self.n_permutations} permutes, {self.slices} slices of {self.cells_per_slice} cells>"
        )

    @property
    def n_steps(self) -> int:
        return int(self.send.shape[1])

    @property
    def n_permutations(self) -> int:
        return len(self.permutations)

    @property
    def n_cells(self) -> int:
        """How many cells the payload has."""
        return self.slices * self.cells_per_slice

    @cached_property
    def pairs(self) -> NDArray[np.int64]:
        """All pairs of ranks that a step joins, as an array (pairs, 2)."""
        listed = [pair for pairs in self.permutations for pair in pairs]
        return np.array(listed, dtype=np.int64).reshape(-1, 2)

    def cells_moved(self) -> NDArray[np.int64]:
        """Return how many cells that count each pair moves, in the order of `pairs`."""
        parts = [
            np.abs(self.take[[dst for _, dst in pairs], :, k]).sum(axis=1)
            for k, pairs in enumerate(self.permutations)
        ]
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)

    def cells_of_ranks(self) -> NDArray[np.int64]:
        """Return the cells of a slice that each rank owns, as an array (ranks, cells each).

        Raises:
            InputError: the ranks do not own equally many.
        """
        counts = np.bincount(self.owners, minlength=self.n_ranks)
        if counts.min() != counts.max():
            raise InputError(
                f"{self.collective} needs a plan in which every rank owns an equal part, but here "
                f"ranks own from {counts.min()} to {counts.max()} of {len(self.owners)} cells; use "
                "the algorithm 'trees' or 'ring-1d'"
            )
        order = np.argsort(self.owners, kind="stable")
        return order.reshape(self.n_ranks, -1).astype(np.int64)


def lockstep_program(
    cells: CellSchedule, slices: int, *, graph: RowGraph | None = None
) -> LockstepProgram:
    """Return a schedule of equal cells as a program of few steps.

    Raises:
        InputError: slices below one.
    """
    if slices < 1:
        raise InputError(f"a lockstep program needs one slice or more, but got {slices}")
    schedule = cells.schedule
    graph = row_graph(schedule, hazards_of(schedule)) if graph is None else graph
    steps = packed_steps(graph, slices)
    lo, hi = schedule.lo.astype(np.int64), schedule.hi.astype(np.int64)
    cell = (np.arange(slices)[:, None] * schedule.n_chunks + lo).reshape(-1)
    take = np.where(schedule.op == COPY, lo - hi, hi - lo)
    src, dst, take = (np.tile(column, slices) for column in (schedule.src, schedule.dst, take))
    permutations, send, place, taken = step_tables(
        schedule.n_ranks, slices * schedule.n_chunks, src, dst, steps.reshape(-1), cell, cell, take
    )
    return LockstepProgram(
        collective=schedule.collective,
        n_ranks=schedule.n_ranks,
        slices=slices,
        cells_per_slice=schedule.n_chunks,
        width=cells.width,
        owners=schedule.owners,
        permutations=permutations,
        send=send,
        place=place,
        take=taken,
        busiest=graph.busiest * slices,
        depth=graph.depth,
        bound=graph.bound(slices),
    )


def step_tables(
    n_ranks: int,
    n_cells: int,
    src: NDArray[np.integer],
    dst: NDArray[np.integer],
    steps: NDArray[np.int64],
    send: NDArray[np.int64],
    place: NDArray[np.int64],
    take: NDArray[np.integer],
) -> tuple[tuple[Pairs, ...], Table, Table, Table]:
    """Return the permutations of rows between ranks, and the tables `send`, `place` and `take`.

    Row r leaves cell `send[r]` of its source in step `steps[r]` for cell `place[r]` of its
    destination, where `take[r]` says what counts. Other entries point to `n_cells`.
    """
    numbers = np.unique(src.astype(np.int64) * n_ranks + dst)
    permutations = permutations_of(*np.divmod(numbers, n_ranks))
    permutation_of = np.zeros((n_ranks, n_ranks), dtype=np.int64)
    for k, pairs in enumerate(permutations):
        permutation_of[tuple(np.array(pairs).T)] = k
    k_of = permutation_of[src, dst]
    shape = (n_ranks, int(steps.max(initial=-1)) + 1, len(permutations))
    sends, places, takes = (np.full(shape, value, np.int32) for value in (n_cells, n_cells, 0))
    sends[src, steps, k_of] = send
    places[dst, steps, k_of] = place
    takes[dst, steps, k_of] = take
    for table in (sends, places, takes):
        table.flags.writeable = False
    return permutations, sends, places, takes


def with_equal_cells(schedule: Schedule) -> Schedule:
    """Return the schedule with its payload cut into equal cells, in the same order.

    Where chunks are equal it is the schedule itself. A chunk of no size gets no cell, and rows that
    move nothing go.

    Raises:
        UnsupportedError: the schedule needs scratch buffers, which permutes do not have.
    """
    schedule.refuse_scratch("a lockstep program")
    sizes = np.diff(schedule.cuts)
    if np.ptp(sizes) <= 1e-9:
        return schedule
    n_cells = _cells_of_chunks(schedule, sizes)
    bounds = np.concatenate([[0], np.cumsum(n_cells)])
    lo, hi = bounds[schedule.lo], bounds[schedule.hi]
    return _rewritten(
        schedule, np.flatnonzero(lo < hi), lo, hi, np.repeat(schedule.owners, n_cells)
    )


def in_pieces(schedule: Schedule, width: int) -> CellSchedule:
    """Return a schedule of equal cells with its rows split into pieces of at most `width` cells."""
    lo, hi = schedule.lo.astype(np.int64), schedule.hi.astype(np.int64)
    n_pieces = -(-(hi - lo) // width)
    if n_pieces.max(initial=1) == 1:
        return CellSchedule(schedule, width)
    row = np.repeat(np.arange(schedule.n_rows), n_pieces)
    number = np.arange(len(row)) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces)
    start = lo[row] + number * width
    stop = np.minimum(start + width, hi[row])
    return CellSchedule(_rewritten(schedule, row, start, stop, schedule.owners), width)


def row_widths(schedule: Schedule) -> list[int]:
    """Return how many chunks rows move, each number once, in rising order."""
    widths = schedule.hi.astype(np.int64) - schedule.lo
    return [int(width) for width in np.unique(widths)] or [1]


def _cells_of_chunks(schedule: Schedule, sizes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return how many cells each chunk gets: few, and the busiest pair carries little more."""
    wanted = _busiest_pair(schedule, sizes) * _CLOSE_ENOUGH
    tried = []
    for total in range(len(sizes), _MOST_CELLS_PER_CHUNK * len(sizes) + 1):
        n_cells = np.maximum(np.rint(sizes * total), sizes > 0).astype(np.int64)
        load = _busiest_pair(schedule, n_cells / n_cells.sum())
        tried.append((load, n_cells.sum(), n_cells))
        if load <= wanted:
            break
    return min(tried, key=lambda each: each[:2])[2]


def _busiest_pair(schedule: Schedule, sizes: NDArray[np.float64]) -> float:
    """Return the part of the payload that the busiest pair of ranks exchanges."""
    cuts = np.concatenate([[0.0], np.cumsum(sizes)])
    pair = schedule.src.astype(np.int64) * schedule.n_ranks + schedule.dst
    _, which = np.unique(pair, return_inverse=True)
    return float(np.bincount(which, cuts[schedule.hi] - cuts[schedule.lo]).max(initial=0.0))


def _rewritten(
    schedule: Schedule,
    row: NDArray[np.int64],
    lo: NDArray[np.int64],
    hi: NDArray[np.int64],
    owners: NDArray[np.integer],
) -> Schedule:
    """Return the schedule of these rows, in this order; `lo` and `hi` are their cells, or all's."""
    if len(lo) != len(row):
        lo, hi = lo[row], hi[row]
    src, dst, op = schedule.src[row], schedule.dst[row], schedule.op[row]
    # `Rows` has one op, so a run of rows of one op is one phase.
    edges = [0, *(np.flatnonzero(np.diff(op)) + 1).tolist(), len(row)]
    phases = [
        ("rows", Rows(src[a:b], dst[a:b], lo[a:b], hi[a:b], int(op[a]) if b > a else REDUCE))
        for a, b in pairwise(edges)
    ]
    return schedule_of(
        phases,
        algorithm=schedule.algorithm,
        collective=schedule.collective,
        owners=owners,
        n_ranks=schedule.n_ranks,
        cuts=even_cuts(len(owners)),
    )


def permutations_of(
    src: Sequence[int] | NDArray[np.integer], dst: Sequence[int] | NDArray[np.integer]
) -> tuple[Pairs, ...]:
    """Return the distinct pairs, each in exactly one of the fewest possible permutations.

    Colours the pairs one after another. Where the first free colour at the source is taken at the
    destination, the two colours are swapped along the path that alternates between them.
    """
    colours: tuple[dict[int, dict[int, int]], dict[int, dict[int, int]]] = ({}, {})
    for source, destination in zip(map(int, src), map(int, dst), strict=True):
        at_source = colours[0].setdefault(source, {})
        at_destination = colours[1].setdefault(destination, {})
        first, second = _free(at_source), _free(at_destination)
        if first != second:
            _swap_from(colours, destination, first, second)
        at_source[first] = destination
        at_destination[first] = source
    found: dict[int, list[tuple[int, int]]] = {}
    for source, peers in colours[0].items():
        for colour, destination in peers.items():
            found.setdefault(colour, []).append((source, destination))
    return tuple(tuple(sorted(found[colour])) for colour in sorted(found))


def _free(taken: dict[int, int]) -> int:
    """Return the smallest colour that is not taken."""
    colour = 0
    while colour in taken:
        colour += 1
    return colour


def _swap_from(
    colours: tuple[dict[int, dict[int, int]], dict[int, dict[int, int]]],
    destination: int,
    first: int,
    second: int,
) -> None:
    """Swap two colours along the path that leaves a destination by the first of them.

    The path cannot end at the source to be joined, because that one has no pair of the first
    colour, and the path would enter it by the first.
    """
    side, rank, colour, other = 1, destination, first, second
    path = []
    while colour in colours[side][rank]:
        peer = colours[side][rank][colour]
        path.append((peer, rank, colour) if side else (rank, peer, colour))
        side, rank, colour, other = 1 - side, peer, other, colour
    for source, target, old in path:
        del colours[0][source][old], colours[1][target][old]
    for source, target, old in path:
        new = second if old == first else first
        colours[0][source][new] = target
        colours[1][target][new] = source
