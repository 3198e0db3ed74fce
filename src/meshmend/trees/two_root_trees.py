"""Trees with two roots: each side of a slit sums on its own, and the sums meet in the gaps.

If all is summed at one root, data from the middle of one side goes around the slit to the root, and
data for the middle of the other side goes around it again. Here each side has a root of its own.
Both roots send their sums to a **gate** in each gap. A gate adds the two up, and each rank gets the
total from the gate that has it there first.

The payload has two chunks. Each has its own roots and gates, so that hardly a channel carries both
at the same time. Time is counted in hops, as in `tree_disjoint`. Knows nothing of bytes and
seconds.

**The search** moves ranks to other parents until no channel carries too much at one time. A
**layer** is a forest that one chunk goes up, or one that it comes down. Every rank of a layer knows
its port to its parent, its depth and its height, as in `tree_forest`. Time is counted in hops. A
channel that a chunk goes up, from rank v, is needed from v's height on. One that it comes down,
from rank v, is needed from v's depth on: a gate's depth is the time at which it has the total. As
in `tree_disjoint`, a channel is **late** if the last of what it carries has so far to go that it
ends after the goal, or if two chunks go up it, or two come down.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel, plain_kernel
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import distances_from
from meshmend.topology.mesh import Mesh
from meshmend.trees.axis_trees import axis_tree, nearer_neighbors
from meshmend.trees.slit import Side, Slit, likely_slits
from meshmend.trees.tree_disjoint import pick_move
from meshmend.trees.tree_forest import (
    DEPTH,
    HEIGHT,
    NEIGHBOR,
    PORT,
    Ints,
    Words,
    move,
    random_below,
)

Floats = NDArray[np.float64]

# What is carried over a channel from a root to a gate: how long it takes, when it comes, and how
# far it then has to go.
WINDOW: Final = 0
START: Final = 1
REST: Final = 2

# As in `tree_disjoint`, where they were found by trying.
# After so many moves, and an eighth of the ranks, the late channels are listed again: a list takes
# as long as the mesh is large.
_MOVES_PER_LOOK: Final = 64
_RANKS_PER_MOVE: Final = 8
_TEMPERATURE_HOPS: Final = 1.0  # a move that makes channels later by this is made with 1/e
_RANDOM_ONE: Final = 1 << 20  # random numbers below this stand for 0 to 1


@dataclass(frozen=True, eq=False)
class Layers:
    """The forests of all chunks, first those that go up, and all that decides what is late."""

    ways: Ints  # (ranks, ports, 2), as in `tree_forest`
    state: Ints  # (ranks, layers, 3), as in `tree_forest`; changed in place
    side: Ints  # of the slit, for each rank
    windows: Floats  # of each chunk: the time in which its slices pass a channel
    after_up: Floats  # (chunks, sides): hops that follow when a chunk's sum is at its root
    carried: Floats  # (ranks, ports, 3): of what goes from roots to gates
    caps: Ints  # (layers, sides): how deep a rank may be
    goal: float


def separated(layers: Layers, *, n_moves: int, seed: int) -> bool:
    """Move ranks to other parents until no channel is late; return whether that succeeded."""
    random = np.array([(2 * seed + 1) * 0x9E3779B97F4A7C15 % (1 << 64)], dtype=np.uint64)
    times = (layers.windows, layers.after_up, layers.carried, layers.goal)
    arrays = (layers.ways, layers.state, layers.side, *times)
    return bool(_separate(*arrays, layers.caps, random, n_moves))


@kernel
def _separate(
    ways: Ints,
    state: Ints,
    side: Ints,
    windows: Floats,
    after_up: Floats,
    carried: Floats,
    goal: float,
    caps: Ints,
    random: Words,
    n_moves: int,
) -> bool:
    """Simulated annealing at one temperature, as in `tree_disjoint`."""
    stack = np.empty(len(ways), np.int32)
    late = np.empty((ways.shape[0] * ways.shape[1], 2), np.int32)
    times = (windows, after_up, carried, goal)
    n_late, moves_per_look = 0, max(_MOVES_PER_LOOK, len(ways) // _RANKS_PER_MOVE)
    for attempt in range(n_moves):
        if attempt % moves_per_look == 0:
            n_late = _list_late(ways, state, side, times, late)
            if n_late == 0:
                return True
        v, k = pick_move(ways, state, random, late, n_late)
        p, o = state[v, k, PORT], random_below(random, ways.shape[1])
        if p < 0 or o == p or not _may_move(ways, state, side, v, k, o, caps):
            continue
        before = _hops_late_around(ways, state, side, times, v, p, o)
        move(ways, state, v, k, o, stack)
        worse = _hops_late_around(ways, state, side, times, v, p, o) - before
        chance = np.exp(-worse / _TEMPERATURE_HOPS) if worse > 0 else 1.0
        if worse > 0 and random_below(random, _RANDOM_ONE) >= _RANDOM_ONE * chance:
            move(ways, state, v, k, p, stack)
    return bool(_list_late(ways, state, side, times, late) == 0)


@plain_kernel
def _may_move(ways, state, side, v, k, p, caps):  # type: ignore[no-untyped-def]
    """Whether v may hang on its port p in layer k: no circle, not too deep, up on its own side."""
    w = ways[v, p, NEIGHBOR]
    if w < 0 or (k < state.shape[1] // 2 and side[w] != side[v]):
        return False
    if state[w, k, DEPTH] + 1 + state[v, k, HEIGHT] > caps[k, side[v]]:
        return False
    while w != v and state[w, k, PORT] >= 0:
        w = ways[w, state[w, k, PORT], NEIGHBOR]
    return bool(w != v)


@plain_kernel
def _list_late(ways, state, side, times, late):  # type: ignore[no-untyped-def]
    """Fill `late` with rank and port of each late channel, and return how many there are."""
    n_late = 0
    for v in range(ways.shape[0]):
        for p in range(ways.shape[1]):
            if ways[v, p, NEIGHBOR] >= 0 and _hops_late(ways, state, side, times, v, p) > 0:
                late[n_late, 0], late[n_late, 1] = v, p
                n_late += 1
    return n_late


@plain_kernel
def _hops_late_around(ways, state, side, times, v, p, o):  # type: ignore[no-untyped-def]
    """Return by how many hops the four channels behind ports p and o of rank v are late, in sum."""
    in_sum, port = 0.0, p
    for _ in range(2):
        in_sum += _hops_late(ways, state, side, times, v, port)
        in_sum += _hops_late(ways, state, side, times, ways[v, port, NEIGHBOR], port ^ 1)
        port = o
    return in_sum


@plain_kernel
def _hops_late(ways, state, side, times, v, p):  # type: ignore[no-untyped-def]
    """Return by how many hops, at least, channel p of rank v makes its chunks end after the goal.

    It is busy for the sum of the windows, from when the first of them comes. The last then has the
    rest of its way to go. Two chunks up or two down count as late by all that they carry.
    """
    windows, after_up, carried, goal = times
    w, n_chunks = ways[v, p, NEIGHBOR], len(windows)
    first, rest, in_all = 1e9, 1e9, carried[v, p, WINDOW]
    if in_all > 0:
        first, rest = carried[v, p, START], carried[v, p, REST]
    n_up, n_down = 0, 0
    for chunk in range(n_chunks):
        if state[v, chunk, PORT] == p:
            n_up += 1
            in_all += windows[chunk]
            first = min(first, state[v, chunk, HEIGHT])
            rest = min(rest, state[v, chunk, DEPTH] + after_up[chunk, side[v]])
        if state[w, n_chunks + chunk, PORT] == p ^ 1:
            n_down += 1
            in_all += windows[chunk]
            first = min(first, state[v, n_chunks + chunk, DEPTH])
            rest = min(rest, state[w, n_chunks + chunk, HEIGHT] + 1)
    if n_up > 1 or n_down > 1:
        return in_all
    return max(0.0, first + in_all + rest - goal) if in_all > 0 else 0.0


Ranks = NDArray[np.int32]

N_CHUNKS = 2  # as many as a rank in the corner of a mesh has links

# A chunk passes a channel in the time of this many hops, as a part of the radius: 19 hops on 32x32,
# as 1 MB does. Trees that are apart in time for 1 MB are so for shorter payloads too.
_WINDOW_RADII = 0.6
_ATTEMPTS = 3
_SPARE_HOPS = (0, 2, 4)  # by which all may end later than hoped; then late channels are left
_MOVES_PER_RANK = 64  # of an attempt; 32x32 less 1x24 needs 2 for each rank
_ROUNDING_HOPS = 0.01  # windows are fractions, so their sums are off by less than this


@dataclass(frozen=True)
class Carry:
    """The way of one side's sum from its root to a gate: straight from each stop to the next."""

    chunk: int
    side: int
    path: tuple[int, ...]  # every rank on the way
    stops: tuple[int, ...]  # the ranks where a message ends


@dataclass(frozen=True, eq=False)
class TwoRootTrees:
    """For each chunk a forest up to two roots, one down from two gates, and the ways between.

    `up[chunk, rank]` is the rank that a rank sends its sum to, -1 at a root. `down[chunk, rank]` is
    the rank that it gets the total from, -1 at a gate. `up_hops` and `down_hops` order them: a rank
    with more hops up sends first, one with fewer hops down gets the total first.
    """

    up: Ranks
    up_hops: Ranks
    down: Ranks
    down_hops: Ranks
    carries: tuple[Carry, ...]
    weights: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Where a chunk is summed: a root on each side, gates, and when each gate has the total."""

    slit: Slit
    axes: tuple[int, int]  # the axis that its trees go along first, and the other
    roots: tuple[int, int]
    depths: tuple[int, int]  # of the trees of the two sides
    carries: tuple[Carry, ...]
    gate_hops: dict[int, int]

    @cached_property
    def near(self) -> NDArray[np.int64]:
        """The hops until each rank has the total, at best."""
        mesh = self.slit.mesh
        hops = [distances_from(mesh, gate) + at for gate, at in self.gate_hops.items()]
        near: NDArray[np.int64] = np.min(hops, axis=0).astype(np.int64)
        return near

    @property
    def hops(self) -> int:
        """The hops until all ranks have the total, at best."""
        return int(self.near.max())

    @property
    def stops(self) -> int:
        """About how many of these hops end a message."""
        carried = max(len(carry.path) - len(carry.stops) for carry in self.carries)
        return self.hops - carried


@dataclass(frozen=True)
class TwoRootFigures:
    """What decides how long trees with two roots take, known without a search.

    `hops` follow one another, and messages end after `stops` of them. Up to a `window` of so many
    hops, what goes up a channel is out of the way of what comes down.
    """

    hops: int
    stops: int
    window: float


def two_root_window(mesh: Mesh) -> float:
    """Return the time, in hops, in which a chunk is assumed to pass a channel."""
    return max(1.0, _WINDOW_RADII * mesh_figures(mesh).radius)


def two_root_figures(mesh: Mesh) -> TwoRootFigures:
    """Return the figures of `two_root_trees`: those of the chunk with the longest way.

    Raises:
        UnsupportedError: the mesh has no slit.
    """
    return TwoRootFigures(
        hops=_most_hops(_chunks(mesh)),
        stops=_most_stops(_chunks(mesh)),
        window=two_root_window(mesh),
    )


@lru_cache(maxsize=4)
def two_root_trees(mesh: Mesh) -> TwoRootTrees:
    """Return trees with two roots on a connected mesh with a slit.

    They start along one axis, then along the other. Then random moves change them until no channel
    is late. A chunk with a longer way carries less, so that both end together.

    Raises:
        UnsupportedError: the mesh has no slit.
    """
    chunks = _chunks(mesh)
    window = two_root_figures(mesh).window
    hops = np.array([chunk.hops for chunk in chunks])
    windows = np.maximum(window + hops.mean() - hops, window / 2)
    layers = _layers(chunks, windows, hops.mean() + window)
    for spare_hops in _SPARE_HOPS:
        for seed in range(_ATTEMPTS):
            layers = _layers(chunks, windows, hops.mean() + window + spare_hops)
            if separated(layers, n_moves=_MOVES_PER_RANK * mesh.n_live, seed=seed):
                return _trees(chunks, layers)
    return _trees(chunks, layers)


@lru_cache(maxsize=16)
def _chunks(mesh: Mesh) -> tuple[_Chunk, ...]:
    """Return the chunks of the slit that takes the fewest hops, then the fewest stops."""
    tried = [_chunks_of(slit) for slit in likely_slits(mesh)]
    return min(tried, key=lambda chunks: (_most_hops(chunks), _most_stops(chunks)))


def _chunks_of(slit: Slit) -> tuple[_Chunk, ...]:
    chunks = list[_Chunk]()
    for number in range(N_CHUNKS):
        gates = [int(gap[min(number, len(gap) - 1)]) for gap in slit.gaps]
        chunks.append(_chunk(slit, gates, chunks))
    return tuple(chunks)


def _most_hops(chunks: Sequence[_Chunk]) -> int:
    return max(chunk.hops for chunk in chunks)


def _most_stops(chunks: Sequence[_Chunk]) -> int:
    return max(chunk.stops for chunk in chunks)


def _chunk(slit: Slit, gates: list[int], before: Sequence[_Chunk]) -> _Chunk:
    """Return a chunk that meets at these gates and has roots on other lines than those before."""
    mesh, depths, roots = slit.mesh, list[int](), list[int]()
    for number, side in enumerate(slit.sides):
        used = [chunk.roots[number] for chunk in before]
        root, depth = _root(mesh, side, gates, used)
        roots.append(root)
        depths.append(depth)
    ends = {*roots, *gates}
    carries = [
        _carry(slit, len(before), side, gate, roots[side], ends)
        for gate in gates
        for side in (0, 1)
    ]
    times = {
        gate: max(
            depths[carry.side] + len(carry.path) - 1 for carry in carries if carry.path[-1] == gate
        )
        for gate in gates
    }
    between = int(distances_from(mesh, gates[0])[gates[1]])
    needed = {
        gate: at for gate, at in times.items() if at < min(times.values()) + between or not between
    }
    axes = (slit.axis, 1 - slit.axis) if len(before) % 2 == 0 else (1 - slit.axis, slit.axis)
    return _Chunk(
        slit=slit,
        axes=axes,
        roots=(roots[0], roots[1]),
        depths=(depths[0], depths[1]),
        carries=tuple(carry for carry in carries if carry.path[-1] in needed),
        gate_hops=needed,
    )


def _root(mesh: Mesh, side: Side, gates: list[int], used: list[int]) -> tuple[int, int]:
    """Return the root of a side from which sums are soonest at the gates, and its tree's depth.

    Of equal ones it is the farthest from the gates: its tree is shallower, and sums are carried to
    the gates without stopping. It shares no line with the roots in use, if it can.
    """
    depths = mesh_figures(side.mesh).eccentricities
    to_gates = np.sum([distances_from(mesh, gate)[side.ranks] for gate in gates], axis=0)
    places = mesh.coordinates[side.ranks]
    shares_line = np.zeros(len(places), dtype=np.bool_)
    for other in used:
        shares_line |= (places == mesh.coordinates[other]).any(axis=1)
    best = int(np.lexsort((-to_gates, len(gates) * depths + to_gates, shares_line))[0])
    return int(side.ranks[best]), int(depths[best])


def _carry(slit: Slit, chunk: int, side: int, gate: int, root: int, ends: set[int]) -> Carry:
    """Return the way from a root to a gate, first along the slit; it stops where it turns.

    It does not stop at a root or a gate of the chunk, whose sums it would overwrite.
    """
    parents = axis_tree(slit.mesh, root, (slit.axis, 1 - slit.axis))
    path = [gate]
    while path[-1] != root:
        path.append(int(parents[path[-1]]))
    path.reverse()
    at = slit.mesh.coordinates[path]
    turns = [
        path[i]
        for i in range(1, len(path) - 1)
        if (at[i] - at[i - 1] != at[i + 1] - at[i]).any() and path[i] not in ends
    ]
    stops = (root, *turns, gate) if root != gate else (root,)
    return Carry(chunk, side, tuple(path), stops)


def _layers(chunks: tuple[_Chunk, ...], windows: NDArray[np.float64], goal: float) -> Layers:
    """Return the layers of all chunks as shortest-path trees, for the search."""
    slit, n_chunks = chunks[0].slit, len(chunks)
    mesh = slit.mesh
    state = np.zeros((mesh.n_live, 2 * n_chunks, 3), dtype=np.int32)
    caps = np.zeros((2 * n_chunks, 2), dtype=np.int32)
    after_up = np.zeros((n_chunks, 2))
    for number, chunk in enumerate(chunks):
        up, depth = _up_trees(chunk)
        state[:, number] = _state(mesh, up, depth)
        down = nearer_neighbors(mesh, chunk.near, chunk.axes)
        state[:, n_chunks + number] = _state(mesh, down, chunk.near)
        caps[number], caps[n_chunks + number] = chunk.depths, chunk.hops
        after_up[number] = chunk.hops - np.array(chunk.depths)
    side = np.zeros(mesh.n_live, dtype=np.int32)
    side[slit.sides[1].ranks] = 1
    ways = np.full((*mesh.neighbor_ranks.shape, 2), -1, dtype=np.int32)
    ways[..., 0] = mesh.neighbor_ranks
    return Layers(
        ways=ways,
        state=state,
        side=side,
        windows=windows.astype(np.float64),
        after_up=after_up,
        carried=_carried(chunks, windows),
        caps=caps,
        goal=goal + _ROUNDING_HOPS,
    )


def _up_trees(chunk: _Chunk) -> tuple[Ranks, Ranks]:
    """Return the parents and depths of all ranks in the trees of the two sides."""
    mesh = chunk.slit.mesh
    up, depth = np.full((2, mesh.n_live), -1, dtype=np.int32)
    for side, root in zip(chunk.slit.sides, chunk.roots, strict=True):
        here = int(np.searchsorted(side.ranks, root))
        parents = axis_tree(side.mesh, here, chunk.axes)
        up[side.ranks] = np.where(parents >= 0, side.ranks[parents], -1)
        depth[side.ranks] = distances_from(side.mesh, here)
    return up, depth


def _state(mesh: Mesh, parents: Ranks, depth: NDArray[np.integer]) -> Ranks:
    """Return port, depth and height of each rank."""
    port = np.argmax(mesh.neighbor_ranks == parents[:, None], axis=1)
    height = np.zeros(mesh.n_live, dtype=np.int64)
    for rank in np.argsort(-depth, kind="stable").tolist():
        if (parent := parents[rank]) >= 0:
            height[parent] = max(height[parent], height[rank] + 1)
    columns = (np.where(parents >= 0, port, -1), depth, height)
    return np.stack(columns, axis=1).astype(np.int32)


def _carried(chunks: tuple[_Chunk, ...], windows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what each channel carries to gates (ranks, ports, 3), for the search."""
    mesh = chunks[0].slit.mesh
    carried = np.zeros((*mesh.neighbor_ranks.shape, 3))
    carried[..., START:] = np.inf
    for number, chunk in enumerate(chunks):
        for carry in chunk.carries:
            for hop, (source, target) in enumerate(pairwise(carry.path)):
                channel = carried[source, np.argmax(mesh.neighbor_ranks[source] == target)]
                start = chunk.depths[carry.side] + hop
                channel[WINDOW] += windows[number]
                channel[START] = min(channel[START], start)
                channel[REST] = min(channel[REST], chunk.hops - start)
    return carried


def _trees(chunks: tuple[_Chunk, ...], layers: Layers) -> TwoRootTrees:
    port, depth, _ = np.moveaxis(layers.state, 2, 0)
    beside = layers.ways[np.arange(len(port))[:, None], port, 0]
    parents, depth = np.where(port >= 0, beside, -1).T, depth.T
    n_chunks = len(chunks)
    return TwoRootTrees(
        up=parents[:n_chunks],
        up_hops=depth[:n_chunks],
        down=parents[n_chunks:],
        down_hops=depth[n_chunks:],
        carries=tuple(carry for chunk in chunks for carry in chunk.carries),
        weights=layers.windows / layers.windows.sum(),
    )
