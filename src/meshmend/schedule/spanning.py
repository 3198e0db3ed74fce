"""Schedules over one spanning tree or forest, and from one rank to another.

One tree of fewest hops moves the whole payload: a broadcast in slices keeps every link of the
tree busy, and a sum that is too short to be cut takes twice the radius in hops. From several
holders, a payload in parts goes over several forests, which use all links that lead away from them.

`point_to_point` sends parts of a payload, each with a source and a target of its own. It is no
collective: what else the ranks hold stays as it is.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError, ProofError
from meshmend.schedule.table import (
    COPY,
    REDUCE,
    Collective,
    Phase,
    Rows,
    Schedule,
    schedule_of,
)
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import breadth_first
from meshmend.topology.mesh import Mesh

Ends = tuple[int, int]  # the ranks that send and receive a part

_N_PARTS: Final = 12  # so that 1, 2, 3, 4 or 6 links of a rank share them alike


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
    _check_holders(mesh, holders)
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


def spread_in_parts(mesh: Mesh, holders: Sequence[int]) -> Schedule:
    """Return a spread of twelve parts; on the way of each, the busiest link is as idle as can be.

    So a rank next to several holders takes a part of the payload from each of them.

    Raises:
        InputError: no holder, or one that the mesh does not have.
    """
    _check_holders(mesh, holders)
    n_sent: Counter[Ends] = Counter()  # parts over each link, in each direction
    forests = [_least_busy(mesh, holders, n_sent) for _ in range(_N_PARTS)]
    ends = np.array([each for forest in forests for each in forest], dtype=np.int32).reshape(-1, 2)
    part = np.repeat(np.arange(_N_PARTS, dtype=np.int32), [len(forest) for forest in forests])
    return schedule_of(
        [("spread", Rows(ends[:, 0], ends[:, 1], lo=part, hi=part + np.int32(1), op=COPY))],
        algorithm="spread in parts",
        collective=Collective.ALL_GATHER,
        owners=np.full(_N_PARTS, min(holders)),
        n_ranks=mesh.n_live,
    )


def only_to(schedule: Schedule, receivers: Sequence[int]) -> Schedule:
    """Return a spread without the messages that are on no way to these ranks."""
    wanted = np.zeros((schedule.n_ranks, schedule.n_chunks), dtype=np.bool_)
    wanted[list(receivers)] = True
    keeps = np.zeros(schedule.n_rows, dtype=np.bool_)
    for row in range(schedule.n_rows - 1, -1, -1):  # a row comes after those that bring its data
        chunks = slice(schedule.lo[row], schedule.hi[row])
        keeps[row] = wanted[schedule.dst[row], chunks].any()
        if keeps[row]:
            wanted[schedule.src[row], chunks] = True
    kept = (schedule.src, schedule.dst, schedule.lo, schedule.hi, schedule.op)
    src, dst, lo, hi, op = (column[keeps] for column in kept)
    return replace(
        schedule,
        src=src,
        dst=dst,
        lo=lo,
        hi=hi,
        op=op,
        phases=(Phase("spread", 0, int(keeps.sum())),),
    )


def check_reached(schedule: Schedule, holders: Sequence[int], receivers: Sequence[int]) -> None:
    """Raise ProofError unless a spread brings all chunks of the holders to these ranks."""
    holds = np.zeros((schedule.n_ranks, schedule.n_chunks), dtype=np.bool_)
    holds[list(holders)] = True
    for row in range(schedule.n_rows):
        chunks = slice(schedule.lo[row], schedule.hi[row])
        if schedule.op[row] != COPY or not holds[schedule.src[row], chunks].all():
            raise ProofError(
                f"rank {schedule.src[row]} sends what it does not hold, in row {row} of a spread"
            )
        holds[schedule.dst[row], chunks] = True
    for rank in receivers:
        if not holds[rank].all():
            raise ProofError(f"a spread does not bring everything to rank {rank}")


def _least_busy(mesh: Mesh, holders: Sequence[int], n_sent: Counter[Ends]) -> list[Ends]:
    """Return the links of a forest from the holders, parents first, and count its use of them.

    The way to each rank is one whose busiest link has sent the fewest parts, then one of the fewest
    hops.
    """
    neighbors, holding = mesh.neighbor_ranks, sorted(set(holders))
    reached, forest = set(holding), list[Ends]()
    ways: list[tuple[int, int, int, int]] = []  # parts over the busiest link, hops, rank, parent

    def go_on(rank: int, busiest: int, hops: int) -> None:
        for other in neighbors[rank].tolist():
            if other >= 0 and other not in reached:
                way = max(busiest, n_sent[rank, other]), hops + 1, other, rank
                heapq.heappush(ways, way)

    is_inside = (neighbors < 0) | np.isin(neighbors, holding)
    for rank in holding:
        if not is_inside[rank].all():
            go_on(rank, 0, 0)
    while ways:
        busiest, hops, rank, parent = heapq.heappop(ways)
        if rank not in reached:
            reached.add(rank)
            forest.append((parent, rank))
            n_sent[parent, rank] += 1
            go_on(rank, busiest, hops)
    return forest


def _check_holders(mesh: Mesh, holders: Sequence[int]) -> None:
    if not holders or not all(0 <= rank < mesh.n_live for rank in holders):
        raise InputError(
            f"spread on {mesh} needs holders below {mesh.n_live}, but got {list(holders)}"
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
