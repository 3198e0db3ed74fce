"""Spreading what some ranks hold to all: once to each, over single live links, from the nearest."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import InputError
from meshmend.schedule.spanning import spread, spread_in_parts
from meshmend.schedule.table import COPY
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
