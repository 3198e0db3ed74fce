"""The packing number: against brute force, a linear program, published values and closed forms."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import minimum_spanning_tree

from meshmend.errors import TopologyError
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.packing_number import (
    PackingNumber,
    exact_packing_number,
    packing_bracket,
    packing_number,
)
from meshmend.topology.text import parse_mesh
from strategies import with_slow_links

SMALL_SHAPES = [(7,), (2, 3), (3, 3), (2, 4), (2, 2, 2), (1, 5), (2, 5)]
MIDDLE_SHAPES = [(6, 7), (3, 9), (9, 9), (3, 4, 5), (4, 4, 4), (2, 20)]


@st.composite
def broken_meshes(draw: st.DrawFn, shapes: list[tuple[int, ...]], max_failed: int) -> Mesh:
    """A mesh or torus that lost some chips and links, its largest connected part."""
    shape = draw(st.sampled_from(shapes))
    mesh = Mesh(shape, tuple(draw(st.booleans()) for _ in shape))
    chips = draw(st.lists(st.sampled_from(mesh.live), max_size=max_failed, unique=True))
    mesh = mesh.without(*(",".join(map(str, chip)) for chip in chips[: mesh.n_live - 1]))
    for first, second in draw(_some_links(mesh)):
        ends = (",".join(map(str, mesh.live[rank])) for rank in (first, second))
        mesh = mesh.without("link:" + "-".join(ends))
    return largest_part(mesh)


def _some_links(mesh: Mesh) -> st.SearchStrategy[list[list[int]]]:
    links = mesh.links.tolist()
    return st.lists(st.sampled_from(links), max_size=3) if links else st.just([])


def all_partitions(n_ranks: int) -> Iterator[list[int]]:
    """Yield every partition as the part of each rank, parts numbered as they first appear."""

    def grow(part_of: list[int]) -> Iterator[list[int]]:
        if len(part_of) == n_ranks:
            yield part_of
            return
        for part in range(max(part_of, default=-1) + 2):
            yield from grow([*part_of, part])

    return grow([])


def packing_by_partitions(mesh: Mesh) -> Fraction:
    """The definition, word for word."""
    links = [
        (one, other, Fraction(speed).limit_denominator(1000))
        for (one, other), speed in zip(mesh.links.tolist(), mesh.link_speeds.tolist(), strict=True)
    ]
    return min(
        sum((speed for one, other, speed in links if part_of[one] != part_of[other]), Fraction(0))
        / max(part_of)
        for part_of in all_partitions(mesh.n_live)
        if max(part_of) > 0
    )


def packing_by_linear_program(mesh: Mesh) -> float:
    """The least total length of links that makes every spanning tree at least one long."""
    ends, n_live = mesh.links, mesh.n_live
    trees: list[list[float]] = []
    length = np.full(len(ends), 1e-9)
    while True:
        graph = csr_matrix((length + 1e-12, (ends[:, 0], ends[:, 1])), shape=(n_live, n_live))
        tree = minimum_spanning_tree(graph).tocoo()
        chosen = set(zip(tree.row.tolist(), tree.col.tolist(), strict=True))
        row = [float(tuple(link) in chosen) for link in ends.tolist()]
        if trees and np.dot(row, length) >= 1 - 1e-9:
            return float(length.sum())
        trees.append([-used for used in row])
        solved = linprog(np.ones(len(ends)), A_ub=trees, b_ub=-np.ones(len(trees)))
        length = solved.x


@settings(deadline=None, max_examples=60)
@given(broken_meshes(SMALL_SHAPES, 4).filter(lambda mesh: 2 <= mesh.n_live <= 8))
def test_the_packing_number_is_the_least_quotient_of_all_partitions(mesh: Mesh) -> None:
    packing = exact_packing_number(mesh)

    assert packing.exact
    assert packing.upper == float(packing_by_partitions(mesh))


@settings(deadline=None, max_examples=60)
@given(
    broken_meshes(SMALL_SHAPES, 4).filter(lambda mesh: 2 <= mesh.n_live <= 8),
    st.integers(0, 2**32 - 1),
)
def test_with_slow_links_cut_links_count_as_much_as_their_speed(mesh: Mesh, seed: int) -> None:
    slow = with_slow_links(mesh, seed, of=1 + len(mesh.links) // 2)
    packing = exact_packing_number(slow)

    assert packing.exact
    assert packing.upper == pytest.approx(float(packing_by_partitions(slow)), rel=1e-12)
    assert packing_bracket(slow).lower <= packing.upper <= packing_bracket(slow).upper
    assert packing.upper <= exact_packing_number(mesh).upper


def test_a_slow_bridge_binds_by_its_speed() -> None:
    packing = packing_number(parse_mesh("1x4", slow=["link:0,1-0,2=0.25"]))

    assert packing.upper == 0.25
    assert (
        packing.describe() == "the only link around 2 chips from (0, 2) to (0, 3), 1 of them slow"
    )


@settings(deadline=None, max_examples=60)
@given(broken_meshes(MIDDLE_SHAPES, 8), st.integers(0, 2**32 - 1))
def test_trees_lie_below_the_packing_number_and_partitions_above(mesh: Mesh, seed: int) -> None:
    exact, bracket = packing_number(mesh), packing_bracket(mesh, n_trees=64)
    random = np.random.default_rng(seed)

    assert bracket.lower <= exact.lower == exact.upper <= bracket.upper
    for _ in range(20 if mesh.n_live > 1 else 0):
        n_parts = int(random.integers(2, mesh.n_live, endpoint=True))
        part_of = np.unique(_grown_parts(mesh, n_parts, random), return_inverse=True)[1]
        n_cut = np.count_nonzero(part_of[mesh.links[:, 0]] != part_of[mesh.links[:, 1]])
        assert exact.upper <= n_cut / (n_parts - 1) + 1e-12


def _grown_parts(mesh: Mesh, n_parts: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Connected parts, joined at random until so few are left."""
    part_of = np.arange(mesh.n_live)
    while len(np.unique(part_of)) > n_parts:
        one, other = part_of[mesh.links[random.integers(len(mesh.links))]]
        part_of[part_of == other] = one
    return part_of


@pytest.mark.parametrize(
    ("shape", "wrap", "fail"),
    [
        ("4x4", "none", ["2x2@1,1"]),
        ("5x4", "none", ["0,2", "3,1"]),
        ("5x5", "0", ["2,2"]),
        ("3x3x3", "none", ["0,0,1", "link:1,1,1-1,1,2"]),
        ("6x6", "none", ["2x2@1,1"]),
    ],
)
def test_a_linear_program_over_spanning_trees_agrees(
    shape: str, wrap: str, fail: list[str]
) -> None:
    mesh = parse_mesh(shape, wrap=wrap, fail=fail)

    assert packing_number(mesh).upper == pytest.approx(packing_by_linear_program(mesh), abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "fail", "value"),
    [
        ("4x4", [], Fraction(8, 5)),
        ("4x4", ["2x2@1,1"], Fraction(12, 11)),
        ("8x8", [], Fraction(16, 9)),
        ("8x8", ["2x2@2,2"], Fraction(5, 3)),
        ("8x8", ["4x2@2,2"], Fraction(19, 12)),
        ("8x8", ["2x2@0,2"], Fraction(3, 2)),
        ("8x8", ["2x2@0,0"], Fraction(104, 59)),
    ],
)
def test_values_known_exactly(shape: str, fail: list[str], value: Fraction) -> None:
    packing = packing_number(parse_mesh(shape, fail=fail))

    assert packing.lower == packing.upper == float(value)


@pytest.mark.parametrize(
    ("shape", "fail", "low", "high"),
    [
        ("16x16", [], 1.876, 1.882),
        ("16x16", ["4x2@6,6"], 1.850, 1.854),
        ("16x32", [], 1.899, 1.910),
        ("16x32", ["4x2@6,14"], 1.883, 1.897),
        ("32x32", [], 1.914, 1.939),
        ("32x32", ["4x2@14,14"], 1.916, 1.933),
        ("32x32", ["4x2@14,14", "4x2@6,20"], 1.899, 1.927),
    ],
)
def test_values_known_as_brackets(shape: str, fail: list[str], low: float, high: float) -> None:
    """The brackets are rounded to three decimals; trees and cuts found them, no flow."""
    packing = packing_number(parse_mesh(shape, fail=fail))

    assert packing.exact
    assert low - 5e-4 <= packing.upper <= high + 5e-4


@given(n_rows=st.integers(2, 12), n_cols=st.integers(2, 12))
@settings(deadline=None, max_examples=30)
def test_a_full_mesh_is_bound_by_all_its_links(n_rows: int, n_cols: int) -> None:
    """Singletons bind a full mesh or torus: (links) / (chips - 1)."""
    for wrap in ((False, False), (True, True)):
        mesh = Mesh((n_rows, n_cols), wrap)
        assert packing_number(mesh).upper == len(mesh.links) / (mesh.n_live - 1)


@pytest.mark.parametrize("shape", ["2", "9", "1x6", "1x1x4"])
def test_a_tree_packs_one_tree(shape: str) -> None:
    packing = packing_number(parse_mesh(shape))

    assert packing.lower == packing.upper == 1
    assert packing.exact


def test_one_chip_packs_any_number_of_trees() -> None:
    packing = packing_number(parse_mesh("1x1"))

    assert packing.lower == packing.upper == float("inf")
    assert packing.exact
    assert len(packing.cut_links) == 0


def test_more_trees_close_the_bracket() -> None:
    mesh = parse_mesh("32x32", fail=["4x2@14,14"])
    brackets = [packing_bracket(mesh, n_trees=n_trees) for n_trees in (16, 64, 256)]

    for coarse, fine in pairwise(brackets):
        assert fine.upper - fine.lower < coarse.upper - coarse.lower
    assert not brackets[-1].exact
    assert brackets[-1].lower > 1.87


@pytest.mark.parametrize(
    ("shape", "wrap", "fail", "words"),
    [
        ("4x4", "none", [], "all 24 links over 16 chips"),
        ("1x1", "none", [], "no link: there is one chip"),
        ("1x2", "none", [], "the only link"),
        ("8x8", "none", ["0,1"], "the only link of corner (0, 0)"),
        ("8x8", "none", ["0,2", "1,1", "1,3"], "the only link of chip (0, 1)"),
        ("4x4x4", "none", ["link:0,0,0-0,0,1"], "the 2 links of corner (0, 0, 0)"),
        (
            "4x4x4",
            "all",
            ["link:0,0,0-0,0,1", "link:0,0,0-0,0,3", "link:0,0,0-0,1,0", "link:0,0,0-0,3,0"],
            "the 2 links of chip (0, 0, 0)",
        ),
        (
            "8x8",
            "none",
            ["2x2@2,2"],
            "the 20 links that touch 12 chips from (0, 0) to (3, 3)",
        ),
        ("4x8", "none", ["3x1@0,3"], "2 links that have no way around, between 3 parts"),
    ],
)
def test_the_links_that_bind_are_named(shape: str, wrap: str, fail: list[str], words: str) -> None:
    mesh = parse_mesh(shape, wrap=wrap, fail=fail)

    assert packing_number(mesh).describe() == words


def test_any_partition_can_be_put_in_words() -> None:
    mesh = parse_mesh("4x4")
    halves = PackingNumber(mesh, 1.0, (np.arange(16) < 8).astype(np.int32))
    thirds = PackingNumber(mesh, 1.0, np.array([0] * 4 + [1] * 4 + [2] * 8, dtype=np.int32))

    assert halves.describe() == "the 4 links around 8 chips from (0, 0) to (1, 3)"
    assert thirds.describe() == "the 8 links between 3 parts, the largest of 8 chips"
    assert len(thirds.cut_links) == 8


@pytest.mark.parametrize("solve", [packing_number, exact_packing_number, packing_bracket])
def test_a_mesh_in_pieces_is_refused(solve: object) -> None:
    mesh = parse_mesh("3x1", fail=["1,0"])

    with pytest.raises(TopologyError, match=r"needs connected chips.*take largest_part"):
        solve(mesh)  # type: ignore[operator]


def test_a_bracket_without_trees_and_a_partition_of_other_chips_are_refused() -> None:
    mesh = parse_mesh("2x2")

    with pytest.raises(TopologyError, match="needs at least one tree, but got 0"):
        packing_bracket(mesh, n_trees=0)
    with pytest.raises(TopologyError, match="needs a part for each of 4 live chips, but got 3"):
        PackingNumber(mesh, 1.0, np.zeros(3, dtype=np.int32))


@pytest.mark.slow
def test_a_huge_mesh_gets_a_bracket_and_a_large_one_is_exact() -> None:
    large, huge = parse_mesh("64x64", fail=["4x2@20,20"]), parse_mesh("160x160")

    assert packing_number(large).upper == 8042 / 4087
    assert packing_number(large).exact
    assert not packing_number(huge).exact
    assert packing_number(huge).upper == len(huge.links) / (huge.n_live - 1)
