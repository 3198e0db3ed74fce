"""The schedule `trees`: right on any connected mesh, and near the limit."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.planning.packed_trees import TreeKind, TreeShape, packing_of, trees_of
from meshmend.planning.straight_finalists import straight_finalists
from meshmend.planning.target import Question
from meshmend.planning.tree_finalists import finalists
from meshmend.planning.tree_formula import (
    MOST_SLICES,
    Pipeline,
    PipelineRequest,
    TreeFigures,
    TreeFormula,
)
from meshmend.planning.tree_search import USUAL_DELAY_HOPS_PER_HOP, best_pipeline, best_trees
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.placement import placed
from meshmend.schedule.proofs import check_hops
from meshmend.schedule.table import COPY, REDUCE, SUMS, Collective
from meshmend.schedule.trees import owner_tree_schedule, tree_schedule, usual_tree_count
from meshmend.simulator.limit import limit
from meshmend.topology.deadlock import check_deadlock_free
from meshmend.topology.fabric import fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.trees.rooted_trees import rooted_packing
from meshmend.trees.tree_packing import tree_packing
from strategies import connected_meshes

REFERENCE = fabric("reference")
SMALL = parse_mesh("8x8", fail=["2x2@2,2"])
MEDIUM = parse_mesh("16x32", fail=["4x2@6,14"])
LARGE = parse_mesh("32x32", fail=["4x2@14,14"])
SQUARE = Mesh((16, 16))


def ratio(mesh: Mesh, payload_bytes: float) -> float:
    found = best_trees(Question(mesh, payload_bytes, REFERENCE))
    return found.simulation.time_s / limit(mesh, REFERENCE, payload_bytes).bandwidth_or_latency_s


@settings(max_examples=40, deadline=None)
@given(connected_meshes(), st.integers(1, 6), st.sampled_from(list(SUMS)))
def test_it_is_right_and_free_of_deadlock_on_any_connected_mesh(
    mesh: Mesh, n_trees: int, collective: Collective
) -> None:
    if collective is Collective.ALLREDUCE:
        schedule = tree_schedule(tree_packing(mesh, n_trees=n_trees), collective)
    else:
        packing = rooted_packing(mesh, n_trees=n_trees * mesh.n_live, both_ways=True)
        schedule = owner_tree_schedule(packing, collective)

    placement = placed(mesh, schedule)

    assert schedule.collective is collective
    assert check_contributions(schedule).method == "exact"
    check_hops(schedule, placement)
    check_deadlock_free(mesh, placement.routes)


@settings(max_examples=15, deadline=None)
@given(connected_meshes(), st.floats(0, 1e7))
def test_what_is_found_takes_no_longer_than_its_worst_case(
    mesh: Mesh, payload_bytes: float
) -> None:
    """Even if every message waited for every other that its links carry, hop after hop."""
    found = best_trees(Question(mesh, payload_bytes, REFERENCE))
    packing = packing_of(found.trees.mesh, found.trees.shape)
    slices = found.pipeline.slices
    load = round(packing.max_load * packing.n_trees)
    least_s = limit(mesh, REFERENCE, payload_bytes).time_s

    size = payload_bytes * packing.weights.max() / slices
    hold_s = REFERENCE.message_overhead_s + size / REFERENCE.link_bandwidth_bytes_per_s
    queue_s = load * slices * hold_s + REFERENCE.hop_latency_s
    assert least_s <= found.simulation.time_s * (1 + 1e-9)
    assert found.simulation.time_s <= 2 * packing.depth * queue_s + 1e-12


def test_the_smallest_tree_sums_up_and_comes_down() -> None:
    packing = tree_packing(parse_mesh("1x3"), n_trees=1)

    schedule = tree_schedule(packing, Collective.ALLREDUCE)

    rows = list(zip(schedule.src, schedule.dst, schedule.op, strict=True))
    assert rows == [(0, 1, REDUCE), (2, 1, REDUCE), (1, 0, COPY), (1, 2, COPY)]
    assert schedule.owners.tolist() == [1]
    assert [phase.name for phase in schedule.phases] == ["reduce up", "broadcast down"]


def test_the_usual_number_of_trees_is_small_and_spreads_them_well() -> None:
    assert [usual_tree_count(mesh) for mesh in (parse_mesh("1x1"), parse_mesh("1x4"))] == [1, 1]
    assert (usual_tree_count(SMALL), usual_tree_count(LARGE)) == (5, 19)


@pytest.mark.parametrize(
    ("payload_bytes", "most"),
    [(1e3, 1.30), (1e5, 1.7), (1e6, 2.5), (1e7, 1.3), (1e8, 1.09), (1e9, 1.05)],
)
def test_on_8x8_with_a_hole_it_stays_near_the_limit(payload_bytes: float, most: float) -> None:
    assert ratio(SMALL, payload_bytes) <= most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "payload_bytes", "most"),
    [
        (MEDIUM, 1e3, 1.20),
        (MEDIUM, 1e5, 1.4),
        (MEDIUM, 1e6, 1.9),
        (MEDIUM, 1e7, 1.76),
        (MEDIUM, 1e8, 1.22),
        (MEDIUM, 1e9, 1.07),
        (LARGE, 1e3, 1.18),
        (LARGE, 1e5, 1.35),
        (LARGE, 1e6, 1.7),
        (LARGE, 1e7, 1.95),
        (LARGE, 1e8, 1.20),
        (LARGE, 1e9, 1.06),
    ],
)
def test_on_large_meshes_with_a_hole_it_stays_near_the_limit(
    mesh: Mesh, payload_bytes: float, most: float
) -> None:
    assert ratio(mesh, payload_bytes) <= most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "wrap", "fail"),
    [
        ("15x13", "none", ["3,4"]),
        ("9x9", "none", []),
        ("16x16", "none", ["link:3,4-3,5", "link:9,9-10,9"]),
        ("16x16", "none", ["2x2@2,2", "2x2@10,4", "2x2@6,12"]),
        ("8x8x8", "none", []),
        ("16x16", "all", ["4x2@6,6"]),
        ("8x8x8", "all", ["2x2x2@2,2,2"]),
        ("1x16", "none", []),
        ("2x20", "none", ["0,7"]),
    ],
)
def test_no_other_mesh_is_worse_than_1_35_at_a_gigabyte(
    shape: str, wrap: str, fail: list[str]
) -> None:
    assert ratio(parse_mesh(shape, wrap=wrap, fail=fail), 1e9) <= 1.35


@pytest.mark.parametrize("slices", [1, 3, 20])
def test_a_number_of_slices_that_is_given_is_kept(slices: int) -> None:
    found = best_trees(Question(SMALL, 1e6, REFERENCE), slices=slices)

    assert found.pipeline.slices == found.simulation.slices == slices


def test_the_same_question_has_the_same_answer_and_can_be_simulated_again() -> None:
    one, other = (best_trees(Question(SMALL, 3e5, REFERENCE)) for _ in range(2))

    assert (one.trees.shape, one.pipeline) == (other.trees.shape, other.pipeline)
    again = trees_of(SMALL, one.trees.shape).simulated(REFERENCE, 3e5, one.pipeline)
    assert again.time_s == one.simulation.time_s


def test_a_delay_keeps_a_long_pipeline_from_drifting() -> None:
    trees = trees_of(SMALL, TreeShape(5, 1))
    pipeline = TreeFormula(trees.figures, REFERENCE, 1e8).pipeline(200, USUAL_DELAY_HOPS_PER_HOP)

    plain = trees.simulated(REFERENCE, 1e8, Pipeline(200))
    delayed = trees.simulated(REFERENCE, 1e8, pipeline)

    assert delayed.time_s < plain.time_s


def test_trees_that_fill_gaps_are_faster_only_if_their_leaves_come_last() -> None:
    found = best_trees(Question(SMALL, 1e7, REFERENCE))
    all_alike = replace(found.pipeline, leaves_last=False)

    assert found.trees.shape.kind is TreeKind.GAP_FILLING
    assert found.pipeline.leaves_last
    assert found.trees.simulated(REFERENCE, 1e7, all_alike).time_s > 1.01 * found.time_s


def test_a_payload_that_passes_in_the_time_of_the_way_gets_straight_trees() -> None:
    found = best_trees(Question(SQUARE, 1e6, REFERENCE))
    others = [
        trees.simulated(REFERENCE, 1e6, best_pipeline(trees, REFERENCE, 1e6)).time_s
        for trees in finalists(SQUARE, PipelineRequest(REFERENCE, 1e6, SQUARE.n_live))
    ]

    assert found.trees.shape.kind is TreeKind.STRAIGHT
    assert found.time_s < 0.99 * min(others)
    placement = placed(SQUARE, found.trees.schedule)
    check_deadlock_free(SQUARE, placement.routes)
    check_hops(found.trees.schedule, placement)


def test_the_leaves_of_straight_trees_go_last_and_all_slices_are_simulated() -> None:
    found = best_trees(Question(SQUARE, 4e6, REFERENCE))

    assert found.trees.shape.kind is TreeKind.STRAIGHT
    assert found.pipeline.leaves_last
    assert found.simulation.slices == found.pipeline.slices  # none of its time is estimated


@pytest.mark.parametrize(
    ("mesh", "payload_bytes"),
    [
        (Mesh((16, 16), wrap=(True, True)), 1e6),  # has no corners
        (Mesh((1, 40)), 1e6),  # one link at its ends
        (Mesh((4, 4)), 1e5),  # so small that other trees are as good
        (Mesh((50, 50)), 1e7),  # so large that bending takes too long
        (SQUARE, 1e3),  # the gap is longer than all bytes
        (SQUARE, 1e9),  # the gap is nothing beside the bytes
        (SQUARE, 0.0),
    ],
)
def test_where_straight_trees_cannot_be_the_fastest_none_are_searched(
    mesh: Mesh, payload_bytes: float
) -> None:
    assert straight_finalists(mesh, PipelineRequest(REFERENCE, payload_bytes, mesh.n_live)) == []


@given(st.integers(1, 400), st.floats(1e5, 1e9), st.integers(2, 80))
def test_with_one_slice_more_a_hop_would_take_longer_than_its_messages(
    slices: int, payload_bytes: float, n_trees: int
) -> None:
    formula = TreeFormula(TreeFigures(n_trees, 34, n_trees / 2), REFERENCE, payload_bytes)
    tree_s = payload_bytes / n_trees / REFERENCE.link_bandwidth_bytes_per_s

    def in_a_hop(slices: int) -> float:
        hold_s = REFERENCE.message_overhead_s + tree_s / slices
        return REFERENCE.hop_latency_s / hold_s

    aligned = formula.aligned_slices(slices)

    assert aligned >= slices
    n_meanwhile = math.ceil(in_a_hop(slices) - 1e-6)
    assert in_a_hop(aligned) <= n_meanwhile + 1e-6
    assert aligned == MOST_SLICES or n_meanwhile == 10 or in_a_hop(aligned + 1) > n_meanwhile - 1e-6


@pytest.mark.parametrize("payload_bytes", [1e5, 1e6, 1e7, 1e8])
def test_the_formula_is_least_at_its_slices_and_near_the_simulation(payload_bytes: float) -> None:
    trees = trees_of(SMALL, TreeShape(5, 1))
    formula = TreeFormula(trees.figures, REFERENCE, payload_bytes)
    slices = formula.best_slices()

    formula_s = formula.time_s(slices)

    for other in (slices // 2, slices * 2):
        if other:
            assert formula_s <= formula.time_s(other)
    pipeline = formula.pipeline(slices, USUAL_DELAY_HOPS_PER_HOP)
    simulated_s = trees.simulated(REFERENCE, payload_bytes, pipeline).time_s
    assert simulated_s == pytest.approx(formula_s, rel=0.15)
