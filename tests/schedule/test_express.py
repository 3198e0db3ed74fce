"""`express`: right on every connected mesh, up and down the radius, in few messages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.planning.comparison import compared
from meshmend.planning.least_times import least_express_s
from meshmend.planning.pricing import names_to_try, price
from meshmend.planning.target import Question
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.table import Collective
from meshmend.schedule.trees import express
from meshmend.topology.fabric import fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.trees.axis_trees import (
    axis_tree_packing,
    straight_to,
)
from strategies import connected_meshes

REFERENCE = fabric("reference")


@settings(max_examples=100, deadline=None)
@given(connected_meshes())
def test_it_is_right_on_any_connected_mesh_in_twice_the_radius(mesh: Mesh) -> None:
    schedule = express(mesh, Collective.ALLREDUCE)
    check_contributions(schedule, exact=True)

    routes = placed(mesh, schedule).routes
    chain = remaining_hops(schedule, hazards_of(schedule), routes).max(initial=0)
    assert chain == 2 * mesh_figures(mesh).radius
    assert not schedule.has_scratch


@pytest.mark.parametrize("fail", ["", "4x2@0,0", "1x12@7,2", "2x2@7,7 0,15"])
def test_messages_go_straight_along_lines_around_holes_anywhere(fail: str) -> None:
    mesh = parse_mesh("16x16", fail=fail.split())
    schedule = express(mesh, Collective.ALLREDUCE)
    check_contributions(schedule)

    apart = mesh.coordinates[schedule.src] - mesh.coordinates[schedule.dst]
    assert ((apart != 0).sum(axis=1) == 1).all()


@pytest.mark.parametrize("shape", ["1x1", "1x9", "9x1", "2x2", "3x1x5"])
def test_it_is_right_on_the_smallest_and_narrowest_meshes(shape: str) -> None:
    check_contributions(express(parse_mesh(shape), Collective.ALLREDUCE), exact=True)


def test_on_a_full_mesh_a_sum_takes_one_message_for_each_axis() -> None:
    """From (0, 0) of 8x8: straight along its row, straight along the column, and back."""
    mesh = Mesh((8, 8))
    packing = axis_tree_packing(mesh)
    takers = straight_to(mesh, packing)

    for root, taker in zip(packing.roots.tolist(), takers, strict=True):
        corner = 0
        assert taker[taker[corner]] == root
    assert len(set(packing.roots.tolist())) == 2


def test_every_second_rank_of_a_line_hands_its_sum_to_the_next() -> None:
    mesh = Mesh((1, 9))
    packing = axis_tree_packing(mesh)

    assert packing.roots.tolist() == [4]
    assert straight_to(mesh, packing)[0].tolist() == [4, 4, 4, 4, -1, 4, 4, 4, 4]
    assert straight_to(mesh, packing, in_pairs=True)[0].tolist() == [4, 2, 4, 4, -1, 4, 4, 6, 4]


@settings(max_examples=25, deadline=None)
@given(connected_meshes(), st.sampled_from([0.0, 1e3, 1e5, 1e7]))
def test_nothing_beats_the_bound_that_rules_it_out(mesh: Mesh, payload_bytes: float) -> None:
    question = Question(mesh, payload_bytes, REFERENCE)

    assert price(question, "express").time_s >= (1 - 1e-9) * least_express_s(question)


@pytest.mark.parametrize(
    ("shape", "fail", "payload_bytes", "most"),
    [
        ("32x32", "4x2@14,14", 1e3, 1.06),
        ("32x32", "4x2@14,14", 1e4, 1.08),
        ("16x32", "4x2@6,14", 1e3, 1.158),
        ("8x8", "2x2@2,2", 3e4, 1.47),
    ],
)
def test_auto_takes_it_for_short_payloads_on_meshes(
    shape: str, fail: str, payload_bytes: float, most: float
) -> None:
    result = compared(parse_mesh(shape, fail=[fail]), REFERENCE, payload_bytes, ["auto"])

    assert result.earlier_ratio(result.prices[0]) <= most
    assert result.prices[0].detail == "express"


def test_auto_does_not_ask_for_it_where_an_exchange_takes_half_of_the_hops() -> None:
    assert "express" in set(names_to_try(Mesh((8, 8))))
    assert "express" not in set(names_to_try(Mesh((8, 8), (True, False))))
