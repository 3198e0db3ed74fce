"""K spanning trees of one graph as flat arrays, and the moves that keep each of them a tree.

Does not decide which move is worth making (`tree_balanced` and `tree_disjoint` do), and knows
nothing of meshes beyond their ports. The kernels share a few plain arrays of one packing and change
them in place, because Numba runs that fast:

    array         entry       unit   meaning
    ways[v, p]    [NEIGHBOR]  rank   the rank behind port p of rank v, -1: none
                  [LINK]      link   the link to it, -1: none
                  [SLOWNESS]  256ths how much longer than on a full link a byte takes on it
    state[v, k]   [PORT]      port   of rank v, to its parent in tree k, -1: v is the root
                  [DEPTH]     hops   from v up to the root of tree k
                  [HEIGHT]    hops   from v down to the deepest rank below it
    load[e]                   trees  how many trees use link e

Ports come in pairs, down and up an axis: a link behind port p of one end is behind port `p ^ 1` of
the other.

A move changes a few entries of flat arrays and must leave every one of these true:

1. Each tree has one root, which has no port to a parent. Every other rank has a port, and behind
   it lies a neighbour.
2. `DEPTH` is 0 at the root and one more than the parent's elsewhere. With 1 it follows that
   parents lead to the root from everywhere: the tree spans all ranks and has no circle.
3. `HEIGHT` is 0 at a rank without children, and one more than its highest child's elsewhere.
4. `load[e]` is the number of trees in which either end of link e hangs on the other.
5. No tree is deeper than the cap, where there is one.

`check_forest` proves them in time linear in ranks x trees, so `tree_packing` proves every forest
that it returns.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import VerificationError
from meshmend.kernels import kernel, plain_kernel
from meshmend.topology.graph import breadth_first
from meshmend.topology.mesh import Mesh

NEIGHBOR: Final = 0
LINK: Final = 1
SLOWNESS: Final = 2
PORT: Final = 0
DEPTH: Final = 1
HEIGHT: Final = 2

Ints = NDArray[np.int32]
Words = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Forest:
    """Trees under construction; the arrays change, as the module says."""

    ways: Ints  # (ranks, ports, 3)
    ends: Ints  # (links, 2): the ranks that a link joins
    state: Ints  # (ranks, trees, 3)
    load: Ints  # (links,)
    random: Words  # the state of the random numbers, one word
    speeds: NDArray[np.float64]  # (links,)

    def goals(self, goal: int) -> Ints:
        """Return how many trees each link may carry if one of full speed may carry `goal`."""
        return link_goals(self.speeds, goal)

    @property
    def busiest(self) -> int:
        """The least goal that no link exceeds."""
        return int(np.ceil(self.load / self.speeds - _ROUNDING).max(initial=0))


def link_goals(speeds: NDArray[np.float64], goal: int) -> Ints:
    """Return how many trees links of these speeds may carry if a full link may carry `goal`."""
    return np.floor(goal * speeds + _ROUNDING).astype(np.int32)


_ROUNDING: Final = 1e-9


def empty_forest(mesh: Mesh, n_trees: int, seed: int) -> Forest:
    """Return `n_trees` trees without links, every rank its own root."""
    neighbors = mesh.neighbor_ranks
    here, out = np.nonzero(neighbors > np.arange(mesh.n_live)[:, None])
    there, number = neighbors[here, out], np.arange(len(here), dtype=np.int32)
    ways = np.full((*neighbors.shape, 3), -1, dtype=np.int32)
    ways[..., NEIGHBOR] = neighbors
    ways[..., SLOWNESS] = np.rint(256 / mesh.port_speeds)
    ways[here, out, LINK] = number
    ways[there, out ^ 1, LINK] = number
    state = np.zeros((mesh.n_live, n_trees, 3), dtype=np.int32)
    state[..., PORT] = -1
    return Forest(
        ways=ways,
        ends=np.stack([here, there], axis=1).astype(np.int32),
        state=state,
        load=np.zeros(len(here), dtype=np.int32),
        random=random_state(seed),
        speeds=mesh.link_speeds,
    )


def random_state(seed: int) -> Words:
    """Return the state of random numbers, for `random_below`."""
    return np.array([(2 * seed + 1) * 0x9E3779B97F4A7C15 % (1 << 64)], dtype=np.uint64)


@plain_kernel
def random_below(random: Words, bound: int) -> int:
    """Return a number from 0 to `bound - 1` (xorshift), and step the state."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return int(np.int64(x >> np.uint64(33)) % bound)


@kernel
def grow_all(ways: Ints, state: Ints, load: Ints, random: Words, roots: Ints) -> None:
    """Make each tree a shortest-path tree from its root that favours links of low load.

    A load counts more on a slow link.
    """
    near, order = np.empty(len(ways), np.int32), np.empty(len(ways), np.int32)
    for k in range(len(roots)):
        grow(ways, state, load, random, k, roots[k], near, order)


@plain_kernel
def grow(
    ways: Ints,
    state: Ints,
    load: Ints,
    random: Words,
    k: int,
    root: int,
    near: Ints,
    order: Ints,
) -> None:
    """Make tree k, which has no links yet, a shortest-path tree that favours links of low load."""
    breadth_first(ways[:, :, NEIGHBOR], root, near, order)
    state[root, k, PORT] = -1
    state[root, k, DEPTH] = 0
    for i in range(1, len(order)):
        v = order[i]
        best, lowest = -1, 1 << 30
        for p in range(ways.shape[1]):
            w = ways[v, p, NEIGHBOR]
            if w >= 0 and near[w] < near[v]:
                slowness = ways[v, p, SLOWNESS]
                key = (load[ways[v, p, LINK]] + 1) * slowness + random_below(random, 256)
                if key < lowest:
                    best, lowest = p, key
        state[v, k, PORT] = best
        state[v, k, DEPTH] = near[v]
        load[ways[v, best, LINK]] += 1
    fill_heights(ways, state, k, order)


@plain_kernel
def fill_heights(ways: Ints, state: Ints, k: int, order: Ints) -> None:
    """Set the heights of tree k; `order` holds all ranks, parents before children."""
    for i in range(len(order)):
        state[order[i], k, HEIGHT] = 0
    for i in range(len(order) - 1, 0, -1):
        v = order[i]
        up = ways[v, state[v, k, PORT], NEIGHBOR]
        state[up, k, HEIGHT] = max(state[up, k, HEIGHT], state[v, k, HEIGHT] + 1)


@plain_kernel
def may_move(ways: Ints, state: Ints, v: int, k: int, p: int, cap: int) -> bool:
    """Whether tree k stays a tree no deeper than `cap` if v hangs on its port p instead."""
    w = ways[v, p, NEIGHBOR]
    if w < 0 or state[w, k, DEPTH] + 1 + state[v, k, HEIGHT] > cap:
        return False
    depth = state[v, k, DEPTH]
    while state[w, k, DEPTH] > depth:
        w = ways[w, state[w, k, PORT], NEIGHBOR]
    return bool(w != v)  # otherwise port p leads below v: a circle


@plain_kernel
def move(ways: Ints, state: Ints, v: int, k: int, p: int, stack: Ints) -> None:
    """Hang v, with all below it, on its port p in tree k; `stack` is scratch for all ranks."""
    old, new = ways[v, state[v, k, PORT], NEIGHBOR], ways[v, p, NEIGHBOR]
    state[v, k, PORT] = p
    _sink(ways, state, v, k, state[new, k, DEPTH] + 1 - state[v, k, DEPTH], stack)
    x = old
    while True:
        height = 0
        for q in range(ways.shape[1]):
            y = ways[x, q, NEIGHBOR]
            if y >= 0 and state[y, k, PORT] == q ^ 1:
                height = max(height, state[y, k, HEIGHT] + 1)
        if height == state[x, k, HEIGHT]:
            break
        state[x, k, HEIGHT] = height
        if state[x, k, PORT] < 0:
            break
        x = ways[x, state[x, k, PORT], NEIGHBOR]
    x, height = new, state[v, k, HEIGHT] + 1
    while state[x, k, HEIGHT] < height:
        state[x, k, HEIGHT] = height
        if state[x, k, PORT] < 0:
            break
        x, height = ways[x, state[x, k, PORT], NEIGHBOR], height + 1


@plain_kernel
def _sink(ways: Ints, state: Ints, v: int, k: int, by: int, stack: Ints) -> None:
    """Add `by` to the depth of v and of all below it."""
    stack[0], top = v, int(by != 0)
    while top > 0:
        top -= 1
        x = stack[top]
        state[x, k, DEPTH] += by
        for q in range(ways.shape[1]):
            y = ways[x, q, NEIGHBOR]
            if y >= 0 and state[y, k, PORT] == q ^ 1:
                stack[top] = y
                top += 1


@plain_kernel
def walk(ways: Ints, state: Ints, k: int, start: int, without: int, near: Ints, order: Ints) -> int:
    """Fill `near` with hops from `start` in tree k less one link, return how many are reached.

    `order` begins with the reached ranks, nearest first; `near` is -1 elsewhere.
    """
    near[:] = -1
    near[start] = 0
    order[0] = start
    head, tail = 0, 1
    while head < tail:
        x = order[head]
        head += 1
        for q in range(ways.shape[1]):
            y = ways[x, q, NEIGHBOR]
            if y < 0 or near[y] >= 0 or ways[x, q, LINK] == without:
                continue
            if state[x, k, PORT] == q or state[y, k, PORT] == q ^ 1:
                near[y] = near[x] + 1
                order[tail] = y
                tail += 1
    return tail


@plain_kernel
def hang(ways: Ints, state: Ints, a: int, p: int, top: int, k: int) -> None:
    """Hang the part of tree k below `top` on port p of its rank a, which becomes its highest rank.

    Does not update depths and heights.
    """
    v, out = a, p
    while True:
        up = state[v, k, PORT]
        state[v, k, PORT] = out
        if v == top:
            return
        v, out = ways[v, up, NEIGHBOR], up ^ 1


@plain_kernel
def reroot(ways: Ints, state: Ints, k: int, root: int, near: Ints, order: Ints) -> None:
    """Make a rank the root of tree k; `order` then holds all ranks, parents before children."""
    top = root
    while state[top, k, PORT] >= 0:
        top = ways[top, state[top, k, PORT], NEIGHBOR]
    hang(ways, state, root, -1, top, k)
    walk(ways, state, k, root, -1, near, order)
    for rank in range(len(near)):
        state[rank, k, DEPTH] = near[rank]
    fill_heights(ways, state, k, order)


@plain_kernel
def root_at_center(ways: Ints, state: Ints, k: int, near: Ints, order: Ints) -> None:
    """Root tree k in the middle of its longest path, which makes it as shallow as it can be."""
    walk(ways, state, k, 0, -1, near, order)
    reroot(ways, state, k, order[-1], near, order)
    root = order[-1]
    for _ in range(state[root, k, DEPTH] // 2):
        root = ways[root, state[root, k, PORT], NEIGHBOR]
    reroot(ways, state, k, root, near, order)


@kernel
def root_all(ways: Ints, state: Ints) -> None:
    """Root every tree in the middle of its longest path."""
    near, order = np.empty(len(ways), np.int32), np.empty(len(ways), np.int32)
    for k in range(state.shape[1]):
        root_at_center(ways, state, k, near, order)


def check_forest(forest: Forest, *, cap: int | None = None) -> None:
    """Prove that a forest keeps all its invariants; with a `cap`, that no tree is deeper.

    Raises:
        VerificationError: an invariant is broken; the message says which, and where.
    """
    check_spanning_trees(forest, cap=cap)
    rank, tree = np.nonzero(forest.state[..., PORT] >= 0)
    used = forest.ways[rank, forest.state[rank, tree, PORT], LINK]
    counted = np.bincount(used, minlength=len(forest.load))
    if (wrong := np.flatnonzero(counted != forest.load)).size:
        link = int(wrong[0])
        raise VerificationError(
            f"link {link} between ranks {forest.ends[link].tolist()} needs the load "
            f"{counted[link]}, as many trees as use it, but has {forest.load[link]}"
        )


def check_spanning_trees(forest: Forest, *, cap: int | None = None) -> None:
    """Prove all invariants of a forest but its loads, which channel-disjoint trees do not keep.

    Raises:
        VerificationError: as `check_forest`.
    """
    parents = _checked_parents(forest)
    rank, tree = np.nonzero(parents >= 0)
    above = parents[rank, tree]
    depth, height = forest.state[..., DEPTH], forest.state[..., HEIGHT]
    depths = np.zeros_like(depth)
    depths[rank, tree] = depth[above, tree] + 1
    _check_equal(depth, depths, "depth", "one more than its parent's, 0 at the root")
    heights = np.zeros_like(height)
    np.maximum.at(heights, (above, tree), height[rank, tree] + 1)
    _check_equal(height, heights, "height", "one more than its highest child's, 0 without any")
    if cap is not None and depth.max() > cap:
        where, k = np.unravel_index(int(depth.argmax()), depth.shape)
        raise VerificationError(
            f"a forest capped at depth {cap} needs every rank within it, but rank {where} of "
            f"tree {k} has depth {depth[where, k]}"
        )


def _checked_parents(forest: Forest) -> Ints:
    """Return each rank's parent in each tree (ranks, trees), -1 at the roots."""
    port = forest.state[..., PORT]
    n_roots = np.count_nonzero(port < 0, axis=0)
    if (wrong := np.flatnonzero(n_roots != 1)).size:
        k = int(wrong[0])
        raise VerificationError(f"tree {k} needs one root, but has {n_roots[k]}")
    behind = forest.ways[np.arange(len(port))[:, None], port, NEIGHBOR]
    parents: Ints = np.where(port >= 0, behind, np.int32(-1))
    if (dangling := np.argwhere((port >= 0) & (parents < 0))).size:
        rank, k = dangling[0]
        raise VerificationError(
            f"rank {rank} of tree {k} needs a neighbour behind its port {port[rank, k]}, but "
            f"there is none"
        )
    return parents


def _check_equal(
    found: NDArray[np.int32], needed: NDArray[np.int32], what: str, meaning: str
) -> None:
    if (wrong := np.argwhere(found != needed)).size:
        rank, k = wrong[0]
        raise VerificationError(
            f"rank {rank} of tree {k} needs the {what} {needed[rank, k]}, {meaning}, but has "
            f"{found[rank, k]}"
        )
