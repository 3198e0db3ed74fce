"""Schedules made of rings: `ring-1d`, `rank-ring`, `two-d`, `row-pair` and the paper's `ft-two-d`.

Each builder turns an overlay of chips into ranks once. Then come reduce-scatter and all-gather
around many rings at once, and two such phases in a row. A ring here is a row of ranks in the
direction in which it sends; a ring that runs both ways is two of them, each with its own half of
the payload. Position j of a ring owns the chunks `lo[j]` to `hi[j] - 1`. Nothing is computed per
row: the columns are strided views.

**`ft-two-d`** is the paper's fault-tolerant scheme (figures 9 and 10). Yellow 2x2 rings sum a
quarter of each half of the payload per chip and forward it to a blue partner; the blue rings then
work as in `row-pair` and hand the quarters back. Forwarding and blue rings overlap as far as the
data allow: a row waits only for the data that it needs, and each yellow chip takes the quarter that
its partner's ring needs last.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, schedule_of
from meshmend.topology.mesh import Mesh
from meshmend.trees.rings import (
    PairLayout,
    Ring,
    fault_tolerant_layout,
    folded,
    hamiltonian_ring,
    line_rings,
    row_pair_layout,
)

Ranks = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class OwnedRings:
    """Rings of one length as arrays (rings, length): ranks, and the chunks each position owns."""

    ranks: Ranks
    lo: Ranks
    hi: Ranks


def both_ways(ranks: Ranks) -> Ranks:
    """Return the rings followed by the same rings in the other direction."""
    return np.concatenate([ranks, ranks[:, ::-1]])


def reduce_scatter_rows(rings: OwnedRings) -> Rows:
    """Return rows after which each position holds its ring's sum of the chunks it owns.

    At step t position i sends the chunks of position i - t - 1 to position i + 1.
    """
    length = rings.ranks.shape[1]
    return _shifted(rings, range(length - 1, 0, -1), REDUCE)


def all_gather_rows(rings: OwnedRings) -> Rows:
    """Return rows after which every position holds the chunks that each of its ring owned.

    At step t position i sends the chunks of position i - t to position i + 1.
    """
    length = rings.ranks.shape[1]
    return _shifted(rings, range(length, 1, -1), COPY)


def _shifted(rings: OwnedRings, shifts: range, op: int) -> Rows:
    """Return rows of shape (steps, rings, length): at each step position i sends what position
    i + shift (mod length) owns."""
    shape = (len(shifts), *rings.ranks.shape)

    def turned(owned: Ranks) -> Ranks:
        windows = sliding_window_view(np.tile(owned, 2), owned.shape[1], axis=1)
        return windows[:, shifts.start : shifts.stop : shifts.step].swapaxes(0, 1)

    return Rows(
        src=np.broadcast_to(rings.ranks, shape),
        dst=np.broadcast_to(np.roll(rings.ranks, -1, axis=1), shape),
        lo=turned(rings.lo),
        hi=turned(rings.hi),
        op=op,
    )


@dataclass(frozen=True, eq=False)
class TwoPhase:
    """Rings in two directions of a grid: first along, then across, both ways round.

    `along` holds R rings of length L, `across` the L rings over what is left at each position.
    The chunks, numbered from `first_chunk` on, are ordered by direction, position in the ring
    along (in that direction), ring: a position's share after phase one is R chunks in a row.
    """

    along: OwnedRings
    across: OwnedRings

    @property
    def n_chunks(self) -> int:
        return self.across.ranks.size


def two_phase(along: Ranks, order: NDArray[np.integer], *, first_chunk: int = 0) -> TwoPhase:
    """Return the two phases over rings `along` (R, L); across goes through rings in `order`."""
    n_rings, length = along.shape
    one_way = first_chunk + n_rings * np.arange(2 * length, dtype=np.int32).reshape(2, 1, length)
    lo = np.broadcast_to(one_way, (2, n_rings, length)).reshape(2 * n_rings, length)
    phase_one = OwnedRings(both_ways(along), lo, lo + np.int32(n_rings))

    # Position p of the backward rings is position L - 1 - p of the forward ones.
    positions = np.stack([along.T, along.T[::-1]])  # (direction, position, ring)
    owned = one_way.reshape(2, length, 1) + np.arange(n_rings, dtype=np.int32)
    turns = np.stack([order, order[::-1]])[:, None, :]  # the backward half goes the other way
    ranks = np.take_along_axis(positions, turns, axis=2).reshape(2 * length, n_rings)
    chunks = np.take_along_axis(owned, turns, axis=2).reshape(2 * length, n_rings)
    return TwoPhase(phase_one, OwnedRings(ranks, chunks, chunks + np.int32(1)))


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


_PERMUTATIONS = np.array(list(permutations(range(4))), dtype=np.int32)


def ft_two_d(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the scheme of figures 9 and 10 for a mesh that lost whole aligned 2x2 blocks.

    Only chips of blue rings own chunks. Without failed chips it is the `row-pair` scheme.
    """
    layout = fault_tolerant_layout(mesh)
    grid = paired_phases(mesh, layout.blue, wraps=mesh.wrap[layout.axis])
    scatter: list[NamedRows] = [
        ("blue reduce-scatter", reduce_scatter_rows(grid.along)),
        ("across reduce-scatter", reduce_scatter_rows(grid.across)),
    ]
    gather: list[NamedRows] = [
        ("across all-gather", all_gather_rows(grid.across)),
        ("blue all-gather", all_gather_rows(grid.along)),
    ]
    if layout.yellow:
        partners = _partner_ranks(mesh, layout)
        into = _yellow_rings(mesh, layout, late=True)
        back = _yellow_rings(mesh, layout, late=False)
        scatter = [
            ("yellow reduce-scatter", reduce_scatter_rows(into)),
            ("forward", Rows(into.ranks, partners, into.lo, into.hi, REDUCE)),
            *scatter,
        ]
        gather += [
            ("hand back", Rows(partners, back.ranks, back.lo, back.hi, COPY)),
            ("yellow all-gather", all_gather_rows(back)),
        ]
    return schedule_of(
        halves(collective, scatter, gather),
        algorithm="ft-two-d",
        collective=collective,
        owners=owners_of([grid.across], n_chunks=grid.n_chunks),
        n_ranks=mesh.n_live,
    )


def _partner_ranks(mesh: Mesh, layout: PairLayout) -> Ranks:
    """Return the partners of the yellow rings, both ways, as an array (2 x rings, 4)."""
    rings = [tuple(layout.partner[chip] for chip in ring) for ring in layout.yellow]
    return both_ways(ranks_of(mesh, rings))


def _yellow_rings(mesh: Mesh, layout: PairLayout, *, late: bool) -> OwnedRings:
    """Return the yellow rings both ways, each position owning a quarter of that way's half.

    A blue position p passes shard s on at step (p - s - 1) mod L of either half. Quarters are
    dealt so that each partner needs its quarter as late as possible (on the way in), or has it
    as early as possible (on the way back).
    """
    length = len(layout.blue[0])
    position = {chip: at for ring in layout.blue for at, chip in enumerate(ring)}
    forwards = np.array([[position[layout.partner[c]] for c in ring] for ring in layout.yellow])
    partner_at = np.concatenate([forwards, length - 1 - forwards[:, ::-1]])
    quarter = _dealt_quarters(partner_at, length, late=late)

    n_yellow, shards = len(layout.yellow), len(layout.blue)
    way = np.repeat([0, 1], n_yellow)[:, None]
    lo = ((way * length + quarter * (length // 4)) * shards).astype(np.int32)
    ranks = both_ways(ranks_of(mesh, layout.yellow))
    return OwnedRings(ranks, lo, lo + np.int32(length // 4 * shards))


def _dealt_quarters(partner_at: NDArray[np.int64], length: int, *, late: bool) -> NDArray[np.int32]:
    """Return the best of the 24 ways to deal four quarters to each ring's four positions."""
    shard = np.arange(length).reshape(4, length // 4)
    step = (partner_at[:, :, None, None] - shard - 1) % length  # (ring, position, quarter, shard)
    # The first step that needs any shard of a quarter, or minus the last that brings one.
    worth = step.min(axis=-1) if late else -step.max(axis=-1)
    dealt = worth[:, np.arange(4), _PERMUTATIONS]  # (ring, permutation, position)
    best = np.argmax(dealt.min(axis=-1) * (8 * length) + dealt.sum(axis=-1), axis=1)
    return np.asarray(_PERMUTATIONS[best], dtype=np.int32)
