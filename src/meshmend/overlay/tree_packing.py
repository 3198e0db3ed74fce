"""Tree packings: K spanning trees whose links are used evenly and that are hardly deeper than
they must be.

Each tree carries its weight of the payload, reduced up to the root and broadcast down, all at
once. The busiest link carries `max_load` of the payload in each direction, so bandwidth costs
`max_load x D / B`; the least possible is one over the packing number of the graph (Tutte and
Nash-Williams), which equal weights reach for the right number of trees (`tree_counts`).
Latency costs twice the depth. Knows nothing of bytes, slices or time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import njit
from numpy.typing import NDArray

from meshmend.errors import TopologyError
from meshmend.overlay.tree_exchange import balance
from meshmend.overlay.tree_forest import NEIGHBOR, PORT, Forest, empty_forest, grow, root_all
from meshmend.topology.graph import distances_from, eccentricities
from meshmend.topology.mesh import Mesh

_ATTEMPTS_WORK = 100_000  # ranks x trees tried over all attempts: small packings get more of them
_MAX_ATTEMPTS = 16


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
        return self.parents.shape[1]

    @cached_property
    def hops(self) -> NDArray[np.int32]:
        """Each rank's hops to the root in each tree (trees, ranks)."""
        hops: NDArray[np.int32] = _hops(self.roots, self.parents)
        hops.flags.writeable = False
        return hops

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
    def edges(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The links in use as pairs of ranks (links, 2), smaller first, and their loads."""
        tree, child = np.nonzero(self.parents >= 0)
        parent = self.parents[tree, child].astype(np.int64)
        number = np.minimum(child, parent) * self.n_ranks + np.maximum(child, parent)
        used, which = np.unique(number, return_inverse=True)
        loads = np.bincount(which, weights=self.weights[tree], minlength=len(used))
        pairs = np.stack(np.divmod(used, self.n_ranks), axis=1).astype(np.int32)
        return pairs, loads

    @property
    def edge_loads(self) -> NDArray[np.float64]:
        """The part of the payload that each link in use carries, each way, in order of `edges`."""
        return self.edges[1]

    @property
    def max_load(self) -> float:
        """The part of the payload that the busiest link carries, each way (0: a single chip)."""
        return float(self.edge_loads.max(initial=0.0))

    def link_loads(self, mesh: Mesh) -> NDArray[np.float64]:
        """Return the part of the payload on each of `mesh.links`, each way."""
        pairs, loads = self.edges
        place = {tuple(pair): at for at, pair in enumerate(pairs.tolist())}
        at = [place.get(tuple(link), -1) for link in mesh.links.tolist()]
        return np.append(loads, 0.0)[at]


@njit(cache=True)
def _hops(roots: NDArray[np.int32], parents: NDArray[np.int32]) -> NDArray[np.int32]:
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
    even as that allows; without, the loads come first and the depth is the least that was
    found for them. Trees start as shortest-path trees from central roots and are then evened
    out by exchanges; time grows about as chips x trees, plus chips squared for the radius.

    Raises:
        TopologyError: the mesh is not connected, or a count is out of range.
    """
    if n_trees < 1 or (depth_slack is not None and depth_slack < 0):
        raise TopologyError(
            f"tree_packing needs at least one tree and a slack from 0 on, but got "
            f"{n_trees} trees and slack {depth_slack}"
        )
    if distances_from(mesh, 0).min() < 0:
        raise TopologyError(
            f"tree_packing needs a connected mesh, but {mesh} falls into parts; use largest_part"
        )
    from_center = eccentricities(mesh)
    if depth_slack is not None:
        return _packing(_within(mesh, n_trees, from_center, depth_slack, seed))
    return _packing(_evenest(mesh, n_trees, from_center, seed))


def tree_counts(mesh: Mesh, most: int) -> tuple[int, ...]:
    """Return the numbers of trees up to `most` that may beat every smaller one's best load.

    With K trees of equal weight on a graph of packing number tau the least load is
    ceil(K / tau) / K. Counts by the bound links / (ranks - 1) on tau; a hole at the border may
    push tau below it.
    """
    counts, least = [], math.inf
    for n_trees in range(1, most + 1):
        load = _least_load(mesh, n_trees) / n_trees
        if load < least:
            counts.append(n_trees)
            least = load
    return tuple(counts)


def _least_load(mesh: Mesh, n_trees: int) -> int:
    """Return a number of trees that some link must carry, whatever the trees."""
    if mesh.n_live == 1:
        return 0
    degrees = (mesh.neighbor_ranks >= 0).sum(axis=1)
    n_uses = n_trees * (mesh.n_live - 1)
    return max(-(-n_uses // len(mesh.links)), -(-n_trees // int(degrees.min())))


def _within(
    mesh: Mesh, n_trees: int, from_center: NDArray[np.int32], slack: int, seed: int
) -> Forest:
    """Return the evenest of a few forests within the depth."""
    cap, goal = int(from_center.min()) + slack, _least_load(mesh, n_trees)
    n_attempts = max(1, min(_MAX_ATTEMPTS, _ATTEMPTS_WORK // (mesh.n_live * n_trees)))
    best = None
    for attempt in range(n_attempts):
        forest = _grown(mesh, n_trees, from_center <= cap - attempt % (slack + 1), (seed, attempt))
        load = goal
        while _balanced(forest, load, cap) > 0:
            load += 1
            if best is not None and load >= best.load.max():
                break
        if best is None or forest.load.max(initial=0) < best.load.max():
            best = forest
        if best.load.max(initial=0) <= goal:
            break
    assert best is not None
    return best


def _evenest(mesh: Mesh, n_trees: int, from_center: NDArray[np.int32], seed: int) -> Forest:
    """Return the shallowest forest found among those of the least load found."""
    radius, load = int(from_center.min()), _least_load(mesh, n_trees)
    while True:
        for attempt, slack in enumerate(_slacks(radius)):
            cap = radius + slack
            central = from_center <= cap - slack // 3
            forest = _grown(mesh, n_trees, central, (seed, attempt))
            if not _balanced(forest, load, cap):
                return forest
        load += 1


def _slacks(radius: int) -> Iterator[int]:
    """Yield depths above the radius to try, ever wider, up to twice the radius and more."""
    slack = radius // 16
    while slack <= radius + 8:
        yield slack
        slack += max(1, slack // 4)


def _grown(
    mesh: Mesh, n_trees: int, central: NDArray[np.bool_], seed: tuple[int, int]
) -> Forest:
    """Return shortest-path trees from roots drawn from the central ranks, each about as often."""
    roots = np.random.default_rng(seed).permutation(np.nonzero(central)[0])
    forest = empty_forest(mesh, n_trees, seed[0] + seed[1])
    starts = np.resize(roots, n_trees).astype(np.int32)
    grow(forest.ways, forest.state, forest.load, forest.random, starts)
    return forest


def _balanced(forest: Forest, goal: int, cap: int) -> int:
    """Even out a forest in place and return the load left above the goal."""
    return int(
        balance(forest.ways, forest.ends, forest.state, forest.load, forest.random, goal, cap)
    )


def _packing(forest: Forest) -> TreePacking:
    root_all(forest.ways, forest.state)
    port = forest.state[:, :, PORT].T
    above = forest.ways[np.arange(port.shape[1]), port, NEIGHBOR]
    return TreePacking(
        roots=np.argmin(port, axis=1).astype(np.int32),
        parents=np.where(port >= 0, above, np.int32(-1)),
        weights=np.full(len(port), 1 / len(port)),
    )
