"""Lockstep programs: the interpreter proves them right, and finds every kind of wrong one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_interpreter import check_program, run_program
from meshmend import plan
from meshmend.errors import InputError, VerificationError
from meshmend.schedule import lockstep_program as module
from meshmend.schedule.lockstep_program import (
    LockstepProgram,
    in_pieces,
    lockstep_program,
    row_widths,
    with_equal_cells,
)
from meshmend.schedule.step_packing import Waits, row_graph
from meshmend.schedule.table import SUMS, Collective
from meshmend.schedule.trees import trees
from meshmend.topology.mesh import Mesh
from strategies import connected_meshes

HOLE = Mesh((4, 4)).without("2x2@0,2")


def program_of(
    mesh: Mesh,
    algorithm: str = "trees",
    *,
    slices: int = 2,
    width: int = 1,
    collective: str = "allreduce",
) -> LockstepProgram:
    schedule = with_equal_cells(plan(mesh, algorithm, collective=collective).schedule)
    return lockstep_program(in_pieces(schedule, width), slices)


@settings(max_examples=40)
@given(connected_meshes(), st.integers(1, 3), st.sampled_from(SUMS))
def test_every_tree_program_does_its_collective_and_ends_with_the_same_bits(
    mesh: Mesh, slices: int, collective: Collective
) -> None:
    schedule = with_equal_cells(trees(mesh, collective))

    check_program(lockstep_program(in_pieces(schedule, 1), slices))


@pytest.mark.parametrize("algorithm", ["trees", "ft-two-d", "ring-1d", "rings-nd", "rank-ring"])
@pytest.mark.parametrize("collective", SUMS)
def test_every_algorithm_has_programs_of_every_width(
    algorithm: str, collective: Collective
) -> None:
    schedule = plan(HOLE, algorithm, collective=collective).schedule

    for width in row_widths(schedule):
        for slices in (1, 3):
            check_program(lockstep_program(in_pieces(schedule, width), slices))


def test_a_program_adds_up_what_the_schedule_adds_up() -> None:
    program = program_of(HOLE, slices=3)
    cells = np.random.default_rng(0).integers(-9, 9, (12, program.n_cells))

    assert np.array_equal(run_program(program, cells), np.tile(cells.sum(axis=0), (12, 1)))


def test_trees_of_unequal_weights_become_cells() -> None:
    chosen = plan(Mesh((5, 5)).without("1,1"), payload="3KB")

    check_program(lockstep_program(in_pieces(with_equal_cells(chosen.schedule), 1), 2))


def test_ranks_own_their_cells_in_rank_order() -> None:
    cells = program_of(HOLE, "ring-1d", collective="reduce-scatter").cells_of_ranks()

    assert cells.tolist() == [[2 * rank, 2 * rank + 1] for rank in range(12)]


def test_a_scheme_in_which_some_ranks_own_nothing_is_refused_for_parts() -> None:
    program = program_of(HOLE, "ft-two-d", collective="reduce-scatter")

    with pytest.raises(InputError, match="every rank owns an equal part, but here ranks own from"):
        program.cells_of_ranks()


def test_no_slices_are_refused() -> None:
    with pytest.raises(InputError, match="needs one slice or more, but got 0"):
        program_of(HOLE, slices=0)


def changed(table: np.ndarray, at: tuple[int, ...], value: int) -> np.ndarray:
    copy = table.copy()
    copy[at] = value
    return copy


def first_taken(program: LockstepProgram) -> tuple[int, ...]:
    return tuple(int(at) for at in np.argwhere(program.take > 0)[0])


def lost_row(program: LockstepProgram) -> LockstepProgram:
    return replace(program, take=changed(program.take, first_taken(program), 0))


def copied_instead_of_added(program: LockstepProgram) -> LockstepProgram:
    return replace(program, take=changed(program.take, first_taken(program), -1))


def put_elsewhere(program: LockstepProgram) -> LockstepProgram:
    at = first_taken(program)
    other = (int(program.place[at]) + 1) % program.n_cells
    return replace(program, place=changed(program.place, at, other))


def two_steps_swapped(program: LockstepProgram) -> LockstepProgram:
    order = np.arange(program.n_steps)
    order[[3, 9]] = order[[9, 3]]
    return replace(
        program,
        send=program.send[:, order],
        place=program.place[:, order],
        take=program.take[:, order],
    )


def a_step_twice(program: LockstepProgram) -> LockstepProgram:
    order = np.insert(np.arange(program.n_steps), 2, 1)
    return replace(
        program,
        send=program.send[:, order],
        place=program.place[:, order],
        take=program.take[:, order],
    )


def one_pair_in_two_permutations(program: LockstepProgram) -> LockstepProgram:
    first, *others, last = program.permutations
    taken = {src for src, _ in last}, {dst for _, dst in last}
    pair = next(pair for pair in first if pair[0] not in taken[0] and pair[1] not in taken[1])
    return replace(program, permutations=(first, *others, (*last, pair)))


def a_rank_that_receives_twice(program: LockstepProgram) -> LockstepProgram:
    first, *others = program.permutations
    (_, destination), *_ = first
    source = next(rank for rank in range(12) if rank not in {src for src, _ in first})
    return replace(program, permutations=((*first, (source, destination)), *others))


def a_pair_left_out(program: LockstepProgram) -> LockstepProgram:
    first, *others = program.permutations
    return replace(program, permutations=(first[1:], *others))


def beyond_the_end(program: LockstepProgram) -> LockstepProgram:
    return replace(program, send=changed(program.send, (0, 0, 0), program.n_cells + 1))


MUTANTS: list[tuple[Callable[[LockstepProgram], LockstepProgram], str]] = [
    (lost_row, "leaves rank"),
    (copied_instead_of_added, "leaves rank"),
    (put_elsewhere, "leaves rank"),
    (two_steps_swapped, "leaves rank"),
    (a_step_twice, "leaves rank"),
    (one_pair_in_two_permutations, "moves two spans in a step"),
    (a_rank_that_receives_twice, "receives twice"),
    (a_pair_left_out, "but gets none of it"),
    (beyond_the_end, "points outside"),
]


@pytest.mark.parametrize(
    ("mutant", "words"), MUTANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_interpreter_finds(
    mutant: Callable[[LockstepProgram], LockstepProgram], words: str
) -> None:
    program = program_of(HOLE)
    check_program(program)

    with pytest.raises(VerificationError, match=words):
        check_program(mutant(program))


def test_a_hazard_that_the_packing_overlooks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are packed without their waits land in steps that come too early."""

    def without_waits(*arguments: object) -> object:
        graph = row_graph(*arguments)  # type: ignore[arg-type]
        n_rows = len(graph.pair)
        kept = graph.before.rows[: graph.before.ptr[n_rows // 2]]
        ptr = np.minimum(graph.before.ptr, len(kept))
        before = Waits(ptr, kept, graph.before.steps[: len(kept)])
        return replace(graph, before=before)

    monkeypatch.setattr(module, "row_graph", without_waits)

    with pytest.raises(VerificationError, match="leaves rank"):
        check_program(program_of(HOLE))
