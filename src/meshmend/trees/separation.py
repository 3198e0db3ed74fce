"""Moves ranks of spanning trees to other parents until no channel carries too much at one time.

A **layer** is a tree, or a forest, that data goes up, or comes down, or both. Every rank of a layer
has a port to its parent, a depth and a height, as in `tree_forest`. Time is counted in hops. A
layer's **window** is the time, in hops, that its slices take to pass a channel.

What goes up from rank v needs a channel from v's height on, and then has v's depth and the
layer's `after_up` to go. What comes down from rank v needs a channel from `before_down` and v's
depth on, and then has the height of the rank that gets it to go. A channel is **late** if the last
of what it carries ends after the goal, or if two layers go up it, or two come down. Knows nothing
of bytes and seconds. `docs/design/0002-trees.md` draws the windows of one channel.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import inlined, kernel, plain_kernel
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

# What a channel carries besides the layers: how long it takes, when it comes, and how far it then
# has to go.
WINDOW: Final = 0
START: Final = 1
REST: Final = 2

# Simulated annealing at one temperature: a move that makes channels later by so many hops is still
# made with probability 1/e, because it may allow better moves.
_TEMPERATURE_HOPS = 1.0
_RANDOM_ONE: Final = 1 << 20  # random numbers below this stand for 0 to 1
_PICKS_PER_ANYWHERE: Final = 4  # one pick of so many is anywhere, the others at a late channel
_MOST_STEPS_DOWN: Final = 4  # below the rank that was picked, exclusive


@dataclass(frozen=True, eq=False)
class Layers:
    """Trees that are to be separated in time, and all that decides what is late.

    Ranks of a layer that goes up stay on their `side`. Where a layer has a root in `roots`, its
    `after_up` and `before_down` are its depth, and kept up to date.
    """

    ways: Ints  # (ranks, ports, 2), as in `tree_forest`
    state: Ints  # (ranks, layers, 3), as in `tree_forest`; changed in place
    side: Ints  # of each rank
    goes_up: NDArray[np.bool_]  # each layer
    comes_down: NDArray[np.bool_]  # each layer
    roots: Ints  # of each layer, or -1
    windows: Floats  # of each layer
    after_up: Floats  # (layers, sides)
    before_down: Floats  # of each layer
    carried: Floats  # (ranks, ports, 3): of what goes over a channel besides; (0, 0, 3) if nothing
    caps: Ints  # (layers, sides): how deep a rank may be
    goal: float


def separated(layers: Layers, random: Words, *, n_moves: int, moves_per_look: int) -> bool:
    """Move ranks to other parents until no channel is late; return whether that succeeded.

    The late channels are listed again after `moves_per_look` moves.
    """
    times = (layers.windows, layers.after_up, layers.before_down, layers.carried, layers.goal)
    goes = (layers.goes_up, layers.comes_down, layers.roots)
    arrays = (layers.ways, layers.state, layers.side, goes, times, layers.caps, random)
    return bool(_separate(*arrays, n_moves, moves_per_look, _TEMPERATURE_HOPS))


@kernel
def _separate(  # type: ignore[no-untyped-def]
    ways, state, side, goes, times, caps, random, n_moves, moves_per_look, temperature_hops
):
    stack = np.empty(len(ways), np.int32)
    late = np.empty((ways.shape[0] * ways.shape[1], 2), np.int32)
    n_late = 0
    for attempt in range(n_moves):
        if attempt % moves_per_look == 0:
            n_late = _list_late(ways, state, side, goes, times, late)
            if n_late == 0:
                return True
        v, k = _pick_move(ways, state, random, late, n_late)
        p, o = state[v, k, PORT], random_below(random, ways.shape[1])
        if p < 0 or o == p or not _may_move(ways, state, side, goes, v, k, o, caps):
            continue
        before = _hops_late_around(ways, state, side, goes, times, v, p, o)
        move(ways, state, v, k, o, stack)
        worse = _hops_late_around(ways, state, side, goes, times, v, p, o) - before
        chance = np.exp(-worse / temperature_hops) if worse > 0 else 1.0
        if worse > 0 and random_below(random, _RANDOM_ONE) >= _RANDOM_ONE * chance:
            move(ways, state, v, k, p, stack)
    return False


@plain_kernel
def _pick_move(ways, state, random, late, n_late):  # type: ignore[no-untyped-def]
    """Return a rank and a layer to move, mostly at a late channel or on the longest branch below.

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
def _may_move(ways, state, side, goes, v, k, p, caps):  # type: ignore[no-untyped-def]
    """Whether v may hang on its port p in layer k: no circle, not too deep, up on its own side."""
    goes_up, _, _ = goes
    w, depth = ways[v, p, NEIGHBOR], state[v, k, DEPTH]
    if w < 0 or (goes_up[k] and side[w] != side[v]):
        return False
    if state[w, k, DEPTH] + 1 + state[v, k, HEIGHT] > caps[k, side[v]]:
        return False
    while state[w, k, DEPTH] > depth and state[w, k, PORT] >= 0:
        w = ways[w, state[w, k, PORT], NEIGHBOR]
    return bool(w != v)  # otherwise port p leads below v: a circle


@plain_kernel
def _list_late(ways, state, side, goes, times, late):  # type: ignore[no-untyped-def]
    """Fill `late` with rank and port of each late channel, and return how many there are."""
    _, _, roots = goes
    _, after_up, before_down, _, _ = times
    for k in range(len(roots)):
        if roots[k] >= 0:
            before_down[k] = after_up[k, 0] = state[roots[k], k, HEIGHT]
    n_late = 0
    for v in range(ways.shape[0]):
        for p in range(ways.shape[1]):
            if ways[v, p, NEIGHBOR] >= 0 and _hops_late(ways, state, side, goes, times, v, p) > 0:
                late[n_late, 0], late[n_late, 1] = v, p
                n_late += 1
    return n_late


@plain_kernel
def _hops_late_around(ways, state, side, goes, times, v, p, o):  # type: ignore[no-untyped-def]
    """Return by how many hops the four channels behind ports p and o of rank v are late, in sum."""
    in_sum = _hops_late(ways, state, side, goes, times, v, p)
    in_sum += _hops_late(ways, state, side, goes, times, v, o)
    in_sum += _hops_late(ways, state, side, goes, times, ways[v, p, NEIGHBOR], p ^ 1)
    return in_sum + _hops_late(ways, state, side, goes, times, ways[v, o, NEIGHBOR], o ^ 1)


@inlined
def _hops_late(ways, state, side, goes, times, v, p):  # type: ignore[no-untyped-def]
    """Return by how many hops, at least, channel p of rank v makes all layers end after the goal.

    The channel is busy for the sum of the windows, from when the first of them comes. The last then
    has the rest of its way to go. Two layers up or two down count as late by all that they carry.
    """
    goes_up, comes_down, _ = goes
    windows, after_up, before_down, carried, goal = times
    w = ways[v, p, NEIGHBOR]
    first, rest, in_all = 1e9, 1e9, 0.0
    if len(carried) > 0 and carried[v, p, WINDOW] > 0:
        in_all = carried[v, p, WINDOW]
        first, rest = carried[v, p, START], carried[v, p, REST]
    n_up, n_down = 0, 0
    for k in range(state.shape[1]):
        if state[v, k, PORT] == p and goes_up[k]:
            n_up += 1
            in_all += windows[k]
            first = min(first, state[v, k, HEIGHT])
            rest = min(rest, state[v, k, DEPTH] + after_up[k, side[v]])
        elif state[w, k, PORT] == p ^ 1 and comes_down[k]:
            n_down += 1
            in_all += windows[k]
            first = min(first, before_down[k] + state[v, k, DEPTH])
            rest = min(rest, state[w, k, HEIGHT] + 1)
    if n_up > 1 or n_down > 1:
        return in_all
    return max(0.0, first + in_all + rest - goal) if in_all > 0 else 0.0
