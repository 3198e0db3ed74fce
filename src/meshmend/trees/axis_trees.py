"""Shallow trees whose branches are long straight lines, and whom messages may reach in one go.

A message may pass chips without stopping, and then pays its overhead once instead of at every hop.
On a line all chips can send straight to its end at the same moment: their messages follow one
another one hop apart, so none waits for another if it is shorter than a hop. So each tree here goes
along one axis, then along the next, and a tree is taken apart into its longest paths.

Knows shapes only, neither bytes nor time.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import distances_from
from meshmend.topology.mesh import Mesh
from meshmend.trees.tree_packing import TreePacking

Ranks = NDArray[np.int32]

_MOST_ROOTS_TRIED = 16


def axis_tree_packing(mesh: Mesh) -> TreePacking:
    """Return one shortest-path tree for each axis of a connected mesh, of equal weights.

    Each goes along another axis first, and hangs from a rank in the middle: from one whose branches
    are the straightest, so that a sum comes to it in the fewest messages, and if possible not from
    the root of another.
    """
    tried, trees, used = _possible_roots(mesh), list[Ranks](), set[int]()
    for order in _axis_orders(mesh):
        possible = {root: axis_tree(mesh, root, order) for root in tried}
        stops = {root: _most_stops(mesh, tree) for root, tree in possible.items()}
        root = min(tried, key=lambda root: (stops[root], root in used))
        trees.append(possible[root])
        used.add(root)
    return _packing_of(trees)


def _axis_orders(mesh: Mesh) -> list[list[int]]:
    """Return the axes that are longer than 1 in every rotated order."""
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1] or [0]
    return [axes[first:] + axes[:first] for first in range(len(axes))]


def _possible_roots(mesh: Mesh) -> list[int]:
    central = mesh_figures(mesh).ranks_within(mesh_figures(mesh).radius)
    roots: list[int] = central[:: -(-len(central) // _MOST_ROOTS_TRIED)].tolist()
    return roots


def _packing_of(trees: list[Ranks]) -> TreePacking:
    parents = np.stack(trees)
    weights = np.full(len(trees), 1 / len(trees))
    return TreePacking(np.argmin(parents, axis=1).astype(np.int32), parents, weights)


def axis_tree(mesh: Mesh, root: int, order: Sequence[int]) -> Ranks:
    """Return the parents of a shortest-path tree that goes along the axes in this order."""
    return nearer_neighbors(mesh, distances_from(mesh, root), order)


def nearer_neighbors(mesh: Mesh, near: NDArray[np.integer], order: Sequence[int]) -> Ranks:
    """Return for each rank a neighbour with a smaller `near`, -1 if there is none.

    Of several it is the one along the axis that comes first in the order.
    """
    parents, beside = np.full(mesh.n_live, -1, dtype=np.int32), mesh.neighbor_ranks
    for axis in reversed(order):
        for port in (2 * axis, 2 * axis + 1):
            is_nearer = (beside[:, port] >= 0) & (near[beside[:, port]] < near)
            parents = np.where(is_nearer, beside[:, port], parents)
    return parents


def _most_stops(mesh: Mesh, parents: Ranks) -> int:
    """Return how many messages a sum takes to the root at most."""
    packing = _packing_of([parents])
    stops, taker = np.zeros(packing.n_ranks, dtype=np.int64), straight_to(mesh, packing)[0]
    for rank in _by_hops(packing.hops[0], np.arange(packing.n_ranks))[1:]:
        stops[rank] = stops[taker[rank]] + 1
    return int(stops.max())


def _by_hops(hops: NDArray[np.integer], ranks: NDArray[np.integer]) -> list[NDArray[np.integer]]:
    """Return these ranks in groups of as many hops to the root, the nearest first."""
    order = np.argsort(hops[ranks], kind="stable")
    return np.split(ranks[order], 1 + np.flatnonzero(np.diff(hops[ranks[order]])))


def straight_to(mesh: Mesh, packing: TreePacking, *, in_pairs: bool = False) -> Ranks:
    """Return whom each rank of each tree sends its sum to (trees, ranks), -1 at the roots.

    A tree is taken apart into straight paths: a rank's path goes on up to its parent if that goes
    the same way. A rank sends to where its path ends, so that its route is its path. With
    `in_pairs` every second rank, counted from the far end, sends to the next one instead, so that
    half as many messages follow one another; but not a rank whose side branches keep it waiting
    longer than those of the next.
    """
    takers = np.full_like(packing.parents, -1)
    for parents, hops, heights, taker in zip(
        packing.parents, packing.hops, packing.heights, takers, strict=True
    ):
        way = np.argmax(mesh.neighbor_ranks == parents[:, None], axis=1)
        way[parents < 0] = -1
        below = np.flatnonzero(parents >= 0)
        turns = below[way[below] != way[parents[below]]]
        goes_on = below[way[below] == way[parents[below]]]
        aside, from_end = np.zeros((2, packing.n_ranks), dtype=np.int64)
        np.maximum.at(aside, parents[turns], heights[turns] + 1)
        levels = _by_hops(hops, goes_on)
        for rank in reversed(levels):
            from_end[parents[rank]] = from_end[rank] + 1
        taker[turns] = parents[turns]
        for rank in levels:
            taker[rank] = taker[parents[rank]]
        if in_pairs:
            joins = (from_end[below] % 2 == 1) & (aside[below] <= aside[parents[below]] + 1)
            taker[below[joins]] = parents[below[joins]]
    return takers
