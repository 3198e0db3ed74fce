"""Spread trees: right on every connected mesh, and with two roots of fewer hops on tori."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshmend.planning.choose import choose, chosen_schedule, decode_choice, encode_choice
from meshmend.planning.comparison import compared
from meshmend.planning.proof import prove
from meshmend.planning.target import Question
from meshmend.planning.tree_finalists import least_tree_hops, meeting_shapes
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.table import Collective
from meshmend.schedule.trees import spread_schedule
from meshmend.topology.fabric import fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.trees.spread_trees import FEWEST_RANKS, spread_trees
from reference_sums import check_every_row_counts, check_sums
from strategies import connected_meshes


@settings(max_examples=40, deadline=None)
@given(connected_meshes(min_side=2), st.integers(1, 20), st.sampled_from([1, 2]))
def test_they_are_right_and_give_the_same_bits_on_any_connected_mesh(
    mesh: Mesh, n_trees: int, n_roots: int
) -> None:
    assume(mesh.n_live >= FEWEST_RANKS)
    schedule = spread_schedule(spread_trees(mesh, n_trees=n_trees, n_roots=n_roots))

    prove(mesh, schedule)
    check_contributions(schedule, exact=True)
    check_sums(schedule)
    assert not schedule.has_scratch


@settings(max_examples=40, deadline=None)
@given(connected_meshes(min_side=2), st.integers(1, 20), st.sampled_from([1, 2]))
def test_ways_are_shortest_and_chains_as_long_as_they_say(
    mesh: Mesh, n_trees: int, n_roots: int
) -> None:
    assume(mesh.n_live >= FEWEST_RANKS)
    trees = spread_trees(mesh, n_trees=n_trees, n_roots=n_roots)
    schedule = spread_schedule(trees)

    chains = remaining_hops(schedule, hazards_of(schedule), placed(mesh, schedule).routes)

    assert chains.max() <= trees.hops
    for ways, hops in ((trees.up, trees.up_hops), (trees.down, trees.down_hops)):
        tree, rank = np.nonzero(ways >= 0)
        assert np.all(hops[tree, ways[tree, rank]] == hops[tree, rank] - 1)
        assert np.all((ways < 0).sum(axis=1) == n_roots)
    ends = np.concatenate([trees.roots, trees.gates], axis=1)
    assert all(len(set(each)) == n_roots**2 for each in ends.tolist())


@pytest.mark.parametrize("shape", ["8x8", "12x10", "4x4x4", "6x4x8"])
def test_on_a_full_torus_they_take_one_and_a_half_diameters(shape: str) -> None:
    mesh = parse_mesh(shape, wrap="all")
    figures = mesh_figures(mesh)

    hops = spread_trees(mesh, n_trees=16, n_roots=2).hops

    assert hops == figures.diameter + figures.diameter // 2 == least_tree_hops(figures)[0]


def test_a_ring_of_eight_by_hand() -> None:
    """Roots face each other, and so do the gates, two hops from both roots."""
    trees = spread_trees(parse_mesh("8", wrap="all"), n_trees=1, n_roots=2)
    root, gate = int(trees.roots[0, 0]), int(trees.gates[0, 0])

    assert sorted(trees.roots[0]) == sorted((root, (root + 4) % 8))
    assert sorted(trees.gates[0]) == sorted(((root + 2) % 8, (root + 6) % 8))
    assert trees.down[0, (gate + 1) % 8] == gate
    assert trees.up[0, (root + 1) % 8] == root
    assert (trees.hops, trees.passed) == (2 + 2 + 2, 1)


def test_a_row_left_out_is_caught() -> None:
    mesh = parse_mesh("3x3", wrap="all")
    right = spread_schedule(spread_trees(mesh, n_trees=2, n_roots=2))

    check_every_row_counts(right)


def test_a_slow_link_counts_as_many_times_as_it_is_slow() -> None:
    mesh = parse_mesh("4x4", wrap="all")
    slow = parse_mesh("4x4", wrap="all", slow=["link:0,0-0,1=0.1"])

    assert (
        spread_trees(slow, n_trees=16, n_roots=2).load
        > 1.5 * spread_trees(mesh, n_trees=16, n_roots=2).load
    )


def test_open_meshes_and_large_ones_do_not_try_them() -> None:
    assert not list(meeting_shapes(mesh_figures(Mesh((8, 8)))))
    assert not list(meeting_shapes(mesh_figures(parse_mesh("32x32", wrap="all"))))
    assert list(meeting_shapes(mesh_figures(parse_mesh("8x8", wrap="all"))))


@pytest.mark.parametrize(
    ("shape", "wrap", "fail", "machine", "payload_bytes", "most"),
    [
        ("7x10", "all", "link:5,5-6,5", "tpu-v4", 579_488, 1.51),  # 1.53 before
        ("14x8", "1", "link:12,1-12,2", "6.15MB/s,44us,12us", 605, 1.66),  # 1.74 before
        ("6x4x7", "all", "3x2x2@1,0,0", "6.15MB/s,44us,12us", 2_291, 1.96),  # 2.28 before
        ("12x16", "all", "3x5@2,7", "reference", 607_000, 1.64),  # 1.70 with the least loaded ways
        ("11x15", "all", "2x2@9,12", "tpu-v5p", 4_120_295, 1.56),  # 1.59
    ],
)
def test_auto_takes_them_where_hops_take_as_long_as_bytes(
    shape: str, wrap: str, fail: str, machine: str, payload_bytes: float, most: float
) -> None:
    mesh = parse_mesh(shape, wrap=wrap, fail=[fail])

    found = compared(mesh, fabric(machine), payload_bytes, ["auto"])

    assert "whose sums meet" in found.winner.detail
    assert found.ratio(found.winner) <= most


def test_a_kept_choice_gives_the_same_schedule() -> None:
    mesh, machine = parse_mesh("7x10", wrap="all", fail=["link:5,5-6,5"]), fabric("tpu-v4")
    choice = choose(Question(mesh, 579_488, machine))

    kept = decode_choice(mesh, encode_choice(choice))

    assert kept == choice
    one, other = (chosen_schedule(mesh, each, Collective.ALLREDUCE) for each in (choice, kept))
    assert one == other or np.array_equal(one.src, other.src)
