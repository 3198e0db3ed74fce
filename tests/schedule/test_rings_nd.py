"""`rings-nd`: right on every connected mesh, at the least load on tori, in half a ring of hops."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import channel_loads, placed
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.rings_nd import rings_nd
from meshmend.schedule.table import SUMS, Collective
from meshmend.topology.mesh import Mesh
from meshmend.topology.packing_number import packing_number
from meshmend.topology.text import parse_mesh
from strategies import connected_meshes

COLLECTIVES = list(SUMS)
TORI = ["4x4", "6x4", "5x5", "3x4x5", "4x4x4", "4x3x4x3", "8"]


@settings(max_examples=200, deadline=None)
@given(connected_meshes(), st.sampled_from(COLLECTIVES))
def test_it_is_right_on_any_connected_mesh(mesh: Mesh, collective: Collective) -> None:
    schedule = rings_nd(mesh, collective)

    check_contributions(schedule, exact=True)
    assert (schedule.algorithm, schedule.collective) == ("rings-nd", collective)


@pytest.mark.parametrize("shape", [(8, 8), (4, 4, 6), (3, 2, 2, 3), (1, 9), (1, 1), (2,)])
@pytest.mark.parametrize("wraps", [True, False])
def test_it_is_right_on_full_meshes_and_tori(shape: tuple[int, ...], wraps: bool) -> None:
    for collective in COLLECTIVES:
        check_contributions(rings_nd(Mesh(shape, (wraps,) * len(shape)), collective), exact=True)


@pytest.mark.parametrize("holes", ["2x2x1@0,0,0", "4x1x4@0,1,0", "1,1,1 3,3,3", "3x3x3@0,0,0"])
def test_it_goes_around_holes_of_boards_planes_and_cubes(holes: str) -> None:
    mesh = parse_mesh("4x4x4", wrap="all", fail=holes.split())

    check_contributions(rings_nd(mesh, Collective.ALLREDUCE), exact=True)


@pytest.mark.parametrize("shape", TORI)
def test_on_a_torus_no_channel_carries_more_than_the_limit_allows(shape: str) -> None:
    """Both halves together: the payload over the packing number, on every channel alike."""
    mesh = parse_mesh(shape, wrap="all")
    schedule = rings_nd(mesh, Collective.ALLREDUCE)
    loads = channel_loads(schedule, placed(mesh, schedule).routes)

    is_channel = mesh.neighbor_ranks.reshape(-1) >= 0
    assert_allclose(loads[is_channel], 1 / packing_number(mesh).upper, rtol=1e-9)


@pytest.mark.parametrize("shape", ["8x8", "4x6", "5x5", "4x4x4"])
def test_on_a_mesh_both_halves_together_reach_the_limit_as_well(shape: str) -> None:
    mesh = parse_mesh(shape)
    schedule = rings_nd(mesh, Collective.ALLREDUCE)
    loads = channel_loads(schedule, placed(mesh, schedule).routes)

    least = (mesh.n_live - 1) / len(mesh.links)
    assert loads.max() == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("shape", TORI)
def test_on_a_full_torus_every_hop_is_a_neighbour_and_a_ring_takes_half_its_length(
    shape: str,
) -> None:
    mesh = parse_mesh(shape, wrap="all")
    schedule = rings_nd(mesh, Collective.REDUCE_SCATTER)
    routes = placed(mesh, schedule).routes

    assert routes.max_hops == 1
    chain = remaining_hops(schedule, hazards_of(schedule), routes).max()
    assert chain == sum(size // 2 for size in mesh.shape)


def test_failed_chips_own_nothing_and_the_others_own_alike() -> None:
    mesh = parse_mesh("4x4", wrap="all", fail=["1,1", "2,3"])
    schedule = rings_nd(mesh, Collective.ALLREDUCE)

    owned = np.bincount(schedule.owners, np.diff(schedule.cuts), mesh.n_live)
    assert_allclose(owned, 1 / mesh.n_live)


def test_a_line_hands_its_sums_to_its_neighbour_before_a_hole() -> None:
    """On 3x3 less its middle: (1, 0) cannot send down its row, so it sends along its column."""
    mesh = Mesh((3, 3)).without("1,1")
    schedule = rings_nd(mesh, Collective.REDUCE_SCATTER)
    routes = placed(mesh, schedule).routes

    before_hole = mesh.rank_of[1, 0]
    takers = {
        mesh.live[dst]
        for src, dst in zip(schedule.src.tolist(), schedule.dst.tolist(), strict=True)
        if src == before_hole and routes.path(mesh, src, dst) is not None
    }
    assert {(0, 0), (2, 0)} <= takers
    assert math.isclose(sum(np.diff(schedule.cuts)), 1)
