"""The schedule `trees`: sum up many spanning trees at once, and broadcast down them.

Each tree carries its own chunk. Up and down overlap: while later slices are still summed
towards the roots, earlier ones already come down, over the other direction of the same links.
Rows are ordered by the hops that must follow them, so that a busy link serves the longest chain
first.
"""

import numpy as np

from meshmend.overlay.tree_counts import MOST_TREES, least_load, tree_counts
from meshmend.overlay.tree_packing import TreePacking, tree_packing
from meshmend.schedule.owner_trees import owner_trees
from meshmend.schedule.ring_builders import NamedRows, halves
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, schedule_of
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh

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
    packing: TreePacking, collective: Collective, *, algorithm: str = "trees"
) -> Schedule:
    """Return the schedule over the trees of a packing; a tree's root owns its chunk."""
    depth, height = packing.hops, packing.heights
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
