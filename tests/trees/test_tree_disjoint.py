"""Channel-disjoint trees: one tree a channel each way, and nothing in its own way."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import TopologyError
from meshmend.planning.packed_trees import TreeShape, trees_of
from meshmend.planning.target import Question
from meshmend.planning.tree_finalists import disjoint_shapes
from meshmend.planning.tree_formula import PipelineRequest, TreeFormula
from meshmend.planning.tree_search import best_trees
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.table import Collective
from meshmend.schedule.trees import tree_schedule
from meshmend.topology.fabric import fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.trees.tree_packing import TreePacking, disjoint_packing, tree_packing
from strategies import connected_meshes

REFERENCE = fabric("reference")
SMALL = parse_mesh("8x8", fail=["2x2@2,2"])
# A mesh that has such trees, the window of a megabyte on `reference`, and the depths to reach.
FOUND = [
    ("8x8", "none", [], 13, [8, 8]),
    ("8x8", "none", ["2x2@2,2"], 11, [8, 8]),
    ("16x32", "none", ["4x2@6,14"], 19, [24, 25]),
    ("32x32", "none", ["4x2@14,14"], 20, [32, 33]),
    ("15x13", "none", ["3,4"], 14, [13, 13]),
    ("8x8x8", "none", ["2x2x2@2,2,2"], 10, [12, 12, 12]),
    ("16x16", "all", [], 8, [16, 16, 16, 16]),
]

Rows = list[tuple[int, int, int]]  # tree, from, to


def rows_up(packing: TreePacking) -> Rows:
    """Return what the trees send towards their roots."""
    tree, child = np.nonzero(packing.parents >= 0)
    parent = packing.parents[tree, child]
    return list(zip(tree.tolist(), child.tolist(), parent.tolist(), strict=True))


def heights(packing: TreePacking) -> list[list[int]]:
    """Return how many hops the farthest rank below each is away, by tree."""
    result = [[0] * packing.n_ranks for _ in packing.roots]
    for tree, child, parent in sorted(rows_up(packing), key=lambda row: -packing.hops[row[:2]]):
        result[tree][parent] = max(result[tree][parent], result[tree][child] + 1)
    return result


def latest_end(packing: TreePacking, window: int) -> Fraction:
    """Return the hops after which the last stream ends by the busiest channel, counted by hand.

    A channel with a tree up and one down: the earlier of both begins, both pass, and what ends
    the later has its way to go.
    """
    below, depths = heights(packing), packing.depths.tolist()
    length = [Fraction(float(weight)) * packing.n_trees * window for weight in packing.weights]
    up = {(child, parent): tree for tree, child, parent in rows_up(packing)}
    down = {(parent, child): tree for tree, child, parent in rows_up(packing)}
    latest = Fraction(0)
    for here, there in up.keys() & down.keys():
        one, other = up[here, there], down[here, there]
        first = min(below[one][here], depths[other] + packing.hops[other, here])
        rest = min(depths[one] + packing.hops[one, here], below[other][there] + 1)
        latest = max(latest, int(first) + length[one] + length[other] + int(rest))
    return latest


@given(connected_meshes(), st.integers(1, 12), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_no_channel_carries_two_trees_one_way_and_none_is_late(
    mesh: Mesh, window: int, seed: int
) -> None:
    packing = disjoint_packing(mesh, window=window, seed=seed)

    if packing is None:
        return
    figures = mesh_figures(mesh)
    assert packing.n_trees == figures.min_degree
    assert packing.most_trees_up == 1
    assert packing.depth <= figures.radius + 1
    assert latest_end(packing, window) <= 2 * (figures.radius + 1) + window + 3
    check_contributions(tree_schedule(packing, Collective.ALLREDUCE))


@given(connected_meshes(), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_the_deeper_a_tree_the_less_it_carries_so_that_all_end_together(
    mesh: Mesh, window: int
) -> None:
    packing = disjoint_packing(mesh, window=window)

    if packing is not None:
        ends = packing.weights * packing.n_trees * window + 2 * packing.depths
        assert packing.weights.min() > 0
        assert np.ptp(ends) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("shape", "wrap", "fail", "window", "depths"), FOUND)
def test_depths_on_known_meshes(
    shape: str, wrap: str, fail: list[str], window: int, depths: list[int]
) -> None:
    mesh = parse_mesh(shape, wrap=wrap, fail=fail)
    packing = disjoint_packing(mesh, window=window)

    assert packing is not None
    assert sorted(packing.depths.tolist()) == depths
    assert packing.most_trees_up == 1
    check_contributions(tree_schedule(packing, Collective.ALLREDUCE))


@given(connected_meshes(), st.integers(1, 9), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_the_same_seed_gives_the_same_trees(mesh: Mesh, window: int, seed: int) -> None:
    one, other = (disjoint_packing(mesh, window=window, seed=seed) for _ in range(2))

    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert np.array_equal(one.parents, other.parents)
        assert np.array_equal(one.weights, other.weights)


def test_around_four_chips_two_trees_go_opposite_ways() -> None:
    packing = disjoint_packing(parse_mesh("2x2"), window=2)

    assert packing is not None
    assert packing.depths.tolist() == [2, 2]
    assert len({row[1:] for row in rows_up(packing)}) == 6


def test_a_line_has_one_such_tree_a_single_chip_none_and_long_windows_find_none() -> None:
    line = disjoint_packing(parse_mesh("1x5"), window=3)

    assert line is not None
    assert line.parents.tolist() == [[1, 2, -1, 2, 3]]
    assert disjoint_packing(parse_mesh("1"), window=3) is None
    assert disjoint_packing(parse_mesh("3x3"), window=40) is None


def test_two_trees_cross_a_bridge_from_either_side() -> None:
    mesh = parse_mesh("4x9", fail=["3x1@0,4"])
    packing = disjoint_packing(mesh, window=3)

    assert packing is not None
    middle = mesh.live.index((3, 4))
    sides = {mesh.live[root][1] < 4 for root in packing.roots if root != middle}
    assert sides == {True, False} or middle in packing.roots


def test_trees_up_a_channel_are_counted_by_hand() -> None:
    roots, parents = np.array([0, 2], dtype=np.int32), np.array([[-1, 0, 1], [1, 2, -1]])
    apart = TreePacking(roots, parents.astype(np.int32), np.array([0.5, 0.5]))
    alike = TreePacking(roots[:1].repeat(2), apart.parents[[0, 0]], np.array([0.5, 0.5]))

    assert (apart.most_trees_up, alike.most_trees_up) == (1, 2)
    assert tree_packing(parse_mesh("1"), n_trees=2).most_trees_up == 0


def test_they_take_as_long_as_the_formula_says_and_less_than_others_at_a_megabyte() -> None:
    found = best_trees(Question(SMALL, 1e6, REFERENCE))
    formula_s = TreeFormula(found.trees.figures, REFERENCE, 1e6).time_s(found.pipeline.slices)
    others = trees_of(SMALL, TreeShape(5)).simulated(REFERENCE, 1e6, found.pipeline)

    assert found.trees.shape.window is not None
    assert found.simulation.time_s == pytest.approx(formula_s, rel=0.03)
    assert found.simulation.time_s < 0.93 * others.time_s


@pytest.mark.parametrize("payload_bytes", [0.0, 1e7])
def test_payloads_that_fill_the_mesh_and_empty_ones_are_for_other_trees(
    payload_bytes: float,
) -> None:
    request = PipelineRequest(REFERENCE, payload_bytes, SMALL.n_live)

    assert not list(disjoint_shapes(mesh_figures(SMALL), request))
    assert best_trees(Question(SMALL, payload_bytes, REFERENCE)).trees.shape.window is None


def test_where_there_are_none_their_shape_stands_for_other_trees() -> None:
    trees = trees_of(parse_mesh("3x3"), TreeShape(2, window=40))

    assert isinstance(trees.packing, TreePacking)
    assert (trees.packing.n_trees, trees.figures.load) == (2, trees.packing.most_trees_up)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: disjoint_packing(parse_mesh("2x2"), window=0), "window of one hop or more"),
        (lambda: disjoint_packing(parse_mesh("1x3", fail=["0,1"]), window=1), "use largest_part"),
    ],
)
def test_what_disjoint_trees_refuse(build: Callable[[], object], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        build()
