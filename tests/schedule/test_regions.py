"""`regions-2` to `regions-8`: right on every connected mesh, and between trees and `flood`."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshmend.errors import UnsupportedError, VerificationError
from meshmend.planning.choose import choose
from meshmend.planning.comparison import compared
from meshmend.planning.pricing import price
from meshmend.planning.proof import prove
from meshmend.planning.target import Question
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.proofs import check_scratch
from meshmend.schedule.regions import n_region_chunks, regions
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.trees.region_trees import region_trees
from reference_sums import check_sums
from strategies import connected_meshes

N_REGIONS = (2, 4, 8)


@settings(max_examples=40, deadline=None)
@given(connected_meshes(min_side=2), st.sampled_from(N_REGIONS))
def test_it_is_right_and_has_the_same_bits_on_any_connected_mesh(
    mesh: Mesh, n_regions: int
) -> None:
    assume(2 * n_regions <= mesh.n_live)
    schedule = regions(mesh, Collective.ALLREDUCE, n_regions=n_regions)

    check_contributions(schedule, exact=True)
    check_scratch(schedule)
    check_sums(schedule)
    prove(mesh, schedule)


@settings(max_examples=40, deadline=None)
@given(connected_meshes(min_side=2), st.sampled_from(N_REGIONS))
def test_no_chain_has_more_hops_than_the_deepest_region_and_the_diameter(
    mesh: Mesh, n_regions: int
) -> None:
    assume(2 * n_regions <= mesh.n_live)
    schedule = regions(mesh, Collective.ALLREDUCE, n_regions=n_regions)
    trees = region_trees(mesh, n_regions=n_regions, n_chunks=n_region_chunks(n_regions))

    chains = remaining_hops(schedule, hazards_of(schedule), placed(mesh, schedule).routes)

    assert chains.max() <= trees.hops_in.max() + mesh_figures(mesh).diameter


def test_more_regions_take_fewer_hops_and_more_bytes() -> None:
    mesh = parse_mesh("8x8", wrap="all", fail=["2x2@2,2"])
    hops, loads = [], []
    for n_regions in N_REGIONS:
        schedule = regions(mesh, Collective.ALLREDUCE, n_regions=n_regions)
        routes = placed(mesh, schedule).routes
        hops.append(int(remaining_hops(schedule, hazards_of(schedule), routes).max()))
        moved = schedule.src != schedule.dst
        loads.append(np.count_nonzero(moved) / schedule.n_chunks)

    assert hops == sorted(set(hops), reverse=True)
    assert hops[0] < 2 * mesh_figures(mesh).radius
    assert loads == sorted(set(loads))


@pytest.mark.parametrize(
    ("shape", "fail", "machine", "payload_bytes"),
    [
        ("3x12", "1x2@2,5", "tpu-v6e", 845_190),
        ("8x5", "4x1@0,0", "trainium2", 731_896),
        ("11x7", "1,0", "tpu-v4", 153_425),
    ],
)
def test_on_a_broken_torus_it_is_faster_than_trees_and_exchanges(
    shape: str, fail: str, machine: str, payload_bytes: float
) -> None:
    mesh = parse_mesh(shape, wrap="all", fail=[fail])
    question = Question(mesh, payload_bytes, fabric(machine))

    chosen = choose(Question(mesh, payload_bytes, fabric(machine))).algorithm
    others = ("trees", "exchange", "exchange-1", "flood")
    priced = [price(question, name) for name in (chosen, *others)]
    chosen_s, *others_s = (found.time_s for found in priced)

    assert chosen.startswith("regions-")
    assert chosen_s < 0.985 * min(others_s)


def test_a_ring_of_16_chips_comes_near_the_limit() -> None:
    """A flood takes 1.86 times as long."""
    mesh, machine = parse_mesh("5x5", fail=["3x3@1,1"]), fabric("reference")

    found = compared(mesh, machine, 64e3, ["auto"])

    assert found.ratio(found.winner) <= 1.45


def test_a_row_left_out_is_caught() -> None:
    mesh = parse_mesh("2x2")
    right = regions(mesh, Collective.ALLREDUCE, n_regions=2)
    prove(mesh, right)
    names = ("src", "dst", "lo", "hi", "op", "src_buffer", "dst_buffer")

    for row in range(0, right.n_rows, 5):
        keep = np.arange(right.n_rows) != row
        wrong = replace(right, **{name: getattr(right, name)[keep] for name in names}, phases=())
        with pytest.raises(VerificationError):
            prove(mesh, wrong)


@pytest.mark.parametrize("mesh", [parse_mesh("3x2"), parse_mesh("33x32")], ids=str)
def test_too_few_or_too_many_chips_are_refused(mesh: Mesh) -> None:
    with pytest.raises(UnsupportedError, match="regions-4 needs 8 to 1024 chips, but got 3"):
        regions(mesh, Collective.ALLREDUCE, n_regions=4)
