"""The limit of the sums of tiles: against a linear program over all trees, and by hand."""

import heapq

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import linprog

from meshmend.planning.plan import plan
from meshmend.simulator.colour_limit import colour_limit, colour_packing
from meshmend.simulator.limit import limit
from meshmend.topology.fabric import fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.topology.tiles import Tiling

REFERENCE = fabric("reference")

Lengths = NDArray[np.float64]


def least_tree(mesh: Mesh, terminals: list[int], lengths: Lengths) -> tuple[float, set[int]]:
    """Return the shortest tree that joins the terminals, as links (Dreyfus and Wagner 1971)."""
    beside: list[list[tuple[int, int]]] = [[] for _ in range(mesh.n_live)]
    for link, (one, other) in enumerate(mesh.links.tolist()):
        beside[one].append((other, link))
        beside[other].append((one, link))
    n_masks = 1 << (len(terminals) - 1)
    cost = np.full((n_masks, mesh.n_live), np.inf)
    how: dict[tuple[int, int], tuple[int, int, int]] = {}  # a split, or a step over a link
    for number, terminal in enumerate(terminals[:-1]):
        cost[1 << number, terminal] = 0.0
    for mask in range(1, n_masks):
        part = (mask - 1) & mask
        while part:
            split = cost[part] + cost[mask ^ part]
            for rank in np.flatnonzero(split < cost[mask] - 1e-15).tolist():
                cost[mask, rank] = split[rank]
                how[mask, rank] = (part, -1, -1)
            part = (part - 1) & mask
        heap = [(float(cost[mask, rank]), rank) for rank in range(mesh.n_live)]
        heapq.heapify(heap)
        while heap:
            length, rank = heapq.heappop(heap)
            if length > cost[mask, rank]:
                continue
            for other, link in beside[rank]:
                if length + lengths[link] < cost[mask, other] - 1e-15:
                    cost[mask, other] = length + lengths[link]
                    how[mask, other] = (0, rank, link)
                    heapq.heappush(heap, (float(cost[mask, other]), other))
    links, left = set(), [(n_masks - 1, terminals[-1])]
    while left:
        mask, rank = left.pop()
        if (mask, rank) not in how:
            continue
        part, before, link = how[mask, rank]
        if part:
            left += [(part, rank), (mask ^ part, rank)]
        else:
            links.add(link)
            left.append((mask, before))
    return float(cost[-1, terminals[-1]]), links


def least_load(tiling: Tiling) -> float:
    """Return the least load of the busiest link over all packings of trees of all colours.

    The dual program has a length for each link; all together are 1. Each colour counts as the
    length of its shortest tree. Trees that are too short for the program are added one by one.
    """
    mesh, n_colours = tiling.mesh, tiling.n_colours
    members = [np.flatnonzero(tiling.colour_of == c).tolist() for c in range(n_colours)]
    rows: list[NDArray[np.float64]] = []
    values = np.full(len(mesh.links), 1 / len(mesh.links))
    bounds_of_colours = np.full(n_colours, np.inf)
    while True:
        is_done = True
        for colour, terminals in enumerate(members):
            length, tree = least_tree(mesh, terminals, values)
            if length < bounds_of_colours[colour] - 1e-9:
                is_done = False
                row = np.zeros(len(mesh.links) + n_colours)
                row[list(tree)], row[len(mesh.links) + colour] = -1, 1
                rows.append(row)
        if is_done:
            return float(bounds_of_colours.sum()) / n_colours
        cost = np.concatenate([np.zeros(len(mesh.links)), np.full(n_colours, -1.0)])
        whole = np.concatenate([np.ones(len(mesh.links)), np.zeros(n_colours)])
        found = linprog(cost, np.array(rows), np.zeros(len(rows)), whole[None], [1.0])
        values = np.maximum(found.x[: len(mesh.links)], 0)
        bounds_of_colours = found.x[len(mesh.links) :]


SMALL = [
    ("2x4", [], "2x2"),
    ("4x4", [], "2x2"),
    ("4x4", ["2x2@0,2"], "2x2"),
    ("4x6", [], "2x2"),
    ("4x6", ["2x2@2,2"], "2x2"),
    ("2x10", [], "2x2"),
    ("4x4", [], "1x4"),
    ("3x4", [], "1x2"),
    ("4x4", [], "4x2"),
    ("3x6", [], "1x3"),
    ("2x5", [], "2x2"),
]


@pytest.mark.parametrize(("shape", "fail", "tile"), SMALL, ids=lambda each: str(each))
def test_the_bandwidth_bound_is_what_trees_can_reach(
    shape: str, fail: list[str], tile: str
) -> None:
    tiling = parse_mesh(shape, fail=fail).tiles(tile)

    assert 1 / colour_packing(tiling).upper == pytest.approx(least_load(tiling), rel=1e-6)


def test_around_scattered_holes_the_bound_is_below_what_trees_can_reach_by_little() -> None:
    """Tiles of two forms: no partition into whole tiles binds as the links inside them do."""
    tiling = parse_mesh("4x4", fail=["0,0", "3,3"]).tiles("2x2")

    assert 0.97 * least_load(tiling) < 1 / colour_packing(tiling).upper < least_load(tiling)


def test_the_limit_of_two_tiles_by_hand() -> None:
    """Two links join two tiles of 2x2, and all of the payload crosses them one way and back."""
    tiling = Mesh((2, 4)).tiles("2x2")

    found = colour_limit(tiling, REFERENCE, 100e6)

    assert found.packing.upper == 2.0
    assert found.bandwidth_s == pytest.approx(50e6 / REFERENCE.link_bandwidth_bytes_per_s)
    assert found.latency_s == 2 * REFERENCE.hop_latency_s
    assert found.time_s >= found.bandwidth_s + REFERENCE.hop_latency_s
    assert "the 2 links between 2 parts of one tile or more" in found.describe()


def test_a_tile_sends_to_each_twin_by_the_way_that_is_nearest_to_it() -> None:
    """The tile in the middle has a twin beside it on either side; those are two hops apart."""
    mesh = parse_mesh("2x2x2", fail=["0,1,1"])
    made = plan(mesh, tile="1x2x1", payload=4096, fabric="reference")
    bound = made.limit()

    assert bound.exit is not None
    assert bound.exit.hops == 2
    assert bound.time_s <= made.predicted().time_s


def test_no_plan_of_a_small_tiling_beats_the_limit() -> None:
    for failed in ("0,0,0", "0,1,1", "1,0,1"):
        mesh = parse_mesh("2x2x2", fail=[failed])
        made = plan(mesh, tile="1x1x2", payload=1, fabric="reference")

        assert made.limit().time_s <= (1 + 1e-9) * made.predicted().time_s


def test_one_tile_has_nothing_to_sum() -> None:
    assert colour_limit(Mesh((2, 2)).tiles("2x2"), REFERENCE, 1e6).time_s == 0.0


def test_tiles_of_one_chip_have_the_limit_of_the_mesh() -> None:
    mesh = Mesh((4, 6)).without("2x2@1,1")

    tiles, whole = colour_limit(mesh.tiles("1x1"), REFERENCE, 1e6), limit(mesh, REFERENCE, 1e6)

    assert tiles.packing.upper == whole.packing.upper
    assert tiles.bandwidth_s == whole.bandwidth_s
    assert tiles.latency_s == whole.latency_s
