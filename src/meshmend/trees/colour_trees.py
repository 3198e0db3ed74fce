"""Trees of colours: for each colour a few trees that join its chips, over links that all share.

A tree joins the chips of one colour and passes others on its way (a Steiner tree). All trees of all
colours carry equal parts of the payload at the same time, so what counts is how many trees the
busiest link carries, whatever their colours.

**How they are found.** As wires are laid on a chip: each tree is taken out and laid anew, one after
another, along links that are cheap. A link that carries more trees than the goal is dear, and
dearer the longer it does (negotiated congestion: McMurchie and Ebeling, "PathFinder", 1995). A tree
grows from its root: it always reaches next for the chip of its colour that is nearest, by the
prices of the links and, with a `depth_price`, by the hops to the root as well (Takahashi and
Matsuyama 1980, with a term for the depth).

Knows nothing of bytes, slices or time.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import TopologyError
from meshmend.kernels import kernel
from meshmend.topology.graph import distances_from, hops_to_farthest
from meshmend.topology.mesh import Mesh
from meshmend.trees.tree_forest import link_goals
from meshmend.trees.tree_packing import heights_of, hops_to_roots

ROOT: Final = -1
OUTSIDE: Final = -2  # the parent of a rank that a tree does not touch

_ROUNDS: Final = 60  # in which each tree is laid anew once
_PATIENCE: Final = 15  # rounds in which no packing is more even, or as even and shallower
_PRESSURE_PER_ROUND: Final = 0.5  # what a tree too many on a link adds to its price, times rounds
_HISTORY: Final = 0.3  # what it adds for good
_SPREAD: Final = 0.5  # how much dearer a link is that carries as many trees as the goal
_NOISE: Final = 0.02  # so that not all trees take the same one of many equal ways


@dataclass(frozen=True, eq=False)
class ColourTrees:
    """Rooted trees, each with its colour; all trees of a colour touch all ranks of that colour.

    `parents[k, rank]` is the rank's parent in tree k, ROOT at the root, OUTSIDE where the tree does
    not go. `colour_of_rank` is -1 for ranks of no colour. Every colour has equally many trees.
    """

    colour_of_rank: NDArray[np.int32]
    colour_of_tree: NDArray[np.int32]
    parents: NDArray[np.int32]

    def __post_init__(self) -> None:
        counts = np.bincount(self.colour_of_tree, minlength=self.n_colours)
        if len(self.parents) != len(self.colour_of_tree) or len(set(counts.tolist())) != 1:
            raise TopologyError(
                f"ColourTrees need equally many trees of each colour, but got {counts.tolist()}"
            )
        members = self.colour_of_rank == self.colour_of_tree[:, None]
        inside = self.parents != OUTSIDE
        if np.any((self.parents == ROOT).sum(axis=1) != 1) or np.any(self.hops[inside] < 0):
            raise TopologyError("ColourTrees need one root each, and a way to it from every rank")
        if np.any(members & ~inside):
            tree, rank = np.argwhere(members & ~inside)[0]
            raise TopologyError(f"ColourTrees need all of a colour, but tree {tree} misses {rank}")
        for array in (self.colour_of_rank, self.colour_of_tree, self.parents):
            array.flags.writeable = False

    @property
    def n_colours(self) -> int:
        return int(self.colour_of_rank.max()) + 1

    @property
    def n_trees(self) -> int:
        return len(self.parents)

    @cached_property
    def roots(self) -> NDArray[np.int32]:
        roots: NDArray[np.int32] = np.argmax(self.parents == ROOT, axis=1).astype(np.int32)
        return roots

    @cached_property
    def hops(self) -> NDArray[np.int32]:
        """Each rank's hops to the root in each tree, -1 where the tree does not go."""
        hops: NDArray[np.int32] = hops_to_roots(self.roots, np.ascontiguousarray(self.parents))
        return hops

    @cached_property
    def heights(self) -> NDArray[np.int32]:
        """For each tree and rank the hops to the farthest rank below it."""
        heights: NDArray[np.int32] = heights_of(np.ascontiguousarray(self.parents))
        return heights

    @property
    def depth(self) -> int:
        """The most hops from a rank to the root of a tree."""
        return int(self.hops.max(initial=0))

    @cached_property
    def max_trees(self) -> int:
        """How many trees the busiest link carries, each up one way and down the other."""
        tree, child = np.nonzero(self.parents >= 0)
        parent = self.parents[tree, child]
        n_ranks = self.parents.shape[1]
        low, high = np.minimum(child, parent).astype(np.int64), np.maximum(child, parent)
        return int(np.unique(low * n_ranks + high, return_counts=True)[1].max(initial=0))


def colour_trees(
    mesh: Mesh,
    colour_of: NDArray[np.int32],
    *,
    trees_each: int,
    goal: int,
    depth_price: float = 0.0,
    seed: int = 0,
) -> ColourTrees:
    """Return `trees_each` trees for each colour, with at most `goal` of them on a link if found.

    A slow link is to carry so much less as it is slower. Otherwise the busiest link carries as few
    as were found. The higher the `depth_price`, the shallower the trees; at 0 only loads count.
    `colour_of` has each rank's colour, -1 for none. Time grows as trees x chips x rounds.
    Deterministic for a seed.

    Raises:
        TopologyError: the mesh is not connected, or a figure is out of range.
    """
    n_colours = int(colour_of.max()) + 1
    if trees_each < 1 or goal < 1 or depth_price < 0 or not n_colours:
        raise TopologyError(
            f"colour_trees needs a colour, a tree of each, a goal from 1 on and a depth price from "
            f"0 on, but got {n_colours} colours, {trees_each} trees, goal {goal}, price "
            f"{depth_price}"
        )
    members = np.arange(n_colours)[:, None] == colour_of
    random = np.random.default_rng(seed)
    centres = _centres(mesh, members)
    colour_of_tree = np.tile(np.arange(n_colours, dtype=np.int32), trees_each)
    n_trees, link_of = len(colour_of_tree), _link_numbers(mesh)
    parents = np.full((n_trees, mesh.n_live), OUTSIDE, dtype=np.int32)
    load = np.zeros(len(mesh.links), dtype=np.int64)
    speeds = np.ones(len(load))
    speeds[link_of[link_of >= 0]] = mesh.port_speeds[link_of >= 0]
    goals = link_goals(speeds, goal).astype(np.float64)
    history = np.zeros(len(mesh.links))
    best, best_cost, best_round = parents, (np.inf, np.inf, np.inf), 0
    for number in range(_ROUNDS):
        _lay_all(
            mesh.neighbor_ranks,
            link_of,
            members[colour_of_tree],
            np.array([random.choice(centres[colour]) for colour in colour_of_tree]),
            random.permutation(n_trees),
            1 + _NOISE * random.random((n_trees, len(load))),
            history,
            goals,
            (_PRESSURE_PER_ROUND * (number + 1), depth_price),
            load,
            parents,
        )
        too_many = np.maximum(0, load - goals)
        depth = _depth(parents)
        busiest = float((load / speeds).max(initial=0.0))
        cost = (max(float(goal), busiest), float(too_many.sum()), depth)
        if cost < best_cost:
            best, best_cost, best_round = parents.copy(), cost, number
        if number - best_round > _PATIENCE:
            break
        history += _HISTORY * too_many
    return ColourTrees(colour_of.astype(np.int32), colour_of_tree, best)


def _depth(parents: NDArray[np.int32]) -> float:
    """Return the most hops to a root."""
    roots = np.argmax(parents == ROOT, axis=1).astype(np.int32)
    return float(hops_to_roots(roots, parents).max(initial=0))


def _link_numbers(mesh: Mesh) -> NDArray[np.int32]:
    """Return the number of the link behind each port of each rank, -1 where there is none."""
    here, port = np.nonzero(mesh.neighbor_ranks >= 0)
    there = mesh.neighbor_ranks[here, port]
    low, high = np.minimum(here, there).astype(np.int64), np.maximum(here, there)
    numbers = np.full(mesh.neighbor_ranks.shape, -1, dtype=np.int32)
    numbers[here, port] = np.unique(low * mesh.n_live + high, return_inverse=True)[1]
    return numbers


def _centres(mesh: Mesh, members: NDArray[np.bool_]) -> list[NDArray[np.intp]]:
    """Return for each colour the ranks from which its farthest rank is nearest, or one hop more."""
    if distances_from(mesh, 0).min() < 0:
        raise TopologyError(f"colour_trees needs a connected mesh, but {mesh} falls into parts")
    farthest = hops_to_farthest(mesh, [np.flatnonzero(ranks) for ranks in members])
    return [np.flatnonzero(most <= most.min() + 1) for most in farthest.T]


@kernel
def _lay_all(  # type: ignore[no-untyped-def]
    neighbors, link_of, wanted, roots, order, noise, history, goals, prices, load, parents
):
    """Take each tree out and lay it anew, in order; `load` counts the trees on each link."""
    pressure, depth_price = prices
    n_ranks = neighbors.shape[0]
    price = np.empty(len(load))
    key = np.empty(n_ranks)
    via = np.empty(n_ranks, dtype=np.int32)
    depth = np.empty(n_ranks, dtype=np.int32)
    heap = np.empty(n_ranks, dtype=np.int32)
    where = np.empty(n_ranks, dtype=np.int32)
    for tree in order:
        parent = parents[tree]
        _count_links(neighbors, link_of, parent, load, -1)
        for link in range(len(load)):
            too_many = max(0.0, load[link] + 1 - goals[link])
            price[link] = (1 + history[link]) * (1 + pressure * too_many) * noise[tree, link]
            price[link] += _SPREAD * load[link] / max(1.0, goals[link])
        _grow(
            neighbors, link_of, price, wanted[tree], roots[tree], depth_price, parent, depth,
            (key, via, heap, where),
        )  # fmt: skip
        _cut_stem(neighbors, wanted[tree], roots[tree], parent)
        _count_links(neighbors, link_of, parent, load, 1)


@kernel
def _count_links(neighbors, link_of, parent, load, change):  # type: ignore[no-untyped-def]
    for rank in range(len(parent)):
        if parent[rank] >= 0:
            for port in range(neighbors.shape[1]):
                if neighbors[rank, port] == parent[rank]:
                    load[link_of[rank, port]] += change
                    break


@kernel
def _grow(neighbors, link_of, price, wanted, root, depth_price, parent, depth, scratch):  # type: ignore[no-untyped-def]
    """Write the parents of a tree that joins the wanted ranks to the root.

    Dijkstra's search from the whole tree at once. When it reaches a wanted rank, the way there
    becomes part of the tree, and the search goes on from it at no cost but that of its depth.
    """
    key, via, heap, where = scratch
    key[:] = np.inf
    where[:] = -1
    parent[:] = OUTSIDE
    parent[root], depth[root], key[root] = ROOT, 0, 0.0
    n_left = -np.int64(wanted[root])
    for rank in range(len(wanted)):
        n_left += wanted[rank]
    size = _push(heap, where, key, 0, root)
    while n_left > 0:
        here = heap[0]
        size = _pop(heap, where, key, size)
        if wanted[here] and parent[here] == OUTSIDE:
            n_hops, at = 0, here
            while parent[at] == OUTSIDE:
                n_hops, at = n_hops + 1, via[at]
            n_hops, at = depth[at] + n_hops, here
            while parent[at] == OUTSIDE:
                parent[at], depth[at] = via[at], n_hops
                key[at] = depth_price * n_hops
                size = _push(heap, where, key, size, at)
                n_left -= wanted[at]
                n_hops, at = n_hops - 1, via[at]
            continue
        for port in range(neighbors.shape[1]):
            there = neighbors[here, port]
            if there >= 0 and parent[there] == OUTSIDE:
                cost = key[here] + price[link_of[here, port]] + depth_price
                if cost < key[there]:
                    key[there], via[there] = cost, here
                    size = _push(heap, where, key, size, there)


@kernel
def _cut_stem(neighbors, wanted, root, parent):  # type: ignore[no-untyped-def]
    """Move the root along until it is wanted, or has two children: nothing needs the way to it."""
    while not wanted[root]:
        n_children, child = 0, -1
        for port in range(neighbors.shape[1]):
            there = neighbors[root, port]
            if there >= 0 and parent[there] == root:
                n_children, child = n_children + 1, there
        if n_children > 1:
            return
        parent[root], parent[child] = OUTSIDE, ROOT
        root = child


@kernel
def _push(heap, where, key, size, item):  # type: ignore[no-untyped-def]
    """Add an item to a binary heap, or move it up after its key fell; return the heap's size."""
    at = where[item]
    if at < 0:
        at, size = size, size + 1
    while at > 0 and key[heap[(at - 1) // 2]] > key[item]:
        above = heap[(at - 1) // 2]
        heap[at], where[above] = above, at
        at = (at - 1) // 2
    heap[at], where[item] = item, at
    return size


@kernel
def _pop(heap, where, key, size):  # type: ignore[no-untyped-def]
    """Take the item with the least key out of a heap; return the heap's size."""
    where[heap[0]] = -1
    size -= 1
    if size == 0:
        return size
    item, at = heap[size], 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and key[heap[below + 1]] < key[heap[below]]:
            below += 1
        if key[heap[below]] >= key[item]:
            break
        heap[at], where[heap[below]] = heap[below], at
        at = below
    heap[at], where[item] = item, at
    return size
