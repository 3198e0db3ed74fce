"""Channel-disjoint trees: no channel carries more than one tree up, nor more than one down.

They are for payloads so short that a link is nearly done with what goes up before anything comes
down. Then only the load of each direction matters, not the load of a link in both. With
as many trees as the fewest links of a rank, each rank sends every tree over a link of its own
(arc-disjoint arborescences; Edmonds, 1973).

Where a channel carries one tree up and another down, the two must be far enough apart in time.
`separation` sees to that: each tree is a layer that goes up and down. Time is counted in hops. A
tree's **window** is the time, in hops, that its slices take to pass a channel. Knows nothing of
bytes and seconds.
"""

from collections.abc import Iterator

import numpy as np

from meshmend.topology.figures import MeshFigures
from meshmend.trees.separation import Floats, Layers, separated
from meshmend.trees.tree_forest import HEIGHT, LINK, NEIGHBOR, Forest, Ints, empty_forest, grow_all

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
_ROUNDING_HOPS = 0.01  # windows are fractions, so their sums are off by less than this


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
            layers = _layers(forest, roots, windows, caps, goal)
            if separated(layers, forest.random, n_moves=n_moves, moves_per_look=_MOVES_PER_LOOK):
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
    load = np.zeros(len(rank), dtype=np.int32)
    speeds = np.ones(len(rank))  # channels are told apart here, not links
    return Forest(ways, ends, forest.state, load, forest.random, speeds)


def _layers(forest: Forest, roots: Ints, windows: Floats, caps: Ints, goal: float) -> Layers:
    """Return the trees of a forest, each of which goes up and down, for the search."""
    n_ranks, n_trees = len(forest.ways), len(roots)
    return Layers(
        ways=forest.ways,
        state=forest.state,
        side=np.zeros(n_ranks, dtype=np.int32),
        goes_up=np.ones(n_trees, dtype=np.bool_),
        comes_down=np.ones(n_trees, dtype=np.bool_),
        roots=roots,
        windows=windows,
        after_up=np.zeros((n_trees, 1)),
        before_down=np.zeros(n_trees),
        carried=np.zeros((0, 0, 3)),
        caps=caps[:, None],
        goal=float(goal),
    )
