"""Intact parts of broken meshes: by hand, and against trying every box."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import UnsupportedError
from meshmend.topology.failures import Block, Link
from meshmend.topology.mesh import Mesh
from meshmend.topology.submesh import box_around, largest_box, without_lines
from meshmend.topology.text import parse_mesh


@st.composite
def broken_meshes(draw: st.DrawFn) -> Mesh:
    shape = draw(st.sampled_from([(1, 5), (4, 4), (3, 6), (2, 3, 3), (7,)]))
    mesh = Mesh(shape)
    chips = draw(st.sets(st.sampled_from(mesh.live), max_size=4))
    links = draw(st.sets(st.sampled_from(mesh.links.tolist()).map(tuple), max_size=3))
    cut = [Link.between(mesh.live[one], mesh.live[other]) for one, other in links]
    return Mesh(shape, (), frozenset(chips), frozenset(cut))


def is_clear(mesh: Mesh, block: Block) -> bool:
    chips = set(block.chips())
    cut = any({link.first, link.second} <= chips for link in mesh.failed_links)
    return not chips & mesh.failed and not cut


@settings(max_examples=60)
@given(broken_meshes())
def test_the_largest_box_is_clear_and_none_is_larger(mesh: Mesh) -> None:
    box = largest_box(mesh)

    chips = [mesh.live[rank] for rank in box.ranks]
    block = Block(box.mesh.shape, chips[0])
    assert chips == list(block.chips())
    assert is_clear(mesh, block)
    spans = [
        [(size, start) for size in range(1, whole + 1) for start in range(whole - size + 1)]
        for whole in mesh.shape
    ]
    blocks = (
        Block(tuple(size for size, _ in span), tuple(start for _, start in span))
        for span in itertools.product(*spans)
    )
    assert max(len(list(b.chips())) for b in blocks if is_clear(mesh, b)) == len(chips)


@settings(max_examples=60)
@given(broken_meshes())
def test_without_lines_keeps_every_whole_line_across_the_axis_that_keeps_most(mesh: Mesh) -> None:
    kept = []
    for axis in range(len(mesh.shape)):
        hit = {chip[axis] for chip in mesh.failed}
        hit |= {link.first[axis] for link in mesh.failed_links}
        kept.append([chip for chip in mesh.live if chip[axis] not in hit])
    if not any(kept):
        with pytest.raises(UnsupportedError, match="drop-lines needs a line without failures"):
            without_lines(mesh)
        return

    part = without_lines(mesh)

    assert [mesh.live[rank] for rank in part.ranks] == max(kept, key=len)
    assert part.mesh.n_live == len(part.ranks)


def test_a_block_in_the_middle_leaves_the_larger_side_or_six_rows() -> None:
    mesh = parse_mesh("8x8", fail=["4x2@2,2"])

    box, lines = largest_box(mesh), without_lines(mesh)

    assert (box.mesh, box.what) == (parse_mesh("8x4"), "the intact box 8x4@0,4")
    assert (lines.mesh, lines.what) == (parse_mesh("8x6"), "all but 2 columns")
    assert without_lines(parse_mesh("4x4").without("1,1")).what == "all but 1 row"


def test_a_box_that_spans_an_axis_keeps_its_wrap() -> None:
    mesh = parse_mesh("8x8", wrap="all", fail=["0,0"])

    assert largest_box(mesh).mesh == parse_mesh("8x7", wrap="0")


@settings(max_examples=100)
@given(broken_meshes(), st.data())
def test_the_box_around_chips_has_exactly_their_links(mesh: Mesh, data: st.DataObject) -> None:
    wrap = tuple(data.draw(st.booleans()) for _ in mesh.shape)
    mesh = Mesh(mesh.shape, wrap, mesh.failed, mesh.failed_links)
    chips = sorted(data.draw(st.sets(st.sampled_from(mesh.live), min_size=1)))
    ranks = [mesh.rank_of[chip] for chip in chips]

    box = box_around(mesh, chips)

    assert box.n_live == len(chips)
    among = [pair for pair in mesh.links.tolist() if set(pair) <= set(ranks)]
    assert sorted([ranks[one], ranks[other]] for one, other in box.links.tolist()) == sorted(among)


def test_a_box_of_a_torus_wraps_only_where_it_spans_the_torus() -> None:
    torus = parse_mesh("4x4", wrap="all")

    assert str(box_around(torus, [(1, at) for at in range(4)])) == "1x4 wrap 1"
    assert str(box_around(torus, [(2, 0), (2, 3)])) == "1x4 wrap 1 less 1x2@0,1"
    assert str(box_around(torus, [(2, 1), (3, 1)])) == "2x1"


def test_the_box_around_chips_has_the_speeds_of_their_links() -> None:
    mesh = Mesh((4, 4)).slowed("link:1,1-1,2=0.25", "link:0,0-0,1=0.5", "link:1,2-2,2=0.75")
    box = box_around(mesh, [(1, 1), (1, 2), (2, 1), (2, 2)])

    assert str(box) == "2x2 slow link:0,0-0,1=0.25, link:0,1-1,1=0.75"
