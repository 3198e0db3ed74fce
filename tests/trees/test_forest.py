"""A forest keeps its invariants after every kind of move, and `check_forest` sees what breaks them.

On trees of a random mesh: growing, hanging a rank elsewhere, evening out (by chains, kicks and
trees that are grown anew), another root, and the moves that keep disjoint trees apart.
"""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import VerificationError
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.trees.tree_balanced import balance_loads
from meshmend.trees.tree_counts import least_load
from meshmend.trees.tree_disjoint import disjoint_forest
from meshmend.trees.tree_forest import (
    DEPTH,
    HEIGHT,
    LINK,
    PORT,
    Forest,
    check_forest,
    check_spanning_trees,
    empty_forest,
    grow_all,
    may_move,
    move,
    root_all,
)
from strategies import connected_meshes

SLACK_HOPS = 2


def forest_of(mesh: Mesh, n_trees: int, *, seed: int = 0) -> tuple[Forest, int]:
    """Return shortest-path trees from central ranks, and a cap on their depth with some room."""
    figures = mesh_figures(mesh)
    roots = np.resize(figures.ranks_within(figures.radius), n_trees).astype(np.int32)
    forest = empty_forest(mesh, n_trees, seed)
    grow_all(forest.ways, forest.state, forest.load, forest.random, roots)
    return forest, figures.radius + SLACK_HOPS


def goal_of(mesh: Mesh, n_trees: int) -> int:
    return least_load(mesh_figures(mesh), n_trees)


forests = st.builds(
    lambda mesh, n_trees, seed: (mesh, *forest_of(mesh, n_trees, seed=seed)),
    connected_meshes(),
    st.integers(1, 6),
    st.integers(0, 9),
)
Grown = tuple[Mesh, Forest, int]  # a mesh, trees, and the cap on their depth


@given(forests)
@settings(max_examples=40, deadline=None)
def test_trees_just_grown_are_no_deeper_than_the_radius(grown: Grown) -> None:
    _, forest, cap = grown

    check_forest(forest, cap=cap - SLACK_HOPS)


@given(forests, st.data())
@settings(max_examples=40, deadline=None)
def test_a_rank_hung_elsewhere_leaves_trees(grown: Grown, data: st.DataObject) -> None:
    """Any move that `may_move` allows, one after another."""
    _, forest, cap = grown
    n_ranks, n_trees, _ = forest.state.shape
    stack = np.empty(n_ranks, dtype=np.int32)
    for _ in range(10):
        rank, k = data.draw(st.integers(0, n_ranks - 1)), data.draw(st.integers(0, n_trees - 1))
        port = data.draw(st.integers(0, forest.ways.shape[1] - 1))
        before = forest.state[rank, k, PORT]
        if before < 0 or not may_move(forest.ways, forest.state, rank, k, port, cap):
            continue
        move(forest.ways, forest.state, rank, k, port, stack)
        forest.load[forest.ways[rank, before, LINK]] -= 1
        forest.load[forest.ways[rank, port, LINK]] += 1

        check_forest(forest, cap=cap)


@given(forests)
@settings(max_examples=40, deadline=None)
def test_evening_out_keeps_the_cap_and_reports_the_load_left(grown: Grown) -> None:
    mesh, forest, cap = grown
    goal, roots = goal_of(mesh, forest.state.shape[1]), mesh_figures(mesh).ranks_within(cap)

    left = balance_loads(forest, goal, cap, idle_rounds=3, roots=roots)

    check_forest(forest, cap=cap)
    assert left == np.maximum(forest.load - goal, 0).sum()


@given(forests)
@settings(max_examples=40, deadline=None)
def test_a_root_in_the_middle_makes_no_tree_deeper(grown: Grown) -> None:
    mesh, forest, cap = grown
    balance_loads(forest, goal_of(mesh, forest.state.shape[1]), cap, idle_rounds=2)
    depths = forest.state[..., DEPTH].max(axis=0)

    root_all(forest.ways, forest.state)

    check_forest(forest, cap=cap)
    assert (forest.state[..., DEPTH].max(axis=0) <= depths).all()


@given(connected_meshes(), st.integers(1, 9), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_disjoint_trees_are_trees(mesh: Mesh, window: int, seed: int) -> None:
    figures = mesh_figures(mesh)
    found = disjoint_forest(figures, window, seed)

    if found is not None:
        check_spanning_trees(found[0], cap=figures.radius + 1)


def _leaf(forest: Forest) -> int:
    """Return a rank without children in tree 0."""
    return int(np.flatnonzero(forest.state[:, 0, HEIGHT] == 0)[0])


def _root(forest: Forest) -> int:
    return int(np.flatnonzero(forest.state[:, 0, PORT] < 0)[0])


def _second_root(forest: Forest) -> None:
    forest.state[_leaf(forest), 0, PORT] = -1


def _no_root(forest: Forest) -> None:
    forest.state[_root(forest), 0, PORT] = 0


def _port_into_the_void(forest: Forest) -> None:
    leaf = _leaf(forest)
    forest.state[leaf, 0, PORT] = int(np.flatnonzero(forest.ways[leaf, :, 0] < 0)[0])


def _two_ranks_that_hang_on_each_other(forest: Forest) -> None:
    for rank in range(len(forest.ways)):
        port = forest.state[rank, 0, PORT]
        above = forest.ways[rank, port, 0]
        if port >= 0 and forest.state[above, 0, PORT] >= 0:
            forest.state[above, 0, PORT] = port ^ 1
            return


def _moved_without_the_rest(forest: Forest) -> None:
    """What a move does that forgets depths, heights and loads."""
    for rank in range(len(forest.ways)):
        for port in range(forest.ways.shape[1]):
            now = forest.state[rank, 0, PORT]
            if 0 <= now != port and may_move(forest.ways, forest.state, rank, 0, port, 99):
                forest.state[rank, 0, PORT] = port
                return


def _depth_off_by_one(forest: Forest) -> None:
    forest.state[_leaf(forest), 0, DEPTH] += 1


def _whole_tree_one_deeper(forest: Forest) -> None:
    forest.state[:, 0, DEPTH] += 1


def _height_off_by_one(forest: Forest) -> None:
    forest.state[_root(forest), 0, HEIGHT] += 1


def _load_forgotten(forest: Forest) -> None:
    forest.load[np.flatnonzero(forest.load)[0]] -= 1


def _load_on_the_wrong_link(forest: Forest) -> None:
    forest.load[[0, -1]] += np.array([1, -1], dtype=np.int32)


MUTANTS: list[tuple[Callable[[Forest], None], str]] = [
    (_second_root, "tree 0 needs one root, but has 2"),
    (_no_root, "tree 0 needs one root, but has 0"),
    (_port_into_the_void, "needs a neighbour behind its port"),
    (_two_ranks_that_hang_on_each_other, "needs the depth"),
    (_moved_without_the_rest, "needs the"),
    (_depth_off_by_one, "needs the depth .* one more than its parent's"),
    (_whole_tree_one_deeper, "needs the depth 0"),
    (_height_off_by_one, "needs the height .* one more than its highest child's"),
    (_load_forgotten, "as many trees as use it"),
    (_load_on_the_wrong_link, "as many trees as use it"),
]


@pytest.mark.parametrize(("mutate", "words"), MUTANTS)
def test_the_proof_refuses_a_forest_that_was_tampered_with(
    mutate: Callable[[Forest], None], words: str
) -> None:
    forest, cap = forest_of(parse_mesh("4x4", fail=["0,1"]), 3)
    check_forest(forest, cap=cap)

    mutate(forest)

    with pytest.raises(VerificationError, match=words):
        check_forest(forest, cap=cap)


def test_the_proof_refuses_trees_deeper_than_their_cap() -> None:
    forest, cap = forest_of(parse_mesh("4x4"), 2)

    with pytest.raises(VerificationError, match="capped at depth 3 needs every rank within it"):
        check_forest(forest, cap=cap - SLACK_HOPS - 1)
