"""Meshes against obvious loops and SciPy: neighbours, links, parts, diameter, repairs."""

import copy
import itertools
import pickle
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components, shortest_path

from meshmend.errors import InputError, TopologyError
from meshmend.topology.failures import Block, Chip, Link, SlowLink, blocks_of, region
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import (
    components,
    distances_from,
    largest_part,
    stranded,
)
from meshmend.topology.mesh import Mesh
from strategies import broken_meshes, connected_meshes


def obvious_links(mesh: Mesh) -> set[Link]:
    """The live links, chip by chip and axis by axis."""
    found = set()
    for chip in itertools.product(*map(range, mesh.shape)):
        for axis, size in enumerate(mesh.shape):
            at = chip[axis] + 1
            if at == size:
                if not (mesh.wrap[axis] and size > 2):
                    continue
                at = 0
            link = Link.between(chip, (*chip[:axis], at, *chip[axis + 1 :]))
            if link not in mesh.failed_links and not {chip, link.first, link.second} & mesh.failed:
                found.add(link)
    return found


def graph_of(mesh: Mesh) -> csr_array:
    ends = mesh.links.T
    shape = (mesh.n_live, mesh.n_live)
    return coo_array((np.ones(len(mesh.links)), (ends[0], ends[1])), shape=shape).tocsr()


@given(broken_meshes())
def test_links_are_what_an_obvious_loop_finds_each_once(mesh: Mesh) -> None:
    links = [Link.between(mesh.live[one], mesh.live[other]) for one, other in mesh.links]

    assert len(links) == len(set(links))
    assert set(links) == obvious_links(mesh)
    assert np.all(mesh.links[:, 0] < mesh.links[:, 1])


@given(broken_meshes())
def test_a_port_leads_to_a_neighbour_whose_opposite_port_leads_back(mesh: Mesh) -> None:
    ports = mesh.neighbor_ranks

    assert ports.shape == (mesh.n_live, 2 * len(mesh.shape))
    for here, port in zip(*np.nonzero(ports >= 0), strict=True):
        there = ports[here, port]
        assert ports[there, port ^ 1] == here
        axis, step = port // 2, 2 * (port % 2) - 1
        moved = list(mesh.live[here])
        moved[axis] = (moved[axis] + step) % mesh.shape[axis]
        assert mesh.live[there] == tuple(moved)
        assert mesh.live[there] in mesh.neighbors(mesh.live[here])


@given(broken_meshes())
def test_ranks_number_the_live_chips_in_row_major_order(mesh: Mesh) -> None:
    alive = [c for c in itertools.product(*map(range, mesh.shape)) if c not in mesh.failed]

    assert list(mesh.live) == alive
    assert [mesh.rank_of[chip] for chip in alive] == list(range(mesh.n_live))
    assert mesh.coordinates.tolist() == [list(chip) for chip in alive]


@pytest.mark.parametrize(
    ("shape", "n_mesh", "n_torus"),
    [
        ((1,), 0, 0),
        ((2,), 1, 1),
        ((3,), 2, 3),
        ((1, 1), 0, 0),
        ((2, 2), 4, 4),
        ((1, 5), 4, 5),
        ((2, 3), 7, 9),
        ((8, 8), 112, 128),
        ((2, 2, 2), 12, 12),
        ((4, 4, 4), 144, 192),
    ],
)
def test_an_axis_of_one_or_two_chips_gains_nothing_by_wrapping(
    shape: tuple[int, ...], n_mesh: int, n_torus: int
) -> None:
    assert len(Mesh(shape).links) == n_mesh
    assert len(Mesh(shape, (True,) * len(shape)).links) == n_torus


def test_the_arrays_of_a_mesh_are_read_only() -> None:
    mesh = Mesh((3, 3)).without("1,1")

    for array in (mesh.neighbor_ranks, mesh.links, mesh.coordinates):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 7


@given(broken_meshes(), st.data())
def test_repair_takes_back_exactly_what_failed(mesh: Mesh, data: st.DataObject) -> None:
    chip = data.draw(st.sampled_from(mesh.live))
    assume(mesh.n_live > 1)

    broken = mesh.without(Block((1,) * len(chip), chip))
    assert chip not in broken.rank_of
    assert broken.n_live == mesh.n_live - 1
    assert broken.repaired(Block((1,) * len(chip), chip)) == mesh
    for link in sorted(obvious_links(mesh))[:5]:
        cut = mesh.without(link)
        assert obvious_links(cut) == obvious_links(mesh) - {link}
        assert cut.repaired(str(link)) == mesh


@given(broken_meshes())
def test_repairing_every_failure_gives_the_whole_mesh_back(mesh: Mesh) -> None:
    whole = Mesh(mesh.shape, mesh.wrap)

    assert mesh.repaired(*mesh.failures()) == whole
    assert whole.without(*mesh.failures()) == mesh
    assert hash(whole.without(*mesh.failures())) == hash(mesh)


def test_a_mesh_goes_to_other_processes_and_is_copied_after_it_was_looked_at_too() -> None:
    mesh = Mesh((4, 4), (True, False)).without("2x2@0,2", "link:0,0-0,1")
    mesh = mesh.slowed("link:1,0-1,1=0.5")
    assert mesh.rank_of[1, 0] == 2

    for copied in (pickle.loads(pickle.dumps(mesh)), copy.deepcopy(mesh), copy.copy(mesh)):
        assert copied == mesh
        assert copied.rank_of == mesh.rank_of
        assert not copied.neighbor_ranks.flags.writeable


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_blocks_cover_the_failed_chips_once(chips: set[Chip]) -> None:
    covered = [chip for block in blocks_of(chips) for chip in block.chips()]

    assert sorted(covered) == sorted(chips)


@pytest.mark.parametrize("block", [Block((1, 1), (0, 3)), Block((4, 2), (6, 8)), Block((3,), (2,))])
def test_one_failed_block_comes_back_as_itself(block: Block) -> None:
    assert blocks_of(list(block.chips())) == (block,)


def test_a_large_block_is_found_by_looking_at_each_of_its_chips_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quarter of 1024x1024 took three seconds, whenever such a mesh was written as text."""
    block, n_looks = Block((40, 40), (3, 5)), 0
    chips, all_chips = list(block.chips()), Block.chips

    def counted(block: Block) -> Iterator[Chip]:
        nonlocal n_looks
        for chip in all_chips(block):
            n_looks += 1
            yield chip

    monkeypatch.setattr(Block, "chips", counted)
    assert blocks_of(chips) == (block,)
    assert n_looks < 3 * len(chips)


@given(broken_meshes())
def test_parts_agree_with_scipy_and_come_largest_first(mesh: Mesh) -> None:
    n_parts, label = connected_components(graph_of(mesh), directed=False)
    expected = {
        frozenset(chip for chip, part in zip(mesh.live, label, strict=True) if part == number)
        for number in range(n_parts)
    }
    parts = components(mesh)

    assert {frozenset(part) for part in parts} == expected
    assert list(parts) == sorted(parts, key=lambda part: (-len(part), part[0]))
    assert sorted((*parts[0], *stranded(mesh))) == list(mesh.live)
    assert largest_part(mesh).live == parts[0]
    assert largest_part(largest_part(mesh)) == largest_part(mesh)
    assert stranded(largest_part(mesh)) == ()


@given(connected_meshes())
def test_distances_and_diameter_agree_with_scipy(mesh: Mesh) -> None:
    hops = shortest_path(graph_of(mesh), directed=False, unweighted=True)

    figures = mesh_figures(mesh)
    assert figures.is_connected
    assert figures.eccentricities.tolist() == hops.max(axis=1).tolist()
    assert (figures.radius, figures.diameter) == (hops.max(axis=1).min(), hops.max())
    assert figures.central_rank == figures.ranks_within(figures.radius)[0]
    assert figures.degrees.tolist() == (hops == 1).sum(axis=1).tolist()
    assert figures.min_degree == (hops == 1).sum(axis=1).min()
    for rank in range(mesh.n_live):
        assert distances_from(mesh, rank).tolist() == hops[rank].tolist()


def test_the_figures_of_a_large_mesh_take_few_searches() -> None:
    """A search from each chip would take a minute and a half on a line as long."""
    at = np.arange(100_000)

    eccentricities = mesh_figures(Mesh((len(at), 1))).eccentricities

    assert np.array_equal(eccentricities, np.maximum(at, at[::-1]))


def test_distance_to_a_part_that_is_cut_off_is_minus_one() -> None:
    mesh = Mesh((1, 4)).without("0,1")

    assert distances_from(mesh, 0).tolist() == [0, -1, -1]
    assert stranded(mesh) == ((0, 0),)
    assert largest_part(mesh).live == ((0, 2), (0, 3))


def test_equal_parts_are_told_apart_by_their_first_chip() -> None:
    mesh = Mesh((1, 5)).without("0,2")

    assert components(mesh) == (((0, 0), (0, 1)), ((0, 3), (0, 4)))
    assert stranded(mesh) == ((0, 3), (0, 4))


@pytest.mark.parametrize(
    ("kind", "chip", "block"),
    [
        ("board", (3, 4), Block((2, 2), (2, 4))),
        ("board", (0, 0), Block((2, 2), (0, 0))),
        ("host", (3, 5), Block((4, 2), (0, 4))),
        ("host", (7, 1), Block((4, 2), (4, 0))),
        ("board", (1, 1, 1), Block((2, 2, 1), (0, 0, 1))),
    ],
)
def test_boards_and_hosts_tile_the_mesh_from_its_first_chip(
    kind: str, chip: Chip, block: Block
) -> None:
    assert region(kind, chip) == block
    assert chip in block.chips()


MESH = Mesh((4, 4))
FIRST = Link((0, 0), (0, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh(()), r"at least one axis and positive extents, but got shape \(\)"),
        (lambda: Mesh((0, 4)), r"positive extents, but got shape \(0, 4\)"),
        (lambda: Mesh((2, -1)), r"positive extents, but got shape \(2, -1\)"),
        (lambda: Mesh((2000, 2000)), "at most 1048576 chips, but got 2000x2000"),
        (lambda: Mesh((10**30, 2)), "at most 1048576 chips"),
        (lambda: Mesh((10**400,)), "at most 1048576 chips"),
        (lambda: Mesh((4, 4), (True,)), r"one wrap flag per axis of \(4, 4\), but got \(True,\)"),
        (lambda: replace(MESH, failed=frozenset({(4, 0)})), r"inside its shape 4x4, but got \(4,"),
        (lambda: replace(MESH, failed=frozenset({(1,)})), r"inside its shape 4x4, but got \(1,\)"),
        (
            lambda: replace(MESH, failed=frozenset((9, at) for at in range(6))),
            r"\(9, 3\) and 2 more",
        ),
        (lambda: MESH.without("2x2@3,0"), r"inside the mesh 4x4, but 2x2@3,0 reaches .* \(4, 1\)"),
        (lambda: MESH.without("9,9"), r"inside the mesh 4x4, but 9,9 reaches from \(9, 9\)"),
        (lambda: MESH.without("1"), "on the mesh 4x4 needs 2 axes, but 1 has 1"),
        (lambda: MESH.repaired("9,9"), "inside the mesh 4x4, but 9,9"),
        (lambda: MESH.without("4x4@0,0"), "needs at least one live chip, but all 16 failed"),
        (lambda: MESH.without("link:0,0-0,2"), "Mesh 4x4 has no link:0,0-0,2; a link joins two"),
        (lambda: MESH.without("link:0,0-1,1"), "Mesh 4x4 has no link:0,0-1,1"),
        (lambda: MESH.without("link:0,0-0,3"), "Mesh 4x4 has no link:0,0-0,3"),
        (lambda: MESH.without("link:3,3-4,3"), "Mesh 4x4 has no link:3,3-4,3"),
        (lambda: Mesh((2,), (True,)).without("link:0-2"), "Mesh 2 has no link:0-2"),
        (lambda: MESH.slowed("link:0,0-1,1=0.5"), "Mesh 4x4 has no link:0,0-1,1; a link joins"),
        (lambda: MESH.slowed("link:3,3-4,3=1"), "Mesh 4x4 has no link:3,3-4,3"),
        (
            lambda: replace(MESH, slow=frozenset({SlowLink(FIRST, 0.5), SlowLink(FIRST, 0.25)})),
            "one speed for each slow link, but got link:0,0-0,1=0.25, link:0,0-0,1=0.5",
        ),
        (lambda: replace(MESH, slow=frozenset({SlowLink(FIRST, 1.0)})), "use Mesh.slowed"),
        (lambda: MESH.neighbors((4, 4)), r"needs a live chip of 4x4, but got \(4, 4\)"),
        (lambda: MESH.without("0,0").neighbors((0, 0)), r"needs a live chip of 4x4 less 0,0"),
        (lambda: Block((2, 2), (0,)), r"a start for each axis, but got shape \(2, 2\) at \(0,\)"),
        (lambda: Block((0,), (0,)), "positive extent"),
        (lambda: Link((1, 1), (0, 1)), "two different chips in order"),
        (lambda: Link.between((1, 1), (1, 1)), "two different chips"),
        (lambda: region("rack", (0, 0)), r"a board or host, but got 'rack'"),
        (lambda: region("board", (3,)), r"a board needs a mesh of two axes or more, but got chip"),
    ],
)
def test_impossible_meshes_and_failures_are_refused(make: object, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh(4), r"its shape as a tuple such as \(4, 4\), but got 4"),  # type: ignore[arg-type]
        (lambda: Mesh([4, 4]), r"its shape as a tuple such as \(4, 4\), but got \[4, 4\]"),  # type: ignore[arg-type]
        (lambda: Mesh("4x4"), "its shape as a tuple such as .*, but got '4x4'"),  # type: ignore[arg-type]
        (lambda: Mesh((4, "4")), "whole numbers as extents, but got '4'"),  # type: ignore[arg-type]
        (lambda: Mesh((4.0, 4)), r"whole numbers as extents, but got 4\.0"),  # type: ignore[arg-type]
        (lambda: Mesh((1,) * 33), "at most 32 axes, but got 33"),
        (lambda: Mesh((4, 4), True), "its wrap flags as a tuple .*, but got True"),  # type: ignore[arg-type]
        (lambda: replace(MESH, failed=[(0, 0)]), r"its failed chips as a frozenset, but got \["),  # type: ignore[arg-type]
        (lambda: replace(MESH, failed=frozenset({(0.5, 0)})), "failed chips inside its shape"),  # type: ignore[arg-type]
        (lambda: replace(MESH, slow=frozenset({FIRST})), "slow of SlowLinks, but got Link"),  # type: ignore[arg-type]
        (lambda: MESH.without((0, 0)), r"a Block or a Link, but got \(0, 0\)"),  # type: ignore[arg-type]
        (lambda: MESH.repaired(["0,0"]), r"a Block or a Link, but got \['0,0'\]"),  # type: ignore[arg-type]
        (lambda: MESH.slowed(FIRST), "a text such as 'link:0,0-0,1=0.25', but got Link"),  # type: ignore[arg-type]
        (lambda: MESH.tiles((2, 2)), r"a text such as '2x2', but got \(2, 2\)"),  # type: ignore[arg-type]
    ],
)
def test_values_of_another_kind_are_refused(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


def test_a_mesh_of_many_axes_has_links() -> None:
    assert Mesh((1,) * 31 + (2,)).links.tolist() == [[0, 1]]


def test_a_wrapping_axis_has_the_link_from_its_last_chip_to_its_first() -> None:
    torus = Mesh((4, 4), (False, True))

    assert len(torus.without("link:0,3-0,0").links) == len(torus.links) - 1
    assert str(torus.without("link:0,3-0,0")) == "4x4 wrap 1 less link:0,0-0,3"


def test_a_link_has_the_last_speed_it_was_given_and_1_is_that_of_all_others() -> None:
    slow = MESH.slowed("link:0,0-0,1=0.25", "link:2,1-1,1=0.5").slowed("link:0,1-0,0=0.75")

    assert str(slow) == "4x4 slow link:0,0-0,1=0.75, link:1,1-2,1=0.5"
    assert slow.slowed("link:0,0-0,1=1", "link:1,1-2,1=1.0") == MESH
    assert slow.has_slow
    assert not MESH.has_slow


def test_both_ends_of_a_slow_link_know_its_speed() -> None:
    torus = Mesh((4, 4), (True, True)).slowed("link:0,0-0,3=0.25", "link:1,2-2,2=0.5")

    speeds = {
        tuple(sorted((torus.live[rank], torus.live[torus.neighbor_ranks[rank, port]]))): speed
        for (rank, port), speed in np.ndenumerate(torus.port_speeds)
        if speed < 1
    }

    assert speeds == {((0, 0), (0, 3)): 0.25, ((1, 2), (2, 2)): 0.5}
    assert np.count_nonzero(torus.port_speeds < 1) == 4
    assert sorted(torus.link_speeds[torus.link_speeds < 1]) == [0.25, 0.5]


def test_a_slow_link_of_a_failed_chip_is_slow_again_when_the_chip_is_repaired() -> None:
    slow = MESH.slowed("link:0,0-0,1=0.25")

    assert not slow.without("0,0").has_slow
    assert not slow.without("link:0,0-0,1").has_slow
    assert slow.without("0,0").repaired("0,0") == slow
