"""Schedules over trees, `trees`, `express`, `two-roots`, `colours`: sum up them, broadcast down.

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

**Owner trees** are for collectives in which each rank owns an equal part. Each rank's chunk is
summed up a tree of its own with that rank as its root (`trees/rooted_trees.py`), and comes down the
same tree. Between up and down the owner may update the chunk, at nearly the price of an allreduce.
Chunks are numbered in the order in which they go: owners of neighbours in that order are scattered
over the mesh, so that at any time all links are about equally busy. Rows are in the order in which
links should serve them, for executors that know nothing of delays.

**`two-roots`** is for a mesh with a slit, a long line of failed chips: two meshes that are joined
at the ends of the line. Trees with one root take the way around the slit up, and again down. Here
each side has a root, both roots send their sums to a gate in each gap, past chips without stopping,
and the gates broadcast the total (`trees/two_root_trees.py`). A gate adds one sum to the other, and
a sum of two is the same whichever comes first. So all chips get the same bits.

**Spread trees** have one root each, or two roots and two gates that add both sums
(`trees/spread_trees.py`). Sums go straight from root to gate, past chips without stopping.

**`colours`** sums each colour of a tiling up trees of its own, all at the same time
(`trees/colour_trees.py`). Each colour has an equal part of the payload. A tree also passes chips of
other colours. Such a chip keeps what passes in the part of its payload that belongs to that colour:
what comes first is written there, what comes later is added.

`trees_in` reads trees back out of a table, also of tables that others made.
"""

from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.schedule.ring_builders import NamedRows, halves
from meshmend.schedule.table import (
    COPY,
    REDUCE,
    Collective,
    Colours,
    Phase,
    Rows,
    Schedule,
    cuts_of,
    even_cuts,
    index_dtype,
    schedule_of,
)
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.trees.axis_trees import axis_tree_packing, straight_to
from meshmend.trees.colour_trees import ColourTrees
from meshmend.trees.rooted_trees import rooted_chunks_each, rooted_packing
from meshmend.trees.spread_trees import SpreadTrees
from meshmend.trees.tree_counts import MOST_TREES, least_load, tree_counts
from meshmend.trees.tree_packing import TreePacking, tree_packing
from meshmend.trees.two_root_trees import Carry, Ranks, TwoRootTrees, two_root_trees

# Fewer trees are quicker to plan, so their load may be this many times that of more trees. The
# figure is a choice, not a measurement: 32x32 with a hole gets 19 trees instead of 27.
_WORTH_FEWER_TREES = 1.02

# A row goes before another if it is this many places of chunks per hop farther from the end of its
# chain. Found by trying on 8x8, 16x16 and 32x32: from 4 to 5 times differ by 0.5 %. In a half of an
# allreduce the farthest goes first.
_CHUNKS_PER_HOP: Final = 4.5
_CHUNKS_PER_HOP_OF_A_HALF: Final = 1000.0
_HALVES: Final = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)

_PHASES: Final = {
    Collective.ALLREDUCE: "reduce up, broadcast down",
    Collective.REDUCE_SCATTER: "reduce up",
    Collective.ALL_GATHER: "broadcast down",
    Collective.SHARDED_UPDATE: "reduce up, update, broadcast down",
}

_Ranks = NDArray[np.integer]


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
    return schedule_of(
        halves(collective, reduce_up, broadcast_down),
        algorithm=algorithm,
        collective=collective,
        owners=packing.roots,
        n_ranks=packing.n_ranks,
        cuts=cuts_of(packing.weights),
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


def spread_schedule(trees: SpreadTrees) -> Schedule:
    """Return the allreduce over spread trees.

    If they have two roots, a gate takes one's sum when its own has left, and adds the other's.
    """
    phases: list[NamedRows] = [
        ("reduce up", _tree_rows(trees.up, -trees.up_hops, REDUCE)),
        ("broadcast down", _tree_rows(trees.down, trees.down_hops, COPY)),
    ]
    if trees.roots.shape[1] == 2:
        tree, gate = np.repeat(np.arange(trees.n_trees), 2), trees.gates.reshape(-1)
        one, other = (np.repeat(trees.roots[:, side], 2) for side in (0, 1))
        phases[1:1] = [
            ("carry one sum", Rows(one, gate, tree, tree + 1, COPY)),
            ("meet", Rows(other, gate, tree, tree + 1, REDUCE)),
        ]
    return schedule_of(
        phases,
        algorithm="trees",
        collective=Collective.ALLREDUCE,
        owners=trees.gates[:, 0],
        n_ranks=trees.n_ranks,
        cuts=even_cuts(trees.n_trees),
    )


def express(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the allreduce in which pairs of chips send straight to the end of their line."""
    packing = axis_tree_packing(mesh)
    takers = straight_to(mesh, packing, in_pairs=True)
    return tree_schedule(packing, collective, algorithm="express", takers=takers)


def owner_trees(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the schedule over trees that are made for their owners and load links evenly."""
    both_ways = collective not in _HALVES
    n_trees = rooted_chunks_each(mesh, both_ways=both_ways) * mesh.n_live
    packing = rooted_packing(mesh, n_trees=n_trees, both_ways=both_ways)
    return owner_tree_schedule(packing, collective)


def owner_tree_schedule(packing: TreePacking, collective: Collective) -> Schedule:
    """Return the schedule in which each rank owns an equal part, over a tree for each chunk.

    Weights of the trees count for nothing.
    """
    owners, n_chunks, n_ranks = packing.roots, packing.n_trees, packing.n_ranks
    src, dst, chunk, remaining, n_up = _owner_rows(packing, collective)
    op = np.where(np.arange(len(src)) < n_up, REDUCE, COPY).astype(np.uint8)
    chunks_per_hop = _CHUNKS_PER_HOP_OF_A_HALF if collective in _HALVES else _CHUNKS_PER_HOP
    order = np.argsort(chunk - chunks_per_hop * remaining, kind="stable")
    dtype = index_dtype(n_ranks, n_chunks)
    chunk = chunk[order]
    return Schedule(
        algorithm="trees",
        collective=collective,
        n_ranks=n_ranks,
        cuts=even_cuts(n_chunks),
        owners=owners,
        src=src[order].astype(dtype),
        dst=dst[order].astype(dtype),
        lo=chunk.astype(dtype),
        hi=(chunk + 1).astype(dtype),
        op=op[order],
        phases=(Phase(_PHASES[collective], 0, len(order)),) if len(order) else (),
    )


def _owner_rows(
    trees: TreePacking, collective: Collective
) -> tuple[_Ranks, _Ranks, _Ranks, _Ranks, int]:
    """Return source, destination, chunk and chain of hops of each row, and how many rows go up.

    The chain of a row up leads to the root and, unless it is a reduce-scatter, down to the deepest
    rank.
    """
    chunk, child = np.nonzero(trees.parents >= 0)
    parent = trees.parents[chunk, child]
    up = trees.hops[chunk, child]
    if collective is not Collective.REDUCE_SCATTER:
        up = up + trees.depths[chunk]
    down = trees.heights[chunk, child] + 1
    if collective is Collective.REDUCE_SCATTER:
        return child, parent, chunk, up, len(chunk)
    if collective is Collective.ALL_GATHER:
        return parent, child, chunk, down, 0
    return (
        np.concatenate([child, parent]),
        np.concatenate([parent, child]),
        np.concatenate([chunk, chunk]),
        np.concatenate([up, down]),
        len(chunk),
    )


def two_roots(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the allreduce over trees with two roots.

    Raises:
        UnsupportedError: a mesh without a slit.
    """
    found = two_root_trees(mesh)
    first, second = ([carry for carry in found.carries if carry.side == side] for side in (0, 1))
    return schedule_of(
        [
            ("reduce up", _tree_rows(found.up, -found.up_hops, REDUCE)),
            ("carry one sum", _carry_rows(first, slice(None), COPY)),
            ("carry the other", _carry_rows(second, slice(-1), COPY)),
            ("meet", _carry_rows(second, slice(-1, None), REDUCE)),
            ("broadcast down", _tree_rows(found.down, found.down_hops, COPY)),
        ],
        algorithm="two-roots",
        collective=collective,
        owners=_gates(found),
        n_ranks=mesh.n_live,
        cuts=cuts_of(found.weights),
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


def colour_schedule(trees: ColourTrees) -> Schedule:
    """Return the allreduce of every colour, each over its own trees with an equal part for each.

    Chunks are numbered colour by colour, so that a colour's part of the payload is one piece.
    """
    by_colour = np.argsort(trees.colour_of_tree, kind="stable")
    parents, depth = trees.parents[by_colour], trees.hops[by_colour]
    heights, colours = trees.heights[by_colour], trees.colour_of_tree[by_colour]
    chunk, child = np.nonzero(parents >= 0)
    parent = parents[chunk, child]
    # Up: a parent comes after its children, and of those the one that has its sum first is first.
    up = np.lexsort((heights[chunk, child], -depth[chunk, child]))
    down = np.argsort(-heights[chunk, child], kind="stable")
    takes_part = trees.colour_of_rank[parent] == colours[chunk]
    is_first = np.zeros(len(up), dtype=np.bool_)
    into = chunk[up].astype(np.int64) * parents.shape[1] + parent[up]
    is_first[np.unique(into, return_index=True)[1]] = True
    op = np.where(is_first & ~takes_part[up], COPY, REDUCE).astype(np.uint8)
    n_chunks, n_ranks = parents.shape
    dtype = index_dtype(n_ranks, n_chunks)
    chunks = np.concatenate([chunk[up], chunk[down]])
    phases = (Phase("reduce up", 0, len(up)), Phase("broadcast down", len(up), 2 * len(up)))
    return Schedule(
        algorithm="colours",
        collective=Collective.ALLREDUCE,
        n_ranks=n_ranks,
        cuts=even_cuts(n_chunks),
        owners=trees.roots[by_colour],
        src=np.concatenate([child[up], parent[down]]).astype(dtype),
        dst=np.concatenate([parent[up], child[down]]).astype(dtype),
        lo=chunks.astype(dtype),
        hi=(chunks + 1).astype(dtype),
        op=np.concatenate([op, np.full(len(down), COPY, dtype=np.uint8)]),
        phases=phases if len(up) else (),
        colours=Colours(trees.colour_of_rank.copy(), colours.copy()),
    )


def trees_in(schedule: Schedule) -> NDArray[np.int32] | None:
    """Return the tree of each chunk as parents over ranks, -1 at its root; None if there are none.

    Sums go up a tree and copies come down, so a sum's receiver is the sender's parent. A schedule
    without sums has its trees in its copies. Each chunk needs one row into or out of each rank but
    one. An exchange through scratch buffers has no trees, and those of colours do not span.
    """
    if schedule.has_scratch or schedule.colours is not None:
        return None
    n_chunks, n_ranks = schedule.n_chunks, schedule.n_ranks
    reduces = bool((schedule.op == REDUCE).any())
    rows = np.flatnonzero(schedule.op == (REDUCE if reduces else COPY))
    width = (schedule.hi[rows] - schedule.lo[rows]).astype(np.int64)
    if int(width.sum()) != n_chunks * (n_ranks - 1):
        return None
    row = np.repeat(rows, width)
    first = np.concatenate([[0], np.cumsum(width)[:-1]]) if len(width) else np.zeros(0, np.int64)
    chunk = schedule.lo[row] + np.arange(len(row)) - np.repeat(first, width)
    ends = schedule.src[row], schedule.dst[row]
    child, parent = ends if reduces else ends[::-1]
    parents = np.full((n_chunks, n_ranks), -1, dtype=np.int32)
    parents[chunk, child] = parent
    one_root = (parents < 0).sum(axis=1) == 1
    return parents if one_root.all() and not _has_circle(parents) else None


def _has_circle(parents: NDArray[np.int32]) -> bool:
    """Whether a rank is its own ancestor; each round jumps twice as far towards the root."""
    at = parents
    for _ in range(max(1, parents.shape[1]).bit_length()):
        above = np.take_along_axis(at, np.maximum(at, 0), axis=1)
        at = np.where(at >= 0, above, -1)
    return bool((at >= 0).any())
