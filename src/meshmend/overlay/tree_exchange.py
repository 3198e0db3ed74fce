"""Even out the loads of a forest's links by exchanging links of its trees.

Three changes, all within a cap on depth. A **chain** moves one rank to another parent in one
tree, a neighbouring rank in another tree, and so on, from an overloaded link to one with room:
the augmenting path of a matroid union, restricted to steps that cost next to nothing. A
**kick**, for links that no chain relieves, takes a link out of a tree and joins the two parts
by any other link between them (the general exchange; costs a few walks over the tree). Where
kicks bring nothing either, one tree is **grown anew** from another root.
"""

from typing import Final

import numpy as np

from meshmend.kernels import kernel, plain_kernel
from meshmend.overlay.tree_forest import (
    LINK,
    PORT,
    Forest,
    Ints,
    Words,
    grow,
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


def balanced(
    forest: Forest,
    goal: int,
    cap: int,
    *,
    patience: int,
    hopeless: int = 1 << 30,
    central: Ints | None = None,
) -> int:
    """Even out a forest in place, as `_balance` does, and return the load left above the goal."""
    arrays = (forest.ways, forest.ends, forest.state, forest.load, forest.random)
    roots = np.empty(0, dtype=np.int32) if central is None else central
    return int(_balance(*arrays, roots, goal, cap, patience, hopeless))


@kernel
def _balance(
    ways: Ints,
    ends: Ints,
    state: Ints,
    load: Ints,
    random: Words,
    central: Ints,
    goal: int,
    cap: int,
    patience: int,
    hopeless: int,
) -> int:
    """Bring every link's load down to `goal` if it can, and return how much is left above it.

    No tree becomes deeper than `cap`, if none was. Rounds of chains, with kicks between, until
    `patience` rounds in a row bring nothing, or more than `hopeless` is left after one. After a
    round that brought nothing a tree is grown anew from one of the ranks `central`, if any.
    """
    trail = np.empty((len(load), 7), np.int32)
    scratch = np.empty((3, len(ways)), np.int32)
    least, rounds_left = np.int64(1) << 60, patience
    while True:
        while _chains(ways, ends, state, load, trail, goal, cap, scratch[0]) > 0:
            pass
        left = np.int64(0)
        for e in range(len(load)):
            left += max(0, load[e] - goal)
        rounds_left = patience if left < least else rounds_left - 1
        least = min(least, left)
        if left == 0 or left > hopeless or rounds_left == 0:
            return int(left)
        if len(central) > 0 and rounds_left < patience:
            _regrow(ways, ends, state, load, random, goal, central, scratch)
        for e in range(len(load)):
            for _ in range(2 * (load[e] - goal)):
                if load[e] > goal:
                    _kick(ways, ends, state, load, random, e, goal, cap, scratch)


@plain_kernel
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
                    trail[f, _SEEN] = 1
                    trail[f, _SOURCE], trail[f, _BEFORE] = trail[e, _SOURCE], e
                    trail[f, _RANK], trail[f, _TREE], trail[f, _OUT] = v, k, p
                    if load[f] < goal:
                        n_chains += _follow(ways, state, load, trail, f, cap, stack)
                        trail[f, _SEEN] = load[f] >= goal
                        break
                    trail[tail, _QUEUE] = f
                    tail += 1
    return n_chains


@plain_kernel
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


@plain_kernel
def _regrow(
    ways: Ints,
    ends: Ints,
    state: Ints,
    load: Ints,
    random: Words,
    goal: int,
    central: Ints,
    scratch: Ints,
) -> None:
    """Grow one tree that uses an overloaded link anew, from a random central rank."""
    e, lowest = -1, 1 << 30
    for f in range(len(load)):
        if load[f] > goal:
            key = random_below(random, 1 << 16)
            if key < lowest:
                e, lowest = f, key
    if e < 0:
        return
    k = _user(ways, ends, state, e, random)
    for v in range(len(ways)):
        if state[v, k, PORT] >= 0:
            load[ways[v, state[v, k, PORT], LINK]] -= 1
    root = central[random_below(random, len(central))]
    grow(ways, state, load, random, k, root, scratch[0], scratch[1])


@plain_kernel
def _user(ways: Ints, ends: Ints, state: Ints, e: int, random: Words) -> int:
    """Return a random tree that uses link e."""
    k = random_below(random, state.shape[1])
    while True:
        for end in range(2):
            v = ends[e, end]
            if state[v, k, PORT] >= 0 and ways[v, state[v, k, PORT], LINK] == e:
                return int(k)
        k = (k + 1) % state.shape[1]


@plain_kernel
def _kick(
    ways: Ints,
    ends: Ints,
    state: Ints,
    load: Ints,
    random: Words,
    e: int,
    goal: int,
    cap: int,
    scratch: Ints,
) -> None:
    """Take some tree off link e, onto a random link that has room if any such link can serve."""
    near, order, eccentricity = scratch[0], scratch[1], scratch[2]
    k = _user(ways, ends, state, e, random)
    for end in range(2):
        _measure(ways, state, k, ends[e, end], e, near, order, eccentricity)
    best, lowest = -1, 1 << 30
    for f in range(len(load)):
        x, y = ends[f, 0], ends[f, 1]
        # Now `near` is 0 or more on the side of e's second end, and -1 on the other.
        if f == e or load[f] > goal or (near[x] < 0) == (near[y] < 0):
            continue
        if eccentricity[x] + eccentricity[y] + 1 <= 2 * cap:
            key = random_below(random, 1 << 16) + (int(load[f] >= goal) << 16)
            if key < lowest:
                best, lowest = f, key
    if best >= 0:
        _exchange(ways, ends, state, e, best, k, near)
        load[e] -= 1
        load[best] += 1
        root_at_center(ways, state, k, near, order)


@plain_kernel
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


@plain_kernel
def _exchange(ways: Ints, ends: Ints, state: Ints, e: int, f: int, k: int, near: Ints) -> None:
    """Replace link e by link f in tree k; `near` is -1 on the side of e's first end only."""
    top = ends[e, 0]
    if state[top, k, PORT] < 0 or ways[top, state[top, k, PORT], LINK] != e:
        top = ends[e, 1]
    a = ends[f, 0] if (near[ends[f, 0]] < 0) == (near[top] < 0) else ends[f, 1]
    for p in range(ways.shape[1]):
        if ways[a, p, LINK] == f:
            hang(ways, state, a, p, top, k)
            return
