"""Blue and yellow rings: all live chips once, blue alike, each yellow chip with a partner."""

import pytest
from hypothesis import given

from meshmend.errors import UnsupportedError
from meshmend.topology.graph import distances_from, largest_part
from meshmend.topology.mesh import Mesh
from meshmend.trees.rings import PairLayout, fault_tolerant_layout, hops, row_pair_layout
from strategies import aligned_regions, even_shapes, meshes_with_dead_blocks


def broken_pairs(mesh: Mesh, axis: int) -> int:
    return len({chip[axis] // 2 for chip in mesh.failed})


def check_layout(mesh: Mesh, layout: PairLayout) -> None:
    """Every claim of `PairLayout` and `fault_tolerant_layout`, word for word."""
    axis, rings = layout.axis, (*layout.blue, *layout.yellow)
    blue_chips = {chip for ring in layout.blue for chip in ring}
    yellow_chips = {chip for ring in layout.yellow for chip in ring}

    assert sorted(chip for ring in rings for chip in ring) == list(mesh.live)
    assert all(after in mesh.neighbors(chip) for ring in rings for chip, after in hops(ring))
    assert {len(ring) for ring in layout.blue} == {2 * mesh.shape[1 - axis]}
    assert {len(ring) for ring in layout.yellow} <= {4}
    for same_position in zip(*layout.blue, strict=True):
        assert len({chip[1 - axis] for chip in same_position}) == 1
        assert len({chip[axis] % 2 for chip in same_position}) == 1
    assert sorted(map(sorted, layout.across)) == sorted(map(sorted, zip(*layout.blue, strict=True)))
    assert set(layout.partner) == yellow_chips
    for chip, partner in layout.partner.items():
        assert partner in blue_chips
        assert partner[1 - axis] == chip[1 - axis]
        distance = distances_from(mesh, mesh.rank_of[chip])
        same_column = (mesh.rank_of[b] for b in blue_chips if b[1 - axis] == chip[1 - axis])
        assert distance[mesh.rank_of[partner]] == min(distance[rank] for rank in same_column)


def check_fewest_broken(mesh: Mesh, layout: PairLayout) -> None:
    whole = [mesh.shape[axis] // 2 - broken_pairs(mesh, axis) for axis in (0, 1)]
    broken = [broken_pairs(mesh, axis) for axis in (0, 1) if whole[axis]]

    assert broken_pairs(mesh, layout.axis) == min(broken)
    assert len(layout.blue) == whole[layout.axis]


@given(meshes_with_dead_blocks(wrap=False))
def test_blue_and_yellow_rings_hold_every_live_chip_once(mesh: Mesh) -> None:
    if all(broken_pairs(mesh, axis) == mesh.shape[axis] // 2 for axis in (0, 1)):
        with pytest.raises(UnsupportedError, match="every pair is broken"):
            fault_tolerant_layout(mesh)
        return
    layout = fault_tolerant_layout(mesh)

    check_layout(mesh, layout)
    if mesh.failed:
        check_fewest_broken(mesh, layout)


def test_every_aligned_region_of_every_small_even_mesh_has_a_layout() -> None:
    for shape in even_shapes(8):
        for region in aligned_regions(shape):
            mesh = largest_part(Mesh(shape).without(region))
            layout = fault_tolerant_layout(mesh)
            check_layout(mesh, layout)
            check_fewest_broken(mesh, layout)


@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (4, 3), (3, 4), (6, 6), (1, 2)])
def test_a_full_mesh_has_blue_rings_only(shape: tuple[int, int]) -> None:
    mesh = Mesh(shape)
    layout = row_pair_layout(mesh)

    check_blue_only(mesh, layout)
    assert fault_tolerant_layout(mesh) == layout
    assert layout.axis == (0 if shape[0] % 2 == 0 else 1)


def check_blue_only(mesh: Mesh, layout: PairLayout) -> None:
    assert not layout.yellow
    assert not layout.partner
    check_layout(mesh, layout)


def test_a_tall_hole_is_paired_by_columns_and_a_wide_one_by_rows() -> None:
    mesh = Mesh((8, 8))

    assert fault_tolerant_layout(mesh.without("4x2@2,2")).axis == 1
    assert fault_tolerant_layout(mesh.without("2x4@2,2")).axis == 0
    assert fault_tolerant_layout(mesh.without("2x2@2,2")).axis == 0


def test_the_layout_of_the_smallest_hole_by_hand() -> None:
    layout = fault_tolerant_layout(Mesh((4, 4)).without("2x2@0,0"))

    assert layout.axis == 0
    assert layout.blue == (((2, 0), (2, 1), (2, 2), (2, 3), (3, 3), (3, 2), (3, 1), (3, 0)),)
    assert layout.yellow == (((0, 2), (0, 3), (1, 3), (1, 2)),)
    assert dict(layout.partner) == {(0, 2): (2, 2), (1, 2): (2, 2), (0, 3): (2, 3), (1, 3): (2, 3)}


@pytest.mark.parametrize(
    ("build", "mesh", "message"),
    [
        (row_pair_layout, Mesh((4,)), "row-pair needs a 2-D mesh, but got 1 axes"),
        (row_pair_layout, Mesh((3, 3)), "even number of rows or columns, but got 3x3"),
        (row_pair_layout, Mesh((4, 4)).without("0,0"), "row-pair needs a full mesh, but got 4x4"),
        (fault_tolerant_layout, Mesh((2, 2, 2)), "ft-two-d needs a 2-D mesh, but got 3 axes"),
        (fault_tolerant_layout, Mesh((3, 3)), "ft-two-d needs an even number of rows or columns"),
        (fault_tolerant_layout, Mesh((4, 5)).without("2x2@0,0"), "ft-two-d needs even sides"),
        (fault_tolerant_layout, Mesh((6, 6)).without("2x2@1,1"), "ft-two-d needs failed regions"),
        (fault_tolerant_layout, Mesh((6, 6)).without("2x3@0,0"), "ft-two-d needs failed regions"),
        (
            fault_tolerant_layout,
            Mesh((4, 4)).without("2x2@0,0", "2x2@2,2", "2x2@0,2"),
            "needs a pair of rows or columns without failed chips, but on .* every pair is broken",
        ),
    ],
)
def test_meshes_without_pairs_are_refused(build: object, mesh: Mesh, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build(mesh)  # type: ignore[operator]
