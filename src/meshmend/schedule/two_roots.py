"""The schedule `two-roots`: each side of a slit sums on its own, and the sums meet in the gaps.

A mesh with a slit, a long line of failed chips, is two meshes that are joined at the ends of the
line. Trees with one root take the way around the slit up, and again down. Here each side has a
root, both roots send their sums to a gate in each gap, past chips without stopping, and the gates
broadcast the total (`trees/two_root_trees.py`). A gate adds one sum to the other, and a sum of
two is the same whichever comes first. So all chips get the same bits.
"""

from itertools import pairwise

import numpy as np

from meshmend.errors import UnsupportedError
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, schedule_of
from meshmend.topology.mesh import Mesh
from meshmend.trees.two_root_trees import Carry, Ranks, TwoRootTrees, two_root_trees


def two_roots(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the allreduce over trees with two roots.

    Raises:
        UnsupportedError: another collective, or a mesh without a slit.
    """
    if collective is not Collective.ALLREDUCE:
        raise UnsupportedError(f"two-roots is an allreduce, but got the collective {collective}")
    trees = two_root_trees(mesh)
    first, second = ([carry for carry in trees.carries if carry.side == side] for side in (0, 1))
    cuts = np.concatenate([[0.0], np.cumsum(trees.weights)])
    cuts[-1] = 1.0
    return schedule_of(
        [
            ("reduce up", _tree_rows(trees.up, -trees.up_hops, REDUCE)),
            ("carry one sum", _carry_rows(first, slice(None), COPY)),
            ("carry the other", _carry_rows(second, slice(-1), COPY)),
            ("meet", _carry_rows(second, slice(-1, None), REDUCE)),
            ("broadcast down", _tree_rows(trees.down, trees.down_hops, COPY)),
        ],
        algorithm="two-roots",
        collective=collective,
        owners=_gates(trees),
        n_ranks=mesh.n_live,
        cuts=np.minimum(cuts, 1.0),
    )


def _gates(trees: TwoRootTrees) -> Ranks:
    """Return a rank of each chunk that has its total before it is broadcast."""
    gates: Ranks = np.argmin(trees.down, axis=1).astype(np.int32)
    return gates


def _tree_rows(parents: Ranks, hops: Ranks, op: int) -> Rows:
    """Return the rows of a forest for each chunk, those with fewer `hops` first."""
    chunk, rank = np.nonzero(parents >= 0)
    order = np.argsort(hops[chunk, rank], kind="stable")
    chunk, rank = chunk[order], rank[order]
    parent = parents[chunk, rank]
    src, dst = (rank, parent) if op == REDUCE else (parent, rank)
    return Rows(src, dst, chunk, chunk + 1, op)


def _carry_rows(carries: list[Carry], which: slice, op: int) -> Rows:
    """Return the rows between some of the stops of each way."""
    legs = [
        (source, target, carry.chunk)
        for carry in carries
        for source, target in list(pairwise(carry.stops))[which]
    ]
    src, dst, chunk = np.array(legs, dtype=np.int32).reshape(-1, 3).T
    return Rows(src, dst, chunk, chunk + 1, op)
