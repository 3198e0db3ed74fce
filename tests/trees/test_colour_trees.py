"""Trees of colours: what each claims, and how evenly they load the links."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import TopologyError
from meshmend.topology.mesh import Mesh
from meshmend.trees.colour_trees import OUTSIDE, ROOT, ColourTrees, colour_trees
from strategies import connected_meshes


@settings(max_examples=60)
@given(connected_meshes(), st.integers(1, 4), st.integers(1, 3), st.floats(0, 2), st.data())
def test_each_tree_joins_its_colour_over_links_and_ends_at_chips_of_it(
    mesh: Mesh, n_colours: int, trees_each: int, depth_price: float, data: st.DataObject
) -> None:
    n_colours = min(n_colours, mesh.n_live)
    drawn = data.draw(
        st.lists(st.integers(-1, n_colours - 1), min_size=mesh.n_live, max_size=mesh.n_live)
    )
    colour_of = np.array([*range(n_colours), *drawn][: mesh.n_live], dtype=np.int32)

    trees = colour_trees(mesh, colour_of, trees_each=trees_each, goal=2, depth_price=depth_price)

    assert trees.n_trees == n_colours * trees_each
    load = np.zeros((mesh.n_live, mesh.n_live), dtype=int)
    for colour, parents in zip(trees.colour_of_tree, trees.parents, strict=True):
        assert np.all(parents[colour_of == colour] != OUTSIDE)
        children = np.flatnonzero(parents >= 0)
        for child in children:
            assert parents[child] in mesh.neighbor_ranks[child]
            load[min(child, parents[child]), max(child, parents[child])] += 1
        touched = np.flatnonzero(parents != OUTSIDE)
        leaves = set(touched) - set(parents[children])
        assert all(colour_of[leaf] == colour for leaf in leaves)
    assert trees.max_trees == load.max()


def test_the_smallest_trees_by_hand() -> None:
    """Two colours in turn on a line of four: each tree passes the chip between its two."""
    colours = np.array([0, 1, 0, 1], dtype=np.int32)

    trees = colour_trees(Mesh((1, 4)), colours, trees_each=1, goal=2)

    assert (trees.parents[0] != OUTSIDE).tolist() == [True, True, True, False]
    assert (trees.parents[1] != OUTSIDE).tolist() == [False, True, True, True]
    assert (trees.max_trees, trees.n_trees) == (2, 2)


def test_a_root_that_is_not_needed_is_cut_off() -> None:
    """The middle of the line is in no way to the only two chips of the colour."""
    colours = np.array([0, 0, -1, -1, -1], dtype=np.int32)

    trees = colour_trees(Mesh((1, 5)), colours, trees_each=1, goal=1)

    assert sorted(trees.parents[0].tolist()) == [OUTSIDE, OUTSIDE, OUTSIDE, ROOT, 0] or sorted(
        trees.parents[0].tolist()
    ) == [OUTSIDE, OUTSIDE, OUTSIDE, ROOT, 1]


@pytest.mark.parametrize(("shape", "fail"), [((8, 8), "2x2@2,2"), ((16, 16), "4x2@6,6")])
def test_loads_are_within_a_tenth_of_the_least(shape: tuple[int, int], fail: str) -> None:
    """On tiles of 2x2 two parallel links join neighbours: 4 K (tiles - 1) / links between tiles."""
    mesh = Mesh(shape).without(fail)
    tiling = mesh.tiles("2x2")
    n_between = np.count_nonzero(np.diff(tiling.tile_of[mesh.links], axis=1))
    least = 40 * (tiling.n_tiles - 1) / n_between

    trees = colour_trees(mesh, tiling.colour_of, trees_each=10, goal=int(np.ceil(least)))

    assert trees.max_trees <= 1.1 * least + 1


def test_the_same_seed_gives_the_same_trees() -> None:
    mesh = Mesh((4, 6)).without("1,1")
    colours = mesh.tiles("2x2").colour_of

    one, same, other = (
        colour_trees(mesh, colours, trees_each=3, goal=2, seed=seed).parents for seed in (1, 1, 2)
    )

    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[ROOT, 0, OUTSIDE], [1, ROOT, OUTSIDE]], "misses 2"),
        ([[ROOT, 0, 1], [ROOT, ROOT, 1]], "one root each"),
        ([[ROOT, 2, 1], [1, ROOT, 1]], "a way to it from every rank"),
        ([[ROOT, 0, 1]], "equally many trees of each colour"),
    ],
)
def test_what_is_no_trees_of_colours_is_refused(parents: list[list[int]], message: str) -> None:
    colours = np.array([0, 1, 0], dtype=np.int32)
    with pytest.raises(TopologyError, match=message):
        ColourTrees(
            colours,
            np.arange(len(parents), dtype=np.int32),
            np.array(parents, dtype=np.int32),
        )


def test_figures_out_of_range_are_refused() -> None:
    colours = np.zeros(4, dtype=np.int32)
    with pytest.raises(TopologyError, match="but got 1 colours, 0 trees"):
        colour_trees(Mesh((2, 2)), colours, trees_each=0, goal=1)
    with pytest.raises(TopologyError, match="falls into parts"):
        colour_trees(Mesh((1, 3)).without("0,1"), np.zeros(2, np.int32), trees_each=1, goal=1)
