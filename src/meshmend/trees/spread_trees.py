"""Trees with roots all over the mesh, for payloads that take about as long as their hops.

On a torus every chip is about as central as any, so each of many trees has a root of its own, and
all start at once: links are busy from the first moment.

With one root a tree takes twice the diameter, up and down. With **two roots** their sums meet: each
chip goes up to the nearer root, half as deep. Both roots send their sums straight to two **gates**,
which add them up, and every chip gets the total from the nearer gate: one and a half diameters, and
hardly a byte more. Both gates add the same two sums, and a sum of two is the same whichever comes
first. Roots are far apart, and so are the gates, half way between them.

All ways are shortest ways on which few messages are late (`trees/ways.py`). Three or four roots or
gates save another hop or two, but the messages between them load links by as much as that gains.
Knows nothing of bytes and seconds.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from meshmend.kernels import kernel
from meshmend.topology.graph import all_distances
from meshmend.topology.mesh import Mesh
from meshmend.trees.rooted_trees import owner_order
from meshmend.trees.ways import MESSAGES_PER_HOP, Ranks, Ways

FEWEST_RANKS: Final = 6  # of two roots: these, two gates, and somebody to sum for
# Trees that take the fewest hops may be few, and crowd the links between their roots and gates. So
# at least a quarter of all is used, and those of up to two hops more where fewer are late then.
_LEAST_PART, _MOST_MORE_HOPS = 4, 2
_GATES_TRIED: Final = 4  # of the ranks that are soonest reached from both roots


@dataclass(frozen=True, eq=False)
class SpreadTrees:
    """The roots and gates of each tree (trees, roots), and the ways up and down (trees, ranks).

    `up` is to whom a rank sends its sum, -1 at roots, and `down` from whom it gets the total, -1 at
    gates, which are the roots if each tree has one. `up_hops` and `down_hops` count the hops to the
    nearer root and gate, `between` the most from a root to a gate of each tree. `load` is how many
    trees the busiest channel carries, a slow one so much more, and `late` how many messages are
    late at most on the way up, and on the way down together.
    """

    roots: Ranks
    gates: Ranks
    up: Ranks
    up_hops: Ranks
    down: Ranks
    down_hops: Ranks
    between: Ranks
    load: float
    late: float

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
        return max(0, int(self.between.min()) - 1)


def spread_trees(mesh: Mesh, *, n_trees: int, n_roots: int) -> SpreadTrees:
    """Return trees of one root, or of two on `FEWEST_RANKS` or more, of a connected mesh."""
    hops = all_distances(mesh)
    choices = _roots_and_gates(mesh, n_roots)
    found = [_with_ways(mesh, hops, *choice, n_trees) for choice in choices]
    return min(found, key=lambda trees: trees.hops * MESSAGES_PER_HOP - trees.passed + trees.late)


@lru_cache(maxsize=4)
def _roots_and_gates(mesh: Mesh, n_roots: int) -> tuple[tuple[Ranks, Ranks], ...]:
    """Return choices of roots and gates of trees of few hops, scattered over the mesh."""
    hops = all_distances(mesh)
    order = owner_order(mesh.n_live, mesh.n_live)
    if n_roots == 1:
        roots = order[:, None]
        return (_of_few_hops(roots, roots, hops[order].max(axis=1), more=0),)
    roots, gates, n_hops = _scattered(hops, order)
    found = [_of_few_hops(roots, gates, n_hops, more=more) for more in range(_MOST_MORE_HOPS + 1)]
    return tuple({len(each[0]): each for each in found}.values())


def _of_few_hops(roots: Ranks, gates: Ranks, n_hops: Ranks, *, more: int) -> tuple[Ranks, Ranks]:
    most = max(n_hops.min() + more, np.sort(n_hops)[len(n_hops) // _LEAST_PART])
    return roots[n_hops <= most], gates[n_hops <= most]


def _with_ways(mesh: Mesh, hops: Ranks, roots: Ranks, gates: Ranks, n_trees: int) -> SpreadTrees:
    """Return so many trees of these roots and gates, one after another, with their ways."""
    roots, gates = (np.resize(each, (n_trees, each.shape[1])) for each in (roots, gates))
    up_hops, down_hops = hops[roots].min(axis=1), hops[gates].min(axis=1)
    ways = Ways(mesh)
    (up, late_up), (down, late_down) = ways.to(up_hops), ways.back(down_hops)
    between = hops[roots[:, :, None], gates[:, None, :]].max(axis=(1, 2))
    late = late_up + late_down
    return SpreadTrees(roots, gates, up, up_hops, down, down_hops, between, ways.load, late)


@kernel
def _scattered(hops, order):  # type: ignore[no-untyped-def]
    """Return two roots and two gates for each first root, and the hops that these trees take."""
    n_ranks = len(hops)
    roots, gates = np.empty((n_ranks, 2), np.int32), np.empty((n_ranks, 2), np.int32)
    n_hops = np.empty(n_ranks, np.int32)
    uses, has = np.zeros((2, n_ranks), np.int64), np.empty(n_ranks, np.int32)
    for which in range(n_ranks):
        one = order[which]
        has[:] = 0
        has[one] = n_ranks
        other, up, _ = _best(hops, has, hops[one], uses[0], order, which)
        roots[which, 0], roots[which, 1] = one, other
        uses[0, one] += 1
        uses[0, other] += 1
        has[:] = np.maximum(hops[one], hops[other])
        has[one], has[other] = n_ranks, n_ranks
        is_tried, least = has > has.min(), -1
        for _ in range(_GATES_TRIED):
            gate = -1
            for turn in range(n_ranks):
                rank = order[(which + turn) % n_ranks]
                if not is_tried[rank] and (gate < 0 or uses[1, rank] < uses[1, gate]):
                    gate = rank
            if gate < 0:
                break
            is_tried[gate] = True
            soonest, has[gate] = has[gate], n_ranks
            second, down, cost = _best(hops, has, hops[gate], uses[1], order, which)
            has[gate] = soonest
            cost += uses[1, gate] * n_ranks**2
            if least < 0 or cost < least:
                least, n_hops[which] = cost, up + down
                gates[which, 0], gates[which, 1] = gate, second
        uses[1, gates[which, 0]] += 1
        uses[1, gates[which, 1]] += 1
    return roots, gates, n_hops


@kernel
def _best(hops, has, near, uses, order, first):  # type: ignore[no-untyped-def]
    """Return the rank that, having a sum at so many hops, is nearest to all with another.

    `near` are the hops from that one, which has the sum no later. Of ranks from which the last
    hears as soon it is the one of the fewest uses, then of the fewest hops to all. Also returns
    when the last hears, and a cost that orders ranks so.
    """
    n_ranks = len(hops)
    best, best_most, least = -1, 0, 0
    for turn in range(n_ranks):
        rank = order[(first + turn) % n_ranks]
        if has[rank] >= n_ranks:
            continue
        most, total = 0, 0
        for each in range(n_ranks):
            soon = min(near[each], hops[rank, each])
            most = max(most, soon)
            total += soon
        most += has[rank]
        cost = (most * 4 * n_ranks + uses[rank]) * n_ranks**2 + total
        if best < 0 or cost < least:
            best, best_most, least = rank, most, cost
    return best, best_most, least
