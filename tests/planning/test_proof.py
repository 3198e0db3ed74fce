"""One function proves: what is wrong in data, hops or routes does not get past it."""

from dataclasses import replace
from typing import Any

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
from meshmend.schedule.table import COPY, REDUCE, Collective, Schedule
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import routes_for
from strategies import Row, connected_meshes, schedule_from

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


def test_scratch_that_is_read_before_it_is_written_is_refused() -> None:
    """Counts do not see it: what nothing was written to counts as nothing."""
    right = ALGORITHMS["exchange"].build(Mesh((2, 2)), Collective.ALLREDUCE)
    prove(Mesh((2, 2)), right)
    more = {"src": 0, "dst": 0, "lo": 0, "hi": right.n_chunks, "op": REDUCE}
    more |= {"src_buffer": right.n_buffers, "dst_buffer": 0}
    columns: dict[str, Any] = {
        name: np.append(column, np.array(value, column.dtype))
        for name, value in more.items()
        for column in (getattr(right, name),)
    }

    with pytest.raises(VerificationError, match="nothing was written"):
        prove(Mesh((2, 2)), replace(right, **columns))


def test_a_weight_that_its_owner_has_not_updated_is_refused() -> None:
    """Rank 1 hands out the sum that rank 0 owns, without passing by rank 0."""
    rows: list[Row] = [(0, 1, 0, 1, REDUCE), (1, 0, 0, 1, COPY)]
    schedule = schedule_from(rows, n_ranks=2, n_chunks=1)
    prove(Mesh((1, 2)), schedule)

    with pytest.raises(VerificationError, match="no updated weight at rank 1"):
        prove(Mesh((1, 2)), replace(schedule, collective=Collective.SHARDED_UPDATE))


def test_routes_over_dead_links_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = placed(HOLE, RING).routes
    broken = HOLE.without("link:0,0-0,1")
    monkeypatch.setattr(proof, "placed", lambda mesh, schedule: Placement(mesh, routes))

    with pytest.raises(VerificationError, match="link"):
        prove(broken, RING)
    with pytest.raises(VerificationError, match="link"):
        check_probe(broken, RING)


def test_a_row_without_a_route_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = routes_for(HOLE, RING.src[1:2], RING.dst[1:2])
    monkeypatch.setattr(proof, "placed", lambda mesh, schedule: Placement(mesh, routes))

    for check in (prove, check_probe):
        with pytest.raises(VerificationError, match="every row needs a route, but there is none"):
            check(HOLE, RING)


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
