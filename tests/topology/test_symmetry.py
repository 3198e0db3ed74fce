"""Images of a mesh have one stand-in, and the names of its ranks are right."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from meshmend.topology.mesh import Mesh
from meshmend.topology.symmetry import stand_in
from meshmend.topology.text import parse_mesh


def boards(mesh: Mesh) -> list[Mesh]:
    """Return what is left when a 2x2 board of a mesh fails, for each board."""
    corners = itertools.product(*(range(0, extent, 2) for extent in mesh.shape))
    return [mesh.without("2x2@" + ",".join(map(str, corner))) for corner in corners]


@pytest.mark.parametrize(("wrap", "n_stand_ins"), [("none", 8), ("0", 4), ("1", 2), ("all", 1)])
def test_losses_of_a_board_that_look_alike_have_one_stand_in(wrap: str, n_stand_ins: int) -> None:
    losses = boards(parse_mesh("6x16", wrap=wrap))

    stand_ins = {stand_in(left).mesh for left in losses}

    assert len(losses) == 24
    assert len(stand_ins) == n_stand_ins


@pytest.mark.parametrize(
    "mesh",
    [
        parse_mesh("5x7", fail=["1,5", "link:3,2-3,3", "4,0"]),
        parse_mesh("4x6", wrap="all", fail=["2x2@2,4", "link:0,0-3,0"]),
        parse_mesh("3x4x2", fail=["2,1,1"]),
        parse_mesh("2x2", wrap="all", fail=["0,1"]),
        parse_mesh("1x4", fail=["0,3"]),
        parse_mesh("4x4"),
        parse_mesh("6x4", fail=["1,3"], slow=["link:0,0-0,1=0.25", "link:5,3-4,3=0.5"]),
    ],
    ids=str,
)
def test_renamed_ranks_have_the_links_that_they_had(mesh: Mesh) -> None:
    like = stand_in(mesh)

    assert sorted(like.ranks.tolist()) == list(range(mesh.n_live))
    axes = zip(mesh.shape, mesh.wrap, strict=True)
    assert list(zip(like.mesh.shape, like.mesh.wrap, strict=True)) == sorted(axes)
    assert links_of(like.mesh, like.ranks) == links_of(mesh, np.arange(mesh.n_live))


def links_of(mesh: Mesh, names: NDArray[np.int64]) -> set[frozenset[int]]:
    return {
        frozenset((int(names[rank]), int(names[mesh.rank_of[other]])))
        for rank, chip in enumerate(mesh.live)
        for other in mesh.neighbors(chip)
    }


def test_a_stand_in_stands_for_itself_and_a_whole_mesh_for_itself() -> None:
    lost = parse_mesh("6x6", fail=["2x2@2,4"])

    assert stand_in(stand_in(lost).mesh).mesh == stand_in(lost).mesh
    assert stand_in(parse_mesh("6x6")).mesh == parse_mesh("6x6")
    assert stand_in(parse_mesh("6x6")).ranks.tolist() == list(range(36))


def test_a_mesh_is_not_taken_for_one_with_other_failures() -> None:
    one = parse_mesh("6x6", fail=["0,1"])
    other = parse_mesh("6x6", fail=["1,1"])

    assert stand_in(one).mesh != stand_in(other).mesh


def test_axes_are_exchanged_unless_they_must_stay() -> None:
    one = parse_mesh("6x6", fail=["0,1"])
    other = parse_mesh("6x6", fail=["1,0"])

    assert stand_in(one).mesh == stand_in(other).mesh
    assert stand_in(one, same_axes=True).mesh != stand_in(other, same_axes=True).mesh


def test_slow_links_are_moved_with_their_speeds() -> None:
    one = parse_mesh("4x4", slow=["link:0,0-0,1=0.25", "link:0,2-0,3=0.5"])
    mirrored = parse_mesh("4x4", slow=["link:3,3-3,2=0.25", "link:3,1-3,0=0.5"])
    other = parse_mesh("4x4", slow=["link:0,0-1,0=0.25", "link:0,2-0,3=0.5"])

    assert stand_in(one).mesh == stand_in(mirrored).mesh != stand_in(other).mesh


def test_many_axes_that_are_alike_take_no_time() -> None:
    mesh = Mesh((2,) * 12).without("0," * 11 + "1")

    assert stand_in(mesh).mesh.n_live == mesh.n_live


@pytest.mark.parametrize(
    "mesh", [Mesh((200_000,), (True,)), Mesh((100_000,), (True,)).without("7")], ids=str
)
def test_a_long_ring_takes_no_memory_for_its_images(mesh: Mesh) -> None:
    """All its shifts, an entry for each chip, would take a hundred gigabytes."""
    assert stand_in(mesh).mesh == mesh
