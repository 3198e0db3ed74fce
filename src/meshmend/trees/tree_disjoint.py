"""Channel-disjoint trees: no channel carries more than one tree up, nor more than one down.

They are for payloads so short that a link is nearly done with what goes up before anything comes
down. Then only the load of each direction matters, not the load of a link in both. With
as many trees as the fewest links of a rank, each rank sends every tree over a link of its own
(arc-disjoint arborescences; Edmonds, 1973).

Where a channel carries one tree up and another down, the two must be far enough apart in time.
Time is counted in hops. A tree's **window** is the time, in hops, that its slices take to pass a
channel. Knows nothing of bytes and seconds. `docs/design/0002-trees.md` draws the
windows of one channel.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel, plain_kernel
from meshmend.topology.figures import MeshFigures
from meshmend.trees.tree_forest import (
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

# Found by trying. Losses and gains are what `benchmarks/tune_trees.py` finds on small meshes.
#
# Hops by which a tree may be deeper than the radius. Zero loses up to 8 %, two gain nothing.
_MOST_SLACK_HOPS = 1
# Each attempt has other roots. 3 lose up to 9 %; 30 gain up to 1.4 % in 1.4 times the time.
_ATTEMPTS_PER_DEPTH = 10
# Moves that one attempt may try: 2^22 / ranks, so more on small meshes, but 2^12 at least and
# 2^10 a rank at most. Four times as many gain nothing.
_MOVES_TIMES_RANKS = 1 << 22
_LEAST_MOVES = 1 << 12
_MOST_MOVES_PER_RANK = 1 << 10
_MOVES_PER_LOOK = 64  # after so many moves the late channels are listed again
# Simulated annealing at one temperature: a move that makes channels later by so many hops is still
# made with probability 1/e, because it may allow better moves.
_TEMPERATURE_HOPS = 1.0
_ROUNDING_HOPS = 0.01  # windows are fractions, so their sums are off by less than this

_RANDOM_ONE: Final = 1 << 20  # random numbers below this stand for 0 to 1
_PICKS_PER_ANYWHERE: Final = 4  # one pick of so many is anywhere, the others at a late channel
_MOST_STEPS_DOWN: Final = 4  # below the rank that was picked, exclusive

Floats = NDArray[np.float64]


def disjoint_forest(figures: MeshFigures, window: int, seed: int) -> tuple[Forest, Floats] | None:
    """Return channel-disjoint trees that do not delay each other, and each tree's weight.

    There are as many trees as the fewest links of a rank, at most a hop deeper than the radius. A
    deeper tree carries less, so that all trees end together. Each tree starts along another axis
    first. Then random moves change the trees; the later a move makes channels, the more rarely it
    is made. Returns None if no such trees were found. The forest's loads count channels and are not
    kept up to date.
    """
    n_trees, n_ranks = figures.min_degree, figures.mesh.n_live
    n_moves = max(_LEAST_MOVES, _MOVES_TIMES_RANKS // n_ranks)
    n_moves = min(n_moves, _MOST_MOVES_PER_RANK * n_ranks)
    for caps, spare_hops in _depths(figures.radius, n_trees) if n_trees else ():
        windows = _windows(window, caps)
        goal = 2 * caps.mean() + window + spare_hops + _ROUNDING_HOPS
        for attempt in range(_ATTEMPTS_PER_DEPTH if windows.min() > 0 else 0):
            forest, roots = _grown(figures, caps, seed=(seed, attempt))
            arrays = (forest.ways, forest.state, forest.random, roots)
            limits = (n_moves, _MOVES_PER_LOOK, _TEMPERATURE_HOPS)
            if _separate(*arrays, windows, caps, goal, *limits):
                depths = forest.state[roots, np.arange(n_trees), HEIGHT]
                return forest, _windows(window, depths) / (n_trees * window)
    return None


def _windows(window: int, depths: Ints) -> Floats:
    """Return each tree's own window, so that all trees end together; their mean is `window`."""
    windows: Floats = window + 2.0 * (depths.mean() - depths)
    return windows


def _depths(radius: int, n_trees: int) -> Iterator[tuple[Ints, int]]:
    """Yield how deep each tree may be, and how many hops late all trees may end.

    First all trees have the radius, then one after another gets a hop more.
    """
    for hops in range(_MOST_SLACK_HOPS * n_trees + 1):
        caps = (radius + (np.arange(n_trees) + hops) // n_trees).astype(np.int32)
        yield from ((caps, 0), (caps, 1))


def _grown(figures: MeshFigures, caps: Ints, *, seed: tuple[int, int]) -> tuple[Forest, Ints]:
    """Return shortest-path trees and their roots, which are central and differ if they can.

    Each tree goes along another axis first, as far as channels are free.
    """
    mesh = figures.mesh
    random = np.random.default_rng(seed)
    roots = np.full(len(caps), -1, dtype=np.int32)
    for k, cap in enumerate(caps):
        central = random.permutation(figures.ranks_within(int(cap)))
        roots[k] = next((rank for rank in central if rank not in roots), central[0])
    forest = _by_channel(empty_forest(mesh, len(caps), sum(seed)))
    axes = np.nonzero(mesh.neighbor_ranks >= 0)[1] // 2
    for k in range(len(caps)):
        # Counts the channels along later axes as busier, so that the tree takes them later.
        later_axes = ((axes + k) % len(mesh.shape)).astype(np.int32)
        load, state = forest.load + later_axes, forest.state[:, k : k + 1].copy()
        grow_all(forest.ways, state, load, forest.random, roots[k : k + 1])
        forest.load[:], forest.state[:, k : k + 1] = load - later_axes, state
    return forest, roots


def _by_channel(forest: Forest) -> Forest:
    """Return an empty forest that numbers channels instead of links.

    So its loads count the trees that go up over each channel.
    """
    ways = forest.ways.copy()
    rank, out = np.nonzero(ways[..., NEIGHBOR] >= 0)
    ways[rank, out, LINK] = np.arange(len(rank), dtype=np.int32)
    ends = np.stack([rank, ways[rank, out, NEIGHBOR]], axis=1).astype(np.int32)
    return Forest(ways, ends, forest.state, np.zeros(len(rank), dtype=np.int32), forest.random)


@kernel
def _separate(
    ways: Ints,
    state: Ints,
    random: Words,
    roots: Ints,
    windows: Floats,
    caps: Ints,
    goal: float,
    n_moves: int,
    moves_per_look: int,
    temperature_hops: float,
) -> bool:
    """Move ranks to other parents until no channel is late; return whether that succeeded.

    `windows` has each tree's own, and no tree becomes deeper than its entry of `caps`. All trees
    should end within `goal` hops.
    """
    stack, depths = np.empty(len(ways), np.int32), np.empty(len(roots), np.int32)
    late = np.empty((ways.shape[0] * ways.shape[1], 2), np.int32)
    n_late = 0
    for attempt in range(n_moves):
        if attempt % moves_per_look == 0:
            for k in range(len(roots)):
                depths[k] = state[roots[k], k, HEIGHT]
            n_late = _list_late(ways, state, depths, windows, goal, late)
            if n_late == 0:
                return True
        v, k = pick_move(ways, state, random, late, n_late)
        p, o = state[v, k, PORT], random_below(random, ways.shape[1])
        if p < 0 or o == p or not may_move(ways, state, v, k, o, caps[k]):
            continue
        before = _hops_late_around(ways, state, depths, windows, goal, v, p, o)
        move(ways, state, v, k, o, stack)
        worse = _hops_late_around(ways, state, depths, windows, goal, v, p, o) - before
        chance = np.exp(-worse / temperature_hops) if worse > 0 else 1.0
        if worse > 0 and random_below(random, _RANDOM_ONE) >= _RANDOM_ONE * chance:
            move(ways, state, v, k, p, stack)
    return False


@plain_kernel
def _list_late(
    ways: Ints, state: Ints, depths: Ints, windows: Floats, goal: float, late: Ints
) -> int:
    """Fill `late` with rank and port of each late channel, and return how many there are."""
    n_late = 0
    for v in range(ways.shape[0]):
        for p in range(ways.shape[1]):
            if ways[v, p, NEIGHBOR] < 0:
                continue
            if _hops_late(ways, state, depths, windows, goal, v, p) > 0:
                late[n_late, 0], late[n_late, 1] = v, p
                n_late += 1
    return n_late


@plain_kernel
def pick_move(ways: Ints, state: Ints, random: Words, late: Ints, n_late: int) -> tuple[int, int]:
    """Return a rank and a tree to move, mostly at a late channel or on the longest branch below it.

    A move that shortens a branch makes room for moves further up.
    """
    k = random_below(random, state.shape[1])
    v = random_below(random, len(ways))
    if random_below(random, _PICKS_PER_ANYWHERE) > 0:
        which = random_below(random, n_late)
        top, p = late[which, 0], late[which, 1]
        w = ways[top, p, NEIGHBOR]
        for _ in range(state.shape[1]):
            if state[top, k, PORT] == p or state[w, k, PORT] == p ^ 1:
                v = top if state[top, k, PORT] == p else w
                break
            k = (k + 1) % state.shape[1]
    for _ in range(random_below(random, 2 * _MOST_STEPS_DOWN) - _MOST_STEPS_DOWN):
        for o in range(ways.shape[1]):
            w, height = ways[v, o, NEIGHBOR], state[v, k, HEIGHT]
            if w >= 0 and state[w, k, PORT] == o ^ 1 and state[w, k, HEIGHT] == height - 1:
                v = w
                break
    return v, k


@plain_kernel
def _hops_late_around(
    ways: Ints, state: Ints, depths: Ints, windows: Floats, goal: float, v: int, p: int, o: int
) -> float:
    """Return by how many hops the four channels behind ports p and o of rank v are late, in sum."""
    in_sum, port = 0.0, p
    for turn in range(4):
        rank = v if turn < 2 else ways[v, port, NEIGHBOR]
        out = port if turn < 2 else port ^ 1
        in_sum += _hops_late(ways, state, depths, windows, goal, rank, out)
        port = p + o - port
    return in_sum


@plain_kernel
def _hops_late(
    ways: Ints, state: Ints, depths: Ints, windows: Floats, goal: float, v: int, p: int
) -> float:
    """Return by how many hops, at least, channel p of rank v makes all trees end after the goal.

    The channel is busy for the sum of the windows of its trees. It begins when the first data is
    at v: on the way up when the ranks below have sent, on the way down when the root has all data
    and has sent it to v. The data that leaves last still has the rest of its way to go. Two trees
    in the same direction count as late by all that they carry.
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
