"""`meshmend show` draws the plan that `plan` and `simulate` use, of a mesh or of a file."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshmend import Mesh, load_plan, plan
from meshmend.cli.main import run_line
from meshmend.planning.plan import fastest_trees

HOLE = ["--mesh", "8x8", "--fail", "2x2@2,2"]
MESH = Mesh((8, 8)).without("2x2@2,2")

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def picture(path: Path, *arguments: str | Path) -> str:
    assert run_line(["show", *map(str, arguments), "-o", str(path)]) == 0
    text = path.read_text()
    ElementTree.fromstring(text)
    return " ".join(text.split())


@pytest.mark.parametrize("payload", ["100MB", "1MB"])
def test_the_trees_are_those_that_plan_and_simulate_use(
    payload: str, tmp_path: Path, capsys: Captured
) -> None:
    drawn = picture(tmp_path / "x.svg", *HOLE, "--algorithm", "trees", "--payload", payload)
    capsys.readouterr()
    made = fastest_trees(MESH, payload=payload)
    assert (
        run_line(["simulate", *HOLE, "--algorithm", "trees", "--payload", payload, "--json"]) == 0
    )
    priced = json.loads(capsys.readouterr().out)["results"][0]

    n_trees = made.schedule.n_chunks
    assert f"{n_trees} spanning trees on 8x8 less 2x2@2,2" in drawn
    assert f"more than {made.channel_loads.max():.3g} of the payload" in drawn
    assert priced["detail"].startswith(f"{n_trees} trees of depth")
    assert priced["time_s"] == pytest.approx(made.predicted().time_s)


def test_a_plan_file_is_drawn_as_the_algorithm_that_made_it(
    tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "a plan.json"
    for algorithm in ("trees", "ft-two-d", "rank-ring"):
        plan(MESH, algorithm).save(file)
        of_file = picture(tmp_path / "file.svg", file)
        if algorithm != "trees":  # a command looks for the fastest ones
            assert of_file == picture(tmp_path / "named.svg", *HOLE, "--algorithm", algorithm)
        assert "8x8 less 2x2@2,2" in picture(tmp_path / "load.svg", file, "--load")
    assert load_plan(file).mesh == MESH


def test_a_rank_ring_follows_its_routes(tmp_path: Path, capsys: Captured) -> None:
    drawn = picture(tmp_path / "x.svg", "--mesh", "4x4", "--algorithm", "rank-ring")

    ranks = plan(Mesh((4, 4)), "rank-ring")
    n_hops = sum(
        len(ranks.placement.routes.path(ranks.placement.mesh, rank, (rank + 1) % 16)) - 1
        for rank in range(16)
    )
    assert n_hops > 16
    assert drawn.count('class="hop"') == n_hops


def test_pictures_of_loads_have_one_scale_unless_one_is_given(
    tmp_path: Path, capsys: Captured
) -> None:
    for algorithm in ("trees", "ring-1d"):
        drawn = picture(tmp_path / "x.svg", *HOLE, "--algorithm", algorithm, "--load")
        assert ">1 × the payload, per directed link<" in drawn.replace("  ", " ")
    drawn = picture(
        tmp_path / "x.svg", *HOLE, "--algorithm", "trees", "--load", "--darkest", "0.25"
    )
    assert "0.25 and more × the payload" in drawn.replace("  ", " ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("show", "needs --mesh RxC or a plan file, but got neither"),
        ("show plan.json --mesh 4x4", "needs --mesh RxC or a plan file, but got both"),
        ("show plan.json --algorithm trees -o x.svg", "has its own algorithm"),
        ("show plan.json --fail 2x2@0,0 -o x.svg", "--fail, --slow and --wrap need --mesh"),
        ("show plan.json --load", "--load needs -o FILE.svg"),
        ("show nowhere.json", "cannot read the plan nowhere.json"),
        ("show --mesh 4x4 --algorithm trees", "--algorithm needs -o FILE.svg"),
        ("show --mesh 4x4 --darkest 1", "--darkest needs --load"),
        ("show --mesh 4x4 --algorithm trees --payload 10mb -o x.svg", "did you mean 10MB"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    line: str, said: str, capsys: Captured
) -> None:
    assert run_line(line.split()) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert said in message


def test_a_route_around_a_hole_is_printed(capsys: Captured) -> None:
    line = ["show", "--mesh", "4x4", "--fail", "2x2@1,1", "--route", "1,0-1,3"]

    assert run_line(line) == 0

    assert "route        1,0 0,0 0,1 0,2 0,3 1,3" in capsys.readouterr().out
