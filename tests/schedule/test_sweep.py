"""Every algorithm, every collective, on every mesh and every hole that it claims: counted right."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import UnsupportedError
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.table import SUMS, Collective
from meshmend.topology.failures import Block
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from strategies import aligned_regions, connected_meshes, even_shapes, meshes_with_dead_blocks

AROUND_HOLES = ("ring-1d", "ft-two-d", "rank-ring")
COLLECTIVES = list(SUMS)
COUNTED_EXACTLY = 36  # chips; larger ones are counted by fingerprint here, exactly in the slow test


def check(name: str, mesh: Mesh, collective: Collective) -> None:
    schedule = ALGORITHMS[name].build(mesh, collective)
    check_contributions(schedule, exact=mesh.n_live <= COUNTED_EXACTLY)
    assert schedule.n_ranks == mesh.n_live
    assert (schedule.algorithm, schedule.collective) == (name, collective)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", ["two-d", "row-pair", *AROUND_HOLES])
def test_full_meshes_from_2x2_to_12x12(name: str, collective: Collective) -> None:
    for shape in even_shapes(12):
        check(name, Mesh(shape), collective)


@pytest.mark.parametrize("name", ["ring-1d", "ft-two-d"])
def test_every_aligned_region_of_every_even_mesh_to_8x8(name: str) -> None:
    n_cases = 0
    for shape in even_shapes(8):
        for region in aligned_regions(shape):
            check(name, largest_part(Mesh(shape).without(region)), Collective.ALLREDUCE)
            n_cases += 1
    assert n_cases == 293


@pytest.mark.parametrize("collective", [Collective.REDUCE_SCATTER, Collective.ALL_GATHER])
@pytest.mark.parametrize("name", ["ring-1d", "ft-two-d"])
def test_either_half_around_every_aligned_region(name: str, collective: Collective) -> None:
    for shape in even_shapes(8):
        for region in aligned_regions(shape):
            check(name, largest_part(Mesh(shape).without(region)), collective)


def test_the_topology_blind_ring_around_every_aligned_region() -> None:
    for shape in even_shapes(6):
        for region in aligned_regions(shape):
            for collective in COLLECTIVES:
                check("rank-ring", largest_part(Mesh(shape).without(region)), collective)


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND_HOLES)
def test_every_aligned_region_counted_exactly(name: str) -> None:
    for shape in even_shapes(12):
        for region in aligned_regions(shape):
            mesh = largest_part(Mesh(shape).without(region))
            for collective in COLLECTIVES:
                proof = check_contributions(ALGORITHMS[name].build(mesh, collective), exact=True)
                assert proof.method == "exact"


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND_HOLES)
def test_every_two_aligned_regions_of_every_even_mesh_to_8x8(name: str) -> None:
    n_refused = n_built = 0
    for shape in even_shapes(8):
        for holes in itertools.combinations(aligned_regions(shape), 2):
            if len({chip for hole in holes for chip in hole.chips()}) == shape[0] * shape[1]:
                continue
            mesh = largest_part(Mesh(shape).without(*holes))
            try:
                check(name, mesh, Collective.ALLREDUCE)
            except UnsupportedError:
                n_refused += 1
                assert name == "ft-two-d"
                assert no_pair_is_whole(mesh)
            n_built += 1
    assert n_refused < n_built / 4


def no_pair_is_whole(mesh: Mesh) -> bool:
    broken = [{chip[axis] // 2 for chip in mesh.failed} for axis in (0, 1)]
    return all(len(broken[axis]) == mesh.shape[axis] // 2 for axis in (0, 1))


@settings(max_examples=150)
@given(meshes_with_dead_blocks(wrap=False), st.sampled_from(COLLECTIVES))
def test_any_aligned_holes_that_leave_a_whole_pair(mesh: Mesh, collective: Collective) -> None:
    check("ring-1d", mesh, collective)
    if not no_pair_is_whole(mesh):
        check("ft-two-d", mesh, collective)


@settings(max_examples=60)
@given(meshes_with_dead_blocks(max_dead=4), st.sampled_from(COLLECTIVES))
def test_aligned_holes_in_a_torus(mesh: Mesh, collective: Collective) -> None:
    if not no_pair_is_whole(mesh):
        check("ft-two-d", mesh, collective)


@settings(max_examples=60)
@given(connected_meshes(), st.sampled_from(COLLECTIVES))
def test_the_topology_blind_ring_does_any_connected_mesh(
    mesh: Mesh, collective: Collective
) -> None:
    check("rank-ring", mesh, collective)


@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(COLLECTIVES),
)
def test_full_meshes_and_tori_of_any_sides(
    shape: tuple[int, int], wrap: tuple[bool, bool], collective: Collective
) -> None:
    mesh = Mesh(shape, wrap)

    check("two-d", mesh, collective)
    if shape[0] % 2 == 0 or shape[1] % 2 == 0:
        check("row-pair", mesh, collective)
        check("ft-two-d", mesh, collective)


def test_two_regions_that_share_a_pair_break_it_once() -> None:
    mesh = Mesh((8, 8)).without(Block((2, 2), (2, 0)), Block((2, 2), (2, 6)))
    schedule = ALGORITHMS["ft-two-d"].build(mesh, Collective.ALLREDUCE)

    check_contributions(schedule, exact=True)
    assert len(set(schedule.owners.tolist())) == 3 * 16  # the chips of three blue rings
