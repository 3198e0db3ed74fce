"""Trees with two roots: each side of a slit sums on its own, and the sums meet in the gaps.

If all is summed at one root, data from the middle of one side goes around the slit to the root, and
data for the middle of the other side goes around it again. Here each side has a root of its own.
Both roots send their sums to a **gate** in each gap. A gate adds the two up, and each rank gets the
total from the gate that has it there first.

The payload has two chunks. Each has its own roots and gates, so that hardly a channel carries both
at the same time. Time is counted in hops. `separation` moves ranks to other parents until no
channel carries too much at one time: a layer there is a forest that one chunk goes up, or one that
it comes down. The depth of a gate is the time at which it has the total. Knows nothing of bytes and
seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import distances_from
from meshmend.topology.mesh import Mesh
from meshmend.trees.axis_trees import axis_tree, nearer_neighbors
from meshmend.trees.separation import REST, START, WINDOW, Layers, separated
from meshmend.trees.slit import Side, Slit, likely_slits
from meshmend.trees.tree_forest import NEIGHBOR, random_state

Ranks = NDArray[np.int32]

N_CHUNKS = 2  # as many as a rank in the corner of a mesh has links

# A chunk passes a channel in the time of this many hops, as a part of the radius: 19 hops on 32x32,
# as 1 MB does. Trees that are apart in time for 1 MB are so for shorter payloads too.
_WINDOW_RADII = 0.6
_ATTEMPTS = 3
_SPARE_HOPS = (0, 2, 4)  # by which all may end later than hoped; then late channels are left
_MOVES_PER_RANK = 64  # of an attempt; 32x32 less 1x24 needs 2 for each rank
# After so many moves, and an eighth of the ranks, the late channels are listed again: a list takes
# as long as the mesh is large.
_MOVES_PER_LOOK = 64
_RANKS_PER_MOVE = 8
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
    n_moves = _MOVES_PER_RANK * mesh.n_live
    moves_per_look = max(_MOVES_PER_LOOK, mesh.n_live // _RANKS_PER_MOVE)
    for spare_hops in _SPARE_HOPS:
        for seed in range(_ATTEMPTS):
            layers = _layers(chunks, windows, hops.mean() + window + spare_hops)
            random = random_state(seed)
            if separated(layers, random, n_moves=n_moves, moves_per_look=moves_per_look):
                return _trees(chunks, layers, windows)
    return _trees(chunks, layers, windows)


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
    after_up = np.zeros((2 * n_chunks, 2))
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
    ways[..., NEIGHBOR] = mesh.neighbor_ranks
    goes_up = np.arange(2 * n_chunks) < n_chunks
    return Layers(
        ways=ways,
        state=state,
        side=side,
        goes_up=goes_up,
        comes_down=~goes_up,
        roots=np.full(2 * n_chunks, -1, dtype=np.int32),
        windows=np.tile(windows, 2),
        after_up=after_up,
        before_down=np.zeros(2 * n_chunks),
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


def _trees(
    chunks: tuple[_Chunk, ...], layers: Layers, windows: NDArray[np.float64]
) -> TwoRootTrees:
    port, depth, _ = np.moveaxis(layers.state, 2, 0)
    beside = layers.ways[np.arange(len(port))[:, None], port, NEIGHBOR]
    parents, depth = np.where(port >= 0, beside, -1).T, depth.T
    n_chunks = len(chunks)
    return TwoRootTrees(
        up=parents[:n_chunks],
        up_hops=depth[:n_chunks],
        down=parents[n_chunks:],
        down_hops=depth[n_chunks:],
        carries=tuple(carry for chunk in chunks for carry in chunk.carries),
        weights=windows / windows.sum(),
    )
