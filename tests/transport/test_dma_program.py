"""Programs of remote copies, run on a model of chips where any copy may be early or late."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dma_model import StuckError, model_sum
from dma_mutants import ARRIVAL_WAIT_DROPPED, MUTANTS
from meshmend.errors import UnsupportedError
from meshmend.planning.plan import Plan, plan
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.table import Schedule
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.transport.dma_program import BLOCK, DmaProgram, dma_program, most_channels_in, pack
from strategies import connected_meshes

CASES = [
    ("4x4", "none", "2x2@0,2", "trees"),
    ("4x4", "none", "2x2@0,2", "ft-two-d"),
    ("4x4", "none", "2x2@0,2", "ring-1d"),
    ("3x3", "none", "1,1", "trees"),
    ("4x4", "all", "2x2@0,2", "trees"),
    ("2x3x2", "none", "0,1,1", "trees"),
    ("1x5", "none", "0,4", "trees"),
    ("4x4", "none", "link:0,0-0,1", "two-d"),
]
WRONG = [name for name in MUTANTS if name not in ("none", ARRIVAL_WAIT_DROPPED)]


@cache
def planned(mesh: str, wrap: str, fail: str, algorithm: str) -> Plan:
    return plan(parse_mesh(mesh, wrap=wrap, fail=[fail]), algorithm)


def schedule_of_case(case: tuple[str, str, str, str]) -> Schedule:
    return planned(*case).schedule


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_sums_are_right_whatever_comes_late(
    case: tuple[str, str, str, str], blocks_per_chunk: int
) -> None:
    schedule = schedule_of_case(case)
    program = dma_program(schedule, blocks_per_chunk * schedule.n_chunks)

    assert [model_sum(program, seed=seed) for seed in range(2)] == ["", ""]
    assert model_sum(program, slowest=0) == ""


@settings(max_examples=15)
@given(mesh=connected_meshes(), n_blocks=st.integers(1, 9), seed=st.integers(0, 1000))
def test_any_number_of_blocks_is_summed_on_any_mesh(mesh: Mesh, n_blocks: int, seed: int) -> None:
    """Chunks end where blocks end; a chunk may have none."""
    schedule = plan(mesh, "trees").schedule

    assert model_sum(dma_program(schedule, n_blocks), seed=seed) == ""


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_waits_are_for_earlier_steps_only(case: tuple[str, str, str, str]) -> None:
    """What the proof in the docstring stands on."""
    schedule = schedule_of_case(case)
    transfers = pack(schedule, 4 * schedule.n_chunks)

    places = np.stack([transfers.channel, transfers.step])
    assert len(np.unique(places, axis=1).T) == len(transfers.step)
    last_written: dict[tuple[int, int], int] = {}
    for row, block, step in zip(transfers.row, transfers.block, transfers.step, strict=True):
        src, dst = (int(schedule.src[row]), block), (int(schedule.dst[row]), block)
        assert step >= last_written.get(src, -2) + 2
        last_written[dst] = max(step, last_written.get(dst, -2))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_steps_are_few(case: tuple[str, str, str, str]) -> None:
    """Every channel is busy, but for the time that the longest chain of hops takes."""
    made = planned(*case)
    transfers = pack(made.schedule, 8 * made.schedule.n_chunks)

    chain = remaining_hops(made.schedule, made.hazards, made.placement.routes).max(initial=0)
    busiest = int(np.bincount(transfers.channel).max())
    assert transfers.n_steps <= 1.1 * busiest + 2 * chain


def verdicts(program: DmaProgram) -> set[str]:
    """Return what is found wrong with a program when one rank after another is the slowest."""
    found = set()
    for rank in range(len(program.words)):
        try:
            found.add(model_sum(program, seed=rank, slowest=rank))
        except StuckError:
            found.add("stuck")
    return found - {""}


@pytest.mark.parametrize("mutant", WRONG)
def test_the_model_finds_what_is_wrong(mutant: str) -> None:
    schedule = schedule_of_case(CASES[0])
    program = dma_program(schedule, 2 * schedule.n_chunks)

    assert not verdicts(program)
    assert verdicts(MUTANTS[mutant](program))


def test_neighbours_alone_are_peers_of_a_rank_in_trees() -> None:
    assert most_channels_in(schedule_of_case(CASES[0])) == 4
    assert most_channels_in(schedule_of_case(CASES[3])) == 2


def test_a_single_rank_has_nothing_to_do() -> None:
    program = dma_program(plan(parse_mesh("1x1"), "trees").schedule, 3)

    assert program.sizes.tolist() == [[0, 0, 0]]
    assert model_sum(program) == ""


def test_more_blocks_than_a_word_can_name_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"at most 262143 blocks .* ask for fewer slices"):
        dma_program(schedule_of_case(CASES[6]), BLOCK.mask + 1)
