"""The plan that is fastest in lockstep: its trees are chosen for the steps that all chips take."""

import pytest

from lockstep_interpreter import check_program
from meshmend import plan
from meshmend.errors import InputError, UnsupportedError
from meshmend.planning.lowering import lockstep_plan, lowered
from meshmend.topology.mesh import Mesh
from sweeps import spread

HOLE = Mesh((8, 8)).without("2x2@2,2")


@pytest.mark.parametrize(
    ("mesh", "algorithm"),
    spread(
        [Mesh((4, 4)).without("2x2@0,2"), HOLE, Mesh((16, 16)).without("4x2@6,6")],
        ["trees", "auto"],
        one_in=2,
    ),
)
def test_eight_slices_take_at_most_a_quarter_more_steps_than_the_busiest_link_or_longest_chain(
    mesh: Mesh, algorithm: str
) -> None:
    low = lockstep_plan(mesh, algorithm, slices=8)

    assert low.program.slices == 8
    assert low.program.n_steps <= 1.25 * max(low.program.busiest, low.program.depth)


@pytest.mark.parametrize(
    ("mesh", "payload", "slices"),
    spread(
        [
            HOLE,
            Mesh((1, 5)),
            Mesh((3, 5)).without("1,1"),
            Mesh((2, 3, 4)).without("0,1,2"),
            Mesh((4, 4), wrap=(True, True)).without("2x2@0,2"),
        ],
        ["1KB", "1MB", "100MB"],
        [1, 8, None],
        one_in=5,
    ),
)
def test_it_is_never_slower_than_the_plan_that_runs_freely(
    mesh: Mesh, payload: str, slices: int | None
) -> None:
    free = plan(mesh, payload=payload)
    if free.schedule.has_scratch:  # no program of steps has scratch
        free = plan(mesh, "trees", payload=payload)
    usual = lowered(free, slices=slices)

    low = lockstep_plan(mesh, payload=payload, slices=slices)

    assert low.time_s <= usual.time_s
    check_program(low.program)


def test_few_slices_of_a_long_payload_take_more_trees() -> None:
    usual = lowered(plan(HOLE, "trees"), slices=8)

    low = lockstep_plan(HOLE, "trees", slices=8)

    assert low.plan.schedule.n_chunks > 2 * usual.plan.schedule.n_chunks
    assert low.time_s < 0.75 * usual.time_s


def test_another_algorithm_is_lowered_as_it_is() -> None:
    low = lockstep_plan(HOLE, "ft-two-d", slices=4)

    assert low.plan.schedule.algorithm == "ft-two-d"
    assert low.program.n_steps == lowered(plan(HOLE, "ft-two-d"), slices=4).program.n_steps


def test_a_single_chip_and_a_cut_mesh_are_planned() -> None:
    alone = lockstep_plan(Mesh((1, 1)))
    cut = lockstep_plan(Mesh((3, 4)).without("3x1@0,2"))

    assert alone.program.n_steps == 0
    assert cut.plan.schedule.n_ranks == 6
    assert len(cut.plan.stranded) == 3


def test_bad_requests_are_refused() -> None:
    with pytest.raises(InputError, match="needs one slice or more, but got 0"):
        lockstep_plan(HOLE, slices=0)
    with pytest.raises(UnsupportedError):
        lockstep_plan(HOLE, "two-d")
