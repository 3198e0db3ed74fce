"""The schedules `trees` and `express`: sum up many spanning trees at once, and broadcast down them.

Each tree carries its own chunk. Up and down overlap: while later slices are still summed towards
the roots, earlier ones already come down, over the other direction of the same links. Rows are
ordered by the hops that must follow them, so that a busy link serves the longest chain first.

**`express`** is `trees` whose messages pass chips without stopping. A short payload on a mesh goes
up a tree and down again, and at every chip it waits to be whole and pays the overhead of a message.
Here a tree goes along one axis after another, and the chips of a line send straight to the line's
end: as many hops, but one message for each axis (`trees/axis_trees.py`). There is a tree for each
axis, which starts with that axis.

Messages on a line follow one another one hop apart. Where a message takes longer than that, they
would queue. So every second chip first hands its sum to its neighbour, and they are two hops apart.
Works on every connected mesh, around any holes.
"""

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import UnsupportedError
from meshmend.schedule.owner_trees import owner_trees
from meshmend.schedule.ring_builders import NamedRows, halves
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, schedule_of
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.trees.axis_trees import axis_tree_packing, straight_to
from meshmend.trees.tree_counts import MOST_TREES, least_load, tree_counts
from meshmend.trees.tree_packing import TreePacking, tree_packing

# Fewer trees are quicker to plan, so their load may be this many times that of more trees. The
# figure is a choice, not a measurement: 32x32 with a hole gets 19 trees instead of 27.
_WORTH_FEWER_TREES = 1.02


def trees(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the schedule over a packing that suits long payloads.

    Except in an allreduce every rank owns an equal chunk. `auto` picks packings by payload instead.
    """
    if collective is not Collective.ALLREDUCE:
        return owner_trees(mesh, collective)
    return tree_schedule(tree_packing(mesh, n_trees=usual_tree_count(mesh)), collective)


def usual_tree_count(mesh: Mesh) -> int:
    """Return the fewest trees whose least possible load is within 2 % of that of any number."""
    figures = mesh_figures(mesh)
    counts = tree_counts(figures, MOST_TREES)
    loads = {count: least_load(figures, count) / count for count in counts}
    highest_load = _WORTH_FEWER_TREES * min(loads.values())
    return min(count for count, load in loads.items() if load <= highest_load)


def tree_schedule(
    packing: TreePacking,
    collective: Collective,
    *,
    algorithm: str = "trees",
    takers: NDArray[np.int32] | None = None,
) -> Schedule:
    """Return the schedule over the trees of a packing; a tree's root owns its chunk.

    `takers` (trees, ranks) says to whom of the ranks above it a rank sends its sum, and from whom
    it gets the result; by default that is its parent.
    """
    depth = packing.hops
    tree, child = np.nonzero(packing.parents >= 0)
    parent = (packing.parents if takers is None else takers)[tree, child]
    # Up: a taker comes after all that send to it. Down: what has farthest to go is sent first.
    up = np.argsort(-depth[tree, child], kind="stable")
    height = packing.heights if takers is None else _hops_below(depth, takers)
    way = depth[tree, child] - depth[tree, parent] + height[tree, child]
    down = np.argsort(-way, kind="stable")
    reduce_up: list[NamedRows] = [
        ("reduce up", Rows(child[up], parent[up], tree[up], tree[up] + 1, REDUCE))
    ]
    broadcast_down: list[NamedRows] = [
        ("broadcast down", Rows(parent[down], child[down], tree[down], tree[down] + 1, COPY))
    ]
    cuts = np.concatenate([[0.0], np.cumsum(packing.weights)])
    cuts[-1] = 1.0
    return schedule_of(
        halves(collective, reduce_up, broadcast_down),
        algorithm=algorithm,
        collective=collective,
        owners=packing.roots,
        n_ranks=packing.n_ranks,
        cuts=np.minimum(cuts, 1.0),
    )


def _hops_below(depth: NDArray[np.int32], takers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return for each tree and rank the hops of the longest chain of messages that follow it."""
    below = np.zeros_like(depth)
    for level in range(int(depth.max(initial=0)), 0, -1):
        tree, rank = np.nonzero(depth == level)
        taker = takers[tree, rank]
        hops = level - depth[tree, taker] + below[tree, rank]
        np.maximum.at(below, (tree, taker), hops)
    return below


def express(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the allreduce in which pairs of chips send straight to the end of their line.

    Raises:
        UnsupportedError: another collective.
    """
    if collective is not Collective.ALLREDUCE:
        raise UnsupportedError(f"express is an allreduce, but got the collective {collective}")
    packing = axis_tree_packing(mesh)
    takers = straight_to(mesh, packing, in_pairs=True)
    return tree_schedule(packing, collective, algorithm="express", takers=takers)
