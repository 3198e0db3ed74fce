"""How urgent rows are: the hops that must still follow them, and the delays that come of that."""

import numpy as np
from hypothesis import given, settings

from meshmend.planning.tree_formula import MOST_SLICES
from meshmend.schedule.hazards import Hazards, hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.priority import delay_slices, remaining_hops
from meshmend.schedule.table import COPY, REDUCE, Collective, Schedule
from meshmend.schedule.trees import tree_schedule
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.trees.tree_packing import tree_packing
from strategies import schedule_from, tables


def slowly(schedule: Schedule, hazards: Hazards, hops: list[int]) -> list[int]:
    """Return the longest chains by trying every successor of every row."""
    n = schedule.n_rows
    remaining = list(hops)
    for row in reversed(range(n)):
        for after in range(row + 1, n):
            if row in hazards.before_send(after):
                remaining[row] = max(remaining[row], hops[row] + remaining[after])
            if row in hazards.before_write(after):
                remaining[row] = max(remaining[row], hops[row] + remaining[after] - hops[after])
    return remaining


@settings(max_examples=60)
@given(tables())
def test_it_is_the_longest_chain_of_hops_from_each_row_on(schedule: Schedule) -> None:
    mesh = Mesh((1, schedule.n_ranks))
    hazards, routes = hazards_of(schedule), placed(mesh, schedule).routes
    pairs = zip(schedule.src.tolist(), schedule.dst.tolist(), strict=True)
    hops = [abs(src - dst) for src, dst in pairs]

    remaining = remaining_hops(schedule, hazards, routes)

    assert remaining.tolist() == slowly(schedule, hazards, hops)


def test_up_a_chain_and_down_again_every_row_has_one_hop_less_to_go() -> None:
    rows = [(0, 1, 0, 1, REDUCE), (1, 2, 0, 1, REDUCE), (2, 1, 0, 1, COPY), (1, 0, 0, 1, COPY)]
    schedule = schedule_from(rows, n_ranks=3, n_chunks=1)
    routes = placed(parse_mesh("1x3"), schedule).routes

    remaining = remaining_hops(schedule, hazards_of(schedule), routes)

    assert remaining.tolist() == [4, 3, 2, 1]
    assert delay_slices(remaining, 0.5).tolist() == [0.0, 0.5, 1.0, 1.5]
    assert delay_slices(remaining, 0.0).tolist() == [0.0] * 4


def test_in_trees_it_is_the_way_up_and_the_deepest_way_down() -> None:
    mesh = parse_mesh("4x5", fail=["1,1"])
    packing = tree_packing(mesh, n_trees=3)
    schedule = tree_schedule(packing, Collective.ALLREDUCE)

    remaining = remaining_hops(schedule, hazards_of(schedule), placed(mesh, schedule).routes)

    up = schedule.op == REDUCE
    tree, child = schedule.lo[up].astype(int), schedule.src[up].astype(int)
    expected = packing.hops[tree, child] + packing.depths[tree]
    assert np.array_equal(remaining[up], expected)
    assert remaining.max() == 2 * packing.depth
    assert remaining[~up].min() == 1


def test_rows_that_nothing_follows_come_after_all_slices_of_the_others() -> None:
    remaining = np.array([4, 3, 1, 2, 1], dtype=np.int32)

    usual = delay_slices(remaining, 0.5)
    delays = delay_slices(remaining, 0.5, leaves_last=True)

    is_leaf = remaining == 1
    assert np.array_equal(delays[~is_leaf], usual[~is_leaf])
    assert delays[is_leaf].min() > delays[~is_leaf].max() + MOST_SLICES
    assert delays[2] == delays[4]


def test_a_stagger_delays_rows_by_where_in_the_payload_they_start() -> None:
    remaining, starts = np.array([4, 3, 1], dtype=np.int32), np.array([0.5, 0.25, 0.0])

    delays = delay_slices(remaining, 0.5, starts=starts, stagger=0.5)

    assert delays.tolist() == [0.0 + 0.25, 0.5 + 0.125, 1.5 + 0.0]
