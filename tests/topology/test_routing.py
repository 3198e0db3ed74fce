"""Routing: tables are shortest and X first, up/down tables legal, routes what was asked for."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshmend.errors import InputError, TopologyError, VerificationError
from meshmend.topology.failures import Chip
from meshmend.topology.graph import distances_from
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import (
    Routes,
    Stretch,
    check_paths,
    routes_for,
    stretch_of,
    table_stretch,
)
from meshmend.topology.tables import (
    all_pairs_tables,
    default_virtual_channels,
    demand_of,
    next_ports,
    shortest_ports,
    table_hops,
    up_down_order,
    up_down_ports,
)
from strategies import connected_meshes

HOLE = Mesh((8, 8)).without("2x2@2,2")


@st.composite
def meshes_with_pairs(draw: st.DrawFn) -> tuple[Mesh, list[tuple[int, int]]]:
    mesh = draw(connected_meshes())
    rank = st.integers(0, mesh.n_live - 1)
    pairs = draw(st.lists(st.tuples(rank, rank), max_size=30))
    return mesh, [(src, dst) for src, dst in pairs if src != dst]


def all_ranks(mesh: Mesh) -> NDArray[np.int64]:
    return np.arange(mesh.n_live)


def routes_of(mesh: Mesh, pairs: list[tuple[int, int]], limit: int | None = None) -> Routes:
    src, dst = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return routes_for(mesh, src, dst, max_virtual_channels=limit)


def all_pairs(mesh: Mesh) -> list[tuple[int, int]]:
    return [(src, dst) for src in range(mesh.n_live) for dst in range(mesh.n_live) if src != dst]


def dimension_order(shape: tuple[int, ...], src: Chip, dst: Chip) -> tuple[Chip, ...]:
    """Return the way along the longest axis first, and of equally long ones along the last."""
    path = [src]
    for axis in sorted(range(len(src)), key=lambda axis: (shape[axis], axis), reverse=True):
        while path[-1][axis] != dst[axis]:
            chip = list(path[-1])
            chip[axis] += 1 if dst[axis] > chip[axis] else -1
            path.append(tuple(chip))
    return tuple(path)


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 2), (4, 6), (5, 3), (3, 4, 2)])
def test_routes_on_a_full_mesh_are_dimension_order_on_one_virtual_channel(
    shape: tuple[int, ...],
) -> None:
    mesh = Mesh(shape)
    routes = routes_of(mesh, all_pairs(mesh))

    assert routes.n_virtual_channels == 1
    for src, dst in all_pairs(mesh):
        assert routes.path(mesh, src, dst) == dimension_order(shape, mesh.live[src], mesh.live[dst])


def test_route_steps_aside_walks_along_the_border_and_comes_back() -> None:
    src, dst = HOLE.rank_of[2, 0], HOLE.rank_of[2, 5]

    path = routes_of(HOLE, [(src, dst)]).path(HOLE, src, dst)

    assert path == ((2, 0), (2, 1), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 5))


def test_torus_takes_the_short_way_round_and_up_where_both_are_equal() -> None:
    mesh = Mesh((6,), (True,))

    assert next_ports(mesh, np.array([0])).tolist() == [[-1, 0, 0, 1, 1, 1]]


@settings(deadline=None)  # the first call compiles
@given(connected_meshes())
def test_tables_are_shortest_and_prefer_the_last_axis(mesh: Mesh) -> None:
    ports = next_ports(mesh, all_ranks(mesh))
    hops = table_hops(mesh, all_ranks(mesh), ports)

    for goal in range(mesh.n_live):
        distance = distances_from(mesh, goal)
        assert np.array_equal(hops[goal], distance)
        for rank in set(range(mesh.n_live)) - {goal}:
            there = mesh.neighbor_ranks[rank]
            nearer = (there >= 0) & (distance[there] == distance[rank] - 1)
            assert ports[goal, rank] == np.flatnonzero(nearer)[-1]
    assert (np.diagonal(ports) == -1).all()


@settings(deadline=None)
@given(meshes_with_pairs())
def test_a_search_cut_short_agrees_with_the_full_one_on_what_it_fills(
    case: tuple[Mesh, list[tuple[int, int]]],
) -> None:
    mesh, pairs = case
    pairs = sorted(set(pairs), key=lambda pair: (pair[1], pair[0]))
    src, dst = np.array(pairs, dtype=np.int32).reshape(-1, 2).T

    demand = demand_of(src, dst)
    short, full = shortest_ports(mesh, demand), next_ports(mesh, demand.destinations)

    assert np.array_equal(short[short >= 0], full[short >= 0])
    assert (short[demand.rows, demand.sources] >= 0).all()


def test_the_search_stops_where_the_sources_are() -> None:
    mesh = Mesh((1, 100))

    ports = shortest_ports(mesh, demand_of(np.array([2], np.int32), np.array([0], np.int32)))

    assert np.count_nonzero(ports >= 0) == 2


@settings(deadline=None)
@given(connected_meshes())
def test_up_down_tables_arrive_and_never_go_up_after_down(mesh: Mesh) -> None:
    ports = up_down_ports(mesh, all_ranks(mesh))
    position = np.argsort(up_down_order(mesh))

    assert (table_hops(mesh, all_ranks(mesh), ports) >= 0).all()
    for goal in range(mesh.n_live):
        for rank in set(range(mesh.n_live)) - {goal}:
            there = mesh.neighbor_ranks[rank, ports[goal, rank]]
            went_down = position[there] > position[rank]
            if went_down and there != goal:
                after = mesh.neighbor_ranks[there, ports[goal, there]]
                assert position[after] > position[there]


def test_up_down_takes_the_link_between_neighbours() -> None:
    hops = table_hops(HOLE, all_ranks(HOLE), up_down_ports(HOLE, all_ranks(HOLE)))

    assert (hops[HOLE.links[:, 0], HOLE.links[:, 1]] == 1).all()
    assert (hops[HOLE.links[:, 1], HOLE.links[:, 0]] == 1).all()


def test_table_hops_of_a_table_that_runs_in_circles_is_minus_one() -> None:
    mesh = Mesh((3,))
    ports = np.array([[-1, 1, 0]], dtype=np.int8)

    assert table_hops(mesh, np.array([0]), ports).tolist() == [[0, -1, -1]]


@settings(deadline=None)
@given(meshes_with_pairs(), st.sampled_from([None, 1, 3]))
def test_routes_are_the_pairs_asked_for_over_live_links(
    case: tuple[Mesh, list[tuple[int, int]]], limit: int | None
) -> None:
    mesh, pairs = case

    routes = routes_of(mesh, pairs, limit)

    assert list(zip(routes.src.tolist(), routes.dst.tolist(), strict=True)) == sorted(set(pairs))
    for src, dst in pairs:
        path = routes.path(mesh, src, dst)
        assert (path[0], path[-1]) == (mesh.live[src], mesh.live[dst])
        assert all(there in mesh.neighbors(here) for here, there in pairwise(path))
        assert len(path) == routes.hops[routes.pair_of(src, dst)] + 1
        if mesh.live[dst] in mesh.neighbors(mesh.live[src]):
            assert len(path) == 2
    assert routes.max_hops == max(routes.hops, default=0)


@settings(deadline=None)
@given(connected_meshes(), st.sampled_from([None, 1]))
def test_routes_of_all_pairs_follow_the_tables_of_all_pairs(mesh: Mesh, limit: int | None) -> None:
    tables = all_pairs_tables(mesh, max_virtual_channels=limit)

    virtual_channel = tables.virtual_channel.reshape(mesh.n_live, mesh.n_live)
    routes = routes_of(mesh, all_pairs(mesh), limit)

    assert routes.n_virtual_channels == tables.n_virtual_channels
    assert np.array_equal(routes.virtual_channel, virtual_channel[routes.dst, routes.src])
    for pair, (src, dst) in enumerate(all_pairs(mesh)):
        for channel in routes.channels[routes.hop_ptr[pair] : routes.hop_ptr[pair + 1]]:
            rank, port = divmod(channel, routes.n_ports)
            assert tables.ports[virtual_channel[dst, src]][dst, rank] == port
    assert stretch_of(mesh, routes) == table_stretch(mesh, tables)


def test_stretch_is_one_when_shortest_and_by_hand_when_not() -> None:
    mesh = Mesh((2, 2))
    long_way = replace(
        routes_of(mesh, [(0, 1), (2, 3)]),
        hop_ptr=np.array([0, 3, 4]),
        channels=np.array([0 * 4 + 1, 2 * 4 + 3, 3 * 4 + 0, 2 * 4 + 3], dtype=np.int32),
    )

    check_paths(mesh, long_way)
    assert stretch_of(mesh, long_way) == Stretch(mean=2.0, max=3.0)
    assert stretch_of(mesh, routes_of(mesh, [])) == Stretch(1.0, 1.0)
    assert table_stretch(HOLE, all_pairs_tables(HOLE)) == Stretch(1.0, 1.0)
    one_channel = all_pairs_tables(HOLE, max_virtual_channels=1)
    assert 1.0 < table_stretch(HOLE, one_channel).mean < 1.1


@pytest.mark.parametrize(
    ("shape", "wrap", "count"),
    [
        ((4, 4), (False, False), 2),
        ((4, 4), (True, False), 4),
        ((4, 4, 4), (True, True, True), 8),
        ((2, 2), (True, True), 2),
    ],
)
def test_default_virtual_channels(
    shape: tuple[int, ...], wrap: tuple[bool, ...], count: int
) -> None:
    assert default_virtual_channels(Mesh(shape, wrap)) == count


@pytest.mark.parametrize(
    ("src", "dst", "limit", "message"),
    [
        ([0], [60], None, "needs ranks below 60 of 8x8 less 2x2@2,2, but got 60"),
        ([-1], [1], None, "needs ranks below 60 of .*, but got -1"),
        ([1, 3], [2, 3], None, "needs pairs of different ranks, but got rank 3 twice"),
        ([1, 3], [2], None, r"two flat arrays of one length, but got \(2,\) and \(1,\)"),
        ([1], [2], 0, "needs 1 to 255 virtual channels, but got 0"),
        ([1], [2], 256, "needs 1 to 255 virtual channels, but got 256"),
    ],
)
def test_routes_for_refuses(
    src: list[int], dst: list[int], limit: int | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        routes_for(HOLE, np.array(src), np.array(dst), max_virtual_channels=limit)


def test_routes_across_a_gap_are_refused() -> None:
    mesh = Mesh((1, 5)).without("0,2")

    with pytest.raises(TopologyError, match=r"no way from \(0, 0\) to \(0, 4\); .*largest_part"):
        routes_for(mesh, np.array([0]), np.array([3]))
    assert routes_for(mesh, np.array([0]), np.array([1])).max_hops == 1


def test_a_pair_without_a_route_is_refused() -> None:
    routes = routes_of(HOLE, [(0, 1), (0, 5)])

    assert routes.pair_of(0, 5) == 1
    for src, dst in [(0, 2), (0, 6), (1, 0), (70, 0), (-1, 1)]:
        with pytest.raises(InputError, match=f"none from rank {src} to rank {dst}"):
            routes.pair_of(src, dst)


def with_channels(routes: Routes, hop: int, channel: int) -> Routes:
    channels = routes.channels.copy()
    channels[hop] = channel
    return replace(routes, channels=channels)


def test_broken_paths_are_caught() -> None:
    mesh = Mesh((3, 3)).without("1,1")
    routes = routes_of(mesh, [(0, 2), (0, 7)])  # (0, 0) to (0, 2) and to (2, 2)
    dead_end = mesh.rank_of[0, 1] * 4 + 1

    check_paths(mesh, routes)
    for mutant, message in [
        (with_channels(routes, 1, dead_end), r"from \(0, 0\) to \(0, 2\) breaks at \(0, 1\)"),
        (with_channels(routes, 0, 1 * 4 + 3), r"from \(0, 0\) to \(0, 2\) breaks at \(0, 1\)"),
        (with_channels(routes, 3, 5 * 4 + 3), r"from \(0, 0\) to \(2, 2\) breaks at \(2, 0\)"),
        (with_channels(routes, 2, 99), "no channel 99"),
        (
            replace(routes, dst=np.array([2, 6], dtype=np.int32)),
            r"from \(0, 0\) to \(2, 1\) ends at \(2, 2\)",
        ),
    ]:
        with pytest.raises(VerificationError, match=message):
            check_paths(mesh, mutant)
    with pytest.raises(VerificationError, match="for 8 ranks of 4 ports, but 3x3 has 9 of 4"):
        check_paths(Mesh((3, 3)), routes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pair_ptr": np.array([0, 1])}, "5 starts of sources and 1 virtual channels, but got 2"),
        ({"pair_ptr": np.array([0, 1, 1, 1, 2])}, "pair_ptr to rise from 0 to 1"),
        ({"hop_ptr": np.array([0, 1])}, "hop_ptr to rise from 0 to 2"),
        ({"hop_ptr": np.array([0, 0, 2])}, "at least one hop for each of their 1 pairs"),
        ({"virtual_channel": np.array([1], np.uint8)}, "virtual channels below 1"),
    ],
)
def test_routes_that_do_not_fit_together_are_refused(
    change: dict[str, NDArray[np.int64]], message: str
) -> None:
    routes = routes_of(Mesh((2, 2)), [(0, 3)])

    with pytest.raises(InputError, match=message):
        replace(routes, **change)  # type: ignore[arg-type]
