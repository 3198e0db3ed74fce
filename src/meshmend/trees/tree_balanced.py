"""The search for balanced trees, with even loads and little depth: which roots, how deep, how long.

Grows shortest-path trees from central roots and lets exchanges of links even out their loads.
Where that fails it tries other roots, then more depth, then a busier link.

There are three kinds of exchanges, all within a cap on depth:

- A **chain** moves one rank to another parent in one tree, a neighbouring rank in another tree,
  and so on, from an overloaded link to one with room. It is the augmenting path of a matroid
  union, restricted to moves that cost next to nothing. `docs/design/0002-trees.md` draws one.
- A **kick**, for links that no chain relieves, takes a link out of a tree and joins the two parts
  by any other link between them: the general exchange, which costs a few walks over the tree.
- Where kicks do not help either, one tree is **grown again** from another root.

Each of them keeps the invariants of `tree_forest`.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from meshmend.kernels import kernel, plain_kernel
from meshmend.topology.figures import MeshFigures
from meshmend.trees.tree_counts import least_load, pace
from meshmend.trees.tree_forest import (
    LINK,
    PORT,
    Forest,
    Ints,
    Words,
    empty_forest,
    grow,
    grow_all,
    hang,
    may_move,
    move,
    random_below,
    root_at_center,
    walk,
)
from meshmend.trees.tree_gaps import fill_gaps

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

    A slow link is to carry so much less as it is slower. No tree becomes deeper than `cap`, if none
    was before. Runs rounds of chains, with kicks between them, until `idle_rounds` rounds in a row
    gain nothing, or more than `hopeless_load` is left after one. With `roots`, a round without gain
    is followed by a tree that is grown again from one of these ranks.
    """
    arrays = (forest.ways, forest.ends, forest.state, forest.load, forest.random)
    roots = np.empty(0, dtype=np.int32) if roots is None else roots
    return int(_balance(*arrays, roots, forest.goals(goal), cap, idle_rounds, hopeless_load))


@kernel
def _balance(
    ways: Ints,
    ends: Ints,
    state: Ints,
    load: Ints,
    random: Words,
    roots: Ints,
    goals: Ints,
    cap: int,
    idle_rounds: int,
    hopeless_load: int,
) -> int:
    """Do what `balance_loads` says."""
    trail = np.empty((len(load), 7), np.int32)
    scratch = np.empty((3, len(ways)), np.int32)
    least, rounds_left = np.int64(1) << 60, idle_rounds
    while True:
        while _chains(ways, ends, state, load, trail, goals, cap, scratch[0]) > 0:
            pass
        left = np.int64(0)
        for e in range(len(load)):
            left += max(0, load[e] - goals[e])
        rounds_left = idle_rounds if left < least else rounds_left - 1
        least = min(least, left)
        if left == 0 or left > hopeless_load or rounds_left == 0:
            return int(left)
        if len(roots) > 0 and rounds_left < idle_rounds:
            _regrow(ways, ends, state, load, random, goals, roots, scratch)
        for e in range(len(load)):
            for _ in range(_KICKS_PER_EXCESS_LOAD * (load[e] - goals[e])):
                if load[e] > goals[e]:
                    _kick(ways, ends, state, load, random, e, goals, cap, scratch)


@plain_kernel
def _chains(
    ways: Ints, ends: Ints, state: Ints, load: Ints, trail: Ints, goals: Ints, cap: int, stack: Ints
) -> int:
    """Search once from all overloaded links, make each chain's moves, return how many succeed."""
    n_chains, head, tail = 0, 0, 0
    for e in range(len(load)):
        trail[e, _SEEN] = load[e] > goals[e]
        if trail[e, _SEEN]:
            trail[tail, _QUEUE] = e
            trail[e, _SOURCE] = e
            trail[e, _BEFORE] = -1
            tail += 1
    while head < tail:
        e = trail[head, _QUEUE]
        source = trail[e, _SOURCE]
        head += 1
        for end in range(2):
            v = ends[e, end]
            for k in range(state.shape[1]):
                port = state[v, k, PORT]
                if port < 0 or ways[v, port, LINK] != e or load[source] <= goals[source]:
                    continue
                for p in range(ways.shape[1]):
                    f = ways[v, p, LINK]
                    if f < 0 or trail[f, _SEEN] or not may_move(ways, state, v, k, p, cap):
                        continue
                    trail[f, _SEEN] = 1
                    trail[f, _SOURCE], trail[f, _BEFORE] = trail[e, _SOURCE], e
                    trail[f, _RANK], trail[f, _TREE], trail[f, _OUT] = v, k, p
                    if load[f] < goals[f]:
                        n_chains += _follow(ways, state, load, trail, f, cap, stack)
                        trail[f, _SEEN] = load[f] >= goals[f]
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
    goals: Ints,
    roots: Ints,
    scratch: Ints,
) -> None:
    """Grow one tree that uses an overloaded link again, from a random one of `roots`."""
    e, lowest = -1, 1 << 30
    for f in range(len(load)):
        if load[f] > goals[f]:
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
    goals: Ints,
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
        if f == e or load[f] > goals[f] or (near[x] < 0) == (near[y] < 0):
            continue
        if eccentricity[x] + eccentricity[y] + 1 <= 2 * cap:
            key = random_below(random, 1 << 16) + (int(load[f] >= goals[f]) << 16)
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


# Found by trying. Losses and gains are what `benchmarks/tune_trees.py` finds on small meshes.
#
# A search may grow this many ranks x trees in all its attempts. Small forests get
# many attempts, large ones a single one. With at most 4 attempts schedules are up to 1.3 % slower;
# 36 attempts gain nothing.
_RANKS_TIMES_TREES_PER_SEARCH = 60_000
_MOST_ATTEMPTS = 12
# Rounds of exchanges in a row that may gain nothing: always two, and one more for every 20
# attempts that the forest is small enough for. Half or twice as many change little.
_LEAST_IDLE_ROUNDS = 2
_MOST_MORE_IDLE_ROUNDS = 6
_IDLE_ROUNDS_PER_ATTEMPT = 20
# An attempt that leaves more than this load above the goal after its first round is given up: four,
# or one for every two trees if that is more.
_LEAST_HOPELESS_LOAD = 4
_TREES_PER_HOPELESS_LOAD = 2
# Hops above the radius, where even loads come first: from 1/16 of the radius to half of it and 4.
# Every mesh in the tests reaches its least load within that.
_RADIUS_PER_FIRST_SLACK_HOP = 16
_RADIUS_PER_LAST_SLACK_HOP = 2
_MORE_SLACK_HOPS = 4
# Where links are slow, a cut of slow ones may need many times the load to begin with.
_STEP_OF_SLOW = 32
# From this gap on a hop less is worth a search for it: 0.3 % of the time of 32x32 at 10 MB.
_LONG_GAP = 0.3


def forest_within(figures: MeshFigures, n_trees: int, depth_slack: int, seed: int) -> Forest:
    """Return the evenest of a few forests no deeper than the radius and the slack."""
    n_ranks = figures.mesh.n_live
    cap, goal = figures.radius + depth_slack, least_load(figures, n_trees)
    idle_rounds = _idle_rounds(n_ranks, n_trees)
    forests = []
    for attempt in range(_n_attempts(n_ranks, n_trees)):
        roots = _possible_roots(figures, depth_slack, attempt)
        forests.append(_grown(figures, n_trees, roots, seed=seed, attempt=attempt))
        if not balance_loads(forests[-1], goal, cap, idle_rounds=idle_rounds, roots=roots):
            return forests[-1]
    best = min(forests, key=lambda forest: forest.busiest)
    low, high = goal + 1, best.busiest
    while low < high:
        middle = (low + high) // 2
        if balance_loads(best, middle, cap, idle_rounds=idle_rounds):
            low = middle + 1
        high = min(high, best.busiest)
    return best


def evenest_forest(figures: MeshFigures, n_trees: int, seed: int) -> Forest:
    """Return the shallowest forest found among those of the least load found."""
    n_ranks, load = figures.mesh.n_live, least_load(figures, n_trees)
    while True:
        for slack in _depth_slacks(figures.radius):
            for attempt in range(min(_n_attempts(n_ranks, n_trees), 2 + 2 * slack)):
                roots = _possible_roots(figures, slack, attempt)
                forest = _grown(figures, n_trees, roots, seed=seed, attempt=attempt)
                excess_load = balance_loads(
                    forest,
                    load,
                    figures.radius + slack,
                    idle_rounds=_idle_rounds(n_ranks, n_trees),
                    hopeless_load=max(_LEAST_HOPELESS_LOAD, n_trees // _TREES_PER_HOPELESS_LOAD),
                    roots=roots,
                )
                if not excess_load:
                    return forest
        load += 1 if not figures.mesh.has_slow else max(1, load // _STEP_OF_SLOW)


def gap_filling_forest(
    figures: MeshFigures, n_trees: int, depth_slack: int, gap: float, seed: int
) -> Forest:
    """Return a forest whose leaves fill gaps, no deeper than the radius and the slack.

    If the gap is long, half of the trees are a hop shallower, if possible. They come last in each
    slice, and their last slice has the shorter way.
    """
    random, cap = np.random.default_rng(seed), figures.radius + depth_slack
    n_deep = n_trees // 2 if depth_slack and gap >= _LONG_GAP else n_trees
    shallow = np.arange(n_trees) >= n_deep
    roots = np.resize(random.permutation(figures.ranks_within(cap)), n_trees)
    central = random.permutation(figures.ranks_within(cap - 1)) if depth_slack else roots
    roots = np.where(shallow, np.resize(central, n_trees), roots)
    forest = empty_forest(figures.mesh, n_trees, seed)
    grow_all(forest.ways, forest.state, forest.load, forest.random, roots)
    goal = pace(figures, n_trees, gap)
    for caps in (cap - shallow, np.full(n_trees, cap)):
        if fill_gaps(forest, goal=goal, caps=caps.astype(np.int32), gap=gap) <= goal:
            break
    return forest


def _n_attempts(n_ranks: int, n_trees: int) -> int:
    """Return how many forests to try: more if they are small."""
    n_affordable = _RANKS_TIMES_TREES_PER_SEARCH // (n_ranks * n_trees)
    return max(1, min(_MOST_ATTEMPTS, n_affordable))


def _idle_rounds(n_ranks: int, n_trees: int) -> int:
    """Return how many rounds of exchanges may gain nothing: more on small forests."""
    n_affordable = _RANKS_TIMES_TREES_PER_SEARCH // (_IDLE_ROUNDS_PER_ATTEMPT * n_ranks * n_trees)
    return _LEAST_IDLE_ROUNDS + min(_MOST_MORE_IDLE_ROUNDS, n_affordable)


def _grown(
    figures: MeshFigures, n_trees: int, possible_roots: Ints, *, seed: int, attempt: int
) -> Forest:
    """Return shortest-path trees, about equally many from each possible root."""
    random = np.random.default_rng((seed, attempt))
    forest = empty_forest(figures.mesh, n_trees, seed + attempt)
    roots = np.resize(random.permutation(possible_roots), n_trees)
    grow_all(forest.ways, forest.state, forest.load, forest.random, roots)
    return forest


def _possible_roots(figures: MeshFigures, depth_slack: int, attempt: int) -> Ints:
    """Return the ranks from which a shortest-path tree is no deeper than this attempt allows.

    Many roots spread the load around them, but a tree that starts at the limit of depth has no room
    for moves. So each attempt stays another number of hops below the limit.
    """
    hops_below_limit = (depth_slack // 3 + attempt) % (depth_slack + 1)
    return figures.ranks_within(figures.radius + depth_slack - hops_below_limit)


def _depth_slacks(radius: int) -> Iterator[int]:
    """Yield hops above the radius to try, in growing steps; more room than that rarely helps."""
    slack = radius // _RADIUS_PER_FIRST_SLACK_HOP
    while slack <= radius // _RADIUS_PER_LAST_SLACK_HOP + _MORE_SLACK_HOPS:
        yield slack
        slack += max(1, slack // 2)
