"""A schedule lowered to steps that all ranks take together: permutations, and a table per rank.

In each step every permutation moves one span of cells along each of its pairs. What a rank
sends, where it puts what arrives, and whether it adds or overwrites stands in tables, so that one
loop body serves all ranks and all steps. A pair that has nothing to move sends a span that the
receiver drops. Knows nothing of bytes, time or JAX.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.schedule.cells import CellSchedule
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.permutations import Pairs, permutations_of
from meshmend.schedule.step_packing import RowGraph, packed_steps, row_graph
from meshmend.schedule.table import COPY, Collective

Table = NDArray[np.int32]


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
    numbers = np.unique(schedule.src.astype(np.int64) * schedule.n_ranks + schedule.dst)
    permutations = permutations_of(*np.divmod(numbers, schedule.n_ranks))
    send, place, take = _tables(cells, steps, permutations)
    for table in (send, place, take):
        table.flags.writeable = False
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
        take=take,
        busiest=graph.busiest * slices,
        depth=graph.depth,
        bound=graph.bound(slices),
    )


def _tables(
    cells: CellSchedule, steps: NDArray[np.int64], permutations: Sequence[Pairs]
) -> tuple[Table, Table, Table]:
    """Return what each rank sends, where it puts what arrives, and how much of it counts."""
    schedule, slices = cells.schedule, len(steps)
    n_ranks, n_permutations = schedule.n_ranks, len(permutations)
    unused = slices * schedule.n_chunks
    shape = (n_ranks, int(steps.max(initial=-1)) + 1, n_permutations)
    send, place, take = (np.full(shape, value, dtype=np.int32) for value in (unused, unused, 0))
    permutation_of = np.zeros((n_ranks, n_ranks), dtype=np.int32)
    for k, pairs in enumerate(permutations):
        for source, destination in pairs:
            permutation_of[source, destination] = k
    src, dst, lo, hi = (
        column.astype(np.int64) for column in (schedule.src, schedule.dst, schedule.lo, schedule.hi)
    )
    k_of = permutation_of[src, dst]
    count = np.where(schedule.op == COPY, lo - hi, hi - lo).astype(np.int32)
    for number in range(slices):
        first = (lo + number * schedule.n_chunks).astype(np.int32)
        send[src, steps[number], k_of] = first
        place[dst, steps[number], k_of] = first
        take[dst, steps[number], k_of] = count
    return send, place, take
