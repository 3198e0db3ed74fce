"""The live part of a mesh as a graph: distances and connected parts.

Works on ranks and the mesh's `neighbor_ranks` table. Knows nothing of routes; radius, diameter
and the like are in `figures`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import plain_kernel
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh


@plain_kernel
def breadth_first(
    neighbors: NDArray[np.int32], start: int, distance: NDArray[np.int32], queue: NDArray[np.int32]
) -> int:
    """Fill `distance` with hops from `start` (-1: not reached) and return how many are reached.

    `queue` is scratch; its first entries end as the reached ranks in order of distance.
    """
    distance[:] = -1
    distance[start] = 0
    queue[0] = start
    head, tail = 0, 1
    while head < tail:
        here = queue[head]
        head += 1
        for port in range(neighbors.shape[1]):
            there = neighbors[here, port]
            if there >= 0 and distance[there] < 0:
                distance[there] = distance[here] + 1
                queue[tail] = there
                tail += 1
    return tail


def distances_from(mesh: Mesh, rank: int) -> NDArray[np.int32]:
    """Return the hops from one rank to every rank over live links, -1 where no path exists."""
    distance, queue = np.empty((2, mesh.n_live), dtype=np.int32)
    breadth_first(mesh.neighbor_ranks, rank, distance, queue)
    return distance


def all_distances(mesh: Mesh) -> NDArray[np.int32]:
    """Return the hops between all pairs of ranks, -1 where no path exists."""
    return np.stack([distances_from(mesh, rank) for rank in range(mesh.n_live)])


def distances_from_any(mesh: Mesh, ranks: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return the hops from the nearest of these ranks to every rank, -1 where no path exists."""
    distance = np.full(mesh.n_live, -1, dtype=np.int32)
    frontier, hops = np.unique(ranks), 0
    while len(frontier):
        distance[frontier] = hops
        beside = np.unique(mesh.neighbor_ranks[frontier])
        frontier = beside[(beside >= 0) & (distance[beside] < 0)]
        hops += 1
    return distance


def hops_to_farthest(mesh: Mesh, groups: Sequence[NDArray[np.integer]]) -> NDArray[np.int32]:
    """Return each rank's hops to the farthest rank of each group (ranks, groups).

    The mesh is connected, and no group is empty.
    """
    hops = np.zeros((mesh.n_live, len(groups)), dtype=np.int32)
    for rank in range(mesh.n_live):
        distance = distances_from(mesh, rank)
        hops[rank] = [distance[ranks].max() for ranks in groups]
    return hops


def components(mesh: Mesh) -> tuple[tuple[Chip, ...], ...]:
    """Return the connected parts of the live chips, largest first, ties by first chip."""
    part = np.full(mesh.n_live, -1)
    n_parts = 0
    for rank in range(mesh.n_live):
        if part[rank] < 0:
            part[distances_from(mesh, rank) >= 0] = n_parts
            n_parts += 1
    sizes = np.bincount(part)
    order = np.lexsort((np.arange(n_parts), -sizes))
    return tuple(tuple(mesh.live[rank] for rank in np.nonzero(part == k)[0]) for k in order)


def stranded(mesh: Mesh) -> tuple[Chip, ...]:
    """Return the live chips that are cut off from the largest connected part."""
    if not mesh.has_failures:
        return ()
    reached = distances_from(mesh, 0) >= 0
    if reached.all():
        return ()
    return tuple(sorted(chip for part in components(mesh)[1:] for chip in part))


def largest_part(mesh: Mesh) -> Mesh:
    """Return the mesh in which the stranded chips count as failed: it is connected."""
    cut_off = stranded(mesh)
    return replace(mesh, failed=mesh.failed | set(cut_off)) if cut_off else mesh
