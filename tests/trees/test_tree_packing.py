"""Tree packings: spanning, even, shallow."""

import math
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshmend.errors import TopologyError
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.packing_number import exact_packing_number
from meshmend.topology.text import parse_mesh
from meshmend.trees.tree_counts import tree_counts
from meshmend.trees.tree_packing import TreePacking, tree_packing
from strategies import connected_meshes

# A mesh, its failures, a number of trees that can reach the packing number tau, tau (an upper
# bound where it is not known exactly), the excess of load and the depth to reach.
KNOWN = [
    ("4x4", [], 8, 1.6, 1.0, 4),
    ("4x4", ["2x2@1,1"], 12, 12 / 11, 1.0, 6),
    ("4x4", ["2x2@0,2"], 29, 1.45, 1.0, 4),
    ("8x8", [], 16, 16 / 9, 1.0, 8),
    ("8x8", ["2x2@2,2"], 5, 5 / 3, 1.0, 10),
    ("8x8", ["4x2@2,2"], 19, 19 / 12, 1.0, 13),
    ("8x8", ["2x2@0,2"], 3, 1.5, 1.0, 9),
    ("8x8", ["2x2@0,0"], 7, 1.7627, 1.01, 9),
    ("16x16", ["4x2@6,6"], 11, 1.854, 1.02, 20),
    ("16x32", ["4x2@6,14"], 17, 1.897, 1.01, 29),
    ("32x32", [], 29, 1.939, 1.01, 34),
    ("32x32", ["4x2@14,14"], 27, 1.933, 1.01, 37),
    ("8x8x8", [], 21, 1344 / 511, 1.01, 13),
    ("15x13", ["3,4"], 11, 1.855, 1.02, 16),
]


def assert_spans(packing: TreePacking, mesh: Mesh) -> None:
    """Every rank but the root has a live link to its parent, and all lead to the root."""
    neighbors = {
        (rank, int(there)) for rank, row in enumerate(mesh.neighbor_ranks) for there in row
    }
    for root, parents in zip(packing.roots, packing.parents, strict=True):
        children = np.flatnonzero(parents >= 0)
        assert set(np.flatnonzero(parents < 0)) == {root}
        assert {(int(rank), int(parents[rank])) for rank in children} <= neighbors
        reached = np.arange(mesh.n_live)
        for _ in range(mesh.n_live):
            reached = np.where(parents[reached] >= 0, parents[reached], reached)
        assert set(reached) == {root}


def loads_by_hand(packing: TreePacking, mesh: Mesh) -> NDArray[np.float64]:
    number = {tuple(link): at for at, link in enumerate(mesh.links.tolist())}
    loads = np.zeros(len(number))
    for weight, parents in zip(packing.weights, packing.parents, strict=True):
        for rank in np.flatnonzero(parents >= 0):
            loads[number[min(rank, parents[rank]), max(rank, parents[rank])]] += weight
    return loads


def three_chips(*parents: tuple[int, int, int], weights: tuple[float, ...]) -> TreePacking:
    table = np.array(parents, dtype=np.int32)
    roots = np.argmin(table, axis=1).astype(np.int32)
    return TreePacking(roots=roots, parents=table, weights=np.array(weights))


@given(connected_meshes(), st.integers(1, 7), st.none() | st.integers(0, 3))
@settings(max_examples=60)
def test_every_tree_spans_all_ranks_over_live_links(
    mesh: Mesh, n_trees: int, slack: int | None
) -> None:
    packing = tree_packing(mesh, n_trees=n_trees, depth_slack=slack)

    assert packing.n_trees == n_trees
    assert packing.weights.sum() == pytest.approx(1)
    assert_spans(packing, mesh)


@given(connected_meshes(), st.integers(1, 9))
@settings(max_examples=60)
def test_loads_reach_the_least_that_equal_weights_allow(mesh: Mesh, n_trees: int) -> None:
    """On small meshes the exchanges find what Tutte and Nash-Williams promise."""
    packing = tree_packing(mesh, n_trees=n_trees)

    if mesh.n_live > 1:
        tau = exact_packing_number(mesh).lower
        assert packing.max_load * n_trees == pytest.approx(math.ceil(n_trees / tau - 1e-9))


@given(connected_meshes(), st.integers(1, 7), st.integers(0, 3))
@settings(max_examples=60)
def test_no_tree_is_deeper_than_the_radius_and_the_slack(
    mesh: Mesh, n_trees: int, slack: int
) -> None:
    packing = tree_packing(mesh, n_trees=n_trees, depth_slack=slack)

    assert packing.depth <= mesh_figures(mesh).radius + slack
    assert packing.depth == packing.depths.max() == packing.hops.max()


@given(connected_meshes(), st.integers(1, 5))
@settings(max_examples=30)
def test_loads_are_those_of_the_links_that_the_trees_use(mesh: Mesh, n_trees: int) -> None:
    packing = tree_packing(mesh, n_trees=n_trees)
    loads = loads_by_hand(packing, mesh)

    assert sorted(packing.edge_loads) == pytest.approx(sorted(loads[loads > 0]))
    assert packing.edges.tolist() == sorted(mesh.links[loads > 0].tolist())
    assert packing.max_load == pytest.approx(loads.max(initial=0))


@given(connected_meshes(), st.integers(1, 5), st.none() | st.integers(0, 2), st.integers(0, 3))
@settings(max_examples=30)
def test_the_same_seed_gives_the_same_trees(
    mesh: Mesh, n_trees: int, slack: int | None, seed: int
) -> None:
    one, other = (
        tree_packing(mesh, n_trees=n_trees, depth_slack=slack, seed=seed) for _ in range(2)
    )

    assert np.array_equal(one.parents, other.parents)
    assert np.array_equal(one.roots, other.roots)


@pytest.mark.parametrize(("shape", "fail", "n_trees", "tau", "excess", "depth"), KNOWN)
def test_loads_and_depths_on_meshes_of_known_packing_number(
    shape: str, fail: list[str], n_trees: int, tau: float, excess: float, depth: int
) -> None:
    packing = tree_packing(parse_mesh(shape, fail=fail), n_trees=n_trees)

    assert packing.max_load * tau <= excess + 1e-9
    assert packing.depth <= depth


@pytest.mark.parametrize(("shape", "n_trees"), [("8x8", 2), ("32x32", 2), ("4x4x4", 3)])
def test_on_a_torus_the_trees_share_no_link(shape: str, n_trees: int) -> None:
    mesh = parse_mesh(shape, wrap="all")
    packing = tree_packing(mesh, n_trees=n_trees)

    assert packing.max_load == 1 / n_trees
    assert packing.depth <= mesh_figures(mesh).radius + 4


def test_a_single_tree_is_as_shallow_as_can_be() -> None:
    mesh = parse_mesh("32x32", fail=["4x2@14,14"])

    assert tree_packing(mesh, n_trees=1).depth == mesh_figures(mesh).radius
    assert tree_packing(mesh, n_trees=1, depth_slack=5).depth == mesh_figures(mesh).radius


def test_a_bridge_carries_everything() -> None:
    mesh = parse_mesh("4x9", fail=["3x1@0,4"])
    packing = tree_packing(mesh, n_trees=3)

    assert_spans(packing, mesh)
    assert packing.max_load == pytest.approx(1)


def test_one_chip_is_its_own_tree_and_two_share_one_link() -> None:
    alone, pair = (tree_packing(parse_mesh(shape), n_trees=2) for shape in ("1", "2"))

    assert (alone.roots.tolist(), alone.parents.tolist()) == ([0, 0], [[-1], [-1]])
    assert (alone.depth, alone.max_load, len(alone.edges)) == (0, 0, 0)
    assert (pair.depth, pair.max_load, pair.edges.tolist()) == (1, 1, [[0, 1]])


def test_depths_and_loads_of_two_trees_on_a_row_by_hand() -> None:
    packing = three_chips((-1, 0, 1), (1, -1, 1), weights=(0.25, 0.75))

    assert packing.hops.tolist() == [[0, 1, 2], [1, 0, 1]]
    assert packing.depths.tolist() == [2, 1]
    assert packing.edges.tolist() == [[0, 1], [1, 2]]
    assert packing.edge_loads.tolist() == [1, 1]


def test_tree_counts_are_those_that_lower_the_bound_on_the_load() -> None:
    broken, torus, line = (
        mesh_figures(mesh)
        for mesh in (
            parse_mesh("32x32", fail=["4x2@14,14"]),
            parse_mesh("8x8", wrap="all"),
            parse_mesh("1x9"),
        )
    )

    assert tree_counts(broken, 12) == (1, 3, 5, 7, 9, 11)
    assert tree_counts(torus, 4) == (1, 2)
    assert tree_counts(line, 4) == (1,)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "limit_s"), [("64x64", 4.0), ("128x128", 30.0)])
def test_large_meshes_are_packed_in_time(shape: str, limit_s: float) -> None:
    mesh = parse_mesh(shape, fail=["4x2@30,30"])
    tree_packing(parse_mesh("4x4"), n_trees=3)
    start = time.process_time()
    packing = tree_packing(mesh, n_trees=29)

    assert time.process_time() - start < limit_s
    assert packing.max_load <= 15 / 29 + 1e-9
    assert packing.depth <= 1.2 * mesh_figures(mesh).radius


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: tree_packing(parse_mesh("2x2"), n_trees=0), "at least one tree"),
        (lambda: tree_packing(parse_mesh("2x2"), n_trees=1, depth_slack=-1), "slack from 0 on"),
        (lambda: tree_packing(parse_mesh("1x3", fail=["0,1"]), n_trees=1), "use largest_part"),
        (lambda: three_chips((-1, 0, 1), weights=(0.5,)), "weights from 0 on that sum to 1"),
        (lambda: three_chips((-1, 0, 1), weights=(0.5, 0.5)), "one weight per root"),
        (lambda: three_chips((-1, 2, 1), weights=(1.0,)), "tree 0 has none from rank 1"),
        (lambda: three_chips((-1, 0, -1), weights=(1.0,)), "tree 0 has none from rank 2"),
    ],
)
def test_what_a_packing_refuses(build: Callable[[], TreePacking], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        build()
