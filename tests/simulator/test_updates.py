"""The time of updates: by hand, one after another at each owner, and never in the way of others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import COPY, REDUCE, Collective, Schedule
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import Simulation, simulate
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from strategies import Row, connected_meshes, schedule_from

UPDATE = Collective.SHARDED_UPDATE
UNIT = Fabric("unit", 1.0, 1.0, 0.25, update_bytes_per_s=0.5)


def simulated(
    mesh: Mesh, schedule: Schedule, machine: Fabric, size: float, slices: int = 1
) -> Simulation:
    routes = placed(mesh, schedule).routes
    program = program_of(schedule, hazards_of(schedule), routes)
    return simulate(program, machine, payload_bytes=size, slices=slices, trace=True)


def pair(owners: list[int]) -> Schedule:
    """Two ranks; chunk c is summed at its owner, updated, and sent back."""
    rows: list[Row] = []
    for chunk, owner in enumerate(owners):
        rows += [
            (1 - owner, owner, chunk, chunk + 1, REDUCE),
            (owner, 1 - owner, chunk, chunk + 1, COPY),
        ]
    return schedule_from(rows, n_ranks=2, n_chunks=len(owners), collective=UPDATE, owners=owners)


def test_an_update_takes_place_between_the_sum_and_the_copy() -> None:
    result = simulated(parse_mesh("2"), pair([0]), UNIT, 4.0)

    # Up: 0.25 + 4 to send, 1 to arrive. The update: 4 / 0.5. Down as up.
    assert result.time_s == 5.25 + 8 + 5.25
    assert result.trace is not None
    assert len(result.trace.row) == 2  # an update is no message
    assert result.channel_busy_s.sum() == 2 * 4.25


def test_an_owner_updates_one_chunk_after_another() -> None:
    two_at_one = simulated(parse_mesh("2"), pair([0, 0]), UNIT, 8.0).time_s
    one_each = simulated(parse_mesh("2"), pair([0, 1]), UNIT, 8.0).time_s

    assert two_at_one == 5.25 + 8 + 8 + 5.25  # the second sum waits for the first update
    assert one_each == 5.25 + 8 + 5.25


def test_slices_overlap_updates_with_messages() -> None:
    times = [
        simulated(parse_mesh("2"), pair([0]), UNIT, 4.0, slices).time_s for slices in (1, 2, 4)
    ]

    assert times[0] > times[1] > times[2] > 8


def test_one_chip_only_updates() -> None:
    schedule = ALGORITHMS["trees"].build(parse_mesh("1"), UPDATE)

    assert simulated(parse_mesh("1"), schedule, UNIT, 4.0, 2).time_s == 8


@settings(max_examples=60, deadline=None)
@given(
    connected_meshes(),
    st.sampled_from(["trees", "rings-nd", "rank-ring"]),
    st.floats(1, 1e6),
    st.integers(1, 4),
)
def test_updates_that_take_no_time_cost_nothing_and_slow_ones_bind(
    mesh: Mesh, name: str, size: float, slices: int
) -> None:
    plain = Fabric("plain", 1e9, 1e-6, 1e-7)
    slow = plain.with_(update_bytes_per_s=1e3)
    update, allreduce = (
        ALGORITHMS[name].build(mesh, each) for each in (UPDATE, Collective.ALLREDUCE)
    )

    if name != "trees":  # the same rows
        expected_s = simulated(mesh, allreduce, plain, size, slices).time_s
        # An update is a round of its own, so links may choose other messages first.
        taken_s = simulated(mesh, update, plain, size, slices).time_s
        assert taken_s == pytest.approx(expected_s, rel=0.1)
    slow_s = simulated(mesh, update, slow, size, slices).time_s
    assert slow_s >= (1 - 1e-9) * update.shares.max() * size / 1e3
