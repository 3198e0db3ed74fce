"""Even out the loads of a forest's links by exchanging links of its trees.

Three changes, all within a cap on depth:

- A **chain** moves one rank to another parent in one tree, a neighbouring rank in another tree,
  and so on, from an overloaded link to one with room. It is the augmenting path of a matroid
  union, restricted to moves that cost next to nothing. `docs/design/0002-trees.md` draws one.
- A **kick**, for links that no chain relieves, takes a link out of a tree and joins the two parts
  by any other link between them: the general exchange, which costs a few walks over the tree.
- Where kicks do not help either, one tree is **grown again** from another root.

Each of them keeps the invariants that `forest_invariants` states.
"""

from typing import Final

import numpy as np

from meshmend.kernels import kernel, plain_kernel
from meshmend.trees.tree_forest import (
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

# Columns of `trail`: what the search for chains knows of each link.
_SEEN: Final = 0  # whether the search came here
_QUEUE: Final = 1  # entry i: the link that is i-th in the queue of the search
_SOURCE: Final = 2  # the overloaded link where the chain began
_BEFORE: Final = 3  # the link before this one in the chain, -1 at its beginning
_RANK: Final = 4  # the move that leads here: this rank leaves the link before, ...
_TREE: Final = 5  # ... in this tree, ...
_OUT: Final = 6  # ... for its port to this link

_NEVER_HOPELESS: Final = 1 << 30  # a load that no forest has
# A kick may end on a link as busy as the one it began at, so each excess tree on a link gets two.
# Part of a compiled loop, so the tuning script cannot vary it.
_KICKS_PER_EXCESS_LOAD: Final = 2


def balance_loads(
    forest: Forest,
    goal: int,
    cap: int,
    *,
    idle_rounds: int,
    hopeless_load: int = _NEVER_HOPELESS,
    roots: Ints | None = None,
) -> int:
    """Change a forest until no link carries more than `goal` trees; return the load left above it.

    No tree becomes deeper than `cap`, if none was before. Runs rounds of chains, with kicks between
    them, until `idle_rounds` rounds in a row gain nothing, or more than `hopeless_load` is left
    after one. With `roots`, a round without gain is followed by a tree that is grown again from
    one of these ranks.
    """
    arrays = (forest.ways, forest.ends, forest.state, forest.load, forest.random)
    roots = np.empty(0, dtype=np.int32) if roots is None else roots
    return int(_balance(*arrays, roots, goal, cap, idle_rounds, hopeless_load))


@kernel
def _balance(
    ways: Ints,
    ends: Ints,
    state: Ints,
    load: Ints,
    random: Words,
    roots: Ints,
    goal: int,
    cap: int,
    idle_rounds: int,
    hopeless_load: int,
) -> int:
    """Do what `balance_loads` says."""
    trail = np.empty((len(load), 7), np.int32)
    scratch = np.empty((3, len(ways)), np.int32)
    least, rounds_left = np.int64(1) << 60, idle_rounds
    while True:
        while _chains(ways, ends, state, load, trail, goal, cap, scratch[0]) > 0:
            pass
        left = np.int64(0)
        for e in range(len(load)):
            left += max(0, load[e] - goal)
        rounds_left = idle_rounds if left < least else rounds_left - 1
        least = min(least, left)
        if left == 0 or left > hopeless_load or rounds_left == 0:
            return int(left)
        if len(roots) > 0 and rounds_left < idle_rounds:
            _regrow(ways, ends, state, load, random, goal, roots, scratch)
        for e in range(len(load)):
            for _ in range(_KICKS_PER_EXCESS_LOAD * (load[e] - goal)):
                if load[e] > goal:
                    _kick(ways, ends, state, load, random, e, goal, cap, scratch)


@plain_kernel
def _chains(
    ways: Ints, ends: Ints, state: Ints, load: Ints, trail: Ints, goal: int, cap: int, stack: Ints
) -> int:
    """Search once from all overloaded links, make each chain's moves, return how many succeed."""
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
                port = state[v, k, PORT]
                if port < 0 or ways[v, port, LINK] != e or load[trail[e, _SOURCE]] <= goal:
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
    """Make the moves of a chain, last one first; return whether all of them were possible.

    A move may be impossible by now, because earlier chains changed the trees. Each move fills room
    that the one before it made, so stopping adds load to the last link only, which had room.
    """
    f = last
    while trail[f, _BEFORE] >= 0:
        e, v, k, p = trail[f, _BEFORE], trail[f, _RANK], trail[f, _TREE], trail[f, _OUT]
        port = state[v, k, PORT]
        if port < 0 or ways[v, port, LINK] != e or not may_move(ways, state, v, k, p, cap):
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
    roots: Ints,
    scratch: Ints,
) -> None:
    """Grow one tree that uses an overloaded link again, from a random one of `roots`."""
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
    root = roots[random_below(random, len(roots))]
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
    """Move some tree from link e to a random link that can serve, one with room if there is any."""
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
