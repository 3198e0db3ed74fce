"""Tilings: by hand, against every packing of small meshes, and what a new tiling moves."""

import dataclasses
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from meshmend.errors import TopologyError
from meshmend.topology.fabric import fabric
from meshmend.topology.failures import Chip, Link
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.topology.tiles import Tiling, box_colour, box_tiling
from strategies import connected_meshes

SHAPES = ("1x1", "1x2", "2x1", "2x2", "1x4", "4", "2x3", "4x2")


def is_connected(mesh: Mesh, chips: set[Chip]) -> bool:
    reached = {min(chips)}
    while more := {other for chip in reached for other in mesh.neighbors(chip)} & chips - reached:
        reached |= more
    return reached == chips


def most_tiles(mesh: Mesh, size: int) -> int:
    """Return how many connected sets of so many chips fit, by trying all sets and whole numbers."""
    sets = [
        chips for chips in itertools.combinations(mesh.live, size) if is_connected(mesh, set(chips))
    ]
    if not sets:
        return 0
    covers = np.array([[chip in chips for chips in sets] for chip in mesh.live], dtype=float)
    found = milp(
        -np.ones(len(sets)),
        integrality=np.ones(len(sets)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(covers, ub=1),
    )
    return round(-float(found.fun))


@settings(max_examples=60, deadline=None)
@given(connected_meshes(), st.sampled_from(SHAPES))
def test_tiles_are_connected_live_chips_each_in_one_tile_and_of_every_colour(
    mesh: Mesh, shape: str
) -> None:
    size = int(np.prod([int(part) for part in shape.split("x")]))
    if size > mesh.n_live:
        with pytest.raises(TopologyError, match=f"a tile of {shape} needs"):
            mesh.tiles(shape)
        return

    tiling = mesh.tiles(shape)

    chips = [chip for tile in tiling.tiles for chip in tile]
    assert len(set(chips)) == len(chips) == tiling.n_tiles * size
    for number, tile in enumerate(tiling.tiles):
        assert is_connected(mesh, set(tile))
        ranks = [mesh.rank_of[chip] for chip in tile]
        assert tiling.colour_of[ranks].tolist() == list(range(size))
        assert set(tiling.tile_of[ranks]) == {number}
    assert sorted((*chips, *tiling.spares)) == list(mesh.live)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(3, 4), (4, 4), (3, 5), (2, 7), (2, 2, 3), (1, 13)]),
    st.sampled_from(["2x2", "1x3", "1x2", "1x4", "5"]),
    st.booleans(),
    st.data(),
)
def test_no_tiling_of_a_small_mesh_has_more_tiles(
    shape: tuple[int, ...], tile: str, wraps: bool, data: st.DataObject
) -> None:
    mesh = Mesh(shape, (wraps,) * len(shape))
    lost = data.draw(st.sets(st.sampled_from(mesh.live), max_size=3))
    cut = data.draw(st.sets(st.sampled_from(mesh.links.tolist()).map(tuple), max_size=2))
    links = [Link.between(mesh.live[one], mesh.live[other]) for one, other in cut]
    mesh = Mesh(shape, mesh.wrap, frozenset(lost), frozenset(links))
    size = int(np.prod([int(part) for part in tile.split("x")]))
    try:
        tiling = mesh.tiles(tile)
    except TopologyError:
        tiling = None

    if tiling is None:
        assert most_tiles(mesh, size) == 0
        return
    assert tiling.is_most
    assert tiling.n_tiles == most_tiles(tiling.mesh, size)


@pytest.mark.parametrize(
    ("mesh", "fail", "tile", "words"),
    [
        ("4x4", [], "2x2", "4 tiles of 2x2"),
        ("4x4", ["0,0", "3,3"], "2x2", "3 tiles of 2x2, 2 spares"),
        ("4x4", ["1,1", "2,2"], "2x2", "3 tiles of 2x2, 2 spares"),
        ("8x8", ["2x2@2,2"], "2x2", "15 tiles of 2x2"),
        ("16x16", ["4x2@6,6"], "2x2", "62 tiles of 2x2"),
        ("8x8", ["2x2@2,2"], "1x4", "15 tiles of 1x4"),
        ("2x2", ["0,0"], "1x3", "1 tile of 1x3"),  # no box: the three chips around a corner
        ("3x3", [], "1x1", "9 tiles of 1x1"),
        ("4x4x4", ["2x2x1@0,0,0"], "2x2", "15 tiles of 2x2"),
    ],
)
def test_tilings_by_hand(mesh: str, fail: list[str], tile: str, words: str) -> None:
    assert str(parse_mesh(mesh, fail=fail).tiles(tile)) == words


def test_a_tiling_that_leaves_fewer_chips_than_a_tile_is_known_to_be_the_most() -> None:
    """On so many chips not all ways are kept, and the last tiles are no boxes."""
    tiling = Mesh((32, 32)).without("3x3@10,11").tiles("2x2")

    assert str(tiling) == "253 tiles of 2x2, 3 spares"
    assert tiling.is_most


def test_boxes_are_taken_as_they_are_written_and_colours_are_positions() -> None:
    tiling = Mesh((4, 8)).tiles("2x4")

    assert tiling.tiles[0] == tuple(itertools.product(range(2), range(4)))
    assert all(
        tiling.colour_of[rank] == row % 2 * 4 + column % 4
        for (row, column), rank in tiling.mesh.rank_of.items()
    )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(4, 4), (5, 6), (4, 7), (2, 2, 5), (2, 9)]), st.data())
def test_a_new_tiling_has_no_fewer_tiles_than_those_that_are_whole(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    holes = data.draw(st.sets(st.sampled_from(Mesh(shape).live), max_size=2))
    mesh = largest_part(Mesh(shape, (), frozenset(holes)))
    before = mesh.tiles("2x2")
    lost = data.draw(st.sets(st.sampled_from(mesh.live), min_size=1, max_size=4))
    broken = Mesh(mesh.shape, mesh.wrap, mesh.failed | lost, mesh.failed_links)
    if largest_part(broken).n_live < before.n_colours:
        return
    fresh = broken.tiles("x".join(map(str, before.shape)))

    after = before.after(broken)

    whole = {tile for tile in map(frozenset, before.tiles) if tile <= set(after.mesh.live)}
    assert after.n_tiles >= max(len(whole), fresh.n_tiles)
    if after.n_tiles == len(whole):
        assert set(map(frozenset, after.tiles)) == whole


def test_two_chips_lost_in_different_tiles_cost_one_tile_and_move_nothing() -> None:
    before = Mesh((4, 4)).tiles("2x2")

    after = before.after(Mesh((4, 4)).without("0,0", "0,3"))

    assert (before.n_tiles, after.n_tiles) == (4, 3)
    moves = after.moves(before)
    assert (len(moves), moves.sent_bytes(1e9), moves.time_s(1e9, fabric("reference"))) == (0, 0, 0)


def test_a_spare_that_joins_a_tile_gets_its_part_from_the_nearest_twin() -> None:
    mesh = Mesh((1, 5))
    before = mesh.tiles("1x2")
    after = before.after(mesh.without("0,0"))

    moves = after.moves(before)

    assert before.spares == ((0, 4),)
    assert after.n_tiles == 2
    assert moves.targets.tolist() == [3]  # chip (0, 4): the others keep what they have
    assert moves.sources.tolist() == [1]  # chip (0, 2)
    assert moves.sent_bytes(8e9) == 4e9
    machine = fabric("reference")
    wire_s = 4e9 / machine.link_bandwidth_bytes_per_s
    assert moves.time_s(8e9, machine) == pytest.approx(
        wire_s + machine.message_overhead_s + 2 * machine.hop_latency_s
    )


def test_a_part_that_all_twins_lost_is_counted_as_lost() -> None:
    mesh = Mesh((1, 4))
    before = mesh.tiles("1x4")
    after = Mesh((1, 5)).without("0,0").tiles("1x4")

    moves = after.moves(before)

    assert (len(moves), moves.n_lost) == (1, 1)
    assert moves.sent_bytes(4.0) == 0


@pytest.mark.parametrize(
    ("mesh", "tile", "message"),
    [
        (Mesh((4, 4)), "2by2", "--tile needs positive extents joined by x, such as 2x2, but got"),
        (Mesh((4, 4)), "2X2", "write a small x"),
        (Mesh((4, 4)), "0x2", "--tile needs positive extents"),
        (Mesh((3, 3)), "4x4", "a tile of 4x4 needs 16 connected live chips, but 3x3 has 9"),
        (Mesh((4, 4)), "2x2x2", "needs a mesh of 3 axes or more, but 4x4 has 2"),
    ],
)
def test_what_cannot_be_tiled_is_refused_in_one_line(mesh: Mesh, tile: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message) as caught:
        mesh.tiles(tile)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tiles",
    [
        (((0, 0), (0, 1)), ((0, 1), (0, 2))),
        (((0, 0), (0, 2)),),
        (((0, 0), (0, 1), (0, 2)),),
        (((0, 0), (9, 9)),),
        (),
    ],
    ids=["shared", "apart", "large", "outside", "none"],
)
def test_a_tiling_needs_connected_live_chips_each_in_one_tile(
    tiles: tuple[tuple[Chip, ...], ...],
) -> None:
    with pytest.raises(TopologyError, match="Tiling needs"):
        Tiling(Mesh((2, 4)), (1, 2), tiles)


@pytest.mark.parametrize("tile", ["2x2", "1x4", "4x2"])
def test_a_thousand_chips_are_tiled_in_seconds(tile: str) -> None:
    mesh = Mesh((32, 32)).without("4x2@13,13", "5,6", "20,27", "2x2@27,4")
    largest_part(mesh)  # compiles

    start = time.process_time()
    tiling = mesh.tiles(tile)

    assert time.process_time() - start < 20  # half a second on a quiet machine
    assert tiling.n_tiles * tiling.n_colours >= 0.96 * mesh.n_live


@given(mesh=connected_meshes(min_side=2), tile=st.sampled_from([(1, 2), (2, 1), (2, 2)]))
@settings(max_examples=60, deadline=None)
def test_boxes_that_cover_a_mesh_are_found_again_whatever_lived_beside_them(
    mesh: Mesh, tile: tuple[int, ...]
) -> None:
    """So each worker finds the tiles of a generation by itself."""
    if len(mesh.shape) != 2:
        return
    try:
        found = box_tiling(mesh, tile, keep=mesh.live[::2])
    except TopologyError:
        return
    covered = dataclasses.replace(mesh, failed=mesh.failed | set(found.spares))

    assert set(box_tiling(covered, tile).tiles) == set(found.tiles)
    for chips in found.tiles:
        assert [box_colour(tile, chip) for chip in chips] == list(range(found.n_colours))


def test_of_two_tilings_with_as_many_boxes_the_one_that_keeps_more_is_taken() -> None:
    mesh = Mesh((1, 3))

    assert box_tiling(mesh, (1, 2), keep={(0, 2)}).tiles == (((0, 2), (0, 1)),)
    assert box_tiling(mesh, (1, 2), keep={(0, 0)}).tiles == (((0, 0), (0, 1)),)
    with pytest.raises(TopologyError, match="no tile of 2x1, as it is written, fits"):
        box_tiling(mesh, (2, 1))
