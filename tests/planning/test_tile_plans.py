"""Plans for tiles: they sum each colour, keep within the goals, and every one of them is proved."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from meshmend.errors import InputError, MeshmendError, PlanFileError, TopologyError
from meshmend.planning.colour_comparison import compared_colours
from meshmend.planning.colour_search import fastest_colours, independent_colours
from meshmend.planning.plan import Plan, load_plan, plan
from meshmend.simulator.colour_limit import colour_limit
from meshmend.topology.fabric import fabric
from meshmend.topology.failures import Block
from meshmend.topology.mesh import Mesh

HOLE = Mesh((4, 6)).without("2x2@0,2")
REFERENCE = fabric("reference")


def check_sums(made: Plan) -> None:
    """Check that every chip ends with the sum of its colour, and spares with what they had."""
    assert made.tiling is not None
    colours = made.tiling.colour_of
    random = np.random.default_rng(5)
    parts = [random.integers(1 << 30, size=13) for _ in colours]

    results = made.run(parts)

    for rank, colour in enumerate(colours):
        twins = np.flatnonzero(colours == colour) if colour >= 0 else [rank]
        assert np.array_equal(results[rank], sum(parts[twin] for twin in twins))


@pytest.mark.parametrize(
    ("mesh", "tile"),
    [
        (Mesh((2, 4)), "2x2"),
        (HOLE, "2x2"),
        (Mesh((4, 4)).without("0,0", "3,3"), "2x2"),
        (Mesh((4, 8)), "1x4"),
        (Mesh((4, 4), (True, True)).without("1,1"), "2x2"),
        (Mesh((2, 2, 4)), "2x2"),
        (Mesh((1, 7)), "3"),
        (Mesh((2, 2)), "2x2"),
    ],
    ids=str,
)
def test_every_chip_ends_with_the_sum_of_its_colour(mesh: Mesh, tile: str) -> None:
    check_sums(plan(mesh, tile=tile, payload="1MB"))


@pytest.mark.parametrize(
    ("mesh", "hole"), [((8, 8), "2x2@2,2"), ((16, 16), "4x2@6,6")], ids=["8x8", "16x16"]
)
def test_the_goals_at_100_mb(mesh: tuple[int, int], hole: str) -> None:
    """At most 1.25 of the limit, and plans that know nothing of each other 1.3 times as slow."""
    question = Mesh(mesh).without(hole).tiles("2x2"), REFERENCE, 100e6

    together_s, apart_s = (
        packed.simulated(REFERENCE, 100e6, pipeline).time_s
        for packed, pipeline in (fastest_colours(*question), independent_colours(*question))
    )

    assert together_s <= 1.25 * colour_limit(*question).time_s
    assert apart_s >= 1.3 * together_s


def test_a_comparison_lists_the_ways_to_sum_fastest_first() -> None:
    found = compared_colours(HOLE, "2x2", REFERENCE, 1e6)

    assert sorted(price.name for price in found.prices) == ["all-chips", "colours", "independent"]
    assert [price.time_s for price in found.prices] == sorted(p.time_s for p in found.prices)
    assert all(found.ratio(price) >= 1 for price in found.prices)


def test_the_best_way_to_sum_is_the_fastest_though_a_spare_is_left_out() -> None:
    found = compared_colours(Mesh((4, 4)).without("0,0"), "2x2", REFERENCE, 10e6)

    assert {price.n_chips for price in found.prices} == {12, 15}
    assert found.winner is found.prices[0]


def random_case(random: Random) -> tuple[Mesh, str]:
    """Return a mesh with holes and a tile for it, at random."""
    shape = random.choice([(4, 4), (6, 6), (5, 7), (8, 8), (3, 9), (2, 12), (4, 4, 2), (12,)])
    mesh = Mesh(shape, tuple(random.random() < 0.2 for _ in shape))
    for _ in range(random.randrange(4)):
        size = tuple(random.randint(1, min(2, extent)) for extent in shape)
        origin = tuple(random.randint(0, n - k) for n, k in zip(shape, size, strict=True))
        lost = set(Block(size, origin).chips()) | mesh.failed
        if len(lost) < mesh.n_chips:
            mesh = replace(mesh, failed=frozenset(lost))
    return mesh, random.choice(["2x2", "1x2", "1x4", "2x3", "4x2", "3x3", "1x5", "2x2x2"])


def planned_or_refused(mesh: Mesh, tile: str) -> tuple[Plan | None, str]:
    try:
        return plan(mesh, tile=tile, payload="100KB"), ""
    except TopologyError as error:
        return None, str(error)


@pytest.mark.parametrize("n_meshes", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_meshes_with_holes_are_planned_and_proved_or_refused_in_one_line(n_meshes: int) -> None:
    random = Random(31)
    n_planned = 0
    for _ in range(n_meshes):
        mesh, tile = random_case(random)
        made, refusal = planned_or_refused(mesh, tile)
        if made is None:
            assert "\n" not in refusal
            continue
        n_planned += 1
        assert made.proof.method in {"exact", "fingerprint"}
        if n_planned % 5 == 0:
            check_sums(made)
    assert n_planned > 0.7 * n_meshes


def test_a_tile_of_one_chip_changes_nothing() -> None:
    with_tile, without = plan(HOLE, tile="1x1"), plan(HOLE)

    assert with_tile.schedule.digest == without.schedule.digest
    assert with_tile.pipeline == without.pipeline
    assert with_tile.predicted().time_s == without.predicted().time_s
    assert with_tile.limit().time_s == without.limit().time_s


def test_no_plan_is_faster_than_the_limit() -> None:
    for payload in ("1KB", "100KB", "10MB"):
        made = plan(HOLE, tile="2x2", payload=payload)

        assert made.predicted().time_s >= made.limit().time_s


def test_a_plan_follows_a_new_tiling() -> None:
    before = Mesh((4, 4)).tiles("2x2")
    broken = Mesh((4, 4)).without("0,0", "0,3")

    made = plan(broken, tile=before.after(broken), payload="1MB")

    assert made.tiling is not None
    assert made.tiling.n_tiles == 3
    check_sums(made)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tile": "2by2"}, TopologyError, "--tile needs positive extents"),
        ({"tile": "9x9"}, TopologyError, "needs 81 connected live chips, but 4x6 less"),
        ({"tile": "2x2", "collective": "all-gather"}, InputError, "is an allreduce by 'auto'"),
        ({"tile": "2x2", "algorithm": "trees"}, InputError, "but got allreduce by 'trees'"),
        ({"tile": Mesh((4, 4)).tiles("2x2")}, InputError, "needs a tiling of it, but got one of"),
    ],
)
def test_what_tiles_do_not_support_is_refused_in_one_line(
    options: dict[str, object], error: type[MeshmendError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        plan(HOLE, **options)  # type: ignore[arg-type]  # as a user would call it
    assert "\n" not in str(caught.value)


def test_a_plan_file_keeps_the_tiling(tmp_path: Path) -> None:
    made = plan(HOLE.without("3,5"), tile="2x2", payload="1MB")
    made.save(tmp_path / "plan.json")

    read = load_plan(tmp_path / "plan.json")

    assert read.tiling == made.tiling
    assert read.schedule.digest == made.schedule.digest
    assert read.pipeline == made.pipeline
    assert read.predicted().time_s == made.predicted().time_s
    assert read.limit().time_s == made.limit().time_s
    assert read.summary()["tiling"] == made.summary()["tiling"] | {"most": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiles": [[0, 1, 2, 3]]}, "damaged: Tiling needs connected tiles"),
        ({"tiles": 7}, "damaged: tiles need to be a list"),
        ({"tiles": [[0, 1, 6, 99]]}, "damaged: tiles need ranks below 20"),
        ({"colours": [0]}, "damaged: .*"),
        ({"version": 4}, "has plan version 4, but this meshmend reads 1 to 3"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "plan.json"
    plan(HOLE, tile="2x2", payload="1MB").save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(PlanFileError, match=message) as caught:
        load_plan(path)
    assert "\n" not in str(caught.value)
