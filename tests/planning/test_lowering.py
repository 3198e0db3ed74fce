"""Lowered plans: priced by the simulator's rules, in the slices that are fastest."""

from typing import Any

import pytest

from lockstep_interpreter import check_program
from meshmend import plan
from meshmend.errors import InputError
from meshmend.planning.lowering import lowered
from meshmend.topology.fabric import fabric
from meshmend.topology.mesh import Mesh

HOLE = Mesh((8, 8)).without("2x2@2,2")


def test_a_step_between_neighbours_takes_a_hop_a_message_and_its_bytes() -> None:
    low = lowered(plan(HOLE, "trees", payload="1MB"), slices=8)

    figures = fabric("reference")
    bytes_s = low.span_bytes / figures.link_bandwidth_bytes_per_s
    assert low.span_bytes == 1e6 / 40
    assert low.step_s == pytest.approx(figures.hop_latency_s + figures.message_overhead_s + bytes_s)
    assert low.time_s == pytest.approx(44 * low.step_s)


def test_a_step_between_chips_that_are_not_neighbours_takes_their_hops() -> None:
    made = plan(HOLE, "ft-two-d", payload="1MB")

    low = lowered(made, slices=1)

    hops = made.placement.routes.max_hops
    assert low.step_s > hops * fabric("reference").hop_latency_s
    assert low.summary()["routed_pairs"] > 0


def test_the_chosen_slices_are_about_the_fastest_of_all() -> None:
    made = plan(HOLE, "trees", payload="10MB")

    chosen = lowered(made)

    tried = [lowered(made, slices=slices).time_s for slices in (1, 2, 4, 8, 16, 32, 64)]
    assert chosen.time_s <= 1.05 * min(tried)
    check_program(chosen.program)


def test_short_payloads_take_few_slices_and_long_ones_many() -> None:
    made = plan(HOLE, "trees")

    few, many = lowered(made, payload_bytes=1e3), lowered(made, payload_bytes=1e9)

    assert few.program.slices <= 2
    assert many.program.slices >= 32


def test_wide_rows_move_wide_spans() -> None:
    """`ft-two-d` has rows of 1, 3 and 12 chunks; one program moves them all."""
    low = lowered(plan(HOLE, "ft-two-d", payload="1MB"))

    assert low.program.width == 3
    check_program(low.program)


def test_lockstep_stands_between_the_limit_and_a_third_above_running_freely() -> None:
    facts = lowered(plan(HOLE, payload="100MB")).summary()

    assert facts["limit_s"] < facts["free_running_s"] < facts["predicted_s"]
    assert facts["predicted_s"] < 1.35 * facts["free_running_s"]


def test_a_single_chip_takes_no_steps() -> None:
    facts = lowered(plan(Mesh((1, 1)))).summary()

    assert (facts["steps"], facts["permutes_per_step"], facts["predicted_s"]) == (0, 0, 0.0)


@pytest.mark.parametrize("slices", [0, 2.5, 4.0, "4"])
def test_what_is_no_number_of_slices_is_refused(slices: Any) -> None:
    """Lowering into two and a half slices did not end."""
    with pytest.raises(InputError, match=f"needs one slice or more, but got {slices!r}"):
        lowered(plan(HOLE, "trees"), slices=slices)
