"""An all-to-all in steps: every block hops over links to its place, and no cell is used twice."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_interpreter import check_shape, run_program
from meshmend.errors import InputError
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.block_steps import block_program
from meshmend.schedule.lockstep_program import LockstepProgram
from meshmend.schedule.placement import channel_loads, placed
from meshmend.schedule.table import Collective
from meshmend.topology.mesh import Mesh
from strategies import connected_meshes

HOLE = Mesh((4, 4)).without("2x2@1,1")


def program_of(mesh: Mesh, name: str) -> LockstepProgram:
    schedule = algorithm(name).build(mesh, Collective.ALL_TO_ALL)
    return block_program(schedule, placed(mesh, schedule))


def are_exchanged(program: LockstepProgram, n_parts: int) -> bool:
    """Whether block b of rank a ends as block a of rank b, for all pairs of ranks."""
    n = program.n_ranks
    cells = np.zeros((n, program.n_cells), dtype=np.int64)
    own = np.arange(1, 1 + n * n * n_parts).reshape(n, n, n_parts)
    cells[:, : n * n_parts] = own.reshape(n, -1)
    ended = run_program(program, cells)[:, n * n_parts : 2 * n * n_parts].reshape(own.shape)
    others = ~np.eye(n, dtype=np.bool_)
    return np.array_equal(ended[others], own.swapaxes(0, 1)[others])


@pytest.mark.parametrize("name", ["pairs", "relays"])
@settings(max_examples=25, deadline=None)
@given(mesh=connected_meshes())
def test_every_block_hops_over_links_to_its_place(name: str, mesh: Mesh) -> None:
    schedule = algorithm(name).build(mesh, Collective.ALL_TO_ALL)
    placement = placed(mesh, schedule)

    program = block_program(schedule, placement)

    n_parts = schedule.n_chunks // mesh.n_live
    check_shape(program)
    assert are_exchanged(program, n_parts)
    links = {(a, b) for one, other in mesh.links.tolist() for a, b in ((one, other), (other, one))}
    assert {pair for pairs in program.permutations for pair in pairs} <= links
    assert program.bound <= program.n_steps
    busiest = channel_loads(schedule, placement.routes).max(initial=0) * schedule.n_chunks
    assert program.busiest == round(busiest)


def test_blocks_of_two_neighbours_need_one_step_and_no_room() -> None:
    program = program_of(Mesh((1, 2)), "pairs")

    assert (program.n_steps, program.n_cells) == (1, 4)
    assert program.send[:, 0, 0].tolist() == [1, 0]
    assert program.place[:, 0, 0].tolist() == [3, 2]


def test_a_line_of_three_has_one_cell_for_what_passes_its_middle() -> None:
    """Both ends' blocks pass it; in the step in which the first leaves the second may come."""
    program = program_of(Mesh((1, 3)), "pairs")

    assert are_exchanged(program, 1)
    assert program.n_cells <= 2 * 3 + 2


@settings(max_examples=30, deadline=None)
@given(data=st.data(), table=st.sampled_from(["send", "place", "take"]))
def test_a_program_with_one_wrong_entry_does_not_exchange_all_blocks(
    data: st.DataObject, table: str
) -> None:
    program = program_of(HOLE, "relays")
    n_parts = 4
    assert are_exchanged(program, n_parts)
    wrong = getattr(program, table).copy()
    used = np.argwhere(program.take if table != "send" else program.send < program.n_cells)
    entry = tuple(used[data.draw(st.integers(0, len(used) - 1))])
    wrong[entry] = 0 if table == "take" else (wrong[entry] + 1) % (program.n_ranks * n_parts)

    assert not are_exchanged(replace(program, **{table: wrong}), n_parts)


def test_only_an_all_to_all_has_blocks() -> None:
    schedule = algorithm("trees").build(HOLE, Collective.ALLREDUCE)

    with pytest.raises(InputError, match="steps of blocks need an all-to-all, but got <Schedule"):
        block_program(schedule, placed(HOLE, schedule))
