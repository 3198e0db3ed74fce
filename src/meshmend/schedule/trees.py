"""The schedule `trees`: sum up many spanning trees at once, and broadcast down them.

Each tree carries its own chunk. Up and down overlap: while later slices are still summed
towards the roots, earlier ones already come down, over the other direction of the same links.
Rows are ordered by the hops that must follow them, so that a busy link serves the longest chain
first.
"""

import numpy as np

from meshmend.kernels import kernel
from meshmend.overlay.tree_counts import MOST_TREES, least_load, tree_counts
from meshmend.overlay.tree_packing import TreePacking, tree_packing
from meshmend.schedule.ring_builders import NamedRows, halves
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, schedule_of
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh

# Fewer trees are quicker to plan, so their load may be this many times that of more trees. The
# figure is a choice, not a measurement: 32x32 with a hole gets 19 trees instead of 27.
_WORTH_FEWER_TREES = 1.02


def trees(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the schedule over a packing that suits long payloads.

    In the halves every rank owns an equal chunk. `auto` picks packings by payload instead.
    """
    packing = tree_packing(mesh, n_trees=usual_tree_count(mesh))
    if collective is Collective.ALLREDUCE:
        return tree_schedule(packing, collective)
    return spread_tree_schedule(packing, collective)


def usual_tree_count(mesh: Mesh) -> int:
    """Return the fewest trees whose least possible load is within 2 % of that of any number."""
    figures = mesh_figures(mesh)
    counts = tree_counts(figures, MOST_TREES)
    loads = {count: least_load(figures, count) / count for count in counts}
    highest_load = _WORTH_FEWER_TREES * min(loads.values())
    return min(count for count, load in loads.items() if load <= highest_load)


def tree_schedule(
    packing: TreePacking, collective: Collective, *, algorithm: str = "trees"
) -> Schedule:
    """Return the schedule over the trees of a packing; a tree's root owns its chunk."""
    depth, height = packing.hops, _heights(packing.parents)
    tree, child = np.nonzero(packing.parents >= 0)
    parent = packing.parents[tree, child]
    # Up: a parent comes after its children. Down: a child comes after its parent.
    up = np.argsort(-depth[tree, child], kind="stable")
    down = np.argsort(-height[tree, child], kind="stable")
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


def spread_tree_schedule(packing: TreePacking, collective: Collective) -> Schedule:
    """Return the schedule in which every rank owns an equal chunk, in rank order.

    Rank r's chunk goes up and down the links of one of the trees, with r as its root. A tree serves
    a number of ranks in proportion to its weight. This is for the halves of an allreduce, between
    which each rank does an equal share of the optimizer's work.
    """
    n_trees, n_ranks = packing.parents.shape
    tree_of_rank = np.searchsorted(
        np.cumsum(packing.weights), (np.arange(n_ranks) + 0.5) / n_ranks
    ).clip(max=n_trees - 1)
    # Neighbouring ranks use different trees, so that their traffic takes different links.
    tree_of_rank = tree_of_rank[np.argsort(np.arange(n_ranks) * 7919 % n_ranks, kind="stable")]
    parents = _rerooted(packing.parents, tree_of_rank)
    weights = np.full(n_ranks, 1 / n_ranks)
    spread = TreePacking(np.arange(n_ranks, dtype=np.int32), parents, weights)
    return tree_schedule(spread, collective)


@kernel
def _heights(parents):  # type: ignore[no-untyped-def]
    """Return for each tree and rank the hops to the farthest rank below it."""
    height = np.zeros(parents.shape, dtype=np.int32)
    for tree in range(parents.shape[0]):
        for rank in range(parents.shape[1]):
            below, here = 0, parents[tree, rank]
            while here >= 0 and height[tree, here] <= below:
                below += 1
                height[tree, here] = below
                here = parents[tree, here]
    return height


@kernel
def _rerooted(parents, tree_of_root):  # type: ignore[no-untyped-def]
    """Return for each rank r the tree `tree_of_root[r]` with r as its root."""
    n_ranks = parents.shape[1]
    result = np.empty((n_ranks, n_ranks), dtype=np.int32)
    for root in range(n_ranks):
        tree = tree_of_root[root]
        result[root] = parents[tree]
        # Reverse the path from the new root to the old one.
        before, here = -1, root
        while here >= 0:
            after = parents[tree, here]
            result[root, here] = before
            before, here = here, after
    return result
