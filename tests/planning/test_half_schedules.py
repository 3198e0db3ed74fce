"""Halves of an allreduce as PyTorch calls them: right, in rank order, and never a blind ring."""

from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import InputError
from meshmend.planning.catalogue import CollectiveCall, payload_class, proved_schedule
from meshmend.planning.comparison import compared
from meshmend.planning.plan import AUTO
from meshmend.planning.target import Question
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.table import Collective, in_rank_order
from meshmend.simulator.limit import limit
from meshmend.topology.fabric import FABRICS
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.transport import reference
from strategies import connected_meshes

SCATTER, GATHER = CollectiveCall("reduce-scatter"), CollectiveCall("all-gather")


@settings(max_examples=40, deadline=None)
@given(connected_meshes(), st.sampled_from([1, 1 << 20, 100 << 20]), st.integers(1, 5))
def test_rank_i_gets_part_i_of_the_sum_and_all_get_all_parts(
    mesh: Mesh, n_bytes: int, part: int
) -> None:
    """Whatever the number of elements, also where a part cannot be cut into equal chunks."""
    n_ranks = mesh.n_live
    scatter, _ = proved_schedule(mesh, AUTO, SCATTER, payload_class(SCATTER, n_bytes))
    gather, _ = proved_schedule(mesh, AUTO, GATHER, payload_class(GATHER, n_bytes))
    rng = np.random.default_rng(0)
    given_by = [rng.integers(0, 99, n_ranks * part) for _ in range(n_ranks)]
    total = np.sum(given_by, axis=0)

    mine = reference.run(scatter, given_by)
    whole = reference.run(gather, mine)

    for rank in range(n_ranks):
        assert np.array_equal(mine[rank], total[rank * part : (rank + 1) * part])
        assert np.array_equal(whole[rank], total)


@pytest.mark.parametrize(
    ("shape", "fail", "n_bytes", "name"),
    [
        ("4x4", ["2x2@0,2"], 1, "trees"),
        ("4x4", ["2x2@0,2"], 100 << 20, "ring-1d"),
        ("5x3", ["1,1"], 100 << 20, "trees"),
        ("3x3x3", [], 100 << 20, "trees"),
    ],
)
def test_short_payloads_and_meshes_without_a_ring_take_trees(
    shape: str, fail: list[str], n_bytes: int, name: str
) -> None:
    mesh = parse_mesh(shape, fail=fail)

    schedule, _ = proved_schedule(mesh, AUTO, SCATTER, payload_class(SCATTER, n_bytes))

    assert schedule.algorithm == name
    assert np.array_equal(schedule.owners, np.sort(schedule.owners))


def test_owners_of_unequal_parts_and_wide_rows_are_refused() -> None:
    hole = parse_mesh("4x4", fail=["2x2@0,2"])
    unequal = ALGORITHMS["ft-two-d"].build(hole, Collective.REDUCE_SCATTER)
    wide = ALGORITHMS["two-d"].build(parse_mesh("4x4"), Collective.REDUCE_SCATTER)

    with pytest.raises(InputError, match="ranks that own equal parts, but they own from 0 to 2"):
        in_rank_order(unequal)
    with pytest.raises(InputError, match="rows that move one chunk each, but some move several"):
        in_rank_order(wide)


def test_the_name_of_a_collective_is_refused_where_the_collective_is_needed() -> None:
    """A name is equal to its collective, but not the same object: prices would be of another."""
    name = cast("Collective", "all-gather")
    why = "a question needs a Collective, but got 'all-gather'"
    with pytest.raises(InputError, match=why):
        compared(Mesh((2, 2)), FABRICS["reference"], 1e6, collective=name)
    with pytest.raises(InputError, match=why):
        Question(Mesh((2, 2)), 1e6, FABRICS["reference"], name)


def test_a_limit_by_name_is_that_of_the_collective() -> None:
    for kind in Collective:
        named, right = (
            limit(Mesh((2, 3)), FABRICS["reference"], 1e6, collective=each)
            for each in (cast("Collective", kind.value), kind)
        )

        assert (named.time_s, named.describe()) == (right.time_s, right.describe())


@pytest.mark.parametrize("collective", [Collective.REDUCE_SCATTER, Collective.ALL_GATHER])
def test_ways_of_a_half_around_a_hole_are_chosen_by_simulation(collective: Collective) -> None:
    """By the formula, which sees neither queues nor how few slices do, it took 1.076 and 1.063."""
    mesh = parse_mesh("11x9", fail=["2x2@4,7"])

    result = compared(mesh, FABRICS["reference"], 3.3e7, ["trees"], collective=collective)

    assert result.ratio(result.winner) <= 1.05
