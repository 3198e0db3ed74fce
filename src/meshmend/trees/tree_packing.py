"""Tree packings: K spanning trees that use the links of a mesh evenly and are nearly as shallow
as can be.

Each tree carries its weight of the payload: reduced up to the root and broadcast down, all trees
at once. The busiest link carries `max_load` of the payload in each direction, so bandwidth costs
`max_load x D / B`. The least possible `max_load` is one over the packing number of the graph
(Tutte and Nash-Williams), and equal weights reach it for the right number of trees
(`tree_counts`). Latency costs twice the depth. Knows nothing of bytes, slices or time.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import TopologyError
from meshmend.kernels import kernel
from meshmend.topology.figures import MeshFigures, mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.trees.straight_trees import RootChoice, straight_forest
from meshmend.trees.tree_balanced import (
    evenest_forest,
    forest_within,
    gap_filling_forest,
)
from meshmend.trees.tree_disjoint import disjoint_forest
from meshmend.trees.tree_forest import (
    NEIGHBOR,
    PORT,
    Forest,
    check_forest,
    check_spanning_trees,
    root_all,
)


@dataclass(frozen=True, eq=False)
class TreePacking:
    """Rooted spanning trees over the same ranks, each with its share of the payload.

    `parents[k, rank]` is the rank's parent in tree k, -1 at the root.
    """

    roots: NDArray[np.int32]
    parents: NDArray[np.int32]
    weights: NDArray[np.float64]

    def __post_init__(self) -> None:
        n_trees = len(self.roots)
        if self.parents.ndim != 2 or len(self.parents) != n_trees or len(self.weights) != n_trees:
            raise TopologyError(
                f"TreePacking needs one row of parents and one weight per root, but got "
                f"{n_trees} roots, parents {self.parents.shape} and {len(self.weights)} weights"
            )
        if not n_trees or self.weights.min() < 0 or not math.isclose(self.weights.sum(), 1):
            raise TopologyError(
                f"TreePacking needs weights from 0 on that sum to 1, but got {self.weights}"
            )
        if self.hops.min() < 0:
            tree = int(np.argmin(self.hops.min(axis=1)))
            raise TopologyError(
                f"TreePacking needs a way to the root from every rank, but tree {tree} has none "
                f"from rank {int(np.argmin(self.hops[tree]))}"
            )
        for array in (self.roots, self.parents, self.weights):
            array.flags.writeable = False

    @property
    def n_trees(self) -> int:
        return len(self.roots)

    @property
    def n_ranks(self) -> int:
        return len(self.parents[0])

    @cached_property
    def hops(self) -> NDArray[np.int32]:
        """Each rank's hops to the root in each tree (trees, ranks)."""
        hops: NDArray[np.int32] = hops_to_roots(self.roots, np.ascontiguousarray(self.parents))
        hops.flags.writeable = False
        return hops

    @cached_property
    def heights(self) -> NDArray[np.int32]:
        """For each tree and rank the hops to the farthest rank below it."""
        heights: NDArray[np.int32] = heights_of(np.ascontiguousarray(self.parents))
        heights.flags.writeable = False
        return heights

    @property
    def depths(self) -> NDArray[np.int32]:
        """Each tree's depth: the most hops from a rank to the root."""
        depths: NDArray[np.int32] = self.hops.max(axis=1)
        return depths

    @property
    def depth(self) -> int:
        """The depth of the deepest tree."""
        return int(self.hops.max())

    @cached_property
    def edge_loads(self) -> NDArray[np.float64]:
        """The part of the payload that each link of `edges` carries, each way."""
        tree, child = np.nonzero(self.parents >= 0)
        weights = self.weights[tree]
        used, which = np.unique(self._number(child, self.parents[tree, child]), return_inverse=True)
        return np.bincount(which, weights, len(used)).astype(np.float64)

    @cached_property
    def edges(self) -> NDArray[np.int32]:
        """The links in use as pairs of ranks (links, 2), smaller first, in rising order."""
        tree, child = np.nonzero(self.parents >= 0)
        used = np.unique(self._number(child, self.parents[tree, child]))
        return np.stack(np.divmod(used, self.n_ranks), axis=1).astype(np.int32)

    @property
    def max_load(self) -> float:
        """The part of the payload that the busiest link carries, each way (0: a single chip)."""
        return float(self.edge_loads.max(initial=0.0))

    def slowest_load(self, mesh: Mesh, *, up_alone: bool) -> float:
        """Return what the link that takes longest would carry in that time at full speed.

        It is a part of the payload, each way; with `up_alone`, of what goes towards roots.
        """
        tree, child = np.nonzero(self.parents >= 0)
        parent = self.parents[tree, child]
        port = np.argmax(mesh.neighbor_ranks[child] == parent[:, None], axis=1)
        loads = np.zeros(mesh.neighbor_ranks.shape)
        np.add.at(loads, (child, port), self.weights[tree])
        if not up_alone:
            np.add.at(loads, (parent, port ^ 1), self.weights[tree])
        return float((loads / mesh.port_speeds).max(initial=0.0))

    @property
    def most_trees_up(self) -> int:
        """How many trees the busiest channel carries towards their roots (0: a single chip)."""
        tree, child = np.nonzero(self.parents >= 0)
        channel = child.astype(np.int64) * self.n_ranks + self.parents[tree, child]
        return int(np.unique(channel, return_counts=True)[1].max(initial=0))

    def needed_pace(self, goal: int, gap: float) -> float:
        """Return the pace that the most crowded link needs, the goal at least (`tree_gaps`)."""
        tree, child = np.nonzero(self.parents >= 0)
        parent, is_leaf = self.parents[tree, child], self.heights[tree, child] == 0
        ways = np.array([child, parent], dtype=np.int64) * self.n_ranks + [parent, child]
        used, which = np.unique(ways, return_inverse=True)
        up, down = which.reshape(2, -1)
        needed = np.zeros(len(used))
        for way in (up, down):
            n_trees = np.bincount(way, minlength=len(used))
            room = np.maximum(0.0, gap * (goal - n_trees))
            needed += n_trees - np.minimum(room, np.bincount(way, is_leaf, len(used)))
        return max(float(goal), float(needed.max(initial=0.0)))

    def _number(self, one: NDArray[np.integer], other: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return a number for each pair of ranks that sorts as the pairs do."""
        low, high = np.minimum(one, other).astype(np.int64), np.maximum(one, other)
        number: NDArray[np.int64] = low * self.n_ranks + high
        return number


@kernel
def heights_of(parents):  # type: ignore[no-untyped-def]
    """Return for each tree and rank the hops to the farthest rank below it."""
    height = np.zeros(parents.shape, dtype=np.int32)
    is_leaf = np.empty(parents.shape[1], dtype=np.bool_)
    for tree in range(parents.shape[0]):
        is_leaf[:] = True
        for above in parents[tree]:
            if above >= 0:
                is_leaf[above] = False
        for rank in np.flatnonzero(is_leaf):  # a long branch is walked once
            below, here = 0, parents[tree, rank]
            while here >= 0 and height[tree, here] <= below:
                below += 1
                height[tree, here] = below
                here = parents[tree, here]
    return height


@kernel
def hops_to_roots(roots: NDArray[np.int32], parents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return each rank's hops to its tree's root, -1 where its parents do not lead there."""
    n_trees, n_ranks = parents.shape
    hops = np.full((n_trees, n_ranks), -1, dtype=np.int32)
    for k in range(n_trees):
        if parents[k, roots[k]] == -1:
            hops[k, roots[k]] = 0
        for rank in range(n_ranks):
            above, v = 0, rank
            while above <= n_ranks and hops[k, v] < 0 and 0 <= parents[k, v] < n_ranks:
                above, v = above + 1, parents[k, v]
            if above > n_ranks or hops[k, v] < 0:
                continue
            above, v = above + hops[k, v], rank
            while hops[k, v] < 0:
                hops[k, v] = above
                above, v = above - 1, parents[k, v]
    return hops


def tree_packing(
    mesh: Mesh, *, n_trees: int, depth_slack: int | None = None, seed: int = 0
) -> TreePacking:
    """Return `n_trees` spanning trees of equal weight with even loads on the links.

    With `depth_slack` no tree is deeper than the mesh's radius plus that, and the loads are as
    even as the search finds them within it. Without, the loads come first and the depth is the
    least that was found for them. A single tree is as shallow as can be. Trees start as
    shortest-path trees from central roots, and exchanges even out their loads. Time grows about
    as chips x trees, plus chips squared for the radius. Deterministic for a seed.

    Raises:
        TopologyError: the mesh is not connected, or a count is out of range.
    """
    if n_trees < 1 or (depth_slack is not None and depth_slack < 0):
        raise TopologyError(
            f"tree_packing needs at least one tree and a slack from 0 on, but got {n_trees} trees "
            f"and slack {depth_slack}"
        )
    figures = _connected_figures(mesh, "tree_packing")
    if n_trees == 1:
        depth_slack = 0  # one tree loads its links alike, however deep it is
    if depth_slack is None:
        forest = evenest_forest(figures, n_trees, seed)
    else:
        forest = forest_within(figures, n_trees, depth_slack, seed)
    root_all(forest.ways, forest.state)
    check_forest(forest, cap=None if depth_slack is None else figures.radius + depth_slack)
    return _packing(forest, np.full(n_trees, 1 / n_trees))


def gap_packing(
    mesh: Mesh, *, n_trees: int, depth_slack: int, gap: float, seed: int = 0
) -> TreePacking:
    """Return spanning trees of equal weight whose leaves fill the gaps of the channels.

    No tree is deeper than the mesh's radius plus the slack. The `gap` is the time of the longest
    way up and down, as a part of the time in which the payload passes the busiest link.
    `tree_gaps` says what gaps are. Such trees need a pipeline that serves leaves last.
    Deterministic for a seed.

    Raises:
        TopologyError: the mesh is not connected, or a figure is out of range.
    """
    if n_trees < 1 or depth_slack < 0 or not gap >= 0:
        raise TopologyError(
            f"gap_packing needs at least one tree, a slack and a gap from 0 on, but got {n_trees} "
            f"trees, slack {depth_slack} and gap {gap}"
        )
    figures = _connected_figures(mesh, "gap_packing")
    forest = gap_filling_forest(figures, n_trees, depth_slack, gap, seed)
    check_forest(forest, cap=figures.radius + depth_slack)
    return _packing(forest, np.full(n_trees, 1 / n_trees))


def straight_packing(
    mesh: Mesh, *, n_trees: int, depth_slack: int, seed: int = 0
) -> TreePacking | None:
    """Return a few trees whose branches are straight lines where links are not crowded.

    Their leaves fill gaps as long as the payload takes to pass (`straight_trees`). The seed draws
    the roots, at most the slack farther from all than the middle. Returns None if some link would
    need more than the pace: then other seeds may do. Deterministic for a seed.

    Raises:
        TopologyError: the mesh is not connected, or a figure is out of range.
    """
    if n_trees < 1 or depth_slack < 0 or seed < 0:
        raise TopologyError(
            f"straight_packing needs at least one tree, a slack and a seed from 0 on, but got "
            f"{n_trees} trees, slack {depth_slack} and seed {seed}"
        )
    figures = _connected_figures(mesh, "straight_packing")
    forest, too_much = straight_forest(figures, n_trees, RootChoice(depth_slack, seed))
    if too_much:
        return None
    check_forest(forest, cap=figures.radius + depth_slack)
    return _packing(forest, np.full(n_trees, 1 / n_trees))


def disjoint_packing(mesh: Mesh, *, window: int, seed: int = 0) -> TreePacking | None:
    """Return channel-disjoint trees, or None where none are found.

    No channel carries two of them the same way. They are for payloads too short to fill the
    mesh. There are as many trees as the fewest links of a rank, at most a hop deeper than the
    radius; deeper trees carry less. `window` is the time, in hops, in which a tree's part of the
    payload passes a link. Where a channel carries one tree up and another down, they are so far
    apart in time that all end at most three hops late. `tree_disjoint` says how.
    Deterministic for a seed.

    Raises:
        TopologyError: the mesh is not connected, or a window below one.
    """
    if window < 1:
        raise TopologyError(f"disjoint_packing needs a window of one hop or more, but got {window}")
    found = disjoint_forest(_connected_figures(mesh, "disjoint_packing"), window, seed)
    if found is None:
        return None
    forest, weights = found
    check_spanning_trees(forest)
    return _packing(forest, weights)


def _connected_figures(mesh: Mesh, who: str) -> MeshFigures:
    figures = mesh_figures(mesh)
    if not figures.is_connected:
        raise TopologyError(
            f"{who} needs a connected mesh, but {mesh} falls into parts; use largest_part"
        )
    return figures


def _packing(forest: Forest, weights: NDArray[np.float64]) -> TreePacking:
    port = forest.state[:, :, PORT].T
    above = forest.ways[np.arange(port.shape[1]), port, NEIGHBOR]
    return TreePacking(
        roots=np.argmin(port, axis=1).astype(np.int32),
        parents=np.ascontiguousarray(np.where(port >= 0, above, np.int32(-1))),
        weights=weights,
    )
