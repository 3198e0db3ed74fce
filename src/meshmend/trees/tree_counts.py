"""How many trees: the load that no number of trees can beat, and the numbers worth trying.

Uses the figures of a mesh only, not its trees.
"""

import math

import numpy as np

from meshmend.topology.figures import MeshFigures
from meshmend.topology.mesh import Mesh
from meshmend.trees.tree_forest import link_goals

# More trees than this lower the least load of no mesh in `benchmarks/trees.py` by 1 % (32x32 with
# a hole: 14/27 = 0.5185 for 27 trees, 0.5173 for any number), and the time to plan grows with them.
MOST_TREES = 32
_FILLED = 0.4  # of each gap; with a half the search finds no such trees on 32x32 at 200 MB


def least_load(figures: MeshFigures, n_trees: int) -> int:
    """Return a number of trees that some link must carry, whatever the trees.

    All trees together use `n_trees x (ranks - 1)` links, and each tree has to reach the rank
    with the fewest links over one of them. Of slow links it is the number that a link of full speed
    carries while they carry as much less as they are slower.
    """
    mesh = figures.mesh
    if mesh.n_live == 1:
        return 0
    n_uses = n_trees * (mesh.n_live - 1)
    least = max(-(-n_uses // len(mesh.links)), -(-n_trees // figures.min_degree))
    if mesh.has_slow:
        least = max(least, math.ceil(n_uses / mesh.link_speeds.sum()))
        least = max(least, math.ceil(n_trees / figures.capacities.min()))
    while mesh.has_slow and not _may_fit(mesh, n_trees, least):
        least += 1
    return least


def _may_fit(mesh: Mesh, n_trees: int, load: int) -> bool:
    """Whether links, and those of each rank, have room for so many trees, a full link for `load`.

    A link has room for whole trees only.
    """
    room = link_goals(mesh.link_speeds, load)
    at_rank = np.zeros(mesh.n_live, dtype=np.int64)
    np.add.at(at_rank, mesh.links, room[:, None])
    return bool(room.sum() >= n_trees * (mesh.n_live - 1) and at_rank.min() >= n_trees)


def pace(figures: MeshFigures, n_trees: int, gap: float) -> int:
    """Return the pace of trees whose leaves fill gaps (`tree_gaps`), as a number of trees.

    A gap is a part of the time, and each channel has two. A rank with few links has all its trees
    on these.
    """
    mesh = figures.mesh
    if mesh.n_live == 1:
        return 0
    on_average = n_trees * (mesh.n_live - 1) / len(mesh.links)
    at_the_pace = on_average * (1 + (1 - _FILLED) * gap) / (1 + gap)
    return max(math.ceil(at_the_pace), -(-n_trees // figures.min_degree))


def tree_counts(figures: MeshFigures, most: int) -> tuple[int, ...]:
    """Return the numbers of trees up to `most` whose least load beats that of fewer trees.

    With K trees of equal weight on a graph of packing number tau the least load is
    ceil(K / tau) / K. `least_load` takes links / (ranks - 1) for tau; a hole at the border may
    push tau below that.
    """
    counts, least = [], math.inf
    for n_trees in range(1, most + 1):
        load = least_load(figures, n_trees) / n_trees
        if load < least:
            counts.append(n_trees)
            least = load
    return tuple(counts)
