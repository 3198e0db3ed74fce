"""Schedules over one spanning tree or forest, and from one rank to another.

One tree of fewest hops moves the whole payload: a broadcast in slices keeps every link of the
tree busy, and a sum that is too short to be cut takes twice the radius in hops.

`point_to_point` sends parts of a payload, each with a source and a target of its own. It is no
collective: what else the ranks hold stays as it is.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, schedule_of
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import breadth_first
from meshmend.topology.mesh import Mesh

Ends = tuple[int, int]  # the ranks that send and receive a part


def point_to_point(ends: Sequence[Ends], cuts: NDArray[np.float64], n_ranks: int) -> Schedule:
    """Return a schedule that copies each part, between its two cuts, from one rank to another.

    It is the part of an all-gather that reaches one rank for each chunk.
    """
    source, target = np.array(ends, dtype=np.int32).reshape(-1, 2).T
    part = np.arange(len(source), dtype=np.int32)
    return schedule_of(
        [("send", Rows(src=source, dst=target, lo=part, hi=part + np.int32(1), op=COPY))],
        algorithm="point-to-point",
        collective=Collective.ALL_GATHER,
        owners=source,
        n_ranks=n_ranks,
        cuts=cuts,
    )


Ranks = NDArray[np.int32]


def broadcast(mesh: Mesh, root: int) -> Schedule:
    """Return a schedule after which every rank holds what the root held.

    It is an all-gather of one chunk that the root owns.

    Raises:
        InputError: the mesh has no such rank.
    """
    parents, children = _tree(mesh, root)
    return schedule_of(
        [("broadcast", _rows(parents, children, COPY))],
        algorithm=f"broadcast from rank {root}",
        collective=Collective.ALL_GATHER,
        owners=np.array([root]),
        n_ranks=mesh.n_live,
    )


def spread(mesh: Mesh, holders: Sequence[int]) -> Schedule:
    """Return a schedule after which every rank holds the holders' data, which must be equal.

    Every other rank receives it once, from a neighbour one hop nearer to the nearest holder.

    Raises:
        InputError: no holder, or one that the mesh does not have.
    """
    if not holders or not all(0 <= rank < mesh.n_live for rank in holders):
        raise InputError(
            f"spread on {mesh} needs holders below {mesh.n_live}, but got {list(holders)}"
        )
    is_reached = np.zeros(mesh.n_live, dtype=np.bool_)
    frontier = np.array(sorted(set(holders)), dtype=np.int32)
    is_reached[frontier] = True
    parents, children = [frontier[:0]], [frontier[:0]]
    while len(frontier):
        neighbors = mesh.neighbor_ranks[frontier]
        parent, child = np.repeat(frontier, neighbors.shape[1]), neighbors.reshape(-1)
        is_new = (child >= 0) & ~is_reached[child]
        frontier, first = np.unique(child[is_new], return_index=True)
        is_reached[frontier] = True
        parents.append(parent[is_new][first])
        children.append(frontier)
    return schedule_of(
        [("spread", _rows(np.concatenate(parents), np.concatenate(children), COPY))],
        algorithm="spread",
        collective=Collective.ALL_GATHER,
        owners=np.array([min(holders)]),
        n_ranks=mesh.n_live,
    )


def tree_sum(mesh: Mesh) -> Schedule:
    """Return an allreduce up and down one tree of fewest hops from a rank in the middle."""
    root = mesh_figures(mesh).central_rank
    parents, children = _tree(mesh, root)
    return schedule_of(
        [
            ("reduce", _rows(children[::-1], parents[::-1], REDUCE)),
            ("broadcast", _rows(parents, children, COPY)),
        ],
        algorithm="one-tree",
        collective=Collective.ALLREDUCE,
        owners=np.array([root]),
        n_ranks=mesh.n_live,
    )


def _tree(mesh: Mesh, root: int) -> tuple[Ranks, Ranks]:
    """Return the parents and children of a tree of fewest hops, nearest to the root first."""
    if not 0 <= root < mesh.n_live:
        raise InputError(f"a tree on {mesh} needs a root below {mesh.n_live}, but got {root}")
    distance, order = np.empty((2, mesh.n_live), dtype=np.int32)
    breadth_first(mesh.neighbor_ranks, root, distance, order)
    children = order[1:]
    neighbors = mesh.neighbor_ranks[children]
    is_nearer = (neighbors >= 0) & (distance[neighbors] < distance[children][:, None])
    parents = np.take_along_axis(neighbors, np.argmax(is_nearer, axis=1)[:, None], axis=1)[:, 0]
    return parents, children


def _rows(src: Ranks, dst: Ranks, op: int) -> Rows:
    zero = np.zeros(len(src), dtype=np.int32)
    return Rows(src=src, dst=dst, lo=zero, hi=zero + np.int32(1), op=op)
