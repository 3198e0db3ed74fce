"""Packing rows into steps: what waits comes later, a pair moves one row a step, and few steps."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend import plan
from meshmend.schedule import step_packing
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.step_packing import packed_steps, row_graph
from meshmend.schedule.table import Collective
from meshmend.schedule.trees import trees
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from strategies import connected_meshes


@given(connected_meshes(min_side=2), st.integers(1, 4))
def test_rows_wait_for_rows_and_a_pair_moves_one_a_step(mesh: Mesh, slices: int) -> None:
    schedule = trees(mesh, Collective.ALLREDUCE)
    hazards = hazards_of(schedule)
    graph = row_graph(schedule, hazards)

    steps = packed_steps(graph, slices)

    assert steps.shape == (slices, schedule.n_rows)
    for row in range(schedule.n_rows):
        for earlier in hazards.before_send(row):
            assert np.all(steps[:, row] > steps[:, earlier])
        for earlier in hazards.before_write(row):
            reads = schedule.src[earlier] == schedule.dst[row]
            assert np.all(steps[:, row] >= steps[:, earlier] + (0 if reads else 1))
    used = np.stack([np.tile(graph.pair, slices), steps.reshape(-1)])
    assert len(np.unique(used, axis=1).T) == used.shape[1]
    assert graph.bound(slices) <= steps.max(initial=-1) + 1


# Mesh, then steps, link bound, longest chain, the least steps of these rows in any order, and the
# least of any schedule whatever: the last cell of a corner's n arrives no earlier than its
# eccentricity, and n / links of them over one link.
CASES = [
    ("4x4 less 2x2@0,2", Mesh((4, 4)).without("2x2@0,2"), 63, 56, 8, 61, 45),
    ("8x8 less 2x2@2,2", Mesh((8, 8)).without("2x2@2,2"), 44, 24, 20, 40, 33),
    ("16x16 less 4x2@6,6", Mesh((16, 16)).without("4x2@6,6"), 84, 48, 36, 79, 73),
]


@pytest.mark.parametrize(
    ("mesh", "steps", "link_bound", "depth", "bound", "any_bound"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_eight_slices_of_trees_take_at_most_a_tenth_more_steps_than_any_order(
    mesh: Mesh, steps: int, link_bound: int, depth: int, bound: int, any_bound: int
) -> None:
    made = plan(mesh, "trees")
    graph = row_graph(made.schedule, made.hazards)

    found = packed_steps(graph, 8).max() + 1

    assert (graph.busiest * 8, graph.depth, graph.bound(8)) == (link_bound, depth, bound)
    assert found <= steps
    assert steps <= 1.1 * bound
    assert any_bound == least_steps_of_any(mesh, 8 * made.schedule.n_chunks)
    assert steps <= 1.41 * any_bound


def least_steps_of_any(mesh: Mesh, n_cells: int) -> int:
    """Return the least steps of an allreduce of so many cells, by the chip that hears last."""
    degree = (mesh.neighbor_ranks >= 0).sum(axis=1)
    distance = mesh_figures(mesh).eccentricities
    return int((distance - 1 + -(-n_cells // degree)).max())


def test_rings_around_holes_are_packed_as_tightly_as_can_be() -> None:
    made = plan(Mesh((8, 8)).without("2x2@2,2"), "ft-two-d")
    graph = row_graph(made.schedule, made.hazards)

    assert packed_steps(graph, 8).max() + 1 == graph.bound(8) == 8 * graph.busiest


def test_a_packing_that_finds_no_room_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(Mesh((4, 4)), "trees")
    graph = row_graph(made.schedule, made.hazards)
    rooms: list[int] = []
    place = step_packing._place

    def with_little_room(*arguments: Any) -> Any:
        rooms.append(arguments[-1])
        return place(*arguments[:-1], arguments[-1] // 40)

    wanted = packed_steps(graph, 4)
    monkeypatch.setattr(step_packing, "_place", with_little_room)

    assert np.array_equal(packed_steps(graph, 4), wanted)
    assert len(set(rooms)) > 1


def test_no_rows_take_no_steps() -> None:
    made = plan(Mesh((1, 1)), "trees")

    assert packed_steps(row_graph(made.schedule, made.hazards), 3).shape == (3, 0)
