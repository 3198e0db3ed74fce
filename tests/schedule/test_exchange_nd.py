"""`exchange`: right on every connected mesh, in the fewest hops, the same bits on all chips."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshmend.errors import UnsupportedError
from meshmend.planning.proof import prove
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.proofs import check_scratch
from meshmend.schedule.rings_nd import check_exchange, exchange_nd
from meshmend.schedule.table import Collective, Schedule
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import simulate
from meshmend.topology.fabric import fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from reference_sums import check_sums
from strategies import connected_meshes

SHAPES = ["4x4", "6x4", "5x5", "3x4x5", "4x4x4", "8", "1x6"]


def exchange(mesh: Mesh, n_scattered: int = 0) -> Schedule:
    return exchange_nd(mesh, Collective.ALLREDUCE, n_scattered=n_scattered)


def is_supported(mesh: Mesh, n_scattered: int) -> bool:
    try:
        check_exchange(mesh, n_scattered=n_scattered)
    except UnsupportedError:
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(connected_meshes(), st.integers(0, 2))
def test_it_is_right_and_has_the_same_bits_on_any_connected_mesh(
    mesh: Mesh, n_scattered: int
) -> None:
    assume(is_supported(mesh, n_scattered))
    schedule = exchange(mesh, n_scattered)

    check_contributions(schedule, exact=True)
    check_contributions(schedule, exact=False)
    check_scratch(schedule)
    check_sums(schedule)


@pytest.mark.parametrize("holes", ["2x2x1@0,0,0", "4x1x4@0,1,0", "1,1,1 3,3,3", "3x3x3@0,0,0"])
@pytest.mark.parametrize("n_scattered", [0, 1, 2])
def test_it_goes_around_holes_of_boards_planes_and_cubes(holes: str, n_scattered: int) -> None:
    mesh = parse_mesh("4x4x4", wrap="all", fail=holes.split())

    prove(mesh, exchange(mesh, n_scattered))


@pytest.mark.parametrize("wrap", ["all", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_without_holes_every_hop_is_a_neighbour_and_the_diameter_is_enough(
    shape: str, wrap: str
) -> None:
    mesh = parse_mesh(shape, wrap=wrap)
    schedule = exchange(mesh)
    routes = placed(mesh, schedule).routes

    assert routes.max_hops == 1
    chain = remaining_hops(schedule, hazards_of(schedule), routes).max()
    assert chain == mesh_figures(mesh).diameter


@pytest.mark.parametrize(("shape", "n_scattered"), [("4x6", 1), ("4x4x4", 1), ("4x4x4", 2)])
def test_each_axis_that_is_reduce_scattered_is_passed_twice(shape: str, n_scattered: int) -> None:
    mesh = parse_mesh(shape, wrap="all")
    schedule = exchange(mesh, n_scattered)
    chain = remaining_hops(schedule, hazards_of(schedule), placed(mesh, schedule).routes).max()

    halves = sorted(size // 2 for size in mesh.shape)
    assert chain == sum(halves) + sum(halves[len(halves) - n_scattered :])


def test_in_the_simulator_an_empty_payload_takes_the_hops_of_the_diameter() -> None:
    mesh = parse_mesh("6x4", wrap="all")
    schedule = exchange(mesh)
    program = program_of(schedule, hazards_of(schedule), placed(mesh, schedule).routes)
    machine = fabric("tpu-v4").with_(message_overhead_s=0.0)

    took = simulate(program, machine, payload_bytes=0, slices=1)

    assert took.time_s == pytest.approx(5 * machine.hop_latency_s, rel=1e-9)


def test_local_additions_take_the_time_of_the_chip() -> None:
    """A ring of three: each chip adds two sums of 300 bytes at 100 bytes a second."""
    mesh = Mesh((3,), (True,))
    schedule = exchange(mesh)
    program = program_of(schedule, hazards_of(schedule), placed(mesh, schedule).routes)
    machine = fabric("tpu-v4").with_(
        link_bandwidth_bytes_per_s=1e12,
        hop_latency_s=1.0,
        message_overhead_s=0.0,
        chip_bandwidth_bytes_per_s=100.0,
    )

    took = simulate(program, machine, payload_bytes=300, slices=1)

    assert took.time_s == pytest.approx(1.0 + 2 * 3.0, rel=1e-6)


@pytest.mark.parametrize("n_scattered", [0, 1])
def test_a_row_left_out_is_caught(n_scattered: int) -> None:
    right = exchange(parse_mesh("3x4", wrap="all"), n_scattered)
    check_contributions(right)
    check_scratch(right)
    names = ("src", "dst", "lo", "hi", "op", "src_buffer", "dst_buffer")

    for row in range(right.n_rows):
        keep = np.arange(right.n_rows) != row
        columns = {name: getattr(right, name)[keep] for name in names}
        assert is_wrong(replace(right, **columns, phases=())), right.row(row)


@pytest.mark.parametrize("name", ["src_buffer", "dst_buffer", "op"])
def test_a_row_of_another_buffer_or_operation_is_caught(name: str) -> None:
    right = exchange(parse_mesh("3x3", wrap="all"))
    caught = tried = 0

    for row in range(0, right.n_rows, 3):
        column = getattr(right, name).copy()
        column[row] = 1 - column[row] if name == "op" else (column[row] + 1) % right.n_buffers
        try:
            wrong = replace(right, **{name: column})
        except Exception:  # a row from a place to itself is no schedule at all
            continue
        tried += 1
        caught += is_wrong(wrong)
    assert tried > 10
    # A sum may arrive in a buffer that nobody needs any more; a sum that is missing may not.
    assert caught >= 0.9 * tried


def is_wrong(schedule: Schedule) -> bool:
    from meshmend.errors import VerificationError

    for check in (check_contributions, check_scratch):
        try:
            check(schedule)
        except VerificationError:
            return True
    return False


@pytest.mark.parametrize(
    ("mesh", "n_scattered", "words"),
    [
        (Mesh((8,), (True,)), 1, "exchange-1 needs 2 axes or more"),
        (Mesh((300,), (True,)), 0, "exchange needs sides of at most 255 chips together"),
    ],
)
def test_meshes_without_an_exchange_are_refused(mesh: Mesh, n_scattered: int, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        exchange(mesh, n_scattered)
