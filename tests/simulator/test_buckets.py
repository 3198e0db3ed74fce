"""Several sums in flight in the simulator: what they cost, and that they are what they claim."""

import pytest

from meshmend.errors import InputError, UnitError
from meshmend.planning.bucket_comparison import (
    Buckets,
    compared_buckets,
    fastest_in_flight,
    in_flight,
    repeated,
)
from meshmend.planning.proof import prove
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import Collective, Schedule
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import Simulation, simulate
from meshmend.topology.fabric import fabric
from meshmend.topology.routes import Routes
from meshmend.topology.text import parse_mesh
from meshmend.units import parse_buckets

HOLE = parse_mesh("4x4", fail=["2x2@0,2"])
FABRIC = fabric("tpu-v3")
NAMES = ["ring-1d", "ft-two-d", "trees"]


def made(name: str) -> tuple[Schedule, Routes]:
    schedule = algorithm(name).build(HOLE, Collective.ALLREDUCE)
    return schedule, placed(HOLE, schedule).routes


def simulated(schedule: Schedule, routes: Routes, payload: float, slices: int) -> Simulation:
    program = program_of(schedule, hazards_of(schedule), routes)
    return simulate(program, FABRIC, payload_bytes=payload, slices=slices)


@pytest.mark.parametrize("name", NAMES)
def test_several_sums_are_a_schedule_that_sums(name: str) -> None:
    schedule, _ = made(name)

    several = repeated(schedule, 3)

    assert (several.n_rows, several.n_chunks) == (3 * schedule.n_rows, 3 * schedule.n_chunks)
    prove(HOLE, several)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n_sums", "slices"), [(1, 3), (2, 1), (5, 1), (4, 3)])
def test_sums_in_flight_take_exactly_as_long_as_that_many_more_slices_of_one_sum(
    name: str, n_sums: int, slices: int
) -> None:
    """Slices do not wait for each other and the earlier goes first: so do sums in flight."""
    schedule, routes = made(name)
    one = simulated(schedule, routes, 25e6, slices)

    together = in_flight(one, routes, n_sums, slices=slices)

    whole = simulated(schedule, routes, n_sums * 25e6, n_sums * slices)
    assert together.time_s == pytest.approx(whole.time_s, rel=1e-9)
    assert together.channel_busy_s == pytest.approx(whole.channel_busy_s)


@pytest.mark.parametrize("name", NAMES)
def test_sums_in_flight_cost_less_than_one_at_a_time(name: str) -> None:
    schedule, routes = made(name)
    one = simulated(schedule, routes, 1e6, 2)

    assert one.time_s < fastest_in_flight(one, routes, 8).time_s < 8 * one.time_s


def test_the_comparison_has_every_algorithm_for_the_whole_mesh_next_to_one_sum() -> None:
    result = compared_buckets(HOLE, FABRIC, Buckets(4, 250_000), ["all", "auto"])

    assert {price.name for price in result.prices} >= {"auto", *NAMES}
    assert not {"sub-mesh", "drop-lines"} & {price.name for price in result.prices}
    for price in result.prices:
        assert price.whole.payload_bytes == 1_000_000
        assert price.together.time_s <= price.one_at_a_time_s
        assert price.together.time_s >= result.whole.limit.time_s
    times = [price.together.time_s for price in result.prices]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("25MB", "buckets need a number and a size, but got '25MB'; write 4x25MB"),
        ("x25MB", "buckets need a number"),
        ("-1x25MB", "buckets need a number"),
        ("4.5x1MB", "buckets need a number"),
        ("4x", "a size"),
        ("4x25Mb", "a size"),
    ],
)
def test_buckets_that_cannot_be_read_are_refused(text: str, match: str) -> None:
    with pytest.raises(UnitError, match=match):
        parse_buckets(text)


def test_buckets_are_read() -> None:
    assert parse_buckets("4x25MB") == (4, 25_000_000)
    assert parse_buckets("100 x 64KiB") == (100, 65_536)


@pytest.mark.parametrize(("n", "size"), [(0, 10), (1001, 10), (3, 0)])
def test_too_few_or_too_many_buckets_are_refused(n: int, size: int) -> None:
    with pytest.raises(InputError, match="--buckets needs 1 to 1000 buckets of a byte or more"):
        Buckets(n, size)


def test_a_baseline_is_refused_because_it_sums_on_another_mesh() -> None:
    with pytest.raises(InputError, match="--buckets needs algorithms for the whole mesh, but got"):
        compared_buckets(HOLE, FABRIC, Buckets(2, 1000), ["sub-mesh"])


def test_no_sum_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="repeated needs one sum or more, but got 0"):
        repeated(made("ring-1d")[0], 0)
