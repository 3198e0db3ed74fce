"""Random faults: the same for the same seed, and never too many at once."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from meshmend.membership.faults.fault import IN_LOOP, Fault, FaultKind, parse_fault
from meshmend.topology.failures import Block, Chip, Link, board_shape
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from random_faults import random_faults

meshes = st.builds(
    parse_mesh,
    st.sampled_from(["4x4", "2x4", "6x4", "5x5", "8", "2x2", "4x4x2"]),
    wrap=st.sampled_from(["none", "all"]),
)
seeds = st.integers(0, 2**32)
durations_s = st.floats(0.0, 300.0)


def faults_of(mesh: Mesh, for_s: float, seed: int) -> tuple[Fault, ...]:
    return random_faults(mesh, board_shape(len(mesh.shape)), for_s=for_s, seed=seed)


@given(meshes, durations_s, seeds)
def test_the_same_seed_gives_the_same_faults(mesh: Mesh, for_s: float, seed: int) -> None:
    assert faults_of(mesh, for_s, seed) == faults_of(mesh, for_s, seed)


def test_another_seed_gives_other_faults() -> None:
    mesh = parse_mesh("4x4")

    assert len({faults_of(mesh, 60.0, seed) for seed in range(10)}) == 10


@given(meshes, durations_s, seeds)
def test_faults_come_in_order_within_the_run_and_each_can_be_written(
    mesh: Mesh, for_s: float, seed: int
) -> None:
    faults = faults_of(mesh, for_s, seed)

    times = [fault.at_s for fault in faults if fault.at_s is not None]
    assert len(times) == len(faults)
    assert times == sorted(times)
    assert all(0 <= at_s < for_s for at_s in times)
    for fault in faults:
        assert parse_fault(fault.words, mesh) == fault


@given(meshes, durations_s, seeds)
def test_at_least_one_whole_board_always_lives_and_no_kill_cuts_the_mesh_apart(
    mesh: Mesh, for_s: float, seed: int
) -> None:
    shape = board_shape(len(mesh.shape))
    boards = {
        Block(shape, chip)
        for chip in mesh.live
        if all(at % size == 0 for at, size in zip(chip, shape, strict=True))
        and all(other in mesh for other in Block(shape, chip).chips())
    }
    dead: set[Chip] = set()

    for fault in faults_of(mesh, for_s, seed):
        if fault.kind is FaultKind.KILL:
            assert dead.isdisjoint(fault.chips())
            dead.update(fault.chips())
            left = replace(mesh, failed=frozenset(dead))
            assert largest_part(left) == left
        elif fault.kind is FaultKind.REPAIR:
            assert dead.issuperset(fault.chips())
            dead.difference_update(fault.chips())
        assert any(dead.isdisjoint(board.chips()) for board in boards)


@given(durations_s, seeds)
def test_only_what_is_cut_is_mended_and_at_most_two_links_are_cut(for_s: float, seed: int) -> None:
    cut: set[Link] = set()

    for fault in faults_of(parse_mesh("4x4"), for_s, seed):
        if isinstance(fault.target, Link) and fault.kind is FaultKind.CUT:
            assert fault.target not in cut
            cut.add(fault.target)
        elif isinstance(fault.target, Link):
            cut.remove(fault.target)
        assert len(cut) <= 2


def test_a_long_run_has_faults_of_every_kind() -> None:
    kinds = {fault.kind for fault in faults_of(parse_mesh("4x4"), 3600.0, seed=0)}

    assert kinds == set(FaultKind) - IN_LOOP


def test_a_mesh_of_one_board_has_no_faults() -> None:
    assert faults_of(parse_mesh("2x2"), 300.0, seed=0) == ()
