"""Schedules made of rings: `ring-1d`, `rank-ring`, `two-d` and `row-pair`.

Each builder turns an overlay of chips into ranks once and hands arrays to `ring_phases`.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from meshmend.schedule.ring_phases import (
    OwnedRings,
    Ranks,
    TwoPhase,
    all_gather_rows,
    both_ways,
    reduce_scatter_rows,
    two_phase,
)
from meshmend.schedule.table import Collective, Rows, Schedule, schedule_of
from meshmend.topology.mesh import Mesh
from meshmend.trees.pairs import row_pair_layout
from meshmend.trees.rings import Ring, folded, hamiltonian_ring, line_rings

NamedRows = tuple[str, Rows]


def ring_1d(mesh: Mesh, collective: Collective) -> Schedule:
    """Return one ring through all live chips, neighbour to neighbour (figures 3 and 8)."""
    ring = ranks_of(mesh, [hamiltonian_ring(mesh)])
    return _one_ring("ring-1d", ring, collective)


def rank_ring(mesh: Mesh, collective: Collective) -> Schedule:
    """Return one ring through all live chips in rank order, blind to where the chips sit.

    Libraries that do not know the mesh use this ring. It works on every connected mesh.
    """
    return _one_ring("rank-ring", np.arange(mesh.n_live, dtype=np.int32)[None], collective)


def _one_ring(name: str, ring: Ranks, collective: Collective) -> Schedule:
    """Rank i owns chunk 2 i, which goes round forwards, and 2 i + 1, which goes backwards."""
    ranks = both_ways(ring)
    lo = 2 * ranks + np.arange(2, dtype=np.int32)[:, None]
    rings = OwnedRings(ranks, lo, lo + np.int32(1))
    return schedule_of(
        halves(
            collective,
            [("reduce-scatter", reduce_scatter_rows(rings))],
            [("all-gather", all_gather_rows(rings))],
        ),
        algorithm=name,
        collective=collective,
        owners=owners_of([rings], n_chunks=ranks.size),
        n_ranks=ring.size,
    )


def two_d(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the two-colour scheme of figures 4 and 5: half the payload along rows then columns,
    the other half along columns then rows, at the same time."""
    colours = []
    for axis, first_chunk in ((1, 0), (0, 2 * mesh.n_live)):
        along = ranks_of(mesh, line_rings(mesh, axis))
        n_rings = len(along)
        order = np.arange(n_rings) if mesh.wrap[1 - axis] else np.array(folded(n_rings))
        colours.append(two_phase(along, order, first_chunk=first_chunk))
    red, blue = colours
    return schedule_of(
        halves(
            collective,
            [
                ("red reduce-scatter along X", reduce_scatter_rows(red.along)),
                ("blue reduce-scatter along Y", reduce_scatter_rows(blue.along)),
                ("red reduce-scatter along Y", reduce_scatter_rows(red.across)),
                ("blue reduce-scatter along X", reduce_scatter_rows(blue.across)),
            ],
            [
                ("red all-gather along Y", all_gather_rows(red.across)),
                ("blue all-gather along X", all_gather_rows(blue.across)),
                ("red all-gather along X", all_gather_rows(red.along)),
                ("blue all-gather along Y", all_gather_rows(blue.along)),
            ],
        ),
        algorithm="two-d",
        collective=collective,
        owners=owners_of([red.across, blue.across], n_chunks=red.n_chunks + blue.n_chunks),
        n_ranks=mesh.n_live,
    )


def row_pair(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the alternate 2-D scheme of figures 6 and 7: rings over pairs of rows, then across."""
    layout = row_pair_layout(mesh)
    grid = paired_phases(mesh, layout.blue, wraps=mesh.wrap[layout.axis])
    return schedule_of(
        halves(
            collective,
            [
                ("reduce-scatter along", reduce_scatter_rows(grid.along)),
                ("reduce-scatter across", reduce_scatter_rows(grid.across)),
            ],
            [
                ("all-gather across", all_gather_rows(grid.across)),
                ("all-gather along", all_gather_rows(grid.along)),
            ],
        ),
        algorithm="row-pair",
        collective=collective,
        owners=owners_of([grid.across], n_chunks=grid.n_chunks),
        n_ranks=mesh.n_live,
    )


def paired_phases(mesh: Mesh, blue: Sequence[Ring], *, wraps: bool) -> TwoPhase:
    """Return the two phases over the blue rings of a paired layout."""
    order = np.arange(len(blue)) if wraps else np.array(folded(len(blue)))
    return two_phase(ranks_of(mesh, blue), order)


def ranks_of(mesh: Mesh, rings: Iterable[Ring]) -> Ranks:
    """Return rings of one length as an array of ranks (rings, length)."""
    return np.array([[mesh.rank_of[chip] for chip in ring] for ring in rings], dtype=np.int32)


def owners_of(rings: Iterable[OwnedRings], *, n_chunks: int) -> Ranks:
    """Return the rank that owns each chunk; the rings must share out all of them."""
    owners = np.full(n_chunks, -1, dtype=np.int32)
    for part in rings:
        assert np.all(part.hi - part.lo == 1), "owners hold single chunks at the turning point"
        owners[part.lo] = part.ranks
    return owners


def halves(
    collective: Collective, scatter: list[NamedRows], gather: list[NamedRows]
) -> list[NamedRows]:
    """Return the phases that a collective needs: one half, the other, or both."""
    if collective is Collective.REDUCE_SCATTER:
        return scatter
    return gather if collective is Collective.ALL_GATHER else scatter + gather
