"""A few trees whose branches are straight lines, bent only where links would be crowded.

A tree starts as a comb: one line through its root, and lines across it, to all other ranks. Half of
the trees of a flat mesh have their lines along one axis, half along the other. So each channel
carries half of the trees up or half of them down, all at the same pace, and a message hardly ever
finds its next channel busy. But the line through the root of one tree lies on a line of the others,
and a hole is in the way of some. There `tree_gaps.bend` hangs ranks on other lines, as leaves.

Where the roots are decides whether that succeeds, and shows only when it is tried: a root next to a
hole may be one too many. So several choices of roots are bent for a short time, and the most
promising ones for longer.

Knows nothing of bytes and seconds.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshmend.topology.figures import MeshFigures
from meshmend.trees.tree_counts import pace
from meshmend.trees.tree_forest import DEPTH, Forest, Ints, empty_forest, grow_all
from meshmend.trees.tree_gaps import bend

# Leaves fill gaps that are as long as the payload takes to pass. Trees that are bent for shorter
# gaps, as long as those of the payload are, leave their lines more often and are slower.
GAP = 1.0

# Found by trying on 32x32 less 4x2@14,14 with 4 and 6 trees. One choice of five succeeds. Of the
# first six after so short a look it is five with 4 trees, and three with 6; longer looks are no
# better. Twice as many moves to bend gain nothing.
_CHOICES_BY_SLACK_HOPS = {0: 8, 1: 64}
_MOVES_TO_LOOK, _MOVES_TO_BEND = 15, 600  # for each rank and tree
# What links may need too much after the look: so little promises success, so much rules it out.
_PROMISING_TREES, _HOPELESS_TREES = 3.0, 12.0
_TREES_PER_HOP = 2.0  # what a hop less is worth: 5 MB take 1 % less if two of four trees have it


@dataclass(frozen=True)
class RootChoice:
    """Which roots to take: the seed of a draw among all ranks within the radius and a slack."""

    slack: int
    seed: int


def straight_forest(figures: MeshFigures, n_trees: int, choice: RootChoice) -> tuple[Forest, float]:
    """Return straight trees from chosen roots, bent; and what links need too much, in sum.

    Each tree is as deep as its root is from the farthest rank. Deeper trees come first. If links
    need nothing too much, the pace of the trees is that of `pace` for a gap of `GAP`.
    """
    return _bent(figures, n_trees, choice, _MOVES_TO_BEND)


@lru_cache(maxsize=64)
def root_choices(figures: MeshFigures, n_trees: int) -> tuple[RootChoice, ...]:
    """Return choices of roots to try, the most promising first: those whose links need least.

    A choice with shallower trees may need a bit more. Roots are in the middle if that seems
    possible, else up to a hop from it. There is none if all seem hopeless, as around a slit.
    """
    tried = []
    for slack, n_choices in _CHOICES_BY_SLACK_HOPS.items():
        for seed in range(n_choices):
            choice = RootChoice(slack, seed)
            forest, too_much = _bent(figures, n_trees, choice, _MOVES_TO_LOOK)
            depth_in_all = int(forest.state[:, :, DEPTH].max(axis=0).sum())
            tried.append((too_much + _TREES_PER_HOP * depth_in_all, too_much, choice))
        if min(too_much for _, too_much, _ in tried) <= _PROMISING_TREES:
            break
    tried = [each for each in tried if each[1] <= _HOPELESS_TREES]
    return tuple(choice for _, _, choice in sorted(tried, key=lambda each: each[:2]))


def _bent(
    figures: MeshFigures, n_trees: int, choice: RootChoice, n_moves: int
) -> tuple[Forest, float]:
    forest = combs(figures, n_trees, choice)
    goal = pace(figures, n_trees, GAP)
    return forest, bend(forest, goal=goal, gap=GAP, moves_per_rank_and_tree=n_moves)


def _roots_and_axes(figures: MeshFigures, n_trees: int, choice: RootChoice) -> tuple[Ints, Ints]:
    """Return each tree's root, and the axis that its lines go along; deeper trees come first."""
    random = np.random.default_rng(choice.seed)
    roots = random.choice(figures.ranks_within(figures.radius + choice.slack), n_trees)
    axes = random.permutation(np.arange(n_trees) % len(figures.mesh.shape))
    order = np.argsort(-figures.eccentricities[roots], kind="stable")
    return roots[order].astype(np.int32), axes[order].astype(np.int32)


def combs(figures: MeshFigures, n_trees: int, choice: RootChoice) -> Forest:
    """Return shortest-path trees whose lines go along their axis as far as possible."""
    mesh = figures.mesh
    roots, axes = _roots_and_axes(figures, n_trees, choice)
    forest = empty_forest(mesh, n_trees, choice.seed)
    ends = mesh.coordinates[forest.ends]
    along = np.argmax(ends[:, 0] != ends[:, 1], axis=1)
    for k, axis in enumerate(axes):
        # Counts links along other axes as so much busier that the tree takes them later.
        later = ((along - axis) % len(mesh.shape) * mesh.n_live).astype(np.int32)
        load, state = later.copy(), forest.state[:, k : k + 1].copy()
        grow_all(forest.ways, state, load, forest.random, roots[k : k + 1])
        forest.load[:] += load - later
        forest.state[:, k : k + 1] = state
    return forest
