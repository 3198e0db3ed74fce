"""Plans for links of unequal speed: proved, near the weighted limit, and no worse if one mends."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from meshmend.cli.main import run_line
from meshmend.planning.plan import equal_links_plan, load_plan, plan
from meshmend.schedule.table import Collective
from meshmend.topology.failures import Link, SlowLink
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.trees.rooted_trees import rooted_chunks_each, rooted_packing
from meshmend.trees.tree_counts import least_load
from meshmend.trees.tree_packing import tree_packing
from strategies import with_slow_links

Captured = pytest.CaptureFixture[str]
TORUS = Mesh((8, 4), (True, True))
SLOW = parse_mesh("4x4", slow=["link:0,0-0,1=0.25"])


def link_loads(mesh: Mesh, parents: NDArray[np.int32]) -> dict[Link, int]:
    """How many trees use each link, counted one by one."""
    loads = {Link(mesh.live[one], mesh.live[other]): 0 for one, other in mesh.links.tolist()}
    for row in parents.tolist():
        for rank, parent in enumerate(row):
            if parent >= 0:
                loads[Link.between(mesh.live[rank], mesh.live[parent])] += 1
    return loads


@pytest.mark.parametrize("seed", range(4))
def test_trees_load_a_slow_link_so_much_less_as_it_is_slower(seed: int) -> None:
    mesh = with_slow_links(TORUS, seed, of=6)
    speed_of = {each.link: each.speed for each in mesh.slow}

    packing = tree_packing(mesh, n_trees=20)

    least = least_load(mesh_figures(mesh), 20)
    for link, load in link_loads(mesh, packing.parents).items():
        assert load <= (least + 1) * speed_of.get(link, 1.0) + 1e-9
    slowest = packing.n_trees * packing.slowest_load(mesh, up_alone=False)
    assert least - 1 < slowest <= least + 1


def test_owners_load_the_channels_of_a_slow_link_less() -> None:
    mesh = TORUS.slowed("link:0,0-0,1=0.25", "link:2,1-3,1=0.5")
    each = rooted_chunks_each(mesh, both_ways=False)

    packing = rooted_packing(mesh, n_trees=each * mesh.n_live, both_ways=False)

    fewest = each * 31 / min(mesh_figures(mesh).capacities)
    assert packing.slowest_load(mesh, up_alone=True) * packing.n_trees <= 1.15 * fewest


@pytest.mark.parametrize(
    "collective", [each for each in Collective if each is not Collective.ALL_TO_ALL]
)
def test_a_plan_for_slow_links_is_proved_and_near_the_limit(collective: Collective) -> None:
    mesh = TORUS.slowed("link:0,0-0,1=0.25", "link:2,1-3,1=0.5", "link:5,0-5,3=0.75")

    made = plan(mesh, collective=collective)

    assert made.proof.method == "exact"
    assert made.predicted().time_s <= 1.15 * made.limit().time_s
    assert made.limit().time_s > plan(TORUS, collective=collective).limit().time_s


def test_the_plan_that_knows_the_speeds_beats_the_one_that_does_not() -> None:
    known, unknown = plan(SLOW), equal_links_plan(SLOW)

    assert unknown.schedule.n_rows == plan(replace(SLOW, slow=frozenset())).schedule.n_rows
    assert unknown.predicted().time_s > 1.8 * known.predicted().time_s
    assert known.predicted().time_s < 1.1 * known.limit().time_s


def test_for_a_short_payload_trees_that_ignore_speeds_may_be_faster_and_are_taken() -> None:
    slow = ["link:0,1-4,1=0.365", "link:1,1-2,1=0.562", "link:3,0-3,1=0.535"]
    mesh = parse_mesh("5x2", wrap="all", fail=["2,0"], slow=slow)

    known, unknown = plan(mesh, payload="100KB"), equal_links_plan(mesh, payload="100KB")

    assert known.predicted().time_s <= 1.01 * unknown.predicted().time_s


def test_tiles_avoid_a_slow_link() -> None:
    mesh = Mesh((8, 4)).slowed("link:3,0-4,0=0.25")

    made = plan(mesh, tile="2x2", payload="100MB")

    assert made.predicted().time_s <= 1.25 * made.limit().time_s


@pytest.mark.parametrize(
    "speed", [0.25, 0.8, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.5, 0.95))]
)
def test_a_link_that_gets_faster_makes_no_plan_slower(speed: float) -> None:
    link = SlowLink(Link((0, 0), (0, 1)), speed)
    before = plan(TORUS.slowed(link, "link:4,1-4,2=0.4"))
    after = plan(TORUS.slowed(replace(link, speed=(1 + speed) / 2), "link:4,1-4,2=0.4"))

    assert after.predicted().time_s <= 1.02 * before.predicted().time_s


def test_a_plan_file_keeps_the_speeds(tmp_path: Path, capsys: Captured) -> None:
    path = str(tmp_path / "plan.json")
    line = ["plan", "--mesh", "4x4", "--slow", "link:0,0-0,1=0.25", "-o", path, "--json"]

    assert run_line(line) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["limit_s"] == pytest.approx(100e6 / 70e9 / 1.25, rel=0.01)
    assert load_plan(path).mesh == SLOW
    assert run_line(["verify", path, "--mesh", "4x4", "--slow", "link:0,0-0,1=0.25"]) == 0
    assert run_line(["verify", path, "--mesh", "4x4"]) == 2
    assert "is a plan for the mesh 4x4 slow link:0,0-0,1=0.25" in capsys.readouterr().err


def test_simulate_says_the_limit_with_speeds(capsys: Captured) -> None:
    line = ["simulate", "--mesh", "4x4", "--algorithm", "auto,ring-1d", "--json"]

    assert run_line([*line, "--slow", "link:0,0-0,1=0.25"]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert run_line(line) == 0
    full = json.loads(capsys.readouterr().out)

    assert slow["limit_s"] == pytest.approx(full["limit_s"] * 1.6 / 1.25, rel=0.01)
    times = {row["algorithm"]: row["time_s"] for row in slow["results"]}
    equal = {row["algorithm"]: row["time_s"] for row in full["results"]}
    assert times["ring-1d"] > 3 * equal["ring-1d"]
    assert times["auto"] < 1.1 * slow["limit_s"]


def test_show_draws_slow_links(tmp_path: Path, capsys: Captured) -> None:
    line = ["show", "--mesh", "2x2", "--slow", "link:0,0-0,1=0.25", "--slow", "link:0,0-1,0=0.5"]
    path = tmp_path / "mesh.svg"

    assert run_line([*line, "-o", str(path)]) == 0
    assert capsys.readouterr().out.startswith("o~o\n: |\no-o\n")
    drawn = path.read_text()
    assert drawn.count('class="link slow"') == 2
    assert "link:0,0-0,1: 0.25 of the bandwidth" in drawn


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        ("link:0,0-0,1=2", "to 1, but got 2.0; 1 is the full bandwidth"),
        ("link:0,0-1,1=0.5", "Mesh 4x4 has no link:0,0-1,1"),
        ("0,0=0.5", "--slow cannot read '0,0=0.5'"),
    ],
)
def test_bad_speeds_are_refused_in_one_line(slow: str, words: str, capsys: Captured) -> None:
    assert run_line(["plan", "--mesh", "4x4", "--slow", slow]) == 2
    assert words in capsys.readouterr().err
