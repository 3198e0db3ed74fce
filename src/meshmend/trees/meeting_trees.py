"""Trees whose sums meet: each half of the chips sums at a root, and both sums meet at two gates.

On a torus a tree takes twice the diameter, up and down. Here each chip goes up to the nearer of two
**roots**, half as deep. Both roots send their sums straight to two **gates**, which add them up,
and every chip gets the total from the nearer gate: one and a half diameters, and hardly a byte
more. Both gates add the same two sums, and a sum of two is the same whichever comes first.

The roots of a tree are far apart, and so are its gates, half way between the roots. Each tree has
others, all over the mesh, so that together they load all links alike. Knows nothing of bytes and
seconds.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel
from meshmend.topology.graph import all_distances
from meshmend.topology.mesh import Mesh
from meshmend.trees.region_trees import shortest_ways
from meshmend.trees.rooted_trees import no_loads_at_hops, owner_order
from meshmend.trees.tree_forest import random_state

Ranks = NDArray[np.int32]

FEWEST_RANKS: Final = 6  # two roots, two gates, and somebody to sum for
# Trees may take so many hops more than the best; but of every so many roots one is used, so that
# links are loaded alike.
_MORE_HOPS: Final = 1
_LEAST_PART: Final = 4
_GATES_TRIED: Final = 4  # of the ranks that are soonest reached from both roots


@dataclass(frozen=True, eq=False)
class MeetingTrees:
    """The roots and gates of each tree (trees, 2), and the ways up and down (trees, ranks).

    `up` is to whom a rank sends its sum, -1 at roots, and `down` from whom it gets the total, -1 at
    gates. `up_hops` and `down_hops` count the hops to the nearer root and gate, `between` the most
    from a root to a gate of each tree. `load` is how many trees the busiest channel carries, a slow
    one so much more.
    """

    roots: Ranks
    gates: Ranks
    up: Ranks
    up_hops: Ranks
    down: Ranks
    down_hops: Ranks
    between: Ranks
    load: float

    @property
    def n_trees(self) -> int:
        return len(self.roots)

    @property
    def n_ranks(self) -> int:
        return len(self.up[0])

    @property
    def hops(self) -> int:
        """The hops that follow one another in the tree that takes the most."""
        return int((self.up_hops.max(axis=1) + self.between + self.down_hops.max(axis=1)).max())

    @property
    def passed(self) -> int:
        """How many of the hops, on the way to a gate, end no message in any tree."""
        return int(self.between.min()) - 1


def meeting_trees(mesh: Mesh, *, n_trees: int) -> MeetingTrees:
    """Return trees whose sums meet on a connected mesh of `FEWEST_RANKS` or more. Deterministic.

    All chunks start at once, so messages of as many hops take different links where they can.
    """
    hops = all_distances(mesh)
    found = _roots_and_gates(mesh)
    roots, gates = (np.resize(each, (n_trees, 2)) for each in found)
    up_hops, down_hops = hops[roots].min(axis=1), hops[gates].min(axis=1)
    neighbors = mesh.neighbor_ranks
    n_ranks, n_ports = neighbors.shape
    outwards = np.arange(n_ranks * n_ports, dtype=np.int32).reshape(n_ranks, n_ports)
    opposite = np.arange(n_ports, dtype=np.int32) ^ 1
    inwards = np.where(neighbors >= 0, neighbors * n_ports + opposite, outwards).astype(np.int32)
    slowness = np.rint(256 / mesh.port_speeds).astype(np.int64)
    loads, random = np.zeros(n_ranks * n_ports, dtype=np.int32), random_state(0)
    ways = list[Ranks]()
    for far, counters in ((up_hops, outwards), (down_hops, inwards)):
        at_hops = no_loads_at_hops(loads.size, most_hops=int(far.max()))
        ways.append(shortest_ways(neighbors, counters, slowness, far, loads, at_hops, random))
    between = hops[roots[:, :, None], gates[:, None, :]].max(axis=(1, 2))
    load = float(np.max(loads / mesh.port_speeds.reshape(-1)))
    return MeetingTrees(roots, gates, ways[0], up_hops, ways[1], down_hops, between, load)


@lru_cache(maxsize=4)
def _roots_and_gates(mesh: Mesh) -> tuple[Ranks, Ranks]:
    """Return roots and gates (trees, 2), one root scattered over the mesh, of trees of few hops."""
    hops = all_distances(mesh)
    order = owner_order(mesh.n_live, mesh.n_live)
    roots = np.stack([order, _other_roots(hops, order)[order]], axis=1)
    gates = _gates(hops, roots, order)
    between = hops[roots[:, :, None], gates[:, None, :]].max(axis=(1, 2))
    n_hops = hops[roots].min(axis=1).max(axis=1) + between + hops[gates].min(axis=1).max(axis=1)
    most = max(n_hops.min() + _MORE_HOPS, np.sort(n_hops)[mesh.n_live // _LEAST_PART])
    return roots[n_hops <= most], gates[n_hops <= most]


@kernel
def _other_roots(hops, order):  # type: ignore[no-untyped-def]
    """Return for each rank the one with which all ranks are nearest to one of both."""
    n_ranks = len(hops)
    others = np.empty(n_ranks, dtype=np.int32)
    for root in range(n_ranks):
        least_most, least_sum = n_ranks, n_ranks * n_ranks
        for turn in range(n_ranks):
            other = order[(root + turn) % n_ranks]
            most, total = 0, 0
            for rank in range(n_ranks):
                near = min(hops[root, rank], hops[other, rank])
                most = max(most, near)
                total += near
                if most > least_most:
                    break
            if other != root and (most, total) < (least_most, least_sum):
                least_most, least_sum, others[root] = most, total, other
    return others


@kernel
def _gates(hops, roots, order):  # type: ignore[no-untyped-def]
    """Return for each pair of roots two other ranks from which all have the total soonest."""
    n_ranks = len(hops)
    gates = np.empty((len(roots), 2), dtype=np.int32)
    for which in range(len(roots)):
        one, other = roots[which, 0], roots[which, 1]
        at = np.maximum(hops[one], hops[other])
        at[one], at[other] = n_ranks, n_ranks
        soonest, n_tried = at.min(), 0
        least_most, least_sum = 2 * n_ranks, n_ranks * n_ranks
        for turn in range(n_ranks):
            gate = order[(one + turn) % n_ranks]
            if at[gate] > soonest or n_tried == _GATES_TRIED:
                continue
            n_tried += 1
            for second in range(n_ranks):
                if at[second] == n_ranks or second == gate:
                    continue
                most, total = 0, 0
                for rank in range(n_ranks):
                    near = min(hops[gate, rank], hops[second, rank])
                    most = max(most, near)
                    total += near
                    if at[second] + most > least_most:
                        break
                if (at[second] + most, total) < (least_most, least_sum):
                    least_most, least_sum = at[second] + most, total
                    gates[which, 0], gates[which, 1] = gate, second
    return gates
