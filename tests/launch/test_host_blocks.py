"""Blocks of hosts: they tile the mesh in row-major order, or are refused."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import InputError
from meshmend.launch.hosts import host_blocks, host_shape_from, live_chips_of
from meshmend.topology.failures import Block
from meshmend.topology.mesh import Mesh


def test_hosts_of_4x2_on_4x4_are_its_left_and_its_right_half() -> None:
    assert host_blocks(Mesh((4, 4)), (4, 2)) == (Block((4, 2), (0, 0)), Block((4, 2), (0, 2)))


def test_blocks_come_row_by_row() -> None:
    origins = [block.origin for block in host_blocks(Mesh((4, 4)), (2, 2))]

    assert origins == [(0, 0), (0, 2), (2, 0), (2, 2)]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3))
def test_every_chip_belongs_to_one_host(factors: list[tuple[int, int]]) -> None:
    mesh = Mesh(tuple(size * count for size, count in factors))

    blocks = host_blocks(mesh, tuple(size for size, _ in factors))

    chips = list(itertools.chain.from_iterable(block.chips() for block in blocks))
    assert sorted(chips) == sorted(mesh.live)


@pytest.mark.parametrize("shape", [(3, 2), (4,), (2, 2, 1), (8, 2), (4, 0)])
def test_blocks_that_do_not_tile_the_mesh_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="--hosts needs a block of chips that tiles the mesh 4x4"):
        host_blocks(Mesh((4, 4)), shape)


def test_a_host_has_4x2_chips_unless_said_otherwise_and_one_chip_on_one_axis() -> None:
    assert host_shape_from(None, Mesh((8, 8))) == (4, 2)
    assert host_shape_from(None, Mesh((4, 4, 4))) == (4, 2, 1)
    assert host_shape_from(None, Mesh((8,))) == (1,)
    assert host_shape_from("2x8", Mesh((8, 8))) == (2, 8)


def test_a_shape_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InputError, match="--hosts needs a block of chips such as 4x2, but got 'x'"):
        host_shape_from("x", Mesh((8, 8)))


def test_failed_chips_of_a_block_have_no_worker() -> None:
    block = Block((2, 2), (0, 0))

    assert live_chips_of(block, Mesh((2, 4)).without("0,1")) == ((0, 0), (1, 0), (1, 1))
