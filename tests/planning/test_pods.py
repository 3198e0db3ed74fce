"""Tori and slits: `auto` takes rings on full tori, where a hole makes long payloads no faster."""

import pytest

from meshmend.planning.comparison import compared
from meshmend.planning.pricing import names_to_try
from meshmend.planning.tree_search import best_trees
from meshmend.topology.fabric import fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh

V4 = fabric("tpu-v4")


def auto_s(mesh: Mesh, payload_bytes: float) -> float:
    return compared(mesh, V4, payload_bytes, ["auto"]).prices[0].time_s


def test_rings_are_asked_first_on_full_tori_and_not_at_all_on_large_broken_ones() -> None:
    torus = Mesh((8, 8), (True, True))

    assert next(names_to_try(torus)) == "rings-nd"
    assert "rings-nd" not in set(names_to_try(torus.without("1,1")))
    assert "rings-nd" not in set(names_to_try(Mesh((8, 8))))
    assert "rings-nd" in set(names_to_try(Mesh((2, 3))))


@pytest.mark.parametrize("payload_bytes", [1e7, 1e8])
@pytest.mark.parametrize("hole", ["0,0,0", "2x2x1@0,0,0"])
def test_a_hole_makes_no_long_payload_faster(hole: str, payload_bytes: float) -> None:
    """Short ones may be faster: without one chip, the chip opposite to it has a hop less to go."""
    torus = parse_mesh("4x4x4", wrap="all")

    assert auto_s(torus, payload_bytes) <= auto_s(torus.without(hole), payload_bytes)


@pytest.mark.parametrize(("payload_bytes", "most"), [(1e7, 1.4), (1e8, 1.05)])
def test_a_full_torus_comes_near_the_limit(payload_bytes: float, most: float) -> None:
    result = compared(parse_mesh("4x4x4", wrap="all"), V4, payload_bytes, ["auto"])

    assert result.ratio(result.prices[0]) <= most


@pytest.mark.slow
def test_trees_around_a_slit_are_as_deep_as_even_loads_need() -> None:
    mesh = parse_mesh("32x32", fail=["1x24@15,2"])
    found = best_trees(mesh, fabric("reference"), 1e8)

    assert found.trees.packing.max_load < 0.55
