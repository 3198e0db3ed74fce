"""One function proves: what is wrong in data, hops or routes does not get past it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from meshmend.errors import DeadlockError, InputError, VerificationError
from meshmend.planning import proof
from meshmend.planning.proof import check_probe, prove
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import Placement, placed
from meshmend.schedule.spanning import broadcast, spread, spread_in_parts, tree_sum
from meshmend.schedule.table import Collective, Schedule
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import routes_for
from strategies import connected_meshes

HOLE = Mesh((4, 4)).without("2x2@0,2")
RING = ALGORITHMS["ring-1d"].build(HOLE, Collective.ALLREDUCE)


def without_last_row(schedule: Schedule) -> Schedule:
    columns = {name: getattr(schedule, name)[:-1] for name in ("src", "dst", "lo", "hi", "op")}
    return replace(schedule, phases=(), **columns)


@given(connected_meshes())
def test_trees_and_broadcasts_are_proved_on_any_connected_mesh(mesh: Mesh) -> None:
    last = mesh.n_live - 1

    for schedule in (tree_sum(mesh), broadcast(mesh, last)):
        proved = prove(mesh, schedule)
        assert (proved.mesh, proved.schedule, proved.proof.method) == (mesh, schedule, "exact")
        assert np.array_equal(proved.hazards.send, hazards_of(schedule).send)
    for spreads in (spread, spread_in_parts):
        proved = prove(mesh, spreads(mesh, [0, last]), replicas=[0, last])
        assert proved.proof.method == "exact"


def test_wrong_data_are_refused() -> None:
    prove(HOLE, RING)

    with pytest.raises(VerificationError, match="misses the data of"):
        prove(HOLE, without_last_row(RING))


def test_routes_over_dead_links_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = placed(HOLE, RING).routes
    broken = HOLE.without("link:0,0-0,1")
    monkeypatch.setattr(proof, "placed", lambda mesh, schedule: Placement(mesh, routes))

    with pytest.raises(VerificationError, match="link"):
        prove(broken, RING)
    with pytest.raises(VerificationError, match="link"):
        check_probe(broken, RING)


def test_routes_that_wait_for_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortest routes between all pairs around a hole close a circle on one virtual channel."""
    mesh = Mesh((8, 8)).without("2x2@2,2")
    schedule = ALGORITHMS["ft-two-d"].build(mesh, Collective.ALLREDUCE)
    routes = routes_for(mesh, *np.nonzero(~np.eye(mesh.n_live, dtype=bool)))
    one_channel = np.zeros(routes.n_pairs, dtype=np.uint8)
    jammed = replace(routes, virtual_channel=one_channel, n_virtual_channels=1)
    monkeypatch.setattr(proof, "placed", lambda mesh, schedule: Placement(mesh, jammed))

    with pytest.raises(DeadlockError, match="waits for"):
        prove(mesh, schedule)
    with pytest.raises(DeadlockError, match="waits for"):
        check_probe(mesh, schedule)


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match="a schedule for 12 ranks needs as many live chips"):
        prove(Mesh((4, 4)), RING)


def test_a_probe_need_not_gather_what_it_sends() -> None:
    probe = without_last_row(broadcast(HOLE, 0))

    check_probe(HOLE, probe)
    with pytest.raises(VerificationError):
        prove(HOLE, probe)
