"""Trees whose leaves fill gaps: right trees, and links that need no more than the pace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crowded_links import needed_by_links
from meshmend.errors import TopologyError
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.trees.tree_balanced import gap_filling_forest
from meshmend.trees.tree_counts import pace
from meshmend.trees.tree_forest import Forest, check_forest, empty_forest, grow_all
from meshmend.trees.tree_gaps import fill_gaps
from meshmend.trees.tree_packing import TreePacking, gap_packing
from strategies import connected_meshes

WITH_A_HOLE = Mesh((8, 8)).without("2x2@2,2")


def grown(mesh: Mesh, n_trees: int, seed: int) -> Forest:
    """Shortest-path trees from the centre of a mesh."""
    figures, forest = mesh_figures(mesh), empty_forest(mesh, n_trees, seed)
    roots = np.resize(figures.ranks_within(figures.radius), n_trees)
    grow_all(forest.ways, forest.state, forest.load, forest.random, roots)
    return forest


def needed_by_hand(mesh: Mesh, forest: Forest, goal: float, gap: float) -> float:
    """The pace of the most crowded link."""
    return max([goal, *needed_by_links(mesh, forest, goal, gap)])


@given(connected_meshes(), st.integers(1, 6), st.integers(0, 2), st.floats(0, 1), st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_gap_filling_trees_are_spanning_trees_within_their_depth(
    mesh: Mesh, n_trees: int, slack: int, gap: float, seed: int
) -> None:
    figures = mesh_figures(mesh)

    forest = gap_filling_forest(figures, n_trees, slack, gap, seed)

    check_forest(forest, cap=figures.radius + slack)


@given(connected_meshes(), st.integers(1, 6), st.integers(1, 4), st.floats(0, 1), st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_what_a_search_returns_is_what_its_trees_need(
    mesh: Mesh, n_trees: int, goal: int, gap: float, seed: int
) -> None:
    forest = grown(mesh, n_trees, seed)
    caps = np.full(n_trees, mesh_figures(mesh).radius + 2, dtype=np.int32)

    needed = fill_gaps(forest, goal=goal, caps=caps, gap=gap)

    assert needed == pytest.approx(needed_by_hand(mesh, forest, goal, gap))


@pytest.mark.parametrize("gap", [0.1, 0.3, 1.0])
def test_after_a_hundred_thousand_moves_too(gap: float) -> None:
    forest, caps = grown(WITH_A_HOLE, 20, 0), np.full(20, 9, dtype=np.int32)

    needed = fill_gaps(forest, goal=9.0, caps=caps, gap=gap)

    assert needed > 9.5  # a corner needs 10, so the search did not end early
    assert needed == pytest.approx(needed_by_hand(WITH_A_HOLE, forest, 9.0, gap))


@given(connected_meshes(), st.integers(1, 5), st.floats(0, 1), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_a_packing_needs_what_counting_by_hand_says(
    mesh: Mesh, n_trees: int, gap: float, goal: int
) -> None:
    forest = gap_filling_forest(mesh_figures(mesh), n_trees, 1, gap, 0)
    packing = gap_packing(mesh, n_trees=n_trees, depth_slack=1, gap=gap)

    by_hand = needed_by_hand(mesh, forest, goal, gap)

    assert packing.needed_pace(goal, gap) == pytest.approx(by_hand)


def test_a_row_of_three_by_hand() -> None:
    # Two trees hang from the left end, one from the right end. Of the link on the left the middle
    # chip sends two trees up, with a rank below it, and one comes down to the left chip, a leaf:
    # half of that fits into the gap. On the link on the right no leaf has a gap to itself.
    parents = np.array([[-1, 0, 1], [-1, 0, 1], [1, 2, -1]], dtype=np.int32)
    roots = np.array([0, 0, 2], dtype=np.int32)
    packing = TreePacking(roots=roots, parents=parents, weights=np.full(3, 1 / 3))

    assert packing.needed_pace(2, 0.5) == 3.0


def test_two_chips_by_hand() -> None:
    # Two trees go up to the left chip, one comes down from the right chip to it as to a leaf. The
    # pace of two leaves that one half of the time free, and a gap of a half holds a half of it.
    packing = TreePacking(
        roots=np.array([0, 0, 1], dtype=np.int32),
        parents=np.array([[-1, 0], [-1, 0], [1, -1]], dtype=np.int32),
        weights=np.full(3, 1 / 3),
    )

    assert packing.needed_pace(2, 0.5) == 2.5
    assert packing.needed_pace(2, 1.0) == 2.0
    assert packing.needed_pace(2, 0.0) == 3.0


def test_on_a_mesh_with_a_hole_the_pace_is_below_the_load_of_the_busiest_link() -> None:
    figures, gap = mesh_figures(WITH_A_HOLE), 0.22

    packing = gap_packing(WITH_A_HOLE, n_trees=20, depth_slack=1, gap=gap)

    needed = packing.needed_pace(pace(figures, 20, gap), gap)
    assert needed < round(20 * packing.max_load)
    assert needed < 20 * 59 / 100  # what even loads would need: 59 links of a tree on 100 links


def test_the_same_seed_gives_the_same_trees_and_another_seed_others() -> None:
    one, same, other = (
        gap_packing(WITH_A_HOLE, n_trees=6, depth_slack=2, gap=0.3, seed=seed) for seed in (1, 1, 2)
    )

    assert np.array_equal(one.parents, same.parents)
    assert not np.array_equal(one.parents, other.parents)


def test_a_pace_is_never_below_the_share_of_a_corner_nor_of_what_leaves_can_fill() -> None:
    figures = mesh_figures(Mesh((32, 32)).without("4x2@14,14"))

    assert pace(figures, 28, 0.11) == 14  # a corner has two links
    assert pace(figures, 28, 0.0) == 15  # 28 trees of 1015 links on 1962 links
    assert pace(figures, 80, 0.03) == 41


@pytest.mark.parametrize(
    ("n_trees", "slack", "gap"), [(0, 1, 0.1), (2, -1, 0.1), (2, 1, -0.1), (2, 1, float("nan"))]
)
def test_figures_out_of_range_are_refused(n_trees: int, slack: int, gap: float) -> None:
    with pytest.raises(TopologyError, match="gap_packing needs"):
        gap_packing(WITH_A_HOLE, n_trees=n_trees, depth_slack=slack, gap=gap)
