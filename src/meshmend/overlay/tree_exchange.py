"""Even out the loads of a forest's links by exchanging links of its trees.

Two exchanges, both within a cap on depth. A **chain** moves one rank to another parent in one
tree, a neighbouring rank in another tree, and so on, from an overloaded link to one with room:
the augmenting path of a matroid union, restricted to steps that cost next to nothing. A
**kick**, for links that no chain relieves, takes a link out of a tree and joins the two parts
by any other link between them (the general exchange; costs a few walks over the tree).
"""

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from meshmend.overlay.tree_forest import (
    LINK,
    PORT,
    Ints,
    Words,
    hang,
    may_move,
    move,
    random_below,
    root_at_center,
    walk,
)

# What a search knows of each link: was it seen, which link it is in the queue, where the chain
# began, and the move (rank, tree, port) that leads to it off the link before.
_SEEN: Final = 0
_QUEUE: Final = 1
_SOURCE: Final = 2
_BEFORE: Final = 3
_RANK: Final = 4
_TREE: Final = 5
_OUT: Final = 6

_PATIENCE: Final = 3  # rounds without progress before giving up


@njit(cache=True)
def balance(
    ways: Ints, ends: Ints, state: Ints, load: Ints, random: Words, goal: int, cap: int
) -> int:
    """Bring every link's load down to `goal` if it can, and return how much is left above it.

    No tree becomes deeper than `cap`, if none was. Rounds of chains, with kicks between, until
    some rounds in a row bring nothing.
    """
    n_ranks = len(ways)
    trail = np.empty((len(load), 7), np.int32)
    near, order = np.empty(n_ranks, np.int32), np.empty(n_ranks, np.int32)
    eccentricity, side = np.empty(n_ranks, np.int32), np.empty(n_ranks, np.bool_)
    least, patience = np.int64(1) << 60, _PATIENCE
    while True:
        while _chains(ways, ends, state, load, trail, goal, cap, order) > 0:
            pass
        left = np.int64(0)
        for e in range(len(load)):
            left += max(0, load[e] - goal)
        patience = _PATIENCE if left < least else patience - 1
        least = min(least, left)
        if left == 0 or patience == 0:
            return int(left)
        for e in range(len(load)):
            for _ in range(2 * (load[e] - goal)):
                if load[e] > goal:
                    k = _user(ways, ends, state, e, random)
                    f = _crossing(
                        ways, ends, state, load, e, k, goal, cap, random, near, order,
                        eccentricity, side,
                    )  # fmt: skip
                    if f >= 0:
                        _exchange(ways, ends, state, e, f, k, side)
                        load[e] -= 1
                        load[f] += 1
                        root_at_center(ways, state, k, near, order)


@njit(cache=True)
def _chains(
    ways: Ints, ends: Ints, state: Ints, load: Ints, trail: Ints, goal: int, cap: int, stack: Ints
) -> int:
    """Search once from all overloaded links, follow what chains turn up, return how many."""
    n_chains, head, tail = 0, 0, 0
    for e in range(len(load)):
        trail[e, _SEEN] = load[e] > goal
        if trail[e, _SEEN]:
            trail[tail, _QUEUE] = e
            trail[e, _SOURCE] = e
            trail[e, _BEFORE] = -1
            tail += 1
    while head < tail:
        e = trail[head, _QUEUE]
        head += 1
        for end in range(2):
            v = ends[e, end]
            for k in range(state.shape[1]):
                here = state[v, k, PORT]
                if here < 0 or ways[v, here, LINK] != e or load[trail[e, _SOURCE]] <= goal:
                    continue
                for p in range(ways.shape[1]):
                    f = ways[v, p, LINK]
                    if f < 0 or trail[f, _SEEN] or not may_move(ways, state, v, k, p, cap):
                        continue
                    trail[f, _SEEN], trail[f, _SOURCE], trail[f, _BEFORE] = (
                        1, trail[e, _SOURCE], e,
                    )  # fmt: skip
                    trail[f, _RANK], trail[f, _TREE], trail[f, _OUT] = v, k, p
                    if load[f] < goal:
                        n_chains += _follow(ways, state, load, trail, f, cap, stack)
                        trail[f, _SEEN] = load[f] >= goal
                        break
                    trail[tail, _QUEUE] = f
                    tail += 1
    return n_chains


@njit(cache=True)
def _follow(
    ways: Ints, state: Ints, load: Ints, trail: Ints, last: int, cap: int, stack: Ints
) -> bool:
    """Make the moves of a chain, last one first, as far as earlier chains left them possible.

    From the end on each move fills room that is there, so that stopping anywhere does no harm.
    """
    f = last
    while trail[f, _BEFORE] >= 0:
        e, v, k, p = trail[f, _BEFORE], trail[f, _RANK], trail[f, _TREE], trail[f, _OUT]
        here = state[v, k, PORT]
        if here < 0 or ways[v, here, LINK] != e or not may_move(ways, state, v, k, p, cap):
            return False
        move(ways, state, v, k, p, stack)
        load[e] -= 1
        load[f] += 1
        f = e
    return True


@njit(cache=True)
def _user(ways: Ints, ends: Ints, state: Ints, e: int, random: Words) -> int:
    """Return a random tree that uses link e."""
    k = random_below(random, state.shape[1])
    while True:
        for end in range(2):
            v = ends[e, end]
            if state[v, k, PORT] >= 0 and ways[v, state[v, k, PORT], LINK] == e:
                return int(k)
        k = (k + 1) % state.shape[1]


@njit(cache=True)
def _crossing(
    ways: Ints,
    ends: Ints,
    state: Ints,
    load: Ints,
    e: int,
    k: int,
    goal: int,
    cap: int,
    random: Words,
    near: Ints,
    order: Ints,
    eccentricity: Ints,
    side: NDArray[np.bool_],
) -> int:
    """Return a random link that can replace link e in tree k, one with room if any has, or -1.

    Leaves marked in `side` the part of the tree on the side of e's second end.
    """
    for end in range(2):
        _measure(ways, state, k, ends[e, end], e, near, order, eccentricity)
    side[:] = near >= 0
    best, lowest = -1, 1 << 30
    for f in range(len(load)):
        x, y = ends[f, 0], ends[f, 1]
        if f == e or load[f] > goal or side[x] == side[y]:
            continue
        if eccentricity[x] + eccentricity[y] + 1 <= 2 * cap:
            key = random_below(random, 1 << 16) + (int(load[f] >= goal) << 16)
            if key < lowest:
                best, lowest = f, key
    return best


@njit(cache=True)
def _measure(
    ways: Ints,
    state: Ints,
    k: int,
    start: int,
    without: int,
    near: Ints,
    order: Ints,
    eccentricity: Ints,
) -> None:
    """Fill the eccentricities within the part of tree k less a link that holds `start`.

    In a tree the rank farthest from any rank is an end of a longest path.
    """
    n_part = walk(ways, state, k, start, without, near, order)
    for turn in range(2):
        n_part = walk(ways, state, k, order[n_part - 1], without, near, order)
        for i in range(n_part):
            v = order[i]
            eccentricity[v] = max(eccentricity[v], near[v]) if turn else near[v]


@njit(cache=True)
def _exchange(
    ways: Ints, ends: Ints, state: Ints, e: int, f: int, k: int, side: NDArray[np.bool_]
) -> None:
    """Replace link e by link f in tree k; `side` marks the part that holds e's second end."""
    top = ends[e, 0]
    if state[top, k, PORT] < 0 or ways[top, state[top, k, PORT], LINK] != e:
        top = ends[e, 1]
    a = ends[f, 0] if side[ends[f, 0]] == side[top] else ends[f, 1]
    for p in range(ways.shape[1]):
        if ways[a, p, LINK] == f:
            hang(ways, state, a, p, top, k)
            return
