"""Spreading what some ranks hold to all: once to each, over single live links, from the nearest."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import InputError, ProofError
from meshmend.schedule.spanning import check_reached, only_to, spread, spread_in_parts
from meshmend.schedule.table import COPY, Phase
from meshmend.topology.graph import distances_from
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from strategies import connected_meshes, rows_of


@st.composite
def held(draw: st.DrawFn) -> tuple[Mesh, list[int]]:
    """A connected mesh, and ranks that hold something."""
    mesh = draw(connected_meshes())
    return mesh, draw(st.lists(st.integers(0, mesh.n_live - 1), min_size=1, max_size=5))


@given(held())
def test_every_rank_ends_with_what_the_holders_held(case: tuple[Mesh, list[int]]) -> None:
    mesh, holders = case
    has = set(holders)

    for src, dst, lo, hi, op in rows_of(spread(mesh, holders)):
        assert src in has
        assert dst not in has
        assert (lo, hi, op) == (0, 1, COPY)
        assert mesh.live[dst] in mesh.neighbors(mesh.live[src])
        has.add(dst)

    assert has == set(range(mesh.n_live))


@given(held())
def test_everyone_takes_from_a_neighbour_nearer_to_the_nearest_holder(
    case: tuple[Mesh, list[int]],
) -> None:
    mesh, holders = case
    hops = np.min([distances_from(mesh, holder) for holder in holders], axis=0)

    for src, dst, *_ in rows_of(spread(mesh, holders)):
        assert hops[src] == hops[dst] - 1


@given(held())
def test_every_part_reaches_every_rank_once(case: tuple[Mesh, list[int]]) -> None:
    mesh, holders = case
    schedule = spread_in_parts(mesh, holders)
    has = [set(holders) for _ in range(schedule.n_chunks)]

    for src, dst, lo, hi, op in rows_of(schedule):
        assert src in has[lo]
        assert dst not in has[lo]
        assert (hi - lo, op) == (1, COPY)
        assert mesh.live[dst] in mesh.neighbors(mesh.live[src])
        has[lo].add(dst)

    assert all(each == set(range(mesh.n_live)) for each in has)


@given(held(), st.data())
def test_a_spread_to_some_ranks_brings_them_everything_and_others_only_what_they_pass_on(
    case: tuple[Mesh, list[int]], data: st.DataObject
) -> None:
    mesh, holders = case
    receivers = data.draw(st.lists(st.integers(0, mesh.n_live - 1), max_size=3, unique=True))
    for schedule in (spread(mesh, holders), spread_in_parts(mesh, holders)):
        pruned = only_to(schedule, receivers)

        check_reached(pruned, holders, receivers)
        sent = {(src, chunk) for src, _, chunk, *_ in rows_of(pruned)}
        for _, dst, chunk, *_ in rows_of(pruned):
            assert dst in receivers or (dst, chunk) in sent


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_spread_that_lacks_a_message_is_found(row: int) -> None:
    schedule = only_to(spread(Mesh((1, 4)), [0]), [3])
    mutant = replace(
        schedule,
        src=np.delete(schedule.src, row),
        dst=np.delete(schedule.dst, row),
        lo=np.delete(schedule.lo, row),
        hi=np.delete(schedule.hi, row),
        op=np.delete(schedule.op, row),
        phases=(Phase("spread", 0, 2),),
    )

    check_reached(schedule, [0], [3])
    with pytest.raises(ProofError, match=r"does not hold|does not bring everything"):
        check_reached(mutant, [0], [3])


# A board that returns; its chips need the state, and the most that any has over one link.
RETURNS = [
    ("2x2", "1,1", 1 / 2),
    ("3x3", "1,1", 1 / 4),
    ("4x4", "2x2@0,2", 1 / 2),
    ("8x8", "2x2@2,2", 1 / 2),
    ("8x8", "4x4@0,0", 1 / 2),
    ("4x4x4", "1,1,1", 1 / 6),
]


@pytest.mark.parametrize(("shape", "board", "most"), RETURNS)
def test_links_share_the_state_of_a_board_that_returns(shape: str, board: str, most: float) -> None:
    """A corner of the mesh has two links, so nothing is faster where one returns."""
    mesh, left = parse_mesh(shape), parse_mesh(shape, fail=[board])
    schedule = spread_in_parts(mesh, [mesh.rank_of[chip] for chip in left.live])

    n_sent = Counter((src, dst) for src, dst, *_ in rows_of(schedule))

    assert max(n_sent.values()) / schedule.n_chunks == most


def test_three_chips_in_a_row_by_hand() -> None:
    line = parse_mesh("3")

    assert rows_of(spread(line, [1])) == [(1, 0, 0, 1, COPY), (1, 2, 0, 1, COPY)]
    assert rows_of(spread(line, [0, 2])) == [(0, 1, 0, 1, COPY)]
    assert rows_of(spread(line, [0, 1, 2])) == []


@pytest.mark.parametrize("holders", [[], [4], [-1, 0]])
def test_holders_that_are_not_there_are_refused(holders: list[int]) -> None:
    with pytest.raises(InputError, match="needs holders below 4, but got"):
        spread(parse_mesh("2x2"), holders)
    with pytest.raises(InputError, match="needs holders below 4, but got"):
        spread_in_parts(parse_mesh("2x2"), holders)
