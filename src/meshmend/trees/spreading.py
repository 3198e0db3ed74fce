"""Shortest ways for the sums of one axis: to every chip of a slab, from all chips that hold them.

A **slab** is the chips that have the same coordinates along all axes but the `open_axes`. Before an
exchange along `axis`, the chips of a slab at one position of that axis hold the same. Knows shapes,
not data.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.topology.graph import distances_from
from meshmend.topology.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Spreading:
    """How the sum of each position (first axis) comes to each rank (second axis).

    `hops` is -1 where the slab has no such sum, 0 where the rank holds it, else it rises along the
    way. `parents` says who
    sends it, once for each half of the sum: where two ways are equally short, the halves take
    different ones.
    """

    hops: NDArray[np.int32]
    parents: tuple[NDArray[np.int32], NDArray[np.int32]]


def spreading(
    mesh: Mesh, axis: int, open_axes: tuple[int, ...], *, jump_cost: float = 1.0
) -> Spreading:
    """Return shortest ways within the slabs; around holes of lines a message takes several hops.

    Each hop of such a jump counts `jump_cost` times, because it holds a link of other lines.
    """
    position = np.arange(mesh.shape[axis])[:, None]
    hops = np.where(mesh.coordinates[:, axis] == position, 0, -1).astype(np.int32)
    others = [other for other in open_axes if other != axis]
    down, up = 2 * axis, 2 * axis + 1
    beside = [port for other in others for port in (2 * other, 2 * other + 1)]
    jumps = [(before, int(jump_cost * n_hops)) for before, n_hops in _jumps(mesh, axis)]
    steps = [
        [*((mesh.neighbor_ranks[:, port], 1) for port in ports), *jumps]
        for ports in ((down, up, *beside), (up, down, *beside[::-1]))
    ]
    parents = np.full((2, *hops.shape), -1, dtype=np.int32)
    for distance in range(1, mesh.n_live * len(mesh.shape)):
        found = [_found(hops, distance, way) for way in steps]
        if (reached := found[0] >= 0).any():
            hops[reached] = distance
            for parent, new in zip(parents, found, strict=True):
                parent[reached] = new[reached]
        elif distance > hops.max() + max((hop for _, hop in jumps), default=1):
            break
    _reach_the_rest(mesh, axis, open_axes, hops, parents)
    return Spreading(hops, (parents[0], parents[1]))


_Step = tuple[NDArray[np.int32], int]  # the rank before each rank, -1 without one, and the hops


def _found(hops: NDArray[np.int32], distance: int, steps: list[_Step]) -> NDArray[np.int32]:
    """Return who can send each sum to each rank that lacks it at a distance; -1: nobody."""
    found = np.full(hops.shape, -1, dtype=np.int32)
    for before, n_hops in steps:
        if n_hops > distance:
            continue
        usable = (before >= 0) & (hops[:, before] == distance - n_hops) & (hops < 0) & (found < 0)
        found = np.where(usable, before, found)
    return found


def _jumps(mesh: Mesh, axis: int) -> list[_Step]:
    """Return the ways over the gaps in the lines of an axis, a step for each gap and way."""
    result = list[_Step]()
    size, wraps = mesh.shape[axis], mesh.wrap[axis] and mesh.shape[axis] > 2
    for way in (0, 1):
        gaps = np.flatnonzero(mesh.neighbor_ranks[:, 2 * axis + way] < 0)
        for rank in gaps.tolist():
            chip = list(mesh.live[rank])
            for _ in range(1, size):
                chip[axis] += 2 * way - 1
                if wraps:
                    chip[axis] %= size
                if tuple(chip) not in mesh or tuple(chip) in mesh.rank_of:
                    break
            other = mesh.rank_of.get(tuple(chip), rank)
            if other != rank:
                before = np.full(mesh.n_live, -1, dtype=np.int32)
                before[rank] = other
                result.append((before, int(distances_from(mesh, rank)[other])))
    return result


def _reach_the_rest(
    mesh: Mesh,
    axis: int,
    open_axes: tuple[int, ...],
    hops: NDArray[np.int32],
    parents: NDArray[np.int32],
) -> None:
    """Send a sum straight from a chip that holds it, where no way within the slab leads."""
    closed = [other for other in range(len(mesh.shape)) if other not in open_axes]
    slab = np.unique(mesh.coordinates[:, closed], axis=0, return_inverse=True)[1].reshape(-1)
    for position in range(len(hops)):
        held = mesh.coordinates[:, axis] == position
        for rank in np.flatnonzero(hops[position] < 0).tolist():
            sources = np.flatnonzero(held & (slab == slab[rank]))
            if len(sources):
                apart = distances_from(mesh, rank)[sources]
                parents[:, position, rank] = sources[np.argmin(apart)]
                hops[position, rank] = apart.min()
