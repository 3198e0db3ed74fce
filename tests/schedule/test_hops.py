"""Hops: a row without a route, and a route over a dead link, are caught."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from meshmend.errors import VerificationError
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.placement import Placement, placed
from meshmend.schedule.proofs import check_hops
from meshmend.schedule.table import REDUCE, Collective
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import routes_for
from strategies import connected_meshes, schedule_from

MESH = Mesh((3, 3))


@settings(max_examples=50)
@given(connected_meshes())
def test_what_is_placed_passes(mesh: Mesh) -> None:
    schedule = ALGORITHMS["rank-ring"].build(mesh, Collective.ALLREDUCE)

    check_hops(schedule, placed(mesh, schedule))


def test_every_link_that_dies_under_a_route_is_caught() -> None:
    schedule = ALGORITHMS["two-d"].build(MESH, Collective.ALLREDUCE)
    routes = placed(MESH, schedule).routes
    check_hops(schedule, Placement(MESH, routes))
    names = [",".join(map(str, chip)) for chip in MESH.live]

    for one, other in MESH.links:
        broken = MESH.without(f"link:{names[one]}-{names[other]}")
        with pytest.raises(VerificationError, match="needs live links all the way, but the one"):
            check_hops(schedule, Placement(broken, routes))


def test_a_row_without_a_route_is_caught_by_name() -> None:
    schedule = schedule_from([(0, 1, 0, 1, REDUCE), (1, 5, 0, 1, REDUCE)], n_ranks=9, n_chunks=1)
    good = placed(MESH, schedule)
    check_hops(schedule, good)
    short = routes_for(MESH, np.array([0, 5]), np.array([1, 1]))

    with pytest.raises(VerificationError, match=r"every row needs a route, but .*rank 1.*rank 5"):
        check_hops(schedule, Placement(MESH, short))


def test_routes_of_another_mesh_are_caught() -> None:
    schedule = ALGORITHMS["rank-ring"].build(MESH, Collective.ALLREDUCE)
    routes = placed(MESH, schedule).routes

    with pytest.raises(VerificationError, match="these routes are for 9 ranks"):
        check_hops(schedule, Placement(Mesh((2, 3)), routes))
    small = ALGORITHMS["rank-ring"].build(Mesh((2, 2)), Collective.ALLREDUCE)
    with pytest.raises(VerificationError, match="for 4 ranks, but the schedule has 9"):
        check_hops(schedule, placed(Mesh((2, 2)), small))


def test_a_route_that_ends_elsewhere_is_caught() -> None:
    schedule = schedule_from([(0, 1, 0, 1, REDUCE)], n_ranks=9, n_chunks=1)
    routes = replace(placed(MESH, schedule).routes, dst=np.array([2], dtype=np.int32))

    with pytest.raises(VerificationError, match=r"from \(0, 0\) to \(0, 2\) ends at \(0, 1\)"):
        check_hops(schedule, Placement(MESH, routes))
