"""Rings: every live chip once, neighbour to neighbour, on whatever lost aligned blocks."""

import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import UnsupportedError
from meshmend.topology.failures import Block
from meshmend.topology.graph import components, largest_part
from meshmend.topology.mesh import Mesh
from meshmend.trees.rings import (
    block_ring,
    folded,
    hamiltonian_ring,
    hops,
    line_rings,
    live_blocks,
    snake_ring,
)
from strategies import aligned_regions, even_shapes, meshes_with_dead_blocks


def check_ring_of_neighbours(mesh: Mesh, ring: tuple[tuple[int, ...], ...]) -> None:
    assert sorted(ring) == list(mesh.live)
    for chip, after in hops(ring):
        assert after in mesh.neighbors(chip)


def blocks_are_connected(mesh: Mesh) -> bool:
    """Whether the live 2x2 blocks are joined as blocks of a mesh, wrapping links left out."""
    blocks = Mesh((mesh.shape[0] // 2, mesh.shape[1] // 2))
    alive = live_blocks(mesh, "test")
    dead = [Block((1, 1), block) for block in blocks.live if block not in alive]
    return len(components(blocks.without(*dead))) == 1


@given(meshes_with_dead_blocks())
def test_a_hamiltonian_ring_visits_every_live_chip_once_over_single_links(mesh: Mesh) -> None:
    if not blocks_are_connected(mesh):
        with pytest.raises(UnsupportedError, match="needs the live 2x2 blocks connected, but only"):
            hamiltonian_ring(mesh)
        return

    check_ring_of_neighbours(mesh, hamiltonian_ring(mesh))


@given(meshes_with_dead_blocks(wrap=False))
def test_a_walk_around_the_block_tree_visits_every_live_chip_once(mesh: Mesh) -> None:
    check_ring_of_neighbours(mesh, block_ring(mesh))


def test_a_ring_exists_for_every_aligned_region_of_every_small_even_mesh() -> None:
    for shape in even_shapes(8):
        for region in aligned_regions(shape):
            mesh = largest_part(Mesh(shape).without(region))
            check_ring_of_neighbours(mesh, hamiltonian_ring(mesh))


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("cols", range(1, 9))
def test_a_full_mesh_with_an_even_side_has_a_ring(rows: int, cols: int) -> None:
    mesh = Mesh((rows, cols))
    if min(rows, cols) == 1 and max(rows, cols) != 2:
        with pytest.raises(UnsupportedError, match="ring-1d needs"):
            hamiltonian_ring(mesh)
    elif rows % 2 and cols % 2:
        with pytest.raises(UnsupportedError, match=f"needs an even side, but got {rows}x{cols}: "):
            hamiltonian_ring(mesh)
    else:
        check_ring_of_neighbours(mesh, hamiltonian_ring(mesh))


def test_the_snake_by_hand() -> None:
    assert snake_ring(Mesh((2, 3))) == ((0, 1), (0, 2), (1, 2), (1, 1), (1, 0), (0, 0))


def test_one_block_is_walked_clockwise() -> None:
    mesh = Mesh((4, 2)).without("2x2@2,0")

    assert block_ring(mesh) == ((0, 0), (0, 1), (1, 1), (1, 0))


@given(meshes_with_dead_blocks(max_side=6), st.data())
@settings(max_examples=60)
def test_a_ring_is_alive_or_refused_when_a_link_fails(mesh: Mesh, data: st.DataObject) -> None:
    one, other = data.draw(st.sampled_from(mesh.links.tolist()))
    ends = (",".join(map(str, mesh.live[rank])) for rank in (one, other))
    broken = mesh.without("link:" + "-".join(ends))

    try:
        ring = hamiltonian_ring(broken)
    except UnsupportedError as error:
        assert re.match("ring-1d needs", str(error))  # noqa: PT017
    else:
        check_ring_of_neighbours(broken, ring)


def test_the_snake_is_turned_to_avoid_a_dead_link() -> None:
    mesh = Mesh((4, 4))
    beside, across = mesh.without("link:1,0-1,1"), mesh.without("link:2,1-2,2")

    assert hamiltonian_ring(beside) == hamiltonian_ring(mesh) == snake_ring(mesh)
    assert hamiltonian_ring(across) != snake_ring(mesh)
    check_ring_of_neighbours(across, hamiltonian_ring(across))


@given(st.integers(1, 40))
def test_a_folded_line_is_a_ring_of_hops_at_most_two_long(n: int) -> None:
    order = folded(n)

    assert sorted(order) == list(range(n))
    for one, other in pairwise((*order, order[0])):
        assert abs(one - other) <= 2


def test_small_folds_by_hand() -> None:
    assert folded(1) == (0,)
    assert folded(2) == (0, 1)
    assert folded(5) == (0, 2, 4, 3, 1)
    assert folded(6) == (0, 2, 4, 5, 3, 1)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("wrap", [(False, False), (True, True)])
def test_line_rings_hold_each_chip_once_in_its_own_line(axis: int, wrap: tuple[bool, bool]) -> None:
    mesh = Mesh((5, 4), wrap)
    rings = line_rings(mesh, axis)

    assert Counter(chip for ring in rings for chip in ring) == Counter(mesh.live)
    for ring in rings:
        assert len({chip[1 - axis] for chip in ring}) == 1
        if wrap[axis]:
            assert all(after in mesh.neighbors(chip) for chip, after in hops(ring))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (Mesh((4,)), "ring-1d needs a 2-D mesh, but got 1 axes: 4"),
        (Mesh((2, 2, 2)), "ring-1d needs a 2-D mesh, but got 3 axes: 2x2x2"),
        (Mesh((3, 5)), "ring-1d needs an even side, but got 3x5: no ring of neighbours"),
        (
            Mesh((4, 5)).without("2x2@0,0"),
            "ring-1d needs even sides to split the mesh into 2x2 blocks, but got 4x5",
        ),
        (
            Mesh((4, 4)).without("0,0"),
            r"block at \(0, 0\) still has \[\(0, 1\), \(1, 0\), \(1, 1\)\] alive; fail them too",
        ),
        (Mesh((6, 6)).without("2x2@1,2"), r"block at \(0, 2\) still has \[\(0, 2\), \(0, 3\)\]"),
        (Mesh((6, 6)).without("3x2@0,0"), r"block at \(2, 0\) still has"),
        (Mesh((6, 6)).without("2x2@2,3"), r"block at \(2, 2\) still has"),
        (
            Mesh((2, 2)).without("link:0,0-0,1"),
            "ring-1d needs live links, but its ring crosses link:0,0-0,1",
        ),
        (
            Mesh((3, 4)).without("link:0,0-0,1", "link:0,0-1,0"),
            "ring-1d needs live links, but its ring crosses link:0,0-",
        ),
        (
            Mesh((4, 6), (False, True)).without("4x2@0,2", "2x2@0,0"),
            "needs the live 2x2 blocks connected",
        ),
    ],
)
def test_meshes_without_a_ring_are_refused(mesh: Mesh, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        hamiltonian_ring(mesh)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (Mesh((4, 4)).without("0,0"), "snake of ring-1d needs a full mesh, but got 4x4 less 0,0"),
        (Mesh((3, 4)), "needs even rows and two columns, but got 3x4"),
        (Mesh((4, 1)), "needs even rows and two columns, but got 4x1"),
    ],
)
def test_meshes_without_a_snake_are_refused(mesh: Mesh, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        snake_ring(mesh)
