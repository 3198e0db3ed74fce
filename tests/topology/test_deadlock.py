"""Deadlock: what routing builds is free of it, and the checker catches what is not."""

import itertools
import re
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from meshmend.errors import DeadlockError, VerificationError
from meshmend.topology.deadlock import check_deadlock_free, find_cycle
from meshmend.topology.failures import Block, Chip
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import Routes, Stretch, routes_for, stretch_of
from meshmend.topology.tables import all_pairs_tables, default_virtual_channels, next_ports
from strategies import connected_meshes

HOLE = Mesh((8, 8)).without("2x2@2,2")


def routes_over(mesh: Mesh, paths: list[list[Chip]]) -> Routes:
    """Routes along paths written as chips, sources in order, all on one virtual channel."""
    ranks = [[mesh.rank_of[chip] for chip in path] for path in paths]
    n_ports = mesh.neighbor_ranks.shape[1]
    channels = [
        here * n_ports + int(np.flatnonzero(mesh.neighbor_ranks[here] == there)[0])
        for path in ranks
        for here, there in itertools.pairwise(path)
    ]
    return Routes(
        n_ranks=mesh.n_live,
        n_ports=n_ports,
        pair_ptr=np.searchsorted([path[0] for path in ranks], np.arange(mesh.n_live + 1)),
        dst=np.array([path[-1] for path in ranks], dtype=np.int32),
        hop_ptr=np.cumsum([0] + [len(path) - 1 for path in ranks]),
        channels=np.array(channels, dtype=np.int32),
        virtual_channel=np.zeros(len(paths), dtype=np.uint8),
        n_virtual_channels=1,
    )


def all_pairs_routes(mesh: Mesh, max_virtual_channels: int | None = None) -> Routes:
    src, dst = np.nonzero(~np.eye(mesh.n_live, dtype=bool))
    return routes_for(mesh, src, dst, max_virtual_channels=max_virtual_channels)


def shortest_paths(mesh: Mesh) -> list[list[Chip]]:
    """The path that the shortest tables give each pair of ranks, followed hop by hop."""
    ports = next_ports(mesh, np.arange(mesh.n_live))
    paths = []
    for src, dst in itertools.permutations(range(mesh.n_live), 2):
        path = [src]
        while path[-1] != dst:
            path.append(int(mesh.neighbor_ranks[path[-1], ports[dst, path[-1]]]))
        paths.append([mesh.live[rank] for rank in path])
    return paths


CLOCKWISE: list[list[Chip]] = [
    [(0, 0), (0, 1), (1, 1)],
    [(0, 1), (1, 1), (1, 0)],
    [(1, 0), (0, 0), (0, 1)],
    [(1, 1), (1, 0), (0, 0)],
]


def test_four_routes_around_a_square_are_caught_and_the_circle_is_printed() -> None:
    circle = (
        r"\(0, 0\)->\(0, 1\) waits for \(0, 1\)->\(1, 1\) waits for \(1, 1\)->\(1, 0\) "
        r"waits for \(1, 0\)->\(0, 0\) waits for \(0, 0\)->\(0, 1\)"
    )

    with pytest.raises(DeadlockError, match="on virtual channel 0 " + circle):
        check_deadlock_free(Mesh((2, 2)), routes_over(Mesh((2, 2)), CLOCKWISE))


@pytest.mark.parametrize("left_out", range(4))
def test_three_routes_around_a_square_are_free(left_out: int) -> None:
    paths = [path for index, path in enumerate(CLOCKWISE) if index != left_out]

    check_deadlock_free(Mesh((2, 2)), routes_over(Mesh((2, 2)), paths))


@pytest.mark.parametrize("moved", range(4))
def test_a_second_virtual_channel_breaks_the_circle(moved: int) -> None:
    routes = routes_over(Mesh((2, 2)), CLOCKWISE)
    apart = np.array([index == moved for index in range(4)], dtype=np.uint8)

    check_deadlock_free(Mesh((2, 2)), replace(routes, virtual_channel=apart, n_virtual_channels=2))


def test_a_circle_on_the_second_virtual_channel_is_caught() -> None:
    routes = routes_over(Mesh((2, 2)), CLOCKWISE)
    both = replace(routes, virtual_channel=np.ones(4, dtype=np.uint8), n_virtual_channels=2)

    with pytest.raises(DeadlockError, match="on virtual channel 1"):
        check_deadlock_free(Mesh((2, 2)), both)


def test_a_broken_path_is_no_proof() -> None:
    mesh = Mesh((3, 3))
    routes = routes_for(mesh, np.array([0]), np.array([8]))

    with pytest.raises(VerificationError, match="breaks at"):
        check_deadlock_free(mesh.without("link:0,1-0,2"), routes)


def test_the_proof_of_many_paths_takes_less_memory_than_the_paths() -> None:
    """That of all pairs of 64x64 took 30 GB, and the paths three."""
    mesh = Mesh((16, 16))
    source, target = np.nonzero(~np.eye(mesh.n_live, dtype=np.bool_))
    routes = routes_for(mesh, source, target)
    check_deadlock_free(mesh, routes)  # so that nothing is compiled below

    tracemalloc.start()
    check_deadlock_free(mesh, routes)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < routes.channels.nbytes


def test_shortest_routes_around_a_hole_on_one_virtual_channel_are_caught() -> None:
    """What the second virtual channel is for; the printed circle is one of true dependencies."""
    routes = all_pairs_routes(HOLE)
    one_channel = replace(
        routes, virtual_channel=np.zeros(routes.n_pairs, np.uint8), n_virtual_channels=1
    )

    check_deadlock_free(HOLE, routes)
    with pytest.raises(DeadlockError) as caught:
        check_deadlock_free(HOLE, one_channel)

    circle = re.findall(r"(\(\d, \d\))->(\(\d, \d\))", str(caught.value))
    taken = {
        tuple(map(str, path[at : at + 3]))
        for pair in itertools.permutations(range(HOLE.n_live), 2)
        for path in [routes.path(HOLE, *pair)]
        for at in range(len(path) - 2)
    }
    assert circle[0] == circle[-1]
    for held, awaited in itertools.pairwise(circle):
        assert held[1] == awaited[0]
        assert (*held, awaited[1]) in taken


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3), st.integers(0, 11)), max_size=24))
def test_find_cycle_finds_one_exactly_when_there_is_one(
    entries: list[tuple[int, int, int]],
) -> None:
    """Against SciPy's strongly connected components."""
    waits = np.full((12, 4), -1, dtype=np.int32)
    for channel, port, after in entries:
        waits[channel, port] = after
    held = np.nonzero(waits >= 0)
    graph = coo_array((np.ones(len(held[0])), (held[0], waits[held])), shape=(12, 12))
    n_parts, _ = connected_components(graph, directed=True, connection="strong")
    has_cycle = n_parts < 12 or bool((waits == np.arange(12)[:, None]).any())

    cycle = find_cycle(waits)

    assert bool(cycle) == has_cycle
    assert len(set(cycle)) == len(cycle)
    for channel, after in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        assert after in waits[channel]


@settings(deadline=None)
@given(connected_meshes(min_side=2), st.sampled_from([None, 1, 2, 3]))
def test_any_connected_mesh_gets_deadlock_free_routes_within_its_virtual_channels(
    mesh: Mesh, limit: int | None
) -> None:
    tables = all_pairs_tables(mesh, max_virtual_channels=limit)
    routes = all_pairs_routes(mesh, limit)

    check_deadlock_free(mesh, routes)
    allowed = default_virtual_channels(mesh) if limit is None else limit
    assert tables.n_virtual_channels == routes.n_virtual_channels <= allowed


@settings(deadline=None)
@given(connected_meshes(min_side=2))
def test_a_second_virtual_channel_is_used_only_where_shortest_routes_need_it(mesh: Mesh) -> None:
    on_one_channel = routes_over(mesh, shortest_paths(mesh))

    if all_pairs_tables(mesh).n_virtual_channels == 1:
        check_deadlock_free(mesh, on_one_channel)
    else:
        with pytest.raises(DeadlockError, match="on virtual channel 0"):
            check_deadlock_free(mesh, on_one_channel)


@pytest.mark.parametrize("side", [4, 5, 6])
def test_every_rectangular_hole_needs_at_most_two_virtual_channels_and_no_longer_route(
    side: int,
) -> None:
    whole = Mesh((side, side + 1))
    for rows, columns in itertools.product(range(1, side), range(1, side + 1)):
        for origin in itertools.product(range(side - rows + 1), range(side + 2 - columns)):
            mesh = largest_part(whole.without(Block((rows, columns), origin)))
            routes = all_pairs_routes(mesh)

            check_deadlock_free(mesh, routes)
            assert routes.n_virtual_channels <= 2
            assert stretch_of(mesh, routes) == Stretch(1.0, 1.0)


@pytest.mark.parametrize(
    ("mesh", "count"),
    [
        (Mesh((8, 8)), 1),
        (Mesh((8, 8)).without("2x2@0,0"), 1),
        (HOLE, 2),
        (Mesh((16, 16)).without("4x2@6,6", "2x4@2,10", "1,1", "2x2@12,2"), 2),
        (Mesh((8, 8), (True, True)), 4),
        (Mesh((4, 4, 4)).without("2x2x2@1,1,1"), 2),
    ],
    ids=str,
)
def test_virtual_channels_of_all_pairs_with_every_route_shortest(mesh: Mesh, count: int) -> None:
    routes = all_pairs_routes(mesh)

    check_deadlock_free(mesh, routes)
    assert all_pairs_tables(mesh).n_virtual_channels == routes.n_virtual_channels == count
    assert stretch_of(mesh, routes) == Stretch(1.0, 1.0)


@pytest.mark.parametrize("axis", [0, 1])
def test_neighbours_and_pairs_that_skip_a_row_need_one_virtual_channel(axis: int) -> None:
    """What the schedules ask for: links, and the next live chip two or more away in a line."""
    mesh = Mesh((16, 16)).without("4x2@6,6", "2x4@2,10")
    src, port = np.nonzero(mesh.neighbor_ranks >= 0)
    pairs = set(zip(src.tolist(), mesh.neighbor_ranks[src, port].tolist(), strict=True))
    for chip, rank in mesh.rank_of.items():
        ahead = [
            mesh.rank_of[there]
            for at in range(chip[axis] + 2, 16, 2)
            if (there := (*chip[:axis], at, *chip[axis + 1 :])) in mesh.rank_of
        ]
        pairs |= {(rank, there) for there in ahead[:1]} | {(there, rank) for there in ahead[:1]}

    routes = routes_for(mesh, *np.array(sorted(pairs)).T)

    check_deadlock_free(mesh, routes)
    assert routes.n_virtual_channels == 1


@pytest.mark.slow
def test_all_pairs_of_a_large_mesh_are_deadlock_free_on_two_virtual_channels() -> None:
    mesh = Mesh((32, 32)).without("4x2@14,14")
    routes = all_pairs_routes(mesh)

    check_deadlock_free(mesh, routes)
    assert routes.n_virtual_channels == all_pairs_tables(mesh).n_virtual_channels == 2
    assert stretch_of(mesh, routes) == Stretch(1.0, 1.0)
