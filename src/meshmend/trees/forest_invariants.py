"""The invariants of a forest, which every move keeps, and the check that proves them.

A move changes a few entries of flat arrays and must leave every one of these true:

1. Each tree has one root, which has no port to a parent. Every other rank has a port, and behind
   it lies a neighbour.
2. `DEPTH` is 0 at the root and one more than the parent's elsewhere. With 1 it follows that
   parents lead to the root from everywhere: the tree spans all ranks and has no circle.
3. `HEIGHT` is 0 at a rank without children, and one more than its highest child's elsewhere.
4. `load[e]` is the number of trees in which either end of link e hangs on the other.
5. No tree is deeper than the cap, where there is one.

Takes time linear in ranks x trees, so `tree_packing` proves every forest that it returns.
"""

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import VerificationError
from meshmend.trees.tree_forest import DEPTH, HEIGHT, LINK, NEIGHBOR, PORT, Forest, Ints


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
