"""The paper's fault-tolerant scheme `ft-two-d` (figures 9 and 10).

Yellow 2x2 rings sum a quarter of each half of the payload per chip and forward it to a blue
partner; the blue rings then work as in `row-pair` and hand the quarters back. Forwarding and
blue rings overlap as far as the data allow: a row waits only for the data that it needs, and
each yellow chip takes the quarter that its partner's ring needs last.
"""

from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from meshmend.schedule.ring_builders import NamedRows, halves, owners_of, paired_phases, ranks_of
from meshmend.schedule.ring_phases import (
    OwnedRings,
    Ranks,
    all_gather_rows,
    both_ways,
    reduce_scatter_rows,
)
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, schedule_of
from meshmend.topology.mesh import Mesh
from meshmend.trees.pairs import PairLayout, fault_tolerant_layout

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
