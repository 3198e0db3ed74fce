"""Shortest ways that share channels: no message more is late than must be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.topology.graph import all_distances
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.trees.ways import MESSAGES_PER_HOP, Ways
from strategies import connected_meshes


def late(mesh: Mesh, hops: np.ndarray, nearer: np.ndarray) -> float:
    """Return how many messages are late, counted anew."""
    tree, rank = np.nonzero(nearer >= 0)
    most, n_late = int(hops.max()), 0.0
    for far in range(1, most + 1):
        goes = hops[tree, rank] >= far
        channels = rank[goes] * mesh.n_live + nearer[tree, rank][goes]
        n_before = int(np.bincount(channels).max(initial=0))
        n_late = max(n_late, n_before - (most - far) * MESSAGES_PER_HOP)
    return n_late


@settings(max_examples=40, deadline=None)
@given(connected_meshes(min_side=2), st.integers(1, 12))
def test_all_ways_are_shortest_and_what_is_late_is_counted_right(mesh: Mesh, n_trees: int) -> None:
    hops = all_distances(mesh)[np.arange(n_trees) % mesh.n_live]

    nearer, n_late = Ways(mesh).to(hops)

    tree, rank = np.nonzero(hops)
    assert np.all(hops[tree, nearer[tree, rank]] == hops[tree, rank] - 1)
    assert np.all(nearer[hops == 0] == -1)
    assert n_late == pytest.approx(max(0.0, late(mesh, hops, nearer)))


@pytest.mark.parametrize("shape", ["3x5x7", "14x12", "7x10"])
def test_far_fewer_are_late_than_on_the_first_way_that_is_found(shape: str) -> None:
    mesh = parse_mesh(shape, wrap="all", fail=[",".join("1" * len(shape.split("x")))])
    hops = all_distances(mesh)
    first = np.full(hops.shape, -1)
    for beside in mesh.neighbor_ranks.T:
        is_nearer = (beside >= 0) & (hops[:, beside] == hops - 1) & (first < 0)
        first = np.where(is_nearer, beside, first)

    _, n_late = Ways(mesh).to(hops)

    assert n_late < 0.5 * late(mesh, hops, first)


def test_a_slow_channel_is_avoided() -> None:
    mesh = parse_mesh("4x4", wrap="all", slow=["link:0,0-0,1=0.1"])
    hops = np.repeat(all_distances(mesh)[[5]], 8, axis=0)  # to the chip at 1,1

    nearer, _ = Ways(mesh).to(hops)

    assert np.all(nearer[:, 0] == 4)  # 0,0 sends over 1,0, not over the slow link to 0,1
