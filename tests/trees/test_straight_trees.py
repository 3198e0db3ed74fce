"""Straight trees: right trees, bent only where links would be crowded."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crowded_links import needed_by_links
from meshmend.errors import TopologyError
from meshmend.topology.fabric import fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import distances_from
from meshmend.topology.mesh import Mesh
from meshmend.trees.straight_trees import GAP, RootChoice, combs, root_choices, straight_forest
from meshmend.trees.tree_counts import pace
from meshmend.trees.tree_forest import PORT, Forest, check_forest
from meshmend.trees.tree_gaps import bend
from meshmend.trees.tree_packing import TreePacking, straight_packing
from strategies import connected_meshes

REFERENCE = fabric("reference")
SQUARE = Mesh((16, 16))


def too_much_by_hand(mesh: Mesh, forest: Forest, goal: float) -> float:
    """What all links together need above the goal."""
    return sum(max(0.0, needed - goal) for needed in needed_by_links(mesh, forest, goal, GAP))


def way_hops(mesh: Mesh, packing: TreePacking, tree: int, rank: int) -> int:
    """The hops from a rank to the root of a tree, over the stops in between."""
    hops = 0
    while (parent := int(packing.parents[tree, rank])) >= 0:
        hops += int(distances_from(mesh, parent)[rank])
        rank = parent
    return hops


@given(connected_meshes(), st.integers(1, 6), st.integers(0, 2), st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_straight_trees_are_spanning_trees_as_deep_as_their_roots_are_far(
    mesh: Mesh, n_trees: int, slack: int, seed: int
) -> None:
    figures, choice = mesh_figures(mesh), RootChoice(slack, seed)

    forest, too_much = straight_forest(figures, n_trees, choice)

    check_forest(forest, cap=figures.radius + slack)
    roots = np.argmin(forest.state[:, :, PORT], axis=0)
    depths = forest.state[:, :, 1].max(axis=0)
    assert (depths == figures.eccentricities[roots]).all()
    assert (np.diff(depths) <= 0).all()  # deeper trees come first
    assert too_much == pytest.approx(
        too_much_by_hand(mesh, forest, pace(figures, n_trees, GAP)), abs=1e-6
    )


@given(connected_meshes(), st.integers(1, 6), st.integers(0, 1), st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_a_packing_needs_no_more_than_the_pace_or_there_is_none(
    mesh: Mesh, n_trees: int, slack: int, seed: int
) -> None:
    packing = straight_packing(mesh, n_trees=n_trees, depth_slack=slack, seed=seed)

    if packing is not None:
        goal = pace(mesh_figures(mesh), n_trees, GAP)
        assert packing.needed_pace(goal, GAP) == goal


def test_two_combs_by_hand() -> None:
    # 3x3, both trees from the middle. The lines of one go along the first axis, of the other along
    # the second, and the line through the root goes across them.
    forest = combs(mesh_figures(Mesh((3, 3))), 2, RootChoice(0, 0))
    ports = forest.state[:, :, PORT].T
    parents = np.where(ports >= 0, Mesh((3, 3)).neighbor_ranks[np.arange(9), ports], -1)

    assert sorted(parents.tolist()) == [
        [1, 4, 1, 4, -1, 4, 7, 4, 7],  # chips 0 and 2 to chip 1: along the second axis
        [3, 4, 5, 4, -1, 4, 3, 4, 5],
    ]


def test_most_ranks_stay_on_their_lines() -> None:
    figures = mesh_figures(SQUARE)
    choice = root_choices(figures, 4)[0]
    lines = combs(figures, 4, choice).state[:, :, PORT]

    forest, too_much = straight_forest(figures, 4, choice)

    assert too_much == 0
    n_bent = int((forest.state[:, :, PORT] != lines).sum())
    # The line through each root lies on a line of the other trees: 15 ranks must leave it, twice.
    assert 4 * 15 / 2 <= n_bent < 0.15 * lines.size


def test_the_most_promising_choice_of_roots_comes_first_and_one_of_the_first_can_be_bent() -> None:
    mesh = Mesh((12, 20)).without("2x2@4,4")
    figures = mesh_figures(mesh)
    choices = root_choices(figures, 4)
    too_much = []
    for choice in (choices[0], choices[-1]):
        forest = combs(figures, 4, choice)
        too_much.append(bend(forest, goal=2, gap=GAP, moves_per_rank_and_tree=15))

    assert too_much[0] < too_much[1]
    packings = [
        straight_packing(mesh, n_trees=4, depth_slack=choice.slack, seed=choice.seed)
        for choice in choices[:8]
    ]
    assert any(packing is not None for packing in packings)


def test_the_same_seed_gives_the_same_trees_and_another_seed_others() -> None:
    first, second = root_choices(mesh_figures(SQUARE), 4)[:2]
    one, same, other = (
        straight_packing(SQUARE, n_trees=4, depth_slack=0, seed=choice.seed)
        for choice in (first, first, second)
    )

    assert one is not None
    assert same is not None
    assert other is not None
    assert np.array_equal(one.parents, same.parents)
    assert not np.array_equal(one.parents, other.parents)


@pytest.mark.parametrize(("n_trees", "slack", "seed"), [(0, 1, 0), (2, -1, 0), (2, 1, -1)])
def test_figures_out_of_range_are_refused(n_trees: int, slack: int, seed: int) -> None:
    with pytest.raises(TopologyError, match="straight_packing needs"):
        straight_packing(SQUARE, n_trees=n_trees, depth_slack=slack, seed=seed)
