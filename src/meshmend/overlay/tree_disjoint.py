"""Channel-disjoint trees: no channel carries more than one tree up, nor more than one down.

For payloads so short that a link is nearly done with what goes up before anything comes down
it. Then what counts is not what a link carries in all, but each way by itself: with as many
trees as the fewest links of a rank, each rank sends every tree over a link of its own
(arc-disjoint arborescences; Edmonds, 1973). Where a channel carries one tree up and another
down, the two must be far enough apart in time. Time is counted in hops, and the **window** is
how many of them a tree's slices take to pass; nothing here knows of bytes and seconds.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel, plain_kernel
from meshmend.overlay.tree_forest import (
    DEPTH,
    HEIGHT,
    LINK,
    NEIGHBOR,
    PORT,
    Forest,
    Ints,
    Words,
    empty_forest,
    grow_all,
    may_move,
    move,
    random_below,
)
from meshmend.topology.mesh import Mesh

_MOST_SLACK = 1  # hops beyond the radius
_ATTEMPTS = 10  # with other roots, at each depth
_FEW_STEPS, _STEPS_TIMES_RANKS = 1 << 12, 1 << 22  # small meshes are tried for longer, ...
_STEPS_PER_RANK = 1 << 10  # ... but not the smallest
_STEPS_PER_LOOK: Final = 64
_HEAT: Final = 1.0  # hops of delay that a step may bring about for the sake of later ones
_ONE: Final = 1 << 20
_ROUNDING = 0.01

Floats = NDArray[np.float64]


def fewest_links(mesh: Mesh) -> int:
    """Return the links of the rank with the fewest: so many disjoint trees there may be."""
    return int((mesh.neighbor_ranks >= 0).sum(axis=1).min())


def disjoint_forest(
    mesh: Mesh, from_center: Ints, window: int, seed: int
) -> tuple[Forest, Floats] | None:
    """Return channel-disjoint trees that keep out of each other's way, and what each carries.

    As many trees as the fewest links of a rank, at most a hop deeper than the radius. The
    deeper a tree the less it carries, so that all end together. Trees start along one axis
    after another, each along another one first, and change at random, the better for it the
    likelier. None: no such trees were found. The forest's loads are not kept.
    """
    n_trees = fewest_links(mesh)
    n_steps = max(_FEW_STEPS, _STEPS_TIMES_RANKS // mesh.n_live)
    n_steps = min(n_steps, _STEPS_PER_RANK * mesh.n_live)
    for caps, spare in _depths(int(from_center.min()), n_trees) if n_trees else ():
        windows, goal = _windows(window, caps), 2 * caps.mean() + window + spare + _ROUNDING
        for attempt in range(_ATTEMPTS if windows.min() > 0 else 0):
            forest, roots = _grown(mesh, from_center, caps, seed=(seed, attempt))
            arrays = (forest.ways, forest.state, forest.random, roots)
            if _settled(*arrays, windows, caps, goal, n_steps):
                depths = forest.state[roots, np.arange(n_trees), HEIGHT]
                return forest, _windows(window, depths) / (n_trees * window)
    return None


def _windows(window: int, depths: Ints) -> Floats:
    """Return what each tree may take to pass so that all trees end together."""
    shares: Floats = window + 2.0 * (depths.mean() - depths)
    return shares


def _depths(radius: int, n_trees: int) -> Iterator[tuple[Ints, int]]:
    """Yield how deep each tree may be, and hops by which all may take longer than that.

    First all the radius, then one after another a hop more.
    """
    for hops in range(_MOST_SLACK * n_trees + 1):
        caps = (radius + (np.arange(n_trees) + hops) // n_trees).astype(np.int32)
        yield from ((caps, 0), (caps, 1))


def _grown(
    mesh: Mesh, from_center: Ints, caps: Ints, *, seed: tuple[int, int]
) -> tuple[Forest, Ints]:
    """Return shortest-path trees, each along another axis first as far as channels are free.

    And their roots, which are central and differ if they can.
    """
    random = np.random.default_rng(seed)
    roots = np.full(len(caps), -1, dtype=np.int32)
    for k, cap in enumerate(caps):
        central = random.permutation(np.flatnonzero(from_center <= cap))
        roots[k] = next((rank for rank in central if rank not in roots), central[0])
    forest = _by_channel(empty_forest(mesh, len(caps), sum(seed)))
    axes = np.nonzero(mesh.neighbor_ranks >= 0)[1] // 2
    for k in range(len(caps)):
        out_of_turn = ((axes + k) % len(mesh.shape)).astype(np.int32)
        load, state = forest.load + out_of_turn, forest.state[:, k : k + 1].copy()
        grow_all(forest.ways, state, load, forest.random, roots[k : k + 1])
        forest.load[:], forest.state[:, k : k + 1] = load - out_of_turn, state
    return forest, roots


def _by_channel(forest: Forest) -> Forest:
    """Return an empty forest in whose `ways` the two channels of a link have numbers of their own.

    So loads count what goes up over a channel.
    """
    ways = forest.ways.copy()
    rank, out = np.nonzero(ways[..., NEIGHBOR] >= 0)
    ways[rank, out, LINK] = np.arange(len(rank), dtype=np.int32)
    ends = np.stack([rank, ways[rank, out, NEIGHBOR]], axis=1).astype(np.int32)
    return Forest(ways, ends, forest.state, np.zeros(len(rank), dtype=np.int32), forest.random)


@kernel
def _settled(
    ways: Ints,
    state: Ints,
    random: Words,
    roots: Ints,
    windows: Floats,
    caps: Ints,
    goal: float,
    n_steps: int,
) -> bool:
    """Move ranks to other parents until no channel is late, and return whether that came about.

    `windows` is each tree's own; no tree becomes deeper than its entry of `caps`.
    """
    stack, depths = np.empty(len(ways), np.int32), np.empty(len(roots), np.int32)
    late = np.empty((ways.shape[0] * ways.shape[1], 2), np.int32)
    n_late = 0
    for step in range(n_steps):
        if step % _STEPS_PER_LOOK == 0:
            for k in range(len(roots)):
                depths[k] = state[roots[k], k, HEIGHT]
            n_late = _look(ways, state, depths, windows, goal, late)
            if n_late == 0:
                return True
        v, k = _pick(ways, state, random, late, n_late)
        p, o = state[v, k, PORT], random_below(random, ways.shape[1])
        if p < 0 or o == p or not may_move(ways, state, v, k, o, caps[k]):
            continue
        before = _delays(ways, state, depths, windows, goal, v, p, o)
        move(ways, state, v, k, o, stack)
        worse = _delays(ways, state, depths, windows, goal, v, p, o) - before
        if worse > 0 and random_below(random, _ONE) >= _ONE * np.exp(-worse / _HEAT):
            move(ways, state, v, k, p, stack)
    return False


@plain_kernel
def _look(ways: Ints, state: Ints, depths: Ints, windows: Floats, goal: float, late: Ints) -> int:
    """List the channels that are late as rank and port; return how many."""
    n_late = 0
    for v in range(ways.shape[0]):
        for p in range(ways.shape[1]):
            if ways[v, p, NEIGHBOR] >= 0 and _delay(ways, state, depths, windows, goal, v, p) > 0:
                late[n_late, 0], late[n_late, 1] = v, p
                n_late += 1
    return n_late


@plain_kernel
def _pick(ways: Ints, state: Ints, random: Words, late: Ints, n_late: int) -> tuple[int, int]:
    """Return a rank and a tree: mostly that of a late channel or one that hangs deepest below.

    Whatever makes a branch less deep makes room for moves further up.
    """
    k = random_below(random, state.shape[1])
    v = random_below(random, len(ways))
    if random_below(random, 4) > 0:
        which = random_below(random, n_late)
        top, p = late[which, 0], late[which, 1]
        w = ways[top, p, NEIGHBOR]
        for _ in range(state.shape[1]):
            if state[top, k, PORT] == p or state[w, k, PORT] == p ^ 1:
                v = top if state[top, k, PORT] == p else w
                break
            k = (k + 1) % state.shape[1]
    for _ in range(random_below(random, 8) - 4):
        for o in range(ways.shape[1]):
            w, height = ways[v, o, NEIGHBOR], state[v, k, HEIGHT]
            if w >= 0 and state[w, k, PORT] == o ^ 1 and state[w, k, HEIGHT] == height - 1:
                v = w
                break
    return v, k


@plain_kernel
def _delays(
    ways: Ints, state: Ints, depths: Ints, windows: Floats, goal: float, v: int, p: int, o: int
) -> float:
    """Return the delays on all four channels behind ports p and o of rank v, in sum."""
    in_sum, port = 0.0, p
    for turn in range(4):
        rank = v if turn < 2 else ways[v, port, NEIGHBOR]
        in_sum += _delay(ways, state, depths, windows, goal, rank, port if turn < 2 else port ^ 1)
        port = p + o - port
    return in_sum


@plain_kernel
def _delay(
    ways: Ints, state: Ints, depths: Ints, windows: Floats, goal: float, v: int, p: int
) -> float:
    """Return by how many hops channel p of rank v makes the whole late, at least.

    All that it carries takes the sum of the windows. That cannot begin before the first of it
    is there (up: when the ranks below are heard; down: when the root has all and sent it here),
    and what leaves last has the rest of the way to go. Two trees one way are a window too much.
    """
    w = ways[v, p, NEIGHBOR]
    first, rest, in_all, n_up, n_down = 1e9, 1e9, 0.0, 0, 0
    for k in range(state.shape[1]):
        if state[v, k, PORT] == p:
            n_up += 1
            first = min(first, state[v, k, HEIGHT])
            rest = min(rest, state[v, k, DEPTH] + depths[k])
        elif state[w, k, PORT] == p ^ 1:
            n_down += 1
            first = min(first, depths[k] + state[v, k, DEPTH])
            rest = min(rest, state[w, k, HEIGHT] + 1)
        else:
            continue
        in_all += windows[k]
    if n_up > 1 or n_down > 1:
        return in_all
    return max(0.0, first + in_all + rest - goal) if n_up + n_down > 0 else 0.0
