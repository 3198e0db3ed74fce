"""`direct` and `flood`: right on every connected mesh, and as fast as can be for some bytes."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import UnsupportedError, VerificationError
from meshmend.planning.choose import choose
from meshmend.planning.pricing import price
from meshmend.planning.proof import prove
from meshmend.planning.target import Question
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import channel_loads, placed
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.proofs import check_scratch
from meshmend.schedule.table import Collective, Schedule
from meshmend.schedule.whole_sums import direct, flood
from meshmend.simulator.limit import limit
from meshmend.topology.fabric import fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from reference_sums import check_sums
from strategies import connected_meshes

BUILDERS = (direct, flood)
REFERENCE = fabric("reference")

Builder = Callable[[Mesh, Collective], Schedule]


@settings(max_examples=60, deadline=None)
@given(connected_meshes(), st.sampled_from(BUILDERS))
def test_it_is_right_and_has_the_same_bits_on_any_connected_mesh(
    mesh: Mesh, build: Builder
) -> None:
    schedule = build(mesh, Collective.ALLREDUCE)

    check_contributions(schedule, exact=True)
    check_scratch(schedule)
    check_sums(schedule)
    prove(mesh, schedule)


@settings(max_examples=60, deadline=None)
@given(connected_meshes(), st.sampled_from(BUILDERS))
def test_no_chain_has_more_hops_than_the_diameter(mesh: Mesh, build: Builder) -> None:
    schedule = build(mesh, Collective.ALLREDUCE)

    chains = remaining_hops(schedule, hazards_of(schedule), placed(mesh, schedule).routes)

    assert chains.max(initial=0) == mesh_figures(mesh).diameter


def test_on_a_ring_a_flood_loads_all_links_alike() -> None:
    """Each of 16 chips gets 15 payloads, seven over one of its two links and eight over the other.

    To halve the payload from the chip opposite would be two messages, with an overhead each.
    """
    mesh = parse_mesh("5x5", fail=["3x3@1,1"])
    schedule = flood(mesh, Collective.ALLREDUCE)

    loads = channel_loads(schedule, placed(mesh, schedule).routes)

    assert sorted(loads[loads > 0]) == pytest.approx([7] * 16 + [8] * 16)


@pytest.mark.parametrize(
    ("mesh", "machine", "payload_bytes", "most"),
    [
        (parse_mesh("13x12", wrap="all", fail=["3x2@3,1"]), "dgx-spark", 654, 1.45),
        (parse_mesh("4x6x3", wrap="1", fail=["1x3x1@1,0,0"]), "6.15MB/s,44us,12us", 32, 1.49),
        (parse_mesh("4x7x3", wrap="0,2", fail=["2x2x1@0,3,2"]), "reference", 29_835, 2.3),
    ],
    ids=str,
)
def test_payloads_of_a_flood_seldom_wait_for_each_other(
    mesh: Mesh, machine: str, payload_bytes: float, most: float
) -> None:
    """By the first and the last port that leads nearer it took 2.00, 2.47 and 4.46."""
    question = Question(mesh, payload_bytes, fabric(machine))

    least_s = limit(mesh, fabric(machine), payload_bytes).time_s

    assert price(question, "flood").time_s <= most * least_s


@pytest.mark.parametrize(
    ("shape", "fail"),
    [("2x3", ""), ("3x3", ""), ("4x4", ""), ("4x4", "1,1"), ("5x5", "3x3@1,1"), ("6x6", "")],
)
def test_a_byte_sent_directly_meets_the_limit(shape: str, fail: str) -> None:
    mesh = parse_mesh(shape, fail=fail.split())

    found = price(Question(mesh, 1.0, REFERENCE), "direct")

    assert found.time_s <= 1.001 * limit(mesh, REFERENCE, 1.0).time_s
    assert choose(Question(mesh, 1.0, REFERENCE)).algorithm == "direct"


@pytest.mark.parametrize("build", BUILDERS)
def test_a_row_left_out_is_caught(build: Builder) -> None:
    mesh = parse_mesh("2x3")
    right = build(mesh, Collective.ALLREDUCE)
    prove(mesh, right)
    names = ("src", "dst", "lo", "hi", "op", "src_buffer", "dst_buffer")

    for row in range(right.n_rows):
        keep = np.arange(right.n_rows) != row
        wrong = replace(right, **{name: getattr(right, name)[keep] for name in names}, phases=())
        with pytest.raises(VerificationError):
            prove(mesh, wrong)


@pytest.mark.parametrize("build", BUILDERS)
def test_more_chips_than_buffers_are_refused(build: Builder) -> None:
    with pytest.raises(UnsupportedError, match="needs at most 255 chips, but got 16x16"):
        build(Mesh((16, 16)), Collective.ALLREDUCE)
