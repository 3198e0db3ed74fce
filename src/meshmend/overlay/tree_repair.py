"""A tree packing carried over to a mesh that lost or regained a few chips or links.

What the change left intact of each tree stays; the parts are joined again over links of low
load, and the exchanges of `tree_exchange` even out the rest. Much less work than a new
packing, because nearly every link of nearly every tree is still right.
"""

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import TopologyError
from meshmend.kernels import kernel
from meshmend.overlay.tree_exchange import balanced
from meshmend.overlay.tree_forest import (
    DEPTH,
    LINK,
    NEIGHBOR,
    PORT,
    Forest,
    Ints,
    Words,
    empty_forest,
    grow,
    hang,
    root_at_center,
    walk,
)
from meshmend.overlay.tree_packing import TreePacking, packing_of
from meshmend.overlay.tree_search import least_load
from meshmend.topology.graph import distances_from
from meshmend.topology.mesh import Mesh

_MORE_DEPTH = 2  # hops that a repaired tree may be deeper before it is grown anew
_PATIENCE = 2  # rounds of exchanges that bring nothing before the repair allows more depth
_STEPS = 4  # of as many hops each, before the repair settles for a busier link


def repacked(
    packing: TreePacking, old: Mesh, new: Mesh, *, n_trees: int | None = None, seed: int = 0
) -> TreePacking:
    """Return a packing of the mesh `new` close to the packing of the mesh `old`.

    Keeps all trees or the first `n_trees`: fewer may fit a smaller mesh better. Chips and links
    may have failed or come back; the meshes need the same shape. Equal weights.

    Raises:
        TopologyError: the shapes differ, the packing is not of `old`, `new` is not connected, or
            more trees are asked for than there are.
    """
    n_trees = packing.n_trees if n_trees is None else n_trees
    if not 1 <= n_trees <= packing.n_trees:
        raise TopologyError(
            f"repacked needs from 1 to the packing's {packing.n_trees} trees, but got {n_trees}"
        )
    if old.shape != new.shape or packing.n_ranks != old.n_live:
        raise TopologyError(
            f"repacked needs a packing of {old} and a new mesh of its shape, but got "
            f"{packing.n_ranks} ranks and {new}"
        )
    if distances_from(new, 0).min() < 0:
        raise TopologyError(
            f"repacked needs a connected mesh, but {new} falls into parts; use largest_part"
        )
    forest = empty_forest(new, n_trees, seed)
    forest.state[:, :, PORT] = _kept_ports(packing.parents[:n_trees], old, new)
    child, tree = np.nonzero(forest.state[:, :, PORT] >= 0)
    used = forest.ways[child, forest.state[child, tree, PORT], LINK]
    forest.load[:] = np.bincount(used, minlength=len(forest.load))
    cap = packing.depth + _MORE_DEPTH
    _join_all(forest.ways, forest.ends, forest.state, forest.load, forest.random, cap)
    _even_out(forest, least_load(new, n_trees))
    return packing_of(forest)


def _even_out(forest: Forest, goal: int) -> None:
    """Lower the loads to the least that some modest depth allows."""
    depth = int(forest.state[:, :, DEPTH].max())
    while True:
        for step in range(_STEPS):
            if not balanced(forest, goal, depth + step * _MORE_DEPTH, patience=_PATIENCE):
                return
        goal += 1


def _kept_ports(old_parents: NDArray[np.int32], old: Mesh, new: Mesh) -> NDArray[np.int32]:
    """Return the port to each rank's old parent (ranks, trees), -1 where that is gone."""
    number = np.full((2, *new.shape), -1, dtype=np.int32)  # of each chip, as an old and a new rank
    number[0][tuple(old.coordinates.T)] = np.arange(old.n_live)
    number[1][tuple(new.coordinates.T)] = np.arange(new.n_live)
    old_rank = number[0][tuple(new.coordinates.T)]
    new_rank = np.append(number[1][tuple(old.coordinates.T)], np.int32(-1))
    old_parent = np.where(old_rank >= 0, old_parents[:, old_rank], np.int32(-1))
    parents = new_rank[old_parent]  # -1 picks the -1 appended
    ports = np.full(parents.T.shape, -1, dtype=np.int32)
    for port in range(new.neighbor_ranks.shape[1]):
        there = new.neighbor_ranks[:, port, None]
        ports[(there >= 0) & (there == parents.T)] = port
    return ports


@kernel
def _join_all(ways: Ints, ends: Ints, state: Ints, load: Ints, random: Words, cap: int) -> None:
    """Make one tree of each tree's parts, and grow those anew that come out deeper than `cap`."""
    near, order = np.empty(len(ways), np.int32), np.empty(len(ways), np.int32)
    shallow = 0
    for k in range(state.shape[1]):
        _join(ways, ends, state, load, k, near, order)
        root_at_center(ways, state, k, near, order)
        if _depth(state, k) < _depth(state, shallow):
            shallow = k
    root = 0
    while state[root, shallow, PORT] >= 0:
        root = ways[root, state[root, shallow, PORT], NEIGHBOR]
    for k in range(state.shape[1]):
        if _depth(state, k) > cap:
            for v in range(len(ways)):
                if state[v, k, PORT] >= 0:
                    load[ways[v, state[v, k, PORT], LINK]] -= 1
            grow(ways, state, load, random, k, root, near, order)


@kernel
def _depth(state: Ints, k: int) -> int:
    depth = 0
    for v in range(len(state)):
        depth = max(depth, state[v, k, DEPTH])
    return depth


@kernel
def _join(ways: Ints, ends: Ints, state: Ints, load: Ints, k: int, near: Ints, order: Ints) -> None:
    """Join the parts of tree k to its largest part, each over the least loaded link there is."""
    start, most = 0, 0
    for v in range(len(ways)):
        if state[v, k, PORT] < 0:
            n_part = walk(ways, state, k, v, -1, near, order)
            if n_part > most:
                start, most = v, n_part
    while walk(ways, state, k, start, -1, near, order) < len(ways):
        best, lowest = -1, 1 << 40
        for f in range(len(load)):
            x, y = near[ends[f, 0]], near[ends[f, 1]]
            if (x < 0) != (y < 0):
                key = (load[f] << 20) + max(x, y)
                if key < lowest:
                    best, lowest = f, key
        a = ends[best, 0] if near[ends[best, 0]] < 0 else ends[best, 1]
        top = a
        while state[top, k, PORT] >= 0:
            top = ways[top, state[top, k, PORT], NEIGHBOR]
        for p in range(ways.shape[1]):
            if ways[a, p, LINK] == best:
                hang(ways, state, a, p, top, k)
                break
        load[best] += 1
