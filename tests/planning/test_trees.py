"""The schedule `trees`: right on any connected mesh, near the limit, quick to plan again."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import TopologyError
from meshmend.limits.limit import limit
from meshmend.overlay.tree_packing import tree_packing
from meshmend.planning.tree_choice import (
    Pipeline,
    TreeShape,
    figures_of,
    likely_skew,
    likely_slices,
    likely_time_s,
)
from meshmend.planning.tree_plan import proved_tree_plan, replanned, tree_plan
from meshmend.planning.tree_pricing import best_trees, trees_of
from meshmend.schedule.table import COPY, REDUCE, Collective
from meshmend.schedule.trees import spread_tree_schedule, tree_schedule, usual_tree_count
from meshmend.topology.fabric import fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.verify.contributions import check_contributions
from strategies import connected_meshes

REFERENCE = fabric("reference")
SMALL = parse_mesh("8x8", fail=["2x2@2,2"])
MEDIUM = parse_mesh("16x32", fail=["4x2@6,14"])
LARGE = parse_mesh("32x32", fail=["4x2@14,14"])


def ratio(mesh: Mesh, payload_bytes: float) -> float:
    found = best_trees(mesh, REFERENCE, payload_bytes)
    return found.simulation.time_s / limit(mesh, REFERENCE, payload_bytes).time_s


@settings(max_examples=40, deadline=None)
@given(connected_meshes(), st.integers(1, 6), st.sampled_from(list(Collective)))
def test_it_is_right_and_free_of_deadlock_on_any_connected_mesh(
    mesh: Mesh, n_trees: int, collective: Collective
) -> None:
    plan = tree_plan(mesh, n_trees=n_trees, collective=collective)

    assert plan.proof.method == "exact"
    assert plan.mesh == mesh
    assert plan.schedule.collective is collective


@settings(max_examples=15, deadline=None)
@given(connected_meshes(), st.floats(0, 1e7))
def test_what_is_found_takes_no_longer_than_its_worst_case(
    mesh: Mesh, payload_bytes: float
) -> None:
    """Even if every message waited for every other that its links carry, hop after hop."""
    found = best_trees(mesh, REFERENCE, payload_bytes)
    packing, slices = found.trees.packing, found.pipeline.slices
    figures = figures_of(packing)
    least_s = limit(mesh, REFERENCE, payload_bytes).time_s

    size = payload_bytes * packing.weights.max() / slices
    hold_s = REFERENCE.message_overhead_s + size / REFERENCE.link_bandwidth_bytes_per_s
    queue_s = figures.load * slices * hold_s + REFERENCE.hop_latency_s
    assert least_s <= found.simulation.time_s * (1 + 1e-9)
    assert found.simulation.time_s <= 2 * figures.depth * queue_s + 1e-12


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


@settings(max_examples=25, deadline=None)
@given(
    connected_meshes(),
    st.integers(1, 5),
    st.sampled_from([Collective.REDUCE_SCATTER, Collective.ALL_GATHER]),
)
def test_spread_halves_are_right_and_give_every_rank_its_own_equal_chunk(
    mesh: Mesh, n_trees: int, collective: Collective
) -> None:
    packing = tree_packing(mesh, n_trees=n_trees)

    schedule = spread_tree_schedule(packing, collective)

    assert schedule.owners.tolist() == list(range(mesh.n_live))
    assert np.allclose(np.diff(schedule.cuts), 1 / mesh.n_live)
    check_contributions(schedule)


@pytest.mark.parametrize(
    ("payload_bytes", "most"),
    [(1e3, 1.30), (1e5, 1.7), (1e6, 2.5), (1e7, 1.4), (1e8, 1.12), (1e9, 1.05)],
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
        (MEDIUM, 1e7, 1.9),
        (MEDIUM, 1e8, 1.22),
        (MEDIUM, 1e9, 1.07),
        (LARGE, 1e3, 1.18),
        (LARGE, 1e5, 1.35),
        (LARGE, 1e6, 1.7),
        (LARGE, 1e7, 2.0),
        (LARGE, 1e8, 1.25),
        (LARGE, 1e9, 1.08),
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
    found = best_trees(SMALL, REFERENCE, 1e6, slices=slices)

    assert found.pipeline.slices == found.simulation.slices == slices


def test_the_same_question_has_the_same_answer_and_can_be_simulated_again() -> None:
    one, other = best_trees(SMALL, REFERENCE, 3e5), best_trees(SMALL, REFERENCE, 3e5)

    assert (one.trees.shape, one.pipeline) == (other.trees.shape, other.pipeline)
    again = trees_of(SMALL, one.trees.shape).simulated(REFERENCE, 3e5, one.pipeline)
    assert again.time_s == one.simulation.time_s


def test_a_lag_keeps_a_long_pipeline_from_drifting() -> None:
    trees = trees_of(SMALL, TreeShape(5, 1))
    skew = likely_skew(trees.figures, REFERENCE, 1e8, 200)

    plain = trees.simulated(REFERENCE, 1e8, Pipeline(200))
    lagged = trees.simulated(REFERENCE, 1e8, Pipeline(200, skew))

    assert lagged.time_s < plain.time_s


@pytest.mark.parametrize("payload_bytes", [1e5, 1e6, 1e7, 1e8])
def test_the_formula_is_least_at_its_slices_and_near_the_simulation(payload_bytes: float) -> None:
    trees = trees_of(SMALL, TreeShape(5, 1))
    figures = figures_of(trees.packing)
    slices = likely_slices(figures, REFERENCE, payload_bytes)
    pipeline = Pipeline(slices, likely_skew(figures, REFERENCE, payload_bytes, slices))

    formula_s = likely_time_s(figures, REFERENCE, payload_bytes, slices)

    for other in (slices // 2, slices * 2):
        if other:
            assert formula_s <= likely_time_s(figures, REFERENCE, payload_bytes, other)
    simulated_s = trees.simulated(REFERENCE, payload_bytes, pipeline).time_s
    assert simulated_s == pytest.approx(formula_s, rel=0.15)


@settings(max_examples=20, deadline=None)
@given(connected_meshes(min_side=3), st.data())
def test_a_plan_follows_a_failure_and_its_repair(mesh: Mesh, data: st.DataObject) -> None:
    from meshmend.topology.graph import largest_part

    lost = data.draw(st.sampled_from(mesh.live))
    if mesh.n_live < 3:
        return
    broken = largest_part(mesh.without(",".join(map(str, lost))))
    plan = tree_plan(mesh, n_trees=3)

    after = replanned(plan, broken)
    back = replanned(after, mesh)

    assert after.mesh == broken
    assert back.mesh == mesh
    assert back.packing.n_trees == 3


def test_a_packing_of_another_mesh_is_refused() -> None:
    plan = tree_plan(parse_mesh("3x3"), n_trees=2)

    with pytest.raises(TopologyError, match="needs a packing of 3x3 and a new mesh of its shape"):
        replanned(plan, parse_mesh("3x4"))
    with pytest.raises(TopologyError, match="needs as many live chips"):
        proved_tree_plan(parse_mesh("3x4"), plan.packing, Collective.ALLREDUCE)


@pytest.mark.slow
def test_planning_32x32_anew_takes_a_second_and_after_a_failure_half_of_one() -> None:
    replanned(tree_plan(SMALL), SMALL.without("2x2@4,4"))  # loads what is compiled

    start = time.process_time()
    plan = tree_plan(LARGE)
    planned = time.process_time()
    replanned(plan, LARGE.without("2x2@2,2"))
    done = time.process_time()

    assert planned - start < 1.0
    assert done - planned < 0.6  # of processor time, where two threads count twice
