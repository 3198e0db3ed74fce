"""The search for a forest of even loads and small depth: which roots, which depth, how long.

Grows shortest-path trees from central roots and has `tree_exchange` even them out; where that
fails it tries other roots, then more depth, then a busier link.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.overlay.tree_exchange import balanced
from meshmend.overlay.tree_forest import Forest, empty_forest, grow_all
from meshmend.topology.mesh import Mesh

_WORK = 60_000  # ranks x trees to spread over attempts: small forests get more of them


def least_load(mesh: Mesh, n_trees: int) -> int:
    """Return a number of trees that some link must carry, whatever the trees."""
    if mesh.n_live == 1:
        return 0
    degrees = (mesh.neighbor_ranks >= 0).sum(axis=1)
    n_uses = n_trees * (mesh.n_live - 1)
    return max(-(-n_uses // len(mesh.links)), -(-n_trees // int(degrees.min())))


@dataclass(frozen=True)
class Search:
    """How hard to try, and where the random numbers start."""

    effort: int
    seed: int

    def n_attempts(self, mesh: Mesh, n_trees: int) -> int:
        """Return how many forests to try: more of small ones."""
        return self.effort * max(1, min(12, _WORK // (mesh.n_live * n_trees)))

    def patience(self, mesh: Mesh, n_trees: int) -> int:
        """Return how many rounds of exchanges may bring nothing: more on small forests."""
        return self.effort * (2 + min(6, _WORK // (20 * mesh.n_live * n_trees)))

    def grown(
        self, mesh: Mesh, n_trees: int, central: NDArray[np.int32], *, attempt: int
    ) -> Forest:
        """Return shortest-path trees from central roots, each about as often as the others."""
        random = np.random.default_rng((self.seed, attempt))
        forest = empty_forest(mesh, n_trees, self.seed + attempt)
        roots = np.resize(random.permutation(central), n_trees)
        grow_all(forest.ways, forest.state, forest.load, forest.random, roots)
        return forest


def forest_within(
    mesh: Mesh, n_trees: int, from_center: NDArray[np.int32], slack: int, search: Search
) -> Forest:
    """Return the evenest of a few forests within the depth."""
    cap, goal = int(from_center.min()) + slack, least_load(mesh, n_trees)
    patience = search.patience(mesh, n_trees)
    forests = []
    for attempt in range(search.n_attempts(mesh, n_trees)):
        central = _central(from_center, slack, attempt)
        forests.append(search.grown(mesh, n_trees, central, attempt=attempt))
        if not balanced(forests[-1], goal, cap, patience=patience, central=central):
            return forests[-1]
    best = min(forests, key=lambda forest: int(forest.load.max()))
    low, high = goal + 1, int(best.load.max())
    while low < high:
        middle = (low + high) // 2
        if balanced(best, middle, cap, patience=patience):
            low = middle + 1
        high = min(high, int(best.load.max()))
    return best


def evenest_forest(
    mesh: Mesh, n_trees: int, from_center: NDArray[np.int32], search: Search
) -> Forest:
    """Return the shallowest forest found among those of the least load found."""
    radius, load = int(from_center.min()), least_load(mesh, n_trees)
    while True:
        for slack in _slacks(radius):
            for attempt in range(min(search.n_attempts(mesh, n_trees), 2 + 2 * slack)):
                central = _central(from_center, slack, attempt)
                forest = search.grown(mesh, n_trees, central, attempt=attempt)
                left = balanced(
                    forest,
                    load,
                    radius + slack,
                    patience=search.patience(mesh, n_trees),
                    hopeless=max(4, n_trees // 2) * search.effort,
                    central=central,
                )
                if not left:
                    return forest
        load += 1


def _central(from_center: NDArray[np.int32], slack: int, attempt: int) -> NDArray[np.int32]:
    """Return the ranks fit for roots: in turns those a little or not at all within the depth.

    Many roots spread the load around them; roots at the very limit leave their trees no play.
    """
    play = (slack // 3 + attempt) % (slack + 1)
    return np.flatnonzero(from_center <= from_center.min() + slack - play).astype(np.int32)


def _slacks(radius: int) -> Iterator[int]:
    """Yield depths above the radius to try, ever wider; room beyond that rarely helps."""
    slack = radius // 16
    while slack <= radius // 2 + 4:
        yield slack
        slack += max(1, slack // 2)
