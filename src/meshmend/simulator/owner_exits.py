"""The way out of a chip towards the owners: what leaves it, and how far that still has to go.

In a reduce-scatter a chip's data for each part of the payload goes to the owner of that part. In a
sharded update it goes on from there, as an updated weight, to the chip farthest from the owner.
Owners that are far away bind by hops, and all owners together bind by bytes, so each number of hops
is a bound of its own. Knows links, hops and shares: `limit` turns them into time, and
`docs/design/0011-owners.md` has the proof.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel
from meshmend.simulator.exits import Exit, large_parts
from meshmend.simulator.packing_number import PackingNumber
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import breadth_first
from meshmend.topology.mesh import Mesh

Shares = NDArray[np.float64]  # what part of the payload each rank owns; together 1


def owner_exits(
    packing: PackingNumber, shares: Shares | None, *, is_updated: bool
) -> tuple[Exit, ...]:
    """Return the exits of single chips and, of a half, those of large parts as well.

    Without shares every rank owns an equal one. With `is_updated` the owners send on what they get.
    """
    if shares is None:
        return _exits_to_equal_owners(packing, is_updated)
    return tuple(_found(packing, shares, is_updated))


@lru_cache(maxsize=64)
def _exits_to_equal_owners(packing: PackingNumber, is_updated: bool) -> tuple[Exit, ...]:
    n_ranks = packing.mesh.n_live
    return tuple(_found(packing, np.full(n_ranks, 1 / n_ranks), is_updated))


def _found(packing: PackingNumber, shares: Shares, is_updated: bool) -> Iterator[Exit]:
    mesh = packing.mesh
    if mesh.n_live == 1:
        return
    yield from _of_single_chips(mesh, shares, is_updated)
    if not is_updated:
        yield from _of_parts(packing, shares)


def _of_single_chips(mesh: Mesh, shares: Shares, is_updated: bool) -> Iterator[Exit]:
    """Yield for each number of links and of hops the chip from which most has to go so far."""
    figures = mesh_figures(mesh)
    most, rank = _most_by_hops(
        mesh.neighbor_ranks, figures.degrees, figures.eccentricities, shares, is_updated
    )
    for n_links, hops in np.argwhere(most > 0).tolist():
        share = float(most[n_links, hops])
        yield Exit(1, int(rank[n_links, hops]), n_links, hops, min(share, 1.0))


def _of_parts(packing: PackingNumber, shares: Shares) -> Iterator[Exit]:
    """Yield what leaves a large part, for the owners outside at each distance from its links."""
    for part in large_parts(packing.mesh, packing.part_of):
        for hops_outside in np.unique(part.hops_outside[part.hops_outside >= 0]).tolist():
            share = float(shares[part.hops_outside >= hops_outside].sum())
            hops = part.hops_inside + 1 + hops_outside
            yield Exit(part.n_chips, part.rank, part.n_links, hops, min(share, 1.0))


@kernel
def _most_by_hops(neighbors, degrees, eccentricities, shares, is_updated):  # type: ignore[no-untyped-def]
    """Return, by links and hops, the largest share that has so many hops to go, and its chip."""
    n_ranks = len(shares)
    most_hops = 2 * eccentricities.max() + 1
    most = np.zeros((degrees.max() + 1, most_hops))
    best = np.zeros((degrees.max() + 1, most_hops), dtype=np.int32)
    distance, order = np.empty(n_ranks, dtype=np.int32), np.empty(n_ranks, dtype=np.int32)
    exactly = np.empty(most_hops)
    for rank in range(n_ranks):
        breadth_first(neighbors, rank, distance, order)
        exactly[:] = 0.0
        for owner in range(n_ranks):
            if is_updated:
                exactly[distance[owner] + eccentricities[owner]] += shares[owner]
            elif owner != rank:
                exactly[distance[owner]] += shares[owner]
        share = 0.0
        for hops in range(most_hops - 1, 0, -1):
            share += exactly[hops]
            if share > most[degrees[rank], hops]:
                most[degrees[rank], hops] = share
                best[degrees[rank], hops] = rank
    return most, best
