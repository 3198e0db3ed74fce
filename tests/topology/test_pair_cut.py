"""The bound of an all-to-all: equal to the exact multi-commodity flow wherever that is computed."""

import tracemalloc

import numpy as np
import pytest
import scipy.sparse as sparse
from hypothesis import given, settings
from scipy.optimize import linprog

from meshmend import Mesh, limit
from meshmend.topology.pair_cut import pair_cut
from strategies import connected_meshes


def exact_blocks(mesh: Mesh) -> float:
    """Return the least load of the busiest link: one flow from each chip to all others, by LP."""
    tail, port = np.nonzero(mesh.neighbor_ranks >= 0)
    head, n = mesh.neighbor_ranks[tail, port], mesh.n_live
    n_channels, channel = len(tail), np.arange(len(tail))
    ones = np.ones(n_channels)
    at_chip = sparse.coo_matrix(
        (
            np.concatenate([ones, -ones]),
            (np.concatenate([head, tail]), np.concatenate([channel, channel])),
        ),
        shape=(n, n_channels),
    )
    stays = np.ones((n, n)) - n * np.eye(n)
    busiest = sparse.csr_matrix(-mesh.port_speeds[tail, port][:, None])
    found = linprog(
        np.concatenate([np.zeros(n * n_channels), [1.0]]),
        A_ub=sparse.hstack([sparse.hstack([sparse.identity(n_channels)] * n), busiest]),
        b_ub=np.zeros(n_channels),
        A_eq=sparse.hstack([sparse.block_diag([at_chip] * n), sparse.csr_matrix((n * n, 1))]),
        b_eq=stays.reshape(-1),
        method="highs",
    )
    return float(found.fun)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh((4, 4)),
        Mesh((4, 4)).without("2x2@0,0"),
        Mesh((4, 4)).without("2x2@1,1"),
        Mesh((5, 5), wrap=(True, True)),
        Mesh((5, 5), wrap=(True, True)).without("0,0", "0,2", "2,4"),
        Mesh((4, 4), wrap=(True, False)).without("1,0", "3,0"),
        Mesh((5, 2, 3), wrap=(False, False, True)).without("2,1,1"),
        Mesh((4, 4)).slowed("link:0,1-0,2=0.25"),
        Mesh((7,)).without("6"),
        Mesh((1, 2)),
    ],
    ids=str,
)
def test_it_is_the_exact_flow(mesh: Mesh) -> None:
    assert pair_cut(mesh).blocks == pytest.approx(exact_blocks(mesh), rel=1e-6)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(connected_meshes())
def test_it_is_never_above_the_exact_flow_and_at_most_2_percent_below(mesh: Mesh) -> None:
    if 1 < mesh.n_live <= 40:
        assert 0.98 <= pair_cut(mesh).blocks / exact_blocks(mesh) <= 1 + 1e-6


def test_a_hole_makes_the_cut_beside_it_bind() -> None:
    """28 and 32 chips on either side of six links, and 60 MB a chip: 1 MB a pair."""
    found = pair_cut(Mesh((8, 8)).without("2x2@2,2"))
    words = limit(Mesh((8, 8)).without("2x2@2,2"), "60MB", collective="all-to-all").describe()

    assert (found.sides, found.links) == ((28, 32), 6)
    assert found.blocks == pytest.approx(28 * 32 / 6)
    assert words.endswith("by bandwidth: 28 and 32 chips exchange blocks over 6 links")


def test_a_long_ring_is_cut_at_every_place_in_little_memory() -> None:
    """A ring of 2000 chips took four gigabytes, for the sides of two million cuts."""
    tracemalloc.start()
    found = pair_cut(Mesh((600,), wrap=(True,)).without("3"))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (found.blocks, found.links) == (299 * 300, 1)
    assert peak_bytes < 30e6


def test_one_chip_exchanges_nothing() -> None:
    assert pair_cut(Mesh((1, 1))).blocks == 0
    assert limit(Mesh((1, 1)), "1MB", collective="all-to-all").time_s == 0
