"""Sums that are exchanged, or meet on their way, by real connections on tori and around slits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from local_ranks import connected, programs_of, run_all, task_for, together
from meshmend.errors import TransportError
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.table import Collective, Schedule
from meshmend.topology.text import parse_mesh
from meshmend.transport import reference
from meshmend.transport.tasks import task_of
from waiting import until


def exchange_on(shape: str, name: str) -> Schedule:
    return algorithm(name).build(parse_mesh(shape, wrap="all"), Collective.ALLREDUCE)


def check_bitwise(schedule: Schedule, n_slices: int) -> None:
    """All ranks end with the same bits; in one slice, with those of the reference."""
    programs = programs_of(schedule)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(20_011).astype(np.float32) for _ in programs]

    with connected(programs) as made:
        results = run_all(made, programs, arrays, n_slices=n_slices)

    if n_slices == 1:
        np.testing.assert_array_equal(results[0], reference.run(schedule, arrays)[0])
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    np.testing.assert_allclose(results[0], np.sum(arrays, axis=0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n_slices", [1, 3])
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ("2x4", "exchange"),
        ("2x4", "exchange-1"),
        ("4x4", "exchange"),
        ("4x4", "exchange-1"),
        ("3x3", "exchange"),
        ("5x4", "exchange-1"),
        ("1x5", "exchange"),
        ("6", "exchange"),
        ("2x2x3", "exchange-2"),
        ("4x4", "regions-4"),
        ("4x4x4", "exchange"),
        ("4x4x4", "exchange-2"),
    ],
)
def test_sums_on_a_full_torus_are_bitwise_the_references(
    shape: str, name: str, n_slices: int
) -> None:
    check_bitwise(exchange_on(shape, name), n_slices)


@pytest.mark.parametrize("name", ["exchange", "direct", "flood"])
@pytest.mark.parametrize("shape", ["2x2", "1x2"])
def test_rings_of_two_chips_exchange_over_their_only_link(shape: str, name: str) -> None:
    check_bitwise(exchange_on(shape, name), n_slices=2)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["exchange", "exchange-1", "regions-2"]),
    n_elements=st.integers(0, 40) | st.integers(0, 5000),
    n_slices=st.integers(1, 50),
    dtype=st.sampled_from(["float32", "float16", "uint8", "int64"]),
)
def test_payloads_may_be_smaller_than_the_number_of_slices(
    name: str, n_elements: int, n_slices: int, dtype: str
) -> None:
    programs = programs_of(exchange_on("2x3", name))
    arrays = [np.full(n_elements, rank, dtype=dtype) for rank in range(6)]

    with connected(programs) as made:
        results = run_all(made, programs, arrays, n_slices=n_slices)

    assert all((result == 15).all() for result in results)


def test_bfloat16_is_rounded_alike_on_every_chip() -> None:
    programs = programs_of(exchange_on("3x3", "exchange"))
    rng = np.random.default_rng(1)
    values = rng.standard_normal((9, 1000)).astype(np.float32)
    halves = [np.ascontiguousarray(each.view(np.uint16)[1::2]) for each in values]
    exact = sum((each.astype(np.uint32) << 16).view(np.float32) for each in halves)

    with connected(programs) as made:

        def run(rank: int) -> None:
            task = task_of(programs[rank], 1000, dtype="bfloat16", n_slices=4)
            made[rank].run(task, halves[rank].view(np.uint8))

        assert together(run, 9) == [None] * 9

    assert all((each == halves[0]).all() for each in halves)
    summed = (halves[0].astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(summed, exact, rtol=0.05, atol=0.1)


def test_several_exchanges_are_in_flight_at_once() -> None:
    """Sizes and slices differ, so runs overtake each other on some links and not on others."""
    programs = programs_of(exchange_on("4x4", "exchange"))
    sizes = [0, 1, 7, 50_000, 3, 200_000, 5000, 1]
    arrays = [[np.full(size, rank, dtype=np.float32) for size in sizes] for rank in range(16)]

    with connected(programs) as made:

        def run(rank: int) -> None:
            pending = [
                made[rank].start(
                    task_for(programs[rank], array, n_slices=1 + at), array.view(np.uint8)
                )
                for at, array in enumerate(arrays[rank])
            ]
            for each in pending:
                each.wait()

        assert together(run, 16) == [None] * 16

    assert all((array == 120).all() for mine in arrays for array in mine)


def test_a_chip_that_dies_in_the_middle_of_an_exchange_stops_every_other() -> None:
    programs = programs_of(exchange_on("3x4", "exchange"))
    arrays = [np.ones(100_000, dtype=np.float32) for _ in programs]

    with connected(programs, reports_failures=True) as made:

        def run(rank: int) -> None:
            if rank == 5:
                until(lambda: all(each.sent_bytes() for each in made[:5]))
                made[5].close()
                return
            task = task_for(programs[rank], arrays[rank], n_slices=3)
            made[rank].run(task, arrays[rank].view(np.uint8))

        outcome = together(run, 12)

    assert all(isinstance(error, TransportError) for error in outcome[:5] + outcome[6:])
    assert all("rank 5 hung up on rank" in str(error) for error in outcome[:5] + outcome[6:])


@pytest.mark.parametrize("n_slices", [1, 3])
@pytest.mark.parametrize(("shape", "hole"), [("4x5", "1x3@1,1"), ("5x4", "3x1@1,2"), ("2x2", "")])
def test_sums_that_meet_in_the_gaps_of_a_slit_are_bitwise_the_references(
    shape: str, hole: str, n_slices: int
) -> None:
    mesh = parse_mesh(shape, fail=hole.split())
    schedule = algorithm("two-roots").build(mesh, Collective.ALLREDUCE)
    check_bitwise(schedule, n_slices)
