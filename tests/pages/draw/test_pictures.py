"""Every picture parses, holds what it claims to hold, and stays inside its frame."""

import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import meshmend
from meshmend.errors import InputError
from meshmend.lab.paper.paper_figures import paper_figures
from meshmend.pages.draw.algorithm_picture import trees_svg, two_roots_svg
from meshmend.pages.draw.grid import fitting_grid
from meshmend.pages.draw.load_picture import link_load_svg
from meshmend.pages.draw.mesh_picture import MAX_DRAWN_CHIPS, mesh_svg
from meshmend.pages.draw.overlays import layout_svg, rings_svg, routes_svg
from meshmend.pages.draw.svg import Point, text_width
from meshmend.topology.failures import Chip, Link
from meshmend.topology.graph import distances_from, largest_part, stranded
from meshmend.topology.mesh import Mesh
from meshmend.trees.rings import (
    fault_tolerant_layout,
    hamiltonian_ring,
    line_rings,
    row_pair_layout,
)

SVG = "{http://www.w3.org/2000/svg}"
FULL = Mesh((8, 8))
HOLED = FULL.without("2x2@2,4")
TORUS = Mesh((4, 6), (True, True))


def elements(svg: str, name: str) -> list[ET.Element]:
    return [part for part in ET.fromstring(svg).iter() if part.get("class") == name]


def drawn(part: ET.Element, left: float = 0, top: float = 0) -> Iterator[Point]:
    """Yield every point that an element and its children draw at, text ends included."""
    if moved := re.fullmatch(r"translate\((\S+) (\S+)\)", part.get("transform", "")):
        left, top = left + float(moved[1]), top + float(moved[2])
    for x, y in _own_points(part):
        yield left + x, top + y
    for child in part:
        yield from drawn(child, left, top)


def _own_points(part: ET.Element) -> Iterator[Point]:
    at = {name: float(part.get(name, 0)) for name in ("x", "y", "cx", "cy", "r", "width", "height")}
    if part.tag == f"{SVG}rect":
        yield at["x"], at["y"]
        yield at["x"] + at["width"], at["y"] + at["height"]
    elif part.tag == f"{SVG}circle":
        yield at["cx"] - at["r"], at["cy"] - at["r"]
        yield at["cx"] + at["r"], at["cy"] + at["r"]
    elif part.tag == f"{SVG}text":
        # The estimate is generous: nine tenths of it still exceed what viewers draw.
        width = 0.9 * text_width(part.text or "", float(part.get("font-size", 0)))
        before = {"start": 0.0, "middle": 0.5, "end": 1.0}[part.get("text-anchor", "start")]
        yield at["x"] - before * width, at["y"]
        yield at["x"] + (1 - before) * width, at["y"]
    elif part.tag == f"{SVG}path":
        yield from _path_points(part.get("d", ""))


def _path_points(data: str) -> Iterator[Point]:
    x = y = 0.0
    for letter, rest in re.findall(r"([a-zA-Z])([^a-zA-Z]*)", data):
        numbers = [float(word) for word in rest.split()]
        if letter in "hv":
            x, y = (x + numbers[0], y) if letter == "h" else (x, y + numbers[0])
            yield x, y
        for dx, dy in zip(numbers[::2], numbers[1::2], strict=True) if letter in "MLQl" else ():
            x, y = (x + dx, y + dy) if letter == "l" else (dx, dy)
            yield x, y


def check_picture(svg: str) -> None:
    """Fail unless the text is an SVG document that draws inside its own frame only."""
    root = ET.fromstring(svg)
    _, _, width, height = map(float, root.get("viewBox", "").split())
    points = list(drawn(root))

    assert points
    assert all(math.isfinite(x) and math.isfinite(y) for x, y in points)
    assert min(x for x, _ in points) >= -0.01
    assert min(y for _, y in points) >= -0.01
    assert max(x for x, _ in points) <= width + 0.01
    assert max(y for _, y in points) <= height + 0.01
    assert root.find(f"{SVG}title") is not None
    assert root.find(f"{SVG}desc") is not None
    assert " id=" not in svg


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    wrap = tuple(draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape))))
    mesh = Mesh(shape, wrap)
    chips = list(itertools.product(*map(range, shape)))
    failed = draw(st.sets(st.sampled_from(chips), max_size=len(chips) - 1))
    joined = [Link.between(mesh.live[a], mesh.live[b]) for a, b in mesh.links.tolist()]
    links = draw(st.sets(st.sampled_from(joined), max_size=4)) if joined else set()
    return Mesh(shape, wrap, frozenset(failed), frozenset(links))


def tree_towards(mesh: Mesh, root: int) -> NDArray[np.int32]:
    """Return the parents of a shortest-path tree; `mesh` must be connected."""
    hops = distances_from(mesh, root)
    parents = np.full(mesh.n_live, -1, dtype=np.int32)
    for rank, ports in enumerate(mesh.neighbor_ranks):
        nearer = [p for p in ports if p >= 0 and hops[p] == hops[rank] - 1]
        parents[rank] = nearer[0] if nearer else -1
    return parents


@given(meshes())
@settings(deadline=None, max_examples=50)
def test_a_mesh_of_any_kind_shows_every_chip_and_failed_link_once(mesh: Mesh) -> None:
    svg = mesh_svg(mesh)

    check_picture(svg)
    assert len(elements(svg, "chip live")) == mesh.n_live
    assert len(elements(svg, "chip failed")) == len(mesh.failed)
    assert len(elements(svg, "link failed")) == len(mesh.failed_links)
    assert len(elements(svg, "hatch")) == bool(stranded(mesh))


@given(meshes(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_a_ring_over_any_chips_has_one_arrow_for_every_hop(mesh: Mesh, random: Random) -> None:
    chips = list(mesh.live)
    random.shuffle(chips)
    rings = [tuple(chips[::2]), tuple(chips[1::2])]
    rings = [ring for ring in rings if ring]

    svg = rings_svg(mesh, rings, names=[f"ring {i}" for i in range(len(rings))])

    check_picture(svg)
    assert len(elements(svg, "hop")) == sum(len(ring) for ring in rings if len(ring) > 1)


@given(meshes(), st.integers(0, 1 << 30))
@settings(deadline=None, max_examples=30)
def test_trees_and_loads_are_drawn_on_any_connected_mesh(mesh: Mesh, seed: int) -> None:
    part = largest_part(mesh)
    random = np.random.default_rng(seed)
    trees = np.stack([tree_towards(part, int(r)) for r in random.integers(part.n_live, size=3)])
    load = np.where(part.neighbor_ranks >= 0, random.random(part.neighbor_ranks.shape), 0.0)

    svg = trees_svg(part, trees)

    check_picture(svg)
    assert len(elements(svg, "root")) == 3
    check_picture(link_load_svg(part, load.reshape(-1)))


def test_trees_with_two_roots_are_drawn_up_across_and_down() -> None:
    """For each of two chunks: two roots and two gates, and a way from each root to each gate."""
    mesh = Mesh((8, 8)).without("1x6@3,1")
    svg = two_roots_svg(mesh)

    check_picture(svg)
    assert len(elements(svg, "chip live")) == 2 * 3 * mesh.n_live
    assert len(elements(svg, "root")) == 2 * (2 + 2)
    assert len(elements(svg, "route")) == 2 * 2 * 2


@pytest.mark.parametrize("mesh", [FULL, HOLED, FULL.without("4x2@2,4"), Mesh((2, 2))], ids=str)
def test_a_hamiltonian_ring_is_one_line_with_as_many_hops_as_chips(mesh: Mesh) -> None:
    svg = rings_svg(mesh, [hamiltonian_ring(mesh)])

    check_picture(svg)
    assert len(elements(svg, "ring")) == 1
    assert len(elements(svg, "hop")) == mesh.n_live


@pytest.mark.parametrize("mesh", [FULL, TORUS], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_line_rings_are_drawn_whether_they_fold_or_wrap(mesh: Mesh, axis: int) -> None:
    svg = rings_svg(mesh, line_rings(mesh, axis))

    check_picture(svg)
    assert len(elements(svg, "hop")) == mesh.n_live


def test_second_phase_rings_skip_rows_in_lanes_that_differ() -> None:
    svg = rings_svg(FULL, row_pair_layout(FULL).across)

    check_picture(svg)
    lines = [line.get("d", "") for line in elements(svg, "ring")]
    starts = [start for line in lines for start in re.findall(r"M[^A-Za-z]*L[^A-Za-z]*", line)]
    assert len(starts) == FULL.n_live
    assert len(set(starts)) == len(starts)


def test_two_routes_on_one_link_take_two_lanes() -> None:
    there: list[Chip] = [(0, 0), (0, 1), (0, 2)]

    svg = routes_svg(FULL, [there, there[::-1]])

    check_picture(svg)
    heights = {y for route in elements(svg, "route") for _, y in drawn(route)}
    assert len(heights) == 2
    assert len(elements(svg, "start")) == len(elements(svg, "end")) == 2


@pytest.mark.parametrize(
    "mesh",
    [FULL, HOLED, FULL.without("4x2@2,4"), FULL.without("4x2@0,0", "2x2@4,6"), TORUS],
    ids=str,
)
def test_a_layout_shows_an_arrow_from_every_yellow_chip(mesh: Mesh) -> None:
    layout = fault_tolerant_layout(mesh)

    svg = layout_svg(mesh, layout)

    check_picture(svg)
    assert len(elements(svg, "forward-head")) == len(layout.partner)
    assert len(elements(svg, "hop")) == mesh.n_live
    assert len(elements(svg, "chip failed")) == len(mesh.failed)


def test_a_channel_is_coloured_by_its_load_to_the_right_of_its_way() -> None:
    mesh = Mesh((1, 2))
    load = np.zeros(mesh.neighbor_ranks.size)
    load[3] = 1.5  # rank 0, port 3: up the columns

    svg = link_load_svg(mesh, load)

    idle, busy = elements(svg, "load")
    assert min(y for _, y in drawn(busy)) > max(y for _, y in drawn(idle))
    assert "Busiest: (0, 0) to (0, 1) with 1.5 × the payload" in svg


def test_equally_busy_links_are_counted() -> None:
    mesh = Mesh((1, 2))

    svg = link_load_svg(mesh, np.where(mesh.neighbor_ranks.reshape(-1) >= 0, 0.5, 0.0))

    assert "Busiest: 2 of 2 directed links with 0.5 × the payload" in svg


def test_a_load_that_is_no_share_of_the_payload_names_its_unit() -> None:
    mesh = Mesh((1, 2))

    svg = link_load_svg(mesh, np.full(mesh.neighbor_ranks.size, 0.0), unit="of the time")

    assert "of the time, per directed link" in svg
    assert "payload" not in svg


def test_four_layers_stand_two_by_two() -> None:
    assert fitting_grid(Mesh((4, 4, 4), wrap=(True,) * 3)).layers_per_row == 2


@pytest.mark.parametrize(
    ("picture", "limit_kb"),
    [
        (lambda: mesh_svg(Mesh((2, 2))), 3),
        (lambda: mesh_svg(HOLED), 20),
        (lambda: mesh_svg(Mesh((16, 32))), 60),
        (lambda: mesh_svg(Mesh((64, 64))), 280),
        (lambda: rings_svg(Mesh((32, 32)), [hamiltonian_ring(Mesh((32, 32)))]), 200),
        (lambda: mesh_svg(Mesh((1024, 512))), 2),
    ],
    ids=["2x2", "8x8", "16x32", "64x64", "ring on 32x32", "1024x512"],
)
def test_pictures_stay_small(picture: Callable[[], str], limit_kb: int) -> None:
    assert len(picture().encode()) <= limit_kb * 1024


def test_a_mesh_beyond_the_limit_is_described_in_words() -> None:
    mesh = Mesh((MAX_DRAWN_CHIPS + 1,))

    svg = mesh_svg(mesh)

    check_picture(svg)
    assert "too many to draw" in svg
    assert not elements(svg, "chip live")


def test_a_notebook_shows_the_picture_of_a_mesh() -> None:
    assert vars(meshmend.Mesh)["_repr_svg_"](HOLED) == mesh_svg(HOLED)


@pytest.mark.parametrize("mesh", [HOLED, Mesh((2, 3, 2)), Mesh((4, 4)).without("0,1", "1,0")])
def test_a_notebook_shows_what_a_plan_puts_on_each_link(mesh: Mesh) -> None:
    planned = meshmend.plan(mesh, "rank-ring")

    svg = vars(meshmend.Plan)["_repr_svg_"](planned)

    check_picture(svg)
    assert f"rank-ring allreduce on {mesh}: load of each link" in svg
    assert elements(svg, "load")


def test_words_that_mean_something_in_xml_are_escaped() -> None:
    svg = rings_svg(FULL, [], title='a < b & "c"', caption="<d>")

    check_picture(svg)
    assert "<d>" not in svg


@pytest.mark.parametrize(
    ("parents", "match"),
    [
        (
            np.zeros(4, dtype=np.int32),
            r"needs an array \(trees, 4 ranks\) of parents, but got .*4,",
        ),
        (np.array([[-1, 0, 0, 4]], dtype=np.int32), "needs parents from -1 to 3, but got -1 to 4"),
        (np.array([[-1, 2, 1, 0]], dtype=np.int32), "in tree 0 rank 1 is its own ancestor"),
    ],
)
def test_arrays_that_are_no_trees_are_refused(parents: NDArray[np.int32], match: str) -> None:
    with pytest.raises(InputError, match=match):
        trees_svg(Mesh((2, 2)), parents)


@pytest.mark.parametrize(
    ("load", "match"),
    [
        (np.zeros(3), "one load for each of 16 channels of 2x2, but got .*3,"),
        (np.full(16, np.nan), "needs finite loads of at least 0"),
        (np.ones(16), r"port 0 of chip \(0, 0\) leads nowhere and carries 1"),
    ],
)
def test_loads_that_fit_no_channel_are_refused(load: NDArray[np.float64], match: str) -> None:
    with pytest.raises(InputError, match=match):
        link_load_svg(Mesh((2, 2)), load)


def test_the_paper_has_ten_figures_each_inside_its_frame_and_with_a_caption() -> None:
    figures = paper_figures()

    assert [int(name.split("-")[1]) for name in figures] == list(range(1, 11))
    for number, svg in enumerate(figures.values(), start=1):
        check_picture(svg)
        root = ET.fromstring(svg)
        assert root.findtext(f"{SVG}title", "").startswith(f"Figure {number}: ")
        assert len(root.findtext(f"{SVG}desc", "")) > 60
        assert len(svg) < 120_000


def test_the_figures_show_the_shapes_of_the_paper() -> None:
    figures = {int(name.split("-")[1]): svg for name, svg in paper_figures().items()}

    hops = {number: len(elements(svg, "hop")) for number, svg in figures.items()}
    assert [hops[number] for number in (3, 4, 6, 7, 8, 9)] == [64, 128, 64, 64, 60, 60 + 56]
    assert hops[5] == 8 * 16
    assert len(elements(figures[2], "chip failed")) == 4
    assert len(elements(figures[9], "forward-head")) == 12 + 8
    assert len(elements(figures[10], "chip failed")) == 8 * 4


def test_pictures_are_the_same_each_time() -> None:
    assert paper_figures() == paper_figures()
