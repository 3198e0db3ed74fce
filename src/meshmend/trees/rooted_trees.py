"""A tree from every owner, for collectives whose ranks own chunks: no channel carries too much.

In an all-gather every rank receives each chunk once, so what comes in over the links of a rank is
given; only how it is divided between them is not. The busiest channels are those of the rank with
the fewest links, and no tree can help that. So the trees start as shortest ways from the owners,
and then ranks change their parents until no channel carries more than its part there, and a slow
one so much less. Other ranks have more links than they need, which is why this soon succeeds. A
reduce-scatter is the same backwards.

In a sharded update chunks go up their trees and down again, so each direction of a link carries
what both directions of its trees are: there ranks change their parents until no *link* does.

A **balanced packing** (`tree_balanced`) divides the load of both directions together too. Around
holes it loads one direction by up to half more, and hung from an owner its trees are deeper.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel, plain_kernel
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import breadth_first
from meshmend.topology.mesh import Mesh
from meshmend.topology.packing_number import packing_number
from meshmend.trees.tree_counts import least_load
from meshmend.trees.tree_forest import link_goals, random_below, random_state
from meshmend.trees.tree_packing import TreePacking

Ranks = NDArray[np.int32]

_SCATTERED: Final = 0  # the seed of the order of owners
# On few ranks one chunk each is too coarse to divide: 13 chunks for two links make 7 and 6. Some
# link often carries one more than it must. A chunk more must pay by half a percent.
_MOST_CHUNKS: Final = 256
_MOST_CHUNKS_EACH: Final = 4
_WORTH_A_CHUNK: Final = 1.005
SLACK_HOPS: Final = 2  # that a way may usually have more than the shortest
SLACK_HOPS_BOTH_WAYS: Final = 64  # where few ways become longer than they must
_MOVES_PER_RANK_AND_TREE: Final = 12
_LEAST_MOVES: Final = 200_000  # of small meshes, which have less room to move: 10 ms
_MOST_MOVES: Final = 1_000_000  # 0.2 s on 32x32; with twelve times as many loads fall by 1 %
_MORE: Final = 1.03  # of the load, if the search for a smaller one fails
_MOST_GOALS: Final = 6
_SLACKS: Final = (0, 1, 2, 4, 8, 16, 32)  # to try one after another before the whole slack
_ROUNDING: Final = 1e-9


def owner_order(n_ranks: int, n_trees: int) -> Ranks:
    """Return the owner of each tree: neighbours in this order are scattered over the mesh."""
    rng = np.random.default_rng(_SCATTERED)
    n_rounds = -(-n_trees // n_ranks)
    owners = np.concatenate([rng.permutation(n_ranks) for _ in range(n_rounds)])
    return owners[:n_trees].astype(np.int32)


def chunk_counts(n_ranks: int) -> range:
    """Return how many chunks each rank may own."""
    return range(1, max(1, min(_MOST_CHUNKS_EACH, _MOST_CHUNKS // n_ranks)) + 1)


def rooted_chunks_each(mesh: Mesh, *, both_ways: bool) -> int:
    """Return how many chunks each rank should own, so that links can be loaded alike."""

    def cost(each: int) -> float:
        most_on_a_link = _least_goal(mesh, each * mesh.n_live, both_ways=both_ways) + 1
        return most_on_a_link / each * _WORTH_A_CHUNK**each

    return min(chunk_counts(mesh.n_live), key=cost)


def _least_goal(mesh: Mesh, n_trees: int, *, both_ways: bool) -> int:
    """Return how many chunks a channel of full speed must carry, wherever the trees go.

    For one way every rank owns equally many.
    """
    if both_ways:
        least = math.ceil(n_trees / packing_number(mesh).upper - _ROUNDING)
        return max(least, least_load(mesh_figures(mesh), n_trees))
    n_others = n_trees // mesh.n_live * (mesh.n_live - 1)
    goal = -(-n_others // max(1, mesh_figures(mesh).min_degree))
    is_live = mesh.neighbor_ranks >= 0
    if mesh.has_slow:
        goal = max(goal, math.ceil(n_others / mesh_figures(mesh).capacities.min()))
    while mesh.has_slow and np.any((is_live * _goals(mesh, goal)).sum(axis=1) < n_others):
        goal += 1
    return goal


def _goals(mesh: Mesh, goal: int) -> NDArray[np.int32]:
    """Return how many chunks each channel may carry (ranks, ports)."""
    return link_goals(mesh.port_speeds, goal)


def rooted_packing(
    mesh: Mesh,
    *,
    n_trees: int,
    both_ways: bool,
    slack: int | None = None,
) -> TreePacking:
    """Return trees from owners all over the mesh, with as little as can be on any channel.

    With `both_ways` it is as little as can be on any link, up and down together, as far as ways
    `slack` hops longer than the shortest allow. Deterministic. Time grows with chunks x ranks.
    """
    if slack is None:
        slack = SLACK_HOPS_BOTH_WAYS if both_ways else SLACK_HOPS
    owners = owner_order(mesh.n_live, n_trees)
    goal = _least_goal(mesh, n_trees, both_ways=both_ways)
    parents = np.full((len(owners), mesh.n_live), -1, dtype=np.int32)
    n_moves = min(_MOST_MOVES, max(_LEAST_MOVES, _MOVES_PER_RANK_AND_TREE * parents.size))
    random = random_state(0)
    counters = _counters(mesh.neighbor_ranks, both_ways=both_ways)
    slowness = np.rint(256 / mesh.port_speeds).astype(np.int64)
    ports, loads, hops = _grown(mesh.neighbor_ranks, counters, slowness, owners, random)
    ways, farthest = hops.copy(), int(hops.max(initial=0))
    if both_ways:
        # Few ways need to be long, and most of those not by much.
        slacks = dict.fromkeys((*_SLACKS, slack))
        tries = [(goal, 0, each) for each in slacks if each <= slack]
        n_moves //= len(tries)
    else:
        # Where short ways do not suffice, as in a corridor beside a hole, they may be as long as
        # those to the farthest rank, then longer.
        tries = [(goal, longest, slack) for longest in (0, farthest, 2 * farthest)]
        for _ in range(_MOST_GOALS - 1):
            goal = max(goal + 1, round(_MORE * goal))
            tries.append((goal, 2 * farthest, slack))
    for goal, longest, each in tries:
        limits = (_goals(mesh, goal).ravel(), hops, longest, each)
        if not _evened(mesh.neighbor_ranks, counters, ports, loads, ways, *limits, n_moves, random):
            break
    chunk, rank = np.nonzero(ports >= 0)
    parents[chunk, rank] = mesh.neighbor_ranks[rank, ports[chunk, rank]]
    return TreePacking(owners, parents, np.full(len(owners), 1 / len(owners)))


def _counters(neighbors: Ranks, *, both_ways: bool) -> Ranks:
    """Return where the load behind each port is counted; with `both_ways` both ends count alike."""
    n_ranks, n_ports = neighbors.shape
    own = np.arange(n_ranks * n_ports, dtype=np.int32).reshape(n_ranks, n_ports)
    if not both_ways:
        return own
    opposite = np.arange(n_ports, dtype=np.int32) ^ 1
    beside: Ranks = np.minimum(own, neighbors * n_ports + opposite)
    return np.where(neighbors >= 0, beside, own)


@kernel
def _grown(neighbors, counters, slowness, owners, random):  # type: ignore[no-untyped-def]
    """Return shortest ways: each rank's port to its parent in each tree, loads, and hops."""
    n_chunks, (n_ranks, n_ports) = len(owners), neighbors.shape
    ports = np.full((n_chunks, n_ranks), -1, dtype=np.int32)
    loads = np.zeros(n_ranks * n_ports, dtype=np.int32)
    hops = np.empty((n_chunks, n_ranks), dtype=np.int32)
    order = np.empty(n_ranks, dtype=np.int32)
    for chunk in range(n_chunks):
        breadth_first(neighbors, owners[chunk], hops[chunk], order)
        for rank in order[1:]:
            ports[chunk, rank] = least_loaded_port(
                neighbors, counters, slowness, hops[chunk], loads, random, rank
            )
    return ports, loads, hops


@kernel
def least_loaded_port(neighbors, counters, slowness, hops, loads, random, rank):  # type: ignore[no-untyped-def]
    """Return the port of a rank to a neighbour with fewer hops, and count it.

    Of several it is the one whose channel has carried the least, a slow one counts more.
    """
    n_ports, far = neighbors.shape[1], hops[rank]
    best, least = -1, 0
    first = random_below(random, n_ports)
    for turn in range(n_ports):
        port = (first + turn) % n_ports
        beside = neighbors[rank, port]
        if beside < 0 or hops[beside] >= far:
            continue
        load = (loads[counters[rank, port]] + 1) * slowness[rank, port]
        if best < 0 or load < least:
            best, least = port, load
    loads[counters[rank, best]] += 1
    return best


@kernel
def _evened(neighbors, counters, ports, loads, ways, goals, hops, longest, slack, n_moves, random):  # type: ignore[no-untyped-def]
    """Move ranks to other parents until no channel carries more than its goal; else return True.

    Half of the tries begin at a channel that carries too much, the others anywhere: they make room
    where the new parent hangs below the rank itself. `hops` are those of the shortest ways, `ways`
    those of the trees. No way gets longer than the shortest and a slack, or than `longest`. The
    search ends early if a quarter of its tries gain nothing.
    """
    n_chunks, (n_ranks, n_ports) = len(ports), neighbors.shape
    crowded = np.empty((n_ranks * n_ports, 2), dtype=np.int32)
    below, far = np.empty(n_ranks, dtype=np.int32), np.empty(n_ranks, dtype=np.int32)
    n_crowded, least, gained_at = 0, np.int64(1) << 60, 0
    for attempt in range(n_moves):
        if attempt % 256 == 0:
            n_crowded, excess = 0, np.int64(0)
            for rank in range(n_ranks):
                for port in range(n_ports):
                    counter = counters[rank, port]
                    if loads[counter] > goals[counter]:
                        crowded[n_crowded, 0], crowded[n_crowded, 1] = rank, port
                        n_crowded += 1
                        excess += loads[counter] - goals[counter]
            if n_crowded == 0:
                return False
            if excess < least:
                least, gained_at = excess, attempt
            if attempt - gained_at > n_moves // 4:
                return True
        chunk = random_below(random, n_chunks)
        rank = random_below(random, n_ranks)
        if attempt % 2:
            which = random_below(random, n_crowded)
            rank = crowded[which, 0]
            for _ in range(n_chunks):
                if ports[chunk, rank] == crowded[which, 1]:
                    break
                chunk = (chunk + 1) % n_chunks
        old, new = ports[chunk, rank], random_below(random, n_ports)
        if old < 0:
            continue
        before, top = counters[rank, old], rank
        both_ways = before == counters[neighbors[rank, old], old ^ 1]
        if both_ways and slack > 0 and attempt % 4 == 3:
            # Both directions count alike: any rank that hangs from this one may take its place.
            top = below[random_below(random, _fill_below(neighbors, ports[chunk], rank, below))]
        parent = neighbors[top, new]
        if parent < 0 or (top == rank and new == old):
            continue
        if both_ways and attempt % 2 == 0 and ways[chunk, parent] >= ways[chunk, rank]:
            continue
        counter = counters[top, new]
        is_room = loads[counter] < goals[counter]
        is_relief = loads[before] > goals[before] and loads[counter] + 1 < loads[before]
        if not (is_room or is_relief):
            continue
        limits = (hops[chunk], longest, slack)
        if _is_hung(neighbors, ports[chunk], ways[chunk], limits, rank, top, new, below, far):
            loads[before] -= 1
            loads[counter] += 1
    return bool(np.any(loads > goals))


@plain_kernel
def _fill_below(neighbors, ports, rank, below):  # type: ignore[no-untyped-def]
    """Fill `below` with a rank and all that hangs from it in a tree; return how many these are."""
    below[0], n_below, seen = rank, 1, 0
    while seen < n_below:
        here = below[seen]
        seen += 1
        for port in range(neighbors.shape[1]):
            beside = neighbors[here, port]
            if beside >= 0 and ports[beside] == port ^ 1:
                below[n_below] = beside
                n_below += 1
    return n_below


@plain_kernel
def _is_hung(neighbors, ports, ways, limits, rank, top, new, below, far):  # type: ignore[no-untyped-def]
    """Hang a rank, with all below it, on port `new` of `top`, which is one of these.

    Return False, and change nothing, if that leads below the rank or makes a way too long.
    """
    hops, longest, slack = limits
    n_ports, waits = neighbors.shape[1], len(ports)
    far[:] = -1
    for each in range(_fill_below(neighbors, ports, rank, below)):
        far[below[each]] = waits
    if far[neighbors[top, new]] >= 0:
        return False
    far[top] = ways[neighbors[top, new]] + 1
    below[0], n_below, seen = top, 1, 0
    while seen < n_below:
        here = below[seen]
        seen += 1
        if far[here] > max(longest, hops[here] + slack, ways[here]):
            return False
        for port in range(n_ports):
            beside = neighbors[here, port]
            if beside < 0 or far[beside] != waits:
                continue
            if ports[beside] == port ^ 1 or ports[here] == port:
                far[beside] = far[here] + 1
                below[n_below] = beside
                n_below += 1
    for each in range(n_below):
        ways[below[each]] = far[below[each]]
    here, out = top, new
    while True:
        up = ports[here]
        ports[here] = out
        if here == rank:
            return True
        here, out = neighbors[here, up], up ^ 1
