"""Moves ranks of forests to other parents until no channel carries too much at one time.

A **layer** is a forest that one chunk goes up, or one that it comes down. Every rank of a layer
knows its port to its parent, its depth and its height, as in `tree_forest`. Time is counted in
hops. A channel that a chunk goes up, from rank v, is needed from v's height on. One that it comes
down, from rank v, is needed from v's depth on: a gate's depth is the time at which it has the
total. As in `tree_disjoint`, a channel is **late** if the last of what it carries has so far to go
that it ends after the goal, or if two chunks go up it, or two come down.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel, plain_kernel
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
