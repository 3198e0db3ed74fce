"""The search for balanced trees, with even loads and little depth: which roots, how deep, how long.

Grows shortest-path trees from central roots and lets `tree_exchange` even out their loads. Where
that fails it tries other roots, then more depth, then a busier link.
"""

from collections.abc import Iterator

import numpy as np

from meshmend.topology.figures import MeshFigures
from meshmend.trees.tree_counts import least_load, pace
from meshmend.trees.tree_exchange import balance_loads
from meshmend.trees.tree_forest import Forest, Ints, empty_forest, grow_all
from meshmend.trees.tree_gaps import fill_gaps

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
    best = min(forests, key=lambda forest: int(forest.load.max()))
    low, high = goal + 1, int(best.load.max())
    while low < high:
        middle = (low + high) // 2
        if balance_loads(best, middle, cap, idle_rounds=idle_rounds):
            low = middle + 1
        high = min(high, int(best.load.max()))
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
        load += 1


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
